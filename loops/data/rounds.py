"""The batches of an evaluation, of which some steps need as many on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist

from ...collectives import TorchDist, all_gather_object, comm_device, failure_of
from .loaders import batches_from

_END = object()
# What a rank tells the others before each step: the greatest counts.
_DONE, _GOES_ON, _FAILED = range(3)


class Rounds:
    """The batches of a rank that steps by itself."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader

    def batches(self) -> Iterator[tuple[Any, bool]]:
        """Return batches, each with whether its samples count."""
        return zip(batches_from(self._loader, epoch=0), repeat(True), strict=False)

    def kept(self) -> AbstractContextManager[None]:
        """What is run inside may fail without keeping other ranks waiting."""
        return nullcontext()

    def agree(self) -> bool:
        """Whether there is a step to make; to be asked before each."""
        return True


class EvenRounds(Rounds):
    """Equally many rounds on all ranks, each with a step that needs them all.

    A rank that has run out sees its last batch again, which counts nothing; one that never had
    any gets one of another rank. Before each step the ranks tell each other whether they go on: an
    exception of a loader, or one that was kept, ends the evaluation on all of them.

    Args:
        loader: This rank's batches.
        group: The ranks with batches of their own.
        what: What `loader` is, for errors.
    """

    def __init__(
        self, loader: Iterable[Any], group: dist.ProcessGroup | None, what: str = "loader"
    ) -> None:
        super().__init__(loader)
        self._group, self._what = group, what
        self._has_batch = False
        self._failure: Exception | None = None

    def batches(self) -> Iterator[tuple[Any, bool]]:
        """Yield batches without an end, each with whether its samples count.

        Raises:
            ValueError: On every rank, when there is no batch on any.
            RuntimeError: As `agree`.
        """
        own: Iterator[Any] = iter(())
        with self.kept():
            own = iter(batches_from(self._loader, epoch=0))
        batch = self._next(own)
        last = self._first(batch)
        while True:
            yield last, self._has_batch
            batch = self._next(own)
            last = batch if self._has_batch else last

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep an exception for the next `agree`."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
            self._failure = self._failure or error

    def agree(self) -> bool:
        """Whether any rank has a batch; every rank must call this.

        Raises:
            Exception: What was kept on this rank.
            RuntimeError: Another rank has kept something; names it and its error.
        """
        own = _GOES_ON if self._has_batch else _DONE
        own = own if self._failure is None else _FAILED
        # By all ranks: a step also needs those that hold parts of the same layers.
        flag = torch.full((), own, device=comm_device())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        told = int(flag.item())
        if told == _FAILED:
            raise_everywhere(self._failure)
        return told == _GOES_ON

    def _next(self, own: Iterator[Any]) -> Any:
        batch = _END
        if self._failure is None:
            with self.kept():
                batch = next(own, _END)
        self._has_batch = batch is not _END
        return batch

    def _first(self, batch: Any) -> Any:
        """Return this rank's first batch, or one that stands in for it."""
        self.agree()
        ranks = TorchDist(self._group)
        has = ranks.all_gather_object(self._has_batch)
        if not any(has):
            raise ValueError(f"the {self._what} has no batches on any rank")
        if all(has):
            return batch
        lent = ranks.broadcast_object(batch if self._has_batch else None, has.index(True))
        return batch if self._has_batch else lent


def raise_everywhere(error: Exception | None) -> None:
    """Raise `error` here and a RuntimeError that names it elsewhere; every rank must call this.

    Nothing happens where no rank has one.
    """
    failures = all_gather_object(failure_of(error))
    if error is not None:
        raise error
    told = "; ".join(f"rank {one.rank}: {one.told}" for one in failures if one)
    if told:
        raise RuntimeError(f"the evaluation failed on {told}")
