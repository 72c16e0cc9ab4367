"""Pickle values and exceptions into bytes and a list of tensors, which torch sends.

Functions and classes that the receiver cannot import (lambdas, local ones, the script's own) are
pickled by value. Only unpickle bytes from members of the same world.
"""

import io
import pickle
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from ...transport.buffers import MARK, divider, take
from ...transport.pickling import reduce_for_any_script
from ...transport.remote_errors import (
    dump_checked,
    format_error,
    remote_report,
    remote_traceback,
)
from ..errors import RpcException

Message = tuple[bytes, list[Any]]

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_MOVABLE = frozenset({torch.strided, torch.sparse_coo})
# The first words of a report.
_RAISED_BY = "raised by "

# Its attribute `undo` lists the undo functions of the message that this thread is packing.
_packing = threading.local()


def pack(value: Any) -> Message:
    """Return ``value`` as a message; raise TypeError if it cannot be pickled."""
    if type(value) in _PLAIN:
        return pickle.dumps(value, protocol=5), []
    file, buffers = io.BytesIO(), _Parts()
    outer = getattr(_packing, "undo", None)
    _packing.undo = buffers.undo
    try:
        _Pickler(file, buffers).dump(value)
    except Exception as error:
        release_unsent((b"", buffers))
        raise TypeError(f"cannot be sent to another process: {error}") from error
    finally:
        _packing.undo = outer
    return file.getvalue(), buffers if buffers.undo else list(buffers)


def on_not_sent(undo: Callable[[], None]) -> None:
    """Register ``undo`` to be called if the message that is being packed is never delivered."""
    undo_functions = getattr(_packing, "undo", None)
    if undo_functions is not None:
        undo_functions.append(undo)


def release_unsent(message: Message) -> None:
    """Call the undo functions of a message that was not delivered."""
    for undo in getattr(message[1], "undo", ()):
        undo()


def unpack(message: Message) -> Any:
    payload, buffers = message
    return pickle.loads(payload, buffers=buffers)


class _Parts(list[Any]):
    """The tensors and undo functions of a message; the receiver gets a plain list of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.undo: list[Callable[[], None]] = []

    def __reduce__(self) -> Any:
        # This message is part of another one that is being packed.
        for undo in self.undo:
            on_not_sent(undo)
        return list, (list(self),)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that collects tensors in a list, from which loading restores them."""

    def __init__(self, file: io.BytesIO, buffers: _Parts) -> None:
        super().__init__(file, 5, divider(buffers, sys.maxsize))
        self._parts = buffers

    def reducer_override(self, value: Any) -> Any:
        if (
            type(value) is Tensor
            and value.layout in _MOVABLE
            and not (value.is_nested or value.is_meta)
        ):
            self._parts.append(value)
            return take, (MARK,)
        reduced = reduce_for_any_script(value)
        return super().reducer_override(value) if reduced is None else reduced


def pack_error(error: BaseException, peer: str) -> Message:
    """Return an exception that was caught in the process ``peer`` as a message."""
    report = remote_report(error)
    # An error from a third process keeps its report.
    if report is None or not report.startswith(_RAISED_BY):
        report = f"{_RAISED_BY}{peer!r}:\n{format_error(error)}"
    pickled = None
    # Raising anything other than an Exception would end the caller's process.
    if isinstance(error, Exception):
        pickled, reason = dump_checked(error, pack, partial(_load_for_check, error))
        if pickled is None:
            report = f"{report}\n(it could not be pickled: {reason})"
    return pack((type(error).__qualname__, report, pickled))


def _load_for_check(error: Exception, message: Message) -> Any:
    # Unpacking references here would release the values that they refer to.
    return error if getattr(message[1], "undo", None) else unpack(message)


def unpack_error(message: Message) -> Exception:
    """Return the exception to raise here, with the remote traceback as its cause."""
    name, report, pickled = unpack(message)
    if pickled is not None:
        try:
            error = unpack(pickled)
            if isinstance(error, Exception):
                error.__cause__ = remote_traceback(report)
                return error
        except Exception as reason:
            report = f"{report}\n(this process could not recreate it: {reason!r})"
    return RpcException(f"{name} {report}")
