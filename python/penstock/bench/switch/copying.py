"""Host memory to a GPU: pageable, pinned, and by several threads with a stream each."""

from __future__ import annotations

import threading
import time
from typing import Any

ARMS = {"pageable": (False, 1), "pinned": (True, 1), "pinned, 2 threads": (True, 2), "pinned, 4 threads": (True, 4)}
BYTES = 1 << 30
PIECE = 64 << 20


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Copies so many bytes in pieces."""
    import torch

    is_pinned, threads = ARMS[task["loader"]]
    nbytes = min(BYTES, task["bytes"]) // PIECE * PIECE or PIECE
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_pinned)
    host.copy_(torch.arange(256, dtype=torch.uint8).repeat(nbytes // 256))
    there = torch.empty(nbytes, dtype=torch.uint8, device=task["device"])
    pieces = range(0, nbytes, PIECE)

    def copy(worker: int) -> None:
        stream = torch.cuda.Stream(task["device"])  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for at in pieces[worker::threads]:
                there[at : at + PIECE].copy_(host[at : at + PIECE], non_blocking=is_pinned)
            stream.synchronize()

    best = []
    for _ in range(4):
        running = [threading.Thread(target=copy, args=(worker,)) for worker in range(threads)]
        torch.cuda.synchronize()
        began = time.perf_counter()
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        torch.cuda.synchronize()
        best.append(time.perf_counter() - began)
    # The first one wakes streams and the link.
    seconds = sorted(best[1:])[1]
    right = bool(torch.equal(there.cpu(), host))
    return {"seconds": seconds, "bytes": nbytes, "bytes_ok": right, "wrong": [] if right else ["bytes on the device"]}
