"""The client's side of a gradient server: each push arrives once, whichever reducer dies.

A client keeps its pushes until a secondary reducer has told it that the primary has them. When a
reducer dies it asks the primary which of them have arrived, and sends the others again. The primary
takes nothing more from that reducer from then on, so none can arrive twice.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import threading
import uuid
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.futures import Future

from . import _node
from ._node import Node
from ._reduction import Gradients, Push, Receipt
from .errors import RpcError
from .group import RpcGroup

logger = logging.getLogger(__name__)

# The reducer that takes pushes when no other one can: that of the primary's process.
_STAND_IN = ""


@dataclass
class _Pending:
    """A push that the primary may not have yet; `reducer` is where it was sent last."""

    number: int
    gradients: Gradients
    reducer: str = _STAND_IN
    is_acknowledged: bool = False


class Sender:
    """Sends the pushes of this process to one server. Any thread may push.

    Args:
        server_name: the server's.
        group: where it is.
        reducers: the names of the secondary reducers.
    """

    def __init__(self, server_name: str, group: RpcGroup, reducers: Iterable[str]) -> None:
        self._server_name = server_name
        self._group = group
        self._own_name = group.get_cur_name()
        self._reducers = tuple(reducers)
        self._client = f"{self._own_name}/{uuid.uuid4().hex[:12]}"
        self._lock = threading.Lock()
        # Held while the pushes of a dead reducer go elsewhere; that may find another one dead.
        self._recovering = threading.RLock()
        self._next_number = 0
        self._pending: dict[int, _Pending] = {}
        self._met: set[str] = set()
        self._idle: set[str] = set()
        self._lost: set[str] = set()
        self._dropped: dict[str, int] = {}

    @property
    def dropped(self) -> int:
        """How many pushes reducers have dropped, those of other clients included."""
        return sum(self._dropped.values())

    def push(self, gradients: Gradients) -> None:
        """Deliver gradients to a living reducer.

        Raises:
            ValueError: they do not fit the managed model.
            queue.Full: the reducer's queue is full.
            RpcError: the primary reducer is gone or has failed.
        """
        with self._lock:
            pending = _Pending(self._next_number, gradients)
            self._next_number += 1
            self._pending[pending.number] = pending
        try:
            self._deliver(pending)
        except BaseException:
            with self._lock:
                self._pending.pop(pending.number, None)
            raise

    def _deliver(self, pending: _Pending, is_again: bool = False) -> None:
        """Try one reducer after the other until one has the push."""
        while True:
            for reducer in self._candidates():
                if self._try(reducer, pending, is_again):
                    return

    def _candidates(self) -> Iterator[str]:
        """Yield the reducers to try: other processes first, so that one death is no loss."""
        others = [name for name in self._reducers if name != self._own_name]
        random.shuffle(others)
        own = [name for name in self._reducers if name == self._own_name]
        yield from (name for name in others + own if name not in self._lost)
        yield _STAND_IN

    def _try(self, reducer: str, pending: _Pending, is_again: bool) -> bool:
        """Send a push to a reducer; True when it, or the primary, has it."""
        with self._lock:
            if reducer in self._lost:
                return False
            pending.reducer = reducer
            push = self._message(pending, is_again)
        receipt = self._ask(reducer, push)
        if receipt is None:
            return self._has_arrived(pending)
        self._note(reducer, push, receipt)
        if receipt.state == "taken":
            return self._acknowledge(reducer, pending)
        if receipt.state == "idle":
            self._idle.add(reducer)
            return False
        if receipt.state == "fenced":
            self._recover(reducer)
            return self._has_arrived(pending)
        raise (queue.Full if receipt.state == "full" else RpcError)(receipt.text)

    def _ask(self, reducer: str, push: Push) -> Receipt | None:
        """Return the reducer's answer, None where it is dead."""
        try:
            if reducer in self._idle and not self._call(reducer, "_is_running_service"):
                return Receipt("idle")
            self._idle.discard(reducer)
            receipt: Receipt = self._call(reducer, "_push_service", push, reducer != _STAND_IN)
            self._watch(reducer)
        except KeyError as error:
            if reducer != _STAND_IN and reducer not in self._met:
                # It has not been made yet.
                return Receipt("idle")
            self._recover(reducer, error)
            return None
        except RpcError as error:
            return self._withdraw(reducer, push, error)
        return receipt

    def _withdraw(self, reducer: str, push: Push, error: RpcError) -> Receipt | None:
        """Find out what became of a push that got no answer."""
        try:
            is_back = self._call(reducer, "_withdraw_service", push.client, push.number)
        except (KeyError, RpcError):
            self._recover(reducer, error)
            return None
        if is_back:
            return Receipt("full", f"the queue of {reducer!r} has been full for too long: {error}")
        return Receipt("taken", held=push.asked)

    def _acknowledge(self, reducer: str, pending: _Pending) -> bool:
        with self._lock:
            if reducer not in self._lost:
                pending.is_acknowledged = True
                return True
        return self._has_arrived(pending)

    def _has_arrived(self, pending: _Pending) -> bool:
        # After a recovery that may be going on.
        with self._recovering, self._lock:
            return pending.number not in self._pending

    def _message(self, pending: _Pending, is_again: bool) -> Push:
        asked = [
            one.number
            for one in self._pending.values()
            if one.is_acknowledged and one.reducer == pending.reducer
        ]
        low = min(self._pending)
        return Push(self._client, pending.number, low, pending.gradients, tuple(asked), is_again)

    def _note(self, reducer: str, push: Push, receipt: Receipt) -> None:
        """Forget the pushes of which the answer says that they are not held any more."""
        with self._lock:
            before = self.dropped
            for name, count in receipt.dropped.items():
                self._dropped[name] = max(count, self._dropped.get(name, 0))
            if self.dropped > before:
                logger.warning(
                    "gradient server %r has dropped %d pushes", self._server_name, self.dropped
                )
            for number in set(push.asked).difference(receipt.held):
                if number in self._pending and self._pending[number].reducer == reducer:
                    del self._pending[number]

    def _recover(self, reducer: str, reason: Exception | None = None) -> None:
        """Send again, through others, what a dead reducer has not handed over.

        Raises:
            RpcError: the primary reducer is gone.
        """
        if reducer == _STAND_IN:
            raise self._primary_is_gone(reason) from reason
        with self._recovering:
            with self._lock:
                if reducer in self._lost:
                    return
                # From here on nothing is sent there, so the list is complete.
                self._lost.add(reducer)
                there = [one for one in self._pending.values() if one.reducer == reducer]
            again = self._fence(reducer, there)
            for pending in again:
                self._deliver(pending, is_again=True)
        logger.warning("reducer %r is gone: %d pushes were sent again", reducer, len(again))

    def _fence(self, reducer: str, there: list[_Pending]) -> list[_Pending]:
        """Have the primary shut out a reducer; return what it lacks and nobody else will send."""
        numbers = [one.number for one in there]
        try:
            arrived = set(self._call(_STAND_IN, "_fence_service", reducer, self._client, numbers))
        except (KeyError, RpcError) as error:
            with self._lock:
                self._lost.discard(reducer)
            raise self._primary_is_gone(error) from error
        with self._lock:
            for number in arrived:
                self._pending.pop(number, None)
            again = [one for one in there if one.number not in arrived and one.is_acknowledged]
            for one in again:
                one.is_acknowledged = False
        return again

    def _watch(self, reducer: str) -> None:
        """Have the pushes at a reducer recovered when it dies, even if nothing is pushed then."""
        if reducer == _STAND_IN:
            return
        with self._lock:
            if reducer in self._met:
                return
            self._met.add(reducer)
        key = f"{self._prefix(reducer)}/_alive_service"
        alive: Future[bool] = self._group.registered_async(key, timeout=0)
        own = weakref.ref(self)
        alive.add_done_callback(lambda done: _note_end(own, reducer, done))

    def _call(self, reducer: str, service: str, *args: Any) -> Any:
        return self._group.registered_sync(f"{self._prefix(reducer)}/{service}", args)

    def _prefix(self, reducer: str) -> str:
        return f"{self._server_name}/{reducer}" if reducer else self._server_name

    def _primary_is_gone(self, reason: Exception | None) -> RpcError:
        return RpcError(f"the primary reducer of {self._server_name!r} is gone: {reason}")

    def recover_quietly(self, reducer: str) -> None:
        """Recover, where nobody waits for it: a primary that is gone is told by the next push."""
        with contextlib.suppress(RuntimeError):
            self._recover(reducer)

    def has_pending_at(self, reducer: str) -> bool:
        """Return whether pushes would be lost with a reducer."""
        with self._lock:
            return any(one.reducer == reducer for one in self._pending.values())


def _note_end(own: weakref.ref[Sender], reducer: str, done: Future[bool]) -> None:
    try:
        is_in_order = done.wait()
    except RuntimeError:
        is_in_order = False
    sender = own()
    if is_in_order or sender is None or not sender.has_pending_at(reducer):
        return
    # Not in the transport's thread: sending again may take a while.
    threading.Thread(target=sender.recover_quietly, args=(reducer,), daemon=True).start()


# By world and server, so that all accessors of a process are one client. A world that ends takes
# its part along.
_senders: weakref.WeakKeyDictionary[Node, dict[tuple[str, ...], Sender]] = (
    weakref.WeakKeyDictionary()
)
_senders_lock = threading.Lock()


def sender_to(server_name: str, group: RpcGroup, reducers: Iterable[str], token: str) -> Sender:
    """Return this process's sender to a server.

    Args:
        token: which server of that name, where there have been several.
    """
    key = group.get_group_name(), server_name, token
    with _senders_lock:
        senders = _senders.setdefault(_node.current(), {})
        if key not in senders:
            senders[key] = Sender(server_name, group, reducers)
        return senders[key]
