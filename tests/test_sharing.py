"""Ranks that load one model together: each byte is read by one of them, and everyone gets what the stock way gives."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
import servers
from conftest import Raw, raw_bytes, write_raw

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from penstock.distributed import plan
from penstock.distributed.plan import Box, Stored, common, make_plan, volume
from ranks import memory_of, sums_of

# The plan


def boxes(shape: list[int], chance: random.Random) -> list[Box]:
    """What a rank may want of a tensor: nothing, all, rows, columns, any box, or several."""

    def some() -> Box:
        return tuple(
            (0, size) if chance.random() < 0.4 else (start := chance.randrange(size), chance.randint(start + 1, size))
            for size in shape
        )

    return [some() for _ in range(chance.choice([0, 1, 1, 1, 2]))]


@settings(max_examples=300, deadline=None)
@given(shape=st.lists(st.integers(1, 9), min_size=1, max_size=4), ranks=st.integers(2, 5), seed=st.integers(0, 2**32))
def test_every_byte_of_a_shared_tensor_is_read_by_one_rank_and_all_that_is_wanted_is_there(
    shape: list[int], ranks: int, seed: int
) -> None:
    chance = random.Random(seed)
    stored = Stored(tuple(shape), chance.choice([1, 2, 4]), chance.choice([0, 8, 1000]))
    wants = [{(0, 0): some} if (some := boxes(shape, chance)) else {} for _ in range(ranks)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "LEAST_BYTES", 1)
        patch.setattr(plan, "UNIT_BYTES", chance.choice([8, 64, 10_000]))
        patch.setattr(plan, "BATCH_BYTES", 512)
        made = make_plan({(0, 0): stored}, wants)
    units = [unit for batch in made.batches for unit in batch]
    assert bool(units) == bool(made.keys)
    read = torch.zeros(shape, dtype=torch.int)
    for unit in units:
        pieces = [piece for piece in unit.pieces if piece is not None]
        assert len(unit.pieces) == ranks
        for piece in pieces:
            assert common(piece, unit.box) == piece
            read[tuple(slice(*edge) for edge in piece)] += 1
        assert sum(volume(piece, 1) for piece in pieces) == volume(unit.box, 1)
    assert int(read.max()) <= 1
    if units:
        for want in wants:
            for box in want.get((0, 0), ()):
                assert bool((read[tuple(slice(*edge) for edge in box)] == 1).all())


def halves(shape: tuple[int, int], dimension: int) -> list[Box]:
    cut = shape[dimension] // 2
    parts = [(0, cut), (cut, shape[dimension])]
    return [tuple(part if d == dimension else (0, shape[d]) for d in range(2)) for part in parts]


def test_columns_that_lie_close_and_what_all_want_are_shared_and_rows_are_not() -> None:
    shape = (512, 1024)
    near, far = Stored(shape, 2, 64 << 10), Stored(shape, 2, 512)
    whole: Box = ((0, 512), (0, 1024))

    def shared(stored: Stored, *of: Box) -> bool:
        return bool(make_plan({(0, 0): stored}, [{(0, 0): [box]} for box in of]).keys)

    assert shared(near, *halves(shape, 1))
    assert not shared(far, *halves(shape, 1)), "skipping what lies between is cheaper"
    assert not shared(near, *halves(shape, 0))
    assert shared(near, whole, whole)
    assert not shared(near, whole), "one rank"
    assert not shared(Stored((8, 16), 2, 64 << 10), ((0, 8), (0, 8)), ((0, 8), (8, 16))), "hardly any bytes"


def test_a_rank_needs_little_memory_whatever_the_tensors() -> None:
    stored = Stored((64, 4096, 14336), 2, 64 << 10)
    for ranks in (2, 8):
        width = 14336 // ranks
        wants = [{(0, 0): [((0, 64), (0, 4096), (rank * width, (rank + 1) * width))]} for rank in range(ranks)]
        made = make_plan({(0, 0): stored}, wants)
        for batch in made.batches:
            pieces = [sum(volume(unit.pieces[r], 2) for unit in batch) for r in range(ranks)]  # type: ignore[arg-type]
            comes = sum(volume(unit.box, 2) for unit in batch) // ranks
            assert 2 * max(pieces) + 2 * comes <= plan.BATCH_BYTES
        assert len(made.batches) < 64 * 4096 * 14336 * 2 // ranks / (40 << 20), "and few batches"


# Processes


def run(store: Path, *cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Runs cases one after the other, each of which has settings for every rank; what each rank found of each case."""
    script = Path(__file__).parent / "ranks.py"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    count = len(cases[0])
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                str(script),
                str(rank),
                str(count),
                str(store),
                json.dumps([case[rank] for case in cases]),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        printed = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = [[json.loads(line) for line in text.splitlines()] for text in printed]
    # One that died has fewer.
    return [[lines[number] if number < len(lines) else {} for lines in found] for number in range(len(cases))]


SHAPES = {
    "down": ("BF16", (512, 768)),
    "up": ("BF16", (768, 512)),
    "experts": ("F32", (3, 96, 256)),
    "narrow": ("U8", (4099, 70)),
    "router": ("F32", (300, 301)),
    "cast": ("F32", (160, 640)),
    "norm": ("F32", (333,)),
    "last": ("F8_E4M3", (512, 256)),
}


def write(path: Path, times: int = 1) -> Path:
    tensors = {}
    for seed, (name, (dtype, shape)) in enumerate(SHAPES.items()):
        larger = (shape[0] * times, *shape[1:])
        tensors[name] = Raw(dtype, larger, raw_bytes(dtype, larger, seed))
    return write_raw(path, tensors)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model.safetensors")


def expected(model: Path, count: int) -> list[dict[str, str]]:
    """What ordinary tensors give each rank."""
    checkpoint = penstock.open(model)
    tensors = checkpoint.load()
    sums = []
    for rank in range(count):
        memory, loads = memory_of(checkpoint, rank, count)
        loads(tensors.items())
        sums.append(sums_of(memory))
    return sums


def read_bytes(found: list[dict[str, Any]]) -> int:
    return sum(rank["read_bytes"] for rank in found)


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_get_what_they_would_have_read_and_each_byte_is_read_once(
    model: Path, tmp_path: Path, count: int
) -> None:
    case: dict[str, Any] = {"model": str(model)}
    several = {**case, "always": True, "unit_bytes": 300_000, "batch_bytes": 1_000_000}
    alone, together, batches = run(
        tmp_path / "store", [{**case, "sharing": False}] * count, [{**case, "always": True}] * count, [several] * count
    )
    for found in (alone, together, batches):
        assert [rank["sums"] for rank in found] == expected(model, count)
    size = model.stat().st_size
    assert read_bytes(alone) > 1.6 * size
    for found in (together, batches):
        assert read_bytes(found) <= 1.1 * size
        assert max(rank["read_bytes"] for rank in found) < (1 / count + 0.1) * size
        assert all(rank["shared"] >= 5 and rank["notes"] == [] for rank in found)


def test_what_a_batch_needed_is_free_again_for_the_next(tmp_path: Path) -> None:
    model = write(tmp_path / "model.safetensors", times=16)
    batch, put_together = 1_000_000, SHAPES["cast"][1]
    case = {"model": str(model), "always": True, "unit_bytes": 300_000, "batch_bytes": batch}
    [found] = run(tmp_path / "store", [case] * 2)
    most = batch + put_together[0] * put_together[1] * 4 * 16 // 2 + 1000
    assert model.stat().st_size > 6 * most / 2, "or the test proves nothing"
    assert all(0 < rank["most_held"] <= most for rank in found)


def test_an_object_is_fetched_once_by_all_ranks_together(tmp_path: Path) -> None:
    # So large that what lies between a rank's pieces is not worth reading.
    model = write(tmp_path / "model.safetensors", times=8)
    with servers.web(tmp_path) as remote:
        remote.put("model.safetensors", model.read_bytes())  # type: ignore[operator]
        [found] = run(tmp_path / "store", [{"model": f"{remote.root}/model.safetensors"}] * 2)
    assert [rank["sums"] for rank in found] == expected(model, 2)
    assert read_bytes(found) <= 1.1 * model.stat().st_size
    assert all(rank["shared"] >= 5 for rank in found)


def test_what_is_in_memory_is_read_by_each(model: Path, tmp_path: Path) -> None:
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("there is no /dev/shm to write to")
    copy = shm / f"penstock-test-{os.getpid()}.safetensors"
    copy.write_bytes(model.read_bytes())
    try:
        [found] = run(tmp_path / "store", [{"model": str(copy)}] * 2)
    finally:
        copy.unlink()
    assert [(rank["shared"], rank["notes"]) for rank in found] == [(0, []), (0, [])]


FOR_ITSELF = "each rank read for itself: "
WHAT_WAS_LEFT = "what was left each rank read for itself: another rank could not go on"
WRONG = {
    "raises before reading": f"{FOR_ITSELF}rank 1 does: ValueError: a model's own",
    "raises without threads": f"{FOR_ITSELF}rank 1 does: ValueError: a model's own",
    "is stopped while loading": f"{FOR_ITSELF}rank 1 does: KeyboardInterrupt",
    "never records": f"{FOR_ITSELF}rank 1 does: it does not record",
    "cannot propose": f"{FOR_ITSELF}rank 1 does: RuntimeError: no reach",
    "cannot plan": WHAT_WAS_LEFT,
    "cannot read": WHAT_WAS_LEFT,
    "cannot read later": WHAT_WAS_LEFT,
    "cannot take": WHAT_WAS_LEFT,
    "is interrupted while it shows progress": WHAT_WAS_LEFT,
    "is interrupted while it reads": WHAT_WAS_LEFT,
    "is interrupted while it hands on": WHAT_WAS_LEFT,
    "is interrupted while it answers": WHAT_WAS_LEFT,
    "is interrupted while it plans": WHAT_WAS_LEFT,
    "other version": f"{FOR_ITSELF}not all see the same version of the checkpoint",
    "dies": f"{FOR_ITSELF}a rank is gone",
}
"""What may be wrong with rank 1, and what the others say of it."""


def test_where_a_rank_cannot_the_others_read_for_themselves(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(model.read_bytes())
    case = {"model": str(model), "always": True, "unit_bytes": 20_000, "batch_bytes": 80_000}
    cases = [
        [case, {**case, "wrong": wrong, "model": str(copy if wrong == "other version" else model)}, case]
        for wrong in WRONG
    ]
    stock = expected(model, 3)
    for (wrong, note), found in zip(WRONG.items(), run(tmp_path / "store", *cases), strict=True):
        for rank in (0, 2):
            assert found[rank]["sums"] == stock[rank], (wrong, rank)
            assert note in " ".join(found[rank]["notes"]), wrong
        if wrong.startswith("cannot"):
            # What failed once for sharing is done another way.
            assert found[1]["sums"] == stock[1], wrong
            assert "error" not in found[1]
        elif wrong.startswith("raises"):
            assert found[1]["error"] == "ValueError: a model's own"
        elif wrong.startswith("is "):
            assert found[1]["error"].startswith("KeyboardInterrupt"), wrong


def test_a_load_that_is_stopped_ends_what_runs_beside_it(model: Path, tmp_path: Path) -> None:
    case = {"model": str(model), "always": True}
    [[stopped, left]] = run(tmp_path / "store", [{**case, "wrong": "is interrupted"}, case])
    assert stopped["error"].startswith("KeyboardInterrupt")
    assert stopped["threads"] == 0
    assert left["sums"] == expected(model, 2)[1]
