"""The pushes of a client that the primary reducer may not have yet."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from ._reduction import Gradients, Push, Receipt
from ._state_server import Update, Wanted

logger = logging.getLogger(__name__)


@dataclass
class Pending:
    """A push.

    Attributes:
        reducer: where it was sent last.
        wanted: asked along with it, while its caller waits.
        news: the answer to that.
    """

    number: int
    gradients: Gradients
    reducer: str = ""
    is_acknowledged: bool = False
    wanted: Wanted | None = None
    news: Update | None = None


class PendingPushes:
    """Keeps each push until a reducer has told that the primary has it. Any thread may call.

    Args:
        client: this process's name among the clients.
    """

    def __init__(self, client: str) -> None:
        self.client = client
        self._lock = threading.Lock()
        self._next_number = 0
        self._pushes: dict[int, Pending] = {}
        # The reducers that are shut out.
        self._lost: set[str] = set()
        self._dropped: dict[str, int] = {}

    @property
    def dropped(self) -> int:
        """How many pushes reducers have dropped, those of other clients included."""
        return sum(self._dropped.values())

    def add(self, gradients: Gradients, wanted: Wanted | None = None) -> Pending:
        """Begin to keep a push."""
        with self._lock:
            pending = Pending(self._next_number, gradients, wanted=wanted)
            self._next_number += 1
            self._pushes[pending.number] = pending
        return pending

    def remove(self, pending: Pending) -> None:
        """Forget a push."""
        with self._lock:
            self._pushes.pop(pending.number, None)

    def __contains__(self, pending: object) -> bool:
        with self._lock:
            return isinstance(pending, Pending) and pending.number in self._pushes

    def is_lost(self, reducer: str) -> bool:
        """Return whether a reducer is shut out."""
        return reducer in self._lost

    def address(self, pending: Pending, reducer: str, is_again: bool) -> Push | None:
        """Return the message that sends a push to a reducer, None if that is shut out."""
        with self._lock:
            if reducer in self._lost:
                return None
            asked = tuple(one.number for one in self._there(reducer) if one.is_acknowledged)
            pending.reducer = reducer
            low = min(self._pushes)
            number, gradients = pending.number, pending.gradients
            return Push(self.client, number, low, gradients, asked, is_again)

    def acknowledge(self, pending: Pending) -> bool:
        """Note that its reducer has a push; False if that was shut out meanwhile."""
        with self._lock:
            pending.is_acknowledged = pending.reducer not in self._lost
            return pending.is_acknowledged

    def note(self, reducer: str, push: Push, receipt: Receipt) -> bool:
        """Forget the pushes that are not held any more; return whether more were dropped."""
        with self._lock:
            before = self.dropped
            for name, count in receipt.dropped.items():
                self._dropped[name] = max(count, self._dropped.get(name, 0))
            for number in set(push.asked).difference(receipt.held):
                if number in self._pushes and self._pushes[number].reducer == reducer:
                    del self._pushes[number]
            return self.dropped > before

    def shut_out(self, reducer: str) -> list[Pending]:
        """Send nothing more to a reducer; return what was sent there."""
        with self._lock:
            self._lost.add(reducer)
            return self._there(reducer)

    def let_in(self, reducer: str) -> None:
        """Take `shut_out` back."""
        with self._lock:
            self._lost.discard(reducer)

    def settle(self, there: Iterable[Pending], arrived: set[int]) -> list[Pending]:
        """Forget what has arrived; return what must be sent again and nobody is about to send."""
        with self._lock:
            for number in arrived:
                self._pushes.pop(number, None)
            again = [one for one in there if one.number not in arrived and one.is_acknowledged]
            for one in again:
                one.is_acknowledged = False
            return again

    def has_any_at(self, reducer: str) -> bool:
        """Return whether pushes would be lost with a reducer."""
        with self._lock:
            return bool(self._there(reducer))

    def _there(self, reducer: str) -> list[Pending]:
        return [one for one in self._pushes.values() if one.reducer == reducer]
