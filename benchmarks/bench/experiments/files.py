"""Experiments on files: checkpoint by state of the page cache by loader, beside the machine's limits.

Every loader is measured in a fresh process whose CUDA context exists, unless the experiment says otherwise: ``fork``
forks each from a process that has imported torch, ``keep`` measures loads of one process that has loaded before. The
page cache is brought to its state before each measurement, and proved. All tensors' bytes are checked once for every
loader, version and state.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import checkpoints, checksum, data, limits, loaders, machine, processes, states
from ..schedule import Axes, Schedule, say
from . import Experiment, Rows, run, without_directories

STATES = ["cold", "half", "warm", "tmpfs", "cold-machine"]
# The limits of the machine that are measured beside a state's loaders. A half cached file's disk is read cold.
LIMITS = {"cold": ["disk"], "half": ["disk"], "warm": ["page-cache"], "tmpfs": ["page-cache"]}
WHOLE = {"cold": ["disk-whole"], "warm": ["ready", "fresh"]}
# What serialising a checkpoint may take: seconds.
LONG = 600.0


class Files:
    """One run over checkpoints in a directory."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        env = dict(options.env)
        if options.device != "cpu" and loaders.plugin("fastsafetensors").link_cuda_runtime(work):
            env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(work), os.environ.get("LD_LIBRARY_PATH", "")]))
        self.rows = Rows(options, env)
        self.given = checkpoints.given(options.directory)
        self.cases: dict[str, checkpoints.Case] = {}
        self.checked: set[tuple[str, ...]] = set()
        self.residents: dict[str, processes.Resident] = {}
        self.case: checkpoints.Case
        self.copied: checkpoints.Case | None = None
        self.settled = -1

    def stages(self) -> list[str]:
        return [self.given.name] if self.given else list(self.options.cases)

    @contextlib.contextmanager
    def stage(self, name: str, schedule: Schedule) -> Iterator[None]:
        options = self.options
        if not self.given:
            say(f"making {name}")
        sizes = {"gb": options.gb, "tensors": options.tensors, "one_gb": options.one_gb, "files": options.files}
        self.case = self.given or checkpoints.make(name, options.directory, **sizes)
        self.settled = -1
        schedule.add_case(self.case.name, self.case.as_dict())
        say(f"{name}: {self.case.nbytes / data.GB:.2f} GB in {self.case.tensors} tensors; computing its checksums")
        self.reference.write_text(json.dumps(checksum.of_files(self.case.files)))
        self._serialise(schedule)
        try:
            if "tmpfs" in options.states:
                self._copy_to_memory(schedule)
            yield
        finally:
            if self.copied:
                shutil.rmtree(self.copied.files[0].parent, ignore_errors=True)
                self.copied = None
            for resident in self.residents.values():
                resident.close()
            self.residents = {}

    @property
    def reference(self) -> Path:
        return self.work / "reference.json"

    def groups(self, stage: str, number: int) -> list[list[Axes]]:
        made: list[list[Axes]] = []
        done = set()
        for state in self.options.states:
            at = {"case": stage, "state": state}
            group = [
                at | {"loader": name}
                for name in self.rows.names
                if not loaders.of(name).second or self.options.second_cold or state in {"warm", "tmpfs"}
            ]
            for limit in self.options.limits.get(state, []):
                if (limit, state == "tmpfs") not in done:
                    group += [at | {"limit": limit, "setting": setting} for setting in limits.settings(limit)]
                done.add((limit, state == "tmpfs"))
            made.append(group)
        if number == 0 and stage == self.stages()[0] and self.options.limits:
            alone = ["memcpy", *(["pcie"] if self.options.device != "cpu" else [])]
            made.insert(0, [{"limit": name, "setting": of} for name in alone for of in limits.settings(name)])
        return made

    def measure(self, axes: Axes, number: int, seconds: float) -> dict[str, Any]:
        case = self.copied if axes.get("state") == "tmpfs" and self.copied else self.case
        if self.options.rotate:
            case = replace(case, files=[case.files[number % len(case.files)]])
        if number != self.settled and self.options.device == "cpu":
            states.settle_memory(states.enough_memory(case.nbytes))
        self.settled = number
        if "limit" in axes:
            return self._limit(axes, case, seconds)
        return self._load(axes, case, seconds)

    def _limit(self, axes: Axes, case: checkpoints.Case, seconds: float) -> dict[str, Any]:
        task = {"do": "limit", "limit": axes["limit"], "setting": axes["setting"], "device": self.options.device}
        proof = {}
        if state := axes.get("state"):
            proof = self._bring(case.files, "cold" if axes["limit"].startswith("disk") else state)
        task["files"] = [str(file) for file in case.files]
        return run(task, self.options, self.work, seconds=seconds, env=self.rows.env) | proof

    def _load(self, axes: Axes, case: checkpoints.Case, seconds: float) -> dict[str, Any]:
        name, device = axes["loader"], self.options.device
        row, env = loaders.of(name), self.rows.env_of(name)
        files = [checkpoints.own_format(case)] if row.own_format else case.files
        version = {"version": self.rows.versions[name]}
        kind = (*axes.values(), str(version["version"]))
        check = kind not in self.checked and not self.options.rotate
        task = {
            "do": row.task,
            "loader": name,
            "files": [str(file) for file in files],
            "device": device,
            "reference": str(self.reference) if check else None,
            "state": axes["state"],
            # A load to host memory needs all of it each time.
            "settle": states.enough_memory(case.nbytes) if device == "cpu" else 0,
        }
        if self.options.process == "fresh" or row.task != "load":
            proof = self._bring(files, axes["state"])
            answer = run(task, self.options, self.work, seconds=seconds, env=env)
        else:
            resident = self._resident(name, env, task, seconds)
            proof = self._bring(files, axes["state"])
            answer = resident.run(task | {"env": env}, seconds=seconds)
        if "bytes_ok" in answer:
            self.checked.add(kind)
        return proof | answer | version

    def _resident(self, name: str, env: dict[str, str], task: dict[str, Any], seconds: float) -> processes.Resident:
        key = name if self.options.process == "keep" else self.rows.site(name) or ""
        if key not in self.residents:
            # Settings are the task's: a process that forks has rows of several.
            packages = {name: value for name, value in env.items() if name == "PYTHONPATH"}
            self.residents[key] = processes.Resident(self.options.process, packages)
            if self.options.process == "keep":
                # Staging memory, streams and imports exist from here on.
                self.residents[key].run(task | {"env": env, "reference": None}, seconds=seconds)
        return self.residents[key]

    @staticmethod
    def _bring(files: list[Path], state: str) -> dict[str, Any]:
        """Brings files to the state of the page cache: the proof."""
        if state == "tmpfs":
            return {}
        share = states.set_cache(files, "cold" if state == "cold-machine" else state)
        if state == "cold-machine":
            # Python, torch and the engine are cold too.
            states.drop_page_cache()
        return {"cache": {"before": round(share, 4)}}

    def _serialise(self, schedule: Schedule) -> None:
        """Writes the checkpoint in the formats of loaders that have their own, unless it is there."""
        target = checkpoints.own_format(self.case)
        for name in [name for name in self.rows.names if loaders.of(name).own_format]:
            if target.exists() and target.stat().st_mtime >= max(file.stat().st_mtime for file in self.case.files):
                return
            seconds = schedule.in_time(("serialise",), LONG)
            task = {"do": "serialise", "files": [str(file) for file in self.case.files], "target": str(target)}
            try:
                run(task, self.options, self.work, seconds=seconds, env=self.rows.env_of(name))
            except processes.FailedError as error:
                schedule.give_up(f"{name}, {self.case.name}", f"not serialised: {error}", self.case.name, name)

    def _copy_to_memory(self, schedule: Schedule) -> None:
        """Copies the checkpoint to tmpfs, or gives its state up where it does not fit."""
        own = checkpoints.own_format(self.case)
        also = [own] if own.exists() and any(loaders.of(name).own_format for name in self.rows.names) else []
        size = sum(file.stat().st_size for file in [*self.case.files, *also])
        home = self.options.tmpfs
        if not home.is_dir() or machine.filesystem(home) != "tmpfs":
            reason = "there is no tmpfs"
        elif (free := min(shutil.disk_usage(home).free, machine.available_memory() - self.case.nbytes // 4)) < size:
            reason = f"{size / data.GB:.1f} GB do not fit: {free / data.GB:.1f} GB are free"
        else:
            try:
                target = home / f"penstock-bench-{os.getpid()}-{self.case.name}"
                self.copied = checkpoints.copy(self.case, target, also=also)
                return  # noqa: TRY300
            except OSError as error:
                reason = without_directories(f"copying failed: {error.strerror}", self.options, self.work)
        schedule.give_up(f"tmpfs, {self.case.name}", reason, self.case.name, "tmpfs")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--states", metavar="A,B", help=f"of the page cache: {', '.join(STATES)}")
    add("--cases", metavar="A,B", help=f"checkpoints to make: {', '.join(checkpoints.NAMES)}")
    add("--gb", type=float, metavar="N", help="size of the checkpoints")
    add("--one-gb", type=float, default=12.0, metavar="N", help="size of the case one-tensor")
    add("--tensors", type=int, default=100_000, metavar="N", help="how many the case small-tensors has")
    add("--files", type=int, default=4, metavar="N", help="files of the cases llama and model")
    add("--tmpfs", type=Path, default=Path("/dev/shm"), metavar="DIR", help="where the state tmpfs is made")
    add("--no-limits", action="store_true", help="without the machine's limits")
    modes = ("fresh", "fork", "keep")
    add("--process", choices=modes, help="of a measurement: fresh, forked, or one that stays")


def _experiment(name: str, summary: str, about: str, *, beside: tuple[str, ...] = (), **defaults: Any) -> Experiment:
    usual = {"device": "cuda:0", "rounds": 3, "gb": 15.19, "cases": "llama", "process": "fresh", "timeout": 300.0}
    rest = {"limits": {}, "rotate": False, "second_cold": False, "env": {}}
    return Experiment(name, summary, about, Files, add_options, usual | rest | defaults, beside)


EXPERIMENTS = [
    _experiment(
        "rivals",
        "files to a GPU or the CPU, beside other loaders and the limits",
        "Every loader that is installed, in each state of the page cache, from\n"
        "checkpoints whose shapes tell loaders apart.",
        states="cold,half,warm,tmpfs",
        cases="llama,small-tensors,one-tensor",
        timeout=120.0,
        limits=LIMITS,
        loaders="penstock,penstock-second,penstock-stream,safetensors,safetensors-prefetch,runai,runai-buffered,"
        "fastsafetensors,fastsafetensors-buffered,instanttensor,instanttensor-buffered,tensorizer",
    ),
    _experiment(
        "local_cpu",
        "files to CPU tensors, beside plain readers and safetensors",
        "The limits are plain readers to one buffer of the file's size: O_DIRECT\n"
        "when cold, cached pages when warm, to memory that is ready or fresh.",
        device="cpu",
        rounds=5,
        gb=2.15,
        cases="narrow",
        states="cold,warm",
        limits=WHOLE,
        env={"OMP_NUM_THREADS": "1"},
        second_cold=True,
        loaders="penstock,penstock-each,penstock-into,penstock-mmap,safetensors-clone,safetensors",
    ),
    _experiment(
        "readers",
        "the number of readers that is found, beside fixed ones",
        "What is found should be within 3 % of the best fixed number. A few rounds\n"
        "on a noisy disk can say no better than its noise.",
        device="cpu",
        rounds=5,
        gb=2.0,
        states="cold,warm",
        loaders="penstock,penstock:readers=1|2|4|8|12|16|24|32",
        beside=("penstock:",),
    ),
    _experiment(
        "blocks",
        "block sizes by numbers of readers",
        "Second loads of forked processes: what a load does once it runs, not what\nthe first load of a process costs.",
        rounds=2,
        states="warm,tmpfs",
        process="fork",
        loaders="penstock-second:readers=8|10|12|14|16+block_bytes="
        + "|".join(str(mib << 20) for mib in (1, 2, 3, 4, 6, 8)),
    ),
    _experiment(
        "disk",
        "readers of a disk whose rate wanders, file by file",
        "Each round reads one file of the checkpoint by O_DIRECT, in processes that\n"
        "have loaded before. A rate over the mean of all in its round is not moved\n"
        "by a disk that wanders within minutes.",
        rounds=8,
        states="cold",
        process="keep",
        rotate=True,
        loaders="plain:threads=16|8+kib=512,plain:threads=16+kib=256,plain:threads=16|12|8+kib=512+block_kib=4096,"
        "plain:threads=8|4+kib=4096,penstock:cache=bypass,penstock:cache=bypass+readers=16|12|24",
    ),
    _experiment(
        "engines",
        "from_pretrained of transformers, stock and Penstock's",
        "Builds a Llama of random weights that transformers can run.",
        gb=8.2,
        cases="model",
        states="cold,warm",
        timeout=600.0,
        loaders="transformers,transformers-patched,transformers-penstock",
        beside=("transformers",),
    ),
    _experiment(
        "engines_vllm",
        "vLLM, or SGLang, with each load format until it answers",
        "vllm-FORMAT and sglang-FORMAT are rows; settings are the format's extra\n"
        "configuration, and processes=1 gives vLLM's engine a process of its own.\n"
        "Tokens and parameters are compared with those of the format auto.",
        gb=15.2,
        cases="model",
        states="cold,warm",
        loaders="vllm-auto,vllm-runai_streamer,vllm-fastsafetensors,vllm-penstock",
        beside=("vllm-auto", "sglang-auto"),
    ),
    _experiment(
        "pairs",
        "two builds of Penstock, loads that alternate",
        "Needs --site penstock@before=DIR and --site penstock@after=DIR, directories\n"
        "with a build each. The ratio of medians has its 95 % interval, by\n"
        "bootstrap over rounds.",
        rounds=16,
        gb=15.2,
        states="warm,tmpfs",
        process="fork",
        loaders="penstock@before,penstock@after",
        beside=("penstock@before",),
    ),
]
