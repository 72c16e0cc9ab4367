"""Where the copies of a module meet during one forward."""

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
    """Copies of a module could not meet: one did not come, left early, or came too late."""


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
        return f"{_named(self.layer)} (call {self.call})"


class ReplicationSession:
    """The meetings of a fixed number of copies during one forward; created for each forward.

    Every copy calls from one thread at a time; no thread is started. A copy that waits is
    always woken: by the last one to arrive, by the end or the error of a copy it waits for,
    when all wait in different layers, or by the timeout.

    Pickling or deep-copying one gives a fresh one of the same size.

    Args:
        num_copies: how many copies meet in every round.
        timeout_s: how long a round waits for its copies, from the first to arrive.

    Raises:
        ValueError: no copies, or a timeout that is not positive.
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
            return {one for meeting in self._rounds.values() for one in meeting.messages}

    def rendezvous(self, layer: str, copy_id: int, message: Any, combine: Combine) -> Any:
        """Give a message, wait for those of all copies, and return the reply to this one.

        Every copy must call this equally often for a layer; the k-th calls belong together.
        The copy that comes last runs ``combine``, once for all.

        Args:
            layer: the name of the layer, as in ``ctx.layer``.
            copy_id: the copy that calls, from 0.
            message: anything; tensors stay tensors, with their autograd graph.
            combine: takes the list of the messages by copy id, and returns as many replies.

        Raises:
            ReplicationError: a copy ended without coming, all wait in different layers, or
                the time is over.
            Exception: the error of a copy that failed, of ``abort`` or of ``combine``: one of
                the same type where possible, with the original as its cause.
        """
        with self._changed:
            meeting = self._arrive(layer, copy_id, message)
            if len(meeting.messages) < self.num_copies:
                return self._wait(meeting, copy_id)
        try:
            # Outside the lock: it may take long, or use another session.
            replies = list(combine([meeting.messages[one] for one in range(self.num_copies)]))
            if len(replies) != self.num_copies:
                raise ValueError(
                    f"{meeting.place}: combine must return one reply for each of the "
                    f"{self.num_copies} copies, it returned {len(replies)}"
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
        """Say that the forward of a copy has ended, well or with ``error``.

        Copies that wait for it, or will, raise: its error, or a ``ReplicationError`` that
        names the layer.
        """
        self._check(copy_id)
        if error is not None:
            self.abort(error)
        with self._changed:
            self._finished.add(copy_id)
            self._changed.notify_all()

    def abort(self, error: BaseException) -> None:
        """Have every copy that waits, or will, raise ``error``; only the first call counts."""
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
                f"copy {copy_id} calls {_named(layer)} after its forward has ended; a layer that "
                "meets other copies cannot be run again in the backward (checkpointing)"
            )
        self._calls[layer, copy_id] += 1
        call = self._calls[layer, copy_id]
        deadline = time.monotonic() + self.timeout_s
        meeting = self._rounds.setdefault((layer, call), _Round(layer, call, deadline))
        meeting.messages[copy_id] = message
        return meeting

    def _raise_if_aborted(self) -> None:
        if self._aborted is not None:
            raise _twin(self._aborted) from self._aborted

    def _wait(self, meeting: _Round, copy_id: int) -> Any:
        """Wait, with the lock held, for the reply or for what prevents it."""
        self._waiting[copy_id] = meeting
        try:
            while True:
                if meeting.replies is not None:
                    return meeting.replies.pop(copy_id)
                self._raise_if_aborted()
                missing = [one for one in range(self.num_copies) if one not in meeting.messages]
                left = meeting.deadline - time.monotonic()
                if not missing:
                    # The last one computes, however long that takes.
                    left = threading.TIMEOUT_MAX
                elif why := self._hopeless(meeting, missing, copy_id, left):
                    error = ReplicationError(why)
                    self.abort(error)
                    raise error
                try:
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
                except BaseException as error:
                    # An interrupt, or what a signal handler raises.
                    self.abort(error)
                    raise
        finally:
            del self._waiting[copy_id]

    def _hopeless(self, meeting: _Round, missing: list[int], copy_id: int, left_s: float) -> str:
        """Why the ``missing`` will not come, if so."""
        if gone := self._finished.intersection(missing):
            return (
                f"copy {min(gone)} finished without reaching {meeting.place}, where copy {copy_id} "
                "waits; every copy must call the layer equally often"
            )
        # Whether no copy runs that could complete a round.
        all_wait = len(self._waiting) == self.num_copies and all(
            len(one.messages) < self.num_copies and one.replies is None
            for one in self._waiting.values()
        )
        if left_s > 0 and not all_wait:
            return ""
        others = ", ".join(
            f"copy {one} ({self._waiting[one].place if one in self._waiting else 'still running'})"
            for one in missing
        )
        waits = f"copy {copy_id} waits in {meeting.place}: {others}"
        if all_wait:
            return f"{waits} waits elsewhere; every copy must call the layers in the same order"
        return f"{waits} did not come within timeout_s={self.timeout_s:g}"


def _named(layer: str) -> str:
    return f"layer {layer!r}" if layer else "the module itself"


def _twin(error: BaseException) -> BaseException:
    """An error like ``error`` that another thread can raise, with a traceback of its own."""
    for make in (copy.copy, _without_init):
        try:
            made = make(error)
            alike = type(made) is type(error) and str(made) == str(error)
        except Exception:
            continue
        if alike and made is not error:
            # Shown with the cause.
            vars(made).pop("__notes__", None)
            return made
    return ReplicationError(f"another copy failed: {type(error).__name__}: {error}")


def _without_init(error: BaseException) -> BaseException:
    # The arguments of an own __init__ need not be those that the error keeps.
    made = type(error).__new__(type(error), *error.args)
    vars(made).update(vars(error))
    return made
