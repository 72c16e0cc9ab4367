"""How many calls a process serves at once, and where the others wait: not in torch's threads.

torch completes time-outs, errors and answers in the threads that run services. Were all of them in
services that wait for other processes, nothing could reach those any more, deaths included.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

# Threads that torch gets beyond those for services: for answers, time-outs and errors.
SPARE_THREADS = 4


class Slots:
    """Places for calls that run.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Take a place if there is one."""
        with self._lock:
            if not self._free:
                return False
            self._free -= 1
            return True

    def enter(self, later: Callable[[], None]) -> bool:
        """Take a place and return True; else have `later` called in one, and return False."""
        with self._lock:
            if self._free:
                self._free -= 1
                return True
            self._waiting.append(later)
            return False

    def leave(self) -> None:
        """Give the place back, or to those that wait for one."""
        work = self._next()
        if work is not None:
            # The caller's own answer is sent when it returns, so it cannot work on itself.
            threading.Thread(target=self._work_on, args=(work,), daemon=True).start()

    def _work_on(self, work: Callable[[], None] | None) -> None:
        while work is not None:
            work()
            work = self._next()

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._free += 1
            return None
