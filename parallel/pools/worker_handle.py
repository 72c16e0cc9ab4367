"""The pool's handle of one worker: its process, its socket, and the tasks that it has."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from ...transport import descriptors as _descriptors
from ...transport.errors import RemoteError
from ...transport.remote_errors import rebuild
from ...transport.wire import Packed, pack, unpack
from . import worker as protocol
from .map_functions import MapFunctions, SentFunctions

# job, chunk, function, arguments, keyword arguments
Task = tuple[int, int, Any, Any, Any]
# The task that a worker runs, and two that wait in its socket.
MAX_TASKS = 3


class WorkerHandle:
    """One worker of a pool, used by the pool's thread.

    The worker's end of the socket stays open here, so that the pool can recall tasks that the
    worker has not received; the system gives each message to one reader only. When the worker
    starts a task, it writes the task's number to a file in memory. The pool needs this number,
    because a killed worker may have received a task without starting it. The file is not mapped:
    mmap would keep a descriptor that every later fork inherits.

    Args:
        slot: the worker's index in the pool.
        maxtasks: the number of tasks after which the worker ends, None for no limit.
        packing: ``copy_tensor`` and ``recurse``.

    Attributes:
        fd: readable when the worker has sent something.
        death_fd: readable when the process has ended.
        inflight: the tasks sent and not answered, by number, oldest first.
        since: the time from which ``task_timeout`` counts: when the oldest task in flight was sent
            or, if later, when the task before it was answered.
        is_done: whether the worker has finished all its tasks; set only if the pool overrides
            ``setup_queues``.
        failure: the error of the initializer or, if the pool overrides ``setup_queues``, of
            ``worker``.
    """

    def __init__(self, slot: int, maxtasks: int | None, packing: tuple[bool, bool]) -> None:
        self.slot = slot
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Enough for the longest messages, so that the socket is never full.
        size = (MAX_TASKS + 1) * 2 * protocol.MESSAGE_BYTES
        self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
        self.fd = self._ours.fileno()
        self.memory_fd = os.memfd_create("stepwrap-worker", os.MFD_CLOEXEC)
        self.process: BaseProcess | None = None
        self.pid = 0
        self.death_fd = -1
        self.is_ready = self.is_done = self.is_stopping = self.is_overdue = False
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
        """The descriptors to close in each worker that is forked later."""
        return [self.fd, self.theirs.fileno(), self.memory_fd, self.death_fd]

    def begin(self, value: Any) -> None:
        """Send the first message; see ``main`` of worker.py."""
        with contextlib.closing(self._pack(value)) as packed:
            header = protocol.TASK.pack(0, 0, 0, 0, protocol.BEGIN, 0, 0)
            self._send(header + packed.data, packed.fds)

    def set_process(self, process: BaseProcess, *, is_child: bool) -> None:
        """Store the started process, which is a child of this process or of a fork server."""
        self.process = process
        self.pid = process.pid or 0
        if is_child:
            # The user's code may already have waited for the process.
            with contextlib.suppress(ProcessLookupError):
                self.death_fd = os.pidfd_open(self.pid)
                return
        self.death_fd = os.dup(process.sentinel)

    @property
    def started_task(self) -> int:
        """The number of the last task that the worker has started, 0 before the first."""
        return int.from_bytes(os.pread(self.memory_fd, 8, 0), "little")

    @property
    def has_room(self) -> bool:
        """Whether the worker can be sent another task."""
        limit = MAX_TASKS
        if self._maxtasks is not None:
            limit = min(limit, self._maxtasks - self._answered)
        return self.is_ready and not self.is_stopping and len(self.inflight) < limit

    def send(self, task: Task, functions: MapFunctions) -> None:
        """Send a task; include its map's function until a task of the map has succeeded."""
        job, _, func, args, kwargs = task
        number = self._number + 1
        self._sent_functions.drop_ended(functions)
        kind, function, slot = protocol.CALL, Packed(b""), 0
        if func is protocol.map_caller or func is protocol.starmap_caller:
            kind = protocol.MAP if func is protocol.map_caller else protocol.STARMAP
            ((map_function, inputs),) = args
            sent = self._sent_functions.use(job, number)
            slot = sent.slot
            if not sent.has_arrived:
                function = functions.packed(job, map_function)
            value: Any = inputs
        else:
            value = (func, args, kwargs)
        with contextlib.closing(function), contextlib.closing(self._pack(value)) as body:
            sizes = len(function.data), len(function.fds)
            needed = self._sent_functions.needed
            header = protocol.TASK.pack(number, job, *sizes, kind, slot, needed)
            self._send(header + function.data + body.data, function.fds + body.fds)
        if not self.inflight:
            self.since = time.monotonic()
        self._number = number
        self.inflight[number] = task

    def recall_tasks(self) -> list[Task]:
        """Take back and return the tasks that the worker has not yet received."""
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

        A result that cannot be read becomes the task's error.
        """
        for data, fds in self._unread(self._ours):
            number, kind = protocol.RESULT.unpack_from(data)
            if kind == protocol.READY:
                self.is_ready = True
                continue
            if kind == protocol.DONE:
                self.is_done = True
                continue
            success, value = _outcome(kind, memoryview(data)[protocol.RESULT.size :], fds)
            if not number:
                self.failure = value
                continue
            task = self.inflight.pop(number)
            self.since = time.monotonic()
            self._answered += 1
            if self._maxtasks is not None and self._answered >= self._maxtasks:
                # The worker itself does not count tasks that it could not unpickle.
                self.stop()
            # After an error the worker may have failed to unpickle the function.
            if success:
                self._sent_functions.succeeded(task[0], number)
            yield task, (success, value)

    def stop(self) -> None:
        """Make the worker end after its remaining tasks."""
        if not self.is_stopping:
            self.is_stopping = True
            self._ours.shutdown(socket.SHUT_WR)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        if self.process is not None and self.process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def close(self) -> int | None:
        """Release a process that has ended, or never started; return its exit code."""
        self._ours.close()
        self.theirs.close()
        _descriptors.close([self.memory_fd, self.death_fd])
        process, self.process = self.process, None
        if process is None:
            return None
        process.join()
        exitcode = process.exitcode
        if exitcode is None:
            # The user's code has already waited for the process.
            popen: Any = process._popen  # type: ignore[attr-defined]
            popen.returncode = os.EX_OK
        process.close()
        return exitcode

    def _pack(self, value: Any) -> Packed:
        return pack(value, copy_tensor=self._copy_tensor, recurse=self._recurse)

    def _send(self, message: bytes, fds: Sequence[int]) -> None:
        _descriptors.send(self._ours, message, fds, socket.MSG_DONTWAIT)

    def _unread(self, end: socket.socket) -> Iterator[tuple[bytes, list[int] | OSError]]:
        """Yield the messages that wait at one end of the socket, with their descriptors."""
        with contextlib.suppress(BlockingIOError):
            while True:
                size, flags = protocol.MESSAGE_BYTES, socket.MSG_DONTWAIT
                data, fds = _descriptors.try_receive(end, size, flags)
                if not data:
                    return
                yield data, fds


def _outcome(kind: int, data: memoryview, fds: list[int] | OSError) -> tuple[bool, Any]:
    """Return (True, value) or (False, error) from a worker's message."""
    try:
        if isinstance(fds, OSError):
            raise fds
        value = unpack(data, fds)
        if kind == protocol.VALUE:
            return True, value
        return False, RemoteError(*value) if kind == protocol.BARE_ERROR else rebuild(value)
    # Unpickling runs the user's code.
    except BaseException as error:
        return False, error
