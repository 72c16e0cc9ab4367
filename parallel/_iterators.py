"""Iterators over the results of pools; they read the input of the call."""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

from ._progress import Bar
from .errors import TimeoutError

Outcome = tuple[bool, Any]

# Reading that takes longer does not keep results waiting that are there.
_READING_S = 10e-3


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
        self._source: Iterator[list[Any]] | None = source
        self._source_error: BaseException | None = None
        self._submit: Callable[[int, list[Any]], None] | None = submit
        self._ahead, self._chunksize = shape
        self._name = name
        self._on_end = on_end
        self._bar = bar
        self._arrived: dict[int, Outcome] = {}
        self._values: collections.deque[Any] = collections.deque()
        self._sent = self._taken = self._out = 0
        self._changed = threading.Condition()
        self._reading = threading.Lock()

    def __iter__(self) -> IMapIterator:
        return self

    def __next__(self) -> Any:
        return self.next()

    def next(self, timeout: float | None = None) -> Any:
        """Return the next result, or raise the error of its task.

        Raises:
            StopIteration: there is none left.
            TimeoutError: it did not come within `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self.feed(deadline)
            with self._changed:
                if self._values or self._take():
                    return self._values.popleft()
                if self._taken < self._sent or self._source is not None:
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        message = (
                            f"the next result of {self._name} did not come within {timeout:g} s"
                        )
                        raise TimeoutError(message)
                    self._changed.wait(left)
                    continue
                self._raise_source_error()
            raise StopIteration

    def feed(self, deadline: float | None = None) -> None:
        """Read input until enough is out or not yet taken; called by the pool too.

        Stops earlier at the deadline (of `time.monotonic`), or where reading takes its time and the
        next result is there.
        """
        if self._source is None or self._sent - self._taken >= self._ahead:
            return
        began = time.monotonic()
        patience = -1.0 if deadline is None else max(0.0, deadline - began)
        if not self._reading.acquire(timeout=patience):
            return
        try:
            while self._sent - self._taken < self._ahead and self._read():
                now = time.monotonic()
                if now - began > _READING_S and (self._values or self._next_chunk() is not None):
                    return
                if deadline is not None and now >= deadline:
                    return
        finally:
            self._reading.release()

    def read_all(self) -> None:
        """Read the rest of the input; called by the pool."""
        with self._reading:
            while self._read():
                pass

    def _read(self) -> bool:
        """Send one more chunk; return whether there was one."""
        if self._source is None:
            return False
        try:
            chunk = next(self._source)
        except StopIteration:
            self._end_input(None)
        except Exception as error:
            self._end_input(error)
        except BaseException:
            # Ctrl-C in the code of the input: not to be kept until the results are taken.
            self._end_input(None)
            raise
        else:
            self._send(chunk)
            return True
        return False

    def set(self, chunk: int, outcome: Outcome) -> None:
        """Take the results of one chunk; called by the pool."""
        with self._changed:
            self._arrived[chunk] = outcome
            self._out -= 1
            if not self._out:
                self._cache.pop(self._job, None)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """End the call: what has not come fails with the error; called by the pool."""
        with self._changed:
            for chunk in range(self._taken, self._sent):
                self._arrived.setdefault(chunk, (False, error))
            self._cache.pop(self._job, None)
            self._out = 0
            if self._source is not None:
                self._end_input(error)
            self._changed.notify_all()

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
        success, value = self._arrived.pop(number)
        self._taken += 1
        if self._bar is not None:
            self._bar.advance(self._chunksize)
        if not success:
            if isinstance(value, StopIteration):
                # As in generators: it would end the loop over the results, and nobody would know.
                raise RuntimeError(f"a task of {self._name} raised StopIteration") from value
            raise value
        self._values.extend(value)
        return bool(self._values)

    def _send(self, chunk: list[Any]) -> None:
        submit = self._submit
        with self._changed:
            number = self._sent
            self._sent += 1
            self._out += 1
            self._cache[self._job] = self
        try:
            if submit is not None:
                submit(number, chunk)
        except Exception as error:
            self.fail(error)

    def _end_input(self, error: BaseException | None) -> None:
        with self._changed:
            self._source, self._source_error, self._submit = None, error, None
            self._changed.notify_all()
        if self._on_end is not None:
            self._on_end(self)
            self._on_end = None

    def _raise_source_error(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        error, self._source_error = self._source_error, None
        if error is not None:
            raise error


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
