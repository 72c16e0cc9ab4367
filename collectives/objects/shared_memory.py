"""Share large objects between ranks of one host: one rank writes them to memory that others map.

Readers open the memory through the writer's entry in /proc. They map it privately: writing to it
copies the page and does not change the data of other ranks.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator, Sequence

from ...transport.memory import read, write
from ..process.ranks import process_space


def host() -> bytes:
    """Return 8 bytes that are equal on two ranks if one can map the other's memory."""
    setting = os.environ.get("STEPWRAP_SHARED_MEMORY", "").lower()
    can_map = setting not in ("0", "false", "no", "off") and hasattr(os, "memfd_create")
    return process_space() if can_map else uuid.uuid4().bytes[:8]


@contextlib.contextmanager
def share_pieces(chunks: Sequence[memoryview]) -> Iterator[list[int]]:
    """Keep the pieces in shared memory during this context.

    Yields process id, file descriptor, inode, and 1 if there was an error, otherwise 0.
    """
    if not chunks:
        yield [0, 0, 0, 0]
        return
    with contextlib.ExitStack() as stack:
        try:
            descriptor = write(chunks)
            stack.callback(os.close, descriptor)
            address = [os.getpid(), descriptor, os.fstat(descriptor).st_ino, 0]
        # Memory or descriptors are exhausted: all ranks get this flag and use the network.
        except OSError:
            stack.close()
            address = [0, 0, 0, 1]
        yield address


def map_pieces(address: Sequence[int], size: int) -> memoryview:
    """Return a private, writable mapping of another rank's memory.

    Raises:
        OSError: the memory is gone or cannot be mapped.
    """
    process, descriptor, inode, _ = address
    with open(f"/proc/{process}/fd/{descriptor}", "rb") as file:
        status = os.fstat(file.fileno())
        if (status.st_ino, status.st_size) != (inode, size):
            raise OSError("the shared memory differs from what the rank announced")
        return read(file.fileno())
