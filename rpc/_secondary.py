"""The first level of a gradient server: pushes of clients become batches for the primary."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from torch.futures import Future

from ._intake import Intake
from ._reduction import (
    Batch,
    Layout,
    Push,
    Receipt,
    ReduceSettings,
    State,
    check_gradients,
    layout_of,
    tell,
)
from .errors import RpcError


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
