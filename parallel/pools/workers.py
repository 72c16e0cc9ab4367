"""Start, monitor and end the worker processes of a pool."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...transport.descriptors import close
from ...transport.remote_errors import remote_report
from ..errors import BrokenPoolError, TaskTimeoutError, WorkerDiedError
from ..processes import CRASHES, how_it_ended
from . import worker as protocol
from .worker_handle import WorkerHandle

_log = logging.getLogger(__name__)
# How often to check for tasks and terminations that take too long.
_TICK_S = 10e-3
_GRACE_S = 1.0
# After this many failed starts, the next one is delayed, or the pool is broken.
_MAX_FAILURES = 3
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.01, 1.0
# A start raises these if the fork server was killed, or a limit of the system is reached.
_START_ERRORS = (OSError, EOFError)


@dataclass
class Options:
    """The settings of a pool's workers and tasks.

    Attributes:
        context: a multiprocessing context.
        initializers: the initializer (or None) of each worker, and its arguments.
        work: the pool's ``worker``.
        maxtasks: the number of tasks after which a worker is replaced. ``Pool`` describes the rest.
    """

    context: Any
    initializers: Sequence[tuple[Callable[..., object] | None, Sequence[Any]]]
    work: Callable[..., None]
    maxtasks: int | None
    is_daemon: bool = True
    copy_tensor: bool = True
    recurse: bool = False
    retries: int = 0
    task_timeout: float | None = None
    start_patience_s: float = 60.0


class Workers:
    """The workers of a pool. Threads other than the pool's may only call ``wake``.

    Attributes:
        by_slot: the workers by their index.
        broken: the error with which the pool must end, because workers fail to start.
    """

    def __init__(self, options: Options) -> None:
        if not sys.platform.startswith("linux"):
            raise NotImplementedError(f"pools of processes need Linux, this is {sys.platform}")
        self.by_slot: dict[int, WorkerHandle] = {}
        self.broken: BrokenPoolError | None = None
        self._options = options
        self._start_method: str = options.context.get_start_method()
        self._by_fd: dict[int, WorkerHandle] = {}
        # The number of failed starts since a worker was ready, and the time of the first of them.
        # The key is True for workers that exited or crashed. It is False for workers that were
        # killed and for processes that could not be started.
        self._failures: dict[bool, tuple[int, float]] = {}
        # The earliest time of the next start, 0 if it is not delayed.
        self._next_start = 0.0
        self._is_up = self._is_ending = False
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        # Reentrant: garbage collection may run code that submits tasks.
        self._waking = threading.RLock()
        self._close = weakref.finalize(self, close, [self._wake_fd])
        self._close.atexit = False

    def wake(self) -> None:
        """Make ``wait`` return. Any thread may call this."""
        # After the descriptor is closed, its number may belong to another file.
        with self._waking:
            if self._close.alive:
                os.eventfd_write(self._wake_fd, 1)

    def wait(self, timeout: float) -> tuple[list[WorkerHandle], list[WorkerHandle]]:
        """Wait for an event; return the workers that have written and those that have ended.

        Later calls ignore the workers that have ended.
        """
        written, ended = [], []
        for fd, _ in self._epoll.poll(None if timeout == math.inf else timeout):
            worker = self._by_fd.get(fd)
            if worker is None:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
            elif fd == worker.death_fd:
                ended.append(worker)
            else:
                written.append(worker)
        for worker in ended:
            for fd in (worker.fd, worker.death_fd):
                self._epoll.unregister(fd)
                del self._by_fd[fd]
        return written, ended

    def start_missing(self, queues: tuple[Any, Any] | None) -> None:
        """Start the missing workers, unless the start is delayed after failures."""
        if self._next_start:
            return
        try:
            for slot in range(len(self._options.initializers)):
                if slot not in self.by_slot:
                    self._start(slot, queues)
        except _START_ERRORS as error:
            if not self._is_up:
                raise
            self._count_failure(f"could not be started: {error!r}", error=error)
        self._is_up = True

    def _start(self, slot: int, queues: tuple[Any, Any] | None) -> None:
        options, method = self._options, self._start_method
        packing = (options.copy_tensor, options.recurse)
        worker = WorkerHandle(slot, options.maxtasks, packing)
        try:
            begin: Any = (options.work, *options.initializers[slot], options.maxtasks, *packing)
            to_close = []
            if method == "fork":
                other_fds = (fd for other in self.by_slot.values() for fd in other.fds)
                to_close = [self._epoll.fileno(), self._wake_fd, worker.fd, *other_fds]
            else:
                worker.begin(begin)
                begin = None
            fds = (worker.theirs.fileno(), worker.memory_fd)
            inherited = [protocol.InheritedDescriptor(fd) for fd in fds]
            process = options.context.Process(
                target=protocol.main,
                args=(inherited, os.getpid(), method, queues, to_close, begin),
                name=f"PoolWorker-{slot}",
                daemon=options.is_daemon,
            )
            process.start()
            worker.set_process(process, is_child=method != "forkserver")
        except BaseException:
            worker.close()
            raise
        for fd in (worker.fd, worker.death_fd):
            self._by_fd[fd] = worker
            self._epoll.register(fd, select.EPOLLIN)
        self.by_slot[slot] = worker

    def count_end(self, worker: WorkerHandle, exitcode: int | None, *, has_queues: bool) -> None:
        """Record the end of a worker; set ``broken`` if the pool cannot continue."""
        if worker.failure is not None:
            self.broken = _failure_error(worker)
        elif not worker.is_ready:
            by_itself = _ended_by_itself(exitcode, self._start_method)
            self._count_failure(how_it_ended(exitcode), by_itself=by_itself)
        elif has_queues and (exitcode != 0 or not worker.is_done):
            self.broken = BrokenPoolError(
                f"the pool is broken: worker {worker.slot} (pid {worker.pid}) "
                f"{how_it_ended(exitcode)}, and it is not known which task is lost"
            )
        else:
            self.forget_failures()

    def _count_failure(
        self, how: str, *, by_itself: bool = False, error: BaseException | None = None
    ) -> None:
        """Count a failed start.

        If workers end by themselves, the next ones would too, so the pool soon gives up. If they
        are killed or cannot be started, the reason (such as scarce memory) may pass, so the pool
        retries for longer.

        Args:
            how: a description of how the worker ended, or of why it could not be started.
            by_itself: whether the worker exited or crashed; False if it was killed or not started.
            error: the exception of a process that could not be started.
        """
        now = time.monotonic()
        count, since = self._failures.get(by_itself, (0, now))
        count += 1
        self._failures[by_itself] = count, since
        if count < _MAX_FAILURES or self.broken is not None:
            if error is not None:
                # The end of a process would cause the next start, but there was no process.
                self._next_start = now + _FIRST_DELAY_S
            return
        is_final = by_itself or now - since >= self._options.start_patience_s
        if is_final and not any(worker.is_ready for worker in self.by_slot.values()):
            self.broken = BrokenPoolError(
                f"the pool is broken: {count} workers failed to start within {now - since:.1f} s; "
                f"the last {how}. Does the initializer end the process? Does the script start "
                'pools outside of `if __name__ == "__main__":`?'
            )
            self.broken.__cause__ = error
            return
        if count == _MAX_FAILURES:
            _log.warning("%d workers of a pool failed to start; the last %s", count, how)
        delay_s = _FIRST_DELAY_S * 2 ** min(count - _MAX_FAILURES, 16)
        self._next_start = now + min(delay_s, _LONGEST_DELAY_S)

    def forget_failures(self) -> None:
        """Reset the count of failed starts after a worker became ready."""
        self._next_start = 0.0
        self._failures.clear()

    def stop(self) -> None:
        """Make the workers end after their remaining tasks."""
        for worker in self.by_slot.values():
            worker.stop()

    def terminate(self) -> None:
        """Send SIGTERM to the workers; ``check_deadlines`` kills those that do not end."""
        self._is_ending = True
        for worker in self.by_slot.values():
            if worker.kill_at is None:
                worker.is_stopping = True
                worker.kill_at = time.monotonic() + _GRACE_S
                worker.kill(signal.SIGTERM)

    def check_deadlines(self) -> bool:
        """Kill workers that exceed a deadline; return whether a delayed start is due."""
        now, limit = time.monotonic(), self._options.task_timeout
        for worker in self.by_slot.values():
            if worker.kill_at is not None and now >= worker.kill_at:
                worker.kill()
                worker.kill_at = now + _GRACE_S
            is_late = limit is not None and worker.inflight and now - worker.since > limit
            if is_late and not worker.is_overdue:
                worker.is_overdue = True
                worker.kill()
        is_due = 0 < self._next_start <= now
        if is_due:
            self._next_start = 0.0
        return is_due

    @property
    def tick_s(self) -> float:
        """How often ``check_deadlines`` must be called, in seconds."""
        has_deadline = self._next_start > 0 or self._is_ending
        if not has_deadline and self._options.task_timeout is not None:
            has_deadline = any(worker.inflight for worker in self.by_slot.values())
        return _TICK_S if has_deadline else math.inf

    def close(self) -> None:
        self._epoll.close()
        with self._waking:
            self._close()


# The exit code that multiprocessing returns if the fork server was killed; the real one is unknown.
_UNKNOWN_TO_FORK_SERVER = 255


def _ended_by_itself(exitcode: int | None, start_method: str) -> bool:
    """Return whether a process exited or crashed, and was not killed."""
    if exitcode is None or (start_method, exitcode) == ("forkserver", _UNKNOWN_TO_FORK_SERVER):
        return False
    return exitcode >= 0 or -exitcode in CRASHES


def _failure_error(worker: WorkerHandle) -> BrokenPoolError:
    reason = worker.failure
    assert reason is not None
    text = remote_report(reason) or str(reason)
    culprit = "`worker`" if worker.is_ready else "the initializer"
    error = BrokenPoolError(
        f"the pool is broken: {culprit} failed in worker {worker.slot}:\n{text}"
    )
    error.__cause__ = reason
    return error


def death_error(
    task: str, worker: WorkerHandle, exitcode: int | None, timeout: float | None
) -> WorkerDiedError:
    """Return the error of a task whose worker has died or was killed after ``timeout`` seconds."""
    details: dict[str, Any] = {"worker": worker.slot, "pid": worker.pid, "exitcode": exitcode}
    where = f"worker {worker.slot} (pid {worker.pid})"
    if worker.is_overdue:
        text = f"{task} ran longer than task_timeout={timeout:g} s; {where} was killed and replaced"
        return TaskTimeoutError(text, task=task, **details)
    how = how_it_ended(exitcode)
    if exitcode is not None and exitcode >= 0:
        how += " (os._exit in the task?)"
    verb = "are" if task.startswith("items ") else "is"
    return WorkerDiedError(f"{task} {verb} lost: {where} {how}", task=task, **details)
