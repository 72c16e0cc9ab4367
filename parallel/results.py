"""What pools hand out for tasks that are under way: results and iterators."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, MutableMapping
from typing import Any

from ._iterators import IMapIterator, IMapUnorderedIterator, Outcome, items_name
from ._one_go import wait_free
from ._progress import Bar
from .errors import TimeoutError

__all__ = ["AsyncResult", "Callback", "IMapIterator", "IMapUnorderedIterator", "MapResult"]
_log = logging.getLogger(__name__)
Callback = Callable[[Any], object] | None


class AsyncResult:
    """The result of one task, now or later. Pools make them.

    Args:
        job: the number of the call in its pool.
        cache: the pool's unfinished calls by number; this one enters and, finished, leaves it.
        callback: called with the value, in a thread of the pool, before waiters go on.
        error_callback: called with the error instead.
        name: the call in words, as in "apply(square)".
        keep: is held until the result is there (a pool is not collected under its tasks).
        bar: shows how far the call is.
        submission: is held while the call's tasks are handed over.

    Attributes:
        is_whole: whether all its tasks have been handed over.
    """

    def __init__(
        self,
        job: int,
        cache: MutableMapping[int, Any],
        callback: Callback = None,
        error_callback: Callback = None,
        *,
        name: str = "task",
        keep: object = None,
        bar: Bar | None = None,
        submission: threading.Lock | None = None,
    ) -> None:
        self.is_whole = submission is None
        self._submission = submission
        self._job = job
        self._cache = cache
        self._callback = callback
        self._error_callback = error_callback
        self._name = name
        self._keep = keep
        self._bar = bar
        self._outcome: Outcome | None = None
        # A lock that the end releases: a third of the price of an Event, and there is one per task.
        self._latch = threading.Lock()
        self._latch.acquire()
        cache[job] = self

    def ready(self) -> bool:
        """Return whether the call has ended, well or not."""
        return self._outcome is not None

    def successful(self) -> bool:
        """Return whether the call has ended without an error.

        Raises:
            ValueError: it has not ended yet.
        """
        if self._outcome is None:
            raise ValueError(f"the result of {self._name} is not ready")
        return self._outcome[0]

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the call has ended, `timeout` seconds at most."""
        wait_free(self._latch, timeout)

    def get(self, timeout: float | None = None) -> Any:
        """Return the value, or raise the error of the task.

        Raises:
            TimeoutError: the call has not ended within `timeout` seconds.
        """
        self.wait(timeout)
        if self._outcome is None:
            raise TimeoutError(f"the result of {self._name} did not come within {timeout:g} s")
        success, value = self._outcome
        if success:
            return value
        raise value

    def set(self, chunk: int, outcome: Outcome) -> None:
        """Take what a worker has sent; called by the pool."""
        self._finish(outcome)

    def fail(self, error: BaseException) -> None:
        """End the call with an error; called by the pool."""
        self._finish((False, error))

    def withdraw_interrupted(self) -> None:
        """End a call that will never be whole: nobody has its result; called by the pool."""
        submission = self._submission
        # In this order: it becomes whole before it is let go.
        if submission is not None and not submission.locked() and not self.is_whole:
            self._cache.pop(self._job, None)
            if self._bar is not None:
                self._bar.stop()

    def task_name(self, chunk: int) -> str:
        """Return a task of this call in words, for messages."""
        return f"task {self._job} of {self._name}"

    def _finish(self, outcome: Outcome) -> None:
        # Whoever takes it out ends it.
        if self._cache.pop(self._job, None) is None:
            return
        success, value = outcome
        if self._bar is not None:
            self._bar.stop()
        callback = self._callback if success else self._error_callback
        try:
            if callback is not None:
                callback(value)
        except BaseException:
            _log.exception("the callback of %s failed", self._name)
        self._outcome = outcome
        self._callback = self._error_callback = self._keep = None
        self._latch.release()


class MapResult(AsyncResult):
    """The results of a call over many items: a list in their order.

    Ready when all chunks have ended; the first error that came is raised then. Arguments as for
    `AsyncResult`, and the items per task (`chunksize`) and in all (`length`).
    """

    def __init__(
        self,
        job: int,
        cache: MutableMapping[int, Any],
        chunksize: int,
        length: int,
        callback: Callback = None,
        error_callback: Callback = None,
        **more: Any,
    ) -> None:
        self._chunksize = chunksize
        self._left = -(-length // chunksize)
        self._value: list[Any] = [None] * length
        self._error: BaseException | None = None
        # Tasks that cannot be sent fail in the thread of the caller.
        self._counting = threading.Lock()
        super().__init__(job, cache, callback, error_callback, **more)
        if not length:
            self._finish((True, self._value))

    def set(self, chunk: int, outcome: Outcome) -> None:
        """Take the results of one chunk; called by the pool."""
        success, value = outcome
        if success:
            begin = chunk * self._chunksize
            self._value[begin : begin + self._chunksize] = value
        elif self._error is None:
            self._error = value
        if self._bar is not None:
            self._bar.advance(self._chunksize)
        with self._counting:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            error = self._error
            self._finish((True, self._value) if error is None else (False, error))

    def task_name(self, chunk: int) -> str:
        """Return the items of a chunk in words, for messages."""
        return items_name(chunk, self._chunksize, self._name)

    def values(self) -> list[Any]:
        """Return the values when all are there, or raise the error of the first to fail."""
        values: list[Any] = self.get()
        return values
