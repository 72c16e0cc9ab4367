"""Large parcels between ranks of one host: written once into memory that readers map.

Readers open it
through the writer's entry in /proc and map it privately, so that each has a copy of its own from
the first write on.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator, Sequence

from ...transport.memory import read, write
from ..process.ranks import process_space


def host() -> bytes:
    """Return 8 bytes that two ranks share when one can map the other's memory."""
    setting = os.environ.get("STEPWRAP_SHARED_MEMORY", "").lower()
    can_map = setting not in ("0", "false", "no", "off") and hasattr(os, "memfd_create")
    return process_space() if can_map else uuid.uuid4().bytes[:8]


@contextlib.contextmanager
def offered(pieces: Sequence[memoryview]) -> Iterator[list[int]]:
    """Keep the pieces in memory for others to map: process id, descriptor, inode, 1 on failure."""
    if not pieces:
        yield [0, 0, 0, 0]
        return
    with contextlib.ExitStack() as stack:
        try:
            descriptor = write(pieces)
            stack.callback(os.close, descriptor)
            place = [os.getpid(), descriptor, os.fstat(descriptor).st_ino, 0]
        # No memory, no descriptor: the parcel takes the slow way, and all ranks know it.
        except OSError:
            stack.close()
            place = [0, 0, 0, 1]
        yield place


def take(place: Sequence[int], size: int) -> memoryview:
    """Return a private, writable mapping of what a rank of this host offers; else OSError."""
    process, descriptor, inode, _ = place
    with open(f"/proc/{process}/fd/{descriptor}", "rb") as file:
        status = os.fstat(file.fileno())
        if (status.st_ino, status.st_size) != (inode, size):
            raise OSError("the shared memory is not what the rank announced")
        return read(file.fileno())
