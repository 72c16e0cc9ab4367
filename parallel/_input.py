"""What a call over many items has not read of its input yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ._one_go import wait_free


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
