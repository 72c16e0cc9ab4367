"""Large parcels between ranks of one host: written once into memory that readers map.

The memory is a file without a name (memfd_create): nothing has to be unlinked, and the system
frees it when the last process that has it open or mapped is gone, killed or not. Readers open it
through the writer's entry in /proc and map it privately, so that each has a copy of its own from
the first write on.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence

import torch

from .serialize import Parcel

VARIABLE = "STEPWRAP_SHARED_MEMORY"
# The most buffers that one writev takes on Linux.
_MOST_PIECES = 1024


def is_available() -> bool:
    """Return whether this process can offer memory to others of its host."""
    allowed = os.environ.get(VARIABLE, "").lower() not in ("0", "false", "no", "off")
    return allowed and hasattr(os, "memfd_create")


class Offer(contextlib.AbstractContextManager["Offer"]):
    """A parcel in shared memory, there for others to map until it is closed.

    Attributes:
        place: process id, descriptor, inode, and 0 or the errno that kept it from being there.
    """

    def __init__(self, parcel: Parcel) -> None:
        self._descriptor = -1
        if not parcel.size:
            self.place = [0, 0, 0, 0]
            return
        try:
            self._descriptor = os.memfd_create("stepwrap", os.MFD_CLOEXEC)
            _write(self._descriptor, parcel)
        # No memory, no descriptor: the parcel takes the slow way, and all ranks know it.
        except OSError as error:
            self.close()
            self.place = [0, 0, 0, error.errno or errno.EIO]
            return
        self.place = [os.getpid(), self._descriptor, os.fstat(self._descriptor).st_ino, 0]

    def close(self) -> None:
        """Give up this process's hold on the memory."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __exit__(self, *_: object) -> None:
        self.close()


def take(place: Sequence[int], size: int) -> memoryview:
    """Return a private, writable mapping of a parcel that a rank of this host offers.

    Raises:
        OSError: the memory cannot be opened, is not what was announced, or cannot be mapped.
    """
    process, descriptor, inode, _ = place
    own = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(own)
        if (status.st_ino, status.st_size) != (inode, size):
            raise OSError(errno.ESTALE, "the shared memory is not what the rank announced")
        # Not the standard mmap, which keeps a descriptor open for as long as the memory lives.
        data = torch.from_file(f"/proc/self/fd/{own}", shared=False, size=size, dtype=torch.uint8)
        return data.numpy().data
    except RuntimeError as error:
        raise OSError(errno.ENOMEM, str(error)) from error
    finally:
        os.close(own)


def _write(descriptor: int, parcel: Parcel) -> None:
    pieces = [piece for piece in parcel.pieces() if len(piece)]
    while pieces:
        written = os.writev(descriptor, pieces[:_MOST_PIECES])
        while pieces and written >= len(pieces[0]):
            written -= len(pieces.pop(0))
        if written:
            pieces[0] = pieces[0][written:]
