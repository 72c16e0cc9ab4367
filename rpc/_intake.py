"""What a secondary reducer has taken: a queue of pushes, the batch in the making, the one to send.

Its owner's lock guards it, but for `add`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from torch.futures import Future

from ._push_queue import PushQueue
from ._reduction import (
    Answer,
    Batch,
    Push,
    PushId,
    Receipt,
    ReduceSettings,
    Reduction,
    State,
)

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
