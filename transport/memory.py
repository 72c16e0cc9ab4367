"""Buffers in one piece of memory: how they lie in it, and memory that other processes map.

The memory is a file without a name (memfd_create): nothing has to be unlinked, and the system frees
it when the last process that has it open or mapped is gone, killed or not.

Layout: how many buffers there are and the size of each (uint64, little-endian), then each buffer;
all begin at multiples of 64 bytes.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
from collections.abc import Sequence
from itertools import accumulate

# For vector instructions.
_ALIGNMENT = 64
# The most buffers that one writev takes on Linux.
_MOST_PIECES = 1024
_COUNT = struct.Struct("<Q")


def lay_out(buffers: Sequence[memoryview]) -> list[memoryview]:
    """Return the pieces that lie one after the other in memory with the buffers; copies none."""
    index = struct.pack(f"<{len(buffers) + 1}Q", len(buffers), *(b.nbytes for b in buffers))
    pieces: list[memoryview] = []
    for buffer in (memoryview(index), *buffers):
        pieces += [buffer.cast("B"), memoryview(bytes(-buffer.nbytes % _ALIGNMENT))]
    # writev takes no empty ones forward.
    return [piece for piece in pieces if piece.nbytes]


def split(memory: memoryview) -> list[memoryview]:
    """Return the buffers in memory that was laid out; they use this very memory."""
    (count,) = _COUNT.unpack_from(memory)
    sizes = struct.unpack_from(f"<{count}Q", memory, _COUNT.size)
    steps = (size + -size % _ALIGNMENT for size in (_COUNT.size * (count + 1), *sizes))
    return [memory[start : start + size] for start, size in zip(accumulate(steps), sizes)]  # noqa: B905


def write(pieces: Sequence[memoryview]) -> int:
    """Return the descriptor of new memory with the pieces in it.

    Raises:
        OSError: no descriptor, or no memory.
    """
    left = list(pieces)
    descriptor = os.memfd_create("stepwrap", os.MFD_CLOEXEC)
    try:
        while left:
            # A call for each, as a file object makes, takes a fifth longer for many tensors.
            written = os.writev(descriptor, left[:_MOST_PIECES])
            while left and written >= left[0].nbytes:
                written -= left.pop(0).nbytes
            if written:
                left[0] = left[0][written:]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read(descriptor: int) -> memoryview:
    """Return a private, writable view of the memory; the descriptor stays open.

    Raises:
        OSError: the memory cannot be mapped.
    """
    size = os.fstat(descriptor).st_size
    torch = sys.modules.get("torch")
    if torch is None:
        # The standard mmap would keep a descriptor open for as long as the memory lives.
        data = memoryview(bytearray(size))
        place = 0
        while place < size:
            place += os.preadv(descriptor, [data[place:]], place)
        return data
    try:
        path = f"/proc/self/fd/{descriptor}"
        mapped = torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(errno.ENOMEM, str(error)) from error
    view: memoryview = mapped.numpy().data
    return view
