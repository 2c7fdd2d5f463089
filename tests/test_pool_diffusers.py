"""Pipelines of diffusers in a pool: a, b and a again give the images that they give alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import penstock
from pool_books import check_books
from test_engine_diffusers import image, text_encoder, tokenizer, unet, vae
from tiny_models import QUIET, randomise

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings(*QUIET)]
PARTS = {"unet": unet, "vae": vae, "text_encoder": text_encoder}


@pytest.fixture
def pipelines(tmp_path: Path) -> list[Any]:
    """Two, whose text encoders and VAEs are equal, and whose UNets are not."""
    words = tokenizer(tmp_path / "tokenizer")
    shared = {"vae": randomise(vae()), "text_encoder": randomise(text_encoder())}
    made = []
    for scale in (1.0, 0.5):
        net = randomise(unet())
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(scale)
        made.append(
            diffusers.StableDiffusionPipeline(
                **copy.deepcopy(shared),
                unet=net,
                tokenizer=words,
                scheduler=diffusers.DDIMScheduler(),
                safety_checker=None,
                feature_extractor=None,
                requires_safety_checker=False,
            )
        )
    return made


def nbytes(*modules: torch.nn.Module) -> int:
    return sum(tensor.nbytes for module in modules for tensor in module.state_dict().values())


def test_adopted_pipelines_switch_and_share_what_is_equal(pipelines: list[Any]) -> None:
    expected = [image(pipeline) for pipeline in pipelines]
    assert not torch.equal(*expected)
    a, b = pipelines
    with penstock.ModelPool("cpu", host_budget="64MiB", device_budget="64MiB") as pool:
        pool.adopt("a", a)
        one = pool.stats().host_bytes
        pool.adopt("b", b)
        both = pool.stats().host_bytes
        assert one + nbytes(b.unet) <= both < one + nbytes(b.unet, b.vae), "the VAE and the text encoder are there once"
        assert pool.explain("b").components[0].used_by == ("a", "b")
        # Room for one.
        pool.resize(device=one)
        for number in (0, 1, 0):
            with pool.use("ab"[number]) as lease:
                pipeline = lease.wait()
                assert pipeline is pipelines[number]
                assert torch.equal(image(pipeline), expected[number])
            check_books(pool)
        # Room for both: nothing moves.
        pool.resize(device="64MiB")
        pool.switch("b")
        pool.switch("a")
        before = pool.stats().copied_bytes
        for number in (0, 1, 0):
            with pool.use("ab"[number]) as lease:
                assert torch.equal(image(lease.wait()), expected[number])
        assert pool.stats().copied_bytes == before


def test_a_pipeline_is_registered_by_its_components(pipelines: list[Any], tmp_path: Path) -> None:
    expected = [image(pipeline) for pipeline in pipelines]
    with penstock.ModelPool("cpu", host_budget="64MiB", device_budget="64MiB") as pool:
        for name, pipeline in zip("ab", pipelines, strict=True):
            pipeline.save_pretrained(tmp_path / name)
            pool.register(name, {part: tmp_path / name / part for part in PARTS}, build=PARTS)
        pool.resize(device=max(sum(one.nbytes for one in pool.explain(name).components) for name in "ab"))
        for number in (0, 1, 0):
            pipeline = pipelines[number]
            with pool.use("ab"[number]) as lease:
                mine = type(pipeline)(
                    **{**pipeline.components, **{part: lease[part].eval() for part in PARTS}},
                    requires_safety_checker=False,
                )
                assert torch.equal(image(mine), expected[number])
            check_books(pool)
        assert pool.explain("b").components[1].used_by == ("a", "b"), "the same bytes in another directory"
