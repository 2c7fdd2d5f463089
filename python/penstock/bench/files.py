"""Measures loads of files: checkpoint by state of the page cache by loader, beside the machine's limits.

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

from . import checkpoints, checksum, data, limits, loaders, machine, processes, states
from .rows import Rows, run, without_directories
from .schedule import Axes, Schedule, say

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
        self.rows = Rows(options, work, env)
        self.given = options.given or checkpoints.given(options.directory)
        self.counted = False
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
        self.counted = states.counts_reads(self.case.files[0])
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
            for limit in self.options.limits.get(state, []) if number < self.options.limit_rounds else ():
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
            try:
                answer = resident.run(task | {"env": env}, seconds=seconds)
            except processes.HungError:
                # It was ended: the next row gets another.
                self.residents = {key: other for key, other in self.residents.items() if other is not resident}
                raise
            except processes.FailedError as error:
                raise processes.FailedError(without_directories(str(error), self.options, self.work)) from error
        if "bytes_ok" in answer:
            self.checked.add(kind)
        # A second load's own proof replaces that of the first.
        cache = proof.get("cache", {}) | answer.pop("cache", {})
        if cache and self.counted and "device_bytes" in answer:
            cache["device"] = round(answer["device_bytes"] / case.nbytes, 4)
        return answer | version | ({"cache": cache} if cache else {})

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
