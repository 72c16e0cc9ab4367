"""One worker as its pool sees it: the process, and the tasks it has been sent."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

from . import _link as link
from ._encoder import Parcel, Task
from ._pipes import Pipes

# Work that is sent ahead of its turn, in seconds: more than the pool takes to see a result.
_AHEAD_S = 1e-3
# Tasks that run longer are not sent ahead.
_LONG_S = 20e-3
# Of tasks that travel beside the pipe: their memory, and descriptors, are taken while they wait.
_MOST_BESIDE = 2


class Lane:
    """One worker. The pool's lock guards it, except where said.

    Args:
        slot: the worker's place in the pool.
        counters: the shared memory in which workers say what they have begun.
        maxtasks: tasks until the worker ends, None for no limit.
    """

    def __init__(self, slot: int, counters: mmap.mmap, maxtasks: int | None) -> None:
        self.slot = slot
        self.pipes = Pipes()
        self.process: BaseProcess | None = None
        self.pid = 0
        # Readable when the process has ended.
        self.death_fd = -1
        self.is_ready = self.is_stopping = self.is_overdue = False
        # Is held by the thread that is sending. A new one each time: then it does not matter where
        # that thread is interrupted.
        self.claim = threading.Lock()
        self.failure: bytes | None = None
        self.kill_at: float | None = None
        # The tasks sent and not answered, by number, oldest first; those of them with more beside.
        self.inflight: dict[int, Task] = {}
        self._beside: set[int] = set()
        # Jobs whose function the worker was sent, and those whose it has for certain; the task that
        # brings it a large one.
        self.taught: set[int] = set()
        self.known: set[int] = set()
        self._teaching = 0
        # Jobs to be forgotten; for each command that the worker may not have read yet, the number
        # of the last task before it.
        self._to_forget: deque[int] = deque()
        self._commands: deque[int] = deque()
        self._is_full = False
        self.last_event = time.monotonic()
        self._counters = counters
        self._place = slot * link.COUNTER.size
        self._maxtasks = maxtasks
        self._number = self._answered = 0
        # Seconds per task, smoothed; at first as of a task that is worth one more ahead.
        self._pace = _AHEAD_S
        link.COUNTER.pack_into(counters, self._place, 0, 0.0)

    def started(self, process: BaseProcess, *, is_child: bool) -> None:
        """Take the process in; a process that is no child of this one tells its end in its way."""
        self.process = process
        self.pid = process.pid or 0
        self.pipes.close_theirs()
        if is_child:
            # Code of the user's may already have waited for it.
            with contextlib.suppress(ProcessLookupError):
                self.death_fd = os.pidfd_open(self.pid)
                return
        self.death_fd = os.dup(process.sentinel)

    @property
    def room(self) -> int:
        """How many tasks the worker can be sent now; the lock is not needed."""
        used = len(self.inflight)
        if not self.is_ready or self.claim.locked() or self.is_stopping or not self.has_room_beside:
            return 0
        depth = 1
        if self._pace < _LONG_S:
            depth = min(self.pipes.most_ahead, 1 + max(1, int(_AHEAD_S / self._pace)))
        # Not one by one.
        if used * 2 > depth:
            return 0
        if self._maxtasks is not None:
            depth = min(depth, self._maxtasks - self._answered)
        return depth - used

    @property
    def has_room_beside(self) -> bool:
        """Whether the worker can be sent more, as far as large tasks and functions go."""
        return not self._teaching and not self._is_full and len(self._beside) < _MOST_BESIDE

    @property
    def begun(self) -> tuple[int, float]:
        """The number of the task begun last, and when; the lock is not needed."""
        number, since = link.COUNTER.unpack_from(self._counters, self._place)
        return number, since

    def send(self, task: Task, parcel: Parcel, *then: partial[Any]) -> bool:
        """Send a task and do what is then to be done, all of it or nothing, whatever interrupts.

        Returns:
            Whether there was room.

        Raises:
            OSError: the descriptors cannot be sent, or there is no room and never will be.
        """
        packet = self._packet(task, parcel)
        number = self._number
        # Before it is sent: its answer may be fast.
        enter = [partial(self.inflight.__setitem__, number, task)]
        if parcel.beside:
            enter.append(partial(self._beside.add, number))
            if parcel.flags & link.FUNCTION_BESIDE:
                enter.append(partial(setattr, self, "_teaching", number))
        try:
            self.pipes.send(number, packet, parcel.beside, enter, then)
        except OSError as error:
            if number in self.inflight:
                self.taken(number)
            if isinstance(error, (BrokenPipeError, ConnectionResetError)):
                # The worker has ended, perhaps with messages unread, which is soon noticed.
                self.is_stopping = True
            elif isinstance(error, BlockingIOError) and self.inflight:
                self._is_full = True
            else:
                raise
            return False
        return True

    def send_small(self, tasks: Sequence[tuple[Task, Parcel]]) -> list[Task]:
        """Send tasks that have nothing beside them; return those there was no room for."""
        first = self._number + 1
        packets = [self._packet(task, parcel) for task, parcel in tasks]
        sent = self.pipes.send_small(packets)
        self.inflight.update(enumerate((task for task, _ in tasks[:sent]), first))
        self._is_full = sent < len(tasks)
        return [task for task, _ in tasks[sent:]]

    def _packet(self, task: Task, parcel: Parcel) -> bytes:
        """Return what goes through the pipe."""
        if not self.inflight:
            self.last_event = time.monotonic()
        self._number = number = self._number + 1
        if parcel.flags & link.STORE:
            self.taught.add(task[0])
        header = link.TASK.pack(number, task[0], parcel.size, parcel.kind, parcel.flags)
        return header + parcel.inline

    def stop(self) -> None:
        """Let the worker end after what it has been sent."""
        self.is_stopping = True
        self.pipes.command(link.STOP)

    def take_back(self) -> list[Task]:
        """Return the tasks that the worker has not taken; it will not get them any more.

        Nor others in their place, until it has answered.
        """
        self._pace = 2 * _LONG_S
        return [self.taken(number) for number in self.pipes.take_back()]

    def taken(self, number: int, *, is_value: bool = False) -> Task:
        """Return a task that is answered or comes back, and forget it."""
        self._beside.discard(number)
        if number == self._teaching:
            self._teaching = 0
        task = self.inflight.pop(number)
        # After an error the worker may not even have been able to make the function.
        if is_value and task[0] in self.taught:
            self.known.add(task[0])
        return task

    def answered(self, count: int, now: float) -> None:
        """Keep the books after some tasks were answered; a worker that has done all is stopped."""
        self._pace = max(1e-7, (self._pace + (now - self.last_event) / count) / 2)
        self.last_event = now
        self._is_full = False
        self._answered += count
        if self._to_forget:
            self.forget()
        if self._maxtasks is not None and self._answered >= self._maxtasks:
            self.stop()

    def forget(self, *jobs: int) -> None:
        """Have the worker drop the functions of jobs, now or after some answers.

        There are never so many commands that there would be no room for tasks or to stop.
        """
        for job in self.taught.intersection(jobs):
            self.taught.discard(job)
            self.known.discard(job)
            self._to_forget.append(job)
        begun, _ = self.begun
        while self._commands and self._commands[0] < begun:
            self._commands.popleft()
        while self._to_forget and len(self._commands) < self.pipes.most_commands:
            self.pipes.command(link.FORGET, self._to_forget.popleft())
            self._commands.append(self._number)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send the process a signal, if it is still there."""
        if self.process is not None and self.process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def close(self) -> int | None:
        """Close the pool's ends; return the exit code of the process, which has ended."""
        self.pipes.close()
        link.close_all([self.death_fd])
        process = self.process
        if process is None:
            self.pipes.close_theirs()
            return None
        process.join()
        exitcode = process.exitcode
        # Code of the user's may have waited for the process first.
        if exitcode is None:
            _give_up(process)
        else:
            process.close()
        self.process = None
        return exitcode


def _give_up(process: BaseProcess) -> None:
    """Close what multiprocessing keeps open of a process whose exit code somebody else has read."""
    popen: Any = process._popen  # type: ignore[attr-defined]
    popen.returncode = os.EX_OK
    process.close()
