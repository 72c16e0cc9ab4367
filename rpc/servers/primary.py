"""The second level of a gradient server: batches become steps, and each push counts once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from torch.futures import Future

from .managed_model import ManagedModel, Unmanaged
from .reduction import (
    Answer,
    Batch,
    Layout,
    OnFull,
    PushId,
    PushQueue,
    Receipt,
    ReduceSettings,
    Reduction,
    State,
    check_gradients,
    tell,
)

logger = logging.getLogger(__name__)


class Primary:
    """Takes batches, adds them up and has the model step at each full sum.

    It knows which pushes have arrived: a client whose secondary reducer has died asks `fence`, and
    sends the others again. All methods may be called from any thread, `step` from one at a time.

    Args:
        name: this process's.
        settings: how to reduce.
        changed: guards this object; notified when there may be something to do.
        shut_out: tells a reducer, by its name and without waiting, why it is shut out.
    """

    def __init__(
        self,
        name: str,
        settings: ReduceSettings,
        changed: threading.Condition,
        shut_out: Callable[[str, str], None],
    ) -> None:
        self.name = name
        self.model: ManagedModel | Unmanaged = Unmanaged()
        self.dropped = 0
        self._changed = changed
        self._shut_out = shut_out
        # Between reducers a full queue cannot be an error: who pushed has gone on.
        on_full: OnFull = "drop_oldest" if settings.on_full == "drop_oldest" else "block"
        self._queue = PushQueue[Batch](settings.max_queue_size, on_full)
        self._reduction = Reduction(settings)
        # How many pushes are in the reduction.
        self._count = 0
        self._failure = ""
        self._fenced: set[str] = set()
        self._arrived: dict[str, set[int]] = {}

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return bool(self._queue.items) and not self._failure

    @property
    def pending(self) -> int:
        """How many pushes have arrived and are in no step yet."""
        with self._changed:
            return self._count + sum(len(batch.ids) for batch in self._queue.items)

    def take(self, batch: Batch) -> Future[Receipt]:
        """Take a batch; complete when there is room for it."""
        answer: Future[Receipt] = Future()
        with self._changed:
            state = self._accept(batch, answer)
            receipt = self._receipt(*state) if state else None
            self._changed.notify_all()
        if receipt is not None:
            answer.set_result(receipt)
        return answer

    def layout(self) -> Layout | None:
        """Return what gradients must look like, None without a model."""
        return self.model.layout

    def watch(self, on_end: Callable[[], None]) -> None:
        """Watch nothing: a reducer in the primary's process ends with it."""

    def fence(self, reducer: str, client: str, numbers: Iterable[int]) -> list[int]:
        """Take no more batches of a reducer; return which pushes of a client have arrived."""
        with self._changed:
            is_new = reducer not in self._fenced
            self._fenced.add(reducer)
            known = self._arrived.get(client, set())
            arrived = [number for number in numbers if number in known]
        if is_new:
            logger.warning("the reducer %r is held dead, and shut out, for %r", reducer, client)
            # It may live, with pushes that are no full batch: their clients must learn of it.
            self._shut_out(reducer, _why_fenced(reducer))
        return arrived

    def run(self) -> None:
        """Begin, or go on after `fail`."""
        with self._changed:
            self._failure = ""
            self._changed.notify_all()

    def fail(self, text: str) -> None:
        """Refuse batches until `run`; what was being reduced is lost."""
        with self._changed:
            self._failure = text
            answers: list[Answer] = []
            for batch, answer in self._queue.withdraw(lambda batch: True):
                self._note(batch.ids, has_arrived=False)
                answers.append((answer, self._receipt("failed", text)))
            if self._count:
                self.dropped += self._count
                logger.warning("%d pushes were lost in a step that failed", self._count)
            self._forget_reduction()
        tell(answers)

    def step(self) -> bool:
        """Do one piece of work; False where there is none."""
        with self._changed:
            if not self.has_work:
                return False
            batch = self._queue.take()
            self._count += len(batch.ids)
            answers = [(answer, self._receipt("taken")) for _, answer in self._queue.admit()]
        tell(answers)
        # Not under the lock: a step may be long.
        total = self._reduction.add(batch.gradients)
        if total is not None:
            self.model.step(total)
            with self._changed:
                self._count = 0
            self.model.publish()
        return True

    def _accept(self, batch: Batch, answer: Future[Receipt]) -> tuple[State, str] | None:
        """Take a batch, or say why not; None where it has to wait."""
        if batch.reducer in self._fenced:
            return "fenced", _why_fenced(batch.reducer)
        if self._failure:
            return "failed", self._failure
        try:
            if self.model.layout is not None:
                check_gradients(batch.gradients, self.model.layout)
        except ValueError as error:
            return "refused", str(error)
        for client, low in batch.lows.items():
            known = self._arrived.get(client, set())
            self._arrived[client] = {number for number in known if number >= low}
        # Those that wait too: they are here, whatever becomes of their reducer.
        self._note(batch.ids, has_arrived=True)
        _, dropped = self._queue.offer(batch, answer, is_forced=False)
        self.dropped += sum(len(one.ids) for one in dropped)
        return None if self._queue.is_waiting(batch) else ("taken", "")

    def _note(self, ids: Iterable[PushId], has_arrived: bool) -> None:
        for client, number in ids:
            known = self._arrived.setdefault(client, set())
            (known.add if has_arrived else known.discard)(number)

    def _receipt(self, state: State, text: str = "") -> Receipt:
        return Receipt(state, text, dropped={_of_primary(self.name): self.dropped})

    def _forget_reduction(self) -> None:
        self._reduction.clear()
        self._count = 0


def _of_primary(name: str) -> str:
    return f"{name} (primary)"


def _why_fenced(reducer: str) -> str:
    return f"the primary reducer has shut out {reducer!r}, which a client held to be dead"
