"""Saved tensors that are read from files when they are indexed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

# Tensors with at most this number of elements are read immediately.
SMALL = 1024


class SavedTensor:
    """A saved tensor; ``saved[slices]`` and ``saved[...]`` read a part or all of it from files."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        chunks: Sequence[tuple[Sequence[int], Sequence[int], Callable[[], Tensor]]],
    ) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self._pieces = chunks

    def __getitem__(self, index: Any) -> Tensor:
        """Read a part into new memory; ``index`` is ``...`` or one slice per dimension."""
        slices = [slice(None)] * len(self.shape) if index is ... else index
        bounds = [s.indices(size)[:2] for s, size in zip(slices, self.shape, strict=True)]
        starts, part_sizes = [low for low, _ in bounds], [high - low for low, high in bounds]
        result = torch.empty(part_sizes, dtype=self.dtype, device="cpu")
        for offsets, sizes, load in self._pieces:
            common = overlap((starts, part_sizes), (offsets, sizes))
            if common is not None:
                result[common[0]] = load()[common[1]]
        return result


_Box: TypeAlias = tuple[Sequence[int], Sequence[int]]


def overlap(box: _Box, other: _Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the overlap of two parts (offsets, sizes) of a tensor as slices of each, or None."""
    edges = list(zip(*box, *other, strict=True))
    common = [(max(a, b), min(a + n, b + m)) for a, n, b, m in edges]
    if not all(low < high for low, high in common):
        return None
    inside_one, inside_other = (
        tuple(slice(low - o, high - o) for (low, high), o in zip(common, offsets, strict=True))
        for offsets, _ in (box, other)
    )
    return inside_one, inside_other


def load_whole_tensors(tree: Any) -> Any:
    """Return ``tree`` with each ``SavedTensor`` replaced by a whole tensor."""
    return map_tree(tree, lambda value, _: value[...] if isinstance(value, SavedTensor) else value)


def map_tree(value: Any, change: Callable[[Any, str], Any], key: str = "") -> Any:
    """Copy nested containers; ``change(item, path)`` returns the item or a replacement for it."""
    changed = change(value, key)
    if changed is not value:
        return changed
    prefix = f"{key}." if key else ""
    if isinstance(value, Mapping):
        kind: Any = type(value)
        copied = kind({k: map_tree(v, change, f"{prefix}{k}") for k, v in value.items()})
        if isinstance(value, OrderedDict):
            # Torch stores the versions of the modules as an attribute of a state dict.
            vars(copied).update(vars(value))
        return copied
    if type(value) in (list, tuple):
        return type(value)(map_tree(v, change, f"{prefix}{i}") for i, v in enumerate(value))
    return value
