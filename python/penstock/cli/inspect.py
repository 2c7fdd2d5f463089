"""``penstock inspect``: the catalogue of a checkpoint, as a table or as JSON.

Reads headers only, so it is as quick for 700 GB as for 7. The table answers "what is in there?", the lines below it
"how much, of what, in which files?". JSON is the catalogue itself, with every byte range.
A remote prefix without a checkpoint is listed instead, as ``ls`` would.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from rich.measure import Measurement
from rich.text import Text

import penstock
from penstock import Checkpoint, TensorInfo
from penstock._native import list_objects
from penstock._native import shown as without_secrets
from penstock.cli.output import (
    NARROW,
    UNBOUNDED,
    Output,
    as_json,
    bare_table,
    count,
    glyph,
    plural,
    printable,
    shape,
    shortened,
)
from penstock.cli.selecting import matching, no_match
from penstock.patterns import natural_sort_key
from penstock.storage_options import core_options
from penstock.units import size

if TYPE_CHECKING:
    from rich.table import Table

_METADATA_SHOWN = 160
_BETWEEN = 3
"""Columns between two cells of a table."""
_NAME_SHOWN = 12
"""At least so many characters of a name."""
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")


def inspect(
    paths: list[str],
    patterns: list[str],
    order: str,
    limit: int,
    *,
    json: bool,
    options: Mapping[str, str] | None = None,
) -> None:
    """Prints what the checkpoint at ``paths`` holds, or what is under a remote prefix that holds none."""
    try:
        ckpt = penstock.open(paths, storage_options=options)
    except penstock.LocationNotFoundError:
        listed = remote_directory(paths, options)
        if listed is None:
            raise
        show_directory(paths[0], *listed, json=json)
        return
    tensors = ordered(ckpt, matching(patterns), order)
    if patterns and not tensors:
        raise no_match(patterns, f"there are {len(ckpt):,}")
    if json:
        as_json(catalogue(paths, ckpt, tensors))
        return
    out = Output()
    if tensors:
        out.print(table(tensors[: limit or None], [path for path, _ in ckpt.files], out))
    if 0 < limit < len(tensors):
        out.lines([f"{glyph('… ', '')}and {len(tensors) - limit:,} more; --limit 0 shows all"], style="dim")
    out.print()
    out.lines(summary(ckpt, tensors))
    if not patterns and are_unrelated(paths, ckpt):
        number = plural(len(ckpt.files), "file")
        out.lines([f"note: {number} without an index, and with no names in common, are shown as one checkpoint"])


def are_unrelated(paths: Sequence[str], ckpt: Checkpoint) -> bool:
    """Whether a directory's files seem to be several models: no index, no numbers of shards, no common beginnings."""
    files = [path for path, _ in ckpt.files]
    if len(paths) != 1 or len(files) < 2 or shard_numbers(files):  # noqa: PLR2004
        return False
    if not os.path.isdir(paths[0]) or any(name.endswith(".index.json") for name in os.listdir(paths[0])):  # noqa: PTH112, PTH208
        return False
    owners: dict[str, set[str]] = {}
    for tensor in ckpt.values():
        owners.setdefault(tensor.name.partition(".")[0], set()).add(tensor.location)
    return all(len(objects) == 1 for objects in owners.values())


def remote_directory(
    paths: Sequence[str], options: Mapping[str, str] | None = None
) -> tuple[list[tuple[str, int]], list[str]] | None:
    """(name, bytes) of the objects under a remote prefix, and the names of the prefixes; None where that is none."""
    if len(paths) != 1 or "://" not in paths[0] or paths[0].startswith("file://"):
        return None
    try:
        objects, directories = list_objects(paths[0], core_options(options))
    except penstock.PenstockError:
        return None  # what opening said is what people should read
    return [(name, nbytes) for _, name, nbytes in objects], directories


def show_directory(path: str, objects: list[tuple[str, int]], directories: list[str], *, json: bool) -> None:
    """Prints what is under a prefix, as ``ls`` would."""
    if json:
        listed = [{"name": name, "bytes": nbytes} for name, nbytes in objects]
        total = {"objects": len(objects), "nbytes": sum(nbytes for _, nbytes in objects)}
        as_json({"paths": [without_secrets(path)], "directories": directories, "objects": listed, "total": total})
        return
    made = bare_table()
    made.add_column("name", overflow="fold")
    made.add_column("size", justify="right", no_wrap=True)
    for name in sorted(directories, key=natural_sort_key):
        made.add_row(Text(printable(f"{name}/")), "")
    for name, nbytes in sorted(objects, key=lambda entry: natural_sort_key(entry[0])):
        made.add_row(Text(printable(name)), size(nbytes))
    out = Output()
    out.print(made)
    out.print()
    summed = f"{plural(len(objects), 'object')}, {size(sum(nbytes for _, nbytes in objects))}"
    out.lines([f"{summed}; no checkpoint is directly there"])


def ordered(ckpt: Checkpoint, keep: Callable[[str], bool], order: str) -> list[TensorInfo]:
    """The tensors to show: by name with numbers as numbers, by place in the files, or the largest first."""
    names = ckpt.offset_keys() if order == "offset" else sorted(ckpt, key=natural_sort_key)
    tensors = [ckpt[name] for name in names if keep(name)]
    return sorted(tensors, key=lambda tensor: -tensor.nbytes) if order == "size" else tensors


def catalogue(paths: Sequence[str], ckpt: Checkpoint, tensors: Sequence[TensorInfo]) -> dict[str, object]:
    """What is shown, for JSON."""
    return {
        "paths": [without_secrets(path) for path in paths],
        "files": [{"location": path, "bytes": nbytes} for path, nbytes in ckpt.files],
        "storage": ckpt.storage,
        "metadata": ckpt.metadata(),
        "tensors": [
            {name: getattr(tensor, name) for name in ("name", "dtype", "shape", "nbytes", "location", "byte_range")}
            for tensor in tensors
        ],
        "total": {
            "tensors": len(tensors),
            "parameters": sum(prod(tensor.shape) for tensor in tensors),
            "nbytes": sum(tensor.nbytes for tensor in tensors),
            "nbytes_by_dtype": dict(by_dtype(tensors).most_common()),
            "files": len(ckpt.files),
        },
    }


def table(tensors: Sequence[TensorInfo], files: Sequence[str], out: Output) -> Table:
    """A row for every tensor; its file where there are several, in full where the terminal has room for it."""
    if out.width < NARROW:
        return _narrow_table(tensors, out.width)
    if len(files) == 1:
        return _table(tensors, None)
    full = _table(tensors, dict(zip(files, file_names(files), strict=True)))
    numbers = shard_numbers(files)
    wide = Measurement.get(out, out.options.update(width=UNBOUNDED), full).maximum > out.width
    return _table(tensors, numbers) if wide and numbers else full


def _narrow_table(tensors: Sequence[TensorInfo], width: int) -> Table:
    """Name, shape and size: what fits where a name would be broken into many lines."""
    cells = [(shape(tensor.shape), size(tensor.nbytes)) for tensor in tensors]
    widths = [max(map(len, column)) for column in zip(("shape", "size"), *cells, strict=True)]
    room = max(width - sum(widths) - _BETWEEN * len(widths), _NAME_SHOWN)
    made = bare_table()
    made.add_column("tensor", no_wrap=True)
    made.add_column("shape", no_wrap=True)
    made.add_column("size", justify="right", no_wrap=True)
    for tensor, (dimensions, nbytes) in zip(tensors, cells, strict=True):
        made.add_row(Text(shortened(printable(tensor.name), room)), Text(dimensions), Text(nbytes))
    return made


def _table(tensors: Iterable[TensorInfo], files: dict[str, str] | None) -> Table:
    made = bare_table()
    made.add_column("tensor", overflow="fold")
    made.add_column("dtype", no_wrap=True)
    made.add_column("shape", no_wrap=True)
    made.add_column("size", justify="right", no_wrap=True)
    if files:
        made.add_column("file", overflow="fold")
    for tensor in tensors:
        cells = [tensor.dtype, shape(tensor.shape), size(tensor.nbytes), *([files[tensor.location]] if files else [])]
        made.add_row(Text(printable(tensor.name)), *(Text(cell) for cell in cells))
    return made


def file_names(files: Sequence[str]) -> list[str]:
    """Names that tell the files apart: without their directory where they share one."""
    names = [Path(path).name for path in files]
    if len(set(names)) < len(names):
        paths = [Path(path).absolute() for path in files]
        common = os.path.commonpath([path.parent for path in paths])
        names = [str(path.relative_to(common)) for path in paths]
    return [printable(name) for name in names]


def shard_numbers(files: Sequence[str]) -> dict[str, str] | None:
    """``2/4`` for ``model-00002-of-00004.safetensors``, if all files are called that way and no two are the same."""
    found = {path: match for path in files if (match := _SHARD.search(path))}
    numbers = {path: f"{int(match[1])}/{int(match[2])}" for path, match in found.items()}
    return numbers if len(set(numbers.values())) == len(files) else None


def by_dtype(tensors: Iterable[TensorInfo]) -> Counter[str]:
    """Bytes by dtype."""
    counted: Counter[str] = Counter()
    for tensor in tensors:
        counted[tensor.dtype] += tensor.nbytes
    return counted


def summary(ckpt: Checkpoint, tensors: Sequence[TensorInfo]) -> list[str]:
    """Totals, dtypes, files and metadata."""
    nbytes = sum(tensor.nbytes for tensor in tensors)
    shown = plural(len(tensors), "tensor")
    if len(tensors) < len(ckpt):
        shown = f"{len(tensors):,} of {plural(len(ckpt), 'tensor')}"
    parameters = f"{count(sum(prod(tensor.shape) for tensor in tensors))} parameters"
    lines = [f"{shown}, {parameters}, {size(nbytes)} in {plural(len(ckpt.files), 'file')}"]
    lines.append(f"storage:  {printable(ckpt.storage)}")
    dtypes = by_dtype(tensors).most_common()
    if dtypes:
        lines.append("dtypes:   " + ", ".join(f"{dtype} {size(part)}" for dtype, part in dtypes))
    for index, (key, value) in enumerate(sorted((ckpt.metadata() or {}).items())):
        text = f"{key}: {value}"
        cut = text if len(text) <= _METADATA_SHOWN else f"{text[:_METADATA_SHOWN]}... ({len(value):,} characters)"
        lines.append(("metadata: " if index == 0 else " " * 10) + printable(cut))
    return lines
