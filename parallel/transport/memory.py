"""Memory that travels as a descriptor: written once, mapped privately by the receiver.

It is a file without a name (memfd_create): nothing has to be unlinked, and the system frees it when
the last process that has it open or mapped is gone, killed or not.
"""

from __future__ import annotations

import errno
import mmap
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


def write(buffers: Sequence[memoryview]) -> int:
    """Return the descriptor of new memory with the buffers in it.

    Raises:
        OSError: no descriptor, or no memory.
    """
    index = struct.pack(f"<{len(buffers) + 1}Q", len(buffers), *(b.nbytes for b in buffers))
    pieces: list[memoryview] = []
    for buffer in (memoryview(index), *buffers):
        # writev takes no empty ones forward.
        pieces += [buffer.cast("B"), memoryview(bytes(-buffer.nbytes % _ALIGNMENT))]
    pieces = [piece for piece in pieces if piece.nbytes]
    descriptor = os.memfd_create("stepwrap", os.MFD_CLOEXEC)
    try:
        while pieces:
            written = os.writev(descriptor, pieces[:_MOST_PIECES])
            while pieces and written >= pieces[0].nbytes:
                written -= pieces.pop(0).nbytes
            if written:
                pieces[0] = pieces[0][written:]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read(descriptor: int, *, to_keep: bool) -> list[memoryview]:
    """Return the buffers in the memory; the descriptor stays open.

    Args:
        to_keep: the buffers may be written to and kept for long. Else they are only to be read,
            and keep a descriptor open.

    Raises:
        OSError: the memory cannot be mapped.
    """
    size = os.fstat(descriptor).st_size
    memory = _kept(descriptor, size) if to_keep else _mapped(descriptor, size)
    (count,) = _COUNT.unpack_from(memory)
    sizes = struct.unpack_from(f"<{count}Q", memory, _COUNT.size)
    steps = (size + -size % _ALIGNMENT for size in (_COUNT.size * (count + 1), *sizes))
    return [memory[start : start + size] for start, size in zip(accumulate(steps), sizes)]  # noqa: B905


def _mapped(descriptor: int, size: int) -> memoryview:
    return memoryview(mmap.mmap(descriptor, size, mmap.MAP_PRIVATE, mmap.PROT_READ))


def _kept(descriptor: int, size: int) -> memoryview:
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
