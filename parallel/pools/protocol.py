"""How a pool and one of its workers talk.

Tasks go through a pipe in packet mode: one read takes one task, whole or not at all. The pool keeps
a reading end too, so that it can take back, exactly, what its worker has not taken. What is too
large for a packet, and descriptors, travel beside it through a socket, under the task's number;
the reader drops what belongs to tasks that were taken back. Results come through a pipe of bytes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from multiprocessing import reduction

from ..transport import descriptors as _descriptors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# A task: its number at this worker, job, bytes of its function that follow, kind, flags. A call
# has arguments and keyword arguments, a plain call arguments alone.
TASK = struct.Struct("<QIHBB")
CALL, CALL_PLAIN, MAP, STARMAP, FORGET, STOP, START = range(7)
FUNCTION_BESIDE, BODY_BESIDE, STORE = 1, 2, 4
# What one write to a pipe keeps together.
PACKET_BYTES = 4096
# A result: the number of its task, bytes that follow, kind, whether descriptors lie in the socket.
RESULT = struct.Struct("<QIBB")
VALUE, ERROR, NOT_ENCODED, READY, NOT_STARTED, BARE_ERROR = range(6)
# Per worker, in shared memory: the number of the task it has begun, and when (monotonic seconds).
COUNTER = struct.Struct("<Qd")
# Its parts; the number also stands before what lies beside a packet.
NUMBER = struct.Struct("<Q")
SINCE = struct.Struct("<d")
# How a pickle begins; what begins otherwise only `_wire.unpack` can read.
PICKLE = 0x80

_MESSAGE_BYTES = 1 << 17


class InheritedDescriptor:
    """A descriptor that a process is given at its start, whichever way it is started."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[object, ...]:
        return _adopted, (reduction.DupFd(self.fd),)


def _adopted(duplicate: Any) -> InheritedDescriptor:
    fd: int = duplicate.detach()
    os.set_inheritable(fd, False)
    return InheritedDescriptor(fd)


def send_beside(beside: socket.socket, number: int, data: bytes, fds: Sequence[int]) -> None:
    """Send what does not fit a packet; the descriptors stay the caller's."""
    _descriptors.send(beside, NUMBER.pack(number) + data, fds)


def receive_beside(beside: socket.socket, number: int) -> tuple[bytes, list[int]]:
    """Return what was sent under a number, and drop what was sent under others before.

    Raises:
        OSError: the descriptors could not be opened in this process.
    """
    while True:
        part, fds = _descriptors.receive(beside, _MESSAGE_BYTES)
        if not part:
            raise EOFError("the other side of the pool is gone")
        if NUMBER.unpack_from(part) == (number,):
            return part[NUMBER.size :], fds
        close_all(fds)


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors, those that are not open too."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
