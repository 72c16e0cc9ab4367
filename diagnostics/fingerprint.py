"""Compute 64-bit hashes of tensors (on their device), bytes and random streams."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..loops.rng import device_state, has_own_stream
from ..primitives.tensor_bits import tensor_bytes, widened
from ..wrappers.layout import local_part

# The bytes that an accelerator hashes at once: blocks avoid a copy of the whole model.
_BLOCK = 1 << 23
# The state of Python's generator: 624 words and a position.
_WORDS = struct.Struct("<625I")
# Signed numbers: the multiplier of "rrmxmx" mixers
# (https://mostlymangling.blogspot.com/2018/07/on-mixing-functions-in-fast-splittable.html), and
# 2**64 divided by the golden ratio. Both are odd, so multiplying modulo 2**64 is invertible.
_MULTIPLIER = 0xD6E8FEB86659FD93 - (1 << 64)
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


@torch.no_grad()
def hash_tensors(tensors: Iterable[Tensor]) -> int | Tensor:
    """Return a hash of all bits of ``tensors`` in their order (this rank's parts if sharded).

    The hash is computed on the device of the first tensor. On an accelerator, ``hash_words``
    computes a 0-d int64 tensor, and the host does not wait. On the CPU, SHA-1 is faster, and the
    hash is an int.
    """
    vectors = [_get_bytes(tensor) for tensor in tensors]
    if vectors and vectors[0].device.type != "cpu":
        return hash_words(vectors)
    digest = hashlib.sha1(usedforsecurity=False)
    for vector in vectors:
        content: Any = vector.cpu().numpy()
        digest.update(content)
    return _number(digest.digest())


def hash_words(vectors: Sequence[Tensor]) -> Tensor:
    """Return a hash of uint8 vectors, by integer arithmetic on the device of the first.

    Each word of 8 bytes is mixed with its position by an invertible function, and the results are
    added. A change in a single word is always detected, any other with probability 1 - 2**-64.
    """
    device = vectors[0].device
    sums: list[Tensor] = []
    block: list[Tensor] = []
    size = 0
    for chunk in (chunk for vector in vectors for chunk in torch.split(vector, _BLOCK)):
        block.append(chunk.to(device))
        size += len(chunk)
        if size >= _BLOCK:
            sums.append(_sum_of_words(block, size))
            block, size = [], 0
    sums.append(_sum_of_words(block or [vectors[0][:0]], size))
    # Add the length, since the last word is padded with zeros.
    return _mixed(torch.stack(sums)).sum() + sum(map(len, vectors))


def get_bits(value: Tensor | float) -> int | Tensor:
    """Return the bits of a number, or the hash of several."""
    tensor = torch.as_tensor(value).detach()
    if tensor.ndim or tensor.is_complex():
        return hash_tensors([tensor])
    wide = widened(tensor)
    return wide.view(torch.int64) if wide.itemsize == 8 else wide.view(torch.int32).long()


def hash_bytes(data: bytes) -> int:
    """Return a hash of ``data``."""
    return _number(hashlib.sha1(data, usedforsecurity=False).digest())


def hash_streams(device: torch.device) -> Iterator[tuple[str, int]]:
    """Yield name and hash of each random stream of this process."""
    _, words, gauss = random.getstate()
    yield "python", hash_bytes(_WORDS.pack(*words) + repr(gauss).encode())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, *numpy_state = numpy.random.get_state()
        yield "numpy", hash_bytes(keys.tobytes() + repr(numpy_state).encode())
    yield "torch", hash_bytes(torch.get_rng_state().numpy().tobytes())
    if has_own_stream(device):
        yield device.type, hash_bytes(device_state(device).numpy().tobytes())


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little", signed=True)


def _get_bytes(tensor: Tensor) -> Tensor:
    values = local_part(tensor).detach()
    if values.layout is not torch.strided:
        values = values.to_sparse(layout=torch.sparse_coo).coalesce()
        return torch.cat([_get_bytes(values.indices()), _get_bytes(values.values())])
    return tensor_bytes(values)


def _sum_of_words(block: list[Tensor], size: int) -> Tensor:
    # A new tensor, since `_mixed` works in place.
    words = torch.cat([*block, block[0].new_zeros(-size % 8)]).view(torch.int64)
    return _mixed(words).sum()


def _mixed(words: Tensor) -> Tensor:
    """Mix words in place with their positions."""
    words ^= _keys(words.device, len(words).bit_length())[: len(words)]
    return _mix_(words)


@cache
def _keys(device: torch.device, bits: int) -> Tensor:
    """Return pseudo-random numbers for the positions of up to 2**bits words."""
    return _mix_(torch.arange(1, (1 << bits) + 1, device=device) * _GOLDEN)


def _mix_(words: Tensor) -> Tensor:
    """Mix words in place, such that each bit changes about half of the bits of its word."""
    # Views of halves, because torch's right shift keeps the sign and would need a mask.
    halves = words.view(torch.int32)
    low, high = (halves[0::2], halves[1::2])[:: 1 if sys.byteorder == "little" else -1]
    for _ in range(2):
        low ^= high
        words *= _MULTIPLIER
    low ^= high
    return words
