"""Tensors of a pretend device, made of host memory."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager
from typing import Any

import torch
from pretend_kinds import KIND
from pretend_library import library
from torch import Tensor

# Operations on metadata run the kernels of the CPU, which never touch the memory.
CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_AS_STRIDED = torch.ops.aten.as_strided.default
_SET = torch.ops.aten.set_.source_Storage_storage_offset

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def below_autograd() -> AbstractContextManager[Any]:
    """Return a context in which operations skip autograd, as inside a kernel."""
    return torch._C._AutoDispatchBelowAutograd()


def move_to_device(host: Tensor, index: int) -> Tensor:
    """Return a tensor on the device ``index`` that shares the memory of ``host``.

    Raises:
        torch.OutOfMemoryError: the device has a limit without room for the tensor.
    """
    with below_autograd():
        flat = _whole_storage(host)
        num_bytes = flat.numel() * flat.itemsize
        if not library.pretend_has_room(index, num_bytes):
            gone = library.pretend_allocated(index)
            raise torch.OutOfMemoryError(
                f"{KIND.key} out of memory. Tried to allocate {num_bytes} bytes. "
                f"GPU {index} has {gone} bytes in use."
            )
        # A capsule is the only way to get the dispatch keys of a device from a build without it.
        capsule = torch._C._to_dlpack(flat)
        library.pretend_move(_capsule_pointer(capsule, b"dltensor"), index, num_bytes)
        base = torch._C._from_dlpack(capsule)
        offset = host.storage_offset() if host.numel() else 0
        return _AS_STRIDED.redispatch(CPU_KEYS, base, host.shape, host.stride(), offset)


def is_on_device(tensor: Tensor) -> bool:
    """Return whether a tensor is on a pretend device."""
    return tensor.device.type == KIND.type


def host_alias(tensor: Tensor) -> Tensor:
    """Return a CPU tensor that shares the memory of a tensor on a device."""
    storage = tensor.untyped_storage()
    num_bytes = real_size(storage)
    if not num_bytes:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    host = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), num_bytes
    )
    return torch.empty(0, dtype=tensor.dtype).set_(
        host, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def replace_storage(tensor: Tensor, host: Tensor) -> None:
    """Give a tensor the contents, shape and strides of ``host``, as a resized result."""
    moved = move_to_device(host, tensor.device.index)
    _SET.redispatch(
        CPU_KEYS, tensor, moved.untyped_storage(), host.storage_offset(), host.shape, host.stride()
    )


def resize(tensor: Tensor, size: Any) -> Tensor:
    """Resize a tensor in place, with new memory if necessary."""
    if torch.Size(size).numel() * tensor.itemsize > real_size(tensor.untyped_storage()):
        replace_storage(tensor, torch.empty(size, dtype=tensor.dtype))
    else:
        layout = torch.empty(size, device="meta")
        _SET.redispatch(
            CPU_KEYS, tensor, tensor.untyped_storage(), 0, layout.shape, layout.stride()
        )
    return tensor


def _whole_storage(host: Tensor) -> Tensor:
    storage = host.untyped_storage()
    size = storage.nbytes() // host.itemsize
    if not size:
        return torch.empty(1, dtype=host.dtype)
    return torch.empty(0, dtype=host.dtype).set_(storage, 0, (size,), (1,))


# Storages -----------------------------------------------------------------------------------------

_resize_storage, _storage_size = torch.UntypedStorage.resize_, torch.UntypedStorage.size
_clone_storage = torch.UntypedStorage.clone


def real_size(storage: torch.UntypedStorage) -> int:
    """Return the bytes of a storage, also if `resize_` has pretended to free it."""
    return storage.nbytes()


def _resize_(self: Any, size: int) -> Any:
    # FSDP2 frees and allocates storages in this way. Imported memory cannot be resized, so only
    # the count of bytes changes.
    if self.device.type != KIND.type:
        return _resize_storage(self, size)
    assert size in (0, self.nbytes()), f"{size} is neither 0 nor {self.nbytes()}"
    library.pretend_set_resident(self.data_ptr(), int(size > 0))
    self._pretend_size = size
    return self


def _size(self: Any) -> int:
    if self.device.type != KIND.type:
        return _storage_size(self)
    return int(getattr(self, "_pretend_size", self.nbytes()))


def _view_bytes(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _clone(self: Any) -> Any:
    if self.device.type != KIND.type:
        return _clone_storage(self)
    return _view_bytes(self).clone().untyped_storage()


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    if self._cdata not in memo:
        memo[self._cdata] = self.clone()
    return memo[self._cdata]


def _move(self: Any, device: Any, non_blocking: bool = False) -> Any:
    return _view_bytes(self).to(torch.device(device), copy=True).untyped_storage()


def install_storages() -> None:
    """Replace the methods of storages that call the device's runtime."""
    import torch._utils
    import torch.storage

    storage: Any = torch.UntypedStorage
    storage.resize_, storage.size = _resize_, _size
    storage.clone, storage.__deepcopy__ = _clone, _deepcopy
    torch.storage._to = torch._utils._to = _move
