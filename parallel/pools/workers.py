"""The workers of a pool by slot: how they are started, watched and ended."""

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
# How often tasks and ends that take too long are looked for.
_TICK_S = 10e-3
_GRACE_S = 1.0
# So many starts fail before the next is put off, or the pool gives up.
_MOST_FAILED = 3
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.01, 1.0
# What a start raises for a fork server that was killed meanwhile, and at the limits of the system.
_START_ERRORS = (OSError, EOFError)


@dataclass
class Options:
    """How a pool's workers are to be, and what becomes of their tasks.

    Attributes:
        context: a multiprocessing context.
        beginnings: per worker, the function it begins with, and its arguments.
        work: the pool's `worker`.
        maxtasks: tasks until a worker is replaced.
    """

    context: Any
    beginnings: Sequence[tuple[Callable[..., object] | None, Sequence[Any]]]
    work: Callable[..., None]
    maxtasks: int | None
    is_daemon: bool = True
    copy_tensor: bool = True
    recurse: bool = False
    retries: int = 0
    task_timeout: float | None = None
    start_patience_s: float = 60.0


class Workers:
    """The workers of a pool. `wake` is for any thread, all else for the pool's one thread.

    Attributes:
        by_slot: the workers by their places.
        broken: what the pool is to end with, because workers do not come up.
    """

    def __init__(self, options: Options) -> None:
        if not sys.platform.startswith("linux"):
            raise NotImplementedError(f"pools of processes need Linux, this is {sys.platform}")
        self.by_slot: dict[int, WorkerHandle] = {}
        self.broken: BrokenPoolError | None = None
        self._options = options
        self._start_method: str = options.context.get_start_method()
        self._by_fd: dict[int, WorkerHandle] = {}
        # Starts that have failed since a worker was ready, or was lost that had been: by their own
        # doing and not, how many, and when the first was. Then, when the next may be tried.
        self._failures: dict[bool, tuple[int, float]] = {}
        self._next_start = 0.0
        self._is_up = self._is_ending = False
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        # Reentrant: a collection of garbage may run anything, also code that submits tasks.
        self._waking = threading.RLock()
        self._close = weakref.finalize(self, close, [self._wake_fd])
        self._close.atexit = False

    def wake(self) -> None:
        """Make `wait` return; for any thread."""
        # Not after it is closed: the number may be another file's by then.
        with self._waking:
            if self._close.alive:
                os.eventfd_write(self._wake_fd, 1)

    def wait(self, timeout: float) -> tuple[list[WorkerHandle], list[WorkerHandle]]:
        """Wait for something to happen; return who has written and who has ended.

        Those that have ended are waited for no more.
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
        """Start a worker in each place that has none, now or, after failures, a little later."""
        if self._next_start:
            return
        try:
            for slot in range(len(self._options.beginnings)):
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
            begin: Any = (options.work, *options.beginnings[slot], options.maxtasks, *packing)
            to_close = []
            if method == "fork":
                others = (fd for other in self.by_slot.values() for fd in other.fds)
                to_close = [self._epoll.fileno(), self._wake_fd, worker.fd, *others]
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
            worker.started(process, is_child=method != "forkserver")
        except BaseException:
            worker.close()
            raise
        for fd in (worker.fd, worker.death_fd):
            self._by_fd[fd] = worker
            self._epoll.register(fd, select.EPOLLIN)
        self.by_slot[slot] = worker

    def count_end(self, worker: WorkerHandle, exitcode: int | None, *, has_queues: bool) -> None:
        """Take note of how a worker has ended; `broken` tells whether the pool goes on."""
        if worker.failure is not None:
            self.broken = _failure_error(worker)
        elif not worker.is_ready:
            by_itself = _ends_by_itself(exitcode, self._start_method)
            self._count_failure(how_it_ended(exitcode), by_itself=by_itself)
        elif has_queues and exitcode != 0:
            self.broken = BrokenPoolError(
                f"the pool is broken: worker {worker.slot} (pid {worker.pid}) "
                f"{how_it_ended(exitcode)}, and which task it had is not known"
            )
        else:
            self.forget_failures()

    def _count_failure(
        self, how: str, *, by_itself: bool = False, error: BaseException | None = None
    ) -> None:
        """Count a start that has failed, by its own doing or not; `how` tells it in words.

        What a worker does by itself, the next one would do as well. One that is killed may have
        been in somebody's way, or memory was scarce for a moment: then the next are given time.
        """
        now = time.monotonic()
        count, since = self._failures.get(by_itself, (0, now))
        count += 1
        self._failures[by_itself] = count, since
        if count < _MOST_FAILED or self.broken is not None:
            return
        is_final = by_itself or now - since >= self._options.start_patience_s
        if is_final and not any(worker.is_ready for worker in self.by_slot.values()):
            self.broken = BrokenPoolError(
                f"the pool is broken: within {now - since:.1f} s no worker became ready, and "
                f"{count} ended; the last {how}. Does the initializer end the process? Does the "
                'script start pools outside of `if __name__ == "__main__":`?'
            )
            self.broken.__cause__ = error
            return
        if count == _MOST_FAILED:
            _log.warning("%d workers of a pool ended while they started; the last %s", count, how)
        delay_s = _FIRST_DELAY_S * 2 ** min(count - _MOST_FAILED, 16)
        self._next_start = now + min(delay_s, _LONGEST_DELAY_S)

    def forget_failures(self) -> None:
        """Take note that workers can start."""
        self._next_start = 0.0
        self._failures.clear()

    def stop(self) -> None:
        """Make workers end when they have done what they have."""
        for worker in self.by_slot.values():
            worker.stop()

    def terminate(self) -> None:
        """Make workers end now; `check_clocks` sees to those that do not."""
        self._is_ending = True
        for worker in self.by_slot.values():
            if worker.kill_at is None:
                worker.is_stopping = True
                worker.kill_at = time.monotonic() + _GRACE_S
                worker.kill(signal.SIGTERM)

    def check_clocks(self) -> bool:
        """Kill workers whose time is up; return whether it is time to start missing ones."""
        now, limit = time.monotonic(), self._options.task_timeout
        for worker in self.by_slot.values():
            if worker.kill_at is not None and now >= worker.kill_at:
                worker.kill()
                worker.kill_at = now + _GRACE_S
            is_over = limit is not None and worker.inflight and now - worker.since > limit
            if is_over and not worker.is_overdue:
                worker.is_overdue = True
                worker.kill()
        is_due = 0 < self._next_start <= now
        if is_due:
            self._next_start = 0.0
        return is_due

    @property
    def tick_s(self) -> float:
        """How often `check_clocks` is to be called, in seconds."""
        has_clock = self._next_start > 0 or self._is_ending
        if not has_clock and self._options.task_timeout is not None:
            has_clock = any(worker.inflight for worker in self.by_slot.values())
        return _TICK_S if has_clock else math.inf

    def close(self) -> None:
        self._epoll.close()
        with self._waking:
            self._close()


# Ends of a fork server's children are not known once it has been killed: this is what they get.
_UNKNOWN_TO_FORK_SERVER = 255


def _ends_by_itself(exitcode: int | None, start_method: str) -> bool:
    """Return whether a process has left, or crashed, by its own doing: a next one would as well."""
    if exitcode is None or (start_method, exitcode) == ("forkserver", _UNKNOWN_TO_FORK_SERVER):
        return False
    return exitcode >= 0 or -exitcode in CRASHES


def _failure_error(worker: WorkerHandle) -> BrokenPoolError:
    reason = worker.failure
    assert reason is not None
    told = remote_report(reason) or str(reason)
    what = "`worker`" if worker.is_ready else "the initializer"
    error = BrokenPoolError(f"the pool is broken: {what} failed in worker {worker.slot}:\n{told}")
    error.__cause__ = reason
    return error


def death_error(
    task: str, worker: WorkerHandle, exitcode: int | None, timeout: float | None
) -> WorkerDiedError:
    """Return the error of a task that ended with its worker, killed after `timeout` or not."""
    known: dict[str, Any] = {"worker": worker.slot, "pid": worker.pid, "exitcode": exitcode}
    where = f"worker {worker.slot} (pid {worker.pid})"
    if worker.is_overdue:
        text = f"{task} ran longer than task_timeout={timeout:g} s; {where} was killed and replaced"
        return TaskTimeoutError(text, task=task, **known)
    how = how_it_ended(exitcode)
    if exitcode is not None and exitcode >= 0:
        how += " (os._exit or sys.exit in the task)"
    verb = "are" if task.startswith("tasks") else "is"
    return WorkerDiedError(f"{task} {verb} lost: {where} {how}", task=task, **known)
