"""Calls between processes, over torch.distributed.rpc: the only file that sends anything.

A call travels as a parcel, and so does its answer: a value, or what was raised. So arguments may be
lambdas, exceptions keep their type, and everything that torch itself raises is the transport's.
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
from .payload import Parcel, pack, pack_error, take_back, unpack, unpack_error

Func = Callable[..., Any]
F = TypeVar("F", bound=Func)

# What the callee answers: whether the parcel holds a value, not an exception.
Answer = tuple[bool, Parcel]

# Of torch's own futures too. A function that returns one is answered when that is complete, and
# occupies no thread meanwhile.
AnyFuture = torch._C.Future

# Threads that torch gets beyond those for services: for answers, time-outs and errors.
SPARE_THREADS = 4


def never_waits(func: F) -> F:
    """Have a function served at once, however many calls run: it must be short and wait for none.

    So what all others rely on, such as tables and counts, is there in a process that is busy.
    """
    func._never_waits = True  # type: ignore[attr-defined]
    return func


def call_sync(
    to: str, func: Func, args: Any = (), kwargs: Any = None, timeout: float = -1, *, what: str = ""
) -> Any:
    """Call `func` on `to` and return its result, or raise what it raised.

    Errors of the transport name `what` is called, where `func` only leads there.
    """
    sent, lost = _send(to, func, args, kwargs, timeout, what)
    try:
        answer = sent.wait()
    except RuntimeError as error:
        raise lost(error) from error
    return _open(answer)


def call_async(
    to: str, func: Func, args: Any = (), kwargs: Any = None, timeout: float = -1, *, what: str = ""
) -> Future[Any]:
    """Like `call_sync`, but return a future, whose `wait()` returns the result or raises."""
    sent, lost = _send(to, func, args, kwargs, timeout, what)
    result: Future[Any] = Future(devices=devices())

    def finish(done: Future[Answer]) -> None:
        try:
            answer = done.wait()
        except RuntimeError as error:
            fail_by(result, partial(_raise, str(lost(error)), error.with_traceback(None)))
            return
        try:
            result.set_result(_open(answer))
        except Exception:
            fail_by(result, partial(_open, answer))

    sent.add_done_callback(finish)
    return result


def _send(
    to: str, func: Func, args: Any, kwargs: Any, timeout: float, what: str
) -> tuple[Future[Answer], Callable[[RuntimeError], RpcError]]:
    """Return the future answer, and what makes an error of the transport ours."""
    timeout = checked_timeout(timeout)
    entry = _serve_now if hasattr(func, "_never_waits") else _serve
    parcel = pack((func, tuple(args), dict(kwargs or {})))

    def lost(error: RuntimeError) -> RpcError:
        if not _TIME_OUT.search(str(error)):
            # After a time-out the message may have arrived, or may arrive yet.
            take_back(parcel)
        return transport_error(error, to, what or func)

    try:
        return rpc.rpc_async(to, entry, args=(parcel,), timeout=timeout), lost
    except RuntimeError as error:
        raise lost(error) from error


def fail_by(future: Future[Any], fail: Callable[[], Any]) -> None:
    """Have a future raise what `fail` raises, anew for each that waits.

    An error that the future kept would keep the frames that it went through, with the future: no
    garbage collection sees through that.
    """
    future._set_unwrap_func(lambda _: fail())
    future.set_result(None)


def _raise(text: str, cause: Exception) -> None:
    raise RpcError(text) from cause


def own_name() -> str:
    return str(rpc.get_worker_info().name)


class _Slots:
    """How many calls this process serves at once; the others wait, but not in torch's threads.

    torch completes time-outs, errors and answers in the threads that run services. Were all of them
    in services that wait for other processes, nothing could reach those any more, deaths included.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[tuple[Parcel, Future[Answer]]] = deque()
        self._lock = threading.Lock()

    def serve(self, parcel: Parcel) -> Future[Answer]:
        """Carry a call out in a free slot, here and now; without one, later and elsewhere."""
        with self._lock:
            if not self._free:
                later: Future[Answer] = Future(devices=devices())
                self._waiting.append((parcel, later))
                return later
            self._free -= 1
        try:
            return _carry_out(parcel)
        finally:
            work = self._next()
            if work is not None:
                # The caller's own answer is sent when it returns, so it cannot work on itself.
                threading.Thread(target=self._work_on, args=(work,), daemon=True).start()

    def _work_on(self, work: tuple[Parcel, Future[Answer]] | None) -> None:
        while work is not None:
            parcel, later = work
            _carry_out(parcel).add_done_callback(partial(_pass_on, later))
            work = self._next()

    def _next(self) -> tuple[Parcel, Future[Answer]] | None:
        """Take a call that waits for the slot of the last one; without any, the slot is free."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._free += 1
            return None


_slots = _Slots(16)


def serve_at_once(count: int) -> None:
    global _slots
    _slots = _Slots(count)


@async_execution  # type: ignore[untyped-decorator]
def _serve_now(parcel: Parcel) -> Future[Answer]:
    return _carry_out(parcel)


@async_execution  # type: ignore[untyped-decorator]
def _serve(parcel: Parcel) -> Future[Answer]:
    return _slots.serve(parcel)


def _carry_out(parcel: Parcel) -> Future[Answer]:
    try:
        func, args, kwargs = unpack(parcel)
        value = func(*args, **kwargs)
        if isinstance(value, AnyFuture):
            later: Future[Answer] = value.then(_answer_of)  # type: ignore[assignment]
            return later
        answer = True, pack(value)
    except BaseException as error:
        answer = _failed(error)
    done: Future[Answer] = Future(devices=devices())
    done.set_result(answer)
    return done


def _answer_of(done: Future[Any]) -> Answer:
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
        # Of a device that was not in use when the call came, for one.
        later.set_result(_failed(error))


def _failed(error: BaseException) -> Answer:
    return False, pack_error(error, own_name())


def _open(answer: Answer) -> Any:
    is_value, parcel = answer
    if is_value:
        return unpack(parcel)
    raise unpack_error(parcel)


def devices() -> list[int | str | torch.device]:
    """Return the devices whose streams a future's value has to wait for."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


# torch's text for a time-out, and words of its other texts with ours, which adds theirs.
_TIME_OUT = re.compile(r"RPCErr:1:.*?\((\d+) ms\)", re.DOTALL)
_TEXTS = {
    ("has not been initialized", "rpc not initialized"): (
        "{what} cannot be called on {to!r}: the world has been stopped"
    ),
    ("set_device_map", "device mapping", "device map"): (
        "{what} on {to!r}: a tensor that is not on the CPU was to be sent, and "
        "World(device_maps=...) does not say to which device: {error}"
    ),
    ("eof", "connection", "pipe", "broken", "error originated at tensorpipe", "not running"): (
        "{to!r} is gone or cannot be reached, so {what} has no answer: {error}"
    ),
    ("",): "{what} could not be called on {to!r}: {error}",
}

# In seconds: what torch can count, in milliseconds of 32 bits.
_SHORTEST, _LONGEST = 0.001, 2e6


def checked_timeout(timeout: float) -> float:
    """Return a timeout as torch takes it: -1, 0, or at least what it can count."""
    if timeout == -1:
        return -1
    if not isinstance(timeout, Real) or isinstance(timeout, bool):
        raise TypeError(f"timeout must be a number of seconds, got {timeout!r}")
    if not math.isfinite(timeout) or timeout < 0:
        raise ValueError(
            f"timeout must be seconds, 0 for no limit or -1 for the world's, got {timeout!r}"
        )
    return min(max(float(timeout), _SHORTEST), _LONGEST) if timeout else 0


def called(func: Func) -> str:
    return f"{getattr(func, '__qualname__', repr(func))}()"


def transport_error(error: RuntimeError, to: str, func: Func | str) -> RpcError:
    """Return the error for a message to `to` that torch could not deliver or get answered."""
    what = func if isinstance(func, str) else called(func)
    late = _TIME_OUT.search(str(error))
    if late:
        return RpcError(f"{to!r} has not answered {what} within {int(late[1]) / 1000:g} s")
    said = str(error).lower()
    text = next(text for words, text in _TEXTS.items() if any(word in said for word in words))
    return RpcError(text.format(what=what, to=to, error=error))
