"""The parent's side of a pool: its one thread, and which worker gets which task.

Workers share nothing, so one that dies takes nothing with it but the task it was running. A worker
may be sent some tasks ahead of their turn. What it has not begun when it dies, or when another
worker has nothing to do, comes back and goes elsewhere.
"""

from __future__ import annotations

import builtins
import enum
import logging
import math
import multiprocessing
import os
import pickle
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from multiprocessing import util
from typing import Any

from ..errors import BrokenPoolError, PoolTerminatedError, RemoteError, TimeoutError
from ..transport.remote_errors import rebuild
from ..transport.wire import unpack
from . import worker as protocol
from .worker_handle import EncodedTask, Encoder, Task, WorkerHandle
from .workers import STUCK_S, Options, Workers, death_error

# Where results come from a queue that nobody wakes, how often the pool is looked after.
_CHECK_S = 0.1
_EXIT_S = 5.0
# All that queues raise when there is nothing.
_NOTHING = (builtins.TimeoutError, multiprocessing.TimeoutError, queue.Empty)
# Tasks of a call, per worker: as many as a map has that is told no chunk size.
_FIRST = 4

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
            else:
                self._engine.forget(job)
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

    `put`, `forget`, `wake`, `terminate` and `size` are for any thread, all else for the pool's one
    thread. The lock guards the workers and the backlog; tasks are pickled without it.
    """

    def __init__(self, options: Options, calls: Mapping[int, Any]) -> None:
        # Reentrant: a collection of garbage may run anything, also code that submits tasks.
        self._lock = threading.RLock()
        self._options = options
        # Of the pool's thread, but for `append`, which needs no lock.
        self._backlog: deque[Task] = deque()
        self._calls = calls
        self._encoder = Encoder(copy_tensor=options.copy_tensor, recurse=options.recurse)
        self._workers = Workers(options, self._lock, self._encoder)
        self._done: deque[Result] = deque()
        # How often a task was lost that is run again.
        self._tries: dict[tuple[int, int], int] = {}
        # Whether a worker may have room, so that not each `put` looks at all of them.
        self._may_have_room = False
        self._needs_maintenance = self._is_closing = self._is_terminating = False
        # Of a pool that has its own: of tasks and of results.
        self.queues: tuple[Any, Any] | None = None

    def put(self, task: Task | None) -> None:
        """Take a task, and send it at once where none waits and a worker has room.

        None: the workers end when they have done what they have.
        """
        if task is None:
            self._is_closing = True
            self.wake()
            return
        # Of a call of many tasks only the first go one by one: each wakes a worker.
        is_first = task[1] < _FIRST * len(self._workers.by_slot)
        if is_first and self._may_have_room and not self._backlog:
            with self._lock:
                worker = _best(self._workers)
            if worker is not None and self._send_now(worker, task):
                if self._options.task_timeout is not None:
                    self._workers.wake()
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

    def forget(self, job: int) -> None:
        """Drop the function of a call that has ended, here and in the workers."""
        if job in self._encoder.functions:
            with self._lock:
                self._encoder.functions.pop(job, None)
                for worker in self._workers.by_slot.values():
                    worker.forget(job)

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
        with self._lock:
            self._may_have_room = False
            self._backlog.clear()
        self._workers.close()

    def _turn(self, patience: float) -> None:
        """Wait for something to happen, and see to it."""
        workers = self._workers
        if self._is_terminating:
            workers.terminate()
        elif self._is_closing:
            workers.stop()
        is_uneven = not self._backlog and workers.is_uneven
        written, ended = workers.wait(min(patience, STUCK_S if is_uneven else workers.tick_s))
        for worker in written:
            self._receive(worker)
        for worker in ended:
            self._settle(worker)
        if workers.tick_s < math.inf and workers.check_clocks():
            self._needs_maintenance = True
        if is_uneven and not self._backlog:
            workers.take_back(self._backlog)
        while self._may_have_room and self._backlog:
            self._send_waiting()

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
                    self._workers.forget_failures()
                    # For starts that were put off.
                    self._needs_maintenance = True
                elif kind == protocol.FORGOTTEN:
                    worker.forget(is_done=True)
                else:
                    worker.failure = value
            if answers:
                worker.answered(len(answers), time.monotonic())
            self._may_have_room = True
        for job, chunk, kind, value in answers:
            if self._tries:
                self._tries.pop((job, chunk), None)
            self._done.append((job, chunk, _outcome(kind, value)))

    def _settle(self, worker: WorkerHandle) -> None:
        """Settle what a worker that has ended leaves behind."""
        with self._lock:
            worker.is_stopping = True
            del self._workers.by_slot[worker.slot]
        # Another thread may be sending to it, but no more after that.
        with worker.sending:
            self._receive(worker)
        lost = worker.inflight.pop(worker.begun, None)
        exitcode = worker.close()
        waiting = list(worker.inflight.values())
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
        with self._lock:
            self._backlog.extendleft(reversed(waiting))
        if not self._is_terminating:
            self._workers.count_end(worker, exitcode, has_queues=self.queues is not None)
        self._needs_maintenance = True

    def _send_waiting(self) -> None:
        """Send waiting tasks to the worker with the least to do; what has no room waits again."""
        with self._lock:
            worker = _best(self._workers)
            if worker is not None:
                # What is left is shared out evenly.
                share = min(worker.room, -(-len(self._backlog) // len(self._workers.by_slot)))
                tasks = deque(self._backlog.popleft() for _ in range(share))
                worker.sending.acquire()
            all_sending = [one.sending for one in self._workers.by_slot.values()]
            self._may_have_room = any(sending.locked() for sending in all_sending)
        if worker is None:
            # Threads that send do not tell when they have done so.
            for sending in all_sending:
                with sending:
                    pass
            return
        small: list[tuple[Task, EncodedTask]] = []
        while tasks and worker.has_room_beside:
            try:
                encoded = self._encoder.encode(tasks[0], worker.functions)
                if not encoded.beside:
                    small.append((tasks[0], encoded))
                elif not worker.send(tasks[0], encoded):
                    break
            # Pickling runs the code of classes, which must not end this thread.
            except BaseException as error:
                self._refuse(tasks[0], error)
            tasks.popleft()
        left = [*worker.send_small(small), *tasks]
        worker.sending.release()
        self._may_have_room = True
        if left:
            with self._lock:
                self._backlog.extendleft(reversed(left))

    def _send_now(self, worker: WorkerHandle, task: Task) -> bool:
        """Send a task from the caller's thread; return whether it needs no more care."""
        try:
            encoded = self._encoder.encode(task, worker.functions)
            with self._lock:
                # Another thread may have been faster, or the worker have ended.
                is_free = self._workers.by_slot.get(worker.slot) is worker and worker.room > 0
                if not is_free or not worker.sending.acquire(blocking=False):
                    encoded.release()
                    return False
            # Not with the lock: the answer may be there before this thread goes on.
            try:
                return worker.send(task, encoded)
            finally:
                worker.sending.release()
        except Exception as error:
            self._refuse(task, error)
            return True

    def _refuse(self, task: Task, error: BaseException) -> None:
        self._done.append((task[0], task[1], (False, error)))
        self._may_have_room = True
        self._workers.wake()


def _best(workers: Workers) -> WorkerHandle | None:
    """Return the worker with room that has the least to do; to be called with the lock."""
    with_room = (worker for worker in workers.by_slot.values() if worker.room > 0)
    return min(with_room, key=lambda worker: len(worker.inflight), default=None)


def _outcome(kind: int, value: Any) -> tuple[bool, Any]:
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
        return False, RemoteError(*pickle.loads(value))
    # Loading runs the code of classes.
    except BaseException as error:
        return False, error
