"""What goes wrong in pools and queues: one class per way to fail."""

from __future__ import annotations

import builtins
import multiprocessing
from concurrent.futures import BrokenExecutor
from multiprocessing.pool import MaybeEncodingError  # type: ignore[attr-defined]


# The documented name: queues and results raise it, and `except TimeoutError` of either kind fits.
class TimeoutError(multiprocessing.TimeoutError, builtins.TimeoutError):  # noqa: A001
    """A queue, a result or an iterator had nothing within the given time."""


class WorkerDiedError(RuntimeError):
    """A task is lost: the worker that ran it has ended.

    Attributes:
        task: the task, as in "task 17 of map(square)".
        worker: the place of the worker in the pool, from 0.
        pid: its process id.
        exitcode: as in `multiprocessing.Process.exitcode`; None where it is not known.
    """

    def __init__(
        self,
        message: str,
        *,
        task: str = "",
        worker: int = -1,
        pid: int | None = None,
        exitcode: int | None = None,
    ) -> None:
        super().__init__(message)
        self.task = task
        self.worker = worker
        self.pid = pid
        self.exitcode = exitcode


class TaskTimeoutError(WorkerDiedError, TimeoutError):
    """A task ran longer than the pool's `task_timeout`; its worker was killed."""


class BrokenPoolError(BrokenExecutor):
    """The pool cannot run tasks: its workers do not come up."""


class PoolTerminatedError(RuntimeError):
    """The pool was terminated before the result was there."""


class EncodingError(MaybeEncodingError):  # type: ignore[misc]
    """A result cannot be pickled. `exc` and `value` are texts: of the reason and of the result."""

    def __init__(self, exc: object, value: object) -> None:
        super().__init__(exc, value)
        # The base class has made texts of texts.
        self.exc, self.value = str(exc), str(value)

    def __str__(self) -> str:
        return f"the result {self.value} cannot be pickled: {self.exc}"
