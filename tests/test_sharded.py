"""Modules that torch shards over ranks: each rank reads its local shards, and holds what torch would have put there.

On a machine with two GPUs: ``pytest -m gpu tests/test_sharded.py``.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.fsdp", reason="this torch has no torch.distributed")
if not torch.distributed.is_available() or not hasattr(torch.distributed.fsdp, "fully_shard"):
    pytest.skip("this torch has no fully_shard", allow_module_level=True)

from penstock.frameworks.sharded import local_pieces

# Where a shard lies


class Mesh(NamedTuple):
    """What is looked at of a mesh of devices."""

    sizes: tuple[int, ...]
    coordinate: list[int]

    def get_coordinate(self) -> list[int]:
        return self.coordinate

    def size(self, dimension: int) -> int:
        return self.sizes[dimension]


@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_local_shards_are_those_that_torch_cuts(data: st.DataObject) -> None:
    """Any mesh, any placements, sizes that are not divisible, several cuts of one dimension in either order."""
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    shape = data.draw(st.lists(st.integers(1, 13), min_size=1, max_size=3).map(tuple))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    dimension = st.integers(0, len(shape) - 1)
    placements = data.draw(
        st.tuples(
            *[
                st.one_of(
                    st.just(Replicate()),
                    st.builds(Shard, dimension),
                    st.builds(
                        lambda dim, factor: _StridedShard(dim, split_factor=factor), dimension, st.integers(2, 4)
                    ),
                )
                for _ in sizes
            ]
        )
    )
    coordinate = [data.draw(st.integers(0, size - 1)) for size in sizes]
    whole = torch.arange(math.prod(shape)).view(shape)
    cut = [at for at, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    order = None
    if not any(isinstance(placement, _StridedShard) for placement in placements):
        cut = data.draw(st.permutations(cut))
        order = [SimpleNamespace(mesh_dims=(at,)) for at in cut]
    local = whole
    for at in cut:
        local = placements[at]._split_tensor(local, sizes[at], with_padding=False)[0][coordinate[at]]
    local = local.contiguous()
    tensor = SimpleNamespace(
        shape=shape,
        dim=lambda: len(shape),
        placements=placements,
        device_mesh=Mesh(sizes, coordinate),
        _local_tensor=torch.full_like(local, -1),
        _spec=SimpleNamespace(shard_order=order),
    )
    filled, pieces = local_pieces("w", tensor)
    for ranges, memory in pieces:
        memory.copy_(whole[tuple(slice(*of) for of in ranges)])
    assert torch.equal(filled, local)


# Processes

GPUS = torch.cuda.device_count()
WORLDS = [
    pytest.param((2, "cpu"), id="2"),
    pytest.param((4, "cpu"), id="4", marks=pytest.mark.slow),
    *(
        pytest.param((n, "cuda"), id=f"{n} GPUs", marks=[pytest.mark.gpu, pytest.mark.skipif(n > GPUS, reason="GPUs")])
        for n in (2, 4)
    ),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sharded_rank import tensors

    path = tmp_path_factory.mktemp("sharded") / "model.safetensors"
    penstock.save_file(tensors(), path)
    return path


@pytest.fixture(scope="module", params=WORLDS)
def found(request: Any, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """What every rank found of every case."""
    ranks, device = request.param
    store = tmp_path_factory.mktemp("store") / "store"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    script = Path(__file__).parent / "sharded_rank.py"
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(ranks), str(store), device, str(checkpoint)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        printed = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    lines = [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in printed]
    return [{line["case"]: line for line in of} for of in lines]


pytestmark = pytest.mark.timeout(700)

CASES = [
    "fully_shard",
    "fully_shard, a window of a MiB",
    "fully_shard to bfloat16",
    "fully_shard to float64",
    "fully_shard by columns",
    "hybrid",
    "tensor parallel",
    "fully_shard and tensor parallel",
    "fully_shard and tensor parallel, the other way",
    "fully_shard and tensor parallel to bfloat16",
    "replicated",
    "offloaded",
    "mixed precision",
    "from the meta device",
]


def of_all(found: list[dict[str, dict[str, Any]]], case: str) -> list[dict[str, Any]]:
    for rank, cases in enumerate(found):
        assert case in cases, f"rank {rank} did not get there"
        assert "error" not in cases[case], f"rank {rank}: {cases[case]['error']}"
    return [cases[case] for cases in found]


@pytest.mark.parametrize("case", CASES)
def test_a_module_holds_what_set_model_state_dict_gives_and_each_rank_reads_its_share(
    found: list[dict[str, dict[str, Any]]], case: str
) -> None:
    for rank, of in enumerate(of_all(found, case)):
        assert of["wrong"] == [], rank
        assert of["stale"] == [], "version counters are bumped"
        assert of["moved"] == [], "devices and memory stay"
        assert of["cut otherwise"] == [], "torch's module is sharded in the same way"
        assert of["leaves"]
        assert of["bytes"] == of["share"]
        assert of["read"] <= 1.05 * of["share"], rank


def test_the_cases_are_what_they_say(found: list[dict[str, dict[str, Any]]]) -> None:
    def placements(case: str) -> str:
        return json.dumps(of_all(found, case)[0]["placements"])

    assert "Shard(dim=0)" in placements("fully_shard") or "S(0)" in placements("fully_shard")
    assert "Shard(dim=1)" in placements("fully_shard by columns") or "S(1)" in placements("fully_shard by columns")
    assert "Replicate()" in placements("hybrid") or "R" in placements("hybrid")
    assert "_StridedShard" in placements("fully_shard and tensor parallel")


def test_every_placement_of_every_tensor_is_filled_as_torch_cuts_it(found: list[dict[str, dict[str, Any]]]) -> None:
    for of in of_all(found, "distributed tensors"):
        assert of["wrong"] == []
        assert of["bytes"] == of["share"]
        assert of["count"] == 36


def test_a_sharded_module_computes_with_what_was_loaded(found: list[dict[str, dict[str, Any]]]) -> None:
    for of in of_all(found, "used before and after"):
        assert of["wrong"] == []


def test_what_cannot_be_filled_is_refused_by_name(found: list[dict[str, dict[str, Any]]]) -> None:
    for of in of_all(found, "refused"):
        assert of["wrong"] == []
        assert "tensor 'vector'" in of["refused"]["partial"]
        assert "Partial" in of["refused"]["partial"]
        assert "Redistribute" in of["refused"]["partial"]
        assert "module 'down' is unsharded" in of["refused"]["unsharded"]
        assert "reshard()" in of["refused"]["unsharded"]
        assert "DTensor" in of["refused"]["built on meta"]
        assert "to_empty" in of["refused"]["built on meta"]
        assert "module 'down' is a FullyShardedDataParallel" in of["refused"]["flattened"]
    for of in of_all(found, "from the meta device"):
        assert "to_empty" in of["refused"]["meta"]
