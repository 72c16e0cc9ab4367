"""Exceptions on their way to the caller: described where raised, rebuilt with their own type."""

import traceback
from functools import lru_cache
from typing import Any, NamedTuple

from ._payload import Parcel, pack, unpack
from .errors import RpcException


class Failure(NamedTuple):
    """A raised exception.

    Attributes:
        peer: the process in which it was raised.
        name: its type's name, for where the exception itself cannot be had.
        text: its traceback.
        error: the exception, None where it cannot be pickled.
    """

    peer: str
    name: str
    text: str
    error: Parcel | None


def describe(error: BaseException, peer: str) -> Failure:
    """Return what the caller needs to know about an exception caught here."""
    text = "".join(traceback.format_exception(error)).rstrip()
    try:
        parcel = pack(error) if isinstance(error, Exception) else None
    except TypeError:
        parcel = None
    return Failure(peer, type(error).__qualname__, text, parcel)


def rebuild(failure: Failure) -> Exception:
    """Return the exception to raise here: of its own type, its text followed by the traceback."""
    report = f"raised by {failure.peer!r}:\n{failure.text}"
    try:
        error = None if failure.error is None else unpack(failure.error)
    except Exception as reason:
        report = f"{report}\n(the exception itself could not be read here: {reason!r})"
        error = None
    if not isinstance(error, Exception):
        return RpcException(f"{failure.name} {report}")
    if hasattr(error, "remote_report"):
        # It has already come a way, through a process that called another one.
        return error
    try:
        return _with_report(error, report)
    except Exception:
        # A type that cannot be derived from, or whose constructor wants other arguments.
        error.__cause__ = RpcException(report)
        return error


def _with_report(error: Exception, report: str) -> Exception:
    make, args, *rest = _reduced(error)
    if make is not type(error):
        raise TypeError(f"{type(error).__name__} is not made by its class")
    kind: Any = type(error)
    other: Exception = _reporting(kind)(*args)
    for name, value in ((rest and rest[0]) or {}).items():
        setattr(other, name, value)
    other.remote_report = report  # type: ignore[attr-defined]
    return other


def _reduced(error: Exception) -> Any:
    return error.__reduce_ex__(2)


@lru_cache(maxsize=256)
def _reporting(kind: Any) -> Any:
    """Derive a class that differs from `kind` in its text alone."""

    def __str__(self: Any) -> str:
        return f"{kind.__str__(self)}\n\n{self.remote_report}"

    def __reduce__(self: Any) -> Any:
        return _again, (kind, *kind.__reduce__(self)[1:2], self.__dict__)

    names = {"__str__": __str__, "__reduce__": __reduce__, "__module__": kind.__module__}
    derived = type(kind.__name__, (kind,), names)
    derived.__qualname__ = kind.__qualname__
    return derived


def _again(kind: Any, args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    error: Exception = _reporting(kind)(*args)
    for name, value in state.items():
        setattr(error, name, value)
    return error
