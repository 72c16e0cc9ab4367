"""The first level of a gradient server: pushes of clients become batches for the primary."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from torch.futures import Future

from ..errors import RpcError
from .reduction import (
    Answer,
    Batch,
    Layout,
    Push,
    PushId,
    PushQueue,
    Receipt,
    ReduceSettings,
    Reduction,
    State,
    check_gradients,
    layout_of,
    tell,
)


class PrimaryLink(Protocol):
    """How a secondary reducer reaches the primary: `Primary` itself, or calls to it."""

    def take(self, batch: Batch) -> Future[Receipt]:
        """Hand over a batch."""

    def layout(self) -> Layout | None:
        """Return what gradients must look like, None while that is not known."""

    def watch(self, on_end: Callable[[], None]) -> None:
        """Have `on_end` called when the primary dies."""


class Watchers:
    """Those who want to know when this reducer leaves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Future[bool]] = []

    def alive(self) -> Future[bool]:
        """Complete when this reducer leaves: True in good order, False shut out."""
        watcher: Future[bool] = Future()
        with self._lock:
            self._waiting.append(watcher)
        return watcher

    def leave(self, is_in_order: bool = True) -> None:
        """Tell them."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for watcher in waiting:
            watcher.set_result(is_in_order)


class Secondary:
    """Takes pushes, adds them up and hands over each full batch.

    All methods may be called from any thread, `step` from one at a time.

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
        self.intake = Intake(name, settings)
        self.watchers = Watchers()
        self.is_running = False
        # Set once and for all: the primary is gone ("failed") or has shut this reducer out.
        self.lost: tuple[State, str] | None = None
        self._changed = changed
        self._primary = primary
        self._is_sending = False
        # Why the thread of this process has ended, and why the primary takes nothing.
        self._failure = ""
        self._trouble = ""
        self._layout: Layout | None = None
        self._is_watching = False

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        if self.lost or self._failure or self._trouble:
            return False
        return self._can_send() or self.intake.can_take

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
            receipt = self.intake.receipt(push, *state) if state else None
            self._changed.notify_all()
        if receipt is not None:
            answer.set_result(receipt)
        return answer

    def withdraw(self, client: str, number: int) -> bool:
        """Send away a push that waits; False where it does not wait any more."""
        with self._changed:
            answers = self.intake.dismiss("full", "", lambda push: push[:2] == (client, number))
        tell(answers)
        return bool(answers)

    def run(self) -> None:
        """Begin, or go on after `halt` or `fail`."""
        with self._changed:
            self.is_running, self._failure, self._trouble = True, "", ""
            self._changed.notify_all()

    def halt(self) -> None:
        """Keep what is here and send those that wait elsewhere."""
        with self._changed:
            self.is_running = False
            answers = self.intake.dismiss("idle", f"the reducer {self.name!r} was stopped")
        tell(answers)

    def fail(self, text: str) -> None:
        """Answer every push by an error until `run`; what was being added is lost."""
        with self._changed:
            self._failure = text
            self.intake.drop_broken()
            answers = self.intake.dismiss("failed", text)
        tell(answers)

    def step(self) -> bool:
        """Do one piece of work; False where there is none."""
        with self._changed:
            if not self.has_work:
                return False
            batch = self.intake.unsent if self._can_send() else None
            push = self.intake.take() if batch is None else None
            self._is_sending = self._is_sending or batch is not None
            answers = self.intake.admit()
        tell(answers)
        if batch is not None:
            self._send(batch)
        if push is not None and (full := self.intake.add(push)) is not None:
            with self._changed:
                self.intake.finish(full)
        return True

    def _can_send(self) -> bool:
        return self.intake.unsent is not None and not self._is_sending

    def _send(self, batch: Batch) -> None:
        try:
            self._primary.take(batch).add_done_callback(self._on_answer)
        except (RpcError, KeyError) as error:
            self.lose("failed", f"the primary reducer is gone: {error}")

    def _on_answer(self, done: Future[Receipt]) -> None:
        try:
            receipt = done.wait()
        except Exception as error:
            self.lose("failed", f"the primary reducer is gone: {error}")
            return
        if receipt.state == "fenced":
            self.lose("fenced", receipt.text)
            return
        with self._changed:
            self._is_sending = False
            self.intake.dropped_by.update(receipt.dropped)
            if receipt.state == "failed":
                self._trouble = receipt.text
                answers = self.intake.dismiss("failed", receipt.text)
            else:
                if receipt.state == "refused":
                    self.intake.drop_unsent(receipt.text)
                    self._layout = None
                self.intake.unsent = None
                answers = self.intake.admit()
            self._changed.notify_all()
        tell(answers)

    def lose(self, state: State, text: str) -> None:
        """Take nothing any more: the primary is gone ("failed") or takes nothing ("fenced")."""
        with self._changed:
            self.lost = self.lost or (state, text)
            answers = self.intake.dismiss(*self.lost)
            self._changed.notify_all()
        tell(answers)
        if state == "fenced":
            # Those who watch send their pushes again, through others.
            self.watchers.leave(is_in_order=False)

    def _connect(self) -> None:
        """Learn what gradients must look like; the primary may know it later than we live."""
        if self._layout is None and self.lost is None:
            self._layout = self._primary.layout()
        with self._changed:
            has_watched, self._is_watching = self._is_watching, True
        if not has_watched:
            self._primary.watch(lambda: self.lose("failed", "the primary reducer is gone"))

    def _expected(self, push: Push) -> Layout:
        if self._layout is not None:
            return self._layout
        # Without a model all must at least be like the one before.
        before = self.intake.queue.items[-1] if self.intake.queue.items else push
        return layout_of(before.gradients)

    def _accept(
        self, push: Push, answer: Future[Receipt], must_run: bool
    ) -> tuple[State, str] | None:
        """Take a push, or say why not; None where it has to wait."""
        if self.lost is not None:
            return self.lost
        if self._failure:
            return "failed", self._failure
        if must_run and not self.is_running:
            return "idle", f"the reducer {self.name!r} is not running"
        if not self._trouble:
            return self.intake.offer(push, answer)
        if not self._can_send():
            return "failed", self._trouble
        # The primary may work again: the answer to the batch decides.
        self._trouble = ""
        self.intake.queue.wait(push, answer)
        return None


logger = logging.getLogger(__name__)


class Intake:
    """Pushes on their way to the primary; they are held here until that has them.

    Args:
        name: the reducer's.
        settings: how to reduce.
    """

    def __init__(self, name: str, settings: ReduceSettings) -> None:
        self.unsent: Batch | None = None
        self._name = name
        self._settings = settings
        self.queue = PushQueue[Push](settings.max_queue_size, settings.on_full)
        self._reduction = Reduction(settings)
        # The pushes in the reduction.
        self._ids: list[PushId] = []
        self._lows: dict[str, int] = {}
        # By reducer: what the primary has dropped is told to clients as well.
        self.dropped_by: dict[str, int] = {name: 0}

    @property
    def dropped(self) -> int:
        """How many pushes were dropped here."""
        return self.dropped_by[self._name]

    @property
    def pending(self) -> int:
        """How many pushes are here which the primary does not have."""
        return sum(1 for _ in self._held())

    @property
    def can_take(self) -> bool:
        """Whether the reduction can go on with a push from the queue."""
        # While a batch is on its way the next one may grow, but not become full.
        has_room = self.unsent is None or len(self._ids) + 1 < self._settings.batch_size
        return bool(self.queue.items) and has_room

    def offer(self, push: Push, answer: Future[Receipt]) -> tuple[State, str] | None:
        """Take a push, or say why not; None where it has to wait."""
        is_accepted, dropped = self.queue.offer(push, answer, is_forced=push.is_again)
        self.dropped_by[self._name] += len(dropped)
        if not is_accepted:
            return "full", f"the queue of {self._name!r} is full"
        return None if self.queue.is_waiting(push) else ("taken", "")

    def admit(self) -> list[Answer]:
        """Give those that wait the free places."""
        return [(answer, self.receipt(push, "taken")) for push, answer in self.queue.admit()]

    def dismiss(
        self, state: State, text: str, is_meant: Callable[[Push], bool] = lambda push: True
    ) -> list[Answer]:
        """Send away those that wait."""
        leaving = self.queue.withdraw(is_meant)
        return [(answer, self.receipt(push, state, text)) for push, answer in leaving]

    def receipt(self, push: Push, state: State, text: str = "") -> Receipt:
        """Return the answer to a push."""
        held = {number for client, number in self._held() if client == push.client}
        return Receipt(state, text, tuple(held.intersection(push.asked)), dict(self.dropped_by))

    def take(self) -> Push:
        """Take the oldest push out of the queue, to be added."""
        push = self.queue.take()
        self._ids.append((push.client, push.number))
        self._lows[push.client] = max(push.low, self._lows.get(push.client, 0))
        return push

    def add(self, push: Push) -> Batch | None:
        """Add what was taken; return a full batch. Not under the lock: it may be large."""
        total = self._reduction.add(push.gradients)
        return None if total is None else Batch(self._name, total, self._ids, self._lows)

    def finish(self, batch: Batch) -> None:
        """Have a full batch sent, and begin with the next one."""
        self.unsent = batch
        self._ids, self._lows = [], {}

    def drop_unsent(self, why: str) -> None:
        """Forget a batch that the primary refuses."""
        assert self.unsent is not None
        self._note_drop(len(self.unsent.ids), f"were refused: {why}")

    def drop_broken(self) -> None:
        """Forget the reduction, where an error has left it half done."""
        if self._reduction.count != len(self._ids):
            self._note_drop(len(self._ids), "could not be reduced")
            self._reduction.clear()
            self._ids, self._lows = [], {}

    def _held(self) -> Iterable[PushId]:
        yield from ((push.client, push.number) for push in self.queue.items)
        yield from self._ids
        if self.unsent is not None:
            yield from self.unsent.ids

    def _note_drop(self, count: int, why: str) -> None:
        self.dropped_by[self._name] += count
        logger.warning("%d pushes at the reducer %r %s", count, self._name, why)
