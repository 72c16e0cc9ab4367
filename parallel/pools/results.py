"""The results and iterators that pools return for calls in progress."""

from __future__ import annotations

import collections
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

from ..arguments import seconds
from ..errors import TimeoutError

__all__ = ["AsyncResult", "Callback", "IMapIterator", "IMapUnorderedIterator", "MapResult"]
_log = logging.getLogger(__name__)
Callback = Callable[[Any], object] | None
Outcome = tuple[bool, Any]

# If reading the input takes longer than this, results that have arrived are returned first.
_SLOW_INPUT_S = 10e-3


class Call:
    """The name, the pool and the progress bar of a call; any thread may advance the bar.

    Attributes:
        pool: a reference that keeps the pool alive until the call ends.
        chunksize: items per task; 0 if the call is a single task.
        items: the number of items in all tasks so far.
    """

    def __init__(
        self,
        name: str,
        pool: Any,
        total: int | None = None,
        *,
        chunksize: int = 0,
        progress: bool = False,
    ) -> None:
        self.name = name
        self.pool = pool
        self.chunksize = chunksize
        self.items = 0
        self._bar: Any = None
        if progress:
            from rich.progress import Progress

            self._bar = Progress(transient=False)
            self._task = self._bar.add_task(name, total=total)
            self._bar.start()

    def advance(self, chunk: int) -> None:
        """Advance the bar by the items of a chunk."""
        if self._bar is not None:
            self._bar.advance(self._task, len(self._range(chunk)))

    def stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def task_name(self, chunk: int) -> str:
        """Return the name of a task for messages, with its items if the call has items."""
        if not self.chunksize:
            return self.name
        positions = self._range(chunk)
        if len(positions) == 1:
            return f"item {positions[0]} of {self.name}"
        return f"items {positions[0]} to {positions[-1]} of {self.name}"

    def _range(self, chunk: int) -> range:
        begin = chunk * self.chunksize
        return range(begin, min(begin + self.chunksize, self.items))


class AsyncResult:
    """The result of one task, which may still be running. Pools create these objects."""

    def __init__(
        self,
        job: int,
        cache: MutableMapping[int, Any],
        callback: Callback,
        error_callback: Callback,
        call: Call,
    ) -> None:
        self._job = job
        # The pool's unfinished calls by number.
        self._cache = cache
        self._callback = callback
        self._error_callback = error_callback
        self._call = call
        self._outcome: Outcome | None = None
        self._ended = threading.Event()
        cache[job] = self

    def ready(self) -> bool:
        """Return whether the call has ended, with or without an error."""
        return self._outcome is not None

    def successful(self) -> bool:
        """Return whether the call has ended without an error.

        Raises:
            ValueError: the call has not ended yet.
        """
        if self._outcome is None:
            raise ValueError(f"the result of {self._call.name} is not ready")
        return self._outcome[0]

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the call has ended, at most ``timeout`` seconds."""
        self._ended.wait(seconds("timeout", timeout))

    def get(self, timeout: float | None = None) -> Any:
        """Return the value, or raise the error of the task.

        Args:
            timeout: the longest wait in seconds (default: no limit).

        Raises:
            TimeoutError: the call has not ended within ``timeout`` seconds.
        """
        self.wait(timeout)
        if self._outcome is None:
            message = f"the result of {self._call.name} did not arrive within {timeout:g} s"
            raise TimeoutError(message)
        success, value = self._outcome
        if success:
            return value
        raise value

    def set(self, chunk: int, outcome: Outcome) -> None:
        """Store the outcome of a task; called by the pool."""
        self._finish(outcome)

    def fail(self, error: BaseException) -> None:
        """End the call with an error; called by the pool."""
        self._finish((False, error))

    def withdraw(self, error: BaseException) -> None:
        """End a call whose submission was interrupted; do not call its error callback."""
        self._error_callback = None
        self.fail(error)

    def _finish(self, outcome: Outcome) -> None:
        # Several threads may try to end the call. Only the one that removes it from the cache does.
        if self._cache.pop(self._job, None) is None:
            return
        success, value = outcome
        call = self._call
        call.stop_bar()
        callback = self._callback if success else self._error_callback
        try:
            if callback is not None:
                callback(value)
        except BaseException:
            _log.exception("the callback of %s failed", call.name)
        self._outcome = outcome
        self._ended.set()
        self._callback = self._error_callback = call.pool = None


class MapResult(AsyncResult):
    """The results of a call over many items, as a list in the order of the items.

    It is ready when all chunks have ended. ``get`` raises the first error that arrived.
    """

    def __init__(
        self,
        job: int,
        cache: MutableMapping[int, Any],
        length: int,
        callback: Callback,
        error_callback: Callback,
        call: Call,
    ) -> None:
        self._left = -(-length // call.chunksize)
        call.items = length
        self._value: list[Any] = [None] * length
        self._error: BaseException | None = None
        # `set` is also called in the caller's thread, for tasks that cannot be sent.
        self._counting = threading.Lock()
        super().__init__(job, cache, callback, error_callback, call)
        if not length:
            self._finish((True, self._value))

    def set(self, chunk: int, outcome: Outcome) -> None:
        """Store the results of one chunk; called by the pool."""
        success, value = outcome
        if success:
            begin = chunk * self._call.chunksize
            self._value[begin : begin + len(value)] = value
        elif self._error is None:
            self._error = value
        self._call.advance(chunk)
        with self._counting:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            error = self._error
            self._finish((True, self._value) if error is None else (False, error))


class IMapIterator:
    """An iterator over the results of a call over many items, in the order of the items.

    The thread that takes results also reads the input, some chunks in advance. If a task fails, its
    error is raised once, instead of the results of its chunk; later results are still returned. An
    error of the input is raised after the results of the complete chunks read before it. Pools
    create these objects.
    """

    def __init__(
        self,
        job: int,
        cache: MutableMapping[int, Any],
        iterable: Iterable[Any],
        submit: Callable[[int, list[Any]], None],
        on_end: Callable[[], object],
        *,
        ahead: int,
        call: Call,
    ) -> None:
        self._job = job
        self._cache = cache
        # None after the input has ended. `iter` is called when the first item is read.
        self._source: Iterator[Any] | None = itertools.chain.from_iterable((iterable,))
        # The items of the next chunk that have been read.
        self._chunk: list[Any] = []
        self._input_error: BaseException | None = None
        self._submit: Callable[[int, list[Any]], None] | None = submit
        self._on_end: Callable[[], object] | None = on_end
        # The maximum number of chunks that are in flight or not yet taken.
        self._ahead = ahead
        self._call = call
        # The numbers of chunks read and taken, the chunks in flight, the outcomes not yet taken.
        self._count = self._taken = 0
        self._in_flight: set[int] = set()
        self._arrived: dict[int, Outcome] = {}
        self._values: collections.deque[Any] = collections.deque()
        # Held by the thread that reads the input. The condition guards the other attributes.
        self._reading = threading.Lock()
        self._changed = threading.Condition()

    def __iter__(self) -> IMapIterator:
        return self

    def next(self, timeout: float | None = None) -> Any:
        """Return the next result, or raise the error of its task.

        Args:
            timeout: the longest wait in seconds (default: no limit).

        Raises:
            StopIteration: there are no further results.
            TimeoutError: the result did not arrive within ``timeout`` seconds. The error may come
                later, because reading an item of the input is not interrupted.
        """
        timeout = seconds("timeout", timeout)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            self.feed(deadline)
            with self._changed:
                if self._values or self._take():
                    return self._values.popleft()
                if self._source is None and self._taken >= self._count:
                    error, self._input_error = self._input_error, None
                    raise StopIteration if error is None else error
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    name = self._call.name
                    raise TimeoutError(
                        f"the next result of {name} did not arrive within {timeout:g} s"
                    )
                # If more input is wanted and no other thread is reading, read instead of waiting.
                if self._reading.locked() or not self._wants_more():
                    self._changed.wait(None if remaining_s == math.inf else remaining_s)

    __next__ = next

    def feed(self, deadline: float = math.inf) -> None:
        """Read input until enough chunks are in flight, unless another thread is reading.

        Read at least one item. If reading is slow, stop early at the deadline (of
        ``time.monotonic``), or if the next result has arrived.
        """
        if not self._wants_more() or not self._reading.acquire(blocking=False):
            return
        slow_from = time.monotonic() + _SLOW_INPUT_S
        try:
            while self._wants_more():
                self._read_one()
                now = time.monotonic()
                if now > slow_from and (now >= deadline or self._has_result()):
                    break
        finally:
            self._reading.release()
            with self._changed:
                self._changed.notify_all()

    def _has_result(self) -> bool:
        with self._changed:
            return bool(self._values) or self._next_chunk() is not None

    def read_all(self, deadline: float = math.inf) -> None:
        """Read the rest of the input, at most until the deadline; called by ``join``.

        Only the chunks in flight are limited. Results are not, because they may never be taken.
        """
        if not self._reading.acquire(timeout=_time_until(deadline)):
            return
        try:
            while self._source is not None:
                with self._changed:
                    is_full = len(self._in_flight) >= self._ahead
                    if is_full:
                        self._changed.wait(_time_until(deadline))
                if not is_full:
                    self._read_one()
                if time.monotonic() >= deadline:
                    break
        finally:
            self._reading.release()
            with self._changed:
                self._changed.notify_all()

    def set(self, chunk: int, outcome: Outcome) -> None:
        """Store the results of one chunk; called by the pool."""
        with self._changed:
            if chunk in self._in_flight:
                self._arrived[chunk] = outcome
                self._in_flight.discard(chunk)
                self._call.advance(chunk)
                self._update()

    def fail(self, error: BaseException) -> None:
        """End the call; chunks without a result get the error. Called by the pool."""
        with self._changed:
            self._arrived.update((chunk, (False, error)) for chunk in self._in_flight)
            self._in_flight.clear()
            if self._source is not None:
                self._source, self._input_error = None, error
            self._update()

    def _wants_more(self) -> bool:
        return self._source is not None and self._count - self._taken < self._ahead

    def _next_chunk(self) -> int | None:
        """Return the next chunk to take, None if it has not arrived."""
        return self._taken if self._taken in self._arrived else None

    def _take(self) -> bool:
        number = self._next_chunk()
        if number is None:
            return False
        success, value = self._arrived.pop(number)
        self._taken += 1
        if not success:
            if isinstance(value, StopIteration):
                # As in generators: StopIteration would silently end a loop over the results.
                raise RuntimeError(f"a task of {self._call.name} raised StopIteration") from value
            raise value
        self._values.extend(value)
        return bool(self._values)

    def _read_one(self) -> None:
        """Read an item; if its chunk is complete, submit it. The caller must hold ``_reading``."""
        source = self._source
        if source is None:
            return
        try:
            self._chunk.append(next(source))
        except StopIteration:
            self._end_input()
            return
        except Exception as error:
            # As in the standard library, the items of an incomplete chunk are dropped.
            self._chunk = []
            self._end_input(error)
            return
        except BaseException:
            # Raise Ctrl-C immediately, not after the results of the items read before it.
            self._end_input()
            raise
        if len(self._chunk) == self._call.chunksize:
            self._submit_chunk()

    def _submit_chunk(self) -> None:
        """Send the items that have been read as one task."""
        number, chunk = self._count, self._chunk
        self._chunk = []
        with self._changed:
            submit = self._submit
            if self._source is None or submit is None:
                # The call has ended in the meantime.
                return
            self._in_flight.add(number)
            self._call.items += len(chunk)
            self._cache[self._job] = self
            self._count += 1
        try:
            submit(number, chunk)
        except BaseException:
            # After Ctrl-C, the input ends before this chunk.
            with self._changed:
                self._in_flight.discard(number)
                self._arrived.pop(number, None)
                self._count = number
            self._end_input()
            raise

    def _end_input(self, error: BaseException | None = None) -> None:
        if self._chunk:
            self._submit_chunk()
        with self._changed:
            if self._source is not None:
                self._source, self._input_error = None, error
                self._update()

    def _update(self) -> None:
        """Notify waiting threads after a change.

        If no task is in flight, remove the call from the cache. If the input has also ended,
        release the pool and stop the bar, because the results may never be taken.
        """
        if not self._in_flight:
            self._cache.pop(self._job, None)
            if self._source is None and self._on_end is not None:
                self._on_end()
                self._call.stop_bar()
                # These refer to the pool.
                self._submit = self._on_end = self._call.pool = None
        self._changed.notify_all()


class IMapUnorderedIterator(IMapIterator):
    """An ``IMapIterator`` that returns results in the order in which they arrive."""

    def _next_chunk(self) -> int | None:
        return next(iter(self._arrived), None)


def _time_until(deadline: float) -> float:
    """Return the seconds until a deadline, as a timeout that locks accept."""
    return max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX))
