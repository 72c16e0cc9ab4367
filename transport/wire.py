"""One value as one message: small values as bytes, large ones in memory sent by descriptor.

Small values are plain pickles. Other messages start with a header: a tag and flags. If a message
has memory, its first descriptor is the memory, which contains the pickle and its buffers.
"""

from __future__ import annotations

import contextlib
import pickle
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import descriptors as _descriptors
from . import memory as _memory
from .buffers import OUT_OF_BAND_BYTES, divider

# The maximum size of a message without memory.
INLINE_BYTES = 32768

# The tag and the flags. A pickle never starts with the tag.
_HEADER = struct.Struct("<BB")
_TAG = 1
# The flags: the first descriptor is memory; the pickle contains a pickle and its tensors; there is
# one descriptor, which carries all others.
_IN_MEMORY, _WITH_PARTS, _BUNDLED = 1, 2, 4
_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
# The maximum length of a list whose items' types are checked, because the check takes time.
_SHORT_LIST = 256


class Packed(NamedTuple):
    """A value to send: at most INLINE_BYTES, and descriptors that ``close`` closes."""

    data: bytes
    fds: tuple[int, ...] = ()

    def close(self) -> None:
        """Close the descriptors, after the value has been sent or dropped."""
        _descriptors.close(self.fds)


def pack(value: object, *, copy_tensor: bool, recurse: bool = False) -> Packed:
    """Return the value as a message for one receiver; the caller must close it.

    Raises:
        OSError: no memory or no descriptors are left; the text names the limit.
    """
    if _is_plain(value):
        stream, payloads = pickle.dumps(value, 5), list[Any]()
    else:
        # Imported late: a worker whose tasks only handle numbers starts without cloudpickle.
        from .pickling import split

        stream, payloads = split(value, recurse=recurse, copy_tensor=copy_tensor)
    if not payloads and len(stream) <= INLINE_BYTES:
        return Packed(stream)
    descriptors: list[int] = []
    try:
        with _descriptors.explaining():
            return _packed(stream, payloads, descriptors, copy_tensor=copy_tensor)
    except BaseException:
        _descriptors.close(descriptors)
        raise


def unpack(data: bytes | memoryview, fds: Sequence[int] = ()) -> Any:
    """Return the value from a message of ``pack``, and close the descriptors, also after an error.

    Raises:
        OSError: the memory or the descriptors of tensors cannot be opened.
    """
    if not fds and data[0] != _TAG:
        return pickle.loads(data)
    descriptors = [_descriptors.Received(fd) for fd in fds]
    try:
        _, flags = _HEADER.unpack_from(data)
        if flags & _BUNDLED:
            carrier = descriptors.pop().detach()
            descriptors += map(_descriptors.Received, _descriptors.unbundle(carrier))
        load = _load_parts if flags & _WITH_PARTS else pickle.loads
        if not flags & _IN_MEMORY:
            return load(memoryview(data)[_HEADER.size :], buffers=descriptors)
        with contextlib.closing(descriptors.pop(0)) as memory, _descriptors.explaining():
            buffers = _memory.split(_memory.read(memory.number))
        return load(buffers[0], buffers=[*buffers[1:], *descriptors])
    finally:
        for descriptor in descriptors:
            descriptor.close()


def _is_plain(value: object) -> bool:
    """Return whether plain ``pickle`` suffices for the value, without our reducers."""
    if type(value) is list and len(value) <= _SHORT_LIST:
        return _SCALARS.issuperset(map(type, value))
    return type(value) in _SCALARS


def _packed(
    stream: bytes, payloads: list[Any], descriptors: list[int], *, copy_tensor: bool
) -> Packed:
    """Return a message; append its descriptors to the list as soon as they are open."""
    flags = 0
    if not all(isinstance(payload, pickle.PickleBuffer) for payload in payloads):
        stream, payloads = _pickle_parts(stream, payloads, descriptors, copy_tensor=copy_tensor)
        flags |= _WITH_PARTS
    if payloads or len(stream) > INLINE_BYTES - _HEADER.size:
        flags |= _IN_MEMORY
        buffers = [memoryview(stream), *(payload.raw() for payload in payloads)]
        descriptors.insert(0, _memory.write(_memory.aligned_pieces(buffers)))
        stream = b""
    if len(descriptors) > _descriptors.MAX_PER_VALUE:
        descriptors[:] = [_descriptors.bundle(descriptors)]
        flags |= _BUNDLED
    return Packed(_HEADER.pack(_TAG, flags) + stream, tuple(descriptors))


def _pickle_parts(
    stream: bytes, payloads: list[Any], descriptors: list[int], *, copy_tensor: bool
) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Return a pickle that contains the value's pickle and parts, and the large buffers outside it.

    To load the pickle, ``unpack`` supplies these buffers, and then the descriptors of tensors that
    are passed by reference.
    """
    # Imported late, because it imports torch. If there are tensors, torch is loaded already.
    from . import tensors as _tensors

    def share(storage: Any) -> Any:
        return _tensors.share_by_descriptor(storage, descriptors)

    encoded, contents = _tensors.encode_parts(payloads, None if copy_tensor else share)
    buffers: list[Any] = []
    is_inside = divider(buffers, OUT_OF_BAND_BYTES)
    message = (pickle.PickleBuffer(stream), encoded, contents)
    return pickle.dumps(message, 5, buffer_callback=is_inside), buffers


def _load_parts(data: memoryview, *, buffers: Sequence[Any]) -> Any:
    from . import tensors as _tensors

    return _tensors.load(*pickle.loads(data, buffers=buffers))
