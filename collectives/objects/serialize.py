"""Convert objects to bytes: pickle protocol 5, with large tensors and arrays outside of the pickle.

Unlike ``transport.pickling``, this pickler never sends functions or classes by value. It moves
tensors to the CPU, and reports whether unpickling may fail on another rank.
"""

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

from ...primitives.tensor_bits import tensor_bytes
from ...transport.buffers import OUT_OF_BAND_BYTES, divider
from ...transport.memory import aligned_pieces, split
from ..process.ranks import comm_device, distributed_available, get_rank

logger = logging.getLogger(__name__)

_WARN_FROM = 2**30
_FLOAT8 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz
# A dtype is pickled by its name, which is shorter and which pickle writes only once.
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
# NumPy lacks these dtypes. Only these are viewed as bytes, which takes twice as long.
_WITHOUT_NUMPY = {torch.bfloat16, torch.complex32, *_FLOAT8}
# Modules that every rank can import.
_KNOWN_MODULES = {"builtins", "collections", "datetime", "decimal", "numpy", "pathlib", "torch"}
_BY_NAME = (type, types.FunctionType, types.BuiltinFunctionType)


class PicklableWrapper:
    """Make lambdas, closures and objects that contain them picklable by wrapping them.

    It uses cloudpickle, which must be installed on the receiving side too. Calls and attribute
    reads go to the wrapped object, but attributes that are set stay on the wrapper. A wrapper of a
    wrapper holds the innermost object. Unpickling and ``copy.copy`` return the bare object.
    """

    # Typed as Any, here and below, because the wrapped object may have any type.
    def __init__(self, obj: Any) -> None:
        self._obj: Any = obj._obj if isinstance(obj, PicklableWrapper) else obj

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._obj(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Reading _obj of an instance made by __new__ alone would recurse without end.
        if "_obj" not in self.__dict__:
            raise AttributeError(f"this {type(self).__name__} is not initialised: no {name!r} yet")
        return getattr(self._obj, name)

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return pickle.loads, (cloudpickle.dumps(self._obj),)


def serialize_to_tensor(data: object) -> torch.Tensor:
    """Return the object's pickle as a uint8 tensor of shape ``(bytes,)``.

    It is on the group's communication device, or on the CPU without a process group. More than
    1 GiB is logged as a warning.

    Raises:
        AssertionError: the group's backend is neither gloo nor nccl.
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
            "rank %d serialises %.2f GiB to %s", get_rank(), tensor.numel() / 2**30, tensor.device
        )
    return tensor


def obj2tensor(pyobj: object, device: torch.device | str | None = None) -> torch.Tensor:
    """Return the object's pickle as a uint8 tensor of shape ``(bytes,)``.

    Args:
        pyobj: any picklable object.
        device: default: the group's communication device, or the CPU without a group.
    """
    data = io.BytesIO()
    _Pickler(data).dump(pyobj)
    return torch.frombuffer(data.getbuffer(), dtype=torch.uint8).to(device or comm_device())


def tensor2obj(tensor: torch.Tensor) -> Any:
    """Return the object in a uint8 tensor from ``obj2tensor``; padding after it is ignored.

    Tensors inside are on the CPU. Unpickling can run arbitrary code: only pass tensors from ranks
    of the same process group.

    Raises:
        TypeError: the tensor is not uint8.
        ValueError: the tensor is empty.
    """
    if tensor.dtype != torch.uint8:
        raise TypeError(f"tensor must be of dtype torch.uint8, got {tensor.dtype}")
    if tensor.numel() == 0:
        raise ValueError("tensor must hold the bytes of a pickle, got an empty tensor")
    return _load(io.BytesIO(tensor.reshape(-1).cpu().numpy().tobytes()))


class PackedObject(NamedTuple):
    """A pickle and the large buffers that it refers to, which are not copied.

    Attributes:
        pieces: the bytes to send, in order.
        is_foreign: whether unpickling needs classes that another rank may lack.
    """

    pieces: Sequence[memoryview]
    is_foreign: bool = False

    @property
    def size(self) -> int:
        return sum(map(len, self.pieces))


def pack(value: object) -> PackedObject:
    """Return the object as a ``PackedObject``; errors of its pickling are raised unchanged."""
    data, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    pickler = _Pickler(data, buffer_callback=divider(buffers, OUT_OF_BAND_BYTES))
    pickler.dump(value)
    chunks = aligned_pieces([data.getbuffer(), *(buffer.raw() for buffer in buffers)])
    return PackedObject(chunks, pickler.is_foreign)


def unpack(memory: memoryview) -> Any:
    """Return the object that was packed; its large tensors and arrays use the given memory."""
    stream, *buffers = split(memory)
    return _load(io.BytesIO(stream), buffers)


def _load(stream: io.BytesIO, buffers: Sequence[memoryview] | None = None) -> Any:
    """Unpickle without garbage collection, which many new objects would trigger repeatedly."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _Unpickler(stream, buffers=buffers).load()
    finally:
        if was_enabled:
            gc.enable()


class _Pickler(pickle.Pickler):
    """A pickler that writes tensors as buffers, because torch would write their whole storage."""

    def __init__(self, file: io.BytesIO, buffer_callback: Any = None) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.is_foreign = False

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.Tensor:
            return _reduce_tensor(value)
        if not self.is_foreign and value is not _rebuild_tensor:
            holder = value if isinstance(value, _BY_NAME) else kind
            is_known = str(holder.__module__) in _KNOWN_MODULES
            self.is_foreign = not is_known or isinstance(value, BaseException)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """An unpickler that loads torch's own pickles onto the CPU.

    The sender's device may not exist in this process.
    """

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
        order, plain = _reorder_memory(plain)
    array = (tensor_bytes(plain) if tensor.dtype in _WITHOUT_NUMPY else plain).numpy()
    content = pickle.PickleBuffer(array.data)
    arguments: tuple[Any, ...] = (content, name, tuple(plain.shape))
    if order is not None or tensor.requires_grad:
        arguments += (tensor.requires_grad, order)
    return _rebuild_tensor, arguments


def _reorder_memory(tensor: torch.Tensor) -> tuple[Sequence[int] | None, torch.Tensor]:
    """Return the order of dimensions by stride, and the tensor permuted to it.

    This keeps the layout of channels_last and transposed tensors. Any other tensor is made
    contiguous, with None for the order.
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
