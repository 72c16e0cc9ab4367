"""The parent's side of a pool of processes: one thread that knows which worker has which task.

Workers share nothing, so one that dies takes nothing with it but the task it was running. A worker
may be sent some tasks ahead of their turn. What it has not begun when it dies, or when another
worker has nothing to do, comes back and goes elsewhere.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Set
from typing import Any

from . import _link as link
from ._backlog import DealtBacklog, SharedBacklog
from ._crew import Crew
from ._dealer import Dealer
from ._deaths import initializer_error
from ._encoder import Encoder, Task
from ._lane import Lane
from ._one_go import wait_free
from ._outcomes import Losses, outcome
from ._starts import START_ERRORS, FailedStarts, Plan
from .errors import BrokenPoolError, TimeoutError
from .transport.wire import prepare

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
        backlog: SharedBacklog | DealtBacklog,
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
        self._crew = Crew(plan, self._lock)
        self._dealer = Dealer(
            self._crew,
            backlog,
            self._encoder,
            self._lock,
            self._done.append,
            is_timed=plan.task_timeout is not None,
        )
        # Jobs that have ended without `get` seeing it.
        self._ended_jobs: deque[int] = deque()
        self._losses = Losses(plan.retries, plan.task_timeout, calls)
        # Workers that have ended and are not settled yet.
        self._dying: list[Lane] = []
        self._needs_care = self._is_closing = self._is_terminating = False
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
        self._dealer.put(task)

    def get(self, timeout: float | None = None) -> Result:
        """Return the next result: job, chunk, (True, value) or (False, error).

        Raises:
            TimeoutError: there was none in time, or the pool has something else to look after.
            BrokenPoolError: the workers do not come up.
        """
        job, self._last_job = self._last_job, -1
        if job >= 0 and job not in self._calls and job not in self._open_jobs:
            self._dealer.forget(job)
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

    def forget(self, job: int) -> None:
        """Drop the function of a call that has ended without `get` seeing it."""
        self._ended_jobs.append(job)
        self._crew.ring()

    def size(self) -> int:
        """Return how many workers there are."""
        return len(self._crew.lanes)

    def wake(self) -> None:
        """Make `get` return to the pool at once."""
        self._needs_care = True
        self._crew.ring()

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
            self._crew.start_missing(self._encoder)
        except START_ERRORS as error:
            if not self._is_up:
                raise
            self._needs_care = True
            self._broken = self._failed_starts.add_error(error, is_only=not self._crew.has_ready)
        self._is_up = True

    def join(self) -> None:
        """Wait until the workers have ended, and let go of all that the pool has open."""
        while self._crew.lanes:
            self._turn(None)
        self._dealer.close()
        self._crew.close()

    def _turn(self, patience: float | None) -> None:
        """Wait for something to happen, and see to it."""
        crew = self._crew
        if self._is_terminating:
            crew.terminate()
        elif self._is_closing:
            crew.stop()
        alarm = self._alarm()
        if alarm is not None and (patience is None or alarm < patience):
            patience = alarm
        written, ended = crew.wait(patience)
        for lane in written:
            self._receive(lane)
        for lane in ended:
            with self._lock:
                lane.is_stopping = True
            # Another thread may be sending to it, but no more after that.
            wait_free(lane.claim)
            crew.ignore(lane)
            self._dying.append(lane)
        if self._dying:
            self._bury()
        if alarm is not None:
            self._look_at_clocks(time.monotonic())
        while self._ended_jobs:
            self._dealer.forget(self._ended_jobs.popleft())
        self._dealer.deal()

    def _alarm(self) -> float | None:
        """Return in how many seconds the clocks are to be looked at."""
        alarms: list[float | None] = [_STUCK_S] if self._dealer.is_uneven else []
        if self._timeout is not None or self._is_terminating:
            alarms.append(self._crew.alarm(self._timeout, time.monotonic()))
        if self._failed_starts.next_at:
            alarms.append(max(1e-3, self._failed_starts.next_at - time.monotonic()))
        return min((alarm for alarm in alarms if alarm is not None), default=None)

    def _look_at_clocks(self, now: float) -> None:
        if 0 < self._failed_starts.next_at <= now:
            self._failed_starts.next_at = 0.0
            self._needs_care = True
        self._crew.check_kills(now)
        if self._timeout is not None:
            self._crew.check_timeout(self._timeout, now)
        if self._dealer.is_uneven:
            self._dealer.take_back(now - _STUCK_S)

    def _receive(self, lane: Lane) -> None:
        """Read what a worker has written."""
        found = lane.pipes.receive()
        answers = []
        with self._lock:
            for number, kind, value in found:
                if number:
                    task = lane.taken(number, is_value=kind == link.VALUE)
                    answers.append((task[0], task[1], kind, value))
                elif kind == link.READY:
                    lane.is_ready = True
                    self._failed_starts.forget()
                    # For starts that were put off.
                    self._needs_care = True
                else:
                    lane.failure = value
            if answers:
                lane.answered(len(answers), time.monotonic())
            self._dealer.is_hungry = True
        for job, chunk, kind, value in answers:
            self._losses.answered(job, chunk)
            self._done.append((job, chunk, outcome(kind, value)))

    def _bury(self) -> None:
        """Settle what workers that have ended leave behind."""
        for lane in list(self._dying):
            self._receive(lane)
            with self._lock:
                self._dying.remove(lane)
                del self._crew.lanes[lane.slot]
                lost = lane.inflight.pop(lane.begun[0], None)
                self._dealer.put_back(lane, list(lane.inflight.values()))
            exitcode = lane.close()
            if lost is not None:
                error = self._losses.settle(lane, lost, exitcode)
                if error is not None:
                    self._done.append((lost[0], lost[1], (False, error)))
                else:
                    self._dealer.put_back(lane, [lost])
            if lane.is_ready:
                self._failed_starts.forget()
            elif not self._is_terminating:
                self._count_failed_start(lane, exitcode)
            self._needs_care = True

    def _count_failed_start(self, lane: Lane, exitcode: int | None) -> None:
        if lane.failure is not None:
            self._broken = initializer_error(lane.slot, lane.failure)
        elif self._broken is None:
            self._broken = self._failed_starts.add_death(exitcode, is_only=not self._crew.has_ready)
