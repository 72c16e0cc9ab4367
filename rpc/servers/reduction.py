"""Reduce the gradients of many pushes: messages, checks, and one level of the reduction."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Generic, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor
from torch.futures import Future

from ...collectives.errors import shorten
from ..calls.group import RpcGroup
from .model_state import list_names

logger = logging.getLogger(__name__)

Gradients = dict[str, Tensor]
Layout = dict[str, tuple[int, ...]]
# `Push.client`, `Push.number` and `Push.low`; the first two identify a push on one server.
PushId = tuple[str, int, int]

OnFull = Literal["block", "drop_oldest", "error"]
State = Literal["taken", "idle", "full", "failed", "fenced", "refused"]

_HALF = (torch.float16, torch.bfloat16)


class Push(NamedTuple):
    """The gradients of a client."""

    client: str
    number: int
    # The client has no pending push with a lower number.
    low: int
    gradients: Gradients
    # Earlier pushes to the same reducer; the receipt lists those that are still pending there.
    asked: tuple[int, ...] = ()
    # Accepted even into a full queue, because the push was acknowledged before.
    is_retry: bool = False

    @property
    def ids(self) -> list[PushId]:
        return [(self.client, self.number, self.low)]


class Batch(NamedTuple):
    """The reduced gradients of several pushes, from a secondary reducer."""

    reducer: str
    gradients: Gradients
    ids: list[PushId]


class Receipt(NamedTuple):
    """The answer of a reducer to a push or a batch: whether it was taken, or why not."""

    state: State
    text: str = ""
    # Pushes among `Push.asked` that the primary reducer does not have yet.
    pending: tuple[int, ...] = ()
    # The number of dropped pushes by reducer, as far as known.
    dropped: Mapping[str, int] = {}


def on_reducer_gone(group: RpcGroup, prefix: str, note: Callable[[], None]) -> None:
    """Call ``note`` when the reducer with services under ``prefix`` has died or was excluded."""

    def end(done: Future[bool]) -> None:
        is_in_order = False
        with contextlib.suppress(RuntimeError):
            is_in_order = done.wait()
        if not is_in_order:
            note()

    group.registered_async(f"{prefix}/_alive_service", timeout=0).add_done_callback(end)


@dataclass(frozen=True)
class ReduceSettings:
    """Settings of the reduction; see the arguments of ``PushPullGradServerImpl``."""

    method: str
    device: torch.device
    batch_size: int
    max_queue_size: int
    on_full: OnFull

    def __post_init__(self) -> None:
        method, batch_size, max_queue_size = self.method, self.batch_size, self.max_queue_size
        # Not by assert statements, which python -O removes.
        if method not in ("mean", "sum"):
            raise AssertionError(f"reduce_method must be 'mean' or 'sum', got {method!r}")
        for setting, size in (
            ("max_queue_size", max_queue_size),
            ("reduce_batch_size", batch_size),
        ):
            if not isinstance(size, int) or size < 2:
                raise AssertionError(f"{setting} must be an integer greater than 1, got {size!r}")
        if max_queue_size <= batch_size:
            raise AssertionError(
                "max_queue_size must be greater than reduce_batch_size, got "
                f"{max_queue_size} and {batch_size}"
            )
        policies = get_args(OnFull)
        if self.on_full not in policies:
            raise ValueError(f"on_full must be one of {', '.join(policies)}, got {self.on_full!r}")


class Reduction:
    """The sum or mean of a number of gradients, added one by one.

    Half types are added in float32, because the sum of many would overflow or lose precision.
    """

    def __init__(self, settings: ReduceSettings) -> None:
        self._settings = settings
        self._total: Gradients = {}
        self.count = 0

    def add(self, gradients: Mapping[str, Tensor]) -> Gradients | None:
        """Add gradients; return the result if the batch is full, and start the next one."""
        placed = {name: self._placed(gradient) for name, gradient in gradients.items()}
        if self.count == 0:
            self._total = placed
        elif placed:
            total, addends = list(self._total.values()), [placed[name] for name in self._total]
            if self.count == 1:
                # Not in place, because the first gradients belong to the caller.
                sums = torch._foreach_add(total, addends)
                self._total = dict(zip(self._total, sums, strict=True))
            else:
                torch._foreach_add_(total, addends)
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


def get_layout(gradients: Mapping[str, Tensor]) -> Layout:
    return {name: tuple(gradient.shape) for name, gradient in gradients.items()}


def check_gradients(gradients: Mapping[str, Tensor], layout: Layout) -> None:
    """Raise ValueError if names or shapes differ from ``layout``."""
    missing = layout.keys() - gradients.keys()
    extra = gradients.keys() - layout.keys()
    problems = []
    if missing:
        problems.append(f"{list_names(missing)} missing")
    if extra:
        problems.append(f"{list_names(extra)} unexpected")
    problems += [
        f"{name!r} has shape {tuple(gradients[name].shape)} instead of {shape}"
        for name, shape in layout.items()
        if name in gradients and tuple(gradients[name].shape) != shape
    ]
    if problems:
        raise ValueError(
            "gradients must fit the managed model (without one, the pushes before): "
            f"{shorten(problems, '; ')}"
        )


Item = TypeVar("Item", bound=Push | Batch)


class Level(Generic[Item]):
    """One level of the reduction: a queue, items that wait for room in it, and a sum.

    All methods except ``add`` must be called within ``locked``.
    """

    def __init__(self, name: str, settings: ReduceSettings, changed: threading.Condition) -> None:
        self.name = name
        self.dropped = 0
        self.items: deque[Item] = deque()
        self.waiting: deque[tuple[Item, Future[Receipt]]] = deque()
        # The number of items in the sum, and the pushes in them.
        self.num_taken = 0
        self._ids: list[PushId] = []
        self._sum_layout: Layout = {}
        self._reduction = Reduction(settings)
        self._settings = settings
        self._changed = changed
        self._replies: list[tuple[Future[Receipt], Receipt]] = []

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the server's lock, notify its thread, release the lock and send the replies.

        The lock must not be held while a future is completed, because that sends its value.
        """
        with self._changed:
            yield
            replies, self._replies = self._replies, []
            self._changed.notify_all()
        for answer, receipt in replies:
            answer.set_result(receipt)

    def reply(self, entry: Item, answer: Future[Receipt], state: State, text: str = "") -> None:
        self._replies.append((answer, self.receipt(entry, state, text)))

    def receipt(self, entry: Item, state: State, text: str) -> Receipt:
        return Receipt(state, text, dropped={self.name: self.dropped})

    def offer(self, entry: Item, answer: Future[Receipt], *, is_forced: bool = False) -> None:
        """Queue an item; if the queue is full, apply ``on_full`` unless the item ``is_forced``."""
        is_full = len(self.items) >= self._settings.max_queue_size and not is_forced
        if is_full and self._settings.on_full == "block":
            self.waiting.append((entry, answer))
        elif is_full and self._settings.on_full == "error":
            self.reply(entry, answer, "full", f"the queue of {self.name!r} is full")
        else:
            if is_full:
                self.dropped += len(self.items.popleft().ids)
            self.items.append(entry)
            self.reply(entry, answer, "taken")

    def admit_waiting(self) -> None:
        """Move waiting items into the queue while it has room."""
        while self.waiting and len(self.items) < self._settings.max_queue_size:
            entry, answer = self.waiting.popleft()
            self.items.append(entry)
            self.reply(entry, answer, "taken")

    def reject(
        self, state: State, text: str = "", is_meant: Callable[[Item], bool] = lambda entry: True
    ) -> bool:
        """Reject the waiting items for which ``is_meant`` is true; return whether there are any."""
        leaving = [waiting_entry for waiting_entry in self.waiting if is_meant(waiting_entry[0])]
        self.waiting = deque(
            waiting_entry for waiting_entry in self.waiting if not is_meant(waiting_entry[0])
        )
        for entry, answer in leaving:
            self.reply(entry, answer, state, text)
        return bool(leaving)

    @property
    def pushes(self) -> list[PushId]:
        return [*chain.from_iterable(entry.ids for entry in self.items), *self._ids]

    @property
    def has_batch(self) -> bool:
        """Whether the items here, including those in the sum, suffice for a full sum."""
        return self.num_taken + len(self.items) >= self._settings.batch_size

    @property
    def layout(self) -> Layout | None:
        """The names and shapes that the next item needs; None if it begins a sum."""
        if self.items:
            return get_layout(self.items[-1].gradients)
        is_begun = 0 < self.num_taken < self._settings.batch_size
        return self._sum_layout if is_begun else None

    def take(self) -> Item:
        """Remove the oldest item from the queue, to be added."""
        entry = self.items.popleft()
        if not self.num_taken:
            self._sum_layout = get_layout(entry.gradients)
        self.num_taken += 1
        self._ids += entry.ids
        self.admit_waiting()
        return entry

    def add(self, entry: Item) -> Gradients | None:
        """Add a taken item and return a full sum; call it without the lock, as it may take long."""
        return self._reduction.add(entry.gradients)

    def finish(self) -> list[PushId]:
        """Start the next sum; return the pushes in the finished one."""
        finished, self._ids, self.num_taken = self._ids, [], 0
        return finished

    def fail(self, text: str) -> None:
        """Reject waiting items, and discard a sum that an error has left incomplete."""
        if self._reduction.count != self.num_taken:
            self._reduction.clear()
            lost = len(self.finish())
            self.dropped += lost
            logger.warning("an error at the reducer %r lost %d pushes", self.name, lost)
        self.reject("failed", text)
