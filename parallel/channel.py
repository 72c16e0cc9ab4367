"""One direction between processes: whole messages with descriptors, no lock.

A pair of AF_UNIX sockets that keep messages apart. The system hands each message to one reader, so
any number of processes may read and write, and one that is killed leaves nothing half done.
"""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import sys
import termios
import time
import weakref
from fcntl import ioctl
from multiprocessing.reduction import DupFd
from typing import Any

from ..transport import descriptors as _descriptors
from ..transport.wire import INLINE_BYTES, Packed
from .errors import TimeoutError

_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_parent=_count_fork)


class Channel:
    """Both ends, as every process has them until one is closed."""

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise NotImplementedError(
                "queues between processes need Linux (memfd_create, AF_UNIX sockets that keep "
                f"messages apart), this is {sys.platform}"
            )
        with _descriptors.explaining():
            self._hold(*socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self._is_handed_on = False

    def _hold(self, reader: socket.socket, writer: socket.socket) -> None:
        self.reader, self.writer = reader, writer
        self._made_in, self._forks = os.getpid(), _forks
        # A socket warns when it is collected open.
        weakref.finalize(self, _close, reader, writer).atexit = False

    def __getstate__(self) -> Any:
        self._is_handed_on = True
        return DupFd(self.reader.fileno()), DupFd(self.writer.fileno())

    def __setstate__(self, state: Any) -> None:
        ends = [socket.socket(fileno=end.detach()) for end in state]
        for end in ends:
            end.set_inheritable(False)
        self._hold(*ends)
        self._is_handed_on = True

    @property
    def may_be_elsewhere(self) -> bool:
        """Whether another process may have the ends too."""
        return self._is_handed_on or os.getpid() != self._made_in or self._forks != _forks

    @property
    def is_closed(self) -> bool:
        """Whether this process has closed both ends."""
        return self.reader.fileno() < 0 and self.writer.fileno() < 0

    @property
    def load(self) -> int:
        """What is written and not yet read, in bytes of the system's bookkeeping."""
        waiting = ioctl(self.writer, termios.TIOCOUTQ, b"\0" * 4)
        return int.from_bytes(waiting, sys.byteorder)

    def send(self, packed: Packed, flags: int = 0) -> None:
        """Send a message; it is still to be released."""
        try:
            if packed.fds:
                _descriptors.send(self.writer, packed.data, packed.fds, flags)
            else:
                self.writer.send(packed.data, flags)
        except ConnectionResetError as error:
            # The last reader of the socket has left messages unread.
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)) from error
        except OSError as error:
            _check_open(error)
            raise

    def receive(self, timeout_s: float | None) -> tuple[bytes, list[int]]:
        """Return a message and its descriptors.

        Raises:
            EOFError: no process has the writing end any more.
            TimeoutError: none came in time.
        """
        if timeout_s is None:
            return self._received(0)
        deadline = time.monotonic() + timeout_s
        poller = None
        while True:
            try:
                return self._received(socket.MSG_DONTWAIT)
            # Also after a wait: another reader may have been faster.
            except BlockingIOError:
                if poller is None:
                    poller = select.poll()
                    poller.register(self.reader, select.POLLIN)
                wait(poller, deadline, timeout_s)

    def _received(self, flags: int) -> tuple[bytes, list[int]]:
        try:
            data, descriptors = _descriptors.receive(self.reader, INLINE_BYTES, flags)
        except OSError as error:
            _check_open(error)
            raise
        if not data:
            raise EOFError("the queue is empty, and no other process can put anything into it")
        return data, descriptors

    def is_empty(self) -> bool:
        """Return whether no message is waiting."""
        try:
            return not self.reader.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError as error:
            _check_open(error)
            raise

    def close(self) -> None:
        """Close both ends in this process."""
        _close(self.reader, self.writer)


def wait(poller: select.poll, deadline: float, timeout_s: float) -> list[tuple[int, int]]:
    """Return what is ready.

    Raises:
        TimeoutError: nothing was by the deadline.
    """
    remaining = deadline - time.monotonic()
    limit_ms = math.ceil(remaining * 1000) if remaining < math.inf else None
    ready = poller.poll(limit_ms) if remaining > 0 else poller.poll(0)
    if not ready and remaining < math.inf and time.monotonic() >= deadline:
        raise TimeoutError(f"the queue had nothing within {timeout_s} s")
    return ready


def _check_open(error: OSError) -> None:
    if error.errno == errno.EBADF:
        raise OSError(errno.EBADF, "the queue is closed in this process") from error


def _close(*ends: socket.socket) -> None:
    for end in ends:
        end.close()
