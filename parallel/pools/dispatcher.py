"""The pool's thread in the parent process, and the assignment of tasks to workers.

Workers share nothing, so a worker that dies only loses the task that it was running. Each worker
is sent two further tasks in advance. If it dies, or another worker is idle, the tasks that it has
not started go to other workers.
"""

from __future__ import annotations

import builtins
import enum
import functools
import logging
import math
import multiprocessing
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Container, Mapping
from concurrent.futures import Future
from multiprocessing import util
from typing import Any

from ..errors import BrokenPoolError, PoolTerminatedError, TimeoutError
from .map_functions import MapFunctions
from .worker_handle import Task, WorkerHandle
from .workers import Options, Workers, death_error

# How often to maintain a pool if `wake` cannot interrupt the `get` of its queue of results.
_CHECK_S = 0.1
# How long the end of the program waits for a pool to end.
_EXIT_S = 5.0
# All errors that queues raise when they are empty.
_EMPTY = (builtins.TimeoutError, multiprocessing.TimeoutError, queue.Empty)

_log = logging.getLogger(__name__)
Result = tuple[int, int, tuple[bool, Any]]


class PoolStates(enum.Enum):
    """The state of a pool: it accepts calls, finishes the accepted ones, or has been terminated."""

    RUN = 0
    CLOSE = 1
    TERMINATE = 2


class Monitor:
    """The thread of a pool: it delivers results to their calls and maintains the workers.

    It only has a weak reference to the pool. If the pool is collected, the workers end.
    """

    def __init__(self, pool: Any, *, is_plain: bool) -> None:
        self.phase = PoolStates.RUN
        self.broken: BaseException | None = None
        self.is_ended = False
        self.joins_at_exit = pool._joins_at_exit
        self.wake = pool._engine.wake
        self._pool = weakref.ref(pool)
        self._engine = pool._engine
        self._cache = pool._cache
        self.process = os.getpid()
        self._get = pool._outqueue.get if is_plain else functools.partial(_get_result, self._pool)
        # `wake` only interrupts `get` of the engine, so other queues must be polled.
        is_woken = is_plain and pool._outqueue is pool._engine
        self._poll_s = None if is_woken else _CHECK_S
        self._started: Future[None] = Future()
        self._failed, self._finished = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="stepwrap-pool", daemon=True)
        # At the end of the program this runs before multiprocessing waits for its children.
        util.Finalize(pool, _stop_at_exit, args=(self,), exitpriority=15)

    def start(self) -> None:
        self._thread.start()
        self._started.result()

    @property
    def is_current(self) -> bool:
        """Whether this thread is the pool's."""
        return threading.current_thread() is self._thread

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the pool has ended; return whether it has. The pool's thread does not wait."""
        if self.is_current:
            return False
        # Needed before `join`: in Python 3.11, an interrupted `join` marks the thread as ended.
        if not self._finished.wait(timeout):
            return False
        self._thread.join()
        return True

    def stop(self) -> None:
        self.phase = PoolStates.TERMINATE
        self.wake()

    def wait_failed(self) -> None:
        """Wait until the unfinished calls of a stopped pool have failed."""
        if not self.is_current:
            self._failed.wait()

    def check(self) -> None:
        """Raise if the pool does not accept calls."""
        require_process(self.process)
        if self.broken is not None:
            raise BrokenPoolError(str(self.broken)) from self.broken
        if self.phase is not PoolStates.RUN:
            raise ValueError("Pool not running")

    def end_error(self) -> BaseException:
        """Return the error of calls that the pool did not finish."""
        text = "the pool was terminated before the result was ready"
        return self.broken or PoolTerminatedError(text)

    def _run(self) -> None:
        try:
            self._supervise()
        finally:
            self._finished.set()

    def _supervise(self) -> None:
        try:
            self._step("repopulate_pool")
        except BaseException as error:
            self._end()
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        try:
            while self._maintain():
                self._deliver_results()
        except BaseException as error:
            self.broken = error
            if not isinstance(error, BrokenPoolError):
                _log.exception("a pool has failed")
                self.broken = BrokenPoolError(f"the pool is broken: {error!r}")
                self.broken.__cause__ = error
            self._end()

    def _deliver_results(self) -> None:
        """Deliver results to their calls until the pool needs maintenance."""
        until = math.inf if self._poll_s is None else time.monotonic() + _CHECK_S
        is_over = False
        while not is_over:
            try:
                job, chunk, outcome = self._get(timeout=self._poll_s)
            except _EMPTY:
                return
            call = self._cache.get(job)
            if call is not None:
                call.set(chunk, outcome)
            # Do not keep these objects alive while waiting for the next result.
            del call, outcome
            if self.phase is PoolStates.RUN:
                is_over = time.monotonic() > until
            else:
                is_over = not self._cache or self.phase is PoolStates.TERMINATE

    def _maintain(self) -> bool:
        """Maintain the workers; return whether the pool continues."""
        pool = self._pool()
        if pool is None or self.phase is PoolStates.TERMINATE:
            del pool
            self._end()
            return False
        if self.phase is PoolStates.CLOSE and not self._cache and not pool._open_inputs:
            for _ in range(max(1, pool.size())):
                pool.pool_inqueue_put(None)
            pool.join_workers()
            self._fail_all()
            return False
        pool.maintain_pool()
        return True

    def _end(self) -> None:
        """Stop the workers and fail the unfinished calls."""
        self.phase = PoolStates.TERMINATE
        self._fail_all()
        for step in ("terminate_workers", "join_workers"):
            try:
                if not self._step(step):
                    getattr(self._engine, step.removesuffix("_workers"))()
            except BaseException:
                _log.exception("%s of a pool failed", step)

    def _step(self, method: str) -> bool:
        """Call a method of the pool; return False if the pool has been collected."""
        pool = self._pool()
        if pool is not None:
            getattr(pool, method)()
        return pool is not None

    def _fail_all(self) -> None:
        # Later calls check this flag and fail.
        self.is_ended = True
        pool = self._pool()
        # An iterator without tasks in flight is not in the cache.
        open_inputs = [] if pool is None else list(pool._open_inputs)
        for call in [*self._cache.values(), *open_inputs]:
            call.fail(self.end_error())
        self._failed.set()


def require_process(process: int) -> None:
    """Raise RuntimeError if this process is not ``process``, which created the pool."""
    if os.getpid() != process:
        raise RuntimeError(
            "a pool can only be used in the process that created it: it was created in process "
            f"{process}, this is {os.getpid()}, forked from it; create the pool here"
        )


def _get_result(reference: weakref.ref[Any], timeout: float | None) -> Any:
    pool = reference()
    if pool is None:
        raise TimeoutError("the pool has been collected")
    return pool.pool_outqueue_get(timeout)


def _stop_at_exit(monitor: Monitor) -> None:
    monitor.stop()
    # If the pool was garbage-collected, do not wait: this may run in the middle of any code.
    if monitor.joins_at_exit and util.is_exiting():
        monitor.join(_EXIT_S)


class Dispatcher:
    """The default queues of a pool: ``put`` sends tasks to the workers, ``get`` returns results.

    ``put``, ``wake``, ``terminate`` and ``size`` may be called by any thread, the other methods
    only by the pool's thread.
    """

    def __init__(
        self, options: Options, calls: Mapping[int, Any], open_jobs: Container[int]
    ) -> None:
        self._options = options
        self._calls = calls
        self._functions = MapFunctions(calls, open_jobs, (options.copy_tensor, options.recurse))
        self._workers = Workers(options)
        self._backlog: deque[Task] = deque()
        self._done: deque[Result] = deque()
        # How often each task was lost and run again, by job and chunk.
        self._tries: dict[tuple[int, int], int] = {}
        # Whether a worker may accept a task; `put` only wakes the pool's thread if so.
        self._may_have_room = False
        self._needs_maintenance = self._is_closing = self._is_terminating = False
        # The queues of tasks and results of a pool that overrides `setup_queues`.
        self.queues: tuple[Any, Any] | None = None

    def put(self, task: Task | None) -> None:
        """Accept a task. None makes the workers end after their remaining tasks."""
        if task is None:
            self._is_closing = True
            self.wake()
            return
        self._backlog.append(task)
        if self._may_have_room:
            self._workers.wake()

    def get(self, timeout: float | None = None) -> Result:
        """Return the next result: job, chunk, (True, value) or (False, error)."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self._done:
            if self._workers.broken is not None:
                raise self._workers.broken
            if self._needs_maintenance:
                self._needs_maintenance = False
                raise TimeoutError("the pool's workers need maintenance")
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError(f"no result within {timeout} s")
            self._process_events(remaining_s)
        return self._done.popleft()

    def size(self) -> int:
        return len(self._workers.by_slot)

    def wake(self) -> None:
        self._needs_maintenance = True
        self._workers.wake()

    def terminate(self) -> None:
        """End all workers: SIGTERM, and SIGKILL a second later."""
        self._is_terminating = True
        self.wake()

    def repopulate(self) -> None:
        """Start the missing workers, unless the start is delayed after failures."""
        if self.queues is not None:
            # `get` is not called for such a pool.
            self._process_events(0.0)
            if self._workers.broken is not None:
                raise self._workers.broken
        if not self._is_closing and not self._is_terminating:
            self._workers.start_missing(self.queues)

    def join(self) -> None:
        """Wait until the workers have ended, then release their resources."""
        while self._workers.by_slot:
            self._process_events(math.inf)
        self._may_have_room = False
        self._backlog.clear()
        self._functions.clear()
        self._workers.close()

    def _process_events(self, timeout: float) -> None:
        """Wait for events of the workers and process them."""
        workers = self._workers
        if self._is_terminating:
            workers.terminate()
        elif self._is_closing:
            workers.stop()
        written, ended = workers.wait(min(timeout, workers.tick_s))
        for worker in written:
            self._receive(worker)
        for worker in ended:
            self._remove(worker)
        if workers.tick_s < math.inf and workers.check_deadlines():
            self._needs_maintenance = True
        self._send_waiting()

    def _receive(self, worker: WorkerHandle) -> None:
        """Read the messages of a worker."""
        was_ready = worker.is_ready
        for (job, chunk, *_), outcome in worker.receive():
            self._tries.pop((job, chunk), None)
            self._done.append((job, chunk, outcome))
        if worker.is_ready and not was_ready:
            self._workers.forget_failures()
            # Delayed starts are possible now.
            self._needs_maintenance = True

    def _remove(self, worker: WorkerHandle) -> None:
        """Remove a worker that has ended, and reassign its tasks."""
        del self._workers.by_slot[worker.slot]
        self._receive(worker)
        lost = worker.inflight.pop(worker.started_task, None)
        waiting = list(worker.inflight.values())
        exitcode = worker.close()
        if lost is not None:
            job, chunk = lost[:2]
            tries = self._tries.pop((job, chunk), 0)
            if tries < self._options.retries:
                self._tries[job, chunk] = tries + 1
                waiting.insert(0, lost)
            else:
                call = self._calls.get(job)
                name = f"task {chunk}" if call is None else call._call.task_name(chunk)
                error = death_error(name, worker, exitcode, self._options.task_timeout)
                self._done.append((job, chunk, (False, error)))
        self._backlog.extendleft(reversed(waiting))
        if not self._is_terminating:
            self._workers.count_end(worker, exitcode, has_queues=self.queues is not None)
        self._needs_maintenance = True

    def _send_waiting(self) -> None:
        """Send tasks to workers that can take more, to those with the fewest tasks first."""
        self._may_have_room = True
        while worker := self._least_busy():
            if not self._backlog:
                self._recall_for_idle()
            if not self._backlog:
                return
            task = self._backlog.popleft()
            try:
                worker.send(task, self._functions)
            # Pickling runs the user's code, which must not end this thread.
            except BaseException as error:
                self._done.append((task[0], task[1], (False, error)))
        self._may_have_room = False

    def _least_busy(self) -> WorkerHandle | None:
        """Return the worker with the fewest tasks, None if no worker can take more."""
        with_room = (worker for worker in self._workers.by_slot.values() if worker.has_room)
        return min(with_room, key=lambda worker: len(worker.inflight), default=None)

    def _recall_for_idle(self) -> None:
        """If a worker is idle, take back the waiting tasks of a busy one."""
        workers = self._workers.by_slot.values()
        if any(worker.has_room and not worker.inflight for worker in workers):
            busy = (worker for worker in workers if len(worker.inflight) > 1)
            recalled = (tasks for worker in busy if (tasks := worker.recall_tasks()))
            self._backlog.extend(next(recalled, ()))
