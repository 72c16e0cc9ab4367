"""File descriptors sent between processes over Unix sockets."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import resource
import socket
from collections.abc import Iterable, Iterator, Sequence

# The maximum number of descriptors that Linux sends with one message.
_MAX_PER_MESSAGE = 253
# The maximum number for one value. A pool's task message has two: a function and its arguments.
MAX_PER_VALUE = _MAX_PER_MESSAGE // 2
_SIZE = array.array("i").itemsize
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_PER_MESSAGE * _SIZE)


class Received:
    """A descriptor that was received from another process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def detach(self) -> int:
        """Return the number; the caller must close it."""
        number, self.number = self.number, -1
        return number

    def close(self) -> None:
        """Close the descriptor unless it has been detached."""
        if self.number >= 0:
            os.close(self.detach())


def close(numbers: Iterable[int]) -> None:
    """Close descriptors; ignore those that are not open."""
    for number in numbers:
        with contextlib.suppress(OSError):
            os.close(number)


def bundle(numbers: Sequence[int]) -> int:
    """Close the given descriptors and return one that carries all of them.

    Raises:
        OSError: a limit of the system is reached.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with ours:
            for start in range(0, len(numbers), _MAX_PER_MESSAGE):
                batch = numbers[start : start + _MAX_PER_MESSAGE]
                send(ours, b"-", batch, socket.MSG_DONTWAIT)
        close(numbers)
        return theirs.detach()
    finally:
        theirs.close()


def unbundle(descriptor: int) -> list[int]:
    """Close a descriptor from ``bundle`` and return those that it carries."""
    numbers: list[int] = []
    try:
        with socket.socket(fileno=descriptor) as carrier:
            while True:
                data, batch = receive(carrier, 1)
                if not data:
                    return numbers
                numbers += batch
    except BaseException:
        close(numbers)
        raise


def send(to: socket.socket, data: bytes, numbers: Sequence[int] = (), flags: int = 0) -> None:
    """Send one message, with descriptors if there are any; they stay open in this process."""
    if not numbers:
        to.send(data, flags)
        return
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers))
    with explaining():
        to.sendmsg([data], [rights], flags)


def receive(source: socket.socket, size: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """Return one message of at most ``size`` bytes and its descriptors; b"" at the end.

    Raises:
        OSError: this process cannot open the descriptors; the message is lost.
    """
    data, numbers = try_receive(source, size, flags)
    if isinstance(numbers, OSError):
        raise numbers
    return data, numbers


def try_receive(
    source: socket.socket, size: int, flags: int = 0
) -> tuple[bytes, list[int] | OSError]:
    """Call ``receive``, but return the error if this process cannot open the descriptors."""
    flags |= socket.MSG_CMSG_CLOEXEC
    data, extra, state, _ = source.recvmsg(size, _ANCILLARY_BYTES, flags)
    numbers = array.array("i")
    for level, kind, content in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(content[: len(content) - len(content) % _SIZE])
    if state & socket.MSG_CTRUNC:
        close(numbers)
        return data, _limit_error(errno.EMFILE)
    return data, list(numbers)


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """Replace errors about too many descriptors, torch's included, with one that gives advice."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        code = getattr(error, "errno", None)
        # torch raises a RuntimeError that has the number in its text.
        if code not in (errno.EMFILE, errno.ETOOMANYREFS) and "(24)" not in str(error):
            raise
        raise _limit_error(code or errno.EMFILE) from error


def _limit_error(code: int) -> OSError:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    state = "on their way to other processes" if code == errno.ETOOMANYREFS else "open"
    return OSError(
        code,
        f"too many open files: all {limit} descriptors that this process may have (`ulimit -n`) "
        f"are {state}, and each tensor in shared memory takes one; raise the limit, pass tensors "
        'by copy, or call torch.multiprocessing.set_sharing_strategy("file_system") first',
    )
