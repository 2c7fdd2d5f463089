"""Image models that are one file: recognised, split, and the same as diffusers reads them. Marked ``libraries``."""

from __future__ import annotations

import math
import shutil
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from diffusers.loaders import single_file_model

import penstock
import single_files
from penstock.errors import ConfigError, LocationNotFoundError
from penstock.fp8 import convert
from penstock.pool import ModelPool
from penstock.pool.single_file.kinds import variant_of
from pool_books import check_books
from tiny_models import QUIET, assert_same_model

pytestmark = [pytest.mark.libraries, *map(pytest.mark.filterwarnings, QUIET)]


class File(NamedTuple):
    model: single_files.Model
    path: Path
    config: Path

    def theirs(self) -> Any:
        """The pipeline, as diffusers reads it."""
        cls = type(self.model.pipeline)
        return cls.from_single_file(str(self.path), config=str(self.config), torch_dtype=torch.bfloat16)

    def tensors(self) -> dict[str, torch.Tensor]:
        return safetensors_torch.load_file(self.path)


@pytest.fixture(scope="module")
def _narrow_flux() -> Iterator[None]:
    """diffusers' conversion of FLUX has the width of the real one in it."""
    known = single_file_model.SINGLE_FILE_LOADABLE_CLASSES["FluxTransformer2DModel"]
    real = known["checkpoint_mapping_fn"]
    constants = tuple(single_files.FLUX_WIDTH if one == 3072 else one for one in real.__code__.co_consts)
    assert constants != real.__code__.co_consts
    narrow = types.FunctionType(real.__code__.replace(co_consts=constants), real.__globals__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(known, "checkpoint_mapping_fn", narrow)
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, _narrow_flux: None) -> dict[str, File]:
    found = {}
    for make in single_files.ALL:
        root = tmp_path_factory.mktemp(make.__name__)
        model = make(root)
        found[make.__name__] = File(model, *model.save(root))
    return found


@pytest.fixture
def pool() -> Iterator[ModelPool]:
    with ModelPool("cpu", host_budget=1 << 30, device_budget=1 << 30) as made:
        yield made
        check_books(made)


def modules(pipeline: Any) -> dict[str, torch.nn.Module]:
    return {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}


def settings(pipeline: Any) -> dict[str, Any]:
    return {name: value for name, value in pipeline.config.items() if name != "_name_or_path"}


@pytest.mark.parametrize("name", [make.__name__ for make in single_files.ALL])
@pytest.mark.parametrize("to", ["host", "device"])
def test_a_file_becomes_the_pipeline_that_diffusers_makes_of_it(
    pool: ModelPool, files: dict[str, File], name: str, to: str
) -> None:
    file = files[name]
    pool.register(name, file.path, config=file.config)
    theirs = file.theirs()
    pool.prefetch(name, to=to).result()
    with pool.use(name) as lease:
        ours = lease.wait()
        assert type(ours) is type(theirs)
        assert settings(ours) == settings(theirs)
        assert modules(ours).keys() == modules(theirs).keys() == set(lease)
        for part, module in modules(theirs).items():
            # It leaves T5 in training, and its embedding there twice.
            getattr(module, "tie_weights", lambda: None)()
            assert_same_model(getattr(ours, part), module.eval())
    assert variant_of(penstock.open(file.path), "") == file.model.kind


def test_a_pipeline_of_a_file_makes_the_same_image(pool: ModelPool, files: dict[str, File]) -> None:
    def image(pipeline: Any) -> Any:
        pipeline.set_progress_bar_config(disable=True)
        noise = torch.Generator().manual_seed(0)
        return pipeline("a b", num_inference_steps=2, height=16, width=16, generator=noise, output_type="np").images[0]

    file = files["sd1"]
    pool.register("a", file.path, config=file.config, dtype=torch.float32)
    with pool.use("a") as lease:
        assert (image(lease.wait()) == image(file.theirs().to(torch.float32))).all()


def test_what_two_files_have_alike_is_one(pool: ModelPool, files: dict[str, File], tmp_path: Path) -> None:
    tuned = files["sd1"].tensors()
    for name, tensor in tuned.items():
        if name.startswith("model.diffusion_model."):
            tuned[name] = tensor + 1
    safetensors_torch.save_file(tuned, tmp_path / "tuned.safetensors")
    for name, path in (
        ("a", files["sd1"].path),
        ("again", files["sd1"].path),
        ("tuned", tmp_path / "tuned.safetensors"),
    ):
        pool.register(name, path, config=files["sd1"].config)
        pool.prefetch(name, to="host").result()
    all_of_them = ("a", "again", "tuned")
    shared: dict[str, tuple[str, ...]] = {}
    until = time.monotonic() + 60
    while shared.get("vae") != all_of_them or shared.get("text_encoder") != all_of_them:
        # Masters are compared after they have come.
        assert time.monotonic() < until, shared
        time.sleep(0.01)
        shared = {one.component: one.used_by for one in pool.explain("a").components}
    assert shared["unet"] == ("a", "again")


def test_a_file_is_quantised_as_what_was_read_of_it_is(pool: ModelPool, files: dict[str, File]) -> None:
    file = files["flux"]
    pool.register("a", file.path, config=file.config, quantize={"text_encoder_2": "fp8", "transformer": "fp8"})
    theirs = file.theirs()
    with pool.use("a") as lease:
        for part in ("text_encoder_2", "transformer"):
            errors = convert(getattr(theirs, part))
            lease[part]
            found = {one.component: one for one in pool.explain("a").components}[part]
            assert found.errors == errors
            ours, expected = lease[part].state_dict(), getattr(theirs, part).state_dict()
            assert ours.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_file_is_streamed_to_float8_in_bounded_memory(files: dict[str, File], tmp_path: Path) -> None:
    file = files["sd3"]
    small = penstock.open(file.path, options=penstock.LoadOptions(window_bytes=1 << 12))
    with ModelPool("cpu", host_budget=1 << 30, device_budget=1 << 30) as pool:
        for name, location in (("a", file.path), ("b", small)):
            pool.register(
                name, location, config=file.config, quantize={"transformer": "fp8"}, components=["transformer"]
            )
        states = []
        for name in "ab":
            with pool.use(name) as lease:
                states.append({of: tensor.clone() for of, tensor in lease["transformer"].state_dict().items()})
            pool.sleep(name, level=2)
        assert all(torch.equal(one.view(torch.uint8), states[1][of].view(torch.uint8)) for of, one in states[0].items())


def test_components_of_a_file_can_be_chosen(pool: ModelPool, files: dict[str, File]) -> None:
    file = files["sdxl"]
    pool.register("a", file.path, config=file.config, components=["vae", "text_encoder_2"])
    with pool.use("a") as lease:
        assert lease.wait() is lease
        assert set(lease) == {"vae", "text_encoder_2"}
        assert_same_model(lease["text_encoder_2"], file.theirs().text_encoder_2)
    with pytest.raises(ConfigError, match="no component 'transformer', only"):
        pool.register("b", file.path, config=file.config, components=["transformer"])


def test_a_transformer_alone_is_a_part_that_has_to_be_asked_for(
    pool: ModelPool, files: dict[str, File], tmp_path: Path
) -> None:
    file = files["flux"]
    # As its authors give it out: without the prefix of files that hold more.
    alone = {
        name.removeprefix(single_files.PREFIX): tensor
        for name, tensor in file.tensors().items()
        if name.startswith(single_files.PREFIX)
    }
    safetensors_torch.save_file(alone, tmp_path / "transformer.safetensors")
    with pytest.raises(ConfigError, match=r"holds transformer of .*flux-dev, and not its .*vae") as refused:
        pool.register("a", tmp_path / "transformer.safetensors", config=file.config)
    assert "components=['transformer']" in str(refused.value)
    assert list(pool) == []
    pool.register("a", tmp_path / "transformer.safetensors", config=file.config, components=["transformer"])
    with pool.use("a") as lease:
        assert_same_model(lease["transformer"], file.theirs().transformer)


# What is refused


def changed(file: File, root: Path, drop: str = "", **add: torch.Tensor) -> Path:
    """A file without the tensors whose names begin so, and with others."""
    tensors = {name: tensor for name, tensor in file.tensors().items() if not drop or not name.startswith(drop)}
    safetensors_torch.save_file(tensors | add, root / "changed.safetensors")
    return root / "changed.safetensors"


@pytest.mark.parametrize(
    ("name", "drop", "add", "says"),
    [
        ("sd1", "first_stage_model.", {}, "and not its vae"),
        ("sd1", "cond_stage_model.", {}, "and not its text_encoder"),
        ("sd3", "text_encoders.t5xxl.", {}, "and not its text_encoder_3"),
        ("sd1", "first_stage_model.decoder.", {}, "only a part of its vae: "),
        ("sd1", "model.diffusion_model.middle_block.1.", {}, "only a part of its unet: "),
        ("sdxl", "conditioner.embedders.1.model.transformer.resblocks.4", {}, "only a part of its text_encoder_2: "),
        ("flux", "model.diffusion_model.double_blocks.1.img_attn", {}, "its transformer is not that of"),
        ("sd1", "model.diffusion_model.", {}, "its architecture is unknown: .*first_stage_model.decoder… "),
        ("sd1", "cond_stage_model.", {"cond_stage_model.model.ln_final.weight": 1}, "those of another architecture"),
        ("sdxl", "", {"cond_stage_model.transformer.text_model.x": 1}, "those of another architecture"),
        ("sd1", "", {"double_blocks.0.img_attn.norm.key_norm.scale": 1}, "Stable Diffusion 1, 2 or XL and of FLUX"),
        ("flux", "", {"joint_blocks.0.x_block.attn.qkv.weight": 1}, "Stable Diffusion 3 and of FLUX"),
        ("sd1", "model.diffusion_model.output_blocks.11.", {}, "no variant that is known"),
    ],
)
def test_a_part_or_a_mixture_is_refused_and_what_it_holds_is_said(
    pool: ModelPool, files: dict[str, File], tmp_path: Path, name: str, drop: str, add: dict[str, int], says: str
) -> None:
    path = changed(files[name], tmp_path, drop, **{of: torch.zeros(size) for of, size in add.items()})
    with pytest.raises(ConfigError, match=says) as refused:
        pool.register("a", path, config=files[name].config)
    assert str(path) in str(refused.value)
    assert list(pool) == []


def test_a_file_of_something_else_is_refused(pool: ModelPool, tmp_path: Path) -> None:
    safetensors_torch.save_file({"model.layers.0.mlp.up_proj.weight": torch.zeros(2)}, tmp_path / "llm.safetensors")
    with pytest.raises(ConfigError, match=r"its architecture is unknown: model\.layers… \(1\)"):
        pool.register("a", tmp_path / "llm.safetensors")
    safetensors_torch.save_file({}, tmp_path / "empty.safetensors")
    with pytest.raises(ConfigError, match="no tensors"):
        pool.register("a", tmp_path / "empty.safetensors")


class Shape(NamedTuple):
    shape: tuple[int, ...]


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (
            {
                "joint_blocks.0.x_block.attn.qkv.weight": (4608, 1536),
                "joint_blocks.0.context_block.adaLN_modulation.1.bias": (9216,),
                "pos_embed": (1, 36864, 1536),
            },
            "sd3",
        ),
        (
            {
                "joint_blocks.0.x_block.attn.qkv.weight": (4608, 1536),
                "joint_blocks.0.context_block.adaLN_modulation.1.bias": (9216,),
                "pos_embed": (1, 147456, 1536),
            },
            "sd35_medium",
        ),
        ({"double_blocks.0.img_attn.norm.key_norm.scale": (128,), "img_in.weight": (3072, 64)}, "flux-schnell"),
        (
            {
                "double_blocks.0.img_attn.norm.key_norm.scale": (128,),
                "guidance_in.in_layer.bias": (3072,),
                "img_in.weight": (3072, 384),
            },
            "flux-fill",
        ),
    ],
)
def test_variants_are_told_by_names_and_shapes(names: dict[str, tuple[int, ...]], kind: str) -> None:
    assert variant_of({name: Shape(shape) for name, shape in names.items()}, "") == kind


def test_shapes_of_no_variant_are_refused() -> None:
    names = {
        "joint_blocks.0.x_block.attn.qkv.weight": Shape((4608, 1536)),
        "joint_blocks.0.context_block.adaLN_modulation.1.bias": Shape((9216,)),
        "pos_embed": Shape((1, 17, 1536)),
    }
    with pytest.raises(ConfigError, match="looks like Stable Diffusion 3"):
        variant_of(names, "a.safetensors")


def test_settings_of_another_model_are_refused(pool: ModelPool, files: dict[str, File]) -> None:
    with pytest.raises(ConfigError, match=r"not that of a model of the kind|only a part of"):
        pool.register("a", files["sdxl"].path, config=files["sd1"].config)
    with pytest.raises(penstock.DestinationError, match="size mismatch"):
        pool.register("a", files["sd1"].path, config=files["sd2"].config, components=["unet"])
    assert list(pool) == []


def test_arguments_that_do_not_belong_together_are_refused(pool: ModelPool, files: dict[str, File]) -> None:
    file = files["sd1"]
    with pytest.raises(ConfigError, match="build= belongs to"):
        pool.register("a", file.path, build={}, config=file.config)
    with pytest.raises(ConfigError, match="are for a single file"):
        pool.register("a", {"unet": file.path}, build={"unet": torch.nn.Identity}, config=file.config)
    with pytest.raises(ConfigError, match="not in build"):
        pool.register("a", {"unet": file.path})


# Settings


def test_settings_come_from_the_hugging_face_cache(
    pool: ModelPool, files: dict[str, File], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(LocationNotFoundError, match="config="):
        pool.register("a", files["sd1"].path)
    repository = tmp_path / "models--stable-diffusion-v1-5--stable-diffusion-v1-5"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(files["sd1"].config, repository / "snapshots" / ("0" * 40))
    pool.register("a", files["sd1"].path)
    with pool.use("a") as lease:
        assert_same_model(lease["unet"], files["sd1"].theirs().unet)


def test_a_directory_without_the_settings_of_a_pipeline_is_refused(
    pool: ModelPool, files: dict[str, File], tmp_path: Path
) -> None:
    file = files["sd1"]
    with pytest.raises(LocationNotFoundError, match=r"model_index\.json"):
        pool.register("a", file.path, config=tmp_path)
    shutil.copytree(file.config, tmp_path / "config")
    shutil.rmtree(tmp_path / "config" / "tokenizer")
    with pytest.raises(ConfigError, match="could not be put together"):
        pool.register("a", file.path, config=tmp_path / "config")
    pool.register("a", file.path, config=tmp_path / "config", components=["unet", "vae"])
    shutil.rmtree(tmp_path / "config" / "vae")
    with pytest.raises(ConfigError, match="settings of 'vae'"):
        pool.register("b", file.path, config=tmp_path / "config", components=["vae"])
    assert list(pool) == ["a"]


# Reading


def test_a_component_that_left_comes_back_from_the_file_as_it_was(files: dict[str, File]) -> None:
    file = files["sd1"]
    with ModelPool("cpu", host_budget=0, device_budget="1GiB") as pool:
        pool.register("a", file.path, config=file.config, components=["unet"])
        pool.switch("a")
        half = pool.explain("a").components[0].nbytes // 2
        for budget in (half, 0):
            # A part of it leaves, then all of it: there is no master.
            pool.resize(device=budget)
            pool.resize(device="1GiB")
            assert pool.explain("a").components[0].device_bytes <= budget
            with pool.use("a") as lease:
                assert_same_model(lease["unet"], file.theirs().unet)
        check_books(pool)


def elements(shape: tuple[int, ...], ranges: list[tuple[int, int]]) -> int:
    """Of a part of a tensor: rows, columns and so on from one to another."""
    return math.prod(end - start for start, end in ranges) * math.prod(shape[len(ranges) :])


def test_nothing_is_read_of_a_file_before_it_is_wanted_and_then_all_of_it_once(
    pool: ModelPool, files: dict[str, File], tmp_path: Path
) -> None:
    file = files["sdxl"]
    path = Path(shutil.copy(file.path, tmp_path / "copy.safetensors"))
    read: list[int] = []
    real = penstock.Checkpoint.core.fget
    checkpoint = penstock.open(path)
    with pytest.MonkeyPatch.context() as patch:

        class Core:
            def __init__(self, core: Any) -> None:
                self._core = core

            def __getattr__(self, name: str) -> Any:
                return getattr(self._core, name)

            def session_of_parts(self, wanted: list[Any], *rest: Any) -> Any:
                read.extend(elements(checkpoint[name].shape, ranges) for name, ranges in wanted)
                return self._core.session_of_parts(wanted, *rest)

        patch.setattr(penstock.Checkpoint, "core", property(lambda self: Core(real(self))))
        pool.register("a", checkpoint, config=file.config)
        assert read == []
        with pool.use("a") as lease:
            lease.wait()
    assert sum(read) == sum(elements(info.shape, []) for info in checkpoint.values())


def test_a_load_that_fails_leaves_exact_books(pool: ModelPool, files: dict[str, File], tmp_path: Path) -> None:
    file = files["sd1"]
    path = Path(shutil.copy(file.path, tmp_path / "copy.safetensors"))
    pool.register("a", path, config=file.config)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(penstock.PenstockError), pool.use("a") as lease:
        lease.wait()
    check_books(pool)
    assert pool.stats().device_bytes == pool.stats().host_bytes == 0
