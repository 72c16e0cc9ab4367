"""The pool's side of one worker: its process, its pipes, and the tasks it has been sent."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import socket
import time
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from . import _link as link
from ._encoder import Parcel, Task
from ._wire import Packed

# Linux; the module fcntl names them from Python 3.10 on some systems only.
_F_SETPIPE_SZ = 1031
_F_GETPIPE_SZ = 1032
_SLOTS = 64
# Work that is sent ahead of its turn, in seconds: more than the pool takes to see a result.
_AHEAD_S = 1e-3
# Tasks that run longer are not sent ahead.
_LONG_S = 20e-3
# Of tasks that travel beside the pipe: their memory, and descriptors, are taken while they wait.
_MOST_BESIDE = 2
_READ_BYTES = 1 << 18


class Ends(NamedTuple):
    """The descriptors of one worker's channel that its process is given."""

    tasks: int
    results: int
    beside: int


class Lane:
    """One worker as the pool sees it. The pool's lock guards it, except where said.

    Args:
        slot: the worker's place in the pool.
        counters: the shared memory in which workers say what they have begun.
        maxtasks: tasks until the worker ends, None for no limit.
    """

    def __init__(self, slot: int, counters: mmap.mmap, maxtasks: int | None) -> None:
        self.slot = slot
        self.process: BaseProcess | None = None
        self.pid = 0
        # Readable when the process has ended.
        self.death_fd = -1
        self.is_ready = self.is_claimed = self.is_stopping = self.is_dead = False
        self.failure: bytes | None = None
        self.is_overdue = False
        self.kill_at: float | None = None
        # The tasks sent and not answered, by number, oldest first.
        self.inflight: dict[int, Task] = {}
        # Jobs whose function the worker was sent, and those whose it has for certain; the task that
        # brings it a large one.
        self.taught: set[int] = set()
        self.known: set[int] = set()
        self.teaching = 0
        self.beside_inflight: set[int] = set()
        self.last_event = time.monotonic()
        self._counters = counters
        self._place = slot * link.COUNTER.size
        self._maxtasks = maxtasks
        self._number = self._answered = 0
        # Seconds per task, smoothed; at first as of a task that is worth one more ahead.
        self._pace = _AHEAD_S
        self._buffer = b""
        self._open()

    def _open(self) -> None:
        link.COUNTER.pack_into(self._counters, self._place, 0, 0.0)
        reading, self._tasks = os.pipe2(os.O_CLOEXEC | os.O_DIRECT)
        self.results, writing = os.pipe2(os.O_CLOEXEC)
        self._beside, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._beside.setblocking(False)
        os.set_blocking(self._tasks, False)
        os.set_blocking(self.results, False)
        # Opened anew: not to wait is a property of an opened file, and the worker does wait.
        self._taking = os.open(f"/proc/self/fd/{reading}", os.O_RDONLY | os.O_NONBLOCK)
        # Beyond the system's share of a user it stays smaller.
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._tasks, _F_SETPIPE_SZ, _SLOTS * link.PACKET_BYTES)
        size = fcntl.fcntl(self._tasks, _F_GETPIPE_SZ)
        self._most_ahead = max(1, size // link.PACKET_BYTES - 4)
        self.ends = Ends(reading, writing, theirs.detach())

    def own_fds(self) -> list[int]:
        """Return the descriptors that only the pool may have."""
        return [self._tasks, self._taking, self.results, self._beside.fileno(), self.death_fd]

    def started(self, process: BaseProcess) -> None:
        """Take the process in; its ends of the channel are closed here."""
        self.process = process
        self.pid = process.pid or 0
        link.close_all(self.ends)
        # Under forkserver the process is no child of this one, and its number may be reused.
        is_child = not hasattr(process, "_popen") or process._popen.method != "forkserver"
        self.death_fd = os.pidfd_open(self.pid) if is_child else os.dup(process.sentinel)

    @property
    def room(self) -> int:
        """How many tasks the worker can be sent now; the lock is not needed."""
        used = len(self.inflight)
        if not self.is_ready or self.is_claimed or self.is_stopping:
            return 0
        if not self.has_room_beside:
            return 0
        depth = 1
        if self._pace < _LONG_S:
            depth = min(self._most_ahead, 1 + max(1, int(_AHEAD_S / self._pace)))
        if used * 2 > depth:
            return 0
        if self._maxtasks is not None:
            depth = min(depth, self._maxtasks - self._answered)
        return depth - used

    @property
    def has_room_beside(self) -> bool:
        """Whether the worker can be sent more, as far as large tasks and functions go."""
        return not self.teaching and len(self.beside_inflight) < _MOST_BESIDE

    @property
    def is_spent(self) -> bool:
        """Whether the worker has done all that it may."""
        return self._maxtasks is not None and self._answered >= self._maxtasks

    @property
    def begun(self) -> tuple[int, float]:
        """The number of the task begun last, and when; the lock is not needed."""
        number, since = link.COUNTER.unpack_from(self._counters, self._place)
        return number, since

    def send(self, task: Task, parcel: Parcel) -> bool:
        """Send a task; return False where the pipe is full. Not for two threads at once.

        Raises:
            OSError: the descriptors cannot be sent.
        """
        job, size, kind, flags = parcel.header
        number = self._number + 1
        self._number = number
        if not self.inflight:
            self.last_event = time.monotonic()
        self.inflight[number] = task
        try:
            for packed in parcel.beside:
                link.send_beside(self._beside, number, packed.data, packed.fds)
            if parcel.beside:
                self.beside_inflight.add(number)
            if flags & link.STORE:
                self.taught.add(job)
                self.teaching = number if flags & link.FUNCTION_BESIDE else 0
            header = link.TASK.pack(number, job, size, kind, flags)
            os.write(self._tasks, header + parcel.inline)
        except BlockingIOError:
            self.taken(number)
            return False
        except BrokenPipeError:
            # It has died; that is noticed, and what it had is sent again.
            return True
        except BaseException:
            self.taken(number)
            raise
        return True

    def command(self, kind: int, job: int = 0) -> None:
        """Tell the worker to forget a job or to stop; a worker that has died is past telling."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._tasks, link.TASK.pack(0, job, 0, kind, 0))

    def begin(self, packed: Packed) -> None:
        """Send the initializer."""
        link.send_beside(self._beside, 0, packed.data, packed.fds)
        os.write(self._tasks, link.TASK.pack(0, 0, 0, link.START, link.BODY_BESIDE))

    def stop(self) -> None:
        """Let the worker end after what it has been sent."""
        self.is_stopping = True
        self.command(link.STOP)

    def take_back(self) -> list[Task]:
        """Return the tasks that the worker has not taken; it will not get them any more."""
        tasks = []
        while True:
            try:
                packet = os.read(self._taking, link.PACKET_BYTES)
            except BlockingIOError:
                return tasks
            if not packet:
                return tasks
            number, job, _, kind, _ = link.TASK.unpack_from(packet)
            if kind in (link.FORGET, link.STOP):
                self.command(kind, job)
                return tasks
            tasks.append(self.taken(number))

    def receive(self) -> list[tuple[int, int, Any]]:
        """Return what the worker has written: number, kind, bytes. Only for one thread.

        Of a value that lies in the socket, bytes and descriptors.
        """
        found: list[tuple[int, int, Any]] = []
        while True:
            try:
                data = os.read(self.results, _READ_BYTES)
            except BlockingIOError:
                return found
            whole = len(data) < _READ_BYTES
            data = self._buffer + data if self._buffer else data
            position, end = 0, len(data)
            while position + link.RESULT.size <= end:
                number, size, kind, beside = link.RESULT.unpack_from(data, position)
                begin = position + link.RESULT.size
                if begin + size > end:
                    break
                position = begin + size
                value: Any = data[begin:position]
                found.append((number, kind, (value, self._fds(number)) if beside else value))
            self._buffer = data[position:]
            if whole:
                return found

    def answered(self, count: int, now: float) -> None:
        """Keep the books after some tasks were answered."""
        pace = (now - self.last_event) / count
        self._pace = max(1e-7, (self._pace + pace) / 2)
        self.last_event = now
        self._answered += count

    def taken(self, number: int, *, is_value: bool = False) -> Task:
        """Return a task that is answered or comes back, and forget it."""
        self.beside_inflight.discard(number)
        if number == self.teaching:
            self.teaching = 0
        task = self.inflight.pop(number)
        # After an error the worker may not even have been able to make the function.
        if is_value and task[0] in self.taught:
            self.known.add(task[0])
        return task

    def forget(self, job: int) -> None:
        """Have the worker drop the function of a job."""
        if job in self.taught:
            self.taught.discard(job)
            self.known.discard(job)
            self.command(link.FORGET, job)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send the process a signal, if it is still there."""
        process = self.process
        if process is not None and process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def close(self) -> int | None:
        """Close the pool's ends; return the exit code of the process, which has ended."""
        self._beside.close()
        link.close_all([self._tasks, self._taking, self.results, self.death_fd])
        process, exitcode = self.process, None
        if process is None:
            link.close_all(self.ends)
            return None
        process.join()
        exitcode = process.exitcode
        # Code of the user's may have waited for the process first.
        with contextlib.suppress(ValueError):
            process.close()
        self.process = None
        return exitcode

    def _fds(self, number: int) -> list[int] | OSError:
        try:
            return link.receive_beside(self._beside, number)[1]
        except OSError as error:
            return error
