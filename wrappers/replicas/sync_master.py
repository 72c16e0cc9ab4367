"""The master and slave protocol of earlier synchronised layers, over a session."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, Full, Queue
from typing import Any

from .session import ReplicationError, ReplicationSession

# Takes and returns pairs of a copy's identifier and its message or reply, the master's first.
MasterCallback = Callable[[list[tuple[Any, Any]]], Sequence[tuple[Any, Any]]]

_MASTER = 0
_LAYER = "SyncMaster"
# Longer waits overflow in the queue's arithmetic.
_LONGEST_S = threading.TIMEOUT_MAX / 2


class FutureResult:
    """A slot for one value, None included, that one thread puts and another gets."""

    def __init__(self) -> None:
        self._slot: Queue[Any] = Queue(maxsize=1)

    def __reduce__(self) -> tuple[type[FutureResult], tuple[()]]:
        return type(self), ()

    def put(self, value: Any) -> None:
        """Fill the slot; AssertionError where the value before has not been fetched."""
        try:
            self._slot.put_nowait(value)
        except Full:
            raise AssertionError("the previous result has not been fetched") from None

    def get(self, timeout_s: float = 60.0) -> Any:
        """Wait for the value and empty the slot; TimeoutError after ``timeout_s`` seconds."""
        try:
            return self._slot.get(timeout=min(timeout_s, _LONGEST_S))
        except Empty:
            raise TimeoutError(f"no result came within timeout_s={timeout_s:g}") from None


class SlavePipe:
    """What a copy talks to the master with; made by ``SyncMaster.register_slave``.

    A deep copy or a pickle of one belongs to no master.
    """

    def __init__(self, identifier: Any, meet: Callable[[Any], Any] | None = None) -> None:
        self.identifier = identifier
        self._meet = meet

    def __reduce__(self) -> tuple[type[SlavePipe], tuple[Any]]:
        return type(self), (self.identifier,)

    def run_slave(self, message: Any) -> Any:
        """Send the master a message, and return its reply, which may be None.

        Raises:
            ReplicationError: the master or another slave did not come in time, or has gone;
                or this is a copy of a slave.
            Exception: what the master's callback raised.
        """
        if self._meet is None:
            raise ReplicationError(
                f"slave {self.identifier!r} belongs to no master; get one from register_slave"
            )
        return self._meet(message)


class SyncMaster:
    """The part of a layer that collects messages of all copies and answers them.

    For layers written for this protocol. In ``__data_parallel_replicate__`` the copies other
    than the master call ``register_slave``; in the forward they call ``run_slave`` of what it
    returned, and the master ``run_master``, all equally often. A slave takes part as long as
    the copy that has it lives, so that a forward with fewer copies, or one, has fewer slaves.
    A copy that fails ends the wait of the others only by the timeout: new layers should use
    ``ctx.session.rendezvous``, which is notified at once.

    Deep copies and pickles have the same callback and no slaves.

    Args:
        master_callback: takes the pairs of identifier and message of all, the master's first,
            with identifier 0, and returns such pairs of identifier and reply.
        timeout_s: how long a copy waits for the others.
    """

    def __init__(self, master_callback: MasterCallback, *, timeout_s: float = 60.0) -> None:
        self._callback = master_callback
        self._timeout_s = timeout_s
        self._session = ReplicationSession(1, timeout_s)
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        return {"_callback": self._callback, "_timeout_s": self._timeout_s}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_callback"], timeout_s=state["_timeout_s"])  # type: ignore[misc]

    @property
    def nr_slaves(self) -> int:
        """How many slaves there are."""
        return len(self._slaves)

    def register_slave(self, identifier: Any) -> SlavePipe:
        """Make a slave; the first one after a forward begins a new replication.

        Raises:
            AssertionError: a slave of the replication before still waits for its master.
            ValueError: the identifier is the master's.
        """
        if identifier == _MASTER:
            raise ValueError("identifier 0 is the master's; slaves count from 1")
        if self._has_run and self._session.pending:
            # As documented by the systems this is for.
            raise AssertionError("Queue is not clean before next initialization.")
        # Without a run: a forward in eval mode, whose copies have gone or are being replaced.
        if self._has_run or not self._slaves or identifier in self._slaves:
            self._begin()
        meet = partial(self._session.rendezvous, _LAYER, len(self._order), combine=self._combine)
        pipe = self._slaves[identifier] = SlavePipe(identifier, meet)
        # Until the master comes, those that wait already wait for it as well.
        self._order.append(identifier)
        self._session.num_copies += 1
        return pipe

    def run_master(self, message: Any) -> Any:
        """Collect the messages of all slaves, answer them, and return the master's reply.

        Raises:
            AssertionError: the first result of the callback is not the master's.
            ValueError: the callback does not give every copy one reply.
            ReplicationError: a slave did not come in time, or has gone.
            Exception: what the callback raised; the slaves raise it as well.
        """
        if not self._slaves:
            # A forward with one copy registers none.
            self._begin()
        self._has_run = True
        for copy_id, identifier in enumerate(self._order):
            if copy_id and identifier not in self._slaves:
                self._session.finish(copy_id)
        try:
            return self._session.rendezvous(_LAYER, 0, message, self._combine)
        except BaseException:
            self._begin()
            raise

    def _begin(self) -> None:
        """Leave the replication; what comes next has none of its slaves."""
        self._session.abort(
            ReplicationError("the master has begun another replication, or has failed")
        )
        self._session = ReplicationSession(1, self._timeout_s)
        self._order: list[Any] = [_MASTER]
        # Weakly: a slave goes with the copy that has it.
        self._slaves: weakref.WeakValueDictionary[Any, SlavePipe] = weakref.WeakValueDictionary()
        self._has_run = False

    def _combine(self, messages: list[Any]) -> list[Any]:
        """Have the callback answer all messages."""
        order = self._order
        results = list(self._callback(list(zip(order, messages, strict=True))))
        if not results or results[0][0] != _MASTER:
            # As documented by the systems this is for.
            raise AssertionError("The first result should belongs to the master.")
        replies = dict(results)
        if replies.keys() != set(order) or len(results) != len(order):
            raise ValueError(
                f"the master's callback must give one reply to each of {order}, it gave "
                f"them to {[identifier for identifier, _ in results]}"
            )
        return [replies[identifier] for identifier in order]
