"""The parent's side of a pool of processes: one thread that knows which worker has which task.

Workers share nothing, so one that dies takes nothing with it but the task it was running. A worker
may be sent some tasks ahead of their turn. What it has not begun when it dies, or when another
worker has nothing to do, comes back and goes elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import threading
import time
from collections import deque
from collections.abc import MutableMapping
from typing import Any

from . import _link as link
from ._backlog import DealtBacklog, SharedBacklog
from ._deaths import death_error, initializer_error, start_error
from ._encoder import Encoder, Task
from ._lane import Lane
from ._remote_errors import rebuild
from ._starts import Counters, Plan, start_lane
from ._wire import unpack
from .errors import BrokenPoolError, EncodingError, RemoteError, TimeoutError

# How long a worker may make no progress before tasks behind its own go to one that is idle.
_STUCK_S = 2e-3
_GRACE_S = 1.0
_MOST_FAILED_STARTS = 3

Result = tuple[int, int, tuple[bool, Any]]


class Dispatcher:
    """Takes tasks (`put`) and gives results (`get`), both as the pools' queues do.

    `put`, `wake` and `terminate` are for any thread, all else for the pool's one thread alone.

    Args:
        plan: how the workers are to be.
        backlog: where tasks wait.
        cache: the pool's unfinished calls by number: names for errors, and which jobs go on.
    """

    def __init__(
        self,
        plan: Plan,
        backlog: SharedBacklog | DealtBacklog,
        cache: MutableMapping[int, Any],
    ) -> None:
        self._plan = plan
        self._backlog = backlog
        self._cache = cache
        self._encoder = Encoder(copy_tensor=plan.copy_tensor, recurse=plan.recurse)
        self._lanes: dict[int, Lane] = {}
        self._dying: list[Lane] = []
        self._by_fd: dict[int, Lane] = {}
        self._done: deque[Result] = deque()
        self._tries: dict[tuple[int, int], int] = {}
        # Reentrant: a collection of garbage may run anything, also code that submits tasks.
        self._lock = threading.RLock()
        # Whether a worker has room: so that `put` need not look at each.
        self._is_hungry = False
        self._needs_care = self._is_closing = self._is_terminating = False
        self._failed_starts = 0
        self._last_job = -1
        self._broken: BrokenPoolError | None = None
        self._counters = Counters(len(plan.initializers))
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake_fd, select.EPOLLIN)

    def put(self, task: Task | None) -> None:
        """Take a task; None: the workers end when they have done what they have."""
        if task is None:
            self._is_closing = True
            self.wake()
            return
        self._backlog.put(task)
        if self._is_hungry:
            self._deal()

    def get(self, timeout: float | None = None) -> Result:
        """Return the next result: job, chunk, (True, value) or (False, error).

        Raises:
            TimeoutError: there was none in time, or the pool has something else to look after.
            BrokenPoolError: the workers do not come up.
        """
        job, self._last_job = self._last_job, -1
        if job >= 0 and job not in self._cache:
            self._forget(job)
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._done:
            if self._broken is not None:
                raise self._broken
            if self._needs_care:
                self._needs_care = False
                raise TimeoutError("the pool's workers need care")
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"no result within {timeout} s")
            self._turn(left)
        result = self._done.popleft()
        self._last_job = result[0]
        return result

    def size(self) -> int:
        """Return how many workers there are."""
        return len(self._lanes)

    def wake(self) -> None:
        """Make `get` return to the pool at once."""
        self._needs_care = True
        self._ring()

    def terminate(self) -> None:
        """Have all workers end now."""
        self._is_terminating = True
        self.wake()

    def repopulate(self) -> None:
        """Start the workers that are missing."""
        if self._is_closing or self._is_terminating:
            return
        for slot in range(len(self._plan.initializers)):
            if slot not in self._lanes:
                self._start(slot)

    def join(self) -> None:
        """Wait until the workers have ended and let go of all that the pool has open."""
        while self._lanes or self._dying:
            self._turn(None)
        self._encoder = Encoder(copy_tensor=True, recurse=False)
        with self._lock:
            self._is_hungry = False
            self._backlog.clear()
        self._epoll.close()
        self._counters.close()
        wake_fd, self._wake_fd = self._wake_fd, -1
        os.close(wake_fd)

    def _turn(self, patience: float | None) -> None:
        """Wait for something to happen, and see to it."""
        if self._is_terminating or self._is_closing:
            self._end_lanes()
        alarm = self._alarm()
        if alarm is not None and (patience is None or alarm < patience):
            patience = alarm
        dead = []
        for fd, _ in self._epoll.poll(patience):
            lane = self._by_fd.get(fd)
            if lane is None:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
            elif fd == lane.results:
                self._receive(lane)
            else:
                dead.append(lane)
        for lane in dead:
            self._mourn(lane)
        if self._dying:
            self._bury()
        if alarm is not None:
            self._look_at_clocks(time.monotonic())
        if len(self._backlog) and self._is_hungry:
            self._deal()

    def _alarm(self) -> float | None:
        """Return after how many seconds the clocks are to be looked at."""
        alarms = []
        if not len(self._backlog) and self._is_uneven():
            alarms.append(_STUCK_S)
        if self._plan.task_timeout is not None or self._is_terminating:
            now = time.monotonic()
            for lane in self._lanes.values():
                if lane.kill_at is not None:
                    alarms.append(max(0.0, lane.kill_at - now))
                elif self._plan.task_timeout is not None and lane.inflight:
                    begun, since = lane.begun
                    left = since + self._plan.task_timeout - now
                    alarms.append(max(1e-3, left) if begun in lane.inflight else 0.02)
        return min(alarms, default=None)

    def _is_uneven(self) -> bool:
        lanes = self._lanes.values()
        return any(len(lane.inflight) > 1 for lane in lanes) and any(
            lane.is_ready and not lane.inflight for lane in lanes
        )

    def _look_at_clocks(self, now: float) -> None:
        limit = self._plan.task_timeout
        for lane in list(self._lanes.values()):
            if lane.kill_at is not None:
                if now >= lane.kill_at:
                    lane.kill(signal.SIGKILL)
                    lane.kill_at = now + _GRACE_S
            elif limit is not None and not lane.is_overdue:
                begun, since = lane.begun
                if begun in lane.inflight and now - since > limit:
                    lane.is_overdue = True
                    lane.kill(signal.SIGKILL)
        if self._is_uneven():
            with self._lock:
                for lane in self._lanes.values():
                    is_stuck = now - lane.last_event > _STUCK_S
                    if len(lane.inflight) > 1 and is_stuck and not lane.is_claimed:
                        lane.last_event = now
                        self._backlog.put_back(lane.slot, lane.take_back())

    def _deal(self) -> None:
        """Send waiting tasks to workers that have room."""
        while True:
            with self._lock:
                lane, tasks = self._choice()
                if lane is None:
                    return
                lane.is_claimed = True
            try:
                self._send(lane, tasks)
            finally:
                with self._lock:
                    lane.is_claimed = False
                    self._is_hungry = True
                    if lane in self._dying:
                        self.wake()

    def _choice(self) -> tuple[Lane | None, list[Task]]:
        waiting = len(self._backlog)
        if not waiting:
            return None, []
        lanes = self._lanes.values()
        best = min((lane for lane in lanes if lane.room > 0), key=_load, default=None)
        if best is None:
            self._is_hungry = False
            return None, []
        # What is left is shared out evenly.
        share = min(best.room, -(-waiting // len(self._lanes)))
        return best, self._backlog.take(best.slot, share)

    def _send(self, lane: Lane, tasks: list[Task]) -> None:
        """Send tasks that were taken for a worker; what cannot be sent waits again."""
        left = deque(tasks)
        try:
            while left and lane.has_room_beside:
                if not self._send_one(lane, left[0]):
                    break
                left.popleft()
        finally:
            if left:
                with self._lock:
                    self._backlog.put_back(lane.slot, list(left))

    def _send_one(self, lane: Lane, task: Task) -> bool:
        try:
            parcel = self._encoder.encode(task, lane.known)
            try:
                return lane.send(task, parcel)
            finally:
                parcel.release()
        except Exception as error:
            self._done.append((task[0], task[1], (False, error)))
            self._ring()
            return True

    def _receive(self, lane: Lane) -> None:
        """Read what a worker has written."""
        found = lane.receive()
        answers = []
        with self._lock:
            for number, kind, value in found:
                if number:
                    task = lane.taken(number, is_value=kind == link.VALUE)
                    answers.append((task[0], task[1], kind, value))
                elif kind == link.READY:
                    lane.is_ready = True
                    self._failed_starts = 0
                else:
                    lane.failure = value
            if answers:
                lane.answered(len(answers), time.monotonic())
            self._is_hungry = True
            if lane.is_spent and not lane.is_stopping:
                lane.stop()
        if self._tries:
            for job, chunk, _, _ in answers:
                self._tries.pop((job, chunk), None)
        self._done.extend(
            (job, chunk, _outcome(kind, value)) for job, chunk, kind, value in answers
        )

    def _start(self, slot: int) -> None:
        own = [self._epoll.fileno(), self._wake_fd]
        own += [fd for lane in self._lanes.values() for fd in lane.own_fds()]
        lane = start_lane(self._plan, slot, self._counters, self._encoder, forked_close=own)
        self._by_fd[lane.results] = self._by_fd[lane.death_fd] = lane
        self._epoll.register(lane.results, select.EPOLLIN)
        self._epoll.register(lane.death_fd, select.EPOLLIN)
        with self._lock:
            self._lanes[slot] = lane

    def _end_lanes(self) -> None:
        for lane in self._lanes.values():
            if self._is_terminating:
                if lane.kill_at is None:
                    lane.is_stopping = True
                    lane.kill_at = time.monotonic() + _GRACE_S
                    lane.kill(signal.SIGTERM)
            elif not lane.is_stopping:
                lane.stop()

    def _mourn(self, lane: Lane) -> None:
        """See that a worker has ended: it is sent nothing any more."""
        lane.is_stopping = True
        for fd in (lane.results, lane.death_fd):
            self._epoll.unregister(fd)
            del self._by_fd[fd]
        self._dying.append(lane)

    def _bury(self) -> None:
        """Settle what workers that have ended leave behind."""
        for lane in list(self._dying):
            self._receive(lane)
            with self._lock:
                # Another thread is just sending it tasks: it will wake this one.
                if lane.is_claimed:
                    continue
                self._dying.remove(lane)
                del self._lanes[lane.slot]
                begun, _ = lane.begun
                lost = lane.inflight.pop(begun, None)
                self._backlog.put_back(lane.slot, list(lane.inflight.values()))
            exitcode = lane.close()
            if lost is not None:
                self._settle_lost(lane, lost, exitcode)
            if not lane.is_ready and not self._is_terminating:
                self._count_failed_start(lane, exitcode)
            self._needs_care = True

    def _settle_lost(self, lane: Lane, task: Task, exitcode: int | None) -> None:
        job, chunk = task[:2]
        tries = self._tries.get((job, chunk), 0)
        if tries < self._plan.retries and not self._is_terminating:
            self._tries[job, chunk] = tries + 1
            with self._lock:
                self._backlog.put_back(lane.slot, [task])
            return
        self._tries.pop((job, chunk), None)
        call = self._cache.get(job)
        name = f"task {chunk}" if call is None else call.task_name(chunk)
        timeout = self._plan.task_timeout if lane.is_overdue else None
        error = death_error(name, lane.slot, lane.pid, exitcode, timeout)
        self._done.append((job, chunk, (False, error)))

    def _count_failed_start(self, lane: Lane, exitcode: int | None) -> None:
        self._failed_starts += 1
        if lane.failure is not None:
            self._broken = initializer_error(lane.slot, lane.failure)
        elif self._failed_starts >= _MOST_FAILED_STARTS:
            self._broken = start_error(lane.slot, self._failed_starts, exitcode)

    def _forget(self, job: int) -> None:
        """Drop the function of a call that has ended, here and in the workers."""
        if self._encoder.forget(job):
            with self._lock:
                for lane in self._lanes.values():
                    lane.forget(job)

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake_fd, 1)


def _load(lane: Lane) -> int:
    return len(lane.inflight)


def _outcome(kind: int, value: Any) -> tuple[bool, Any]:
    """Return what a worker has written as a result."""
    try:
        if kind == link.VALUE:
            if type(value) is not bytes:
                data, fds = value
                if isinstance(fds, OSError):
                    raise fds
                return True, unpack(data, fds)
            return True, pickle.loads(value) if value[0] == link.PICKLE else unpack(value)
        if kind == link.ERROR:
            return False, rebuild(value)
        texts = pickle.loads(value)
        return False, EncodingError(*texts) if kind == link.NOT_ENCODED else RemoteError(*texts)
    # Loading runs the code of classes.
    except BaseException as error:
        return False, error
