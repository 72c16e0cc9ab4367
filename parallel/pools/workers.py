"""The workers of a pool by slot: how they are started, and what to say of those that have ended."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any

from ..errors import BrokenPoolError, TaskTimeoutError, WorkerDiedError
from ..processes import CRASHES, how_it_ended
from ..transport.remote_errors import rebuild
from ..transport.wire import release
from . import protocol
from .encoder import Encoder
from .worker import Settings, main
from .worker import worker as run_tasks
from .worker_handle import WorkerHandle

_GRACE_S = 1.0


class Workers:
    """The workers of a pool. `wake` is for any thread, all else for the pool's one thread.

    Attributes:
        by_slot: the workers by their places.
        wake_fd: the eventfd that makes `wait` return, -1 when it is closed.
    """

    def __init__(self, plan: Plan, lock: threading.RLock) -> None:
        self.by_slot: dict[int, WorkerHandle] = {}
        self._plan = plan
        self._lock = lock
        self._by_fd: dict[int, WorkerHandle] = {}
        self._counters = Counters(len(plan.initializers))
        self._epoll = select.epoll()
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self.wake_fd, select.EPOLLIN)

    def wake(self) -> None:
        """Make `wait` return."""
        # Not after it is closed: the number may be another file's by then.
        with self._lock:
            if self.wake_fd >= 0:
                os.eventfd_write(self.wake_fd, 1)

    def wait(self, timeout: float | None) -> tuple[list[WorkerHandle], list[WorkerHandle]]:
        """Wait for something to happen; return who has written and who has ended."""
        written, ended = [], []
        for fd, _ in self._epoll.poll(timeout):
            worker = self._by_fd.get(fd)
            if worker is None:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self.wake_fd)
            elif fd == worker.death_fd:
                ended.append(worker)
            else:
                written.append(worker)
        return written, ended

    def start_missing(self, encoder: Encoder) -> None:
        """Start a worker in each place that has none."""
        for slot in range(len(self._plan.initializers)):
            if slot in self.by_slot:
                continue
            own = [self._epoll.fileno(), self.wake_fd]
            for worker in self.by_slot.values():
                own += [*worker.pipes.fds, worker.death_fd]
            worker = start_worker(self._plan, slot, self._counters, encoder, forked_close=own)
            for fd in (worker.pipes.results, worker.death_fd):
                self._by_fd[fd] = worker
                self._epoll.register(fd, select.EPOLLIN)
            with self._lock:
                self.by_slot[slot] = worker

    def ignore(self, worker: WorkerHandle) -> None:
        """Wait for nothing more of a worker."""
        for fd in (worker.pipes.results, worker.death_fd):
            self._epoll.unregister(fd)
            del self._by_fd[fd]

    def stop(self) -> None:
        """Let workers end after what they have been sent."""
        for worker in self.by_slot.values():
            if not worker.is_stopping:
                worker.stop()

    def terminate(self) -> None:
        """Make workers end now; `check_kills` sees to those that do not."""
        for worker in self.by_slot.values():
            if worker.kill_at is None:
                worker.is_stopping = True
                worker.kill_at = time.monotonic() + _GRACE_S
                worker.kill(signal.SIGTERM)

    def check_kills(self, now: float) -> None:
        """Kill workers whose time is up."""
        for worker in self.by_slot.values():
            if worker.kill_at is not None and now >= worker.kill_at:
                worker.kill()
                worker.kill_at = now + _GRACE_S

    def check_timeout(self, limit: float, now: float) -> None:
        """Kill workers whose task runs longer than `limit` seconds."""
        for worker in self.by_slot.values():
            begun, since = worker.begun
            if begun in worker.inflight and now - since > limit and not worker.is_overdue:
                worker.is_overdue = True
                worker.kill()

    def next_check_s(self, limit: float | None, now: float) -> float | None:
        """Return in how many seconds one of the checks has something to do."""
        checks = []
        for worker in self.by_slot.values():
            if worker.kill_at is not None:
                checks.append(max(1e-3, worker.kill_at - now))
            elif limit is not None and worker.inflight:
                begun, since = worker.begun
                # One that has not begun what it has been sent will do so at once.
                checks.append(max(1e-3, since + limit - now) if begun in worker.inflight else 0.02)
        return min(checks, default=None)

    @property
    def has_ready(self) -> bool:
        """Whether a worker is there that takes tasks."""
        return any(worker.is_ready for worker in self.by_slot.values())

    @property
    def is_uneven(self) -> bool:
        """Whether one worker has tasks waiting and another none at all."""
        workers = self.by_slot.values()
        return any(len(worker.inflight) > 1 for worker in workers) and any(
            worker.is_ready and not worker.inflight for worker in workers
        )

    def close(self) -> None:
        """Let go of all that is open."""
        self._epoll.close()
        self._counters.close()
        with self._lock:
            wake_fd, self.wake_fd = self.wake_fd, -1
            os.close(wake_fd)


_log = logging.getLogger(__name__)
# So many starts fail before the next is put off, or the pool gives up.
_MOST_FAILED = 3
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.01, 1.0
# What a start raises for a fork server that was killed meanwhile, and at the limits of the system.
START_ERRORS = (OSError, EOFError)


@dataclass
class Plan:
    """How a pool's workers are to be, and what becomes of their tasks.

    Attributes:
        context: a multiprocessing context.
        start_method: its name.
        initializers: per worker, the function it begins with, and its arguments.
        work: the pool's `worker`.
        maxtasks: tasks until a worker is replaced.
        is_daemon: whether workers may not have children of their own.
        copy_tensor: whether tensors are copied, or passed by reference.
        recurse: see `pickling.Pickler`.
        retries: how often a task that was lost is run again.
        task_timeout: seconds after which a task's worker is killed.
        start_patience_s: see `pool.Pool`.
    """

    context: BaseContext
    start_method: str
    initializers: Sequence[tuple[Callable[..., object] | None, Sequence[Any]]]
    work: Callable[..., None] = run_tasks
    maxtasks: int | None = None
    is_daemon: bool = True
    copy_tensor: bool = True
    recurse: bool = False
    retries: int = 0
    task_timeout: float | None = None
    start_patience_s: float = 60.0


class FailedStarts:
    """Starts that have failed since a worker was ready, or was lost that had been.

    What a worker does by itself, the next one would do as well. One that is killed may have been in
    somebody's way, or memory was scarce for a moment: then the next ones are given time.

    Args:
        plan: how the workers are to be.

    Attributes:
        next_at: when the next worker is to be started (monotonic seconds), 0 for at once.
    """

    def __init__(self, plan: Plan) -> None:
        self._start_method = plan.start_method
        self._patience_s = plan.start_patience_s
        self.forget()

    def forget(self) -> None:
        """Begin to count anew."""
        self.next_at = 0.0
        # Of both causes: how many, and when the first was.
        self._counts: dict[bool, tuple[int, float]] = {}

    def add_death(self, exitcode: int | None, *, is_only: bool) -> BrokenPoolError | None:
        """Count a worker that ended before it was ready; return what the pool is to end with.

        Args:
            is_only: no other worker is ready.
        """
        by_itself = ends_by_itself(exitcode, self._start_method)
        return self._add(how_it_ended(exitcode), by_itself=by_itself, is_only=is_only)

    def add_error(self, error: BaseException, *, is_only: bool) -> BrokenPoolError | None:
        """Count a process that could not be started; return what the pool is to end with."""
        how = f"could not be started: {error!r}"
        broken = self._add(how, by_itself=False, is_only=is_only)
        if broken is not None:
            broken.__cause__ = error
        return broken

    def _add(self, how: str, *, by_itself: bool, is_only: bool) -> BrokenPoolError | None:
        now = time.monotonic()
        count, since = self._counts.get(by_itself, (0, now))
        count += 1
        self._counts[by_itself] = count, since
        if count < _MOST_FAILED:
            return None
        if is_only and (by_itself or now - since >= self._patience_s):
            return start_error(count, how, now - since)
        if count == _MOST_FAILED:
            _log.warning("%d workers of a pool ended while they started; the last %s", count, how)
        delay_s = _FIRST_DELAY_S * 2 ** min(count - _MOST_FAILED, 16)
        self.next_at = now + min(delay_s, _LONGEST_DELAY_S)
        return None


class Counters:
    """The shared memory in which workers say what they have begun."""

    def __init__(self, workers: int) -> None:
        self.fd = os.memfd_create("stepwrap-pool", os.MFD_CLOEXEC)
        size = workers * protocol.COUNTER.size
        os.ftruncate(self.fd, size)
        self.memory = mmap.mmap(self.fd, size)

    def close(self) -> None:
        """Let go of the memory."""
        self.memory.close()
        os.close(self.fd)


def start_worker(
    plan: Plan, slot: int, counters: Counters, encoder: Encoder, *, forked_close: Sequence[int]
) -> WorkerHandle:
    """Start a worker. To be called in the pool's thread: workers end with the thread they are of.

    Args:
        forked_close: what is open in the pool besides the worker, for a forked worker to close.

    Raises:
        Exception: the process cannot be started, or its initializer not be pickled.
    """
    worker = WorkerHandle(slot, counters.memory, plan.maxtasks)
    try:
        settings = Settings(
            *worker.pipes.theirs, counters.fd, slot=slot, work=plan.work, maxtasks=plan.maxtasks
        )
        settings.start_method = plan.start_method
        settings.is_timed = plan.task_timeout is not None
        settings.copy_tensor, settings.recurse = plan.copy_tensor, plan.recurse
        if plan.start_method == "fork":
            settings.initializer = plan.initializers[slot]
            settings.to_close = [*forked_close, *worker.pipes.fds]
        else:
            packed = encoder.pack(plan.initializers[slot])
            try:
                worker.pipes.begin(packed)
            finally:
                release(packed)
        process = plan.context.Process(  # type: ignore[attr-defined]
            target=main,
            args=(settings,),
            name=f"PoolWorker-{slot}",
            daemon=plan.is_daemon,
        )
        process.start()
        worker.started(process, is_child=plan.start_method != "forkserver")
    except BaseException:
        worker.close()
        raise
    return worker


# Ends of a fork server's children are not known once it has been killed: this is what they get.
_UNKNOWN_TO_FORK_SERVER = 255


def ends_by_itself(exitcode: int | None, start_method: str) -> bool:
    """Return whether a process has left, or crashed, by its own doing: a next one would as well."""
    if exitcode is None or (start_method, exitcode) == ("forkserver", _UNKNOWN_TO_FORK_SERVER):
        return False
    return exitcode >= 0 or -exitcode in CRASHES


def death_error(
    task: str, worker: int, pid: int, exitcode: int | None, timeout: float | None
) -> WorkerDiedError:
    """Return the error of a task that ended with its worker; `timeout`: it was killed for that."""
    known = {"task": task, "worker": worker, "pid": pid, "exitcode": exitcode}
    where = f"worker {worker} (pid {pid})"
    if timeout is not None:
        text = f"{task} ran longer than task_timeout={timeout:g} s; {where} was killed and replaced"
        return TaskTimeoutError(text, **known)  # type: ignore[arg-type]
    how = how_it_ended(exitcode)
    if exitcode is not None and exitcode >= 0:
        how += " (os._exit or sys.exit in the task)"
    verb = "are" if task.startswith("tasks") else "is"
    return WorkerDiedError(f"{task} {verb} lost: {where} {how}", **known)  # type: ignore[arg-type]


def initializer_error(worker: int, description: bytes) -> BrokenPoolError:
    """Return the error of a pool whose initializer raises."""
    reason = rebuild(description)
    told = str(reason.__cause__ or reason).strip().strip('"').strip()
    error = BrokenPoolError(
        f"the pool is broken: the initializer failed in worker {worker}:\n{told}"
    )
    error.__cause__ = reason
    return error


def start_error(starts: int, how: str, seconds: float) -> BrokenPoolError:
    """Return the error of a pool whose workers do not live to take a task."""
    return BrokenPoolError(
        f"the pool is broken: within {seconds:.1f} s no worker became ready, and {starts} ended; "
        f"the last {how}. Does the initializer end the process? Does the script start pools "
        'outside of `if __name__ == "__main__":`?'
    )
