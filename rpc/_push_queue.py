"""A bounded queue and what happens when it is full. Its owner's lock guards it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from torch.futures import Future

from ._reduction import OnFull, Receipt

T = TypeVar("T")


class PushQueue(Generic[T]):
    """Items in the order of their arrival, and those that wait for a place.

    Args:
        limit: how many items it holds.
        on_full: "block" lets new items wait, "drop_oldest" drops the oldest one for each, "error"
            refuses them.
    """

    def __init__(self, limit: int, on_full: OnFull) -> None:
        self._limit = limit
        self._on_full = on_full
        self.items: deque[T] = deque()
        self.waiting: deque[tuple[T, Future[Receipt]]] = deque()

    def offer(self, item: T, answer: Future[Receipt], *, is_forced: bool) -> tuple[bool, list[T]]:
        """Take an item, or let it wait.

        Args:
            is_forced: takes it whatever the limit.

        Returns:
            Whether it was not refused, and what was dropped for it.
        """
        is_full = len(self.items) >= self._limit and not is_forced
        if is_full and self._on_full == "error":
            return False, []
        if is_full and self._on_full == "block":
            self.waiting.append((item, answer))
            return True, []
        self.items.append(item)
        return True, [self.items.popleft()] if is_full else []

    def is_waiting(self, item: T) -> bool:
        """Return whether an item that was offered just now waits."""
        return bool(self.waiting) and self.waiting[-1][0] is item

    def wait(self, item: T, answer: Future[Receipt]) -> None:
        """Let an item wait, whatever room there is."""
        self.waiting.append((item, answer))

    def take(self) -> T:
        """Return the oldest item and remove it."""
        return self.items.popleft()

    def admit(self) -> list[tuple[T, Future[Receipt]]]:
        """Give those that wait the free places; return them, to be told."""
        admitted = []
        while self.waiting and len(self.items) < self._limit:
            item, answer = self.waiting.popleft()
            self.items.append(item)
            admitted.append((item, answer))
        return admitted

    def withdraw(self, is_meant: Callable[[T], bool]) -> list[tuple[T, Future[Receipt]]]:
        """Send away those that wait and are meant; return them, to be told."""
        leaving = [one for one in self.waiting if is_meant(one[0])]
        self.waiting = deque(one for one in self.waiting if not is_meant(one[0]))
        return leaving
