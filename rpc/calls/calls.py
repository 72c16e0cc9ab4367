"""Calls between processes, over torch.distributed.rpc: the only file that sends anything.

A call travels as a parcel, and so does its answer: a value, or what was raised. So arguments may be
lambdas, exceptions keep their type, and everything that torch itself raises is the transport's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any, TypeVar, cast

import torch
import torch.distributed.rpc as rpc
from torch.distributed.rpc.functions import async_execution
from torch.futures import Future

from ..errors import RpcError
from .payload import Parcel, pack, take_back, unpack
from .remote_errors import Failure, describe, rebuild
from .slots import Slots

F = TypeVar("F", bound=Callable[..., Any])

# What the callee answers: whether the parcel holds a value, not a failure.
Answer = tuple[bool, Parcel]


def answered_later(func: F) -> F:
    """Have a function answer by the future that it returns, and hold no thread meanwhile."""
    return cast(F, async_execution(func))  # type: ignore[no-untyped-call]


def never_waits(func: F) -> F:
    """Have a function served at once, however many calls run: it must be short and wait for none.

    So what all others rely on, such as tables and counts, is there in a process that is busy.
    """
    func._never_waits = True  # type: ignore[attr-defined]
    return func


def serve_at_once(count: int) -> None:
    """Set how many calls this process serves at once, from now on."""
    global _slots
    _slots = Slots(count)


_slots = Slots(16)


def call_sync(
    to: str,
    func: Callable[..., Any],
    args: Any = (),
    kwargs: Any = None,
    timeout: float = -1,
    *,
    what: str | None = None,
) -> Any:
    """Call `func` on `to` and return its result, or raise what it raised.

    Args:
        what: what is called, as errors of the transport tell it, where `func` only leads there.
    """
    timeout = checked_timeout(timeout)
    entry, parcel = _prepare(func, args, kwargs)
    try:
        answer = rpc.rpc_sync(to, entry, args=(parcel,), timeout=timeout)
    except RuntimeError as error:
        raise _lost(parcel, error, to, what or func) from error
    return _open(answer)


def call_async(
    to: str,
    func: Callable[..., Any],
    args: Any = (),
    kwargs: Any = None,
    timeout: float = -1,
    *,
    what: str | None = None,
) -> Future[Any]:
    """Like `call_sync`, but return a future, whose `wait()` returns the result or raises."""
    timeout = checked_timeout(timeout)
    entry, parcel = _prepare(func, args, kwargs)
    try:
        sent = rpc.rpc_async(to, entry, args=(parcel,), timeout=timeout)
    except RuntimeError as error:
        raise _lost(parcel, error, to, what or func) from error
    result: Future[Any] = Future(devices=devices())

    def finish(done: Future[Answer]) -> None:
        try:
            answer = done.wait()
        except RuntimeError as error:
            cause, lost = error.with_traceback(None), _lost(parcel, error, to, what or func)
            fail_by(result, partial(_raise, type(lost), str(lost), cause))
            return
        try:
            result.set_result(_open(answer))
        except Exception:
            fail_by(result, partial(_open, answer))

    sent.add_done_callback(finish)
    return result


def fail_by(future: Future[Any], fail: Callable[[], Any]) -> None:
    """Have a future raise what `fail` raises, anew for each that waits.

    An error that the future kept would keep the frames that it went through, with the future: no
    garbage collection sees through that.
    """
    future._set_unwrap_func(lambda _: fail())
    future.set_result(None)


def _raise(kind: type[Exception], text: str, cause: Exception) -> None:
    raise kind(text) from cause


def is_async(func: Callable[..., Any]) -> bool:
    """Whether `func` answers by a future: decorated by torch's `async_execution`."""
    return hasattr(func, "_wrapped_async_rpc_function")


def _prepare(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Parcel]:
    entry = _serve_now if hasattr(func, "_never_waits") else _serve
    return entry, pack((func, tuple(args), dict(kwargs or {})))


def _lost(parcel: Parcel, error: RuntimeError, to: str, func: Callable[..., Any] | str) -> RpcError:
    if not is_late(error):
        take_back(parcel)
    return transport_error(error, to, func)


def own_name() -> str:
    """Return the name under which this process takes calls."""
    return str(rpc.get_worker_info().name)


@answered_later
def _serve_now(parcel: Parcel) -> Future[Answer]:
    return _carry_out(parcel)


@answered_later
def _serve(parcel: Parcel) -> Future[Answer]:
    slots = _slots
    if not slots.take():
        later: Future[Answer] = Future(devices=devices())
        if not slots.enter(partial(_serve_later, parcel, later)):
            return later
    try:
        return _carry_out(parcel)
    finally:
        slots.leave()


def _serve_later(parcel: Parcel, told: Future[Answer]) -> None:
    def tell(done: Future[Answer]) -> None:
        try:
            told.set_result(done.wait())
        except BaseException as error:
            # Of a device that was not in use when the call came, for one.
            told.set_result(_failed(error))

    _carry_out(parcel).add_done_callback(tell)


def _carry_out(parcel: Parcel) -> Future[Answer]:
    try:
        func, args, kwargs = unpack(parcel)
        value = func(*args, **kwargs)
        if is_async(func):
            later: Future[Answer] = value.then(_answer_of)
            return later
        answer = True, pack(value)
    except BaseException as error:
        answer = _failed(error)
    told: Future[Answer] = Future(devices=devices())
    told.set_result(answer)
    return told


def _answer_of(done: Future[Any]) -> Answer:
    try:
        return True, pack(done.wait())
    except BaseException as error:
        answer = _failed(error)
        error.__traceback__ = None
        return answer


def _failed(error: BaseException) -> Answer:
    return False, pack(describe(error, own_name()))


def _open(answer: Answer) -> Any:
    is_value, parcel = answer
    content = unpack(parcel)
    if is_value:
        return content
    raise rebuild(Failure(*content))


def devices() -> list[int | str | torch.device]:
    """Return the devices whose streams a future's value has to wait for."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


# torch's text for a time-out; the rest it takes from the connection that broke.
_TIME_OUT = re.compile(r"RPCErr:1:.*?\((\d+) ms\)", re.DOTALL)
_BROKEN = ("eof", "connection", "pipe", "broken", "error originated at tensorpipe", "not running")
_NO_WORLD = ("has not been initialized", "RPC not initialized")
_DEVICES = ("set_device_map", "device mapping", "device map")

# In seconds: what torch can count, in milliseconds of 32 bits.
_SHORTEST, _LONGEST = 0.001, 2e6


def checked_timeout(timeout: float) -> float:
    """Return a timeout as torch takes it: -1, 0, or at least what it can count.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative, other than -1, or not finite.
    """
    if timeout == -1:
        return -1
    if not isinstance(timeout, Real) or isinstance(timeout, bool):
        raise TypeError(f"timeout must be a number of seconds, got {timeout!r}")
    if not math.isfinite(timeout) or timeout < 0:
        raise ValueError(
            f"timeout must be seconds, 0 for no limit or -1 for the world's, got {timeout!r}"
        )
    return min(max(float(timeout), _SHORTEST), _LONGEST) if timeout else 0


def is_late(error: RuntimeError) -> bool:
    """Whether torch tells of a time-out: the message may have arrived, or may arrive yet."""
    return _TIME_OUT.search(str(error)) is not None


def transport_error(error: RuntimeError, to: str, func: Callable[..., Any] | str) -> RpcError:
    """Return the error for a message to `to` that torch could not deliver or get answered.

    Args:
        func: what was called; a text is told as it is.
    """
    what = func if isinstance(func, str) else f"{getattr(func, '__qualname__', repr(func))}()"
    text = str(error)
    late = _TIME_OUT.search(text)
    if late:
        return RpcError(f"{to!r} has not answered {what} within {int(late[1]) / 1000:g} s")
    if any(phrase in text for phrase in _NO_WORLD):
        return RpcError(f"{what} cannot be called on {to!r}: the world has been stopped")
    if any(phrase in text for phrase in _DEVICES):
        return RpcError(
            f"{what} on {to!r}: a tensor that is not on the CPU was to be sent, and "
            f"World(device_maps=...) does not say to which device: {text}"
        )
    if any(word in text.lower() for word in _BROKEN):
        return RpcError(f"{to!r} is gone or cannot be reached, so {what} has no answer: {text}")
    return RpcError(f"{what} could not be called on {to!r}: {text}")
