"""Iterators over the results of pools; they read the input of the call."""

from __future__ import annotations

import collections
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from functools import partial
from typing import Any, NoReturn

from ._input import Input
from ._one_go import Change, in_one_go, wait_free
from ._progress import Bar
from .errors import TimeoutError

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
