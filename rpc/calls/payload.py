"""Values and exceptions as bytes, beside the tensors in them, which torch moves by itself.

Functions and classes that the receiver could not import (lambdas, local ones, those of a script)
travel by value. Only members of the own world send such bytes.
"""

import io
import pickle
import threading
import traceback
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import cloudpickle
import torch
from torch import Tensor

from ...parallel import reduce_for_any_script
from ..errors import RpcException

Parcel = tuple[bytes, list[Any]]

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_MOVABLE = frozenset({torch.strided, torch.sparse_coo})

# The parcels that this thread is packing and unpacking.
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
    if not parts:
        return pickle.loads(payload)
    # Loading may unpack another parcel, inside an object's __setstate__.
    outer = getattr(_open, "parts", None)
    _open.parts = parts
    try:
        return pickle.loads(payload)
    finally:
        _open.parts = outer


def _part(index: int) -> Any:
    return _open.parts[index]


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
    """Puts tensors aside and leaves a number in their place."""

    def __init__(self, file: io.BytesIO, parts: _Parts) -> None:
        super().__init__(file, protocol=5)
        self._parts = parts

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and obj.layout in _MOVABLE and not (obj.is_nested or obj.is_meta):
            self._parts.append(obj)
            return _part, (len(self._parts) - 1,)
        found = reduce_for_any_script(obj)
        return super().reducer_override(obj) if found is None else found


def pack_error(error: BaseException, peer: str) -> Parcel:
    """Return an exception that was caught in the process `peer` as a parcel."""
    text = "".join(traceback.format_exception(error)).rstrip()
    try:
        own = pack(error) if isinstance(error, Exception) else None
    except TypeError:
        own = None
    return pack((type(error).__qualname__, f"raised by {peer!r}:\n{text}", own))


def unpack_error(parcel: Parcel) -> Exception:
    """Return the exception to raise here: of its own type, its text followed by the traceback."""
    name, report, own = unpack(parcel)
    error = None
    if own is not None:
        try:
            error = unpack(own)
        except Exception as reason:
            report = f"{report}\n(the exception itself could not be read here: {reason!r})"
    if not isinstance(error, Exception):
        error = RpcException(f"{name} {report}")
        error.__dict__["remote_report"] = report
    elif "remote_report" not in error.__dict__:
        error = _with_report(error, report)
    # Else it has already come a way, through a process that called another one.
    return error


def _with_report(error: Exception, report: str) -> Exception:
    """Return the exception with a class that differs in its text alone."""
    other: Any = error
    kind: Any = type(error)
    try:
        kind = _reporting(kind)
        try:
            other.__class__ = kind
        except TypeError:
            # Instances of built-in types keep their class.
            _, args, *state = other.__reduce_ex__(2)
            other = kind(*args)
            other.__setstate__(state[0] if state else None)
    except Exception:
        # A class that none can be derived from.
        error.__cause__ = RpcException(report)
        return error
    other.__dict__["remote_report"] = report
    return cast(Exception, other)


@lru_cache(maxsize=256)
def _reporting(kind: Any) -> Any:
    def __str__(self: Any) -> str:
        try:
            text = kind.__str__(self)
        except Exception as error:
            text = f"({kind.__qualname__}.__str__ raised {type(error).__name__})"
        return f"{text}\n\n{self.__dict__['remote_report']}"

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        make, args, *state = kind.__reduce_ex__(self, protocol)
        report = self.__dict__["remote_report"]
        return _again, (report, kind if make is type(self) else make, args, *state)

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    names |= {"__str__": __str__, "__reduce_ex__": __reduce_ex__}
    return type(kind.__name__, (kind,), names)


def _again(report: str, make: Any, args: tuple[Any, ...], state: Any = None) -> Exception:
    error: Exception = make(*args)
    error.__setstate__(state)
    return _with_report(error, report)
