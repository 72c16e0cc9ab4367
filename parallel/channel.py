"""A channel for messages and file descriptors between any number of processes, without locks.

It is a pair of AF_UNIX sockets that preserve message boundaries. The system gives each message to
one reader, so a process that is killed leaves no message half written or half read.
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
    """Both ends of a channel. Every process that has the channel has both until it closes one."""

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise NotImplementedError(
                "queues between processes need Linux (memfd_create, AF_UNIX sockets that preserve "
                f"message boundaries), this is {sys.platform}"
            )
        with _descriptors.explaining():
            self._set_ends(*socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self._is_pickled = False

    def _set_ends(self, reader: socket.socket, writer: socket.socket) -> None:
        self.reader, self.writer = reader, writer
        self._made_in, self._forks = os.getpid(), _forks
        # If an open socket is garbage-collected, Python warns, so the ends are closed first.
        weakref.finalize(self, _close, reader, writer).atexit = False

    def __getstate__(self) -> Any:
        self._is_pickled = True
        return DupFd(self.reader.fileno()), DupFd(self.writer.fileno())

    def __setstate__(self, state: Any) -> None:
        ends = [socket.socket(fileno=end.detach()) for end in state]
        for end in ends:
            end.set_inheritable(False)
        self._set_ends(*ends)
        self._is_pickled = True

    @property
    def may_be_elsewhere(self) -> bool:
        """Whether another process may also have the ends."""
        return self._is_pickled or os.getpid() != self._made_in or self._forks != _forks

    @property
    def is_closed(self) -> bool:
        """Whether this process has closed both ends."""
        return self.reader.fileno() < 0 and self.writer.fileno() < 0

    @property
    def load(self) -> int:
        """The memory that the unread messages take, in bytes."""
        waiting = ioctl(self.writer, termios.TIOCOUTQ, b"\0" * 4)
        return int.from_bytes(waiting, sys.byteorder)

    def send(self, packed: Packed, flags: int = 0) -> None:
        """Send a message. The caller must close ``packed`` afterwards."""
        try:
            _descriptors.send(self.writer, packed.data, packed.fds, flags)
        except ConnectionResetError as error:
            # The last reader closed its end without reading all messages.
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)) from error
        except OSError as error:
            _check_open(error)
            raise

    def receive(self, timeout_s: float | None) -> tuple[bytes, list[int]]:
        """Return a message and its descriptors.

        Raises:
            EOFError: no process has the writing end any more.
            TimeoutError: no message arrived within the timeout.
        """
        if timeout_s is None:
            return self._receive(0)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._receive(socket.MSG_DONTWAIT)
            except BlockingIOError:
                # No message has arrived, or another reader took the one that ended the last wait.
                poller = select.poll()
                poller.register(self.reader, select.POLLIN)
                wait(poller, deadline, timeout_s)

    def _receive(self, flags: int) -> tuple[bytes, list[int]]:
        try:
            data, descriptors = _descriptors.receive(self.reader, INLINE_BYTES, flags)
        except OSError as error:
            _check_open(error)
            raise
        if not data:
            raise EOFError("the queue is empty, and no other process can put anything into it")
        return data, descriptors

    def is_empty(self) -> bool:
        """Return whether no message can be received."""
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
    """Wait for events of the poller and return them; the list may be empty before the deadline.

    Raises:
        TimeoutError: the deadline has passed without an event.
    """
    remaining = deadline - time.monotonic()
    limit_ms = math.ceil(max(remaining, 0) * 1000) if remaining < math.inf else None
    ready = poller.poll(limit_ms)
    if not ready and time.monotonic() >= deadline:
        raise TimeoutError(f"nothing arrived in the queue within {timeout_s} s")
    return ready


def _check_open(error: OSError) -> None:
    if error.errno == errno.EBADF:
        raise OSError(errno.EBADF, "the queue is closed in this process") from error


def _close(*ends: socket.socket) -> None:
    for end in ends:
        end.close()
