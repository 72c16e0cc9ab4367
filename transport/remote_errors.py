"""Exceptions on their way to another process: described where raised, rebuilt where awaited."""

from __future__ import annotations

import builtins
import pickle
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, cast

from .errors import RemoteError, RemoteTraceback
from .pickling import dumps, loads

# Of a text, in characters. The first quarter is kept, and the end, the best part of a traceback.
TEXT_LIMIT = 64 * 1024
# Of a pickled exception, in bytes: one that holds a whole data set travels as its text.
PICKLE_LIMIT = 16 * 1024 * 1024
# Python 3.10 has no groups.
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())


class ExceptionWithTraceback:
    """Carries an exception through a pickle, which gives the exception itself, with its traceback.

    In the receiving process the traceback is a text: the `__cause__` of the exception, a
    `RemoteTraceback`. An exception that cannot be pickled becomes a `RemoteError`.

    Args:
        tb: the traceback (default: the one that the exception has).

    Attributes:
        exc: the exception.
        tb: the text of its traceback, in triple quotes.
    """

    def __init__(self, exc: BaseException, tb: TracebackType | None = None) -> None:
        self.exc = exc
        self._text = format_error(exc, tb)
        self.tb = _quoted(self._text)

    def __reduce__(self) -> tuple[Callable[[bytes], BaseException], tuple[bytes]]:
        return rebuild, (describe(self.exc, self._text),)


def describe(error: BaseException, text: str | None = None) -> bytes:
    """Return the bytes from which `rebuild` makes the exception in another process. Never raises.

    Args:
        text: its traceback (default: the one that it has).
    """
    text = format_error(error) if text is None else text
    pickled, reason = _pickled(error)
    if pickled is None:
        text = f"{text}\n(it could not be pickled: {reason})"
    notes = getattr(error, "__notes__", None)
    notes = [shorten(note) for note in notes if type(note) is str] if type(notes) is list else []
    return pickle.dumps((_type_name(error), _message(error), text, notes, pickled))


def rebuild(data: bytes) -> BaseException:
    """Return a described exception, its traceback as its `__cause__`. Never raises.

    It has the original type, or is a `RemoteError` if this process cannot make one.
    """
    type_name, message, text, notes, pickled = pickle.loads(data)
    if pickled is not None:
        # The code of a class may raise anything at all while an instance is made.
        try:
            error = _made_from(pickled)
            if notes and not hasattr(error, "__notes__"):
                error.__dict__["__notes__"] = notes
            error.__cause__ = remote_traceback(text)
            return error
        except BaseException as reason:
            text = f"{text}\n(this process could not recreate it: {_summary(reason)})"
    failure = RemoteError(type_name, message, text)
    failure.__cause__ = remote_traceback(text)
    return failure


def remote_traceback(report: str) -> RemoteTraceback:
    """Return the cause of an exception that came from another process with this report."""
    return RemoteTraceback(_quoted(report))


def remote_report(error: BaseException) -> str | None:
    """Return the traceback with which an exception came from another process, None without one."""
    cause = error.__cause__
    return str(cause).strip('\n"') if isinstance(cause, RemoteTraceback) else None


def format_error(error: BaseException, tb: TracebackType | None = None) -> str:
    """Return the traceback of an exception and of what led to it, of at most TEXT_LIMIT."""
    tb = error.__traceback__ if tb is None else tb
    try:
        text = "".join(traceback.format_exception(type(error), error, tb)).rstrip()
    except BaseException as reason:
        text = f"{_summary(error)}\n(its traceback could not be made: {_summary(reason)})"
    return shorten(text)


def shorten(text: str) -> str:
    """Cut the middle out of a text that is longer than TEXT_LIMIT, and say so there."""
    if len(text) <= TEXT_LIMIT:
        return text
    head = text[: TEXT_LIMIT // 4]
    note = f"\n... [cut here: the whole text has {len(text)} characters] ...\n"
    return head + note + text[len(head) + len(note) - TEXT_LIMIT :]


def _quoted(text: str) -> str:
    return f'\n"""\n{text}\n"""'


def _type_name(error: BaseException) -> str:
    kind = type(error)
    home = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return f"{home}{kind.__qualname__}"


def _message(error: BaseException) -> str:
    try:
        return shorten(str(error))
    except BaseException as reason:
        return f"(its __str__ raised {_type_name(reason)})"


def _summary(error: BaseException) -> str:
    return f"{_type_name(error)}: {_message(error)}"


def _pickled(error: BaseException) -> tuple[bytes | None, str]:
    """Return a pickle that was seen to give this type, and the same message if one does.

    Or None and the reason, as a text: exceptions kept here would keep the frames of the task.
    """
    second_best = None
    reason = ""
    for form in (error, _Parts(error)):
        try:
            data = dumps(form)
            if len(data) > PICKLE_LIMIT:
                raise ValueError(f"its pickle has {len(data)} bytes, more than {PICKLE_LIMIT}")
            copy = _made_from(data)
            if type(copy) is not type(error):
                raise TypeError(f"it comes back as {_summary(copy)}")
            if _message(copy) == _message(error):
                return data, ""
            second_best = second_best or data
        except BaseException as problem:
            reason = reason or _summary(problem)
    return second_best, reason


def _made_from(pickled: bytes) -> BaseException:
    error = loads(pickled)
    if not isinstance(error, BaseException):
        raise TypeError(f"an object of type {type(error).__qualname__} came out of its pickle")
    return error


class _Parts:
    """Pickles an exception past its class's `__init__` and `__reduce__`, which often disagree."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Callable[..., BaseException], tuple[Any, ...]]:
        kind = type(self._error)
        _, args, *state = cast(Any, _built_in_base(kind)).__reduce__(self._error)
        if isinstance(self._error, _GROUP):
            message, members = args
            args = (message, [ExceptionWithTraceback(member) for member in members])
        return _from_parts, (kind, args, *state)


def _from_parts(
    kind: type[BaseException], args: tuple[Any, ...], state: Any = None
) -> BaseException:
    base = cast(Any, _built_in_base(kind))
    error: BaseException = base.__new__(kind, *args)
    base.__init__(error, *args)
    error.__setstate__(state)
    return error


def _built_in_base(kind: type[BaseException]) -> type[BaseException]:
    return next(
        base
        for base in kind.__mro__
        if base.__module__ == "builtins" and issubclass(base, BaseException)
    )
