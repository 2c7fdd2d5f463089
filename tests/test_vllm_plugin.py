"""vLLM's plugin where vLLM is not: what is too old or set wrongly is one clear sentence. See engines/ too."""

from __future__ import annotations

import logging
import sys

import pytest

import penstock
from penstock.integrations import vllm
from penstock.integrations.shared import plugin
from penstock.integrations.vllm.extra_config import VllmExtraConfig


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> object:
    """Makes a vLLM seem to be installed, or none."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(plugin, "_warned", set())

    def pretend(number: tuple[int, int]) -> None:
        monkeypatch.setattr(plugin.Plugin, "version", lambda _: number)
        # As if it could not be imported, whatever there is.
        monkeypatch.setitem(sys.modules, "vllm", None)
        for name in ("loader", "stores"):
            monkeypatch.delitem(sys.modules, f"penstock.integrations.vllm.{name}", raising=False)
            monkeypatch.delattr(vllm, name, raising=False)

    return pretend


def test_an_engine_that_is_too_old_or_not_whole_goes_on_without_a_word_above_debug(
    version, caplog: pytest.LogCaptureFixture
) -> None:
    version((0, 9))
    vllm.register()
    version((0, 32))
    vllm.register()
    old, broken = caplog.records
    assert "vLLM 0.9 is too old" in old.message
    assert "vLLM: --load-format penstock is not available: ModuleNotFoundError" in broken.message
    assert old.levelno == broken.levelno == logging.DEBUG


@pytest.mark.parametrize("error", [TypeError("a new argument"), KeyError("x"), OSError(2, "x"), RuntimeError("x")])
def test_whatever_registering_raises_does_not_reach_the_engine(
    version, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fails() -> None:
        raise error

    version((0, 32))
    vllm.PLUGIN.register(fails)
    [record] = caplog.records
    assert record.levelno == logging.DEBUG
    assert type(error).__name__ in record.message


def test_a_newer_engine_gets_no_word_until_the_format_is_used_and_then_one_warning(
    version, caplog: pytest.LogCaptureFixture
) -> None:
    version((1, 0))
    vllm.PLUGIN.register(lambda: None)
    assert caplog.records == []
    vllm.PLUGIN.warn_if_untried()
    vllm.PLUGIN.warn_if_untried()
    assert [(record.levelno, "newer" in record.message) for record in caplog.records] == [(logging.WARNING, True)]


def test_settings_are_checked() -> None:
    assert VllmExtraConfig.of({}) == VllmExtraConfig()
    assert VllmExtraConfig.of({"record": False, "readers": 3, "cache": "use"}).load_options().readers == 3
    for wrong, words in (
        ({"readrs": 1, "x": 2}, "does not know 'readrs', 'x'. It knows block_bytes, cache, enable_weights_track"),
        ({"readers": "3"}, "'readers' must be of type int, not '3'"),
        ({"record": 1}, "'record' must be of type bool"),
        ({"cache": "sometimes"}, "sometimes"),
        ([], "must be a dict"),
    ):
        with pytest.raises(penstock.ConfigError, match=words):
            VllmExtraConfig.of(wrong)
