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

from ..calls import node as _node
from ..calls.group import RpcGroup
from ..calls.node import Node
from ..errors import RpcError
from .reduction import Gradients, Push, Receipt
from .state_server import Update, Wanted

logger = logging.getLogger(__name__)

# The reducer that takes pushes when no other one can: that of the primary's process.
_STAND_IN = ""


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
        self._pending = PendingPushes(f"{self._own_name}/{uuid.uuid4().hex[:12]}")
        # Held while the pushes of a dead reducer go elsewhere; that may find another one dead.
        self._recovering = threading.RLock()
        self._meeting = threading.Lock()
        self._met: set[str] = set()
        self._idle: set[str] = set()

    @property
    def dropped(self) -> int:
        """How many pushes reducers have dropped, those of other clients included."""
        return self._pending.dropped

    def push(self, gradients: Gradients, wanted: Wanted | None = None) -> Update | None:
        """Deliver gradients to a living reducer.

        Returns:
            What is `wanted`, where the reducer has it at hand.

        Raises:
            ValueError: they do not fit the managed model.
            queue.Full: the reducer's queue is full.
            RpcError: the primary reducer is gone or has failed.
        """
        pending = self._pending.add(gradients, wanted)
        try:
            self._deliver(pending)
        except BaseException:
            self._pending.remove(pending)
            raise
        # The push is kept until the primary has it; what was pulled is not.
        news, pending.news, pending.wanted = pending.news, None, None
        return news

    def _deliver(self, pending: Pending, is_again: bool = False) -> None:
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
        yield from (name for name in others + own if not self._pending.is_lost(name))
        yield _STAND_IN

    def _try(self, reducer: str, pending: Pending, is_again: bool) -> bool:
        """Send a push to a reducer; True when it, or the primary, has it."""
        push = self._pending.address(pending, reducer, is_again)
        if push is None:
            return False
        receipt = self._ask(reducer, push, pending)
        if receipt is None:
            return self._has_arrived(pending)
        if self._pending.note(reducer, push, receipt):
            logger.warning("%r has dropped %d pushes by now", self._server_name, self.dropped)
        if receipt.state == "taken":
            return self._pending.acknowledge(pending) or self._has_arrived(pending)
        if receipt.state == "idle":
            self._idle.add(reducer)
            return False
        if receipt.state == "fenced":
            self._recover(reducer)
            return self._has_arrived(pending)
        raise (queue.Full if receipt.state == "full" else RpcError)(receipt.text)

    def _ask(self, reducer: str, push: Push, pending: Pending) -> Receipt | None:
        """Return the reducer's answer, None where it is dead."""
        try:
            if reducer in self._idle and not self._call(reducer, "_is_running_service"):
                return Receipt("idle", held=push.asked)
            self._idle.discard(reducer)
            given = push, reducer != _STAND_IN, pending.wanted
            receipt: Receipt
            receipt, pending.news = self._call(reducer, "_push_service", *given)
            self._watch(reducer)
        except KeyError as error:
            if reducer != _STAND_IN and reducer not in self._met:
                # It has not been made yet.
                return Receipt("idle", held=push.asked)
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
            text = f"the queue of {reducer or 'the primary'!r} has been full for too long: {error}"
            return Receipt("full", text, held=push.asked)
        return Receipt("taken", held=push.asked)

    def _has_arrived(self, pending: Pending) -> bool:
        # After a recovery that may be going on.
        with self._recovering:
            return pending not in self._pending

    def _recover(self, reducer: str, reason: Exception | None = None) -> None:
        """Send again, through others, what a dead reducer has not handed over.

        Raises:
            RpcError: the primary reducer is gone.
        """
        if reducer == _STAND_IN:
            raise _primary_is_gone(self._server_name, reason) from reason
        with self._recovering:
            if self._pending.is_lost(reducer):
                return
            # From here on nothing is sent there, so the list is complete.
            there = self._pending.shut_out(reducer)
            numbers = [one.number for one in there]
            try:
                client = self._pending.client
                arrived = self._call(_STAND_IN, "_fence_service", reducer, client, numbers)
            except (KeyError, RpcError) as error:
                self._pending.let_in(reducer)
                raise _primary_is_gone(self._server_name, error) from error
            again = self._pending.settle(there, set(arrived))
            for pending in again:
                self._deliver(pending, is_again=True)
        logger.warning("reducer %r is gone: %d pushes were sent again", reducer, len(again))

    def _watch(self, reducer: str) -> None:
        """Have the pushes at a reducer recovered when it dies, even if nothing is pushed then."""
        with self._meeting:
            if reducer in self._met or reducer == _STAND_IN:
                return
            self._met.add(reducer)
        key = f"{self._prefix(reducer)}/_alive_service"
        alive: Future[bool] = self._group.registered_async(key, timeout=0)
        own = weakref.ref(self)
        alive.add_done_callback(lambda done: _note_end(own, reducer, done))

    def note_end(self, reducer: str) -> None:
        """Recover what was sent to a reducer, in a thread: sending again may take a while."""
        if self._pending.has_any_at(reducer):
            threading.Thread(target=self._recover_quietly, args=(reducer,), daemon=True).start()

    def _recover_quietly(self, reducer: str) -> None:
        # That the primary is gone will be told by the next push.
        with contextlib.suppress(RuntimeError):
            self._recover(reducer)

    def _call(self, reducer: str, service: str, *args: Any) -> Any:
        return self._group.registered_sync(f"{self._prefix(reducer)}/{service}", args)

    def _prefix(self, reducer: str) -> str:
        return f"{self._server_name}/{reducer}" if reducer else self._server_name


def _primary_is_gone(server_name: str, reason: Exception | None) -> RpcError:
    return RpcError(f"the primary reducer of {server_name!r} is gone: {reason}")


def _note_end(own: weakref.ref[Sender], reducer: str, done: Future[bool]) -> None:
    try:
        is_in_order = done.wait()
    except RuntimeError:
        is_in_order = False
    sender = own()
    if sender is not None and not is_in_order:
        sender.note_end(reducer)


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


@dataclass
class Pending:
    """A push.

    Attributes:
        reducer: where it was sent last.
        wanted: asked along with it, while its caller waits.
        news: the answer to that.
    """

    number: int
    gradients: Gradients
    reducer: str = ""
    is_acknowledged: bool = False
    wanted: Wanted | None = None
    news: Update | None = None


class PendingPushes:
    """Keeps each push until a reducer has told that the primary has it. Any thread may call.

    Args:
        client: this process's name among the clients.
    """

    def __init__(self, client: str) -> None:
        self.client = client
        self._lock = threading.Lock()
        self._next_number = 0
        self._pushes: dict[int, Pending] = {}
        # The reducers that are shut out.
        self._lost: set[str] = set()
        self._dropped: dict[str, int] = {}

    @property
    def dropped(self) -> int:
        """How many pushes reducers have dropped, those of other clients included."""
        return sum(self._dropped.values())

    def add(self, gradients: Gradients, wanted: Wanted | None = None) -> Pending:
        """Begin to keep a push."""
        with self._lock:
            pending = Pending(self._next_number, gradients, wanted=wanted)
            self._next_number += 1
            self._pushes[pending.number] = pending
        return pending

    def remove(self, pending: Pending) -> None:
        """Forget a push."""
        with self._lock:
            self._pushes.pop(pending.number, None)

    def __contains__(self, pending: object) -> bool:
        with self._lock:
            return isinstance(pending, Pending) and pending.number in self._pushes

    def is_lost(self, reducer: str) -> bool:
        """Return whether a reducer is shut out."""
        return reducer in self._lost

    def address(self, pending: Pending, reducer: str, is_again: bool) -> Push | None:
        """Return the message that sends a push to a reducer, None if that is shut out."""
        with self._lock:
            if reducer in self._lost:
                return None
            asked = tuple(one.number for one in self._there(reducer) if one.is_acknowledged)
            pending.reducer = reducer
            low = min(self._pushes)
            number, gradients = pending.number, pending.gradients
            return Push(self.client, number, low, gradients, asked, is_again)

    def acknowledge(self, pending: Pending) -> bool:
        """Note that its reducer has a push; False if that was shut out meanwhile."""
        with self._lock:
            pending.is_acknowledged = pending.reducer not in self._lost
            return pending.is_acknowledged

    def note(self, reducer: str, push: Push, receipt: Receipt) -> bool:
        """Forget the pushes that are not held any more; return whether more were dropped."""
        with self._lock:
            before = self.dropped
            for name, count in receipt.dropped.items():
                self._dropped[name] = max(count, self._dropped.get(name, 0))
            for number in set(push.asked).difference(receipt.held):
                if number in self._pushes and self._pushes[number].reducer == reducer:
                    del self._pushes[number]
            return self.dropped > before

    def shut_out(self, reducer: str) -> list[Pending]:
        """Send nothing more to a reducer; return what was sent there."""
        with self._lock:
            self._lost.add(reducer)
            return self._there(reducer)

    def let_in(self, reducer: str) -> None:
        """Take `shut_out` back."""
        with self._lock:
            self._lost.discard(reducer)

    def settle(self, there: Iterable[Pending], arrived: set[int]) -> list[Pending]:
        """Forget what has arrived; return what must be sent again and nobody is about to send."""
        with self._lock:
            for number in arrived:
                self._pushes.pop(number, None)
            again = [one for one in there if one.number not in arrived and one.is_acknowledged]
            for one in again:
                one.is_acknowledged = False
            return again

    def has_any_at(self, reducer: str) -> bool:
        """Return whether pushes would be lost with a reducer."""
        with self._lock:
            return bool(self._there(reducer))

    def _there(self, reducer: str) -> list[Pending]:
        return [one for one in self._pushes.values() if one.reducer == reducer]
