"""Steps between which no signal handler can raise.

Python runs signal handlers in the main thread, between any two steps of Python code, and Ctrl-C
raises there. Inside of C functions that call only C functions are no such steps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import takewhile
from typing import Any

_call: Callable[[partial[Any]], Any] = partial.__call__


def in_one_go(*calls: partial[Any]) -> None:
    """Make calls of C functions, the next only if none has raised."""
    deque(map(_call, calls), maxlen=0)


def wait_free(lock: threading.Lock, timeout: float | None = None) -> bool:
    """Wait until nobody holds a lock, and leave it so; return whether it came in time."""
    patience = -1.0 if timeout is None else max(0.0, timeout)
    calls: list[partial[Any]] = [partial(lock.acquire, True, patience), partial(lock.release)]
    return bool(list(takewhile(bool, map(_call, calls))))


class Change:
    """Something that threads wait for again and again; not for two threads at once."""

    def __init__(self) -> None:
        # Is held until the change, where threads wait for that.
        self._latch: threading.Lock | None = None

    def coming(self) -> threading.Lock:
        """Return a lock to `wait_free` for."""
        latch = self._latch
        if latch is None:
            latch = threading.Lock()
            latch.acquire()
            self._latch = latch
        return latch

    def tell(self) -> None:
        """Let those go on that wait."""
        if self._latch is not None:
            in_one_go(partial(self._latch.release), partial(setattr, self, "_latch", None))
