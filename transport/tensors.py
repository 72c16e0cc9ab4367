"""Encode tensors outside of a pickle: tensors as views, and the bytes of their storages once."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, TypedStorage, UntypedStorage
from torch.multiprocessing import get_sharing_strategy, reductions
from torch.utils.hooks import warn_if_has_hooks

from .buffers import MARK, take
from .descriptors import Received, explaining

# The bytes of the largest dtype's elements. Multiples of it are aligned offsets for every dtype.
_ALIGNMENT = 16

# The index of a view, its offset in elements, and its stride (None if unchanged).
Place = tuple[int, int, tuple[int, ...] | None]
# The function that rebuilds a storage, and its arguments.
Content = tuple[Any, ...]


def _viewed(storage: UntypedStorage, views: list[Tensor]) -> Iterator[tuple[Content, list[Place]]]:
    """Yield new storages that contain only what the views of one storage need.

    Views that may overlap share a storage. Gaps between elements are left out only if the views
    that share a storage are equal.
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
        positions: list[Place] = []
        for number in numbers:
            view = views[number]
            offset = int(view.storage_offset()) - start // view.itemsize if view.numel() else 0
            positions.append((number, offset, None))
        yield content, positions


def as_bytes(storage: UntypedStorage) -> Tensor:
    """Return the storage as a uint8 tensor of shape ``(bytes,)`` on its device."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def rebuild(data: Any, device: torch.device | None) -> UntypedStorage:
    """Return a storage of the buffer's memory, or of a copy on ``device`` if that is given."""
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
    end = sum((size - 1) * step for size, step in zip(view.shape, view.stride(), strict=True))
    return start, start + int(end + 1) * view.itemsize


def _ranges(views: list[Tensor]) -> list[tuple[int, int, list[int]]]:
    """Return (start, stop, indices of views) for each range of bytes; merge overlapping ranges."""
    merged: list[tuple[int, int, list[int]]] = []
    for start, stop, number in sorted((*_range(view), number) for number, view in enumerate(views)):
        if merged and start < merged[-1][1]:
            range_start, range_end, numbers = merged[-1]
            merged[-1] = (range_start, max(range_end, stop), [*numbers, number])
        else:
            merged.append((start, stop, [number]))
    return merged


def _compact(storage: UntypedStorage, views: list[Tensor]) -> tuple[Tensor, tuple[int, ...]] | None:
    """Return a copy of the elements without gaps, and the stride that views of the copy have.

    Returns None if the copy would not be smaller, or if the views differ.
    """
    view = views[0]
    stride = view.stride()
    if any(
        (other.dtype, other.storage_offset(), other.shape, other.stride())
        != (view.dtype, view.storage_offset(), view.shape, stride)
        for other in views[1:]
    ):
        return None
    # All other dimensions have size 1 or stride 0.
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


def by_name(storage: UntypedStorage) -> Content:
    """Share a storage by file name, and return how to rebuild it.

    The sender need not keep the storage. But if the storage is already shared by descriptor, the
    content is the descriptor's number in this process, which must then keep the storage until it is
    loaded.
    """
    if not storage.nbytes():
        return (_empty,)
    if storage.is_shared() and not _has_name(storage):
        descriptor, size = _shared(storage)
        inode, device = reductions.fd_id(descriptor)  # type: ignore[no-untyped-call]
        return _open_process, os.getpid(), descriptor, inode, device, size
    manager, name, size = storage._share_filename_cpu_()
    # Count the receiver as a user, which keeps the file. The receiver decrements the count again.
    storage._shared_incref()  # type: ignore[no-untyped-call]
    _remember(name, storage)
    return _open_file, manager, name, size


def share_by_descriptor(storage: UntypedStorage, descriptors: list[int]) -> Content:
    """Share a storage by a new descriptor, which is appended to the list; return how to rebuild it.

    Uses ``by_name`` if the storage is shared by file name, or if it is not shared yet and the
    sharing strategy is "file_system".
    """
    if not storage.nbytes():
        return (_empty,)
    uses_names = get_sharing_strategy() == "file_system"  # type: ignore[no-untyped-call]
    if _has_name(storage) if storage.is_shared() else uses_names:
        return by_name(storage)
    descriptor, size = _shared(storage)
    _remember(reductions.fd_id(descriptor), storage)  # type: ignore[no-untyped-call]
    descriptors.append(os.dup(descriptor))
    return _open_descriptor, MARK, size


def _has_name(storage: UntypedStorage) -> bool:
    # In a file with a name, torch stores the number of users before the elements.
    return storage.data_ptr() % mmap.PAGESIZE != 0


def _shared(storage: UntypedStorage) -> tuple[int, int]:
    with explaining():
        descriptor, size = storage._share_fd_cpu_()
    if descriptor < 0:
        raise ValueError(
            "a tensor in a file that is mapped (torch.from_file, torch.load(mmap=True)) cannot be "
            "passed by reference; clone() it, or pass it by copy"
        )
    return descriptor, size


def _remember(key: Any, storage: UntypedStorage) -> None:
    reductions.shared_cache[key] = reductions.StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _empty(size: int = 0, device: str = "cpu") -> UntypedStorage:
    return UntypedStorage(size, device=device)  # type: ignore[no-untyped-call]


def _open_descriptor(descriptor: Received, size: int) -> UntypedStorage:
    with explaining():
        storage: UntypedStorage = reductions.rebuild_storage_fd(  # type: ignore[no-untyped-call]
            UntypedStorage, descriptor, size
        )
    return storage


def _open_file(manager: bytes, name: bytes, size: int) -> UntypedStorage:
    try:
        storage: UntypedStorage = reductions.rebuild_storage_filename(  # type: ignore[no-untyped-call]
            UntypedStorage, manager, name, size
        )
    except RuntimeError as error:
        raise _gone(f"the file {os.fsdecode(name)}") from error
    return storage


def _open_process(process: int, number: int, inode: int, device: int, size: int) -> UntypedStorage:
    key = inode, device
    cached: UntypedStorage | None = reductions.storage_from_cache(UntypedStorage, key)  # type: ignore[no-untyped-call]
    if cached is not None:
        return cached
    # If the sender has ended, this process may still have a descriptor of the memory, for example
    # if this process created the memory.
    descriptor_paths = (f"/proc/self/fd/{descriptor}" for descriptor in os.listdir("/proc/self/fd"))
    for path in (f"/proc/{process}/fd/{number}", *descriptor_paths):
        with contextlib.suppress(FileNotFoundError), explaining():
            status = os.stat(path)
            if (status.st_ino, status.st_dev) == key:
                return _open_descriptor(Received(os.open(path, os.O_RDWR | os.O_CLOEXEC)), size)
    raise _gone(f"a descriptor of process {process}")


def _gone(owner: str) -> OSError:
    return OSError(
        errno.ESTALE,
        f"the memory of a tensor passed by reference is gone: it was shared by {owner}, and the "
        "processes that had it have ended or deleted the tensor",
    )


# The types that `reduced` accepts.
KINDS = (Tensor, TypedStorage, UntypedStorage, torch.cuda.Event)

_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
Share = Callable[[UntypedStorage], Content]


def reduced(value: Any, payloads: list[Any], *, copy_tensor: bool) -> Any:
    """Return how to pickle a tensor, storage or CUDA event; append to ``payloads``.

    Raises:
        RuntimeError: a tensor to be passed by reference is the result of a computation that
            autograd recorded.
    """
    if isinstance(value, Tensor):
        return _reduced_tensor(value, payloads, copy_tensor=copy_tensor)
    if isinstance(value, UntypedStorage):
        return _reduced_storage(value, payloads, copy_tensor=copy_tensor)
    if type(value) is TypedStorage:
        return reductions.rebuild_typed_storage, (value._untyped_storage, value.dtype)
    if isinstance(value, TypedStorage):
        return reductions.rebuild_typed_storage_child, (value._untyped_storage, type(value))
    return reductions.reduce_event(value)  # type: ignore[no-untyped-call]


def message(stream: bytes, payloads: list[Any], copy_tensor: bool) -> bytes:
    """Return a pickle that contains another pickle and its parts."""
    return pickle.dumps(_Message(stream, payloads, copy_tensor), 5)


class _Message:
    def __init__(self, stream: bytes, payloads: list[Any], copy_tensor: bool) -> None:
        self._stream = stream
        self._encoded = encode_parts(payloads, None if copy_tensor else by_name)

    def __reduce__(self) -> Any:
        return load, (self._stream, *self._encoded)


def load(stream: bytes | memoryview, encoded: Iterable[Any], contents: Iterable[Content]) -> Any:
    """Return the object from its pickle and the result of ``encode_parts``."""
    storages = [rebuild(*arguments) for rebuild, *arguments in contents]
    return pickle.loads(stream, buffers=[_decode_part(payload, storages) for payload in encoded])


def encode_parts(payloads: list[Any], share: Share | None) -> tuple[list[Any], list[Content]]:
    """Return the parts, with tensors as views of numbered storages, and the storages' contents.

    Args:
        payloads: tensors, storages and buffers.
        share: puts a storage into shared memory; None writes the bytes that tensors view, or the
            whole storage if it is one of the parts.
    """
    encoded, contents = list(payloads), list[Content]()
    owners: dict[int, tuple[UntypedStorage, list[int]]] = {}
    for index, payload in enumerate(payloads):
        if not isinstance(payload, pickle.PickleBuffer):
            storage = payload.untyped_storage() if isinstance(payload, Tensor) else payload
            owners.setdefault(storage._cdata, (storage, []))[1].append(index)
    for storage, indices in owners.values():
        views = [payloads[index] for index in indices if isinstance(payloads[index], Tensor)]
        if share is not None or len(views) < len(indices):
            written = share(storage) if share else _content(as_bytes(storage))
            for index in indices:
                encoded[index] = _encode_part(payloads[index], len(contents))
            contents.append(written)
            continue
        for content, positions in _viewed(storage, views):
            for number, offset, stride in positions:
                view = _encode_part(views[number], len(contents), offset, stride)
                encoded[indices[number]] = view
            contents.append(content)
    return encoded, contents


def _encode_part(payload: Any, number: int, offset: int | None = None, stride: Any = None) -> Any:
    if not isinstance(payload, Tensor):
        return number
    return (
        number,
        payload.dtype,
        payload.storage_offset() if offset is None else offset,
        tuple(payload.shape),
        payload.stride() if stride is None else stride,
        payload.requires_grad,
        payload.is_conj(),
        payload.is_neg(),
    )


def _decode_part(payload: Any, storages: list[UntypedStorage]) -> Any:
    if isinstance(payload, int):
        return storages[payload]
    if not isinstance(payload, tuple):
        return payload
    number, dtype, offset, size, stride, requires_grad, is_conj, is_neg = payload
    storage = storages[number]
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    tensor.set_(storage, offset, size, stride)
    if is_conj:
        tensor = tensor.conj()
    if is_neg:
        tensor = torch._neg_view(tensor)
    return tensor.requires_grad_() if requires_grad else tensor


def _reduced_tensor(tensor: Tensor, payloads: list[Any], *, copy_tensor: bool) -> Any:
    if not copy_tensor and tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} cannot be passed by reference: autograd "
            f"recorded it ({type(tensor.grad_fn).__name__}), and its graph cannot leave the "
            "process; detach() it, or pass it with copy_tensor=True"
        )
    is_bare = type(tensor) is Tensor and not tensor.__dict__ and not tensor.is_nested
    if is_bare and tensor.layout in _SPARSE:
        get_parts = _parts_of_sparse(tensor.detach())
        return _sparse, (tensor.layout, tuple(tensor.shape), tensor.requires_grad, get_parts)
    is_strided = is_bare and tensor.layout is torch.strided and not tensor.is_quantized
    is_plain = is_strided and tensor.device.type in ("cpu", "cuda")
    is_handle = tensor.is_cuda and not copy_tensor
    if not is_plain or (is_handle and (tensor.is_conj() or tensor.is_neg())):
        # Called here, because pickle would use the reducers that torch registers.
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    if is_handle:
        return reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    warn_if_has_hooks(tensor)
    payloads.append(tensor)
    return take, (MARK,)


def _reduced_storage(storage: UntypedStorage, payloads: list[Any], *, copy_tensor: bool) -> Any:
    if storage.device.type == "meta":
        return _empty, (storage.nbytes(), "meta")
    if storage.is_cuda and not copy_tensor:
        return Tensor.untyped_storage, (as_bytes(storage),)
    payloads.append(storage)
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
    components: tuple[Tensor, Tensor | None, Tensor, bool],
) -> Tensor:
    """Return a sparse tensor; torch's function for this keeps every tensor in a global list."""
    indices, second, values, is_coalesced = components
    if second is None:
        tensor = torch.sparse_coo_tensor(
            indices, values, size, check_invariants=False, is_coalesced=is_coalesced
        )
    else:
        tensor = torch.sparse_compressed_tensor(
            indices, second, values, size, layout=layout, check_invariants=False
        )
    return tensor.requires_grad_() if requires_grad else tensor
