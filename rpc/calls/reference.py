"""References to values that stay in another process.

torch's RRef does not survive a world: in the second one of a process it still belongs to the agent
of the first. Here the owner keeps a value until its holders are gone: the reference that the caller
got, and every copy of it that was sent on.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import WorkerInfo
from torch.futures import Future

from ..errors import RpcError
from . import node as _node
from .calls import (
    AnyFuture,
    Func,
    call_async,
    call_sync,
    called,
    devices,
    fail_by,
    never_waits,
    own_name,
)
from .payload import Parcel, if_not_sent, pack, pack_error, unpack, unpack_error

_numbers = itertools.count()


class RpcReference:
    """A value that stays in the process that owns it; the reference can be sent to other members.

    Made by `RpcGroup.remote`, `registered_remote` and `get_paired`: `fetch(*args)`, called in the
    owner's process, returns the value; `made` completes when it is there, None where it is already.
    """

    def __init__(
        self, owner: str, fetch: Func, args: tuple[Any, ...], made: Future[None] | None = None
    ) -> None:
        self._owner = owner
        self._fetch = fetch
        self._args = args
        self._made = made
        if fetch is _kept_value:
            weakref.finalize(self, _release, owner, *args).atexit = False

    def to_here(self, timeout: float = -1) -> Any:
        """Return a copy of the value, or raise what making it raised; on its owner, the value.

        Args:
            timeout: in seconds; -1 is the world's default, 0 waits as long as it takes, as the
                owner always does.
        """
        if self._made is not None and self._made.done():
            # It tells at once of a call that never reached the owner.
            self._made.wait()
        if self.is_owner():
            return self.local_value()
        if self._made is None:
            return call_sync(self._owner, self._fetch, self._args, timeout=timeout)
        ended: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        self._made.add_done_callback(partial(_put_failed, ended))
        fetched = call_async(self._owner, self._fetch, self._args, timeout=timeout)
        fetched.add_done_callback(ended.put)
        return ended.get().wait()

    def local_value(self) -> Any:
        """Return the value itself; raise RuntimeError in other processes than the owner's."""
        if not self.is_owner():
            raise RuntimeError(
                f"the value belongs to {self._owner!r}: local_value() works there, "
                "to_here() brings a copy"
            )
        value = self._fetch(*self._args)
        return value.wait() if self._fetch is _kept_value else value

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
    to: str, func: Func, args: Any = (), kwargs: Any = None, timeout: float = -1, *, what: str = ""
) -> RpcReference:
    number = _new_number()
    # A parcel of its own: that the owner cannot open it is then an error of the value too.
    call = pack((func, tuple(args), dict(kwargs or {})))
    made = call_async(to, _keep, (number, call), timeout=timeout, what=what or called(func))
    return RpcReference(to, _kept_value, (number, number), made)


def _new_number() -> str:
    return f"{_node.current().name}/{next(_numbers)}"


def _put_failed(ended: queue.SimpleQueue[Future[Any]], made: Future[None]) -> None:
    try:
        made.wait()
    except Exception:
        ended.put(made)


class _Kept:
    """What a reference refers to, on its owner."""

    def __init__(self, number: str) -> None:
        # The numbers of the references; the first one has the value's own.
        self.holders = {number}
        self.is_begun = False
        self._value: Any = None
        self._failure: Parcel | None = None
        # Not of the value: which devices that may be on is not known yet.
        self._end: Future[None] = Future()

    def settle(self, make: Callable[[], Any]) -> Any:
        """Keep what `make` returns or raises; of a call that is answered later, later."""
        try:
            value = make()
            if isinstance(value, AnyFuture):
                return value.then(lambda done: self.settle(done.wait))
            self._value = value
        except BaseException as error:
            self._failure = pack_error(error, own_name())
        self._end.set_result(None)
        return None

    def value(self) -> Future[Any]:
        """Return a future of the value, or of the error."""
        value: Future[Any] = Future(devices=devices())

        def complete(_: Future[None]) -> None:
            failure = self._failure
            if failure is None:
                try:
                    value.set_result(self._value)
                    return
                except Exception as error:
                    failure = pack_error(error, own_name())
            fail_by(value, partial(_raise_again, failure))

        self._end.add_done_callback(complete)
        return value


def _raise_again(failure: Parcel) -> None:
    raise unpack_error(failure)


@contextlib.contextmanager
def _found(number: str, holder: str) -> Iterator[_Kept]:
    """Find a value and change its holders; without any, it is forgotten once it was asked for."""
    node = _node.current()
    with node.lock:
        # Messages may overtake each other: that of the first holder may come before the call.
        if number not in node.kept and holder == number:
            node.kept[number] = _Kept(number)
        if number not in node.kept:
            raise RpcError(f"{node.name!r} has forgotten the value: all references to it were gone")
        kept: _Kept = node.kept[number]
        yield kept
        if kept.is_begun and not kept.holders:
            del node.kept[number]


def _keep(number: str, call: Parcel) -> Any:
    """Carry a call out and keep what comes of it."""
    with _found(number, number) as kept:
        kept.is_begun = True

    def make() -> Any:
        func, args, kwargs = unpack(call)
        return func(*args, **kwargs)

    return kept.settle(make)


@never_waits
def _kept_value(number: str, holder: str) -> Future[Any]:
    with _found(number, holder) as kept:
        return kept.value()


@never_waits
def _retain(number: str, holder: str, other: str) -> None:
    with _found(number, holder) as kept:
        kept.holders.add(other)


@never_waits
def _drop(number: str, holder: str) -> None:
    with contextlib.suppress(RpcError), _found(number, holder) as kept:
        kept.holders.discard(holder)


def _release(owner: str, number: str, holder: str) -> None:
    # Its reference is garbage; that the owner or the world is gone by now is all the same.
    with contextlib.suppress(RuntimeError):
        call_async(owner, _drop, (number, holder))
