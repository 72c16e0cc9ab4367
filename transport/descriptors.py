"""Descriptors between processes."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import resource
import socket
from collections.abc import Iterable, Iterator, Sequence

# What Linux takes with a message.
_MOST_OF_A_MESSAGE = 253
# Of a value: a task of a pool is a message with two, a function and its arguments.
MOST = _MOST_OF_A_MESSAGE // 2
_SIZE = array.array("i").itemsize
_ROOM = socket.CMSG_SPACE(_MOST_OF_A_MESSAGE * _SIZE)
# Plain numbers: operations on enums take longer than the call itself.
_CLOSE_ON_EXEC, _TRUNCATED = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)


class Received:
    """A descriptor from another process, to be closed by the caller of `detach`."""

    def __init__(self, number: int) -> None:
        self.number = number

    def detach(self) -> int:
        """Return the number and leave the closing to the caller."""
        number, self.number = self.number, -1
        return number

    def close(self) -> None:
        """Close the descriptor, unless it has been detached."""
        if self.number >= 0:
            os.close(self.detach())


def close(numbers: Iterable[int]) -> None:
    """Close descriptors, among which may be some that are not open."""
    for number in numbers:
        with contextlib.suppress(OSError):
            os.close(number)


def bundled(numbers: Sequence[int]) -> int:
    """Return one descriptor that carries others, and close those.

    Raises:
        OSError: the system takes no more of them.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with ours:
            for first in range(0, len(numbers), _MOST_OF_A_MESSAGE):
                some = numbers[first : first + _MOST_OF_A_MESSAGE]
                send(ours, b"-", some, socket.MSG_DONTWAIT)
        close(numbers)
        return theirs.detach()
    finally:
        theirs.close()


def unbundled(descriptor: int) -> list[int]:
    """Return the descriptors that one carries, and close that one."""
    numbers: list[int] = []
    try:
        with socket.socket(fileno=descriptor) as carrier:
            while True:
                data, some = receive(carrier, 1)
                if not data:
                    return numbers
                numbers += some
    except BaseException:
        close(numbers)
        raise


def send(to: socket.socket, data: bytes, numbers: Sequence[int], flags: int = 0) -> None:
    """Send one message with descriptors, which stay open here."""
    with explaining():
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers))]
        to.sendmsg([data], rights, flags)


def receive(source: socket.socket, size: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """Return one message of at most `size` bytes and its descriptors; b"" when none will come.

    Raises:
        OSError: this process has no room for the descriptors; the message is lost.
    """
    data, numbers = try_receive(source, size, flags)
    if isinstance(numbers, OSError):
        raise numbers
    return data, numbers


def try_receive(
    source: socket.socket, size: int, flags: int = 0
) -> tuple[bytes, list[int] | OSError]:
    """As `receive`, but return the error in place of descriptors that there is no room for."""
    data, extra, state, _ = source.recvmsg(size, _ROOM, flags | _CLOSE_ON_EXEC)
    if not extra and not state & _TRUNCATED:
        return data, []
    numbers = array.array("i")
    for level, kind, content in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(content[: len(content) - len(content) % _SIZE])
    if state & _TRUNCATED:
        close(numbers)
        return data, _advice(errno.EMFILE)
    return data, list(numbers)


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """Give errors advice where descriptors have run out; also torch's own RuntimeError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        code = getattr(error, "errno", None)
        # torch has the number in its text.
        if code not in (errno.EMFILE, errno.ETOOMANYREFS) and "(24)" not in str(error):
            raise
        raise _advice(code or errno.EMFILE) from error


def _advice(code: int) -> OSError:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    what = "on their way to other processes" if code == errno.ETOOMANYREFS else "open"
    return OSError(
        code,
        f"too many open files: all {limit} descriptors that this process may have (`ulimit -n`) "
        f"are {what}, and each tensor in shared memory takes one; raise the limit, pass tensors "
        'by copy, or call torch.multiprocessing.set_sharing_strategy("file_system") first',
    )
