"""Objects as bytes: pickle protocol 5, with tensors and large arrays kept out of the pickle."""

import gc
import io
import logging
import pickle
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist

from ...transport.buffers import APART_FROM
from ...transport.memory import lay_out, split
from ..process.ranks import comm_device, distributed_available, get_rank

logger = logging.getLogger(__name__)

_WARN_FROM = 2**30
_FLOAT8 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz
_DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex32, torch.complex64, torch.complex128, torch.bool),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *_FLOAT8,
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_WITHOUT_NUMPY = {torch.bfloat16, torch.complex32, *_FLOAT8}
# What every rank has, since it runs this package.
_EVERYWHERE = {
    *("builtins", "collections", "datetime", "decimal"),
    *("numpy", "pathlib", "stepwrap", "torch"),
}
_BY_NAME = (type, types.FunctionType, types.BuiltinFunctionType)


class PicklableWrapper:
    """Makes a closure, a lambda or an object that holds one picklable, by cloudpickle.

    Calls and reading attributes go to the wrapped object; attributes that are set stay on the
    wrapper. A wrapper of a wrapper holds the innermost object. What unpickles, or comes out of
    copy.copy, is the bare object, without a wrapper around it.

    cloudpickle must be installed on the receiving side too.
    """

    # Any, here and below: the wrapper stands for an object of whatever type.
    def __init__(self, obj: Any) -> None:
        self._obj: Any = obj._obj if isinstance(obj, PicklableWrapper) else obj

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._obj(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # An instance made by __new__ alone holds nothing: to ask it for _obj would lead here again.
        if "_obj" not in self.__dict__:
            raise AttributeError(f"this {type(self).__name__} is not initialised, no {name!r} yet")
        return getattr(self._obj, name)

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return pickle.loads, (cloudpickle.dumps(self._obj),)


def serialize_to_tensor(data: object) -> torch.Tensor:
    """Return the object's pickle as a uint8 tensor (bytes,) on the group's communication device.

    On the CPU without a process group. More than 1 GiB is logged as a warning.

    Raises:
        AssertionError: the group's back-end is neither gloo nor nccl.
    """
    if distributed_available():
        backends = {pair.split(":")[-1] for pair in dist.get_backend_config().split(",")}
        if not backends <= {"gloo", "nccl"}:
            raise AssertionError(
                f"serialize_to_tensor() needs a gloo or nccl group, got {dist.get_backend_config()}"
            )
    tensor = obj2tensor(data)
    if tensor.numel() > _WARN_FROM:
        logger.warning(
            "rank %d serialises %.2f GB to %s", get_rank(), tensor.numel() / 2**30, tensor.device
        )
    return tensor


def obj2tensor(pyobj: object, device: torch.device | str | None = None) -> torch.Tensor:
    """Return the object's pickle as a uint8 tensor (bytes,).

    It is on the group's communication device by default, the CPU without a group.
    """
    data = io.BytesIO()
    _Pickler(data).dump(pyobj)
    return torch.frombuffer(data.getbuffer(), dtype=torch.uint8).to(device or comm_device())


def tensor2obj(tensor: torch.Tensor) -> Any:
    """Return the object in a uint8 tensor from `obj2tensor`; what follows the pickle is ignored.

    Tensors inside are on the CPU. Only for tensors from ranks of one's own process group: loading
    a pickle runs what it says.

    Raises:
        TypeError: the tensor is not uint8.
        ValueError: the tensor is empty.
    """
    if tensor.dtype != torch.uint8:
        raise TypeError(f"tensor must be of dtype torch.uint8, got {tensor.dtype}")
    if tensor.numel() == 0:
        raise ValueError("tensor must hold the bytes of a pickle, got an empty one")
    return _load(io.BytesIO(tensor.reshape(-1).cpu().numpy().tobytes()))


class Parcel(NamedTuple):
    """An object as one pickle and the large buffers that it refers to, not copied.

    Attributes:
        pieces: lie in memory one after the other; the pickle is the first buffer.
        is_foreign: whether unpickling needs classes that another rank may lack.
    """

    pieces: Sequence[memoryview]
    is_foreign: bool = False

    @property
    def size(self) -> int:
        return sum(map(len, self.pieces))


def pack(obj: object) -> Parcel:
    """Return the object as a parcel; raises whatever pickling it raises."""
    apart: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if len(raw) < APART_FROM:
            return True
        apart.append(raw)
        return False

    data = io.BytesIO()
    pickler = _Pickler(data, buffer_callback=keep)
    pickler.dump(obj)
    return Parcel(lay_out([data.getbuffer(), *apart]), pickler.is_foreign)


def unpack(memory: memoryview) -> Any:
    """Return the object of a parcel, whose large tensors and arrays use this very memory."""
    stream, *buffers = split(memory)
    return _load(io.BytesIO(stream), buffers)


def _load(stream: io.BytesIO, buffers: Sequence[memoryview] | None = None) -> Any:
    """Unpickle without the collections of garbage that so many new objects would set off."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _Unpickler(stream, buffers=buffers).load()
    finally:
        if was_enabled:
            gc.enable()


class _Pickler(pickle.Pickler):
    """Writes tensors as buffers, where torch would pickle a copy of their whole storage."""

    def __init__(self, file: io.BytesIO, buffer_callback: Any = None) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.is_foreign = False

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor:
            return _reduce_tensor(obj)
        if not self.is_foreign and obj is not _rebuild_tensor:
            holder = obj if isinstance(obj, _BY_NAME) else kind
            is_known = str(holder.__module__) in _EVERYWHERE
            self.is_foreign = not is_known or isinstance(obj, BaseException)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Loads what torch pickled itself onto the CPU: the sender's device may not exist here."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) == ("torch.storage", "_load_from_bytes"):
            return _load_storage
        return super().find_class(module_name, global_name)


def _load_storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    name = _NAMES.get(tensor.dtype)
    if (
        name is None
        or tensor.layout is not torch.strided
        or tensor.is_meta
        or tensor.is_nested
        or tensor.__dict__
        or tensor._backward_hooks
    ):
        return NotImplemented
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    order = None
    if not plain.is_contiguous():
        order, plain = _in_memory_order(plain)
    if tensor.dtype in _WITHOUT_NUMPY:
        # Not reshape(-1), which keeps any stride that a single element may have.
        plain_bytes = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()
    else:
        plain_bytes = plain.numpy()
    content = pickle.PickleBuffer(plain_bytes.data)
    arguments: tuple[Any, ...] = (content, name, tuple(plain.shape))
    if order is not None or tensor.requires_grad:
        arguments += (tensor.requires_grad, order)
    return _rebuild_tensor, arguments


def _in_memory_order(tensor: torch.Tensor) -> tuple[Sequence[int] | None, torch.Tensor]:
    """Return the order of dimensions in which the tensor is contiguous, and it in that order.

    That keeps channels_last and transposed tensors as they are; others are made contiguous.
    """
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    permuted = tensor.permute(order)
    return (order, permuted) if permuted.is_contiguous() else (None, tensor.contiguous())


def _rebuild_tensor(
    content: Any,
    name: str,
    shape: tuple[int, ...],
    requires_grad: bool = False,
    order: Sequence[int] | None = None,
) -> torch.Tensor:
    dtype = _DTYPES[name]
    if 0 in shape:
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
    else:
        tensor = torch.frombuffer(content, dtype=dtype).reshape(shape)
    if order is not None:
        tensor = tensor.permute(sorted(range(len(order)), key=order.__getitem__))
    return tensor.requires_grad_() if requires_grad else tensor
