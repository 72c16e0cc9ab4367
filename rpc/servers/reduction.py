"""Gradients of many pushes become one: what travels, what is checked, and the running sum."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.futures import Future

Gradients = dict[str, Tensor]
Layout = dict[str, tuple[int, ...]]
# A client and the number that it gave to a push: unique for a server.
PushId = tuple[str, int]

OnFull = Literal["block", "drop_oldest", "error"]
State = Literal["taken", "idle", "full", "failed", "fenced", "refused"]

_HALF = (torch.float16, torch.bfloat16)
_SHOWN = 5


class Push(NamedTuple):
    """The gradients of a client.

    Attributes:
        low: the client remembers no push of a lower number, and will never ask for one.
        asked: earlier pushes to the same reducer of which it wants to know whether they are still
            there.
        is_again: taken whatever the queue's limit, because it has been acknowledged before.
    """

    client: str
    number: int
    low: int
    gradients: Gradients
    asked: tuple[int, ...] = ()
    is_again: bool = False


class Batch(NamedTuple):
    """What a secondary reducer has made of several pushes.

    Attributes:
        reducer: whose it is.
        ids: the pushes in it.
        lows: `Push.low` of the clients in it.
    """

    reducer: str
    gradients: Gradients
    ids: list[PushId]
    lows: dict[str, int]


class Receipt(NamedTuple):
    """What a reducer answers to a push or a batch.

    Attributes:
        text: why it was not taken.
        held: those of the asked pushes that the primary reducer does not have yet.
        dropped: how many pushes each reducer has dropped, as far as known there.
    """

    state: State
    text: str = ""
    held: tuple[int, ...] = ()
    dropped: Mapping[str, int] = {}


Answer = tuple[Future[Receipt], Receipt]


def tell(answers: Iterable[Answer]) -> None:
    """Give answers to those who wait. Not under a lock: completing a future sends the answer."""
    for answer, receipt in answers:
        answer.set_result(receipt)


@dataclass(frozen=True)
class ReduceSettings:
    """How a server reduces; the arguments of `PushPullGradServerImpl`."""

    method: str
    device: torch.device
    batch_size: int
    max_queue_size: int
    on_full: OnFull


class Reduction:
    """The sum or mean of a number of gradients, added one by one.

    Half types are added in float32: a sum of many would lose or overflow.

    Args:
        settings: `method`, `device` and `batch_size` are used.
    """

    def __init__(self, settings: ReduceSettings) -> None:
        self._settings = settings
        self._total: Gradients = {}
        self.count = 0

    def add(self, gradients: Mapping[str, Tensor]) -> Gradients | None:
        """Add one; return the result of a full batch and begin with the next one."""
        placed = {name: self._placed(gradient) for name, gradient in gradients.items()}
        if self.count == 0:
            self._total = placed
        elif placed:
            total, others = list(self._total.values()), [placed[name] for name in self._total]
            if self.count == 1:
                # The first ones are the caller's: not added to, and not copied before.
                sums = torch._foreach_add(total, others)
                self._total = dict(zip(self._total, sums, strict=True))
            else:
                torch._foreach_add_(total, others)
        self.count += 1
        if self.count < self._settings.batch_size:
            return None
        result = self._total
        if result and self._settings.method == "mean":
            torch._foreach_div_(list(result.values()), self.count)
        self.clear()
        return result

    def clear(self) -> None:
        """Forget what has been added."""
        self._total, self.count = {}, 0

    def _placed(self, gradient: Tensor) -> Tensor:
        kind = torch.float32 if gradient.dtype in _HALF else gradient.dtype
        return gradient.to(self._settings.device, kind)


def layout_of(gradients: Mapping[str, Tensor]) -> Layout:
    """Return names and shapes."""
    return {name: tuple(gradient.shape) for name, gradient in gradients.items()}


def check_gradients(gradients: Mapping[str, Tensor], layout: Layout) -> None:
    """Check names and shapes.

    Raises:
        ValueError: they are not those of `layout`.
    """
    missing = layout.keys() - gradients.keys()
    extra = gradients.keys() - layout.keys()
    parts = []
    if missing:
        parts.append(f"none for {_named(missing)}, which the managed model trains")
    if extra:
        parts.append(f"some for {_named(extra)}, which it does not train")
    parts += [
        f"{name!r} has shape {tuple(gradients[name].shape)} instead of {shape}"
        for name, shape in layout.items()
        if name in gradients and tuple(gradients[name].shape) != shape
    ][:_SHOWN]
    if parts:
        raise ValueError(f"gradients must fit the managed model: {'; '.join(parts)}")


def _named(names: Iterable[str]) -> str:
    in_order = sorted(names)
    more = len(in_order) - _SHOWN
    shown = ", ".join(map(repr, in_order[:_SHOWN]))
    return f"{shown} and {more} more" if more > 0 else shown


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
