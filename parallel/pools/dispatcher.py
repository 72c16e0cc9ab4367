"""The parent's side of a pool: its one thread, and which worker gets which task.

Workers share nothing, so one that dies takes nothing with it but the task it was running. Each is
sent two tasks ahead. If it dies, or another worker has nothing to do, the tasks that it has not
begun go elsewhere.
"""

from __future__ import annotations

import builtins
import enum
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

# Where results come from a queue that nobody wakes, how often the pool is looked after.
_CHECK_S = 0.1
_EXIT_S = 5.0
# All that queues raise when there is nothing.
_NOTHING = (builtins.TimeoutError, multiprocessing.TimeoutError, queue.Empty)

_log = logging.getLogger(__name__)
Result = tuple[int, int, tuple[bool, Any]]


class PoolStates(enum.Enum):
    """What a pool is doing: it takes calls, it ends what it has, or it has been stopped."""

    RUN = 0
    CLOSE = 1
    TERMINATE = 2


class Monitor:
    """The one thread of a pool: brings results to their calls, and looks after the workers.

    It does not hold the pool, which may be collected; then the workers end.
    """

    def __init__(self, pool: Any, *, is_plain: bool) -> None:
        self.phase = PoolStates.RUN
        self.broken: BaseException | None = None
        self.is_ended = False
        self.is_waited = pool._is_waited
        self.wake = pool._engine.wake
        self._pool = weakref.ref(pool)
        self._engine = pool._engine
        self._cache = pool._cache
        self._process = os.getpid()
        self._get = pool._outqueue.get if is_plain else self._get_of_pool
        # Only the engine is woken when the pool needs care.
        is_woken = is_plain and pool._outqueue is pool._engine
        self._patience_s = None if is_woken else _CHECK_S
        self._started: Future[None] = Future()
        self._failed, self._finished = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="stepwrap-pool", daemon=True)
        # Also at the end of the program: before multiprocessing waits for its children.
        util.Finalize(pool, _stop_at_exit, args=(self,), exitpriority=15)

    def start(self) -> None:
        self._thread.start()
        self._started.result()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end of the pool, unless called by its own thread; return whether it came."""
        if threading.current_thread() is self._thread:
            return False
        # First: Python 3.11 takes a thread whose join was interrupted for one that has ended.
        if not self._finished.wait(timeout):
            return False
        self._thread.join()
        return True

    def stop(self) -> None:
        self.phase = PoolStates.TERMINATE
        self.wake()

    def wait_failed(self) -> None:
        """Wait until what a stopped pool did not get to has failed."""
        if threading.current_thread() is not self._thread:
            self._failed.wait()

    def check(self) -> None:
        """Raise if the pool takes no calls."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the pool is of process {self._process}, this is {os.getpid()}, forked from it: "
                "make the pool where it is used"
            )
        if self.broken is not None:
            raise BrokenPoolError(str(self.broken)) from self.broken
        if self.phase is not PoolStates.RUN:
            raise ValueError("Pool not running")

    def end_error(self) -> BaseException:
        """Return what calls end with that the pool did not get to."""
        text = "the pool was terminated before the result was there"
        return self.broken or PoolTerminatedError(text)

    def _get_of_pool(self, timeout: float | None) -> Any:
        pool = self._pool()
        if pool is None:
            raise TimeoutError("the pool is gone")
        return pool.pool_outqueue_get(timeout)

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
                self._bring_results()
        except BaseException as error:
            self.broken = error
            if not isinstance(error, BrokenPoolError):
                _log.exception("a pool has failed")
                self.broken = BrokenPoolError(f"the pool is broken: {error!r}")
                self.broken.__cause__ = error
            self._end()

    def _bring_results(self) -> None:
        """Bring results to their calls until the pool needs care."""
        get, cache, patience = self._get, self._cache, self._patience_s
        until = math.inf if patience is None else time.monotonic() + _CHECK_S
        is_over = False
        while not is_over:
            try:
                job, chunk, outcome = get(timeout=patience)
            except _NOTHING:
                return
            call = cache.get(job)
            if call is not None:
                call.set(chunk, outcome)
            # Not kept while waiting for the next one.
            del call, outcome
            if self.phase is not PoolStates.RUN:
                is_over = not cache or self.phase is PoolStates.TERMINATE
            elif patience is not None:
                is_over = time.monotonic() > until

    def _maintain(self) -> bool:
        """Look after the workers; return whether the pool goes on."""
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
        """Stop the workers; what is not done fails."""
        self.phase = PoolStates.TERMINATE
        self._fail_all()
        for step in ("terminate_workers", "join_workers"):
            try:
                if not self._step(step):
                    getattr(self._engine, step.removesuffix("_workers"))()
            except BaseException:
                _log.exception("%s of a pool failed", step)

    def _step(self, method: str) -> bool:
        """Call a method of the pool; return whether it is still there."""
        pool = self._pool()
        if pool is not None:
            getattr(pool, method)()
        return pool is not None

    def _fail_all(self) -> None:
        # Calls that come later see it and fail by themselves.
        self.is_ended = True
        for call in list(self._cache.values()):
            call.fail(self.end_error())
        self._failed.set()


def _stop_at_exit(monitor: Monitor) -> None:
    monitor.stop()
    # Not where a pool is collected: that may be in the middle of anything.
    if monitor.is_waited and util.is_exiting():
        monitor.join(_EXIT_S)


class Dispatcher:
    """Takes tasks (`put`) and gives results (`get`), both as the pools' queues do.

    `put`, `wake`, `terminate` and `size` are for any thread, all else for the pool's one thread.
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
        # How often a task was lost that is run again.
        self._tries: dict[tuple[int, int], int] = {}
        # Whether a worker may have room: otherwise `put` need not wake the pool's thread.
        self._may_have_room = False
        self._needs_maintenance = self._is_closing = self._is_terminating = False
        # Of a pool that has its own: of tasks and of results.
        self.queues: tuple[Any, Any] | None = None

    def put(self, task: Task | None) -> None:
        """Take a task. None: the workers end when they have done what they have."""
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
                raise TimeoutError("the pool's workers need care")
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no result within {timeout} s")
            self._turn(left)
        return self._done.popleft()

    def size(self) -> int:
        return len(self._workers.by_slot)

    def wake(self) -> None:
        self._needs_maintenance = True
        self._workers.wake()

    def terminate(self) -> None:
        """Have all workers end now: SIGTERM, and SIGKILL a second later."""
        self._is_terminating = True
        self.wake()

    def repopulate(self) -> None:
        """Start the workers that are missing, now or, after failures, a little later."""
        if self.queues is not None:
            # Nobody calls `get`.
            self._turn(0.0)
            if self._workers.broken is not None:
                raise self._workers.broken
        if not self._is_closing and not self._is_terminating:
            self._workers.start_missing(self.queues)

    def join(self) -> None:
        """Wait until the workers have ended, and let go of all that the pool has open."""
        while self._workers.by_slot:
            self._turn(math.inf)
        self._may_have_room = False
        self._backlog.clear()
        self._functions.clear()
        self._workers.close()

    def _turn(self, patience: float) -> None:
        """Wait for something to happen, and see to it."""
        workers = self._workers
        if self._is_terminating:
            workers.terminate()
        elif self._is_closing:
            workers.stop()
        written, ended = workers.wait(min(patience, workers.tick_s))
        for worker in written:
            self._receive(worker)
        for worker in ended:
            self._settle(worker)
        if workers.tick_s < math.inf and workers.check_clocks():
            self._needs_maintenance = True
        self._send_waiting()

    def _receive(self, worker: WorkerHandle) -> None:
        """Read what a worker has sent."""
        was_ready = worker.is_ready
        for (job, chunk, *_), outcome in worker.receive():
            self._tries.pop((job, chunk), None)
            self._done.append((job, chunk, outcome))
        if worker.is_ready and not was_ready:
            self._workers.forget_failures()
            # For starts that were put off.
            self._needs_maintenance = True

    def _settle(self, worker: WorkerHandle) -> None:
        """Settle what a worker that has ended leaves behind."""
        del self._workers.by_slot[worker.slot]
        self._receive(worker)
        lost = worker.inflight.pop(worker.begun, None)
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
                name = f"task {chunk}" if call is None else call._call.task_name(job, chunk)
                error = death_error(name, worker, exitcode, self._options.task_timeout)
                self._done.append((job, chunk, (False, error)))
        self._backlog.extendleft(reversed(waiting))
        if not self._is_terminating:
            self._workers.count_end(worker, exitcode, has_queues=self.queues is not None)
        self._needs_maintenance = True

    def _send_waiting(self) -> None:
        """Send tasks to workers with room, those with the least to do first."""
        self._may_have_room = True
        while worker := self._best():
            if not self._backlog:
                self._share()
            if not self._backlog:
                return
            task = self._backlog.popleft()
            try:
                worker.send(task, self._functions)
            # Pickling runs the code of classes, which must not end this thread.
            except BaseException as error:
                self._done.append((task[0], task[1], (False, error)))
        self._may_have_room = False

    def _best(self) -> WorkerHandle | None:
        """Return the worker with room that has the least to do."""
        with_room = (worker for worker in self._workers.by_slot.values() if worker.has_room)
        return min(with_room, key=lambda worker: len(worker.inflight), default=None)

    def _share(self) -> None:
        """Take back the tasks that wait behind another, if a worker has nothing to do."""
        workers = self._workers.by_slot.values()
        if any(worker.has_room and not worker.inflight for worker in workers):
            busy = (worker for worker in workers if len(worker.inflight) > 1)
            taken = (tasks for worker in busy if (tasks := worker.take_back()))
            self._backlog.extend(next(taken, ()))
