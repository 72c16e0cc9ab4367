"""One worker as its pool sees it: the process, its pipes, and the tasks it has been sent."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

from ..interrupts import in_one_go
from ..transport import descriptors as _descriptors
from ..transport.wire import Packed
from . import protocol
from .encoder import EncodedTask, Task

# Work that is sent ahead of its turn, in seconds: more than the pool takes to see a result.
_AHEAD_S = 1e-3
# Tasks that run longer are not sent ahead.
_LONG_S = 20e-3
# Of tasks that travel beside the pipe: their memory, and descriptors, are taken while they wait.
_MOST_BESIDE = 2


class WorkerHandle:
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
        self.sending = threading.Lock()
        self.failure: bytes | None = None
        self.kill_at: float | None = None
        # The tasks sent and not answered, by number, oldest first; those of them with more beside.
        self.inflight: dict[int, Task] = {}
        self._beside: set[int] = set()
        # Jobs whose function the worker was sent, and those whose it has for certain; the task that
        # brings it a large one.
        self.sent_functions: set[int] = set()
        self.known: set[int] = set()
        self._pending_function = 0
        # Jobs to be forgotten; for each command that the worker may not have read yet, the number
        # of the last task before it.
        self._to_forget: deque[int] = deque()
        self._commands: deque[int] = deque()
        self._is_full = False
        self.last_event = time.monotonic()
        self._counters = counters
        self._place = slot * protocol.COUNTER.size
        self._maxtasks = maxtasks
        self._number = self._answered = 0
        # Seconds per task, smoothed; at first as of a task that is worth one more ahead.
        self._pace = _AHEAD_S
        protocol.COUNTER.pack_into(counters, self._place, 0, 0.0)

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
        if (
            not self.is_ready
            or self.sending.locked()
            or self.is_stopping
            or not self.has_room_beside
        ):
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
        return not self._pending_function and not self._is_full and len(self._beside) < _MOST_BESIDE

    @property
    def begun(self) -> tuple[int, float]:
        """The number of the task begun last, and when; the lock is not needed."""
        number, since = protocol.COUNTER.unpack_from(self._counters, self._place)
        return number, since

    def send(self, task: Task, encoded: EncodedTask, *then: partial[Any]) -> bool:
        """Send a task and do what is then to be done, all of it or nothing, whatever interrupts.

        Returns:
            Whether there was room.

        Raises:
            OSError: the descriptors cannot be sent, or there is no room and never will be.
        """
        packet = self._packet(task, encoded)
        number = self._number
        # Before it is sent: its answer may be fast.
        enter = [partial(self.inflight.__setitem__, number, task)]
        if encoded.beside:
            enter.append(partial(self._beside.add, number))
            if encoded.flags & protocol.FUNCTION_BESIDE:
                enter.append(partial(setattr, self, "_pending_function", number))
        try:
            self.pipes.send(number, packet, encoded.beside, enter, then)
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

    def send_small(self, tasks: Sequence[tuple[Task, EncodedTask]]) -> list[Task]:
        """Send tasks that have nothing beside them; return those there was no room for."""
        first = self._number + 1
        packets = [self._packet(task, encoded) for task, encoded in tasks]
        sent = self.pipes.send_small(packets)
        self.inflight.update(enumerate((task for task, _ in tasks[:sent]), first))
        self._is_full = sent < len(tasks)
        return [task for task, _ in tasks[sent:]]

    def _packet(self, task: Task, encoded: EncodedTask) -> bytes:
        """Return what goes through the pipe."""
        if not self.inflight:
            self.last_event = time.monotonic()
        self._number = number = self._number + 1
        if encoded.flags & protocol.STORE:
            self.sent_functions.add(task[0])
        header = protocol.TASK.pack(number, task[0], encoded.size, encoded.kind, encoded.flags)
        return header + encoded.inline

    def stop(self) -> None:
        """Let the worker end after what it has been sent."""
        self.is_stopping = True
        self.pipes.command(protocol.STOP)

    def take_back(self) -> list[Task]:
        """Return the tasks that the worker has not taken; it will not get them any more.

        Nor others in their place, until it has answered.
        """
        self._pace = 2 * _LONG_S
        return [self.taken(number) for number in self.pipes.take_back()]

    def taken(self, number: int, *, is_value: bool = False) -> Task:
        """Return a task that is answered or comes back, and forget it."""
        self._beside.discard(number)
        if number == self._pending_function:
            self._pending_function = 0
        task = self.inflight.pop(number)
        # After an error the worker may not even have been able to make the function.
        if is_value and task[0] in self.sent_functions:
            self.known.add(task[0])
        return task

    def answered(self, count: int, now: float) -> None:
        """Count tasks that were answered; a worker that has done all is stopped."""
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
        for job in self.sent_functions.intersection(jobs):
            self.sent_functions.discard(job)
            self.known.discard(job)
            self._to_forget.append(job)
        begun, _ = self.begun
        while self._commands and self._commands[0] < begun:
            self._commands.popleft()
        while self._to_forget and len(self._commands) < self.pipes.most_commands:
            self.pipes.command(protocol.FORGET, self._to_forget.popleft())
            self._commands.append(self._number)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send the process a signal, if it is still there."""
        if self.process is not None and self.process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def close(self) -> int | None:
        """Close the pool's ends; return the exit code of the process, which has ended."""
        self.pipes.close()
        protocol.close_all([self.death_fd])
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


# Linux; the module fcntl names them from Python 3.10 on some systems only.
_F_SETPIPE_SZ = 1031
_F_GETPIPE_SZ = 1032
_SLOTS = 64
_SPARE_SLOTS = 4
_READ_BYTES = 1 << 18


class Pipes:
    """Both pipes and the socket. Not for two threads at once, except `take_back`."""

    def __init__(self) -> None:
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
            fcntl.fcntl(self._tasks, _F_SETPIPE_SZ, _SLOTS * protocol.PACKET_BYTES)
        slots = fcntl.fcntl(self._tasks, _F_GETPIPE_SZ) // protocol.PACKET_BYTES
        # How many packets there is room for, some being left for commands.
        self.most_ahead = max(1, slots - _SPARE_SLOTS)
        # The last one is for the command to stop.
        self.most_commands = max(0, slots - self.most_ahead - 1)
        # What the worker's process is given: for tasks, for results, and the socket.
        self.theirs = (reading, writing, theirs.detach())
        self._buffer = b""

    @property
    def fds(self) -> list[int]:
        """The descriptors that only the pool may have."""
        return [self._tasks, self._taking, self.results, self._beside.fileno()]

    def send(
        self,
        number: int,
        packet: bytes,
        beside: Sequence[Packed],
        enter: Sequence[partial[Any]],
        then: Sequence[partial[Any]],
    ) -> None:
        """Send a task and what lies beside it, in one go with other calls of C functions.

        Args:
            enter: what is called before the worker can have the task.
            then: what is called when it can.

        Raises:
            BlockingIOError: there is no room.
            BrokenPipeError, ConnectionResetError: the worker has ended.
            OSError: the descriptors cannot be sent.
        """
        write = partial(os.write, self._tasks, packet)
        if not beside:
            in_one_go(*enter, write, *then)
            return
        messages = (
            _descriptors.sender(
                self._beside, protocol.NUMBER.pack(number) + packed.data, packed.fds
            )
            for packed in beside
        )
        with _descriptors.explaining():
            in_one_go(*messages, *enter, write, *then)

    def send_small(self, packets: Sequence[bytes]) -> int:
        """Send tasks that have nothing beside them, at once; return how many there was room for."""
        data = packets[0]
        if len(packets) > 1:
            # Of a long write each page is a packet: one call of the system, one waking.
            data = b"".join([packet.ljust(protocol.PACKET_BYTES, b"\0") for packet in packets])
        try:
            written = os.write(self._tasks, data)
        except BlockingIOError:
            return 0
        return -(-written // protocol.PACKET_BYTES)

    def command(self, kind: int, job: int = 0) -> None:
        """Tell the worker to forget a job or to stop; a worker that has ended is past telling."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._tasks, protocol.TASK.pack(0, job, 0, kind, 0))

    def begin(self, packed: Packed) -> None:
        """Send the initializer."""
        protocol.send_beside(self._beside, 0, packed.data, packed.fds)
        os.write(self._tasks, protocol.TASK.pack(0, 0, 0, protocol.START, protocol.BODY_BESIDE))

    def take_back(self) -> Iterable[int]:
        """Yield the numbers of the tasks that the worker has not taken; it gets them no more."""
        commands = []
        while True:
            try:
                packet = os.read(self._taking, protocol.PACKET_BYTES)
            except BlockingIOError:
                break
            if not packet:
                break
            number, job, _, kind, _ = protocol.TASK.unpack_from(packet)
            if number:
                yield number
            else:
                commands.append((kind, job))
        for kind, job in commands:
            self.command(kind, job)

    def receive(self) -> list[tuple[int, int, Any]]:
        """Return what the worker has written: number, kind, bytes.

        Where descriptors belong to the bytes, both, or an OSError in their place.
        """
        found: list[tuple[int, int, Any]] = []
        header = protocol.RESULT
        while True:
            try:
                data = os.read(self.results, _READ_BYTES)
            except BlockingIOError:
                return found
            is_all = len(data) < _READ_BYTES
            if self._buffer:
                data = self._buffer + data
            position, end = 0, len(data)
            while position + header.size <= end:
                number, size, kind, is_beside = header.unpack_from(data, position)
                begin = position + header.size
                if begin + size > end:
                    break
                position = begin + size
                value: Any = data[begin:position]
                found.append((number, kind, (value, self._fds(number)) if is_beside else value))
            self._buffer = data[position:]
            if is_all:
                return found

    def close_theirs(self) -> None:
        """Close here what the worker has."""
        protocol.close_all(self.theirs)

    def close(self) -> None:
        """Close the pool's ends."""
        self._beside.close()
        protocol.close_all([self._tasks, self._taking, self.results])

    def _fds(self, number: int) -> list[int] | OSError:
        try:
            return protocol.receive_beside(self._beside, number)[1]
        except OSError as error:
            return error
