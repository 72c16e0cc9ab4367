"""What pools hand out for tasks that are under way: results and iterators."""

from __future__ import annotations

import collections
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from functools import partial
from typing import Any, NoReturn

from ..errors import TimeoutError
from ..interrupts import Change, in_one_go, wait_free

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


Outcome = tuple[bool, Any]

# Reading that takes longer does not keep results waiting that are there.
_READING_S = 10e-3
# Nobody tells that a thread was interrupted while it read the input.
_READER_S = 1.0


class IMapIterator:
    """The results of a call over many items, one by one, in their order. Pools make them.

    The input is read as results are taken, some chunks ahead, in the thread that takes them. An
    error of a task is raised in its place, once for the chunk it was in, and later results still
    come. An error of the input comes after the results of what was read before.

    Args:
        job: the number of the call in its pool.
        cache: the pool's unfinished calls by number; this one is in it while tasks are out.
        source: the chunks of the input.
        submit: hands one chunk, by number, to the workers.
        shape: chunks that are out or not yet taken, at most; items in a chunk.
        name: the call in words, as in "imap(square)".
        on_end: called once when the input is exhausted.
        bar: shows how far the call is.
    """

    def __init__(
        self,
        job: int,
        cache: MutableMapping[int, Any],
        source: Iterator[list[Any]],
        submit: Callable[[int, list[Any]], None],
        *,
        shape: tuple[int, int] = (1, 1),
        name: str = "imap",
        on_end: Callable[[IMapIterator], None] | None = None,
        bar: Bar | None = None,
    ) -> None:
        self._job = job
        self._cache = cache
        self._input = Input(source, self._send, self._take_back, self._input_over)
        self._submit: Callable[[int, list[Any]], None] | None = submit
        self._ahead, self._chunksize = shape
        self._name = name
        self._on_end = on_end
        self._bar = bar
        self._arrived: dict[int, Outcome] = {}
        self._values: collections.deque[Any] = collections.deque()
        self._taken = 0
        # The chunks whose results are to come.
        self._out: set[int] = set()
        self._lock = threading.RLock()
        self._change = Change()

    def __iter__(self) -> IMapIterator:
        return self

    def next(self, timeout: float | None = None) -> Any:
        """Return the next result, or raise the error of its task.

        Raises:
            StopIteration: there is none left.
            TimeoutError: it did not come within `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._input.end_if_interrupted()
            self.feed(deadline)
            with self._lock:
                if self._values or self._take():
                    return self._values.popleft()
                if self._taken >= self._input.count and self._input.is_ended:
                    self._end()
                changed = self._change.coming()
            left = math.inf if deadline is None else deadline - time.monotonic()
            if left <= 0:
                message = f"the next result of {self._name} did not come within {timeout:g} s"
                raise TimeoutError(message)
            wait_free(changed, min(left, _READER_S))

    __next__ = next

    def feed(self, deadline: float | None = None) -> None:
        """Read input until enough is out or not yet taken; called by the pool too.

        Stops earlier at the deadline (of `time.monotonic`), or where reading takes its time and the
        next result is there.
        """
        began = time.monotonic()

        def wants_more() -> bool:
            return self._input.count - self._taken < self._ahead

        def may_go_on() -> bool:
            now = time.monotonic()
            if now - began > _READING_S and (self._values or self._next_chunk() is not None):
                return False
            return deadline is None or now < deadline

        if wants_more() and not self._input.is_ended:
            self._input.read(wants_more, may_go_on, deadline)

    def read_all(self) -> None:
        """Read the rest of the input; called by the pool."""
        self._input.read(lambda: True, lambda: True)
        self._input_over()

    def withdraw_interrupted(self) -> None:
        """Finish what was interrupted in reading and failing; called by the pool."""
        self._input.end_if_interrupted()
        with self._lock:
            if not self._out:
                self._cache.pop(self._job, None)

    def set(self, chunk: int, outcome: Outcome) -> None:
        """Take the results of one chunk; called by the pool."""
        with self._lock:
            if chunk in self._out:
                self._arrived[chunk] = outcome
                self._take_back(chunk, is_lost=False)
                self._change.tell()

    def fail(self, error: BaseException) -> None:
        """End the call: what has not come fails with the error; called by the pool."""
        with self._lock:
            for chunk in list(self._out):
                self._arrived[chunk] = False, error
                self._out.discard(chunk)
            if not self._input.is_ended:
                self._input.end(error)
            self._cache.pop(self._job, None)
            self._change.tell()

    def task_name(self, chunk: int) -> str:
        """Return the items of a chunk in words, for messages."""
        return items_name(chunk, self._chunksize, self._name)

    def _next_chunk(self) -> int | None:
        """Return the number of the chunk whose results come next, None if they are not there."""
        return self._taken if self._taken in self._arrived else None

    def _take(self) -> bool:
        number = self._next_chunk()
        if number is None:
            return False
        success, value = self._arrived[number]
        taken = partial(setattr, self, "_taken", self._taken + 1)
        in_one_go(partial(self._arrived.pop, number), taken)
        if self._bar is not None:
            self._bar.advance(self._chunksize)
        if not success:
            if isinstance(value, StopIteration):
                # As in generators: it would end the loop over the results, and nobody would know.
                raise RuntimeError(f"a task of {self._name} raised StopIteration") from value
            raise value
        self._values.extend(value)
        return bool(self._values)

    def _send(self, number: int, chunk: list[Any]) -> bool:
        submit = self._submit
        if submit is None:
            # The call has just ended.
            return False
        with self._lock:
            self._out.add(number)
            self._cache[self._job] = self
        try:
            submit(number, chunk)
        except Exception as error:
            self.fail(error)
        return True

    def _take_back(self, chunk: int, *, is_lost: bool = True) -> None:
        with self._lock:
            if is_lost:
                self._arrived.pop(chunk, None)
            self._out.discard(chunk)
            if not self._out:
                self._cache.pop(self._job, None)

    def _input_over(self) -> None:
        with self._lock:
            self._change.tell()
        if self._on_end is not None:
            self._on_end(self)
        # They hold the pool.
        self._submit = self._on_end = None

    def _end(self) -> NoReturn:
        """Raise what comes after the last result."""
        if self._bar is not None:
            self._bar.stop()
        error, self._input.error = self._input.error, None
        raise StopIteration if error is None else error


class IMapUnorderedIterator(IMapIterator):
    """The results of a call over many items as they come. Otherwise as `IMapIterator`."""

    def _next_chunk(self) -> int | None:
        return next(iter(self._arrived), None)


def chunks_of(iterable: Iterable[Any], size: int) -> Iterator[list[Any]]:
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


def items_name(chunk: int, chunksize: int, name: str) -> str:
    """Return the items of a chunk in words, for messages."""
    if chunksize == 1:
        return f"task {chunk} of {name}"
    begin = chunk * chunksize
    return f"tasks {begin} to {begin + chunksize - 1} of {name}"


class Input:
    """An input that any thread may read, one at a time, wherever a signal handler interrupts it.

    Args:
        chunks: the input.
        hand_on: takes the number of a chunk, and the chunk; returns whether it has a result.
        take_back: takes the number of the last chunk, whose handing on was interrupted.
        on_end: is called when the input is read, perhaps twice.

    Attributes:
        count: how many chunks have been handed on.
        error: what the input has raised.
    """

    def __init__(
        self,
        chunks: Iterator[list[Any]],
        hand_on: Callable[[int, list[Any]], bool],
        take_back: Callable[[int], None],
        on_end: Callable[[], None],
    ) -> None:
        self.count = 0
        self.error: BaseException | None = None
        self._chunks: Iterator[list[Any]] | None = chunks
        self._hand_on = hand_on
        self._take_back = take_back
        self._on_end: Callable[[], None] | None = on_end
        self._lock = threading.RLock()
        # Is held by the thread that reads. A new one each time: then it does not matter where that
        # thread is interrupted.
        self._reader = threading.Lock()
        # The number of the chunk that is being read and handed on.
        self._current: int | None = None

    @property
    def is_ended(self) -> bool:
        """Whether nothing more will be read."""
        return self._chunks is None

    def read(
        self,
        wants_more: Callable[[], bool],
        may_go_on: Callable[[], bool],
        deadline: float | None = None,
    ) -> None:
        """Read a chunk if more are wanted, and others while it may go on.

        Args:
            deadline: (of `time.monotonic`) how long to wait for another thread that reads.
        """
        mine = threading.Lock()
        with mine:
            if self._becomes_reader(mine, deadline):
                while wants_more() and self._read_one() and may_go_on():
                    pass

    def end(self, error: BaseException | None = None) -> None:
        """Read nothing more."""
        self._chunks, self.error = None, error
        if self._on_end is not None:
            self._on_end()
            self._on_end = None

    def end_if_interrupted(self) -> None:
        """End the input before a chunk whose reader was interrupted."""
        if self._current is not None:
            with self._lock:
                # In this order: what is read is handed on before the reader lets go.
                if not self._reader.locked():
                    self._end_before_current()

    def _end_before_current(self) -> None:
        if self._current is not None:
            self.count = self._current
            self._take_back(self._current)
            self.end(self.error)
            self._current = None

    def _becomes_reader(self, mine: threading.Lock, deadline: float | None) -> bool:
        """Wait until no other thread reads the input, and mark it as read by this one."""
        while True:
            with self._lock:
                reader = self._reader
                if not reader.locked():
                    self._end_before_current()
                    self._reader = mine
                    return True
            if not wait_free(reader, None if deadline is None else deadline - time.monotonic()):
                return False

    def _read_one(self) -> bool:
        """Hand on one more chunk; return whether there may be others."""
        if self._chunks is None:
            return False
        self._current = self.count
        try:
            chunk = next(self._chunks)
        except StopIteration:
            self.end()
        except Exception as error:
            self.end(error)
        except BaseException:
            # Ctrl-C in the code of the input: not to be kept until the results are taken.
            self.end()
            raise
        # The call may have ended meanwhile.
        if self._chunks is not None and self._hand_on(self._current, chunk):
            self.count += 1
        self._current = None
        return self._chunks is not None


class Bar:
    """A bar on the terminal; any thread may move it.

    Args:
        name: what is shown before it.
        total: items; None where their number is not known.
    """

    def __init__(self, name: str, total: int | None) -> None:
        from rich.progress import Progress

        self._progress = Progress(transient=False)
        self._task = self._progress.add_task(name, total=total)
        self._progress.start()

    def advance(self, items: int) -> None:
        """Move on by some items."""
        self._progress.advance(self._task, items)

    def stop(self) -> None:
        """Leave the bar as it is; a second time does nothing."""
        self._progress.stop()
