"""References to values that stay in another process.

The owner keeps a value until all holders are gone: the caller's reference and every copy of it that
was sent on. torch's RRef is not used because it belongs to the first RPC agent of a process, and so
fails in the process's second world.
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
    describe_call,
    devices,
    own_name,
    served_immediately,
    set_failure,
)
from .payload import Message, on_not_sent, pack, pack_error, unpack, unpack_error

_numbers = itertools.count()


class RpcReference:
    """A reference to a value in the process that owns it; it can be sent to other members.

    Created by ``RpcGroup.remote``, ``registered_remote`` and ``get_paired``.

    Args:
        owner: the name of the owner.
        fetch: returns the value when called in the owner's process.
        args: the arguments of ``fetch``.
        creation: completes when the value exists; None if it exists already.
    """

    def __init__(
        self, owner: str, fetch: Func, args: tuple[Any, ...], creation: Future[None] | None = None
    ) -> None:
        self._owner = owner
        self._fetch = fetch
        self._args = args
        self._made = creation
        if fetch is _fetch_result:
            weakref.finalize(self, _release, owner, *args).atexit = False

    def to_here(self, timeout: float = -1) -> Any:
        """Return a copy of the value; on its owner, the value itself.

        Args:
            timeout: in seconds; -1 is the world's ``rpc_timeout``, 0 means no limit. The owner
                ignores it and waits without limit.

        Raises:
            Exception: the exception of the call that makes the value.
            RpcError: the owner has died, does not answer in time, or has deleted the value.
            KeyError: the value was paired, and the owner has withdrawn it.
        """
        if self._made is not None and self._made.done():
            # Raises immediately if the call never reached the owner.
            self._made.wait()
        if self.is_owner():
            return self.local_value()
        if self._made is None:
            return call_sync(
                self._owner, self._fetch, self._args, timeout=timeout, description="to_here()"
            )
        ended: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        self._made.add_done_callback(partial(_put_failed, ended))
        fetched = call_async(
            self._owner, self._fetch, self._args, timeout=timeout, description="to_here()"
        )
        fetched.add_done_callback(ended.put)
        return ended.get().wait()

    def local_value(self) -> Any:
        """Return the value itself; raise RuntimeError unless this process is the owner."""
        if not self.is_owner():
            raise RuntimeError(
                f"local_value() must be called on the owner {self._owner!r}; call to_here() for a "
                "copy"
            )
        value = self._fetch(*self._args)
        return value.wait() if self._fetch is _fetch_result else value

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
        if self._fetch is _fetch_result:
            number, holder = self._args
            other = _new_number()
            # Register the copy before it is sent, so that the owner keeps the value meanwhile.
            if self.is_owner():
                _add_holder(number, holder, other)
            else:
                call_sync(self._owner, _add_holder, (number, holder, other))
            on_not_sent(partial(_release, self._owner, number, other))
            args = number, other
        return RpcReference, (self._owner, self._fetch, args)

    def __repr__(self) -> str:
        return f"RpcReference(owner={self._owner!r})"


def call_remote(
    to: str,
    func: Func,
    args: Any = (),
    kwargs: Any = None,
    timeout: float = -1,
    *,
    description: str = "",
) -> RpcReference:
    number = _new_number()
    # Packed separately, so that `to_here` raises the error if the owner cannot unpack it.
    call = pack((func, tuple(args), dict(kwargs or {})))
    creation = call_async(
        to,
        _run_and_keep,
        (number, call),
        timeout=timeout,
        description=description or describe_call(func),
    )
    return RpcReference(to, _fetch_result, (number, number), creation)


def _new_number() -> str:
    return f"{_node.current().name}/{next(_numbers)}"


def _put_failed(ended: queue.SimpleQueue[Future[Any]], creation: Future[None]) -> None:
    try:
        creation.wait()
    except Exception:
        ended.put(creation)


class _Result:
    """The result of a call and the holders of its references, on the owner."""

    def __init__(self, number: str) -> None:
        # The numbers of the references. The first one's number also identifies the value.
        self.holders = {number}
        self.is_begun = False
        self._value: Any = None
        self._failure: Message | None = None
        # Completes with the call. It is not a future of the value, whose devices are not known yet.
        self._end: Future[None] = Future()

    def settle(self, make: Callable[[], Any]) -> Any:
        """Store the result or exception of ``make``, or of the future that it returns."""
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
            set_failure(value, partial(_raise_again, failure))

        self._end.add_done_callback(complete)
        return value


def _raise_again(failure: Message) -> None:
    raise unpack_error(failure)


@contextlib.contextmanager
def _open_result(number: str, holder: str) -> Iterator[_Result]:
    """Yield a result, whose holders may be changed; delete it afterwards if no holder is left."""
    node = _node.current()
    with node.lock:
        # Messages may overtake each other: a release may arrive before the call.
        if number not in node.kept and holder == number:
            node.kept[number] = _Result(number)
        if number not in node.kept:
            raise RpcError(f"{node.name!r} has deleted the value: all references to it were gone")
        result: _Result = node.kept[number]
        yield result
        if result.is_begun and not result.holders:
            del node.kept[number]


def _run_and_keep(number: str, call: Message) -> Any:
    """Run a call and keep its result or error."""
    with _open_result(number, number) as result:
        result.is_begun = True

    def make() -> Any:
        func, args, kwargs = unpack(call)
        return func(*args, **kwargs)

    return result.settle(make)


@served_immediately
def _fetch_result(number: str, holder: str) -> Future[Any]:
    with _open_result(number, holder) as result:
        return result.value()


@served_immediately
def _add_holder(number: str, holder: str, other: str) -> None:
    with _open_result(number, holder) as result:
        result.holders.add(other)


@served_immediately
def _remove_holder(number: str, holder: str) -> None:
    with contextlib.suppress(RpcError), _open_result(number, holder) as result:
        result.holders.discard(holder)


def _release(owner: str, number: str, holder: str) -> None:
    # If the owner or the world is gone, there is nothing to release.
    with contextlib.suppress(RuntimeError):
        call_async(owner, _remove_holder, (number, holder))
