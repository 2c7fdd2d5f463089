"""Places of components on a device, on the CPU: plain ones. ``test_gpu_pool`` has those with addresses that stay."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from penstock.errors import ConfigError, DeviceError, InsufficientMemoryError
from penstock.pool import memory as of_memory
from penstock.pool.device_slab import PlainSlab
from penstock.pool.memory import Memory, host_available


def test_a_plain_place_has_memory_while_it_is_wanted() -> None:
    memory = Memory("cpu")
    slab, master = PlainSlab(memory, 1000), torch.arange(1000).to(torch.uint8)
    assert (slab.is_stable, slab.tensor, slab.device_bytes, slab.filled) == (False, None, 0, 0)
    assert slab.fill(master) == 1000
    assert torch.equal(slab.tensor, master)
    assert slab.fill(master) == 0, "it is there"
    assert slab.evict([memory.now()], keep=1000) == 0
    assert slab.evict([memory.now()], keep=1) == 1000, "it goes as a whole"
    assert slab.evict([]) == 0
    assert (slab.tensor, slab.device_bytes, slab.filled) == (None, 0, 0)
    slab.map()
    assert (slab.device_bytes, slab.filled) == (1000, 0), "memory, but not the component's bytes"
    slab.close()
    assert (memory.trim(), memory.kept(), memory.was_written_late()) == (0, 0, False)


def test_a_place_that_cannot_be_had_stays_empty() -> None:
    slab = PlainSlab(Memory("cpu"), 1 << 60)
    with pytest.raises(InsufficientMemoryError):
        slab.map()
    assert (slab.device_bytes, slab.filled) == (0, 0)


def test_host_memory_is_what_the_core_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < host_available() < 1 << 50
    assert Memory("cpu").available() <= host_available()
    monkeypatch.setattr(of_memory, "spare_memory", lambda: None)
    with pytest.raises(ConfigError, match="how much memory"):
        host_available()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_virtual_memory_without_a_driver_is_a_device_error() -> None:
    from penstock._native import DeviceMemory

    with pytest.raises(DeviceError, match="cuda:0"):
        DeviceMemory(0)
