"""vLLM's plugin where vLLM is not: what is absent, too old or set wrongly is one clear sentence. See engines/ too."""

from __future__ import annotations

import importlib.util
import logging
import sys

import pytest

import penstock
from penstock.engines import plugin, vllm
from penstock.engines.vllm.options import Options


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> object:
    """Makes a vLLM seem to be installed, or none."""

    def pretend(number: tuple[int, int] | None, installed: bool = True) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: object() if installed else None)
        monkeypatch.setattr(plugin.Plugin, "version", lambda _: number)
        # As if it could not be imported, whatever there is.
        monkeypatch.setitem(sys.modules, "vllm", None)
        for name in ("early", "loader", "stores"):
            monkeypatch.delitem(sys.modules, f"penstock.engines.vllm.{name}", raising=False)
            monkeypatch.delattr(vllm, name, raising=False)

    return pretend


def test_an_absent_engine_is_one_sentence(version, caplog: pytest.LogCaptureFixture) -> None:
    version(None, installed=False)
    with pytest.raises(penstock.MissingDependencyError, match=r"needs vLLM, which is not installed\. Install it: pip"):
        vllm.PLUGIN.check()
    vllm.register()
    [record] = caplog.records
    assert record.exc_info is None
    assert "pip install vllm" in record.message


def test_an_engine_that_is_too_old_or_not_whole_is_one_sentence(version, caplog: pytest.LogCaptureFixture) -> None:
    version((0, 9))
    vllm.register()
    version((0, 32))
    vllm.register()
    old, broken = caplog.records
    assert "vLLM 0.9 is too old" in old.message
    assert "vLLM 0.32: --load-format penstock is not available" in broken.message
    assert old.exc_info is None
    assert broken.exc_info is None


def test_a_newer_engine_is_tried_with_a_warning(version, caplog: pytest.LogCaptureFixture) -> None:
    version((1, 0))
    vllm.PLUGIN.check()
    assert [(record.levelno, "newer" in record.message) for record in caplog.records] == [(logging.WARNING, True)]


def test_settings_are_checked() -> None:
    assert Options.of({}) == Options()
    assert Options.of({"record": False, "readers": 3, "cache": "use"}).config().readers == 3
    for wrong, words in (
        ({"readrs": 1, "x": 2}, "does not know 'readrs', 'x'. It knows block_bytes, cache, enable_weights_track"),
        ({"readers": "3"}, "'readers' must be of type int, not '3'"),
        ({"record": 1}, "'record' must be of type bool"),
        ({"cache": "sometimes"}, "sometimes"),
        ([], "must be a dict"),
    ):
        with pytest.raises(penstock.ConfigError, match=words):
            Options.of(wrong)
