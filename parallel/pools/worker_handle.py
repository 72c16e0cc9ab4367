"""One worker as its pool sees it: its process and pipes, and tasks as they are sent to it."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from types import FunctionType
from typing import Any, NamedTuple

from ..transport import descriptors as _descriptors
from ..transport.wire import Packed, pack, release
from . import worker as protocol

# job, chunk, function, arguments, keyword arguments
Task = tuple[int, int, Any, Any, Any]

# A function is small where sending it again costs less than waiting for the worker to have it.
_SMALL_FUNCTION = 512
# Arguments that are quickly seen to be plain.
_SHORT = 16
_INLINE_BYTES = protocol.PACKET_BYTES - protocol.TASK.size
_NUMBER = protocol.NUMBER


class EncodedTask(NamedTuple):
    """A task on its way: kind, flags, bytes of function; what follows; what lies beside."""

    kind: int
    flags: int
    size: int
    inline: bytes
    beside: tuple[Packed, ...]

    def release(self) -> None:
        for packed in self.beside:
            release(packed)


class Encoder:
    """Encodes tasks, in any thread.

    Attributes:
        functions: the pickled function of each job with many tasks; None where it has descriptors,
            and is pickled for each worker.
    """

    def __init__(self, *, copy_tensor: bool, recurse: bool) -> None:
        self.functions: dict[int, Packed | None] = {}
        self._copy_tensor = copy_tensor
        self._recurse = recurse
        self._last: tuple[object, Packed] = None, Packed(b"", ())

    def pack(self, value: Any) -> Packed:
        """Return a value as it travels."""
        is_short = type(value) in (list, tuple) and len(value) <= _SHORT
        if is_short and protocol.PLAIN.issuperset(map(type, value)):
            data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
            if len(data) <= _INLINE_BYTES:
                return Packed(data, ())
        return pack(value, copy_tensor=self._copy_tensor, recurse=self._recurse)

    def encode(self, task: Task, known: Mapping[int, bool]) -> EncodedTask:
        """Return a task for a worker that has the functions of `known` jobs."""
        job, _, func, args, kwargs = task
        if func is protocol.map_caller or func is protocol.starmap_caller:
            kind = protocol.MAP if func is protocol.map_caller else protocol.STARMAP
            ((func, items),) = args
            body = self.pack(items)
            return _encoded(kind, None if known.get(job) else self._function(job, func), body)
        body = self.pack((args, kwargs) if kwargs else args)
        kind = protocol.CALL if kwargs else protocol.CALL_PLAIN
        return _encoded(kind, self._named(func), body)

    def _named(self, func: object) -> Packed:
        """Return a function as it travels; one that goes by its name is pickled once in a row."""
        last, packed = self._last
        if func is last:
            return packed
        packed = self.pack(func)
        if type(func) is FunctionType and not packed.fds and len(packed.data) <= _SMALL_FUNCTION:
            # A function by value is longer than its name, and may change between two calls.
            with contextlib.suppress(Exception):
                if packed.data == pickle.dumps(func, pickle.HIGHEST_PROTOCOL):
                    self._last = func, packed
        return packed

    def _function(self, job: int, func: object) -> Packed:
        packed = self.functions.get(job)
        if packed is None:
            packed = self.pack(func)
            self.functions[job] = None if packed.fds else packed
        return packed


def _encoded(kind: int, function: Packed | None, body: Packed) -> EncodedTask:
    flags, size, inline = 0, 0, b""
    beside: tuple[Packed, ...] = ()
    if function is not None:
        if function.fds or len(function.data) > _SMALL_FUNCTION:
            flags = protocol.FUNCTION_BESIDE
            beside = (function,)
        else:
            inline = function.data
            size = len(inline)
    if body.fds or size + len(body.data) > _INLINE_BYTES:
        flags |= protocol.BODY_BESIDE
        beside = (*beside, body)
    else:
        inline += body.data
    return EncodedTask(kind, flags, size, inline, beside)


# Work that is sent ahead of its turn, in seconds: more than the pool takes to see a result.
_AHEAD_S = 1e-3
# Tasks that run longer are not sent ahead.
_LONG_S = 20e-3
# Of tasks that travel beside the pipe: their memory, and descriptors, are taken while they wait.
_MOST_BESIDE = 2
# Jobs that one packet can name.
_MOST_FORGOTTEN = _INLINE_BYTES // _NUMBER.size


class WorkerHandle:
    """One worker; the pool's lock guards it, except while a thread sends.

    Args:
        slot: the worker's place in the pool.
        counters: the shared memory in which workers say what they have begun.
        maxtasks: tasks until the worker ends, None for no limit.

    Attributes:
        death_fd: is readable when the process has ended.
        inflight: the tasks sent and not answered, by number, oldest first.
        sending: is held by the thread that sends tasks.
        functions: jobs whose function the worker was sent, and whether it has it for certain.
        failure: the described error of its initializer.
    """

    def __init__(self, slot: int, counters: mmap.mmap, maxtasks: int | None) -> None:
        self.slot = slot
        self.pipes = Pipes()
        self.process: BaseProcess | None = None
        self.pid = 0
        self.death_fd = -1
        self.is_ready = self.is_stopping = self.is_overdue = False
        self.sending = threading.Lock()
        self.failure: bytes | None = None
        self.kill_at: float | None = None
        self.inflight: dict[int, Task] = {}
        self.functions: dict[int, bool] = {}
        # Tasks with something beside them, and the one that brings a large function.
        self._beside: set[int] = set()
        self._pending_function = 0
        self._to_forget: list[int] = []
        self._is_forgetting = self._is_full = False
        self.last_event = time.monotonic()
        self._counters = counters
        self._place = slot * _NUMBER.size
        self._maxtasks = maxtasks
        self._number = self._answered = 0
        # Seconds per task, smoothed; at first as of a task that is worth one more ahead.
        self._pace = _AHEAD_S
        _NUMBER.pack_into(counters, self._place, 0)
        # The task that was last seen to be begun, and since when.
        self.seen = 0, 0.0

    def started(self, process: BaseProcess, *, is_child: bool) -> None:
        """Take the process in, which may be a child of a fork server instead."""
        self.process = process
        self.pid = process.pid or 0
        _descriptors.close(self.pipes.theirs)
        if is_child:
            # Code of the user's may already have waited for it.
            with contextlib.suppress(ProcessLookupError):
                self.death_fd = os.pidfd_open(self.pid)
                return
        self.death_fd = os.dup(process.sentinel)

    @property
    def room(self) -> int:
        """How many tasks the worker can be sent now."""
        used = len(self.inflight)
        if not self.is_ready or self.is_stopping or not self.has_room_beside:
            return 0
        if self.sending.locked():
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
    def begun(self) -> int:
        """The number of the task begun last."""
        number: int = _NUMBER.unpack_from(self._counters, self._place)[0]
        return number

    def send(self, task: Task, encoded: EncodedTask) -> bool:
        """Send a task and close its descriptors; return whether there was room."""
        packet = self._packet(task, encoded)
        number = self._number
        # Before it is sent: its answer may be fast.
        self.inflight[number] = task
        if encoded.beside:
            self._beside.add(number)
            if encoded.flags & protocol.FUNCTION_BESIDE:
                self._pending_function = number
        try:
            self.pipes.send(number, packet, encoded.beside)
        except OSError as error:
            self.taken(number)
            if isinstance(error, (BrokenPipeError, ConnectionResetError)):
                # The worker has ended, perhaps with messages unread, which is soon noticed.
                self.is_stopping = True
            elif isinstance(error, BlockingIOError) and self.inflight:
                self._is_full = True
            else:
                raise
            return False
        finally:
            encoded.release()
        return True

    def send_small(self, tasks: Sequence[tuple[Task, EncodedTask]]) -> list[Task]:
        """Send tasks that have nothing beside them; return those there was no room for."""
        if not tasks:
            return []
        first = self._number + 1
        packets = [self._packet(*pair) for pair in tasks]
        self.inflight.update(enumerate((task for task, _ in tasks), first))
        sent = self.pipes.send_small(packets)
        self._is_full = sent < len(tasks)
        return [self.taken(number) for number in range(first + sent, first + len(tasks))]

    def _packet(self, task: Task, encoded: EncodedTask) -> bytes:
        """Return what goes through the pipe."""
        if not self.inflight:
            self.last_event = time.monotonic()
        self._number += 1
        if encoded.kind in (protocol.MAP, protocol.STARMAP):
            self.functions.setdefault(task[0], False)
        kind, flags, size, inline, _ = encoded
        return protocol.TASK.pack(self._number, task[0], size, kind, flags) + inline

    def stop(self) -> None:
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
        if is_value and task[0] in self.functions:
            self.functions[task[0]] = True
        return task

    def answered(self, count: int, now: float) -> None:
        """Count tasks that were answered; a worker that has done all is stopped."""
        self._pace = max(1e-7, (self._pace + (now - self.last_event) / count) / 2)
        self.last_event = now
        self._is_full = False
        self._answered += count
        if self._maxtasks is not None and self._answered >= self._maxtasks:
            self.stop()

    def forget(self, *jobs: int, is_done: bool = False) -> None:
        """Have the worker drop the functions of jobs; `is_done`: it has dropped those before.

        One packet at a time, so that there is always room for tasks, and to stop.
        """
        self._to_forget += [job for job in jobs if self.functions.pop(job, None) is not None]
        self._is_forgetting = self._is_forgetting and not is_done
        if self._to_forget and not self._is_forgetting and self.pipes.can_forget:
            part = self._to_forget[:_MOST_FORGOTTEN]
            del self._to_forget[:_MOST_FORGOTTEN]
            self.pipes.command(protocol.FORGET, b"".join(map(_NUMBER.pack, part)))
            self._is_forgetting = True

    def kill(self, signum: int = signal.SIGKILL) -> None:
        if self.process is not None and self.process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def close(self) -> int | None:
        self.pipes.close()
        _descriptors.close([self.death_fd])
        process, self.process = self.process, None
        if process is None:
            _descriptors.close(self.pipes.theirs)
            return None
        process.join()
        exitcode = process.exitcode
        if exitcode is None:
            # Code of the user's has waited for the process first.
            popen: Any = process._popen  # type: ignore[attr-defined]
            popen.returncode = os.EX_OK
        process.close()
        return exitcode


# Linux; the module fcntl names them from Python 3.10 on some systems only.
_F_SETPIPE_SZ = 1031
_F_GETPIPE_SZ = 1032
_SLOTS = 64
_READ_BYTES = 1 << 18


class Pipes:
    """The pool's ends of both pipes and of the socket.

    Attributes:
        theirs: what the worker's process is given: for tasks, for results, and the socket.
        most_ahead: how many tasks there is room for, besides a command to forget and one to stop.
        can_forget: whether there is room for such a command at all.
    """

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
        self.most_ahead = max(1, slots - 2)
        self.can_forget = slots > 2
        self.theirs = (reading, writing, theirs.detach())
        self._buffer = b""

    @property
    def fds(self) -> list[int]:
        return [self._tasks, self._taking, self.results, self._beside.fileno()]

    def send(self, number: int, packet: bytes, beside: Sequence[Packed]) -> None:
        """Send a task and what lies beside it."""
        for packed in beside:
            _descriptors.send(self._beside, _NUMBER.pack(number) + packed.data, packed.fds)
        os.write(self._tasks, packet)

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

    def command(self, kind: int, data: bytes = b"") -> None:
        """Send a packet that is no task, for which there is room."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._tasks, protocol.TASK.pack(0, 0, len(data), kind, 0) + data)

    def begin(self, packed: Packed) -> None:
        """Send what the worker begins with, and close its descriptors."""
        try:
            self.send(0, protocol.TASK.pack(0, 0, 0, protocol.BEGIN, 0), [packed])
        finally:
            release(packed)

    def take_back(self) -> Iterator[int]:
        """Yield the numbers of the tasks that the worker has not taken; it gets them no more."""
        commands = []
        with contextlib.suppress(BlockingIOError):
            while packet := os.read(self._taking, protocol.PACKET_BYTES):
                number = protocol.TASK.unpack_from(packet)[0]
                if number:
                    yield number
                else:
                    commands.append(packet)
        for packet in commands:
            os.write(self._tasks, packet)

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

    def close(self) -> None:
        self._beside.close()
        _descriptors.close([self._tasks, self._taking, self.results])

    def _fds(self, number: int) -> list[int] | OSError:
        try:
            return protocol.receive_beside(self._beside, number)[1]
        except OSError as error:
            return error
