"""Exceptions sent to another process: the sender describes them, the receiver rebuilds them."""

from __future__ import annotations

import builtins
import pickle
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar, cast

from ..primitives.notes import add_note
from .errors import RemoteError, RemoteTraceback
from .pickling import dumps, loads

_T = TypeVar("_T")

# The maximum number of characters in a text. Longer texts keep their beginning and their end.
TEXT_LIMIT = 64 * 1024
# The maximum number of bytes in a pickled exception. Larger exceptions are sent as text.
PICKLE_LIMIT = 16 * 1024 * 1024
# Python 3.10 has no exception groups.
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())


class ExceptionWithTraceback:
    """Wraps an exception so that pickling keeps its traceback.

    Unpickling returns the exception itself. Its ``__cause__`` is a ``RemoteTraceback`` with the
    text of the traceback. An exception that cannot be pickled becomes a ``RemoteError``.

    Args:
        tb: the traceback (default: the exception's own).

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
    """Return the bytes from which ``rebuild`` makes the exception in another process. Never raises.

    Args:
        text: the formatted traceback (default: the text of ``format_error``).
    """
    text = format_error(error) if text is None else text
    pickled, reason = dump_checked(error, _dump_exception, _load_exception)
    if pickled is None:
        text = f"{text}\n(it could not be pickled: {reason})"
    notes = getattr(error, "__notes__", None)
    notes = [shorten(note) for note in notes if type(note) is str] if type(notes) is list else []
    return pickle.dumps((_type_name(error), _message(error), text, notes, pickled))


def rebuild(data: bytes) -> BaseException:
    """Return the exception from the bytes of ``describe``. Never raises.

    The ``__cause__`` is a ``RemoteTraceback``. The exception has its original type, or is a
    ``RemoteError`` if this process cannot create one.
    """
    type_name, message, text, notes, pickled = pickle.loads(data)
    if pickled is not None:
        # The user's class may raise any exception while it is unpickled.
        try:
            error = _load_exception(pickled)
            for note in () if hasattr(error, "__notes__") else notes:
                add_note(error, note)
            error.__cause__ = remote_traceback(text)
            return error
        except BaseException as reason:
            text = f"{text}\n(this process could not recreate it: {_summary(reason)})"
    failure = RemoteError(type_name, message, text)
    failure.__cause__ = remote_traceback(text)
    return failure


def remote_traceback(report: str) -> RemoteTraceback:
    """Return the ``__cause__`` for an exception from another process with this traceback."""
    return RemoteTraceback(_quoted(report))


def remote_report(error: BaseException) -> str | None:
    """Return the traceback of an exception from another process, None if it has none."""
    cause = error.__cause__
    return str(cause).strip('\n"') if isinstance(cause, RemoteTraceback) else None


def format_error(error: BaseException, tb: TracebackType | None = None) -> str:
    """Return the traceback of an exception and its causes, at most TEXT_LIMIT characters."""
    tb = error.__traceback__ if tb is None else tb
    try:
        text = "".join(traceback.format_exception(type(error), error, tb)).rstrip()
    except BaseException as reason:
        text = f"{_summary(error)}\n(its traceback could not be formatted: {_summary(reason)})"
    return shorten(text)


def shorten(text: str) -> str:
    """Replace the middle of a text that is longer than TEXT_LIMIT by a note."""
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


def dump_checked(
    error: BaseException, dump: Callable[[Any], _T], load: Callable[[Any], Any]
) -> tuple[_T | None, str]:
    """Dump an exception so that it loads as the same type, if possible with the same message.

    Return None and the reason if it does not. The reason is a text, because an exception would keep
    the frames of the task alive.
    """
    second_best = None
    reason = ""
    for form in (error, _BaseState(error)):
        try:
            data = dump(form)
            copy = load(data)
            if type(copy) is not type(error):
                raise TypeError(f"it comes back as {_summary(copy)}")
            if _message(copy) == _message(error):
                return data, ""
            second_best = second_best or data
        except BaseException as problem:
            reason = reason or _summary(problem)
    return second_best, reason


def _dump_exception(form: Any) -> bytes:
    data = dumps(form)
    if len(data) > PICKLE_LIMIT:
        raise ValueError(f"its pickle has {len(data)} bytes, more than {PICKLE_LIMIT}")
    return data


def _load_exception(pickled: bytes) -> BaseException:
    error = loads(pickled)
    if not isinstance(error, BaseException):
        raise TypeError(f"its pickle loads as an object of type {type(error).__qualname__}")
    return error


class _BaseState:
    """Pickles an exception without the ``__init__`` and ``__reduce__`` of its class."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Callable[..., BaseException], tuple[Any, ...]]:
        kind = type(self._error)
        _, args, *state = cast(Any, _built_in_base(kind)).__reduce__(self._error)
        if isinstance(self._error, _GROUP):
            message, members = args
            args = (message, [ExceptionWithTraceback(member) for member in members])
        return _from_base_state, (kind, args, *state)


def _from_base_state(
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
