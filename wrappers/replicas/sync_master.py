"""The master and slave protocol of earlier synchronised layers, over a session."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
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


class _Replication:
    """The slaves of one replication, and where they meet the master once it has come."""

    def __init__(self, callback: MasterCallback, timeout_s: float) -> None:
        self.callback = callback
        self.timeout_s = timeout_s
        # Weakly: a slave goes with the copy that has it.
        self.slaves: dict[Any, weakref.ref[SlavePipe]] = {}
        # Who has sent a message that no master has taken.
        self.pending: set[Any] = set()
        self.order: list[Any] = []
        self.session: ReplicationSession | None = None
        self.is_open = threading.Event()

    def alive(self) -> list[Any]:
        return [one for one, pipe in self.slaves.items() if pipe() is not None]

    def open(self) -> ReplicationSession:
        """Fix who takes part, and end what waits for slaves that have gone since."""
        alive = self.alive()
        if self.session is None:
            self.order = [_MASTER, *alive]
            self.session = ReplicationSession(len(self.order), self.timeout_s)
            self.is_open.set()
        for copy_id, identifier in enumerate(self.order):
            if copy_id and identifier not in alive:
                self.session.finish(copy_id)
        return self.session

    def meet(self, identifier: Any, message: Any) -> Any:
        """A slave's part: wait for the master to come, then for the reply."""
        self.pending.add(identifier)
        try:
            if not self.is_open.wait(min(self.timeout_s, _LONGEST_S)):
                raise ReplicationError(
                    f"slave {identifier!r} has waited for run_master of its master for "
                    f"timeout_s={self.timeout_s:g}"
                )
            assert self.session is not None
            copy_id = self.order.index(identifier)
            return self.session.rendezvous(_LAYER, copy_id, message, self.combine)
        finally:
            self.pending.discard(identifier)

    def combine(self, messages: list[Any]) -> list[Any]:
        """Have the master's callback answer all messages."""
        self.pending.clear()
        results = list(self.callback(list(zip(self.order, messages, strict=True))))
        if not results or results[0][0] != _MASTER:
            # As documented by the systems this is for.
            raise AssertionError("The first result should belongs to the master.")
        replies = dict(results)
        if replies.keys() != set(self.order) or len(results) != len(self.order):
            raise ValueError(
                f"the master's callback must give one reply to each of {self.order}, it gave "
                f"them to {[identifier for identifier, _ in results]}"
            )
        return [replies[identifier] for identifier in self.order]


class SlavePipe:
    """What a copy talks to the master with; made by ``SyncMaster.register_slave``.

    A deep copy or a pickle of one belongs to no master.
    """

    def __init__(self, identifier: Any, replication: _Replication | None = None) -> None:
        self.identifier = identifier
        self._replication = replication

    def __reduce__(self) -> tuple[type[SlavePipe], tuple[Any]]:
        return type(self), (self.identifier,)

    def run_slave(self, message: Any) -> Any:
        """Send the master a message, and return its reply, which may be None.

        Raises:
            ReplicationError: the master or another slave did not come in time, or has gone;
                or this is a copy of a slave.
            Exception: what the master's callback raised.
        """
        if self._replication is None:
            raise ReplicationError(
                f"slave {self.identifier!r} belongs to no master; get one from register_slave"
            )
        return self._replication.meet(self.identifier, message)


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
        self._replication = _Replication(master_callback, timeout_s)

    def __getstate__(self) -> dict[str, Any]:
        return {"_callback": self._callback, "_timeout_s": self._timeout_s}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_callback"], timeout_s=state["_timeout_s"])  # type: ignore[misc]

    @property
    def nr_slaves(self) -> int:
        """How many slaves there are."""
        return len(self._replication.alive())

    def register_slave(self, identifier: Any) -> SlavePipe:
        """Make a slave; the first one after a forward begins a new replication.

        Raises:
            AssertionError: a slave of the replication before still waits for its master.
            ValueError: the identifier is the master's.
        """
        if identifier == _MASTER:
            raise ValueError("identifier 0 is the master's; slaves count from 1")
        if self._replication.session is not None:
            if self._replication.pending:
                # As documented by the systems this is for.
                raise AssertionError("Queue is not clean before next initialization.")
            self._begin()
        pipe = SlavePipe(identifier, self._replication)
        self._replication.slaves[identifier] = weakref.ref(pipe)
        return pipe

    def run_master(self, message: Any) -> Any:
        """Collect the messages of all slaves, answer them, and return the master's reply.

        Raises:
            AssertionError: the first result of the callback is not the master's.
            ValueError: the callback does not give every copy one reply.
            ReplicationError: a slave did not come in time, or has gone.
            Exception: what the callback raised; the slaves raise it as well.
        """
        if self._replication.session is not None and not self._replication.alive():
            # A forward with one copy registers none.
            self._begin()
        replication = self._replication
        try:
            return replication.open().rendezvous(_LAYER, 0, message, replication.combine)
        except BaseException:
            self._begin()
            raise

    def _begin(self) -> None:
        """Leave the replication; what comes next has none of its slaves."""
        error = ReplicationError("the master has begun another replication, or has failed")
        self._replication.open().abort(error)
        self._replication = _Replication(self._callback, self._timeout_s)
