"""Exceptions on their way to the caller: described where raised, rebuilt with their own type."""

import traceback
from functools import lru_cache
from typing import Any, NamedTuple, cast

from ..errors import RpcException
from .payload import Parcel, pack, unpack


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
        error = RpcException(f"{failure.name} {report}")
        error.remote_report = report  # type: ignore[attr-defined]
        return error
    if "remote_report" in getattr(error, "__dict__", ()):
        # It has already come a way, through a process that called another one.
        return error
    return _with_report(error, report)


def _with_report(error: Exception, report: str) -> Exception:
    for change in (_change_class, _make_again):
        try:
            other = change(error)
            other.__dict__["remote_report"] = report
            return other
        except Exception:
            continue
    # A class that none can be derived from.
    error.__cause__ = RpcException(report)
    return error


def _change_class(error: Exception) -> Exception:
    kind: Any = type(error)
    error.__class__ = _reporting(kind)
    return error


def _make_again(error: Exception) -> Exception:
    """For built-in types, whose instances keep their class."""
    kind: Any = type(error)
    reduced: Any = error.__reduce_ex__(2)
    _, args, *rest = reduced
    other = _reporting(kind)(*args)
    other.__setstate__((rest and rest[0]) or {})
    other.__cause__, other.__notes__ = error.__cause__, getattr(error, "__notes__", [])
    return cast(Exception, other)


@lru_cache(maxsize=256)
def _reporting(kind: Any) -> Any:
    """Derive a class that differs from `kind` in its text alone."""

    def __str__(self: Any) -> str:
        try:
            text = kind.__str__(self)
        except Exception as error:
            text = f"({kind.__qualname__}.__str__ raised {type(error).__name__})"
        return f"{text}\n\n{self.__dict__['remote_report']}"

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        make, args, *rest = kind.__reduce_ex__(self, protocol)
        state = dict((rest and rest[0]) or {})
        report = state.pop("remote_report", None) or self.__dict__["remote_report"]
        return _again, (kind if make is type(self) else make, args, state, report)

    names = {
        "__str__": __str__,
        "__reduce_ex__": __reduce_ex__,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind,), names)


def _again(make: Any, args: tuple[Any, ...], state: dict[str, Any], report: str) -> Exception:
    error: Exception = make(*args)
    if state:
        error.__setstate__(state)
    return _with_report(error, report)
