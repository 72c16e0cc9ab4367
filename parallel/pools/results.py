"""What pools return for calls under way: results and iterators."""

from __future__ import annotations

import collections
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, NoReturn

from ..errors import TimeoutError

__all__ = ["AsyncResult", "Callback", "IMapIterator", "IMapUnorderedIterator", "MapResult"]
_log = logging.getLogger(__name__)
Callback = Callable[[Any], object] | None
Outcome = tuple[bool, Any]

# Reading input for longer than this does not hold back results that have arrived.
_READING_S = 10e-3


class Call:
    """A call as results know it: its name, its pool, a progress bar for any thread to move.

    Attributes:
        pool: is not collected while the call has it, until the end of the call.
        chunksize: items in a task; 0 where the call is one task.
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
        self._bar: Any = None
        if progress:
            from rich.progress import Progress

            self._bar = Progress(transient=False)
            self._task = self._bar.add_task(name, total=total)
            self._bar.start()

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, self.chunksize)

    def stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def task_name(self, job: int, chunk: int) -> str:
        """Return a task in words, by its items where it has some, for messages."""
        if self.chunksize > 1:
            begin = chunk * self.chunksize
            return f"tasks {begin} to {begin + self.chunksize - 1} of {self.name}"
        return f"task {chunk if self.chunksize else job} of {self.name}"


class AsyncResult:
    """The result of one task, now or later. Pools make them."""

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
        # Released at the end: a third of the price of an Event, and there is one per task.
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
            raise ValueError(f"the result of {self._call.name} is not ready")
        return self._outcome[0]

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the call has ended, `timeout` seconds at most."""
        patience = -1.0 if timeout is None else max(0.0, timeout)
        if self._outcome is None and self._latch.acquire(timeout=patience):
            self._latch.release()

    def get(self, timeout: float | None = None) -> Any:
        """Return the value, or raise the error of the task.

        Raises:
            TimeoutError: the call has not ended within `timeout` seconds.
        """
        self.wait(timeout)
        if self._outcome is None:
            message = f"the result of {self._call.name} did not come within {timeout:g} s"
            raise TimeoutError(message)
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

    def withdraw(self, error: BaseException) -> None:
        """End a call whose submission was interrupted: nobody has its result."""
        self._error_callback = None
        self.fail(error)

    def _finish(self, outcome: Outcome) -> None:
        # The thread that takes it out of the cache is the one that ends it.
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
        self._latch.release()
        self._callback = self._error_callback = call.pool = None


class MapResult(AsyncResult):
    """The results of a call over many items: a list in their order.

    Ready when all chunks have ended; the first error that came is raised then.
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
        self._value: list[Any] = [None] * length
        self._error: BaseException | None = None
        # Tasks that cannot be sent fail in the thread of the caller.
        self._counting = threading.Lock()
        super().__init__(job, cache, callback, error_callback, call)
        if not length:
            self._finish((True, self._value))

    def set(self, chunk: int, outcome: Outcome) -> None:
        """Take the results of one chunk; called by the pool."""
        success, value = outcome
        if success:
            begin = chunk * self._call.chunksize
            self._value[begin : begin + len(value)] = value
        elif self._error is None:
            self._error = value
        self._call.advance()
        with self._counting:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            error = self._error
            self._finish((True, self._value) if error is None else (False, error))


class IMapIterator:
    """The results of a call over many items, one by one, in their order. Pools make them.

    The input is read as results are taken, some chunks ahead, in the thread that takes them. An
    error of a task is raised in its place, once for the chunk it was in, and later results still
    come. An error of the input comes after the results of what was read before.
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
        # None when nothing more will be read.
        self._source: Iterator[list[Any]] | None = _chunks_of(iterable, call.chunksize)
        self._input_error: BaseException | None = None
        self._submit: Callable[[int, list[Any]], None] | None = submit
        self._on_end: Callable[[], object] | None = on_end
        # Chunks that are out or not yet taken, at most.
        self._ahead = ahead
        self._call = call
        # Chunks that were read and that were taken; those whose results are to come, and have come.
        self._count = self._taken = 0
        self._out: set[int] = set()
        self._arrived: dict[int, Outcome] = {}
        self._values: collections.deque[Any] = collections.deque()
        # Held by the thread that reads the input; the condition guards all the rest.
        self._reading = threading.Lock()
        self._changed = threading.Condition()

    def __iter__(self) -> IMapIterator:
        return self

    def next(self, timeout: float | None = None) -> Any:
        """Return the next result, or raise the error of its task.

        Raises:
            StopIteration: there is none left.
            TimeoutError: it did not come within `timeout` seconds.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            self.feed(deadline)
            with self._changed:
                if self._values or self._take():
                    return self._values.popleft()
                if self._source is None and self._taken >= self._count:
                    self._end()
                left = deadline - time.monotonic()
                if left <= 0:
                    name = self._call.name
                    raise TimeoutError(
                        f"the next result of {name} did not come within {timeout:g} s"
                    )
                # Otherwise another thread has left the input before the look-ahead was full.
                if self._reading.locked() or not self._wants_more():
                    self._changed.wait(None if left == math.inf else left)

    __next__ = next

    def feed(self, deadline: float = math.inf) -> None:
        """Read input until enough is out or not yet taken, unless another thread does.

        Stops earlier at the deadline (of `time.monotonic`), or where reading takes its time and the
        next result is there.
        """
        if not self._wants_more() or not self._reading.acquire(blocking=False):
            return
        began = time.monotonic()
        try:
            while self._wants_more():
                self._read_one()
                now = time.monotonic()
                is_slow = now - began > _READING_S
                if now >= deadline or (
                    is_slow and (self._values or self._next_chunk() is not None)
                ):
                    break
        finally:
            self._reading.release()
            with self._changed:
                self._changed.notify_all()

    def read_all(self) -> None:
        """Read the rest of the input; called by the pool."""
        with self._reading:
            while self._source is not None:
                self._read_one()

    def set(self, chunk: int, outcome: Outcome) -> None:
        """Take the results of one chunk; called by the pool."""
        with self._changed:
            if chunk in self._out:
                self._arrived[chunk] = outcome
                self._out.discard(chunk)
                self._settle()

    def fail(self, error: BaseException) -> None:
        """End the call: what has not come fails with the error; called by the pool."""
        with self._changed:
            self._arrived.update((chunk, (False, error)) for chunk in self._out)
            self._out.clear()
            if self._source is not None:
                self._source, self._input_error = None, error
            self._settle()

    def _wants_more(self) -> bool:
        return self._source is not None and self._count - self._taken < self._ahead

    def _next_chunk(self) -> int | None:
        """Return the number of the chunk whose results come next, None if they are not there."""
        return self._taken if self._taken in self._arrived else None

    def _take(self) -> bool:
        number = self._next_chunk()
        if number is None:
            return False
        success, value = self._arrived.pop(number)
        self._taken += 1
        self._call.advance()
        if not success:
            if isinstance(value, StopIteration):
                # As in generators: it would end the loop over the results, and nobody would know.
                raise RuntimeError(f"a task of {self._call.name} raised StopIteration") from value
            raise value
        self._values.extend(value)
        return bool(self._values)

    def _read_one(self) -> None:
        """Read a chunk and hand it to the workers; to be called with `_reading` held."""
        source, number = self._source, self._count
        if source is None:
            return
        try:
            chunk = next(source)
        except StopIteration:
            self._end_input()
            return
        except Exception as error:
            self._end_input(error)
            return
        except BaseException:
            # Ctrl-C in the code of the input is not kept until the results are taken.
            self._end_input()
            raise
        with self._changed:
            submit = self._submit
            # Otherwise the call has ended meanwhile.
            if self._source is None or submit is None:
                return
            self._out.add(number)
            self._cache[self._job] = self
            self._count += 1
        try:
            submit(number, chunk)
        except BaseException:
            # Ctrl-C: the input ends before this chunk, whose result nobody will miss.
            with self._changed:
                self._out.discard(number)
                self._arrived.pop(number, None)
                self._count = number
            self._end_input()
            raise

    def _end_input(self, error: BaseException | None = None) -> None:
        with self._changed:
            if self._source is not None:
                self._source, self._input_error = None, error
                self._settle()

    def _settle(self) -> None:
        """Leave the cache while no task is out, and the pool at the end; wake who waits."""
        if not self._out:
            self._cache.pop(self._job, None)
            if self._source is None and self._on_end is not None:
                self._on_end()
                # They hold the pool.
                self._submit = self._on_end = self._call.pool = None
        self._changed.notify_all()

    def _end(self) -> NoReturn:
        """Raise what comes after the last result."""
        self._call.stop_bar()
        error, self._input_error = self._input_error, None
        raise StopIteration if error is None else error


class IMapUnorderedIterator(IMapIterator):
    """The results of a call over many items as they come. Otherwise as `IMapIterator`."""

    def _next_chunk(self) -> int | None:
        return next(iter(self._arrived), None)


def _chunks_of(iterable: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of `size` items; an error of the input comes after the items before it."""
    items = iter(iterable)
    while True:
        chunk: list[Any] = []
        try:
            # Not list(islice()): it forgets the items it has when the next one raises.
            chunk.extend(itertools.islice(items, size))
        except BaseException:
            if chunk:
                yield chunk
            raise
        if not chunk:
            return
        yield chunk
