"""The schedule of a comparison: who is measured when, in which state, and what is written down.

Rounds are outermost within a checkpoint, then states, then loaders and the settings of the state's limit, whose order
is drawn anew for each round: what drifts in a machine meets all of them alike, and none of them always comes after the
same other one. (They took turns once, so whoever came after the limit's three readings met a disk that these had worn
out.) The result is written after every measurement, so nothing is lost with the process. This module measures nothing
itself: ``measured.py`` does, in processes of their own.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import random
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import checkpoints, checksum, common, limits, loaders, processes, report

STATES = ["cold", "half", "warm", "tmpfs"]
# The limit that is measured in turn with a state's loaders, and the state that it is measured in.
LIMITS = {
    "cold": ("disk", "cold"),
    "half": ("disk", "cold"),
    "warm": ("page-cache", "warm"),
    "tmpfs": ("page-cache", "tmpfs"),
}
# What a measurement is taken to need while none like it has been seen: seconds.
GUESS = 15.0
# What serialising a checkpoint may take: seconds.
LONG = 600.0


@dataclass(frozen=True)
class Turn:
    """One measurement: a loader's, or a limit's with one of its settings."""

    round: int
    state: str
    what: str
    setting: str | None = None


class OutOfTimeError(Exception):
    """The next measurement would exceed the budget."""


class Comparison:
    """One run of the comparison, added to a result that may hold earlier ones."""

    def __init__(self, options: Namespace, result: report.Result, work: Path, command: str) -> None:
        self.options = options
        self.result = result
        self.work = work
        self.began = time.monotonic()
        self.took: dict[tuple[str | None, str | None, str], float] = {}
        self.broken: set[tuple[str, str, str]] = set()
        self.considered = 0
        self.versions = {name: loaders.version(name, options.site.get(name)) for name in options.loaders}
        skipped = {name: loaders.reason_to_skip(name, self.versions[name], options.device) for name in options.loaders}
        self.names = [name for name, reason in skipped.items() if reason is None]
        self.run = {
            "command": command,
            "started": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
            "device": options.device,
            "machine": common.machine()
            | {"gpu": common.gpu_name(), "filesystem": common.filesystem(options.directory)},
            "skipped": {name: reason for name, reason in skipped.items() if reason},
            "budget": options.budget,
            "unmeasured": 0,
        }
        report.check_same(result, [self.run], {})
        self.number = len(result["runs"])
        result["runs"].append(self.run)
        self.env: dict[str, str] = {}
        if options.device != "cpu" and loaders.link_cuda_runtime(work):
            self.env["LD_LIBRARY_PATH"] = os.pathsep.join(
                filter(None, [str(work), os.environ.get("LD_LIBRARY_PATH", "")])
            )

    def everything(self) -> None:
        """Measures what was asked for, or what the budget allows of it."""
        given = checkpoints.given(self.options.directory)
        cases = [given.name] if given else self.options.cases
        todo = sum(turn.setting is None for name in cases for turn in self.plan(name))
        try:
            if not self.options.no_limits:
                self.machine_limits()
            for name in cases:
                self.one_case(given or self.make(name))
        except OutOfTimeError:
            self.run["unmeasured"] = todo - self.considered
        self.save()

    # ---- the order

    def one_case(self, case: checkpoints.Case) -> None:
        """All rounds of one checkpoint."""
        report.check_same(self.result, [], {case.name: case.as_dict()})
        self.result["cases"][case.name] = case.as_dict()
        say(f"{case.name}: {case.nbytes / common.GB:.2f} GB in {case.tensors} tensors; computing its checksums")
        reference = self.work / f"{case.name}.json"
        reference.write_text(json.dumps(checksum.of_files(case.files)))
        self.serialise(case)
        copied: checkpoints.Case | None = None
        settled: int | None = None
        try:
            for turn in self.plan(case.name):
                in_memory = turn.state == "tmpfs"
                if in_memory and copied is None and not self.hopeless(case.name, turn.state, "*"):
                    copied = self.copy_to_memory(case)
                if not self.hopeless(case.name, turn.state, turn.what):
                    if turn.round != settled:
                        common.settle_memory(common.enough_memory(case.nbytes))
                        settled = turn.round
                    place = copied if in_memory and copied else case
                    if turn.setting is None:
                        self.load(place, turn, reference)
                    else:
                        self.limit(turn.what, turn.setting, place, turn.state, turn.round)
                self.considered += turn.setting is None
        finally:
            if copied:
                shutil.rmtree(copied.files[0].parent, ignore_errors=True)

    def plan(self, case: str) -> list[Turn]:
        """What to measure of a case: everything but what the run that is resumed has got."""
        known = {
            Turn(item["round"], item["state"], item["loader"])
            for item in self.result["measurements"]
            if item["case"] == case and "seconds" in item
        }
        known |= {
            Turn(item["round"], item["state"], item["limit"], item["setting"])
            for item in self.result["limits"]
            if item["case"] == case
        }
        return [turn for turn in self.turns() if turn not in known]

    def turns(self) -> Iterator[Turn]:
        """All measurements of a case."""
        order = random.Random(self.run["started"])
        for number in range(self.options.rounds):
            seen = set()
            for state in self.options.states:
                entries = [Turn(number, state, name) for name in self.names_in(state)]
                if LIMITS[state] not in seen and not self.options.no_limits:
                    limit = LIMITS[state][0]
                    entries += [Turn(number, state, limit, setting) for setting in limits.settings(limit)]
                    seen.add(LIMITS[state])
                order.shuffle(entries)
                yield from entries

    def names_in(self, state: str) -> list[str]:
        # A second load finds the files as the first one has left them: there is none from a cold cache.
        return [name for name in self.names if not loaders.of(name).second or state in {"warm", "tmpfs"}]

    def hopeless(self, case: str, state: str, what: str) -> bool:
        """Whether this has failed before in this run, or the state has: it is not tried in every round."""
        return bool({(case, state, what), (case, state, "*"), (case, "*", what)} & self.broken)

    def in_time(self, kind: tuple[str | None, str | None, str], limit: float | None = None) -> float:
        """The seconds that something may take; raises OutOfTimeError where it would exceed the budget."""
        limit = self.options.timeout if limit is None else limit
        if self.options.budget is None:
            return float(limit)
        left = self.options.budget - (time.monotonic() - self.began)
        if left < self.took.get(kind, GUESS):
            raise OutOfTimeError
        return float(min(limit, left))

    # ---- one measurement each

    def load(self, case: checkpoints.Case, turn: Turn, reference: Path) -> None:
        """Measures one load, whatever comes of it, and writes it down."""
        state, name = turn.state, turn.what
        kind = (case.name, state, name)
        seconds = self.in_time(kind)
        row = loaders.of(name)
        files = [checkpoints.own_format(case)] if row.own_format else case.files
        item: dict[str, Any] = {
            "run": self.number,
            "case": case.name,
            "state": state,
            "loader": name,
            "version": self.versions[name],
            "round": turn.round,
        }
        task = {
            "do": "load",
            "loader": name,
            "files": [str(file) for file in files],
            "device": self.options.device,
            "reference": None if self.checked(item) else str(reference),
            # A load to host memory needs all of it each time.
            "settle": common.enough_memory(case.nbytes) if self.options.device == "cpu" else 0,
        }
        began = time.monotonic()
        try:
            if state != "tmpfs":
                item["cached"] = round(common.set_cache(files, state), 4)
            item |= processes.run(task, self.work, seconds=seconds, env=self.env_of(name))
        except (processes.FailedError, common.StateError, OSError) as error:
            if isinstance(error, processes.HungError) and seconds < self.options.timeout:
                raise OutOfTimeError from error
            item["error"] = self.without_directories(str(error))
            self.broken.add((case.name, "*", name) if isinstance(error, processes.HungError) else kind)
        self.took[kind] = time.monotonic() - began
        self.result["measurements"].append(item)
        self.save()
        say(f"round {turn.round + 1} {case.name} {state} {name}: {outcome(item)}")

    def checked(self, item: dict[str, Any]) -> bool:
        """Whether the bytes of such a load have been checked: once for each loader, version and state."""
        same = ("case", "state", "loader", "version")
        return any(
            "bytes_ok" in old and all(old[key] == item[key] for key in same) for old in self.result["measurements"]
        )

    def limit(self, name: str, setting: str, case: checkpoints.Case | None, state: str | None, number: int) -> None:
        """Measures one of the machine's limits; without it, its loaders are compared with nothing."""
        kind = (case.name if case else None, state, name)
        seconds = self.in_time(kind)
        files = case.files if case else []
        began = time.monotonic()
        try:
            if state and state != "tmpfs":
                common.set_cache(files, LIMITS[state][1])
            task = {
                "do": "limit",
                "limit": name,
                "files": [str(file) for file in files],
                "setting": setting,
                "device": self.options.device,
            }
            found = processes.run(task, self.work, seconds=seconds)
            where = {"run": self.number, "case": kind[0], "state": state, "limit": name, "round": number}
            self.result["limits"].append(where | found)
            say(f"limit {name}, {found['setting']}: {found['gb_per_s']:.2f} GB/s")
        except (processes.FailedError, common.StateError, OSError) as error:
            say(f"limit {name}: {self.without_directories(str(error))}")
        self.took[kind] = time.monotonic() - began
        self.save()

    def machine_limits(self) -> None:
        """Those limits that depend on no file: once."""
        for name in ("memcpy", *(("pcie",) if self.options.device != "cpu" else ())):
            if not any(item["limit"] == name for item in self.result["limits"]):
                for setting in limits.settings(name):
                    self.limit(name, setting, None, None, 0)

    # ---- what is made beforehand

    def make(self, name: str) -> checkpoints.Case:
        self.in_time((None, None, "make"))
        say(f"making {name}")
        options = self.options
        return checkpoints.make(name, options.directory, gb=options.gb, small=options.tensors, one_gb=options.one_gb)

    def serialise(self, case: checkpoints.Case) -> None:
        """Writes the checkpoint in the formats of loaders that have their own, unless it is there."""
        target = checkpoints.own_format(case)
        for name in [name for name in self.names if loaders.of(name).own_format]:
            if target.exists() and target.stat().st_mtime >= max(file.stat().st_mtime for file in case.files):
                break
            seconds = self.in_time((None, None, "serialise"), LONG)
            say(f"{case.name}: serialising for {name}")
            task = {"do": "serialise", "files": [str(file) for file in case.files], "target": str(target)}
            try:
                processes.run(task, self.work, seconds=seconds, env=self.env_of(name))
            except processes.FailedError as error:
                say(f"{name}: {error}")
                self.run["skipped"][f"{name}, {case.name}"] = self.without_directories(f"not serialised: {error}")
                self.broken.add((case.name, "*", name))

    def copy_to_memory(self, case: checkpoints.Case) -> checkpoints.Case | None:
        """The checkpoint on tmpfs, or None where it does not fit, which is written down."""
        own = checkpoints.own_format(case)
        also = [own] if own.exists() and any(loaders.of(name).own_format for name in self.names) else []
        size = sum(file.stat().st_size for file in [*case.files, *also])
        home = self.options.tmpfs
        if not home.is_dir() or common.filesystem(home) != "tmpfs":
            reason = "there is no tmpfs"
        elif (free := min(shutil.disk_usage(home).free, common.available_memory() - case.nbytes // 4)) < size:
            reason = f"{size / common.GB:.1f} GB do not fit: {free / common.GB:.1f} GB are free"
        else:
            say(f"{case.name}: copying to tmpfs")
            try:
                return checkpoints.copy(case, home / f"penstock-rivals-{os.getpid()}-{case.name}", also=also)
            except OSError as error:
                reason = f"copying failed: {error.strerror}"
        self.run["skipped"][f"tmpfs, {case.name}"] = reason
        self.broken.add((case.name, "tmpfs", "*"))
        return None

    def env_of(self, name: str) -> dict[str, str]:
        site = self.options.site.get(name)
        path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH", "")]))
        return self.env | loaders.of(name).env | ({"PYTHONPATH": path} if path else {})

    def without_directories(self, text: str) -> str:
        """An error message that names no directory of this machine."""
        places = [self.work, self.options.directory, self.options.tmpfs, *self.options.site.values(), sys.prefix]
        for place in places:
            text = text.replace(f"{Path(place).resolve()}/", "").replace(f"{place}/", "")
        return text

    def save(self) -> None:
        report.write(self.options.output, self.result)


def outcome(item: dict[str, Any]) -> str:
    """A measurement in one line."""
    if "error" in item:
        return str(item["error"])
    rate = f"{item['seconds']:.3f} s, {item['bytes'] / item['seconds'] / common.GB:.2f} GB/s"
    if "bytes_ok" not in item:
        return rate
    return f"{rate}, bytes ok" if item["bytes_ok"] else f"{rate}, WRONG BYTES in {', '.join(item['wrong'])}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
