"""``penstock inspect``: the catalogue as a table, or as JSON."""

from __future__ import annotations

import json
from collections import Counter
from fnmatch import fnmatchcase
from math import prod
from pathlib import PurePosixPath

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import penstock
from penstock import TensorInfo


class Output(Console):
    """stdout; a reader that goes away is for ``failures.handled`` to deal with, not an exit here."""

    def __init__(self) -> None:
        super().__init__(highlight=False)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def size(nbytes: int) -> str:
    """``nbytes`` for people: decimal units, as in GB/s."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:  # noqa: PLR2004
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def inspect(paths: list[str], pattern: str | None, order: str, limit: int, *, as_json: bool) -> None:
    """Prints what the checkpoint at ``paths`` holds."""
    ckpt = penstock.open(paths)
    names = ckpt.offset_keys() if order == "offset" else list(ckpt)
    tensors = [ckpt[name] for name in names if pattern is None or fnmatchcase(name, pattern)]
    if order == "size":
        tensors.sort(key=lambda tensor: -tensor.nbytes)
    if as_json:
        print(json.dumps(describe(ckpt, tensors), indent=1))
        return
    console = Output()
    console.print(table(tensors[: limit or None], several=len(ckpt.objects) > 1))
    if limit and len(tensors) > limit:
        console.print(f"… and {len(tensors) - limit} more (--limit 0 shows all)")
    console.print(Text("\n" + summary(ckpt, tensors)))
    for key, value in (ckpt.metadata() or {}).items():
        console.print(Text(f"  {key}: {value if len(value) < 200 else value[:200] + '…'}"))  # noqa: PLR2004


def describe(ckpt: penstock.Checkpoint, tensors: list[TensorInfo]) -> dict[str, object]:
    """The catalogue for JSON."""
    return {
        "objects": [{"location": location, "bytes": nbytes} for location, nbytes in ckpt.objects],
        "metadata": ckpt.metadata(),
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "nbytes": tensor.nbytes,
                "object": tensor.object,
                "byte_range": tensor.byte_range,
            }
            for tensor in tensors
        ],
        "total": {
            "tensors": len(tensors),
            "parameters": sum(prod(tensor.shape) for tensor in tensors),
            "nbytes": sum(tensor.nbytes for tensor in tensors),
        },
    }


def table(tensors: list[TensorInfo], *, several: bool) -> Table:
    """One row for every tensor; its file where there are several."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    made.add_column("tensor", overflow="fold")
    made.add_column("dtype")
    made.add_column("shape", no_wrap=True)
    made.add_column("size", justify="right", no_wrap=True)
    if several:
        made.add_column("file", overflow="fold")
    for tensor in tensors:
        shape = "×".join(str(n) for n in tensor.shape) or "scalar"
        file = [Text(PurePosixPath(tensor.object).name)] if several else []
        made.add_row(Text(tensor.name), tensor.dtype, shape, size(tensor.nbytes), *file)
    return made


def summary(ckpt: penstock.Checkpoint, tensors: list[TensorInfo]) -> str:
    """Totals in one line."""
    by_dtype: Counter[str] = Counter()
    for tensor in tensors:
        by_dtype[tensor.dtype] += tensor.nbytes
    dtypes = ", ".join(f"{dtype} {size(nbytes)}" for dtype, nbytes in by_dtype.most_common())
    parameters = sum(prod(tensor.shape) for tensor in tensors)
    files = len(ckpt.objects)
    return (
        f"{len(tensors):,} tensors, {parameters:,} parameters, {size(sum(by_dtype.values()))}"
        f" in {files} file{'s' if files > 1 else ''}" + (f" ({dtypes})" if dtypes else "")
    )
