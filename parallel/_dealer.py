"""Deals tasks to the workers of a pool."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ._backlog import DealtBacklog, SharedBacklog
from ._crew import Crew
from ._encoder import Encoder, Parcel, Task
from ._lane import Lane
from ._one_go import wait_free

# Tasks of a call, per worker: as many as a map has that is told no chunk size.
_FIRST = 4


class Dealer:
    """Sends tasks ahead while their turn is near, and takes back what was dealt to the wrong one.

    `put` is for any thread, all else for the pool's one thread: a signal handler may raise at any
    step of the main thread, and there leaves a task sent or not, and nothing half done.

    Args:
        crew: the workers.
        backlog: where tasks wait.
        encoder: makes parcels of them.
        lock: guards the crew and the backlog. It is not held while tasks are pickled and sent: a
            worker is claimed for that.
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
        *,
        is_timed: bool,
    ) -> None:
        self.is_hungry = False
        self._crew = crew
        self._backlog = backlog
        self._encoder = encoder
        self._lock = lock
        self._refuse = refuse
        # What is done with each task that is sent from another thread than the pool's.
        self._then = (partial(os.eventfd_write, crew.bell, 1),) if is_timed else ()

    def put(self, task: Task) -> None:
        """Take a task, and send it at once where none waits and a worker has room."""
        # Of a call of many tasks only the first go one by one: each wakes a worker.
        is_first = task[1] < _FIRST * len(self._crew.lanes)
        if is_first and self.is_hungry and not self._backlog and self._send_now(task):
            return
        self._backlog.put(task)
        if self.is_hungry:
            self._crew.ring()

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
                if lane.last_event < since and len(lane.inflight) > 1 and not lane.claim.locked():
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
            claim = threading.Lock()
            with claim:
                with self._lock:
                    lane, tasks = self._choice()
                    if lane is not None:
                        lane.claim = claim
                if lane is not None:
                    self._send(lane, tasks)
                    self.is_hungry = True
                    continue
            # A thread that is interrupted tells nobody that it has let go.
            for lane in self._crew.lanes.values():
                wait_free(lane.claim)

    def _send_now(self, task: Task) -> bool:
        """Send a task from the caller's thread; return whether it needs no more care.

        Ctrl-C may come after any step here: what is changed is changed in one go.
        """
        with self._lock:
            lane = self._best()
        if lane is None:
            return False
        try:
            parcel = self._encoder.encode(task, lane.known)
        except Exception as error:
            self._refused(task, error)
            return True
        claim = threading.Lock()
        try:
            with claim:
                # Not longer: the answer may be there before this thread goes on.
                with self._lock:
                    # Another thread may have been faster, or the worker have ended.
                    if self._crew.lanes.get(lane.slot) is not lane or lane.room <= 0:
                        return False
                    lane.claim = claim
                return lane.send(task, parcel, *self._then)
        except OSError as error:
            self._refused(task, error)
            return True
        finally:
            parcel.release()

    def _best(self) -> Lane | None:
        lanes = self._crew.lanes.values()
        best = min((lane for lane in lanes if lane.room > 0), key=_load, default=None)
        if best is None and not any(lane.claim.locked() for lane in lanes):
            self.is_hungry = False
        return best

    def _choice(self) -> tuple[Lane | None, list[Task]]:
        waiting = len(self._backlog)
        best = self._best() if waiting else None
        if best is None:
            return None, []
        # What is left is shared out evenly.
        share = min(best.room, -(-waiting // len(self._crew.lanes)))
        return best, self._backlog.take(best.slot, share)

    def _send(self, lane: Lane, tasks: list[Task]) -> None:
        """Send tasks that were taken for a worker; what there is no room for waits again."""
        rest = deque(tasks)
        small: list[tuple[Task, Parcel]] = []
        while rest and lane.has_room_beside and self._send_large(lane, rest[0], small):
            rest.popleft()
        left = [*(lane.send_small(small) if small else ()), *rest]
        if left:
            with self._lock:
                self._backlog.put_back(lane.slot, left)

    def _send_large(self, lane: Lane, task: Task, small: list[tuple[Task, Parcel]]) -> bool:
        """Send a task if it is large, put it among the small ones if it is not.

        Returns:
            Whether it needs no more care.
        """
        try:
            parcel = self._encoder.encode(task, lane.known)
            if not parcel.beside:
                small.append((task, parcel))
                return True
            try:
                return lane.send(task, parcel)
            finally:
                parcel.release()
        # Pickling runs the code of classes; in this thread nothing else raises what ends programs.
        except BaseException as error:
            self._refused(task, error)
            return True

    def _refused(self, task: Task, error: BaseException) -> None:
        self._refuse((task[0], task[1], (False, error)))
        self._crew.ring()


def _load(lane: Lane) -> int:
    return len(lane.inflight)
