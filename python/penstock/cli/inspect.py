"""``penstock inspect``: the catalogue of a checkpoint, as a table or as JSON.

Reads headers only, so it is as quick for 700 GB as for 7. The table answers "what is in there?", the lines below it
"how much, of what, in which files?". JSON is the catalogue itself, with every byte range.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

import penstock
from penstock import Checkpoint, TensorInfo
from penstock._native import shown as without_secrets
from penstock.cli.output import (
    Output,
    as_json,
    bare_table,
    count,
    glyph,
    name_column,
    plural,
    printable,
    shape,
)
from penstock.cli.selecting import matching, no_match
from penstock.patterns import natural_sort_key
from penstock.units import size

if TYPE_CHECKING:
    from rich.table import Table

_METADATA_SHOWN = 160


def inspect(
    paths: list[str],
    patterns: list[str],
    order: str,
    limit: int,
    *,
    json: bool,
    options: Mapping[str, str] | None = None,
) -> None:
    """Prints what the checkpoint at ``paths`` holds."""
    ckpt = penstock.open(paths, storage_options=options)
    tensors = ordered(ckpt, matching(patterns), order)
    if patterns and not tensors:
        raise no_match(patterns, f"there are {len(ckpt):,}")
    if json:
        as_json(catalogue(paths, ckpt, tensors))
        return
    out = Output()
    if tensors:
        out.print(table(tensors[: limit or None], [path for path, _ in ckpt.files]))
    if 0 < limit < len(tensors):
        out.lines([f"{glyph('… ', '')}and {len(tensors) - limit:,} more; --limit 0 shows all"], style="dim")
    out.print()
    out.lines(summary(ckpt, tensors))


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


def table(tensors: Iterable[TensorInfo], files: Sequence[str]) -> Table:
    """A row for every tensor; its file where there are several."""
    names = dict(zip(files, file_names(files), strict=True)) if len(files) > 1 else {}
    made = bare_table()
    name_column(made, "tensor")
    made.add_column("dtype", no_wrap=True)
    made.add_column("shape", no_wrap=True)
    made.add_column("size", justify="right", no_wrap=True)
    if names:
        name_column(made, "file")
    for tensor in tensors:
        cells = [tensor.dtype, shape(tensor.shape), size(tensor.nbytes), *([names[tensor.location]] if names else [])]
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
