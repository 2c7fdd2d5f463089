"""SGLang's plugin where SGLang is not: whatever is too old or set wrongly is one sentence. See engines/ too."""

from __future__ import annotations

import importlib.metadata
import logging
import subprocess
import sys

import pytest

import penstock
from penstock.integrations import sglang
from penstock.integrations.shared import plugin
from penstock.integrations.shared.extra_config import ExtraConfig


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> object:
    """Makes an SGLang seem to be installed, or none."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(plugin, "_warned", set())

    def pretend(number: tuple[int, ...]) -> None:
        monkeypatch.setattr(plugin.Plugin, "version", lambda _: number)
        # As if it could not be imported, whatever there is.
        monkeypatch.setitem(sys.modules, "sglang", None)

    return pretend


def test_an_engine_that_is_too_old_or_not_whole_goes_on_without_a_word_above_debug(
    version, caplog: pytest.LogCaptureFixture
) -> None:
    version((0, 5, 12))
    sglang.register()
    version((0, 5, 23))
    sglang.register()
    old, broken = caplog.records
    assert "SGLang 0.5.12 is too old for --load-format penstock, which needs 0.5.20 or newer" in old.message
    assert "SGLang: --load-format penstock is not available: ModuleNotFoundError" in broken.message
    assert old.levelno == broken.levelno == logging.DEBUG


@pytest.mark.parametrize("number", [(0, 5, 24), (0, 6), (1, 0, 0)])
def test_a_newer_engine_gets_no_word_until_the_format_is_used_and_then_one_warning(
    version, caplog: pytest.LogCaptureFixture, number
) -> None:
    version(number)
    sglang.PLUGIN.register(lambda: None)
    assert caplog.records == []
    sglang.PLUGIN.warn_if_untried()
    sglang.PLUGIN.warn_if_untried()
    assert [(record.levelno, "newer" in record.message) for record in caplog.records] == [(logging.WARNING, True)]


def test_the_numbers_of_a_version_are_read_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.5.15.post1")
    assert sglang.PLUGIN.version() == (0, 5, 15)
    assert sglang.PLUGIN.described() == "SGLang 0.5.15"


def test_importing_the_plugin_imports_neither_engine_nor_torch() -> None:
    code = (
        "import sys, penstock.integrations.sglang\nprint([name for name in ('sglang', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_sglang_finds_the_plugin_by_its_entry_point() -> None:
    [point] = importlib.metadata.entry_points(group="sglang.srt.plugins", name="penstock")
    assert point.load() is sglang.register


def test_settings_are_checked() -> None:
    assert ExtraConfig.of({}) == ExtraConfig()
    assert ExtraConfig.of({}).share is None
    assert ExtraConfig.of({"share": True}).share is True
    assert ExtraConfig.of({"record": False, "readers": 3, "cache": "use"}).load_options().readers == 3
    assert ExtraConfig.of({"window_bytes": "1GiB", "block_bytes": 65536}).load_options().window_bytes == 1 << 30
    for wrong, words in (
        (
            {"readrs": 1},
            "does not know 'readrs'. It knows block_bytes, cache, readers, record, share",
        ),
        # vLLM's alone.
        ({"enable_weights_track": True}, "does not know 'enable_weights_track'"),
        ({"readers": "3"}, "'readers' must be of type int, not '3'"),
        ({"cache": "sometimes"}, "sometimes"),
        ([], "must be a dict"),
    ):
        with pytest.raises(penstock.ConfigError, match=words):
            ExtraConfig.of(wrong)
