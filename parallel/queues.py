"""Queues between processes of one machine.

Each message arrives at exactly one reader, completely or not at all, even if processes are killed.
A full queue has about 270 small messages, or about 100 to 200 KB of larger ones. Values of more
than 32 KB are in separate memory and count as small messages.
"""

from __future__ import annotations

import contextlib
import errno
import math
import multiprocessing
import select
import socket
import time
from multiprocessing.context import BaseContext
from typing import Any

from ..transport.wire import Packed, pack, unpack
from .arguments import seconds, whole_number
from .channel import Channel, wait
from .errors import TimeoutError


class SimpleQueue:
    """A queue that any number of processes may put into and get from.

    Other processes get the queue as an argument when they are started, by fork, spawn or
    forkserver. A process that is killed while it waits leaves the queue intact.

    Args:
        ctx: accepted for compatibility, without effect.
        copy_tensor: True gives the receiver copies; False moves CPU tensors into shared memory
            and sends handles of CUDA tensors.
    """

    def __init__(self, *, ctx: BaseContext | None = None, copy_tensor: bool = False) -> None:
        self._channel = Channel()
        self._copy_tensor = copy_tensor

    def put(self, obj: object) -> None:
        """Put an object into the queue; wait while the queue is full.

        Raises:
            OSError: the queue is closed in this process, or the limit of open files is reached.
        """
        with contextlib.closing(pack(obj, copy_tensor=self._copy_tensor)) as packed:
            self._choose_side(puts=True)
            self._channel.send(packed)

    def get(self, timeout: float | None = None) -> Any:
        """Remove the next object from the queue and return it.

        Args:
            timeout: the longest wait in seconds (default: no limit).

        Raises:
            TimeoutError: the queue stayed empty for ``timeout`` seconds. The class is a subclass of
                the built-in ``TimeoutError`` and of multiprocessing's.
            OSError: the queue is closed in this process.
            ValueError: ``timeout`` is negative.
        """
        self._choose_side(puts=False)
        return unpack(*self._channel.receive(_checked_timeout(timeout)))

    # In machin these take no lock. Here `put` and `get` take none either.
    quick_put, quick_get = put, get

    def empty(self) -> bool:
        """Return whether there is currently nothing to get."""
        return self._channel.is_empty()

    def close(self) -> None:
        """Close the queue in this process; other processes can still get waiting messages."""
        self._channel.close()

    def __getstate__(self) -> dict[str, Any]:
        multiprocessing.context.assert_spawning(self)
        return self.__dict__

    def _choose_side(self, *, puts: bool) -> None:
        """Do nothing. ``SimpleP2PQueue`` closes the end that this process does not use."""


class SimpleP2PQueue(SimpleQueue):
    """A queue between two processes, each of which notices when the other has ended.

    Once the queue has been passed to another process, the first ``put`` of a process makes it the
    writer, and the first ``get`` makes it the reader. Afterwards ``get`` raises ``OSError`` in the
    writer, and ``put`` in the reader. ``get`` raises ``EOFError`` if the queue is empty and the
    writer has ended; ``put`` raises ``BrokenPipeError`` if the reader has ended.

    Args:
        copy_tensor: see ``SimpleQueue``.
    """

    def __init__(self, *, copy_tensor: bool = False) -> None:
        super().__init__(copy_tensor=copy_tensor)

    def _choose_side(self, *, puts: bool) -> None:
        channel = self._channel
        mine, other = channel.reader, channel.writer
        if puts:
            mine, other = other, mine
        if mine.fileno() < 0 <= other.fileno():
            uses = ("gets from", "put into") if puts else ("puts into", "get from")
            raise OSError(errno.EBADF, "this process {} the queue and cannot {} it".format(*uses))
        if channel.may_be_elsewhere and other.fileno() >= 0:
            other.close()


class MultiP2PQueue:
    """Queues to several processes, or from several: a ``SimpleP2PQueue`` per process.

    Args:
        queue_num: the number of queues.
        copy_tensor: see ``SimpleQueue``.

    Raises:
        ValueError: ``queue_num`` is less than 1.
    """

    def __init__(self, queue_num: int, *, copy_tensor: bool = False) -> None:
        queue_num = whole_number("queue_num", queue_num)
        self._queues = [SimpleP2PQueue(copy_tensor=copy_tensor) for _ in range(queue_num)]
        self._copy_tensor = copy_tensor
        self._gone: set[int] = set()
        self._last = queue_num - 1

    def get_sub_queue(self, index: int) -> SimpleP2PQueue:
        """Return the queue of one process."""
        return self._queues[index]

    def put(self, obj: object) -> None:
        """Put an object into the queue with the fewest waiting bytes; equal queues take turns.

        Wait while all queues are full. Skip queues whose process has ended.

        Raises:
            OSError: all queues are closed in this process, or the processes of all open queues have
                ended (``BrokenPipeError``), or the limit of open files is reached.
        """
        self._check_open()
        with contextlib.closing(pack(obj, copy_tensor=self._copy_tensor)) as packed:
            while not self._try_send(packed):
                poller = select.poll()
                for index in self._usable(puts=True):
                    poller.register(self._queues[index]._channel.writer, select.POLLOUT)
                poller.poll()

    def get(self, timeout: float | None = None) -> Any:
        """Remove the next object from one of the queues, which take turns, and return it.

        Args:
            timeout: the longest wait in seconds (default: no limit).

        Raises:
            EOFError: all processes have ended and the queues are empty.
            TimeoutError: the queues stayed empty for ``timeout`` seconds.
            OSError: all queues are closed in this process.
            ValueError: ``timeout`` is negative.
        """
        self._check_open()
        timeout = _checked_timeout(timeout)
        timeout = math.inf if timeout is None else timeout
        deadline = time.monotonic() + timeout
        while True:
            poller = select.poll()
            index_by_fd = {}
            for index in self._usable(puts=False):
                reader = self._queues[index]._channel.reader
                index_by_fd[reader.fileno()] = index
                poller.register(reader, select.POLLIN)
            if not index_by_fd:
                raise EOFError("the queues are empty, and no other process can put into them")
            for fd, _ in wait(poller, deadline, timeout):
                message = self._try_receive(index_by_fd[fd])
                if message is not None:
                    return unpack(*message)

    # In machin these take no lock. Here `put` and `get` take none either.
    quick_put, quick_get = put, get

    def empty(self) -> bool:
        """Return whether there is currently nothing to get."""
        self._check_open()
        return all(self._queues[index].empty() for index in self._usable(puts=False))

    def close(self) -> None:
        """Close all queues in this process."""
        for queue in self._queues:
            queue.close()

    def _check_open(self) -> None:
        if all(queue._channel.is_closed for queue in self._queues):
            raise OSError(errno.EBADF, "the queues are closed in this process")

    def _usable(self, *, puts: bool) -> list[int]:
        """Return the indices of the open queues, starting after the last one used."""
        count = len(self._queues)
        usable = []
        for index in ((self._last + 1 + step) % count for step in range(count)):
            queue = self._queues[index]
            if index not in self._gone and not queue._channel.is_closed:
                queue._choose_side(puts=puts)
                usable.append(index)
        return usable

    def _try_send(self, packed: Packed) -> bool:
        """Return whether the message was sent."""
        usable = self._usable(puts=True)
        for index in sorted(usable, key=lambda index: self._queues[index]._channel.load):
            try:
                self._queues[index]._channel.send(packed, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                self._gone.add(index)
                continue
            self._last = index
            return True
        if self._gone.issuperset(usable):
            raise BrokenPipeError(errno.EPIPE, "no process is left that gets from the queues")
        return False

    def _try_receive(self, index: int) -> tuple[bytes, list[int]] | None:
        try:
            message = self._queues[index]._channel.receive(0)
        except TimeoutError:
            return None
        except EOFError:
            self._gone.add(index)
            return None
        self._last = index
        return message


def _checked_timeout(timeout: float | None) -> float | None:
    duration = seconds("timeout", timeout)
    if duration is not None and duration < 0:
        raise ValueError(f"timeout must be None or at least 0 s, got {timeout}")
    return timeout
