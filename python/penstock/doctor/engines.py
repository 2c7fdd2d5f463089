"""Which libraries are installed that Penstock works in, and whether they would use it if they were asked to.

Everything is read from the metadata of installed distributions: no engine is imported.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping
from importlib import metadata

from penstock.doctor.facts import Engine
from penstock.integrations import sglang, vllm
from penstock.integrations.shared.plugin import Plugin
from penstock.optional import MINIMUM, dotted
from penstock.patches import DISABLE, is_disabled

_PLUGINS: list[tuple[Plugin, str, str]] = [
    (vllm.PLUGIN, "vllm.general_plugins", "VLLM_PLUGINS"),
    (sglang.PLUGIN, "sglang.srt.plugins", "SGLANG_PLUGINS"),
]
"""Each with the group of its entry points, and the variable that may leave plugins out."""
_LIBRARIES = {
    "transformers": "penstock.integrations.transformers.from_pretrained(…)",
    "diffusers": "penstock.integrations.diffusers.from_pretrained(…)",
    "peft": "penstock.integrations.peft.from_pretrained(…)",
    "safetensors": "within penstock.patch_safetensors()",
}
_OWN = "penstock-loader"
_RUNAI = ("penstock-runai-model-streamer", "runai-model-streamer")
_SHOWN = ("torch", "numpy", "huggingface-hub", "boto3", "google-auth")


def engines(environment: Mapping[str, str], path: list[str] | None = None) -> list[Engine]:
    """The engines that are installed.

    Args:
        environment: the variables of the process.
        path: directories of distributions, instead of ``sys.path``.
    """
    installed = _installed(path)
    found = [engine for plugin in _PLUGINS if (engine := _with_plugin(*plugin, installed, environment, path))]
    for name, how in _LIBRARIES.items():
        if version := installed.get(name):
            wanted = dotted(MINIMUM[name])
            old = _numbers(version) < MINIMUM[name]
            why = f"{name} {version} is too old" if old else None
            found.append(Engine(name, version, how, why, f"pip install '{name}>={wanted}'" if old else None))
    ours, theirs = (installed.get(name) for name in _RUNAI)
    if ours:
        why = remedy = None
        if theirs:
            why = f"{_RUNAI[1]} {theirs} is installed too: both own the import name runai_model_streamer"
            remedy = f"pip uninstall -y {' '.join(_RUNAI)}; pip install {_RUNAI[0]}"
        found.append(Engine("runai_model_streamer", ours, "--load-format runai_streamer", why, remedy))
    return found


def versions(path: list[str] | None = None) -> dict[str, str]:
    """The versions that a ticket begins with."""
    installed = _installed(path)
    found = {"python": platform.python_version(), _OWN: installed.get(_OWN, "not installed")}
    return found | {name: installed[name] for name in _SHOWN if name in installed}


def _installed(path: list[str] | None) -> dict[str, str]:
    """Versions by normal name; of a name that is there twice, the one that is imported."""
    found: dict[str, str] = {}
    for distribution in _distributions(path):
        name = distribution.metadata["Name"] if distribution.metadata else None
        if name:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
    return found


def _distributions(path: list[str] | None) -> Iterable[metadata.Distribution]:
    return metadata.distributions() if path is None else metadata.distributions(path=path)


def _with_plugin(
    plugin: Plugin,
    group: str,
    variable: str,
    installed: Mapping[str, str],
    environment: Mapping[str, str],
    path: list[str] | None,
) -> Engine | None:
    version = next((installed[name] for name in plugin.distributions if name in installed), None)
    if version is None:
        return None
    why, remedy = None, None
    chosen = environment.get(variable)
    if not any(entry.name == "penstock" and entry.group == group for entry in _entry_points(path)):
        why = f"no entry point of the group {group} leads to Penstock"
        remedy = (
            f"Install {_OWN} with pip into the environment of {plugin.engine}: a copied directory has no entry points"
        )
    elif is_disabled(environment):
        why, remedy = f"{DISABLE} is set", f"Unset {DISABLE}"
    elif chosen is not None and "penstock" not in chosen.split(","):
        why, remedy = f"{variable} leaves penstock out", f"Add penstock to {variable}, or unset it"
    elif _numbers(version) < plugin.oldest:
        why = f"{plugin.engine} {version} is older than {dotted(plugin.oldest)}"
        remedy = f"Update {plugin.engine}"
    return Engine(plugin.engine, version, "--load-format penstock", why, remedy)


def _entry_points(path: list[str] | None) -> Iterable[metadata.EntryPoint]:
    return (entry for distribution in _distributions(path) for entry in distribution.entry_points)


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
