"""The errors of pools and queues, one class per kind of failure."""

from __future__ import annotations

import builtins
import multiprocessing
from concurrent.futures import BrokenExecutor
from multiprocessing.pool import MaybeEncodingError  # type: ignore[attr-defined]


# Both `except TimeoutError` and `except multiprocessing.TimeoutError` catch it.
class TimeoutError(multiprocessing.TimeoutError, builtins.TimeoutError):  # noqa: A001
    """Nothing arrived within the given time."""


class WorkerDiedError(RuntimeError):
    """A task is lost because the worker that ran it has ended.

    Attributes:
        task: the task, such as "item 17 of map(square)" or "apply(square)".
        worker: the index of the worker in the pool.
        pid: the worker's process id.
        exitcode: as in ``multiprocessing.Process.exitcode``; None if it is not known.
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
    """A task ran longer than the pool's ``task_timeout``, and its worker was killed."""


class BrokenPoolError(BrokenExecutor):
    """The pool cannot run tasks, for example because its workers fail to start."""


class PoolTerminatedError(RuntimeError):
    """The pool was terminated before the result was ready."""


class EncodingError(MaybeEncodingError):  # type: ignore[misc]
    """A result cannot be pickled.

    Attributes:
        exc: the reason, as text.
        value: the ``repr`` of the result.
    """

    def __init__(self, exc: object, value: object) -> None:
        super().__init__(exc, value)
        # The base class has stored the `repr` of these texts.
        self.exc, self.value = str(exc), str(value)

    def __str__(self) -> str:
        return f"the result {self.value} cannot be pickled: {self.exc}"
