"""A small program that a start is watched of: it imports torch, saves and loads a checkpoint, and serves or ends.

``python loads_weights.py FILE [EXIT_CODE]``. With ``serve`` for the code it prints a line and waits for SIGTERM, at
which it ends with 5.
"""

from __future__ import annotations

import signal
import sys
from typing import Any


def stop(*_: Any) -> None:
    print("stopped", flush=True)
    sys.exit(5)


signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)

import torch  # noqa: F401 - what takes its time
from safetensors.torch import load_file

tensors = load_file(sys.argv[1])
end = sys.argv[2] if len(sys.argv) > 2 else "0"
print(f"{len(tensors)} tensors", flush=True)
print("on stderr", file=sys.stderr, flush=True)
if end == "serve":
    print("listening now", flush=True)
    while True:
        signal.pause()
sys.exit(int(end))
