"""A reference to an object that stays in another process.

Not torch's RRef: in the second world of a process those still belong to the first one's agent, and
a dead owner fills the log. Here the owner counts: it keeps a value until the reference that the
caller got, and every copy of it that was sent on, is gone.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import WorkerInfo
from torch.futures import Future

from . import _node
from ._calls import answered_later, call_async, call_sync, is_async

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
        return call_sync(self._owner, self._fetch, self._args, timeout=timeout)

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

    def confirmed_by_owner(self) -> bool:
        """Return whether the value is known to be there."""
        return self._made is None or self._made.done()

    def __reduce__(self) -> Any:
        if self._fetch is _kept_value:
            # Before the copy travels, so that the owner cannot forget the value meanwhile.
            call_sync(self._owner, _retain_one, self._args)
        return RpcReference, (self._owner, self._fetch, self._args)

    def __repr__(self) -> str:
        return f"RpcReference(owner={self._owner!r})"


def call_remote(
    to: str, func: Callable[..., Any], args: Any = (), kwargs: Any = None, timeout: float = -1
) -> RpcReference:
    """Call `func` on `to` and return at once a reference to its result, which stays there."""
    number = f"{_node.current().name}/{next(_numbers)}"
    keep = _keep_async if is_async(func) else _keep
    made = call_async(to, keep, (number, func, tuple(args), dict(kwargs or {})), timeout=timeout)
    return RpcReference(to, _kept_value, (number,), made)


class Kept:
    """What a reference refers to, on its owner.

    Attributes:
        value: complete when the call has returned; an error is what it raised.
        count: how many references there are.
    """

    def __init__(self) -> None:
        self.value: Future[Any] = Future()
        self.count = 0


def _kept(number: str) -> Kept:
    # Messages may overtake each other: whoever is first makes the place.
    node = _node.current()
    with node.lock:
        return node.kept.setdefault(number, Kept())


def _keep(number: str, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    kept = _retain(number)
    try:
        kept.value.set_result(func(*args, **kwargs))
    except Exception as error:
        kept.value.set_exception(error)


@answered_later
def _keep_async(number: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Future[None]:
    kept, told = _retain(number), Future[None]()

    def finish(done: Future[Any]) -> None:
        try:
            kept.value.set_result(done.wait())
        except Exception as error:
            kept.value.set_exception(error)
        told.set_result(None)

    func(*args, **kwargs).add_done_callback(finish)
    return told


@answered_later
def _kept_value(number: str) -> Future[Any]:
    return _kept(number).value


def _retain(number: str) -> Kept:
    kept, node = _kept(number), _node.current()
    with node.lock:
        kept.count += 1
    return kept


def _retain_one(number: str) -> None:
    _retain(number)


def _drop(number: str) -> None:
    node = _node.current()
    with node.lock:
        kept = node.kept.get(number)
        if kept is None:
            return
        kept.count -= 1
        if kept.count == 0:
            del node.kept[number]


def _release(owner: str, number: str) -> None:
    # Its reference is garbage; that the owner or the world is gone by now is all the same.
    with contextlib.suppress(RuntimeError):
        call_async(owner, _drop, (number,))
