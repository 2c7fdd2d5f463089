"""Memory of a pool over a mixed trace of 10,000 loads of 10 MB to 24 GB: sizes here are a thousandth.

Pages of the device ``cpu`` are 4 KiB; a GPU's granule of 2 MiB would be 2 KiB at this scale. So what is wasted here is
more than what a GPU's chunks waste.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors.torch")

PROGRAM = """
import json, math, random, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from penstock.errors import InsufficientMemoryError
from penstock.pool import ModelPool
from pool_books import check_books

loads, models, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
rng = random.Random(11)
PAGE, HOST, DEVICE = 4096, 60_000_000, 32_000_000


class Blocks(torch.nn.Module):
    # As of a transformer: matrices, and a vector beside each.
    def __init__(self, width, count):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(count))


def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


# From 10 kB to 24 MB, as many of each order of magnitude.
sizes = [int(10_000 * 2400 ** (number / (models - 1))) for number in range(models)]
shapes = {}
for number, nbytes in enumerate(sizes):
    count = rng.choice([1, 4, 24])
    width = max(int(math.sqrt(nbytes / 4 / count)), 8)
    shapes[f"m{number}"] = width, count
    torch.manual_seed(number)
    save_file(Blocks(width, count).state_dict(), directory / f"m{number}.safetensors")
pool = ModelPool("cpu", host_budget=HOST, device_budget=DEVICE)
for name, shape in shapes.items():
    pool.register(name, {"net": directory / f"{name}.safetensors"}, build={"net": lambda of=shape: Blocks(*of)})
useful = {component: sum(place.nbytes for place in component.layout.places) for component in pool._movement.states}
movement = pool._movement
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
host_waste = device_waste = most_host = most_device = 0.0
done = 0
while done < loads:
    name = rng.choice(list(shapes))
    what = rng.random()
    if what < 0.7:
        with pool.use(name) as lease:
            net = lease["net"]
            assert net.blocks[0].weight.shape[0] == shapes[name][0]
        done += 1
    elif what < 0.9:
        pool.prefetch(name, to=rng.choice(["host", "device"])).result(60)
        done += 1
    elif what < 0.97:
        pool.sleep(name, level=rng.choice([1, 2]))
    else:
        other = rng.choice(list(shapes))
        with pool.use(name) as lease:
            try:
                pool.use(other, workspace=rng.randrange(1, 4_000_000)).close()
            except Exception as error:
                assert isinstance(error, InsufficientMemoryError) or "no room" in str(error), error
        done += 2
    if done % 50 == 0:
        check_books(pool)
    with movement.changed:
        masters = [one for one in movement.states if one.host is not None]
        host = sum(one.host.untyped_storage().nbytes() for one in masters)
        of_masters = sum(useful[one] for one in masters)
        there = [one.slab for one in movement.states if one.slab is not None]
        device = sum(-(-slab.device_bytes // PAGE) * PAGE for slab in there)
        books = movement.device.used + movement.vacating.nbytes
    host_waste = max(host_waste, (host - of_masters) / HOST)
    device_waste = max(device_waste, (device - books) / DEVICE)
    most_host, most_device = max(most_host, host), max(most_device, device)
grown = status("VmHWM") - before
stats = pool.stats()
for name in shapes:
    pool.unload(name)
assert not movement.states and not movement.vacating._leaving and not movement._twins._found
assert pool.stats().host_bytes == pool.stats().device_bytes == 0
print(json.dumps({
    "loads": done, "fetched": stats.fetched, "copied": stats.copied, "evicted": stats.evicted_from_device,
    "host_waste": host_waste, "device_waste": device_waste, "most_host": most_host, "most_device": most_device,
    "host_budget": HOST, "device_budget": DEVICE, "grown": grown,
}))
"""


def trace(loads: int, models: int, directory: Path) -> dict[str, float]:
    # Masters of a GPU are never on the heap, so these are not either.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", PROGRAM, str(loads), str(models), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def check(figures: dict[str, float]) -> None:
    sys.stdout.write(f"{figures}\n")
    assert figures["evicted"] > figures["loads"] / 20, "the trace had room for everything"
    assert figures["host_waste"] <= 0.03
    assert figures["device_waste"] <= 0.02
    assert figures["most_host"] <= figures["host_budget"]
    assert figures["most_device"] <= figures["device_budget"] * 1.02
    # Of the process. Copies are host memory here, too.
    assert figures["grown"] <= figures["host_budget"] + figures["device_budget"] + (64 << 20)


def test_a_short_mixed_trace_wastes_little(tmp_path: Path) -> None:
    check(trace(150, 12, tmp_path))


@pytest.mark.slow
def test_a_mixed_trace_of_ten_thousand_loads_wastes_little(tmp_path: Path) -> None:
    check(trace(10_000, 40, tmp_path))
