"""Values and exceptions as bytes, beside the tensors in them, which torch moves by itself.

Functions and classes that the receiver could not import (lambdas, local ones, those of a script)
travel by value. Only members of the own world send such bytes.
"""

import io
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from ...transport.buffers import MARK, divider, take
from ...transport.pickling import reduce_for_any_script
from ...transport.remote_errors import format_error, remote_report, remote_traceback
from ..errors import RpcException

Parcel = tuple[bytes, list[Any]]

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_MOVABLE = frozenset({torch.strided, torch.sparse_coo})
# How reports begin.
_RAISED_BY = "raised by "

# The parcel that this thread is packing.
_open = threading.local()


def pack(value: Any) -> Parcel:
    """Return `value` as a parcel; raise TypeError where something in it cannot be pickled."""
    if type(value) in _PLAIN:
        return pickle.dumps(value, protocol=5), []
    file, parts = io.BytesIO(), _Parts()
    outer = getattr(_open, "undo", None)
    _open.undo = parts.undo
    try:
        _Pickler(file, parts).dump(value)
    except Exception as error:
        take_back((b"", parts))
        raise TypeError(f"cannot be sent to another process: {error}") from error
    finally:
        _open.undo = outer
    return file.getvalue(), parts if parts.undo else list(parts)


def if_not_sent(undo: Callable[[], None]) -> None:
    """While an object is packed: note what is to be done if its parcel never arrives."""
    noted = getattr(_open, "undo", None)
    if noted is not None:
        noted.append(undo)


def take_back(parcel: Parcel) -> None:
    """Do what was noted for a parcel that has not arrived."""
    for undo in getattr(parcel[1], "undo", ()):
        undo()


def unpack(parcel: Parcel) -> Any:
    payload, parts = parcel
    return pickle.loads(payload, buffers=parts)


class _Parts(list[Any]):
    """The tensors of a parcel with what is to be done if it never arrives; elsewhere a list."""

    def __init__(self) -> None:
        super().__init__()
        self.undo: list[Callable[[], None]] = []

    def __reduce__(self) -> Any:
        # Inside of another parcel that is being packed.
        for undo in self.undo:
            if_not_sent(undo)
        return list, (list(self),)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Puts tensors aside, to stand in their place again at loading."""

    def __init__(self, file: io.BytesIO, parts: _Parts) -> None:
        super().__init__(file, 5, divider(parts, sys.maxsize))
        self._parts = parts

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and obj.layout in _MOVABLE and not (obj.is_nested or obj.is_meta):
            self._parts.append(obj)
            return take, (MARK,)
        found = reduce_for_any_script(obj)
        return super().reducer_override(obj) if found is None else found


def pack_error(error: BaseException, peer: str) -> Parcel:
    """Return an exception that was caught in the process `peer` as a parcel."""
    report = remote_report(error)
    # One that came by a call from a third process keeps the report that it came with.
    if report is None or not report.startswith(_RAISED_BY):
        report = f"{_RAISED_BY}{peer!r}:\n{format_error(error)}"
    try:
        # Others than exceptions would end the caller.
        own = pack(error) if isinstance(error, Exception) else None
    except TypeError:
        own = None
    return pack((type(error).__qualname__, report, own))


def unpack_error(parcel: Parcel) -> Exception:
    """Return the exception to raise here, with the remote traceback as its cause."""
    name, report, own = unpack(parcel)
    error = None
    if own is not None:
        try:
            error = unpack(own)
        except Exception as reason:
            report = f"{report}\n(this process could not recreate it: {reason!r})"
    if not isinstance(error, Exception):
        return RpcException(f"{name} {report}")
    error.__cause__ = remote_traceback(report)
    return error
