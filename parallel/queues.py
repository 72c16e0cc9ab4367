"""Queues between processes of one machine.

A message goes to exactly one reader, whole or not at all, even if processes are killed. About 270
small messages, or 200 KB of larger ones, may wait; then `put` does. Values of more than 32 KB lie
in separate memory and count as small.
"""

from __future__ import annotations

import errno
import math
import multiprocessing
import select
import socket
import time
from multiprocessing.context import BaseContext
from typing import Any

from ..transport.wire import Packed, pack, release, unpack
from .channel import Channel, wait
from .errors import TimeoutError


class SimpleQueue:
    """A queue for any number of processes that put and get.

    To other processes it goes as an argument when they are started, by fork, spawn or forkserver.
    A process that is killed while it waits leaves the queue as it was.

    Args:
        ctx: accepted because it is documented; nothing here depends on how processes are started.
        copy_tensor: True gives the receiver copies; False passes CPU tensors through
            shared memory, into which the sender's are moved (CUDA tensors: by handles).
    """

    def __init__(self, *, ctx: BaseContext | None = None, copy_tensor: bool = False) -> None:
        self._channel = Channel()
        self._copy_tensor = copy_tensor

    def put(self, obj: object) -> None:
        """Put an object into the queue; wait while the queue is full.

        Raises:
            OSError: the queue is closed here, or everywhere else (BrokenPipeError), or the limit
                of open files is reached.
        """
        packed = pack(obj, copy_tensor=self._copy_tensor)
        try:
            self._take_side(puts=True)
            self._channel.send(packed)
        finally:
            release(packed)

    def get(self, timeout: float | None = None) -> Any:
        """Take the next object out of the queue.

        Args:
            timeout: seconds to wait; None waits as long as it takes.

        Raises:
            TimeoutError: there was nothing in time (also the built-in one and multiprocessing's).
            OSError: the queue is closed here.
        """
        self._take_side(puts=False)
        return unpack(*self._channel.receive(None if timeout is None else _checked(timeout)))

    # The same: `put` and `get` take no lock either.
    quick_put, quick_get = put, get

    def empty(self) -> bool:
        """Return whether there is nothing to get now."""
        return self._channel.is_empty()

    def close(self) -> None:
        """Close the queue in this process; waiting messages stay for the others."""
        self._channel.close()

    def __getstate__(self) -> dict[str, Any]:
        multiprocessing.context.assert_spawning(self)
        return self.__dict__

    def _take_side(self, *, puts: bool) -> None:
        """Note how this process uses the queue."""


class SimpleP2PQueue(SimpleQueue):
    """A queue with one process at each side, which learn when the other one is gone.

    The first `put` or `get` of a process takes that side, once another process may have the queue
    too. `get` raises EOFError when the writing process has ended and nothing is left, `put`
    BrokenPipeError when the reading one has.

    Args:
        copy_tensor: see `SimpleQueue`.
    """

    def __init__(self, *, copy_tensor: bool = False) -> None:
        super().__init__(copy_tensor=copy_tensor)

    def _take_side(self, *, puts: bool) -> None:
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
    """Queues to several processes, or from several, each with a separate queue.

    Args:
        queue_num: how many queues.
        copy_tensor: see `SimpleQueue`.

    Raises:
        ValueError: `queue_num` is less than 1.
    """

    def __init__(self, queue_num: int, *, copy_tensor: bool = False) -> None:
        if queue_num < 1:
            raise ValueError(f"queue_num must be at least 1, got {queue_num}")
        self._queues = [SimpleP2PQueue(copy_tensor=copy_tensor) for _ in range(queue_num)]
        self._copy_tensor = copy_tensor
        self._gone: set[int] = set()
        self._last = queue_num - 1

    def get_sub_queue(self, index: int) -> SimpleP2PQueue:
        """Return the queue that goes to one process."""
        return self._queues[index]

    def put(self, obj: object) -> None:
        """Put an object into the queue in which least is waiting, in turn among equals.

        Waits while all are full. Queues whose process is gone are passed over.

        Raises:
            OSError: all queues are closed here, or all processes are gone (BrokenPipeError), or
                the limit of open files is reached.
        """
        self._check_open()
        packed = pack(obj, copy_tensor=self._copy_tensor)
        try:
            while not self._sent(packed):
                poller = select.poll()
                for index in self._in_turn(puts=True):
                    poller.register(self._queues[index]._channel.writer, select.POLLOUT)
                poller.poll()
        finally:
            release(packed)

    def get(self, timeout: float | None = None) -> Any:
        """Take an object out of any of the queues, which get their turns.

        Args:
            timeout: seconds to wait; None waits as long as it takes.

        Raises:
            EOFError: all processes are gone and nothing is left.
            TimeoutError: there was nothing in time.
            OSError: all queues are closed here.
        """
        self._check_open()
        timeout = math.inf if timeout is None else _checked(timeout)
        deadline = time.monotonic() + timeout
        while True:
            poller = select.poll()
            places = {}
            for index in self._in_turn(puts=False):
                reader = self._queues[index]._channel.reader
                places[reader.fileno()] = index
                poller.register(reader, select.POLLIN)
            if not places:
                raise EOFError("the queues are empty, and no other process can put into them")
            for number, _ in wait(poller, deadline, timeout):
                message = self._received(places[number])
                if message is not None:
                    return unpack(*message)

    # The same: `put` and `get` take no lock either.
    quick_put, quick_get = put, get

    def empty(self) -> bool:
        """Return whether there is nothing to get now."""
        self._check_open()
        return all(self._queues[index].empty() for index in self._in_turn(puts=False))

    def close(self) -> None:
        """Close all queues in this process."""
        for queue in self._queues:
            queue.close()

    def _check_open(self) -> None:
        if all(queue._channel.is_closed for queue in self._queues):
            raise OSError(errno.EBADF, "the queues are closed in this process")

    def _in_turn(self, *, puts: bool) -> list[int]:
        """Return the queues that are of use, beginning after the last one used."""
        count = len(self._queues)
        order = [(self._last + 1 + step) % count for step in range(count)]
        useful = []
        for index in order:
            queue = self._queues[index]
            if index not in self._gone and not queue._channel.is_closed:
                queue._take_side(puts=puts)
                useful.append(index)
        return useful

    def _sent(self, packed: Packed) -> bool:
        """Return whether a queue has taken the message."""
        order = self._in_turn(puts=True)
        for index in sorted(order, key=lambda index: self._queues[index]._channel.load):
            try:
                self._queues[index]._channel.send(packed, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                self._gone.add(index)
                continue
            self._last = index
            return True
        if len(self._gone) == len(self._queues):
            raise BrokenPipeError(errno.EPIPE, "no process is left that gets from the queues")
        return False

    def _received(self, index: int) -> tuple[bytes, list[int]] | None:
        try:
            message = self._queues[index]._channel.receive(0)
        except TimeoutError:
            return None
        except EOFError:
            self._gone.add(index)
            return None
        self._last = index
        return message


def _checked(timeout: float) -> float:
    if not timeout >= 0:
        raise ValueError(f"timeout must be None or seconds from 0 on, got {timeout}")
    return timeout
