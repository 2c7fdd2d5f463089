"""The ComfyUI example: its loader with real files, its nodes as far as that goes without ComfyUI.

ComfyUI is no package. What stands for it here notes which of its functions the nodes call, and with what; that these
functions exist and take these arguments was checked in ComfyUI's sources (docs/engines/comfyui.md).
"""

from __future__ import annotations

import enum
import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from conftest import assert_bits, drop_cache

pytestmark = pytest.mark.libraries

torch = pytest.importorskip("torch")
EXAMPLE = Path(__file__).parent.parent / "examples" / "comfyui"


class Comfy(types.ModuleType):
    """What the nodes use of ``comfy.sd``."""

    CLIPType = enum.Enum("CLIPType", "STABLE_DIFFUSION FLUX")

    def __init__(self) -> None:
        super().__init__("comfy.sd")
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []
        self.knows = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def noted(*arguments: Any, **keywords: Any) -> Any:
            self.calls.append((name, arguments, keywords))
            if name == "VAE":
                return types.SimpleNamespace(throw_exception_if_invalid=lambda: None, name="vae")
            if not self.knows:
                return None
            return ("model", "clip", "vae", "vision") if "guess" in name else name

        return noted


@pytest.fixture
def comfy(mixed: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Comfy]:
    path, _ = mixed
    sd = Comfy()
    package = types.ModuleType("comfy")
    package.sd = sd  # type: ignore[attr-defined]
    folders = types.ModuleType("folder_paths")
    folders.get_filename_list = lambda folder: [f"{folder}.safetensors"]  # type: ignore[attr-defined]
    folders.get_full_path = lambda folder, name: str(path) if name == f"{folder}.safetensors" else None  # type: ignore[attr-defined]
    folders.get_folder_paths = lambda folder: [f"/{folder}"]  # type: ignore[attr-defined]
    for name, module in {"comfy": package, "comfy.sd": sd, "folder_paths": folders}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield sd
    for name in [name for name in sys.modules if name.partition(".")[0] == "penstock_nodes"]:
        del sys.modules[name]


@pytest.fixture
def nodes(comfy: Comfy) -> dict[str, Any]:
    return importlib.import_module("penstock_nodes").NODE_CLASS_MAPPINGS


def run(nodes: dict[str, Any], node_name: str, /, **inputs: Any) -> Any:
    node = nodes[node_name]()
    return getattr(node, node.FUNCTION)(**inputs)


@pytest.mark.usefixtures("comfy")
def test_local_files_are_views_with_the_files_bits_and_metadata(mixed: Any) -> None:
    path, tensors = mixed
    weights = importlib.import_module("penstock_nodes.weights")
    drop_cache(path)
    state, metadata = weights.load(str(path))
    assert_bits(state, tensors)
    assert metadata == {"format": "pt"}
    spans = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if path.name in line
    ]
    address = state["large"].data_ptr()
    assert any(int(start, 16) <= address < int(end, 16) for start, end in spans)


def test_nodes_are_what_comfyui_looks_for(nodes: dict[str, Any]) -> None:
    names = importlib.import_module("penstock_nodes").NODE_DISPLAY_NAME_MAPPINGS
    assert names.keys() == nodes.keys()
    for node in nodes.values():
        inputs = node.INPUT_TYPES()
        assert set(inputs) <= {"required", "optional"}
        assert inputs["optional"]["url"][0] == "STRING"
        assert callable(getattr(node, node.FUNCTION))
        assert node.RETURN_TYPES
        assert node.CATEGORY == "loaders/penstock"


CALLS = {
    "PenstockCheckpoint": ("checkpoints", "load_state_dict_guess_config", ("model", "clip", "vae"), {}),
    "PenstockDiffusionModel": (
        "diffusion_models",
        "load_diffusion_model_state_dict",
        ("load_diffusion_model_state_dict",),
        {},
    ),
    "PenstockTextEncoder": (
        "text_encoders",
        "load_text_encoder_state_dicts",
        ("load_text_encoder_state_dicts",),
        {"kind": "flux"},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_node_hands_comfyui_the_weights(mixed: Any, comfy: Comfy, nodes: dict[str, Any], name: str) -> None:
    _, tensors = mixed
    folder, function, results, inputs = CALLS[name]
    assert run(nodes, name, name=f"{folder}.safetensors", **inputs) == results
    ((called, arguments, keywords),) = comfy.calls
    assert called == function
    state = arguments[0][0] if isinstance(arguments[0], list) else arguments[0]
    assert_bits(state, tensors)
    if name == "PenstockTextEncoder":
        assert keywords["clip_type"] is Comfy.CLIPType.FLUX
    else:
        assert keywords["metadata"] == {"format": "pt"}


def test_vae_and_lora(mixed: Any, comfy: Comfy, nodes: dict[str, Any]) -> None:
    _, tensors = mixed
    assert run(nodes, "PenstockVAE", name="vae.safetensors")[0].name == "vae"
    assert_bits(comfy.calls[0][2]["sd"], tensors)
    strengths = {"model_strength": 0.5, "clip_strength": 0.25}
    assert run(nodes, "PenstockLora", model="m", clip="c", name="loras.safetensors", **strengths)
    _, arguments, _ = comfy.calls[1]
    assert (arguments[:2], arguments[3:]) == (("m", "c"), (0.5, 0.25))
    assert_bits(arguments[2], tensors)


def test_a_url_wins_over_the_chosen_file(mixed: Any, comfy: Comfy, nodes: dict[str, Any]) -> None:
    path, tensors = mixed
    run(nodes, "PenstockDiffusionModel", name="(none: the URL)", url=f" {path} ")
    assert_bits(comfy.calls[0][1][0], tensors)


def test_what_cannot_be_loaded_says_so(mixed: Any, comfy: Comfy, nodes: dict[str, Any]) -> None:
    path, _ = mixed
    with pytest.raises(ValueError, match="no URL is given"):
        run(nodes, "PenstockVAE", name="(none: the URL)")
    with pytest.raises(penstock.LocationNotFoundError, match="absent"):
        run(nodes, "PenstockVAE", name="", url="/absent.safetensors")
    comfy.knows = False
    with pytest.raises(RuntimeError, match=rf"{path.name}.*does not recognise"):
        run(nodes, "PenstockDiffusionModel", name="diffusion_models.safetensors")
