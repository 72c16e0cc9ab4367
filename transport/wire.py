"""Values between processes: small ones as bytes, large ones in memory that travels with them.

Small values are plain pickles. Others begin with a header: flags and how many descriptors belong
to the message, of which the first is memory with the pickle and its buffers, if there is memory.
"""

from __future__ import annotations

import contextlib
import pickle
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from . import descriptors as _descriptors
from . import memory as _memory
from .buffers import APART_FROM, divider

# The most bytes of a message without memory.
INLINE_BYTES = 32768

# A tag, which no pickle begins with, and flags.
_HEADER = struct.Struct("<BB")
_TAG = 1
# The first descriptor is memory; the pickle is of the parts of a value with tensors; the only
# descriptor carries the others.
_IN_MEMORY, _WITH_PARTS, _BUNDLED = 1, 2, 4
_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
# Lists that are quickly seen to be of scalars.
_SHORT = 256


class Packed(NamedTuple):
    """A value on its way: at most INLINE_BYTES, and descriptors that `release` closes."""

    data: bytes
    fds: tuple[int, ...]


def pack(value: object, *, copy_tensor: bool, recurse: bool = False) -> Packed:
    """Return the value for one receiver; call `release` when it is sent or dropped.

    Raises:
        OSError: no memory or no descriptors are left; the text says which limit.
    """
    if _is_plain(value):
        stream, parts = pickle.dumps(value, 5), list[Any]()
    else:
        stream, parts = _splitter()(value, recurse=recurse, copy_tensor=copy_tensor)
    if not parts and len(stream) <= INLINE_BYTES:
        return Packed(stream, ())
    descriptors: list[int] = []
    try:
        with _descriptors.explaining():
            return _packed(stream, parts, descriptors, copy_tensor=copy_tensor)
    except BaseException:
        _descriptors.close(descriptors)
        raise


def unpack(data: bytes | memoryview, fds: Sequence[int] = ()) -> Any:
    """Return the value of `pack`; takes over the descriptors, also when it raises.

    Raises:
        OSError: the memory or the descriptors of tensors cannot be had.
    """
    if not fds and data[0] != _TAG:
        return pickle.loads(data)
    descriptors = [_descriptors.Received(fd) for fd in fds]
    try:
        _, flags = _HEADER.unpack_from(data)
        if flags & _BUNDLED:
            carrier = descriptors.pop().detach()
            descriptors += map(_descriptors.Received, _descriptors.unbundled(carrier))
        load = _load_parts if flags & _WITH_PARTS else pickle.loads
        if not flags & _IN_MEMORY:
            return load(memoryview(data)[_HEADER.size :], buffers=descriptors)
        with contextlib.closing(descriptors.pop(0)) as memory, _descriptors.explaining():
            buffers = _memory.split(_memory.read(memory.number))
        return load(buffers[0], buffers=[*buffers[1:], *descriptors])
    finally:
        for descriptor in descriptors:
            descriptor.close()


def release(packed: Packed) -> None:
    """Close the descriptors of a value that has been sent or will not be."""
    _descriptors.close(packed.fds)


def _is_plain(value: object) -> bool:
    """Return whether the C pickler takes the value without any reducer of ours."""
    if type(value) is list and len(value) <= _SHORT:
        return _SCALARS.issuperset(map(type, value))
    return type(value) in _SCALARS


@cache
def _splitter() -> Callable[..., tuple[bytes, list[Any]]]:
    # A worker whose tasks take and give numbers starts without cloudpickle.
    from .pickling import split

    return split


def _packed(
    stream: bytes, parts: list[Any], descriptors: list[int], *, copy_tensor: bool
) -> Packed:
    """Return a message; its descriptors are in the list as soon as they are open."""
    flags = 0
    if not all(isinstance(part, pickle.PickleBuffer) for part in parts):
        stream, parts = _around_tensors(stream, parts, descriptors, copy_tensor=copy_tensor)
        flags |= _WITH_PARTS
    if parts or len(stream) > INLINE_BYTES - _HEADER.size:
        flags |= _IN_MEMORY
        buffers = [memoryview(stream), *(part.raw() for part in parts)]
        descriptors.insert(0, _memory.write(_memory.lay_out(buffers)))
        stream = b""
    if len(descriptors) > _descriptors.MOST:
        descriptors[:] = [_descriptors.bundled(descriptors)]
        flags |= _BUNDLED
    return Packed(_HEADER.pack(_TAG, flags) + stream, tuple(descriptors))


def _around_tensors(
    stream: bytes, parts: list[Any], descriptors: list[int], *, copy_tensor: bool
) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Return a pickle of a pickle and its parts, and the large buffers among those.

    At loading they are followed by the descriptors of tensors passed by reference.
    """
    # Imports torch, which is here where tensors are.
    from . import tensors as _tensors

    def share(storage: Any) -> Any:
        return _tensors.by_descriptor(storage, descriptors)

    slots, contents = _tensors.lay_out(parts, None if copy_tensor else share)
    buffers: list[Any] = []
    inside = divider(buffers, APART_FROM)
    whole = (pickle.PickleBuffer(stream), slots, contents)
    return pickle.dumps(whole, 5, buffer_callback=inside), buffers


def _load_parts(data: memoryview, *, buffers: Sequence[Any]) -> Any:
    from . import tensors as _tensors

    return _tensors.load(*pickle.loads(data, buffers=buffers))
