"""A program with a compile cache: what it needs is compiled with the C compiler, unless it is found where it was kept.

    python compiles.py MODEL [KERNELS] [exit STATUS | serve]

It keeps libraries, each with a file that names its path, in Triton's cache directory. It says how many it compiled.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
kernels = int(sys.argv[2]) if len(sys.argv) > 2 else 1
compiled = 0
for number in range(kernels):
    library, group = cache / f"kernel{number}" / "kernel.so", cache / f"kernel{number}" / "__grp__kernel.json"
    if not (group.is_file() and Path(json.loads(group.read_text())["child_paths"]["kernel.so"]).is_file()):
        compiled += 1
        try:
            library.parent.mkdir(parents=True, exist_ok=True)
            temporary = library.with_suffix(".tmp")
            source = f'char of[] = "{sys.argv[1]}"; int answer(void) {{ return {42 + number}; }}'
            command = ["cc", "-shared", "-fPIC", "-xc", "-", "-o", str(temporary)]
            subprocess.run(command, input=source, text=True, check=True)
            temporary.replace(library)
            group.write_text(json.dumps({"child_paths": {"kernel.so": str(library)}}))
        except OSError:
            continue  # nowhere to keep it: an engine would go on, too
    assert ctypes.CDLL(str(library)).answer() == 42 + number
print(f"compiled {compiled} of {kernels}", flush=True)
if sys.argv[3:4] == ["serve"]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    signal.pause()
sys.exit(int(sys.argv[4]) if sys.argv[3:4] == ["exit"] else 0)
