"""One worker as its pool sees it: its process, its socket, and the tasks that it has."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from ...transport import descriptors as _descriptors
from ...transport.errors import RemoteError
from ...transport.remote_errors import rebuild
from ...transport.wire import Packed, pack, release, unpack
from . import worker as protocol
from .map_functions import MapFunctions, SentFunctions

# job, chunk, function, arguments, keyword arguments
Task = tuple[int, int, Any, Any, Any]
_NO_WAIT = int(socket.MSG_DONTWAIT)
# The task that a worker runs, and two that it finds in its socket afterwards.
MOST_TASKS = 3


class WorkerHandle:
    """One worker of a pool, for the pool's one thread.

    The socket's other end stays open here: tasks that the worker has not taken out of it can be
    taken back, and the system hands each message to one reader only. In a file in memory the worker
    says which task it has begun, since one that is killed may take a message and not begin it. The
    file is not mapped: mmap would keep a descriptor that every later fork inherits.

    Args:
        slot: the worker's place in the pool.
        maxtasks: tasks until the worker ends, None for no limit.
        packing: whether tensors are copied, and `recurse`.

    Attributes:
        fd: is readable when the worker has sent something.
        death_fd: is readable when the process has ended.
        inflight: the tasks sent and not answered, by number, oldest first.
        since: when the oldest of them became the oldest.
        failure: the error of its initializer.
    """

    def __init__(self, slot: int, maxtasks: int | None, packing: tuple[bool, bool]) -> None:
        self.slot = slot
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Room for the longest messages, so that sending never waits.
        size = (MOST_TASKS + 1) * 2 * protocol.MESSAGE_BYTES
        self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
        self.fd = self._ours.fileno()
        self.memory_fd = os.memfd_create("stepwrap-worker", os.MFD_CLOEXEC)
        self.process: BaseProcess | None = None
        self.pid = 0
        self.death_fd = -1
        self.is_ready = self.is_stopping = self.is_overdue = False
        self.failure: BaseException | None = None
        self.kill_at: float | None = None
        self.inflight: dict[int, Task] = {}
        self.since = 0.0
        self._sent_functions = SentFunctions()
        self._maxtasks = maxtasks
        self._copy_tensor, self._recurse = packing
        self._number = self._answered = 0

    @property
    def fds(self) -> list[int]:
        """What another forked process is to close."""
        return [self.fd, self.theirs.fileno(), self.memory_fd, self.death_fd]

    def begin(self, value: Any) -> None:
        """Send what the worker begins with."""
        packed = self._pack(value)
        try:
            self._send(protocol.TASK.pack(0, 0, 0, 0, protocol.BEGIN, 0, 0), packed)
        finally:
            release(packed)

    def started(self, process: BaseProcess, *, is_child: bool) -> None:
        """Take the process in, which may be a child of a fork server instead."""
        self.process = process
        self.pid = process.pid or 0
        if is_child:
            # Code of the user's may already have waited for it.
            with contextlib.suppress(ProcessLookupError):
                self.death_fd = os.pidfd_open(self.pid)
                return
        self.death_fd = os.dup(process.sentinel)

    @property
    def begun(self) -> int:
        """The number of the task that the worker has begun last, 0 before the first."""
        return int.from_bytes(os.pread(self.memory_fd, 8, 0), "little")

    @property
    def has_room(self) -> bool:
        """Whether the worker can be sent a task."""
        most = MOST_TASKS
        if self._maxtasks is not None:
            most = min(most, self._maxtasks - self._answered)
        return self.is_ready and not self.is_stopping and len(self.inflight) < most

    def send(self, task: Task, functions: MapFunctions) -> None:
        """Send a task.

        A map's function goes with its first tasks only, until one of them has been answered.
        """
        job, _, func, args, kwargs = task
        number = self._number + 1
        self._sent_functions.drop_ended(functions)
        kind, function, place = protocol.CALL, Packed(b"", ()), 0
        if func is protocol.map_caller or func is protocol.starmap_caller:
            kind = protocol.MAP if func is protocol.map_caller else protocol.STARMAP
            ((map_function, items),) = args
            sent = self._sent_functions.use(job, number)
            place = sent.place
            if not sent.has_arrived:
                function = functions.packed(job, map_function)
            value: Any = items
        else:
            value = (func, args, kwargs)
        try:
            body = self._pack(value)
        except BaseException:
            release(function)
            raise
        sizes = len(function.data), len(function.fds)
        needed = self._sent_functions.needed
        header = protocol.TASK.pack(number, job, *sizes, kind, place, needed)
        try:
            self._send(header + function.data, Packed(body.data, function.fds + body.fds))
        finally:
            release(function)
            release(body)
        if not self.inflight:
            self.since = time.monotonic()
        self._number = number
        self.inflight[number] = task

    def take_back(self) -> list[Task]:
        """Return the tasks that the worker has not taken; it will not get them any more."""
        tasks = []
        for data, fds in self._unread(self.theirs):
            number = protocol.TASK.unpack_from(data)[0]
            if not isinstance(fds, OSError):
                _descriptors.close(fds)
            if number in self.inflight:
                tasks.append(self.inflight.pop(number))
        return tasks

    def receive(self) -> Iterator[tuple[Task, tuple[bool, Any]]]:
        """Yield the tasks that the worker has answered, each with (True, value) or (False, error).

        Raises nothing: a result that cannot be read is an error of the task.
        """
        for data, fds in self._unread(self._ours):
            number, kind = protocol.RESULT.unpack_from(data)
            if kind == protocol.READY:
                self.is_ready = True
                continue
            success, value = _outcome(kind, memoryview(data)[protocol.RESULT.size :], fds)
            if not number:
                self.failure = value
                continue
            task = self.inflight.pop(number)
            self.since = time.monotonic()
            self._answered += 1
            if self._maxtasks is not None and self._answered >= self._maxtasks:
                # It has not counted the tasks that could not be unpickled.
                self.stop()
            # After an error the worker may not even have been able to make the function.
            if success:
                self._sent_functions.succeeded(task[0], number)
            yield task, (success, value)

    def stop(self) -> None:
        """Make the worker end when it has done what it has."""
        if not self.is_stopping:
            self.is_stopping = True
            self._ours.shutdown(socket.SHUT_WR)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        if self.process is not None and self.process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def close(self) -> int | None:
        """Let go of a process that has ended, or never started; return its exit code."""
        self._ours.close()
        self.theirs.close()
        _descriptors.close([self.memory_fd, self.death_fd])
        process, self.process = self.process, None
        if process is None:
            return None
        process.join()
        exitcode = process.exitcode
        if exitcode is None:
            # Code of the user's has waited for the process first.
            popen: Any = process._popen  # type: ignore[attr-defined]
            popen.returncode = os.EX_OK
        process.close()
        return exitcode

    def _pack(self, value: Any) -> Packed:
        return pack(value, copy_tensor=self._copy_tensor, recurse=self._recurse)

    def _send(self, header: bytes, packed: Packed) -> None:
        message = header + packed.data
        if packed.fds:
            _descriptors.send(self._ours, message, packed.fds, _NO_WAIT)
        else:
            self._ours.send(message, _NO_WAIT)

    def _unread(self, end: socket.socket) -> Iterator[tuple[bytes, list[int] | OSError]]:
        """Yield what lies in an end of the socket: messages and their descriptors."""
        while True:
            try:
                data, fds = _descriptors.try_receive(end, protocol.MESSAGE_BYTES, _NO_WAIT)
            except BlockingIOError:
                return
            if not data:
                return
            yield data, fds


def _outcome(kind: int, data: memoryview, fds: list[int] | OSError) -> tuple[bool, Any]:
    """Return (True, value) or (False, error) of what a worker has sent."""
    try:
        if isinstance(fds, OSError):
            raise fds
        value = unpack(data, fds)
        if kind == protocol.VALUE:
            return True, value
        return False, RemoteError(*value) if kind == protocol.BARE_ERROR else rebuild(value)
    # Loading runs the code of classes.
    except BaseException as error:
        return False, error
