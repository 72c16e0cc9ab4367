"""The first level of a gradient server: pushes of clients become batches for the primary."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from torch.futures import Future

from ._push_queue import PushQueue
from ._reduction import (
    Batch,
    Layout,
    Push,
    PushId,
    Receipt,
    ReduceSettings,
    Reduction,
    State,
    check_gradients,
    layout_of,
)
from .errors import RpcError

logger = logging.getLogger(__name__)

Answer = tuple[Future[Receipt], Receipt]


class PrimaryLink(Protocol):
    """How a secondary reducer reaches the primary: `Primary` itself, or calls to it."""

    def take(self, batch: Batch) -> Future[Receipt]:
        """Hand over a batch."""

    def layout(self) -> Layout | None:
        """Return what gradients must look like, None while that is not known."""

    def watch(self, on_end: Callable[[], None]) -> None:
        """Have `on_end` called when the primary dies."""


class Secondary:
    """Takes pushes, adds them up and hands over each full batch.

    A push is held here until the primary has it, so that its client can be told. All methods
    may be called from any thread, `step` from one at a time.

    Args:
        name: this process's.
        settings: how to reduce.
        changed: guards this object; notified when there may be something to do.
        primary: where batches go.
    """

    def __init__(
        self,
        name: str,
        settings: ReduceSettings,
        changed: threading.Condition,
        primary: PrimaryLink,
    ) -> None:
        self.name = name
        self.is_running = False
        # Set once and for all: the primary is gone ("failed") or has shut this reducer out.
        self._lost: tuple[State, str] | None = None
        self._settings = settings
        self._changed = changed
        self._primary = primary
        self._queue = PushQueue[Push](settings.max_queue_size, settings.on_full)
        self._reduction = Reduction(settings)
        # The pushes in the reduction.
        self._ids: list[PushId] = []
        self._lows: dict[str, int] = {}
        self._unsent: Batch | None = None
        self._is_sending = False
        # Why the thread of this process has ended, and why the primary takes nothing.
        self._failure = ""
        self._trouble = ""
        self._layout: Layout | None = None
        self._is_watching = False
        self._dropped: dict[str, int] = {name: 0}
        self._watchers: list[Future[bool]] = []

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        if self._is_stuck():
            return False
        return self._can_send() or self._can_add()

    @property
    def lost(self) -> str:
        """Why this reducer can never go on; empty where it can."""
        return "" if self._lost is None else self._lost[1]

    @property
    def dropped(self) -> int:
        """How many pushes were dropped here."""
        return self._dropped[self.name]

    @property
    def pending(self) -> int:
        """How many pushes are here which the primary does not have."""
        with self._changed:
            unsent = 0 if self._unsent is None else len(self._unsent.ids)
            return len(self._queue.items) + len(self._ids) + unsent

    def push(self, push: Push, must_run: bool) -> Future[Receipt]:
        """Take a push.

        Args:
            must_run: send it away, where nobody reduces at the moment.

        Raises:
            ValueError: its content does not fit; nothing was taken.
        """
        answer: Future[Receipt] = Future()
        try:
            self._connect()
        except (RpcError, KeyError) as error:
            answer.set_result(Receipt("failed", f"the primary reducer cannot be asked: {error}"))
            return answer
        with self._changed:
            check_gradients(push.gradients, self._expected(push))
            state = self._accept(push, answer, must_run)
            receipt = self._receipt(push, *state) if state else None
            self._changed.notify_all()
        if receipt is not None:
            answer.set_result(receipt)
        return answer

    def withdraw(self, client: str, number: int) -> bool:
        """Send away a push that waits; False where it does not wait any more."""
        with self._changed:
            answers = self._dismiss("full", "", lambda push: push[:2] == (client, number))
        _tell(answers)
        return bool(answers)

    def alive(self) -> Future[bool]:
        """Complete when this reducer leaves: True in good order, False shut out."""
        watcher: Future[bool] = Future()
        with self._changed:
            self._watchers.append(watcher)
        return watcher

    def leave(self, in_order: bool = True) -> None:
        """Tell those who watch; they wait for nothing else from here."""
        with self._changed:
            watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher.set_result(in_order)

    def run(self) -> None:
        """Begin, or go on after `halt` or `fail`."""
        with self._changed:
            self.is_running, self._failure, self._trouble = True, "", ""
            self._changed.notify_all()

    def halt(self) -> None:
        """Keep what is here and send those that wait elsewhere."""
        with self._changed:
            self.is_running = False
            answers = self._dismiss("idle", f"the reducer {self.name!r} was stopped")
        _tell(answers)

    def fail(self, text: str) -> None:
        """Answer every push by an error until `run`; what was being added is lost."""
        with self._changed:
            self._failure = text
            if self._reduction.count != len(self._ids):
                self._note_drop(len(self._ids), "could not be reduced")
                self._forget_reduction()
            answers = self._dismiss("failed", text)
        _tell(answers)

    def step(self) -> bool:
        """Do one piece of work; False where there is none."""
        with self._changed:
            if self._is_stuck():
                return False
            batch = self._unsent if self._can_send() else None
            self._is_sending = self._is_sending or batch is not None
        if batch is not None:
            self._send(batch)
            return True
        return self._add()

    def _is_stuck(self) -> bool:
        return bool(self._lost or self._failure or self._trouble)

    def _can_send(self) -> bool:
        return self._unsent is not None and not self._is_sending

    def _can_add(self) -> bool:
        # While a batch is on its way the next one may grow, but not become full.
        has_room = self._unsent is None or len(self._ids) + 1 < self._settings.batch_size
        return bool(self._queue.items) and has_room

    def _add(self) -> bool:
        with self._changed:
            if not self._can_add():
                return False
            push = self._queue.take()
            self._ids.append((push.client, push.number))
            self._lows[push.client] = max(push.low, self._lows.get(push.client, 0))
            answers = self._admitted()
        _tell(answers)
        # Not under the lock: it may be large.
        total = self._reduction.add(push.gradients)
        with self._changed:
            if total is not None:
                self._unsent = Batch(self.name, total, self._ids, self._lows)
                self._forget_reduction()
        return True

    def _send(self, batch: Batch) -> None:
        try:
            self._primary.take(batch).add_done_callback(self._on_answer)
        except (RpcError, KeyError) as error:
            self._lose("failed", f"the primary reducer is gone: {error}")

    def _on_answer(self, done: Future[Receipt]) -> None:
        try:
            receipt = done.wait()
        except Exception as error:
            self._lose("failed", f"the primary reducer is gone: {error}")
            return
        if receipt.state == "fenced":
            self._lose("fenced", receipt.text)
            # Those who watch send their pushes again, through others.
            self.leave(in_order=False)
            return
        with self._changed:
            self._is_sending = False
            self._dropped.update(receipt.dropped)
            if receipt.state == "failed":
                self._trouble = receipt.text
                answers = self._dismiss("failed", receipt.text)
            else:
                assert self._unsent is not None
                if receipt.state == "refused":
                    self._note_drop(len(self._unsent.ids), f"were refused: {receipt.text}")
                    self._layout = None
                self._unsent = None
                answers = self._admitted()
            self._changed.notify_all()
        _tell(answers)

    def _lose(self, state: State, text: str) -> None:
        with self._changed:
            self._lost = self._lost or (state, text)
            answers = self._dismiss(*self._lost)
            self._changed.notify_all()
        _tell(answers)

    def _connect(self) -> None:
        """Learn what gradients must look like; the primary may know it later than we live."""
        if self._layout is None and self._lost is None:
            self._layout = self._primary.layout()
        with self._changed:
            has_watched, self._is_watching = self._is_watching, True
        if not has_watched:
            self._primary.watch(lambda: self._lose("failed", "the primary reducer is gone"))

    def _expected(self, push: Push) -> Layout:
        if self._layout is not None:
            return self._layout
        # Without a model all must at least be like the one before.
        others = self._queue.items or [push]
        return layout_of(others[-1].gradients)

    def _accept(
        self, push: Push, answer: Future[Receipt], must_run: bool
    ) -> tuple[State, str] | None:
        """Take a push, or say why not; None where it has to wait."""
        if self._lost is not None:
            return self._lost
        if self._failure:
            return "failed", self._failure
        if must_run and not self.is_running:
            return "idle", f"the reducer {self.name!r} is not running"
        if self._trouble:
            if not self._can_send():
                return "failed", self._trouble
            # The primary may work again: the answer to the batch decides.
            self._trouble = ""
            self._queue.wait(push, answer)
            return None
        is_accepted, dropped = self._queue.offer(push, answer, is_forced=push.is_again)
        self._dropped[self.name] += len(dropped)
        if not is_accepted:
            return "full", f"the queue of {self.name!r} is full"
        is_waiting = bool(self._queue.waiting) and self._queue.waiting[-1][0] is push
        return None if is_waiting else ("taken", "")

    def _admitted(self) -> list[Answer]:
        return [(answer, self._receipt(push, "taken")) for push, answer in self._queue.admit()]

    def _dismiss(
        self, state: State, text: str, is_meant: Callable[[Push], bool] = lambda push: True
    ) -> list[Answer]:
        leaving = self._queue.withdraw(is_meant)
        return [(answer, self._receipt(push, state, text)) for push, answer in leaving]

    def _receipt(self, push: Push, state: State, text: str = "") -> Receipt:
        held = {number for client, number in self._held() if client == push.client}
        return Receipt(state, text, tuple(held.intersection(push.asked)), dict(self._dropped))

    def _held(self) -> Iterable[PushId]:
        yield from ((push.client, push.number) for push in self._queue.items)
        yield from self._ids
        if self._unsent is not None:
            yield from self._unsent.ids

    def _forget_reduction(self) -> None:
        self._reduction.clear()
        self._ids, self._lows = [], {}

    def _note_drop(self, count: int, why: str) -> None:
        self._dropped[self.name] += count
        logger.warning("%d pushes at the reducer %r %s", count, self.name, why)


def _tell(answers: Iterable[Answer]) -> None:
    # Outside of the lock: completing a future sends the answer.
    for answer, receipt in answers:
        answer.set_result(receipt)
