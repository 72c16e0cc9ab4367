"""The bytes of storages, as far as tensors view them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, UntypedStorage

# No element is larger, so that all views still begin at a multiple of theirs.
_ALIGNMENT = 16

# (its number, offset in elements, stride or None where that is as it was)
Place = tuple[int, int, tuple[int, ...] | None]
Content = tuple[Any, ...]


def whole(storage: UntypedStorage) -> Content:
    """Return all of the storage."""
    return _content(as_bytes(storage))


def viewed(storage: UntypedStorage, views: list[Tensor]) -> Iterator[tuple[Content, list[Place]]]:
    """Give storages for views of one: those that may overlap stay together, gaps are left out.

    Where other views lie in the gaps of one, the gaps are written too.
    """
    for start, stop, numbers in _ranges(views):
        compact = _compact(storage, [views[number] for number in numbers])
        if compact is not None:
            tensor, stride = compact
            yield (
                _content(as_bytes(tensor.untyped_storage())),
                [(number, 0, stride) for number in numbers],
            )
            continue
        start -= start % _ALIGNMENT
        content = _content(as_bytes(storage)[start:stop])
        places: list[Place] = []
        for number in numbers:
            view = views[number]
            offset = int(view.storage_offset()) - start // view.itemsize if view.numel() else 0
            places.append((number, offset, None))
        yield content, places


def as_bytes(storage: UntypedStorage) -> Tensor:
    """Return the storage as a tensor uint8 (bytes,) on its device."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def rebuild(data: Any, device: torch.device | None) -> UntypedStorage:
    """Return a storage that uses the buffer, or on another device a copy."""
    if not memoryview(data).nbytes:
        return torch.empty(0, dtype=torch.uint8, device=device or "cpu").untyped_storage()
    tensor = torch.frombuffer(data, dtype=torch.uint8)
    return (tensor if device is None else tensor.to(device)).untyped_storage()


def _content(data: Tensor) -> Content:
    device = None if data.device.type == "cpu" else data.device
    return rebuild, pickle.PickleBuffer(data.cpu().numpy().data), device


def _range(view: Tensor) -> tuple[int, int]:
    start = int(view.storage_offset()) * view.itemsize
    if not view.numel():
        return start, start
    last = sum((size - 1) * step for size, step in zip(view.shape, view.stride(), strict=True))
    return start, start + int(last + 1) * view.itemsize


def _ranges(views: list[Tensor]) -> list[tuple[int, int, list[int]]]:
    """Return the ranges of bytes that views span, those that overlap as one, with their numbers."""
    merged: list[tuple[int, int, list[int]]] = []
    for start, stop, number in sorted((*_range(view), number) for number, view in enumerate(views)):
        if merged and start < merged[-1][1]:
            first, last, numbers = merged[-1]
            merged[-1] = (first, max(last, stop), [*numbers, number])
        else:
            merged.append((start, stop, [number]))
    return merged


def _compact(storage: UntypedStorage, views: list[Tensor]) -> tuple[Tensor, tuple[int, ...]] | None:
    """Return a copy without gaps and the views' stride in it; None where that does not help."""
    view = views[0]
    stride = view.stride()
    if any(
        (other.dtype, other.storage_offset(), other.shape, other.stride())
        != (view.dtype, view.storage_offset(), view.shape, stride)
        for other in views[1:]
    ):
        return None
    # Along the others all elements are the same one.
    order = [dim for dim in range(view.dim()) if view.shape[dim] > 1 and stride[dim] > 0]
    order.sort(key=lambda dim: stride[dim])
    reach = 1
    for dim in order:
        if stride[dim] < reach:
            return None
        reach += (view.shape[dim] - 1) * stride[dim]
    sizes = [view.shape[dim] for dim in order]
    if not view.numel() or prod(sizes) == reach:
        return None
    source = torch.empty(0, dtype=view.dtype, device=view.device)
    source.set_(storage, view.storage_offset(), sizes[::-1], [stride[dim] for dim in order[::-1]])
    dense, step = list(stride), 1
    for dim, size in zip(order, sizes, strict=True):
        dense[dim], step = step, step * size
    return source.contiguous(), tuple(dense)
