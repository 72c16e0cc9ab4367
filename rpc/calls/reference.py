"""A reference to an object that stays in another process.

Not torch's RRef: in the second world of a process those still belong to the first one's agent, and
a dead owner fills the log. Here the owner keeps a value until its holders are gone: the reference
that the caller got, and every copy of it that was sent on.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import WorkerInfo
from torch.futures import Future

from ..errors import RpcError
from . import node as _node
from .calls import (
    answered_later,
    call_async,
    call_sync,
    devices,
    fail_by,
    is_async,
    never_waits,
    own_name,
)
from .node import Kept
from .payload import Parcel, if_not_sent, pack, unpack

_numbers = itertools.count()


class RpcReference:
    """A value that stays in the process that owns it; the reference can be sent to other members.

    Made by `RpcGroup.remote`, `registered_remote` and `get_paired`.

    Args:
        owner: the owner's name.
        fetch: what returns the value, called in the owner's process.
        args: its arguments.
        made: completes when the value is there; None where it is there already.
    """

    def __init__(
        self,
        owner: str,
        fetch: Callable[..., Any],
        args: tuple[Any, ...],
        made: Future[None] | None = None,
    ) -> None:
        self._owner = owner
        self._fetch = fetch
        self._args = args
        self._made = made
        if fetch is _kept_value:
            weakref.finalize(self, _release, owner, *args).atexit = False

    def to_here(self, timeout: float = -1) -> Any:
        """Return a copy of the value; on its owner, the value itself.

        Args:
            timeout: in seconds; -1 is the world's default, 0 waits as long as it takes, as the
                owner always does.

        Raises:
            RpcError: the owner is gone, or has not answered in time.
            Exception: what the call that makes the value raised, of its own type.
        """
        if self._made is not None and self._made.done():
            # It tells at once of a call that never reached the owner.
            self._made.wait()
        if self.is_owner():
            return self.local_value()
        if self._made is None:
            return call_sync(self._owner, self._fetch, self._args, timeout=timeout)
        fetched = call_async(self._owner, self._fetch, self._args, timeout=timeout)
        return _unless_failed(fetched, self._made).wait()

    def local_value(self) -> Any:
        """Return the value itself.

        Raises:
            RuntimeError: this process is not the owner.
        """
        if not self.is_owner():
            raise RuntimeError(
                f"the value belongs to {self._owner!r}: local_value() works there, "
                "to_here() brings a copy"
            )
        value = self._fetch(*self._args)
        return value.wait() if is_async(self._fetch) else value

    def is_owner(self) -> bool:
        """Return whether this process owns the value."""
        return _node.current().name == self._owner

    def owner(self) -> WorkerInfo:
        """Return torch's description of the owner."""
        info: WorkerInfo = rpc.get_worker_info(self._owner)
        return info

    def owner_name(self) -> str:
        """Return the owner's name."""
        return self._owner

    def __reduce__(self) -> Any:
        args = self._args
        if self._fetch is _kept_value:
            number, own = self._args
            other = _new_number()
            # Before the copy travels, so that the owner cannot forget the value meanwhile.
            if self.is_owner():
                _retain(number, own, other)
            else:
                call_sync(self._owner, _retain, (number, own, other))
            if_not_sent(partial(_release, self._owner, number, other))
            args = number, other
        return RpcReference, (self._owner, self._fetch, args)

    def __repr__(self) -> str:
        return f"RpcReference(owner={self._owner!r})"


def call_remote(
    to: str, func: Callable[..., Any], args: Any = (), kwargs: Any = None, timeout: float = -1
) -> RpcReference:
    """Call `func` on `to` and return at once a reference to its result, which stays there."""
    number = _new_number()
    # A parcel of its own: that the owner cannot open it is then an error of the value too.
    call = pack((func, tuple(args), dict(kwargs or {})))
    keep = _keep_async if is_async(func) else _keep
    made = call_async(to, keep, (number, call), timeout=timeout, what=f"{_name(func)}()")
    return RpcReference(to, _kept_value, (number, number), made)


def _new_number() -> str:
    return f"{_node.current().name}/{next(_numbers)}"


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__qualname__", repr(func))


def _unless_failed(fetched: Future[Any], made: Future[None]) -> Future[Any]:
    """Return a future of the fetched value that ends too when the value is not made."""
    first: Future[Any] = Future(devices=devices())
    lock = threading.Lock()

    def finish(done: Future[Any], is_made: bool) -> None:
        try:
            value = done.wait()
        except Exception:
            with lock:
                if not first.done():
                    fail_by(first, done.wait)
            return
        with lock:
            if not is_made and not first.done():
                first.set_result(value)

    fetched.add_done_callback(partial(finish, is_made=False))
    made.add_done_callback(partial(finish, is_made=True))
    return first


def _find(number: str, holder: str) -> Kept:
    kept = _node.current().kept
    # Messages may overtake each other: that of the first holder may come before the call.
    if number not in kept and holder == number:
        kept[number] = Kept(number)
    if number not in kept:
        raise RpcError(f"{own_name()!r} has forgotten the value: all references to it were gone")
    return kept[number]


def _forget_unheld(number: str, kept: Kept) -> None:
    if kept.is_begun and not kept.holders:
        _node.current().kept.pop(number, None)


def _begin(number: str) -> Kept:
    with _node.current().lock:
        kept = _find(number, number)
        kept.is_begun = True
        _forget_unheld(number, kept)
    return kept


def _keep(number: str, call: Parcel) -> None:
    kept = _begin(number)
    try:
        func, args, kwargs = unpack(call)
        kept.settle(func(*args, **kwargs))
    except BaseException as error:
        kept.fail(error)


@answered_later
def _keep_async(number: str, call: Parcel) -> Future[None]:
    kept, told = _begin(number), Future[None]()

    def finish(done: Future[Any]) -> None:
        try:
            kept.settle(done.wait())
        except BaseException as error:
            kept.fail(error)
        told.set_result(None)

    try:
        func, args, kwargs = unpack(call)
        func(*args, **kwargs).add_done_callback(finish)
    except BaseException as error:
        kept.fail(error)
        told.set_result(None)
    return told


@never_waits
@answered_later
def _kept_value(number: str, holder: str) -> Future[Any]:
    with _node.current().lock:
        kept = _find(number, holder)
    return kept.value()


@never_waits
def _retain(number: str, holder: str, other: str) -> None:
    with _node.current().lock:
        _find(number, holder).holders.add(other)


@never_waits
def _drop(number: str, holder: str) -> None:
    node = _node.current()
    with node.lock, contextlib.suppress(RpcError):
        kept = _find(number, holder)
        kept.holders.discard(holder)
        _forget_unheld(number, kept)


def _release(owner: str, number: str, holder: str) -> None:
    # Its reference is garbage; that the owner or the world is gone by now is all the same.
    with contextlib.suppress(RuntimeError):
        call_async(owner, _drop, (number, holder))
