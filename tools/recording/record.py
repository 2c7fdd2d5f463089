"""Records docs/pictures/terminal.svg: ``python tools/recording/record.py SVG_TERM``, with asciinema 2 installed.

``SVG_TERM`` is the program of npm's svg-term-cli. The session is ``session.sh``; its S3 server is versitygw.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT / "tests")]

COLUMNS, ROWS = 88, 36


def main(svg_term: str) -> None:
    """Makes a checkpoint of 400 MB, serves it, and records."""
    import numpy as np
    from safetensors.numpy import save_file

    import servers

    with tempfile.TemporaryDirectory() as home, servers.s3(Path(home), bucket="models") as remote:
        weight_map = {}
        for shard in range(2):
            file = f"model-{shard + 1:05}-of-00002.safetensors"
            tensors = {
                f"model.layers.{layer}.self_attn.{part}_proj.weight": np.zeros((2048, 2048), np.float16)
                for layer in range(4 * shard, 4 * shard + 4)
                for part in "qkvo"
            }
            save_file(tensors, Path(home, file), {"format": "pt"})
            remote.put(f"llama-3-8b/{file}", Path(home, file).read_bytes())
            weight_map |= dict.fromkeys(tensors, file)
        remote.put("llama-3-8b/model.safetensors.index.json", json.dumps({"weight_map": weight_map}).encode())
        remote.put("llama-3-8b/config.json", b"{}")
        names = Path(home, "bin")
        names.mkdir()
        (names / "penstock").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m penstock "$@"\n')
        (names / "penstock").chmod(0o755)
        environment = os.environ | remote.environment | {"TERM": "xterm-256color", "AWS_REGION": "us-east-1"}
        environment["PATH"] = f"{names}:{environment['PATH']}"
        cast = Path(home, "session.cast")
        record = f"stty cols {COLUMNS} rows {ROWS}; asciinema rec -q -i 2 -c 'bash {HERE}/session.sh' {cast}"
        # asciinema wants a terminal: script(1) is one.
        subprocess.run(
            ["script", "-qec", record, "/dev/null"], cwd=home, env=environment, check=True, stdout=subprocess.DEVNULL
        )
        picture = ROOT / "docs" / "pictures" / "terminal.svg"
        size = ["--width", str(COLUMNS), "--height", str(ROWS)]
        subprocess.run(
            [svg_term, "--in", str(cast), "--out", str(picture), "--window", "--no-cursor", *size], check=True
        )


if __name__ == "__main__":
    main(sys.argv[1])
