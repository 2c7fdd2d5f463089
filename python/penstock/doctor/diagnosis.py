"""Gathers the facts of a diagnosis, in 20 seconds and without changing anything, and judges them.

Each step runs in a thread of its own and has a share of the time: a mount whose server is gone does not hold up the
rest. What a step could not find out in time is named in ``Facts.missing``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import penstock
from penstock import _native
from penstock.arguments import is_url
from penstock.doctor import engines, machine_rules, network, network_rules, prediction, probes, storage_rules
from penstock.doctor.facts import Checkpoint, Facts, Failure, Prediction, Rates, Remote
from penstock.doctor.finding import SEVERITIES, Finding, Rule
from penstock.doctor.machine import gpus, machine, mount_of, nodes
from penstock.doctor.tree import Tree
from penstock.errors import PenstockError

T = TypeVar("T")
BUDGET = 18.5
"""Seconds of a whole diagnosis, the interpreter's start aside."""
_CACHE = "PENSTOCK_CACHE_DIR"
LOOKS = 64
"""Places of each file that are looked up in the page cache."""
_MOSTLY = 0.98
_PROBING = 7.0
"""Seconds of loads that the prediction is made of."""
RULES: list[Rule] = [*network_rules.RULES, *storage_rules.RULES, *machine_rules.RULES]


def findings(facts: Facts) -> list[Finding]:
    """What the facts amount to, the worst first."""
    found = [finding for rule in RULES if (finding := rule(facts))]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def diagnose(
    paths: list[str],
    device: str | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
) -> Facts:
    """Gathers facts.

    Args:
        paths: the checkpoint, as for ``penstock.open``; none for the machine alone.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``; by default the first GPU that torch can use, else the CPU.
        storage_options: as for ``penstock.open``.
        root: where ``/proc`` and ``/sys`` are read: a recorded tree, or this machine's.
        environment: variables that count.

    Raises:
        KeyboardInterrupt: nothing else. What goes wrong is among the facts.
    """
    return _Diagnosis(paths, device, storage_options or {}, Tree(root), environment).facts()


class _Diagnosis:
    def __init__(
        self,
        paths: list[str],
        device: str | None,
        options: Mapping[str, Any],
        tree: Tree,
        environment: Mapping[str, str],
    ) -> None:
        self._paths, self._options, self._tree, self._environment = paths, options, tree, environment
        self._began = time.perf_counter()
        self._missing: list[str] = []
        self._notes: list[str] = []
        self._machine = machine(tree)
        self._device = self._chosen(device)
        self._ckpt: penstock.Checkpoint | None = None
        self._opening = 0.0
        self._failure: Failure | None = None

    def facts(self) -> Facts:
        of_cloud = self._step("the cloud's metadata", 4, lambda: network.cloud(self._machine.vendor, self._environment))
        rates = Rates()
        checkpoint = remote = predicted = None
        if self._paths:
            self._step("opening the checkpoint", 6, self._open)
            checkpoint = self._step("the checkpoint's storage", 4, self._checkpoint)
            # A model of the hub that this machine has is read from files.
            if is_url(self._paths[0]) and (checkpoint is None or checkpoint.is_remote):
                remote = self._step("the network", 4, self._remote)
        if self._device != "cpu":
            rates = self._step("copies to GPUs", 6, self._gpu_rates) or rates
        if self._ckpt is not None and checkpoint is not None:
            ckpt = self._ckpt
            predicted = self._step("the predicted load", 14, lambda: self._predict(ckpt))
            if not checkpoint.is_remote:
                rates = self._step("the disk", 4, lambda: self._file_rates(ckpt, rates, checkpoint)) or rates
        return Facts(
            versions=engines.versions(),
            machine=self._machine,
            device=self._device,
            engines=tuple(self._step("engines", 6, lambda: engines.engines(self._environment)) or ()),
            checkpoint=checkpoint,
            failure=self._failure,
            remote=remote,
            cloud=of_cloud,
            rates=replace(rates, notes=tuple(self._notes)),
            prediction=predicted,
            cache_dir=self._closed_cache(),
            missing=tuple(self._missing),
            seconds=time.perf_counter() - self._began,
        )

    def _step(self, what: str, at_most: float, work: Callable[[], T]) -> T | None:
        """What ``work`` returns; None where it fails, or takes longer than is left for it."""
        result: list[T] = []
        failures: list[Exception] = []

        def run() -> None:
            try:
                result.append(work())
            except Exception as error:  # noqa: BLE001 - a diagnosis reports what goes wrong
                failures.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(max(min(at_most, BUDGET - (time.perf_counter() - self._began)), 0.1))
        if result:
            return result[0]
        if not failures:
            self._missing.append(f"{what}: no answer in time")
        elif isinstance(failures[0], PenstockError):
            self._failure = self._failure or _failed(failures[0])
        else:
            self._missing.append(f"{what}: {type(failures[0]).__name__}")
        return None

    def _chosen(self, device: str | None) -> str:
        """The device, with its number."""
        if device is None:
            works = bool(self._machine.gpus) and self._step("torch", 8, _cuda_works)
            return "cuda:0" if works else "cpu"
        if device == "cpu" or self._step("torch", 8, _cuda_works):
            return "cuda:0" if device == "cuda" else device
        cause = f"torch finds no GPU that it can use, and {device} was asked for"
        remedy = "Install a torch with CUDA that the driver supports (nvidia-smi), or give --device cpu"
        self._failure = Failure("DeviceError", "device", cause, remedy)
        return "cpu"

    def _open(self) -> None:
        began = time.perf_counter()
        # Without a disk cache: a probe is not to fill it, nor to evict what is there.
        ckpt = penstock.open(self._paths, cache_dir="", storage_options=self._options)
        self._opening = time.perf_counter() - began
        self._ckpt = ckpt

    def _checkpoint(self) -> Checkpoint | None:
        ckpt = self._ckpt
        if ckpt is None:
            return None
        is_remote = ckpt.core.access() is not None
        file = _largest(ckpt)
        return Checkpoint(
            nbytes=ckpt.nbytes,
            files=len(ckpt.files),
            storage=ckpt.storage,
            is_remote=is_remote,
            cached_share=None if is_remote else ckpt.core.cached_share(LOOKS),
            mount=None if file is None else mount_of(str(file), self._tree),
        )

    def _remote(self) -> Remote:
        access = self._ckpt.core.access() if self._ckpt else None
        return network.remote(self._paths[0], access, self._environment, self._options)

    def _predict(self, ckpt: penstock.Checkpoint) -> Prediction | None:
        memory = self._machine.available
        if self._machine.cgroup_limit is not None:
            room = self._machine.cgroup_limit - (self._machine.cgroup_used or 0)
            memory = room if memory is None else min(memory, room)
        # What a disk cache has whole is read from there, as the load would.
        options = penstock.LoadOptions() if self._is_kept(ckpt) else None
        return prediction.predict(
            ckpt,
            self._device,
            self._opening,
            seconds=_PROBING,
            memory=memory,
            pressure=self._machine.pressure or 0.0,
            options=options,
        )

    def _file_rates(self, ckpt: penstock.Checkpoint, rates: Rates, checkpoint: Checkpoint) -> Rates:
        file = _largest(ckpt)
        if file is None:
            return rates
        share = checkpoint.cached_share
        is_cached = True if share is not None and share > _MOSTLY else False if share == 0 else None
        found = probes.file_rates(file, is_cached=is_cached)
        if found.note:
            self._notes.append(found.note)
        return replace(rates, direct=found.direct, buffered=found.buffered, page_cache=found.page_cache)

    def _gpu_rates(self) -> Rates:
        pinned, pageable = probes.gpu_rates(self._device)
        # Now that it has copied, the link has the speed that it copies at.
        self._machine = replace(self._machine, gpus=tuple(gpus(self._tree)))
        by_node = probes.rates_by_node(self._machine.gpus, nodes(self._tree), self._machine.cores)
        return Rates(h2d=pinned, pageable=pageable, by_node=by_node)

    def _is_kept(self, ckpt: penstock.Checkpoint) -> bool:
        """Whether the disk cache holds all of a remote checkpoint."""
        directory = self._environment.get(_CACHE)
        if not directory or not Path(directory).is_dir():
            return False
        entries = _native.cache_entries(directory)
        whole = {(location, nbytes) for _, location, nbytes, _, is_complete, _ in entries if is_complete}
        return all((_native.shown(location), nbytes) in whole for location, nbytes in ckpt.files)

    def _closed_cache(self) -> str | None:
        directory = self._environment.get(_CACHE)
        if not directory or not Path(directory).is_dir() or os.access(directory, os.W_OK | os.X_OK):
            return None
        return directory


def _largest(ckpt: penstock.Checkpoint) -> Path | None:
    """The largest file, without links; None where it is no path of this machine."""
    location = max(ckpt.files, key=lambda file: file[1])[0]
    return Path(os.path.realpath(location)) if os.path.exists(location) else None  # noqa: PTH110


def _cuda_works() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _failed(error: PenstockError) -> Failure:
    """Of an error, what a diagnosis says."""
    return Failure(
        kind=type(error).__name__,
        code=error.code,
        cause=error.message,
        remedy=error.remedy,
        server_code=error.details.get("server_code"),
        status=error.details.get("status"),
    )
