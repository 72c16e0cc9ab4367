"""Buffers in one block of memory, and memory that other processes can map.

The memory is an anonymous file (``memfd_create``): nothing has to be unlinked, and the system frees
it when the last process that has it open or mapped ends, even if that process is killed.

Layout: the number of buffers and the size of each (uint64, little-endian), then the buffers. Each
part starts at a multiple of 64 bytes.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
from collections.abc import Sequence
from itertools import accumulate

# Vector instructions are faster on aligned data.
_ALIGNMENT = 64
# The maximum number of buffers that Linux accepts in one writev call.
_MAX_WRITEV_PIECES = 1024
_COUNT = struct.Struct("<Q")


def aligned_pieces(buffers: Sequence[memoryview]) -> list[memoryview]:
    """Return the pieces of memory that make up the layout; the buffers are not copied."""
    index = struct.pack(f"<{len(buffers) + 1}Q", len(buffers), *(b.nbytes for b in buffers))
    pieces: list[memoryview] = []
    for buffer in (memoryview(index), *buffers):
        pieces += [buffer.cast("B"), memoryview(bytes(-buffer.nbytes % _ALIGNMENT))]
    # writev makes no progress on empty pieces.
    return [piece for piece in pieces if piece.nbytes]


def split(memory: memoryview) -> list[memoryview]:
    """Return views of the buffers in memory that holds the pieces of ``aligned_pieces``."""
    (count,) = _COUNT.unpack_from(memory)
    sizes = struct.unpack_from(f"<{count}Q", memory, _COUNT.size)
    steps = (size + -size % _ALIGNMENT for size in (_COUNT.size * (count + 1), *sizes))
    return [memory[start : start + size] for start, size in zip(accumulate(steps), sizes)]  # noqa: B905


def write(pieces: Sequence[memoryview]) -> int:
    """Return the descriptor of new memory that contains the pieces.

    Raises:
        OSError: a limit on descriptors or memory is reached.
    """
    unwritten = list(pieces)
    descriptor = os.memfd_create("stepwrap", os.MFD_CLOEXEC)
    try:
        while unwritten:
            # writev: a file object would make one call per piece, 20 % slower for many tensors.
            written = os.writev(descriptor, unwritten[:_MAX_WRITEV_PIECES])
            while unwritten and written >= unwritten[0].nbytes:
                written -= unwritten.pop(0).nbytes
            if written:
                unwritten[0] = unwritten[0][written:]
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
        # Not mmap: it would keep a descriptor open as long as the view exists.
        data = memoryview(bytearray(size))
        done = 0
        while done < size:
            done += os.preadv(descriptor, [data[done:]], done)
        return data
    try:
        path = f"/proc/self/fd/{descriptor}"
        mapped = torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(errno.ENOMEM, str(error)) from error
    view: memoryview = mapped.numpy().data
    return view
