"""The pool's ends of what joins it to one worker."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from . import _link as link
from ._one_go import in_one_go
from .transport import descriptors as _descriptors
from .transport.wire import Packed

# Linux; the module fcntl names them from Python 3.10 on some systems only.
_F_SETPIPE_SZ = 1031
_F_GETPIPE_SZ = 1032
_SLOTS = 64
_SPARE_SLOTS = 4
_READ_BYTES = 1 << 18


class Theirs(NamedTuple):
    """The descriptors that the worker's process is given."""

    tasks: int
    results: int
    beside: int


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
            fcntl.fcntl(self._tasks, _F_SETPIPE_SZ, _SLOTS * link.PACKET_BYTES)
        slots = fcntl.fcntl(self._tasks, _F_GETPIPE_SZ) // link.PACKET_BYTES
        # How many packets there is room for, some being left for commands.
        self.most_ahead = max(1, slots - _SPARE_SLOTS)
        # The last one is for the command to stop.
        self.most_commands = max(0, slots - self.most_ahead - 1)
        self.theirs = Theirs(reading, writing, theirs.detach())
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
            _descriptors.sender(self._beside, link.NUMBER.pack(number) + packed.data, packed.fds)
            for packed in beside
        )
        with _descriptors.explaining():
            in_one_go(*messages, *enter, write, *then)

    def send_small(self, packets: Sequence[bytes]) -> int:
        """Send tasks that have nothing beside them, at once; return how many there was room for."""
        data = packets[0]
        if len(packets) > 1:
            # Of a long write each page is a packet: one call of the system, one waking.
            data = b"".join([packet.ljust(link.PACKET_BYTES, b"\0") for packet in packets])
        try:
            written = os.write(self._tasks, data)
        except BlockingIOError:
            return 0
        return -(-written // link.PACKET_BYTES)

    def command(self, kind: int, job: int = 0) -> None:
        """Tell the worker to forget a job or to stop; a worker that has ended is past telling."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._tasks, link.TASK.pack(0, job, 0, kind, 0))

    def begin(self, packed: Packed) -> None:
        """Send the initializer."""
        link.send_beside(self._beside, 0, packed.data, packed.fds)
        os.write(self._tasks, link.TASK.pack(0, 0, 0, link.START, link.BODY_BESIDE))

    def take_back(self) -> Iterable[int]:
        """Yield the numbers of the tasks that the worker has not taken; it gets them no more."""
        commands = []
        while True:
            try:
                packet = os.read(self._taking, link.PACKET_BYTES)
            except BlockingIOError:
                break
            if not packet:
                break
            number, job, _, kind, _ = link.TASK.unpack_from(packet)
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
        header = link.RESULT
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
        link.close_all(self.theirs)

    def close(self) -> None:
        """Close the pool's ends."""
        self._beside.close()
        link.close_all([self._tasks, self._taking, self.results])

    def _fds(self, number: int) -> list[int] | OSError:
        try:
            return link.receive_beside(self._beside, number)[1]
        except OSError as error:
            return error
