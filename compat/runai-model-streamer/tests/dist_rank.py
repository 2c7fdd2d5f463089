"""One of several processes that stream the same files, for ``test_distributed.py``.

    python dist_rank.py RANK RANKS STORE BACKEND '[CASE, …]'

With nccl each process streams to a GPU of its own.
Prints a line of JSON for each case: checksums of what came, in the order in which it came, what this process read, and
what went wrong. A case has ``paths`` (or ``ranges``), and what is ``wrong`` with this process.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from runai_model_streamer import DistributedStreamer, FileChunks, SafetensorsStreamer
from torch import distributed

DEVICE = "cuda" if sys.argv[4:5] == ["nccl"] else "cpu"


def described(tensor: torch.Tensor) -> str:
    """A checksum, shape and dtype."""
    whole = tensor.contiguous().reshape(-1)
    content = whole.view(torch.uint8).cpu().numpy().tobytes() if whole.numel() else b""
    return f"{hashlib.sha256(content).hexdigest()} {tuple(tensor.shape)} {tensor.dtype}"


def goes_on(wrong: str | None) -> bool:
    """What befalls this process in the middle of a stream; whether it takes more of it."""
    if wrong == "its model fails":
        raise KeyError("a model's own")
    if wrong == "is interrupted":
        raise KeyboardInterrupt
    if wrong == "dies":
        os._exit(1)
    if wrong == "sleeps":
        time.sleep(12)
    return wrong != "leaves"


def on_another_stream(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, used on a stream on which the next is asked for too."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_stream(side)
    return tensor.clone()


def safetensors(case: dict[str, Any], found: dict[str, Any]) -> None:
    wrong = case.get("wrong")
    with SafetensorsStreamer() as streamer:
        names = case.get("names")
        asked = case.get("is_distributed", True)
        streamer.stream_files(case["paths"], device=DEVICE, is_distributed=asked, tensor_names=names)
        found["is_distributed"] = streamer.file_streamer.is_distributed
        shared = streamer.file_streamer._shared
        if wrong == "never takes any":
            return
        kept = []
        for number, pair in enumerate(streamer.get_tensors()):
            kept.append(pair)
            if wrong == "goes on elsewhere":
                kept[-1] = (pair[0], on_another_stream(pair[1]))
            elif number == 2 and not goes_on(wrong):
                return
        if wrong == "streams again":
            streamer.stream_files(case["paths"][::-1], device=DEVICE, is_distributed=True)
            kept += list(streamer.get_tensors())
    # All together, after the streamer has gone too: each is to be what it was.
    found["tensors"] = [[name, described(tensor)] for name, tensor in kept]
    found["storages"] = len({tensor.untyped_storage().data_ptr() for _, tensor in kept if tensor.numel()})
    if shared is not None:
        found["bytes"] = sum(load.bytes for load in shared.loads)
        found["rounds"] = len(shared.rounds)


def ranges(case: dict[str, Any], found: dict[str, Any]) -> None:
    with DistributedStreamer() as streamer:
        requests = [FileChunks(*request) for request in case["ranges"]]
        streamer.stream_files(requests, None, "cpu", True)
        shared = streamer._shared
        found["chunks"] = [[file, index, described(tensor)] for file, index, tensor in streamer.get_chunks()]
        found["bytes"] = sum(load.bytes for load in shared.loads)


def run(rank: int, cases: list[dict[str, Any]]) -> dict[str, Any]:
    case = cases[rank]
    settings = {"RUNAI_STREAMER_DIST": "1", **case.get("environment", {})}
    os.environ.update(settings)
    found: dict[str, Any] = {}
    try:
        (ranges if "ranges" in case else safetensors)(case, found)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - it is what the test looks at
        found["error"] = f"{type(error).__name__}: {error}"
    for name in settings:
        os.environ.pop(name)
    threads = [thread.name for thread in threading.enumerate() if "penstock" in thread.name]
    return {**found, "threads": threads}


def main() -> None:
    rank, ranks, store, backend, cases = sys.argv[1:]
    if backend == "nccl":
        torch.cuda.set_device(int(rank))
    distributed.init_process_group(
        backend,
        store=distributed.FileStore(store, int(ranks)),
        rank=int(rank),
        world_size=int(ranks),
        timeout=timedelta(seconds=60),
    )
    for case in json.loads(cases):
        print(json.dumps(run(int(rank), case)), flush=True)
    # Another that is still talking is not to see this one go in an orderly way.
    os._exit(0)


if __name__ == "__main__":
    main()
