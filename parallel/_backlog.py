"""Tasks that wait in the pool: who gets which. The pool's lock guards taking and returning."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from ._encoder import Task


class SharedBacklog:
    """One line for all workers: the next task goes to whichever has room."""

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        # Needs no lock.
        self.put = self._tasks.append

    def __len__(self) -> int:
        return len(self._tasks)

    def take(self, slot: int, share: int) -> list[Task]:
        """Return some of the next tasks for a worker."""
        tasks = self._tasks
        return [tasks.popleft() for _ in range(min(share, len(tasks)))]

    def put_back(self, slot: int, tasks: Sequence[Task]) -> None:
        """Put tasks that a worker was given to the front again."""
        self._tasks.extendleft(reversed(tasks))

    def clear(self) -> None:
        """Drop all tasks."""
        self._tasks.clear()


class DealtBacklog:
    """A line for each worker: a task goes to the shortest when it comes.

    A worker that has nothing left takes from the longest line.
    """

    def __init__(self, slots: int) -> None:
        self._lines: list[deque[Task]] = [deque() for _ in range(slots)]
        self._next = 0

    def __len__(self) -> int:
        return sum(map(len, self._lines))

    def put(self, task: Task) -> None:
        """Add a task to the shortest line; needs no lock."""
        lines = self._lines
        # Not always the first of equals.
        self._next = first = (self._next + 1) % len(lines)
        line = lines[first]
        if line:
            line = min(lines, key=len)
        line.append(task)

    def take(self, slot: int, share: int) -> list[Task]:
        """Return some of a worker's next tasks, or of another's where it has none."""
        line = self._lines[slot]
        if not line:
            line = max(self._lines, key=len)
        return [line.popleft() for _ in range(min(share, len(line)))]

    def put_back(self, slot: int, tasks: Iterable[Task]) -> None:
        """Put tasks that a worker was given to the front of its line again."""
        self._lines[slot].extendleft(reversed(list(tasks)))

    def clear(self) -> None:
        """Drop all tasks."""
        for line in self._lines:
            line.clear()
