"""Tasks as what travels to a worker."""

from __future__ import annotations

import contextlib
import pickle
from types import FunctionType
from typing import Any, NamedTuple

from ..transport.wire import Packed, pack, release
from . import protocol
from .worker import map_caller, starmap_caller

# job, chunk, function, arguments, keyword arguments
Task = tuple[int, int, Any, Any, Any]

# A function is small where sending it again costs less than waiting for the worker to have it.
_SMALL_FUNCTION = 512
# What the C pickler takes without any of our reducers, and what is quickly seen to be such.
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_SEQUENCES = (list, tuple)
_SHORT = 16
_NONE = Packed(b"", ())
_INLINE_BYTES = protocol.PACKET_BYTES - protocol.TASK.size


class EncodedTask(NamedTuple):
    """A task on its way: bytes of function, kind and flags; what follows; what lies beside."""

    size: int
    kind: int
    flags: int
    inline: bytes
    beside: tuple[Packed, ...]

    def release(self) -> None:
        """Close the descriptors, once sent or not."""
        for packed in self.beside:
            release(packed)


class Encoder:
    """Makes encoded tasks of tasks.

    Args:
        copy_tensor: whether tensors are copied, or passed by reference.
        recurse: see `pickling.Pickler`.
    """

    def __init__(self, *, copy_tensor: bool, recurse: bool) -> None:
        self._copy_tensor = copy_tensor
        self._recurse = recurse
        # Of jobs with many tasks: the function's pickle where that is bytes alone.
        self._functions: dict[int, Packed | None] = {}
        self._last: tuple[object, Packed] = _NONE, _NONE

    def pack(self, value: Any) -> Packed:
        """Return a value as it travels."""
        kind = type(value)
        if kind in _SEQUENCES and len(value) <= _SHORT and _PLAIN.issuperset(map(type, value)):
            data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
            if len(data) <= _INLINE_BYTES:
                return Packed(data, ())
        return pack(value, copy_tensor=self._copy_tensor, recurse=self._recurse)

    def encode(self, task: Task, known: set[int]) -> EncodedTask:
        """Return the encoded of a task for a worker that knows the functions of some jobs."""
        job, _, func, args, kwargs = task
        if func is map_caller or func is starmap_caller:
            kind = protocol.MAP if func is map_caller else protocol.STARMAP
            ((func, body),) = args
            packed = self.pack(body)
            if job in known:
                return _encoded(kind, None, packed)
            return _encoded(kind, self._function(job, func), packed)
        body = self.pack((args, kwargs) if kwargs else args)
        kind = protocol.CALL if kwargs else protocol.CALL_PLAIN
        return _encoded(kind, self._named(func), body)

    def forget(self, job: int) -> bool:
        """Drop the function of a job; return whether there was one."""
        return self._functions.pop(job, _NONE) is not _NONE

    def _named(self, func: object) -> Packed:
        """Return a function as it travels; one that goes by its name is pickled once in a row."""
        last, packed = self._last
        if func is last:
            return packed
        packed = self.pack(func)
        if type(func) is FunctionType and not packed.fds and len(packed.data) <= _SMALL_FUNCTION:
            # A function by value is longer than its name, and may change between two calls.
            with contextlib.suppress(Exception):
                if packed.data == pickle.dumps(func, pickle.HIGHEST_PROTOCOL):
                    self._last = func, packed
        return packed

    def _function(self, job: int, func: object) -> Packed:
        packed = self._functions.get(job)
        if packed is None:
            packed = self.pack(func)
            self._functions[job] = None if packed.fds else packed
        return packed


def _encoded(kind: int, function: Packed | None, body: Packed) -> EncodedTask:
    flags, size, inline = 0, 0, b""
    beside: tuple[Packed, ...] = ()
    if function is not None:
        flags = protocol.STORE if kind in (protocol.MAP, protocol.STARMAP) else 0
        if function.fds or len(function.data) > _SMALL_FUNCTION:
            flags |= protocol.FUNCTION_BESIDE
            beside = (function,)
        else:
            inline = function.data
            size = len(inline)
    if body.fds or size + len(body.data) > _INLINE_BYTES:
        flags |= protocol.BODY_BESIDE
        beside = (*beside, body)
    else:
        inline += body.data
    return EncodedTask(size, kind, flags, inline, beside)
