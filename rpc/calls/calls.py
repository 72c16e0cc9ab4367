"""Calls between processes over torch.distributed.rpc; all other files send through this one.

We pickle calls and answers (a value or an exception) into messages ourselves. So arguments may be
lambdas, exceptions keep their type, and an error raised by torch always means the transport failed.
"""

from __future__ import annotations

import math
import re
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any, TypeVar

import torch
import torch.distributed.rpc as rpc
from torch.distributed.rpc.functions import async_execution
from torch.futures import Future

from ..errors import RpcError
from .payload import Message, pack, pack_error, release_unsent, unpack, unpack_error

Func = Callable[..., Any]
F = TypeVar("F", bound=Func)

# Whether the message holds a value rather than an exception, and the message.
Answer = tuple[bool, Message]

# The class of all futures, torch's own included. If a function returns a future, its call is
# answered when the future is complete, and occupies no thread until then.
AnyFuture = torch._C.Future

# Threads for answers, time-outs and errors, in addition to those for services.
SPARE_THREADS = 4


def served_immediately(func: F) -> F:
    """Mark a short function that never waits: it is served even while all slots are busy.

    Tables and reference counts therefore stay available in a busy process.
    """
    func._served_immediately = True  # type: ignore[attr-defined]
    return func


def call_sync(
    to: str,
    func: Func,
    args: Any = (),
    kwargs: Any = None,
    timeout: float = -1,
    *,
    description: str = "",
) -> Any:
    """Call ``func`` on the process ``to`` and return its result, or raise its exception.

    ``description`` names the call in errors of the transport; default: the function's name.
    """
    sent, lost = _send(to, func, args, kwargs, timeout, description)
    try:
        answer = sent.wait()
    except RuntimeError as error:
        raise lost(error) from error
    return _open(answer)


def call_async(
    to: str,
    func: Func,
    args: Any = (),
    kwargs: Any = None,
    timeout: float = -1,
    *,
    description: str = "",
) -> Future[Any]:
    """Call like ``call_sync``, but return a future; its ``wait()`` returns the result or raises."""
    sent, lost = _send(to, func, args, kwargs, timeout, description)
    result: Future[Any] = Future(devices=devices())

    def finish(done: Future[Answer]) -> None:
        try:
            answer = done.wait()
        except RuntimeError as error:
            set_failure(result, partial(_raise, str(lost(error)), error.with_traceback(None)))
            return
        try:
            result.set_result(_open(answer))
        except Exception:
            set_failure(result, partial(_open, answer))

    sent.add_done_callback(finish)
    return result


def _send(
    to: str, func: Func, args: Any, kwargs: Any, timeout: float, description: str
) -> tuple[Future[Answer], Callable[[RuntimeError], RpcError]]:
    """Return a future of the answer, and a function that converts errors of the transport."""
    timeout = checked_timeout(timeout)
    entry = _serve_now if hasattr(func, "_served_immediately") else _serve
    message = pack((func, tuple(args), dict(kwargs or {})))

    def lost(error: RuntimeError) -> RpcError:
        if not _TIME_OUT.search(str(error)):
            # Not after a time-out, because the message may have arrived or may still arrive.
            release_unsent(message)
        return transport_error(error, to, description or func)

    try:
        return rpc.rpc_async(to, entry, args=(message,), timeout=timeout), lost
    except RuntimeError as error:
        raise lost(error) from error


def set_failure(future: Future[Any], fail: Callable[[], Any]) -> None:
    """Complete a future so that each wait calls ``fail``, which raises a new error.

    An error stored in the future would keep the frames of its traceback alive, and the frames would
    keep the future alive. Garbage collection cannot see such a reference cycle.
    """
    future._set_unwrap_func(lambda _: fail())
    future.set_result(None)


def _raise(text: str, cause: Exception) -> None:
    raise RpcError(text) from cause


def own_name() -> str:
    return str(rpc.get_worker_info().name)


class _CallSlots:
    """A limit on the calls that this process serves at once; further calls wait in a queue.

    They do not wait in torch's threads, which also handle answers, time-outs and errors: if
    services blocked all of these threads, not even the death of a process would be noticed.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[tuple[Message, Future[Answer]]] = deque()
        self._lock = threading.Lock()

    def serve(self, message: Message) -> Future[Answer]:
        """Run a call now if a slot is free; otherwise queue it for another thread."""
        with self._lock:
            if not self._free:
                later: Future[Answer] = Future(devices=devices())
                self._waiting.append((message, later))
                return later
            self._free -= 1
        try:
            return _run_call(message)
        finally:
            work = self._next()
            if work is not None:
                # In another thread: this call is answered only when this function returns.
                threading.Thread(target=self._work_on, args=(work,), daemon=True).start()

    def _work_on(self, work: tuple[Message, Future[Answer]] | None) -> None:
        while work is not None:
            message, later = work
            _run_call(message).add_done_callback(partial(_pass_on, later))
            work = self._next()

    def _next(self) -> tuple[Message, Future[Answer]] | None:
        """Return the next waiting call; if there is none, free the slot and return None."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._free += 1
            return None


_slots = _CallSlots(16)


def limit_concurrent_calls(count: int) -> None:
    global _slots
    _slots = _CallSlots(count)


@async_execution  # type: ignore[untyped-decorator]
def _serve_now(message: Message) -> Future[Answer]:
    return _run_call(message)


@async_execution  # type: ignore[untyped-decorator]
def _serve(message: Message) -> Future[Answer]:
    return _slots.serve(message)


def _run_call(message: Message) -> Future[Answer]:
    try:
        func, args, kwargs = unpack(message)
        value = func(*args, **kwargs)
        if isinstance(value, AnyFuture):
            later: Future[Answer] = value.then(_make_answer)  # type: ignore[assignment]
            return later
        answer = True, pack(value)
    except BaseException as error:
        answer = _failed(error)
    done: Future[Answer] = Future(devices=devices())
    done.set_result(answer)
    return done


def _make_answer(done: Future[Any]) -> Answer:
    try:
        return True, pack(done.wait())
    except BaseException as error:
        answer = _failed(error)
        error.__traceback__ = None
        return answer


def _pass_on(later: Future[Answer], done: Future[Answer]) -> None:
    try:
        later.set_result(done.wait())
    except BaseException as error:
        # For example, the value is on a device that was not in use when the call arrived.
        later.set_result(_failed(error))


def _failed(error: BaseException) -> Answer:
    return False, pack_error(error, own_name())


def _open(answer: Answer) -> Any:
    is_value, message = answer
    if is_value:
        return unpack(message)
    raise unpack_error(message)


def devices() -> list[int | str | torch.device]:
    """Return the devices whose streams a future must synchronise with."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


# Matches torch's text for a time-out.
_TIME_OUT = re.compile(r"RPCErr:1:.*?\((\d+) ms\)", re.DOTALL)
# Our texts for torch's other errors: the first entry with a word that torch's text contains.
_TEXTS = {
    ("has not been initialized", "rpc not initialized"): (
        "{what} cannot be called on {to!r}: the world has been stopped"
    ),
    ("set_device_map", "device mapping", "device map"): (
        "{what} on {to!r}: World(device_maps=...) must map the devices of tensors that are not on "
        "the CPU, got a tensor without a mapping: {error}"
    ),
    ("eof", "connection", "pipe", "broken", "error originated at tensorpipe", "not running"): (
        "{to!r} is gone or cannot be reached, so {what} has no answer: {error}"
    ),
    ("",): "{what} could not be called on {to!r}: {error}",
}

# Limits in seconds: torch counts milliseconds in 32 bits.
_SHORTEST, _LONGEST = 0.001, 2e6


def checked_timeout(timeout: float) -> float:
    """Return the timeout in torch's range: -1, 0, or between the shortest and longest one."""
    if timeout == -1:
        return -1
    if not isinstance(timeout, Real) or isinstance(timeout, bool):
        raise TypeError(f"timeout must be a number of seconds, got {timeout!r}")
    if not math.isfinite(timeout) or timeout < 0:
        raise ValueError(
            "timeout must be a number of seconds, 0 (no limit) or -1 (the world's rpc_timeout), "
            f"got {timeout!r}"
        )
    return min(max(float(timeout), _SHORTEST), _LONGEST) if timeout else 0


def describe_call(func: Func) -> str:
    return f"{getattr(func, '__qualname__', repr(func))}()"


def transport_error(error: RuntimeError, to: str, func: Func | str) -> RpcError:
    """Return an RpcError for torch's error about a message to the process ``to``."""
    description = func if isinstance(func, str) else describe_call(func)
    late = _TIME_OUT.search(str(error))
    if late:
        return RpcError(f"{to!r} has not answered {description} within {int(late[1]) / 1000:g} s")
    said = str(error).lower()
    text = next(text for words, text in _TEXTS.items() if any(word in said for word in words))
    return RpcError(text.format(what=description, to=to, error=error))
