"""Deals waiting tasks to the workers of a pool, from any thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ._backlog import DealtBacklog, SharedBacklog
from ._crew import Crew
from ._encoder import Encoder, Parcel, Task
from ._lane import Lane


class Dealer:
    """Sends tasks ahead while their turn is near, and takes back what was dealt to the wrong one.

    Args:
        crew: the workers.
        backlog: where tasks wait.
        encoder: makes parcels of them.
        lock: guards the crew and the backlog. It is not held while tasks are pickled: a worker is
            claimed for that.
        refuse: takes the result of a task that cannot be sent.

    Attributes:
        is_hungry: whether a worker may have room, so that not each `put` looks at all of them.
    """

    def __init__(
        self,
        crew: Crew,
        backlog: SharedBacklog | DealtBacklog,
        encoder: Encoder,
        lock: threading.RLock,
        refuse: Callable[[tuple[int, int, tuple[bool, Any]]], object],
    ) -> None:
        self.is_hungry = False
        self._crew = crew
        self._backlog = backlog
        self._encoder = encoder
        self._lock = lock
        self._refuse = refuse

    def put(self, task: Task) -> None:
        """Take a task, and send it if a worker has room."""
        self._backlog.put(task)
        if self.is_hungry:
            self.deal()

    def put_back(self, lane: Lane, tasks: Sequence[Task]) -> None:
        """Have tasks of a worker wait again, before others."""
        with self._lock:
            self._backlog.put_back(lane.slot, tasks)

    @property
    def is_uneven(self) -> bool:
        """Whether a worker has nothing to do while tasks wait at another."""
        return not self._backlog and self._crew.is_uneven

    def take_back(self, since: float) -> None:
        """Take tasks from behind those that workers have been at since some time."""
        with self._lock:
            for lane in self._crew.lanes.values():
                if lane.last_event < since and len(lane.inflight) > 1 and not lane.is_claimed:
                    self._backlog.put_back(lane.slot, lane.take_back())

    def forget(self, job: int) -> None:
        """Drop the function of a call that has ended, here and in the workers."""
        if self._encoder.forget(job):
            with self._lock:
                for lane in self._crew.lanes.values():
                    lane.forget(job)

    def close(self) -> None:
        """Drop what waits."""
        with self._lock:
            self.is_hungry = False
            self._backlog.clear()

    def deal(self) -> None:
        """Send waiting tasks to workers that have room."""
        while self.is_hungry and self._backlog:
            lane = None
            # Ctrl-C may come after any step, and a worker that stays claimed cannot be buried.
            try:
                with self._lock:
                    lane, tasks = self._choice()
                    if lane is None:
                        return
                    lane.is_claimed = True
                self._send(lane, tasks)
            finally:
                if lane is not None:
                    self._let_go(lane)

    def _let_go(self, lane: Lane) -> None:
        with self._lock:
            lane.is_claimed = False
            self.is_hungry = True
            if lane.is_ended:
                self._crew.ring()

    def _choice(self) -> tuple[Lane | None, list[Task]]:
        waiting = len(self._backlog)
        if not waiting:
            return None, []
        lanes = self._crew.lanes
        best = min((lane for lane in lanes.values() if lane.room > 0), key=_load, default=None)
        if best is None:
            self.is_hungry = False
            return None, []
        # What is left is shared out evenly.
        share = min(best.room, -(-waiting // len(lanes)))
        return best, self._backlog.take(best.slot, share)

    def _send(self, lane: Lane, tasks: list[Task]) -> None:
        """Send tasks that were taken for a worker; what cannot be sent waits again."""
        rest = deque(tasks)
        small: list[tuple[Task, Parcel]] = []
        try:
            while rest and lane.has_room_beside:
                self._send_large(lane, rest[0], small)
                rest.popleft()
        finally:
            left = [*(lane.send(small) if small else ()), *rest]
            if left:
                with self._lock:
                    self._backlog.put_back(lane.slot, left)

    def _send_large(self, lane: Lane, task: Task, small: list[tuple[Task, Parcel]]) -> None:
        """Send a task if it is large, put it among the small ones if it is not."""
        try:
            parcel = self._encoder.encode(task, lane.known)
            if not parcel.beside:
                small.append((task, parcel))
                return
            try:
                lane.send_large(task, parcel)
            finally:
                parcel.release()
        except Exception as error:
            self._refuse((task[0], task[1], (False, error)))
            self._crew.ring()


def _load(lane: Lane) -> int:
    return len(lane.inflight)
