"""The protocol of masters and slaves that earlier synchronised layers use, built on sessions."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, Full, Queue
from typing import Any

from .session import ReplicationError, ReplicationSession

# Takes pairs (identifier, message), the master's first, and returns pairs (identifier, reply).
MasterCallback = Callable[[list[tuple[Any, Any]]], Sequence[tuple[Any, Any]]]

_MASTER = 0
_LAYER = "SyncMaster"
# The queue adds the timeout to the current time, which overflows for longer waits.
_LONGEST_S = threading.TIMEOUT_MAX / 2


class FutureResult:
    """Pass one value, which may be None, from one thread to another."""

    def __init__(self) -> None:
        self._slot: Queue[Any] = Queue(maxsize=1)

    def __reduce__(self) -> tuple[type[FutureResult], tuple[()]]:
        return type(self), ()

    def put(self, value: Any) -> None:
        """Store a value; raise AssertionError if the previous one has not been fetched."""
        try:
            self._slot.put_nowait(value)
        except Full:
            raise AssertionError("the previous result has not been fetched") from None

    def get(self, timeout_s: float = 60.0) -> Any:
        """Wait for the value, remove and return it; raise TimeoutError after ``timeout_s``."""
        try:
            return self._slot.get(timeout=min(timeout_s, _LONGEST_S))
        except Empty:
            raise TimeoutError(f"no result arrived within timeout_s={timeout_s:g}") from None


class SlavePipe:
    """Connect a copy to the master; created by ``SyncMaster.register_slave``.

    A deep copy or an unpickled pipe has no master.
    """

    def __init__(self, identifier: Any, meet: Callable[[Any], Any] | None = None) -> None:
        self.identifier = identifier
        self._meet = meet

    def __reduce__(self) -> tuple[type[SlavePipe], tuple[Any]]:
        return type(self), (self.identifier,)

    def run_slave(self, message: Any) -> Any:
        """Send a message to the master and return its reply, which may be None.

        Raises:
            ReplicationError: the master or another slave did not arrive in time, or no longer
                exists; or this pipe is a copy and has no master.
            Exception: the error of the master's callback.
        """
        if self._meet is None:
            raise ReplicationError(
                f"slave {self.identifier!r} has no master; use a pipe from register_slave"
            )
        return self._meet(message)


class SyncMaster:
    """Collect the messages of a layer's copies in the master, which is copy 0, and reply to them.

    For existing layers that use this protocol. In ``__data_parallel_replicate__`` the copies other
    than the master, the *slaves*, call ``register_slave``. In the forward they call ``run_slave``
    of the returned pipe, and the master calls ``run_master``, all of them the same number of times.
    A slave takes part as long as its copy exists, so a forward with fewer copies has fewer slaves.
    If a copy fails, the others wait until the timeout. New layers should use
    ``ctx.session.rendezvous`` instead, which raises at once in this case.

    A deep copy or unpickled master has the same callback and no slaves.

    Args:
        master_callback: takes a list of pairs (identifier, message), and returns pairs
            (identifier, reply). In both, the first pair is the master's, with identifier 0.
        timeout_s: number of seconds for which a copy waits for the others.
    """

    def __init__(self, master_callback: MasterCallback, *, timeout_s: float = 60.0) -> None:
        self._callback = master_callback
        self._timeout_s = timeout_s
        self._session = ReplicationSession(1, timeout_s)
        self._start_replication()

    def __getstate__(self) -> dict[str, Any]:
        return {"_callback": self._callback, "_timeout_s": self._timeout_s}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_callback"], timeout_s=state["_timeout_s"])  # type: ignore[misc]

    @property
    def nr_slaves(self) -> int:
        """The number of slaves."""
        return len(self._slaves)

    def register_slave(self, identifier: Any) -> SlavePipe:
        """Register a slave; the first one after a forward starts a new replication.

        Raises:
            AssertionError: a slave of the previous replication still waits for its master.
            ValueError: the identifier is 0, which belongs to the master.
        """
        if identifier == _MASTER:
            raise ValueError("identifier must not be 0, which is the master's: count from 1")
        if self._has_run and self._session.pending:
            # Earlier implementations document an AssertionError.
            raise AssertionError("Queue is not clean before next initialization.")
        # In eval mode the master does not run, so slaves of an earlier replication may still be
        # registered. A new replication has begun if all of them are gone, or if one of their
        # identifiers is registered again.
        if self._has_run or not self._slaves or identifier in self._slaves:
            self._start_replication()
        meet = partial(self._session.rendezvous, _LAYER, len(self._order), combine=self._combine)
        pipe = self._slaves[identifier] = SlavePipe(identifier, meet)
        # A round cannot end before the master arrives, so slaves that are waiting already will
        # wait for this one too.
        self._order.append(identifier)
        self._session.num_copies += 1
        return pipe

    def run_master(self, message: Any) -> Any:
        """Collect the messages of all slaves, reply to them, and return the master's reply.

        Raises:
            AssertionError: the first result of the callback is not the master's.
            ValueError: the callback does not return one reply for every copy.
            ReplicationError: a slave did not arrive in time, or no longer exists.
            Exception: the error of the callback; the slaves raise it as well.
        """
        if not self._slaves:
            # A forward with one copy registers no slaves.
            self._start_replication()
        self._has_run = True
        for copy_id, identifier in enumerate(self._order):
            if copy_id and identifier not in self._slaves:
                self._session.finish(copy_id)
        try:
            return self._session.rendezvous(_LAYER, 0, message, self._combine)
        except BaseException:
            self._start_replication()
            raise

    def _start_replication(self) -> None:
        """Start a replication without slaves; waiting slaves of the previous one raise."""
        self._session.abort(
            ReplicationError("the master has started another replication, or has failed")
        )
        self._session = ReplicationSession(1, self._timeout_s)
        self._order: list[Any] = [_MASTER]
        # Weak references, because a slave ends when its copy is discarded.
        self._slaves: weakref.WeakValueDictionary[Any, SlavePipe] = weakref.WeakValueDictionary()
        self._has_run = False

    def _combine(self, messages: list[Any]) -> list[Any]:
        """Return the callback's replies to all messages, in the order of the copies."""
        order = self._order
        results = list(self._callback(list(zip(order, messages, strict=True))))
        if not results or results[0][0] != _MASTER:
            # Earlier implementations document an AssertionError.
            raise AssertionError("The first result should belongs to the master.")
        replies = dict(results)
        if replies.keys() != set(order) or len(results) != len(order):
            raise ValueError(
                f"the master's callback must return one reply for each of {order}, got "
                f"replies for {[identifier for identifier, _ in results]}"
            )
        return [replies[identifier] for identifier in order]
