"""From Python's slicing to byte ranges: what the core reads, and what is left to do on the tensor it delivers.

The core knows boxes: ``start..end`` along leading dimensions. An integer index reads a range of one and drops the
dimension afterwards; a step reads what it spans and picks afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any, SupportsIndex

from penstock.errors import SelectionError

Index = SupportsIndex | slice | EllipsisType
"""One item of a selection."""
Selection = Index | tuple[Index, ...]
"""What may stand in the brackets of a slice: integers, slices, an ellipsis."""


_FANCY = "Load the tensor, or the range that holds what you want, and index what comes with lists, masks or None"


def resolve(
    name: str, shape: Sequence[int], selection: Selection
) -> tuple[list[tuple[int, int]], tuple[int | slice, ...] | None]:
    """The box to read for ``selection`` of a tensor of ``shape``, and the index to apply to what is delivered.

    Args:
        name: the tensor's name, for errors.
        shape: its shape.
        selection: integers, slices with positive steps, and at most one ellipsis; an empty list is an empty slice.

    Returns:
        ``(ranges, index)``: one ``(start, end)`` for every dimension, and the index (None where nothing is left to do).

    Raises:
        SelectionError: for an index out of range, too many of them, a step that is not positive, or anything that is
            neither an integer nor a slice nor an ellipsis.
    """

    def wrong(cause: str, remedy: str | None = None) -> SelectionError:
        text = f"tensor {name!r}: {cause}. The tensor's shape is {list(shape)}" + (f". {remedy}" if remedy else "")
        return SelectionError(text, tensor=name, cause=cause, remedy=remedy)

    items = _items(selection)
    ellipses = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(ellipses) > 1:
        raise wrong("more than one ellipsis")
    missing = len(shape) - (len(items) - len(ellipses))
    if missing < 0:
        raise wrong(f"{len(items) - len(ellipses)} indices for {len(shape)} dimensions")
    at = ellipses[0] if ellipses else len(items)
    items[at : at + len(ellipses)] = [slice(None)] * missing

    ranges: list[tuple[int, int]] = []
    index: list[int | slice] = []
    for dimension, (item, size) in enumerate(zip(items, shape, strict=True)):
        if isinstance(item, slice):
            try:
                start, stop, step = item.indices(size)
            except (TypeError, ValueError) as error:
                raise wrong(f"slice of dimension {dimension}: {error}") from None
            if step < 1:
                cause = f"a step of {step} in dimension {dimension}: steps must be positive"
                raise wrong(cause, "Load it in its own order, and reverse what comes: torch.flip, or array[::-1]")
            ranges.append((start, max(start, stop)))
            index.append(slice(None, None, step))
            continue
        position = _position(item)
        if position is None:
            raise wrong(f"{item!r} is neither an integer nor a slice nor an ellipsis", _FANCY)
        if not -size <= position < size:
            raise wrong(f"index {item!r} is out of range for dimension {dimension} of size {size}")
        position %= size
        ranges.append((position, position + 1))
        index.append(0)
    plain = all(isinstance(item, slice) and item.step == 1 for item in index)
    return ranges, None if plain else tuple(index)


def _position(item: Any) -> int | None:
    """The integer that an item is; None for anything else. Python counts True as 1, and torch takes it for a mask."""
    try:
        position: int | None = None if isinstance(item, bool) else item.__index__()
    except (AttributeError, TypeError):  # numpy's arrays and torch's tensors of several elements have the method
        return None
    return position


def is_basic(selection: Any) -> bool:
    """Whether a selection consists of what ``resolve`` understands, fitting or not. What else there is (lists, masks,
    ``None``) only the library of a loaded tensor understands.
    """
    items = _items(selection)
    return all(
        item is Ellipsis
        or isinstance(item, slice)
        or (hasattr(item, "__index__") and not isinstance(item, bool) and not getattr(item, "shape", ()))
        for item in items
    )


def _items(selection: Selection) -> list[Index]:
    if isinstance(selection, tuple):
        return list(selection)
    # An empty list selects nothing, as for torch and safetensors.
    return [slice(0, 0)] if isinstance(selection, list) and not selection else [selection]
