"""Exchange messages between the copies of a module during one forward."""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Combine = Callable[[list[Any]], Sequence[Any]]


class ReplicationError(RuntimeError):
    """Raised if copies cannot meet: one has finished, is too late or waits in another layer."""


@dataclass(eq=False)
class _Round:
    """One meeting of all copies in one layer."""

    layer: str
    call: int
    deadline: float
    messages: dict[int, Any] = field(default_factory=dict)
    replies: dict[int, Any] | None = None

    @property
    def place(self) -> str:
        return f"{_quote(self.layer)} (call {self.call})"


class ReplicationSession:
    """Let the copies of a module exchange messages during one forward.

    Each forward creates a new session. A *round* is one exchange, in which all copies take part
    from the same layer. Every copy uses one thread at a time; the session starts no threads. A
    waiting copy wakes up when the last copy arrives, when a copy that it waits for ends or fails,
    when all copies wait in different layers, or at the timeout.

    A pickle or deep copy is a new session of the same size.

    Args:
        num_copies: number of copies that take part in every round.
        timeout_s: number of seconds that a round waits for all copies, from the first arrival.

    Raises:
        ValueError: ``num_copies`` is below 1, or ``timeout_s`` is not positive.
    """

    def __init__(self, num_copies: int, timeout_s: float = 60.0) -> None:
        if num_copies < 1:
            raise ValueError(f"num_copies must be at least 1, got {num_copies}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self.num_copies = num_copies
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._rounds: dict[tuple[str, int], _Round] = {}
        self._calls: Counter[tuple[str, int]] = Counter()
        self._waiting: dict[int, _Round] = {}
        self._finished: set[int] = set()
        self._aborted: BaseException | None = None

    def __reduce__(self) -> tuple[type[ReplicationSession], tuple[int, float]]:
        return type(self), (self.num_copies, self.timeout_s)

    @property
    def pending(self) -> set[int]:
        """The copies whose messages have no reply yet."""
        with self._changed:
            return {
                copy_index for meeting in self._rounds.values() for copy_index in meeting.messages
            }

    def rendezvous(self, layer: str, copy_id: int, message: Any, combine: Combine) -> Any:
        """Send a message, wait for the messages of all copies, and return the reply.

        Every copy must call this the same number of times for a layer: the k-th calls of all copies
        form a round. The last copy to arrive runs ``combine`` for all of them.

        Args:
            layer: the path of the layer, which is ``ctx.layer``.
            copy_id: the number of the calling copy, from 0.
            message: any object; tensors keep their autograd graph.
            combine: takes the list of messages in the order of the copies, and returns one reply
                for each.

        Raises:
            ReplicationError: a copy finished without arriving, all copies wait in different
                layers, or the timeout is over.
            Exception: the error of another copy or of ``combine``, or the error passed to
                ``abort``. It has the same type if possible, and the original as its cause.
        """
        with self._changed:
            meeting = self._arrive(layer, copy_id, message)
            if len(meeting.messages) < self.num_copies:
                return self._wait(meeting, copy_id)
        try:
            # Outside of the lock, because combine may take long or use another session.
            replies = list(
                combine([meeting.messages[copy_index] for copy_index in range(self.num_copies)])
            )
            if len(replies) != self.num_copies:
                raise ValueError(
                    f"{meeting.place}: combine must return one reply for each of the "
                    f"{self.num_copies} copies, got {len(replies)}"
                )
            with self._changed:
                meeting.messages.clear()
                del self._rounds[layer, meeting.call]
                meeting.replies = dict(enumerate(replies))
                self._changed.notify_all()
                return meeting.replies.pop(copy_id)
        except BaseException as error:
            self.abort(error)
            raise

    def finish(self, copy_id: int, error: BaseException | None = None) -> None:
        """Report that the forward of a copy has ended, with ``error`` if it failed.

        Copies that wait for it now or later raise its error, or a ``ReplicationError`` that names
        the layer.
        """
        self._check(copy_id)
        if error is not None:
            self.abort(error)
        with self._changed:
            self._finished.add(copy_id)
            self._changed.notify_all()

    def abort(self, error: BaseException) -> None:
        """Make every copy that waits now or later raise ``error``; a second call does nothing."""
        with self._changed:
            if self._aborted is None:
                self._aborted = error
            self._changed.notify_all()

    def _check(self, copy_id: int) -> None:
        if not 0 <= copy_id < self.num_copies:
            raise ValueError(f"copy_id must be from 0 to {self.num_copies - 1}, got {copy_id}")

    def _arrive(self, layer: str, copy_id: int, message: Any) -> _Round:
        self._check(copy_id)
        self._raise_if_aborted()
        if copy_id in self._finished and self.num_copies > 1:
            raise ReplicationError(
                f"copy {copy_id} calls {_quote(layer)} after its forward has ended; a layer that "
                "waits for other copies cannot be run again in the backward, so do not checkpoint "
                "its activations"
            )
        self._calls[layer, copy_id] += 1
        call = self._calls[layer, copy_id]
        deadline = time.monotonic() + self.timeout_s
        meeting = self._rounds.setdefault((layer, call), _Round(layer, call, deadline))
        meeting.messages[copy_id] = message
        return meeting

    def _raise_if_aborted(self) -> None:
        if self._aborted is not None:
            raise _make_copy(self._aborted) from self._aborted

    def _wait(self, meeting: _Round, copy_id: int) -> Any:
        """Wait for the reply, or raise if it cannot come; the caller holds the lock."""
        self._waiting[copy_id] = meeting
        try:
            while True:
                if meeting.replies is not None:
                    return meeting.replies.pop(copy_id)
                self._raise_if_aborted()
                missing = [
                    copy_index
                    for copy_index in range(self.num_copies)
                    if copy_index not in meeting.messages
                ]
                left_s = meeting.deadline - time.monotonic()
                if not missing:
                    # The last copy runs combine, which has no time limit.
                    left_s = threading.TIMEOUT_MAX
                elif why := self._reason_to_give_up(meeting, missing, copy_id, left_s):
                    raise ReplicationError(why)
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
        except BaseException as error:
            # Includes interrupts, and errors that a signal handler raises.
            self.abort(error)
            raise
        finally:
            del self._waiting[copy_id]

    def _reason_to_give_up(
        self, meeting: _Round, missing: list[int], copy_id: int, left_s: float
    ) -> str:
        """Return why the ``missing`` copies will not arrive; "" if they may still arrive."""
        if gone := self._finished.intersection(missing):
            return (
                f"copy {min(gone)} finished without reaching {meeting.place}, where copy {copy_id} "
                "waits; every copy must call the layer the same number of times"
            )
        # If all copies wait in incomplete rounds, no copy is left to complete one.
        all_wait = len(self._waiting) == self.num_copies and all(
            len(meeting.messages) < self.num_copies and meeting.replies is None
            for meeting in self._waiting.values()
        )
        if left_s > 0 and not all_wait:
            return ""
        positions = ", ".join(
            f"copy {index} "
            f"({self._waiting[index].place if index in self._waiting else 'still running'})"
            for index in missing
        )
        waits = f"copy {copy_id} waits in {meeting.place}: {positions}"
        if all_wait:
            return f"{waits} waits elsewhere; every copy must call the layers in the same order"
        return f"{waits} did not arrive within timeout_s={self.timeout_s:g}"


def _quote(layer: str) -> str:
    return f"layer {layer!r}" if layer else "the module itself"


def _make_copy(error: BaseException) -> BaseException:
    """Return an error like ``error`` that another thread can raise with its own traceback."""
    for make in (copy.copy, _copy_without_init):
        try:
            duplicate = make(error)
            alike = type(duplicate) is type(error) and str(duplicate) == str(error)
        except Exception:
            continue
        if alike and duplicate is not error:
            # Removed, because tracebacks show the notes of the cause already.
            vars(duplicate).pop("__notes__", None)
            return duplicate
    return ReplicationError(f"another copy failed: {type(error).__name__}: {error}")


def _copy_without_init(error: BaseException) -> BaseException:
    # A custom __init__ may take other arguments than the ones in ``args``.
    duplicate = type(error).__new__(type(error), *error.args)
    vars(duplicate).update(vars(error))
    return duplicate
