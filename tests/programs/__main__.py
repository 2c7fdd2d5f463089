"""``python -m tests.programs``: see the package."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from .compare import Runner, checked, temporary

_CHUNK = 100


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, help="of the first program; the others follow. Random by default")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--stop-after", type=int, default=10, help="differences")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no more programs are begun")
    parser.add_argument("--replay", help="a program, as it was printed, or a seed with --programs 1")
    arguments = parser.parse_args()
    if arguments.replay is not None:
        with temporary() as home:
            runner = Runner(Path(home))
            program = json.loads(arguments.replay)
            print(runner.difference(program) or "equal")
            runner.close()
        return 0
    seed = random.randrange(1 << 40) if arguments.seed is None else arguments.seed
    chunks = [
        (first, min(_CHUNK, seed + arguments.programs - first))
        for first in range(seed, seed + arguments.programs, _CHUNK)
    ]
    began, done, found = time.perf_counter(), 0, 0
    # spawn: each process has its own torch. One that dies breaks the pool, which is an error here.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=context) as pool:
        running = {pool.submit(checked, *chunk): chunk for chunk in chunks}
        for ended in as_completed(running):
            done += running[ended][1]
            try:
                differences = ended.result()
            except BrokenProcessPool:
                print(f"a process died; among programs from {running[ended][0]} or {arguments.processes} chunks around")
                return 2
            for number, text in differences:
                found += 1
                print(f"seed {number}: {text}\n", flush=True)
            if found >= arguments.stop_after or time.perf_counter() - began > arguments.seconds:
                pool.shutdown(cancel_futures=True)
                break
    seconds = time.perf_counter() - began
    print(f"{done} programs from seed {seed}, {found} differ; {done / seconds:.0f} programs per second")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
