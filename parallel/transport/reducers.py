"""Tensors as parts beside a pickle: where each lies in which storage, and the storages' contents.

The pickle has only marks in the places of tensors. That all of them are known before any storage
is written makes it possible to write just the bytes that are viewed, and overlapping ones once.
What torch pickles by way of its storages (subclasses, sparse and quantised tensors) stays its work.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, TypedStorage, UntypedStorage
from torch.multiprocessing import reductions
from torch.utils.hooks import warn_if_has_hooks

from . import shared_storages as _shared_storages
from . import tensor_bytes as _tensor_bytes
from .buffers import MARK, take

# What `reduced` is for.
KINDS = (Tensor, TypedStorage, UntypedStorage, torch.cuda.Event)

_SPARSE = {
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
}

# A storage's rebuilding function and its arguments.
Content = tuple[Any, ...]
Share = Callable[[UntypedStorage], Content]


def reduced(obj: Any, parts: list[Any], *, copy_tensor: bool) -> Any:
    """Return how to pickle a tensor, storage or CUDA event; what is to stand apart joins `parts`.

    Raises:
        RuntimeError: by reference: a tensor that autograd has recorded.
    """
    if isinstance(obj, Tensor):
        return _reduced_tensor(obj, parts, copy_tensor=copy_tensor)
    if isinstance(obj, UntypedStorage):
        return _reduced_storage(obj, parts, copy_tensor=copy_tensor)
    if type(obj) is TypedStorage:
        return reductions.rebuild_typed_storage, (obj._untyped_storage, obj.dtype)
    if isinstance(obj, TypedStorage):
        return reductions.rebuild_typed_storage_child, (obj._untyped_storage, type(obj))
    return reductions.reduce_event(obj)  # type: ignore[no-untyped-call]


def message(stream: bytes, parts: list[Any], copy_tensor: bool) -> bytes:
    """Return a pickle that holds another one and its parts."""
    return pickle.dumps(_Message(stream, parts, copy_tensor), 5)


class _Message:
    def __init__(self, stream: bytes, parts: list[Any], copy_tensor: bool) -> None:
        self._stream = stream
        self._layout = lay_out(parts, None if copy_tensor else _shared_storages.by_name)

    def __reduce__(self) -> Any:
        return load, (self._stream, *self._layout)


def load(stream: bytes | memoryview, slots: Iterable[Any], contents: Iterable[Content]) -> Any:
    """Return the object of a pickle and its parts as `lay_out` wrote them."""
    storages = [rebuild(*arguments) for rebuild, *arguments in contents]
    return pickle.loads(stream, buffers=[_part(slot, storages) for slot in slots])


def lay_out(parts: list[Any], share: Share | None) -> tuple[list[Any], list[Content]]:
    """Return for each part where it is found, and the contents of the storages.

    Args:
        share: puts a storage into shared memory; None writes the bytes that are viewed.
    """
    slots, contents = list(parts), list[Content]()
    owners: dict[int, tuple[UntypedStorage, list[int]]] = {}
    for index, part in enumerate(parts):
        if not isinstance(part, pickle.PickleBuffer):
            storage = part.untyped_storage() if isinstance(part, Tensor) else part
            owners.setdefault(storage._cdata, (storage, []))[1].append(index)
    for storage, indices in owners.values():
        views = [parts[index] for index in indices if isinstance(parts[index], Tensor)]
        if share is not None or len(views) < len(indices):
            written = share(storage) if share else _tensor_bytes.whole(storage)
            for index in indices:
                slots[index] = _slot(parts[index], len(contents))
            contents.append(written)
            continue
        for content, places in _tensor_bytes.viewed(storage, views):
            for number, offset, stride in places:
                slots[indices[number]] = _slot(views[number], len(contents), offset, stride)
            contents.append(content)
    return slots, contents


def _slot(part: Any, number: int, offset: int | None = None, stride: Any = None) -> Any:
    if not isinstance(part, Tensor):
        return number
    return (
        number,
        part.dtype,
        part.storage_offset() if offset is None else offset,
        tuple(part.shape),
        part.stride() if stride is None else stride,
        part.requires_grad,
        part.is_conj(),
        part.is_neg(),
    )


def _part(slot: Any, storages: list[UntypedStorage]) -> Any:
    if isinstance(slot, int):
        return storages[slot]
    if not isinstance(slot, tuple):
        return slot
    number, dtype, offset, size, stride, requires_grad, is_conj, is_neg = slot
    storage = storages[number]
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    tensor.set_(storage, offset, size, stride)
    if is_conj:
        tensor = tensor.conj()
    if is_neg:
        tensor = torch._neg_view(tensor)
    return tensor.requires_grad_() if requires_grad else tensor


def _reduced_tensor(tensor: Tensor, parts: list[Any], *, copy_tensor: bool) -> Any:
    if not copy_tensor and tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} cannot be passed by reference: autograd has "
            f"recorded it ({type(tensor.grad_fn).__name__}), which ends at the process; "
            "detach() it, or pass it with copy_tensor=True"
        )
    if not _is_bare(tensor):
        # Not left to pickle: it would find what torch registers for multiprocessing.
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    if tensor.layout in _SPARSE:
        parts_of = _parts_of_sparse(tensor.detach())
        return _sparse, (tensor.layout, tuple(tensor.shape), tensor.requires_grad, parts_of)
    if not _has_plain_storage(tensor):
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    if tensor.is_cuda and not copy_tensor:
        if tensor.is_conj() or tensor.is_neg():
            return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
        return reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    warn_if_has_hooks(tensor)
    parts.append(tensor)
    return take, (MARK,)


def _is_bare(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and not tensor.__dict__ and not tensor.is_nested


def _has_plain_storage(tensor: Tensor) -> bool:
    return (
        tensor.device.type in ("cpu", "cuda")
        and tensor.layout is torch.strided
        and not tensor.is_quantized
    )


def _reduced_storage(storage: UntypedStorage, parts: list[Any], *, copy_tensor: bool) -> Any:
    if storage.device.type == "meta":
        return _meta_storage, (storage.nbytes(),)
    if storage.is_cuda and not copy_tensor:
        return _storage_of, (_tensor_bytes.as_bytes(storage),)
    parts.append(storage)
    return take, (MARK,)


def _parts_of_sparse(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), None, tensor._values(), tensor.is_coalesced()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values(), True
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values(), True


def _sparse(
    layout: torch.layout,
    size: tuple[int, ...],
    requires_grad: bool,
    parts: tuple[Tensor, Tensor | None, Tensor, bool],
) -> Tensor:
    """Return a sparse tensor; torch's own function keeps each one in a list for ever."""
    first, second, values, is_coalesced = parts
    if second is None:
        tensor = torch.sparse_coo_tensor(
            first, values, size, check_invariants=False, is_coalesced=is_coalesced
        )
    else:
        tensor = torch.sparse_compressed_tensor(
            first, second, values, size, layout=layout, check_invariants=False
        )
    return tensor.requires_grad_() if requires_grad else tensor


def _storage_of(tensor: Tensor) -> UntypedStorage:
    return tensor.untyped_storage()


def _meta_storage(size: int) -> UntypedStorage:
    return UntypedStorage(size, device="meta")  # type: ignore[no-untyped-call]
