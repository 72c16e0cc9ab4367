"""Gradients of many pushes become one: what travels, what is checked, and one level of reducing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Generic, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor
from torch.futures import Future

from .model_state import named

Gradients = dict[str, Tensor]
Layout = dict[str, tuple[int, ...]]
# A client and the number that it gave to a push: unique for a server.
PushId = tuple[str, int]

OnFull = Literal["block", "drop_oldest", "error"]
State = Literal["taken", "idle", "full", "failed", "fenced", "refused"]

_HALF = (torch.float16, torch.bfloat16)
_SHOWN = 5


class Push(NamedTuple):
    """The gradients of a client."""

    client: str
    number: int
    # The client remembers no push of a lower number, and will never ask for one.
    low: int
    gradients: Gradients
    # Earlier pushes to the same reducer of which it wants to know whether they are still there.
    asked: tuple[int, ...] = ()
    # Taken whatever the queue's limit, because it has been acknowledged before.
    is_again: bool = False

    @property
    def ids(self) -> list[PushId]:
        return [(self.client, self.number)]

    @property
    def lows(self) -> dict[str, int]:
        return {self.client: self.low}


class Batch(NamedTuple):
    """What a secondary reducer has made of several pushes, and `Push.low` of their clients."""

    reducer: str
    gradients: Gradients
    ids: list[PushId]
    lows: dict[str, int]


class Receipt(NamedTuple):
    """What a reducer answers to a push or a batch: whether it was taken, or why not."""

    state: State
    text: str = ""
    # Those of the asked pushes that the primary reducer does not have yet.
    held: tuple[int, ...] = ()
    # How many pushes each reducer has dropped, as far as known there.
    dropped: Mapping[str, int] = {}


Answer = tuple[Future[Receipt], Receipt]


def answer_all(answers: Iterable[Answer]) -> None:
    """Give those who wait their receipts. Not under a lock: completing a future sends it."""
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

    def __post_init__(self) -> None:
        method, batch_size, max_queue_size = self.method, self.batch_size, self.max_queue_size
        assert method in ("mean", "sum"), f"reduce_method must be 'mean' or 'sum', got {method!r}"
        assert max_queue_size > 1, f"max_queue_size must be greater than 1, got {max_queue_size}"
        assert batch_size > 1, f"reduce_batch_size must be greater than 1, got {batch_size}"
        assert max_queue_size > batch_size, (
            f"max_queue_size must be greater than reduce_batch_size, got {max_queue_size} and "
            f"{batch_size}"
        )
        policies = get_args(OnFull)
        if self.on_full not in policies:
            raise ValueError(f"on_full must be one of {', '.join(policies)}, got {self.on_full!r}")


class Reduction:
    """The sum or mean of a number of gradients, added one by one.

    Half types are added in float32: a sum of many would lose or overflow.
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
        self._total, self.count = {}, 0

    def _placed(self, gradient: Tensor) -> Tensor:
        kind = torch.float32 if gradient.dtype in _HALF else gradient.dtype
        return gradient.to(self._settings.device, kind)


def layout_of(gradients: Mapping[str, Tensor]) -> Layout:
    return {name: tuple(gradient.shape) for name, gradient in gradients.items()}


def check_gradients(gradients: Mapping[str, Tensor], layout: Layout) -> None:
    """Raise ValueError where names and shapes are not those of `layout`."""
    missing = layout.keys() - gradients.keys()
    extra = gradients.keys() - layout.keys()
    parts = []
    if missing:
        parts.append(f"none for {named(missing)}, which the managed model trains")
    if extra:
        parts.append(f"some for {named(extra)}, which it does not train")
    parts += [
        f"{name!r} has shape {tuple(gradients[name].shape)} instead of {shape}"
        for name, shape in layout.items()
        if name in gradients and tuple(gradients[name].shape) != shape
    ][:_SHOWN]
    if parts:
        raise ValueError(f"gradients must fit the managed model: {'; '.join(parts)}")


Item = TypeVar("Item", bound=Push | Batch)


class Level(Generic[Item]):
    """One level of the reduction: a queue, those that wait for a place in it, and a sum.

    Everything but `add` is to be called under the reducer's lock.
    """

    def __init__(self, name: str, settings: ReduceSettings, on_full: OnFull) -> None:
        self.name = name
        self.dropped = 0
        self.items: deque[Item] = deque()
        self.waiting: deque[tuple[Item, Future[Receipt]]] = deque()
        # How many items are in the sum, and the pushes in them.
        self.num_taken = 0
        self._ids: list[PushId] = []
        self._lows: dict[str, int] = {}
        self._reduction = Reduction(settings)
        self._limit = settings.max_queue_size
        self._on_full = on_full

    def offer(
        self, item: Item, answer: Future[Receipt], *, is_forced: bool = False
    ) -> State | None:
        """Take an item, whatever the limit where `is_forced`; "full" refuses it, None: it waits."""
        is_full = len(self.items) >= self._limit and not is_forced
        if is_full and self._on_full == "error":
            return "full"
        if is_full and self._on_full == "block":
            self.waiting.append((item, answer))
            return None
        if is_full:
            self.dropped += len(self.items.popleft().ids)
        self.items.append(item)
        return "taken"

    def admit(self) -> list[Answer]:
        """Give those that wait the free places."""
        answers = []
        while self.waiting and len(self.items) < self._limit:
            item, answer = self.waiting.popleft()
            self.items.append(item)
            answers.append((answer, self.receipt(item, "taken")))
        return answers

    def dismiss(
        self, state: State, text: str = "", is_meant: Callable[[Item], bool] = lambda item: True
    ) -> list[Answer]:
        """Send away those that wait and are meant."""
        leaving = [one for one in self.waiting if is_meant(one[0])]
        self.waiting = deque(one for one in self.waiting if not is_meant(one[0]))
        return [(answer, self.receipt(item, state, text)) for item, answer in leaving]

    def receipt(self, item: Item, state: State, text: str = "") -> Receipt:
        return Receipt(state, text, dropped={self.name: self.dropped})

    @property
    def pushes(self) -> list[PushId]:
        return [*chain.from_iterable(item.ids for item in self.items), *self._ids]

    def take(self) -> Item:
        """Take the oldest item out of the queue, to be added."""
        item = self.items.popleft()
        self.num_taken += 1
        self._ids += item.ids
        for client, low in item.lows.items():
            self._lows[client] = max(low, self._lows.get(client, 0))
        return item

    def add(self, item: Item) -> Gradients | None:
        """Add what was taken; return a full sum. Not under the lock: it may be large."""
        return self._reduction.add(item.gradients)

    def finish(self) -> tuple[list[PushId], dict[str, int]]:
        """Begin the next sum; return the pushes in the last one, and the lows of their clients."""
        finished = self._ids, self._lows
        self._ids, self._lows, self.num_taken = [], {}, 0
        return finished

    def drop_broken(self) -> int:
        """Forget the sum where an error has left it half done; return how many pushes are lost."""
        if self._reduction.count == self.num_taken:
            return 0
        self._reduction.clear()
        count = len(self.finish()[0])
        self.dropped += count
        return count
