"""A call in a group: begun, and waited for at once or later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch.distributed as dist

from ..errors import CollectiveError, Describe
from ..trace.calling import calling

T = TypeVar("T")


@dataclass(frozen=True)
class Operation(Generic[T]):
    """What a call does, once its arguments have been checked.

    Attributes:
        describe: as that of a `Call`.
        begin: hands everything to the transport.
        finish: after that is done: leaves the outcome where the caller expects it.
        failed: of a message between two ranks: what has not happened when it fails. The others
            are not in such a call, and are neither met nor asked.
    """

    name: str
    group: dist.ProcessGroup
    describe: Describe
    begin: Callable[[], Sequence[dist.Work]]
    finish: Callable[[], T]
    failed: str = ""

    @contextlib.contextmanager
    def calling(self, *, is_late: bool = False) -> Iterator[None]:
        """Surround the transport's work; `is_late` while waiting for what has begun before."""
        name = f"{self.name}.wait" if is_late else self.name
        meets = is_late or bool(self.failed)
        with calling(name, self.group, self.describe, meets=meets) as call:
            try:
                yield
            except RuntimeError as error:
                if not self.failed or isinstance(error, CollectiveError):
                    raise
                place, transport = call.here(), dist.get_backend_config(self.group)
                raise CollectiveError(
                    f"{name}() on rank {place.rank} ({place.site}) {self.failed}. The transport "
                    f"({transport}) says: {error}"
                ) from error


class CollectiveHandle(Generic[T]):
    """A call of a group that has begun; its tensors must be left alone until `wait()`."""

    def __init__(self, operation: Operation[T], works: Sequence[dist.Work]) -> None:
        self._operation, self._works = operation, works
        self._outcome: list[T] = []

    def wait(self) -> T:
        """Wait until everything is where it belongs; what is copied back is copied here.

        Returns:
            The sender's global rank for a message that is received, else None; the same when
            called again.

        Raises:
            CollectiveError: it has failed, or the group's timeout is over.
        """
        if not self._outcome:
            with self._operation.calling(is_late=True):
                for work in self._works:
                    work.wait()
            self._outcome.append(self._operation.finish())
        return self._outcome[0]

    def is_completed(self) -> bool:
        """Return whether `wait()` would return at once."""
        return bool(self._outcome) or all(work.is_completed() for work in self._works)


def begin(operation: Operation[T]) -> CollectiveHandle[T]:
    """Begin the call."""
    with operation.calling():
        works = operation.begin()
    return CollectiveHandle(operation, works)


def complete(operation: Operation[T]) -> T:
    """Make the call and wait for it."""
    with operation.calling():
        for work in operation.begin():
            work.wait()
    return operation.finish()


def run(operation: Operation[None], async_op: bool) -> CollectiveHandle[None] | None:
    """Begin the call, or make it and wait for it."""
    if async_op:
        return begin(operation)
    complete(operation)
    return None
