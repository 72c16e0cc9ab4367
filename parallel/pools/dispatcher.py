"""The parent's side of a pool of processes: one thread that knows which worker has which task.

Workers share nothing, so one that dies takes nothing with it but the task it was running. A worker
may be sent some tasks ahead of their turn. What it has not begun when it dies, or when another
worker has nothing to do, comes back and goes elsewhere.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import deque
from collections.abc import Mapping, Set
from typing import Any

from ..errors import BrokenPoolError, EncodingError, RemoteError, TimeoutError
from ..interrupts import wait_free
from ..transport.remote_errors import rebuild
from ..transport.wire import prepare, unpack
from . import protocol
from .encoder import Encoder, Task
from .scheduler import PerWorkerBacklog, Scheduler, SharedBacklog
from .worker_handle import WorkerHandle
from .workers import START_ERRORS, FailedStarts, Plan, Workers, death_error, initializer_error

# How long a worker may make no progress before tasks behind its own go to one that is idle.
_STUCK_S = 2e-3

Result = tuple[int, int, tuple[bool, Any]]


class Dispatcher:
    """Takes tasks (`put`) and gives results (`get`), both as the pools' queues do.

    `put`, `forget`, `wake` and `terminate` are for any thread, all else for the pool's one thread.

    Args:
        plan: how the workers are to be.
        backlog: where tasks wait.
        calls: the pool's unfinished calls by number, which know the names of tasks.
        open_jobs: numbers of calls that go on, though they may have no task under way.
    """

    def __init__(
        self,
        plan: Plan,
        backlog: SharedBacklog | PerWorkerBacklog,
        calls: Mapping[int, Any],
        open_jobs: Set[int],
    ) -> None:
        # Reentrant: a collection of garbage may run anything, also code that submits tasks.
        self._lock = threading.RLock()
        self._timeout = plan.task_timeout
        self._done: deque[Result] = deque()
        self._calls = calls
        self._open_jobs = open_jobs
        self._encoder = Encoder(copy_tensor=plan.copy_tensor, recurse=plan.recurse)
        self._workers = Workers(plan, self._lock)
        self._scheduler = Scheduler(
            self._workers,
            backlog,
            self._encoder,
            self._lock,
            self._done.append,
            is_timed=plan.task_timeout is not None,
        )
        # Jobs that have ended without `get` seeing it.
        self._ended_jobs: deque[int] = deque()
        self._losses = LostTasks(plan.retries, plan.task_timeout, calls)
        # Workers that have ended and are not settled yet.
        self._ended: list[WorkerHandle] = []
        self._needs_maintenance = self._is_closing = self._is_terminating = False
        self._failed_starts = FailedStarts(plan)
        self._is_up = False
        self._broken: BrokenPoolError | None = None
        self._last_job = -1

    def put(self, task: Task | None) -> None:
        """Take a task; None: the workers end when they have done what they have."""
        if task is None:
            self._is_closing = True
            self.wake()
            return
        self._scheduler.put(task)

    def get(self, timeout: float | None = None) -> Result:
        """Return the next result: job, chunk, (True, value) or (False, error).

        Raises:
            TimeoutError: there was none in time, or the pool has something else to look after.
            BrokenPoolError: the workers do not come up.
        """
        job, self._last_job = self._last_job, -1
        if job >= 0 and job not in self._calls and job not in self._open_jobs:
            self._scheduler.forget(job)
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._done:
            if self._broken is not None:
                raise self._broken
            if self._needs_maintenance:
                self._needs_maintenance = False
                raise TimeoutError("the pool's workers need care")
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"no result within {timeout} s")
            self._turn(left)
        result = self._done.popleft()
        self._last_job = result[0]
        return result

    def forget(self, job: int) -> None:
        """Drop the function of a call that has ended without `get` seeing it."""
        self._ended_jobs.append(job)
        self._workers.wake()

    def size(self) -> int:
        """Return how many workers there are."""
        return len(self._workers.by_slot)

    def wake(self) -> None:
        """Make `get` return to the pool at once."""
        self._needs_maintenance = True
        self._workers.wake()

    def terminate(self) -> None:
        """Have all workers end now: SIGTERM, and SIGKILL a second later."""
        self._is_terminating = True
        self.wake()

    def repopulate(self) -> None:
        """Start the workers that are missing, now or, after failures, a little later.

        Raises:
            Exception: the first ones cannot be started.
        """
        if self._is_closing or self._is_terminating or self._failed_starts.next_at:
            return
        prepare()
        try:
            self._workers.start_missing(self._encoder)
        except START_ERRORS as error:
            if not self._is_up:
                raise
            self._needs_maintenance = True
            self._broken = self._failed_starts.add_error(error, is_only=not self._workers.has_ready)
        self._is_up = True

    def join(self) -> None:
        """Wait until the workers have ended, and let go of all that the pool has open."""
        while self._workers.by_slot:
            self._turn(None)
        self._scheduler.close()
        self._workers.close()

    def _turn(self, patience: float | None) -> None:
        """Wait for something to happen, and see to it."""
        workers = self._workers
        if self._is_terminating:
            workers.terminate()
        elif self._is_closing:
            workers.stop()
        next_check = self._next_check_s()
        if next_check is not None and (patience is None or next_check < patience):
            patience = next_check
        written, ended = workers.wait(patience)
        for worker in written:
            self._receive(worker)
        for worker in ended:
            with self._lock:
                worker.is_stopping = True
            # Another thread may be sending to it, but no more after that.
            wait_free(worker.sending)
            workers.ignore(worker)
            self._ended.append(worker)
        if self._ended:
            self._settle_ended()
        if next_check is not None:
            self._look_at_clocks(time.monotonic())
        while self._ended_jobs:
            self._scheduler.forget(self._ended_jobs.popleft())
        self._scheduler.send_waiting()

    def _next_check_s(self) -> float | None:
        """Return in how many seconds the clocks are to be looked at."""
        checks: list[float | None] = [_STUCK_S] if self._scheduler.is_uneven else []
        if self._timeout is not None or self._is_terminating:
            checks.append(self._workers.next_check_s(self._timeout, time.monotonic()))
        if self._failed_starts.next_at:
            checks.append(max(1e-3, self._failed_starts.next_at - time.monotonic()))
        return min((next_check for next_check in checks if next_check is not None), default=None)

    def _look_at_clocks(self, now: float) -> None:
        if 0 < self._failed_starts.next_at <= now:
            self._failed_starts.next_at = 0.0
            self._needs_maintenance = True
        self._workers.check_kills(now)
        if self._timeout is not None:
            self._workers.check_timeout(self._timeout, now)
        if self._scheduler.is_uneven:
            self._scheduler.take_back(now - _STUCK_S)

    def _receive(self, worker: WorkerHandle) -> None:
        """Read what a worker has written."""
        found = worker.pipes.receive()
        answers = []
        with self._lock:
            for number, kind, value in found:
                if number:
                    task = worker.taken(number, is_value=kind == protocol.VALUE)
                    answers.append((task[0], task[1], kind, value))
                elif kind == protocol.READY:
                    worker.is_ready = True
                    self._failed_starts.forget()
                    # For starts that were put off.
                    self._needs_maintenance = True
                else:
                    worker.failure = value
            if answers:
                worker.answered(len(answers), time.monotonic())
            self._scheduler.may_have_room = True
        for job, chunk, kind, value in answers:
            self._losses.answered(job, chunk)
            self._done.append((job, chunk, outcome(kind, value)))

    def _settle_ended(self) -> None:
        """Settle what workers that have ended leave behind."""
        for worker in list(self._ended):
            self._receive(worker)
            with self._lock:
                self._ended.remove(worker)
                del self._workers.by_slot[worker.slot]
                lost = worker.inflight.pop(worker.begun[0], None)
                self._scheduler.put_back(worker, list(worker.inflight.values()))
            exitcode = worker.close()
            if lost is not None:
                error = self._losses.settle(worker, lost, exitcode)
                if error is not None:
                    self._done.append((lost[0], lost[1], (False, error)))
                else:
                    self._scheduler.put_back(worker, [lost])
            if worker.is_ready:
                self._failed_starts.forget()
            elif not self._is_terminating:
                self._count_failed_start(worker, exitcode)
            self._needs_maintenance = True

    def _count_failed_start(self, worker: WorkerHandle, exitcode: int | None) -> None:
        if worker.failure is not None:
            self._broken = initializer_error(worker.slot, worker.failure)
        elif self._broken is None:
            self._broken = self._failed_starts.add_death(
                exitcode, is_only=not self._workers.has_ready
            )


def outcome(kind: int, value: Any) -> tuple[bool, Any]:
    """Return (True, value) or (False, error) of what a worker has written."""
    try:
        if kind == protocol.VALUE:
            if type(value) is bytes:
                return True, pickle.loads(value) if value[0] == protocol.PICKLE else unpack(value)
            data, fds = value
            if isinstance(fds, OSError):
                raise fds
            return True, unpack(data, fds)
        if kind == protocol.ERROR:
            return False, rebuild(value)
        texts = pickle.loads(value)
        return False, EncodingError(*texts) if kind == protocol.NOT_ENCODED else RemoteError(*texts)
    # Loading runs the code of classes.
    except BaseException as error:
        return False, error


class LostTasks:
    """Tasks that have ended with their worker.

    Args:
        retries: how often a task is run again.
        timeout: what a task has that is killed for its time.
        calls: the pool's unfinished calls by number, which know the names of tasks.
    """

    def __init__(self, retries: int, timeout: float | None, calls: Mapping[int, Any]) -> None:
        self._retries = retries
        self._timeout = timeout
        self._calls = calls
        self._tries: dict[tuple[int, int], int] = {}

    def settle(
        self, worker: WorkerHandle, task: Task, exitcode: int | None
    ) -> BaseException | None:
        """Return the error of a lost task, None where it is to be run again."""
        job, chunk = task[:2]
        tries = self._tries.pop((job, chunk), 0)
        if tries < self._retries:
            self._tries[job, chunk] = tries + 1
            return None
        call = self._calls.get(job)
        name = f"task {chunk}" if call is None else call.task_name(chunk)
        timeout = self._timeout if worker.is_overdue else None
        return death_error(name, worker.slot, worker.pid, exitcode, timeout)

    def answered(self, job: int, chunk: int) -> None:
        """Forget the tries of a task that came through."""
        if self._tries:
            self._tries.pop((job, chunk), None)
