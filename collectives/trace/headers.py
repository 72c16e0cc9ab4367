"""The first message of a collective, which has the same size on every rank and in every call."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..errors import Call, CollectiveError, Group, Place, describe_places, get_text
from ..process.ranks import comm_device, members

# One network packet, into which most objects fit.
_BYTES = 1024
# Digest of the call, digest of the compared text, sender's host, and two flag bits above the size.
_FIELDS = struct.Struct("<8s8s8sQ")
INLINE_BYTES = _BYTES - _FIELDS.size
_FAILED, _FOREIGN = 1 << 63, 1 << 62


class Header(NamedTuple):
    """The first message of a rank.

    Attributes:
        call: digest of the call.
        agreed: digest of the text that must be equal on all ranks.
        host: equal on two ranks if one can map the other's memory.
        size: the number of bytes that the rank sends.
        has_failed: whether the rank cannot take part.
        is_foreign: whether another rank may lack classes for unpickling.
        inline: the bytes themselves if they fit, otherwise empty.
    """

    call: bytes
    agreed: bytes
    host: bytes
    size: int
    has_failed: bool
    is_foreign: bool
    inline: memoryview


def exchange_headers(
    call: Call,
    *,
    agreed: str = "",
    inline: Sequence[bytes | memoryview] = (),
    is_foreign: bool = False,
    host: bytes = b"",
    problem: Exception | None = None,
    failed_to: str = "pickle its object",
) -> list[Header]:
    """Exchange headers between the ranks of the call's group; return them by group rank.

    Every rank must call this.

    Args:
        call: this rank's call.
        agreed: a text whose digest is sent.
        inline: the bytes to send; small ones are part of the message.
        is_foreign: whether another rank may fail to unpickle the pieces.
        host: see ``Header``.
        problem: the error that keeps this rank from taking part.
        failed_to: the action that failed on this rank, for the error text.

    Raises:
        CollectiveError: on every rank, if one is in another call or has a problem.
    """
    own_call = digest(f"{call.name} {call.detail}")
    size = sum(map(len, inline))
    flags = (_FAILED if problem else 0) | (_FOREIGN if is_foreign else 0)
    message = bytearray(_BYTES)
    _FIELDS.pack_into(message, 0, own_call, digest(agreed), host, size | flags)
    if 0 < size <= INLINE_BYTES:
        message[_FIELDS.size : _FIELDS.size + size] = b"".join(inline)
    headers = [_decode(row) for row in gather_rows(_to_tensor(message, call.group), call.group)]
    if any(header.has_failed or header.call != own_call for header in headers):
        raise_disagreement(call, problem, failed_to)
    return headers


def raise_disagreement(
    call: Call, problem: Exception | None = None, failed_to: str = "take part"
) -> None:
    """Raise an error that describes how the ranks differ; every rank must call this."""
    encoded = call.here(f"cannot {failed_to}: {get_text(problem)}" if problem else "").encode()
    sizes = gather_numbers([len(encoded)], call.group)
    padded = bytearray(encoded.ljust(max(sizes)[0]))
    rows = gather_rows(_to_tensor(padded, call.group), call.group)
    positions = [Place.decode(bytes(row)) for row in rows]
    problems = [
        f"rank {position.rank} {position.problem}" for position in positions if position.problem
    ]
    if problems:
        where = describe_places(positions, compare=False)
        raise CollectiveError(f"{call.name}(): {'; '.join(problems)} ({where})") from problem
    raise CollectiveError(
        f"the ranks {members(call.group)} must make the same call with the same structure, but "
        f"{describe_places(positions)}"
    )


def digest(text: str) -> bytes:
    """Return a hash of the text with 8 bytes."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def gather_rows(message: torch.Tensor, group: Group) -> list[memoryview]:
    """Return the messages of all ranks; every rank must call this.

    Args:
        message: a uint8 tensor on the communication device, of the same size on all ranks.
        group: the ranks.
    """
    rows = [torch.empty_like(message) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, message, group)
    if message.device.type != "cpu":
        rows = list(torch.stack(rows).cpu().unbind(0))
    return [row.numpy().data for row in rows]


def gather_numbers(
    numbers: Sequence[float], group: Group, kind: str = "q"
) -> list[tuple[int, ...]]:
    """Return the numbers of all ranks, by group rank; every rank must call this.

    All pass equally many numbers. 64 bits are sent for each: an integer if ``kind`` is "q", a
    float if it is "d".
    """
    layout = struct.Struct(f"<{len(numbers)}{kind}")
    rows = gather_rows(_to_tensor(bytearray(layout.pack(*numbers)), group), group)
    return [layout.unpack(row) for row in rows]


def _decode(row: memoryview) -> Header:
    call, agreed, host, number = _FIELDS.unpack_from(row)
    size = number & (_FOREIGN - 1)
    inline = row[_FIELDS.size : _FIELDS.size + (size if size <= INLINE_BYTES else 0)]
    return Header(call, agreed, host, size, bool(number & _FAILED), bool(number & _FOREIGN), inline)


def _to_tensor(message: bytearray, group: Group) -> torch.Tensor:
    return torch.frombuffer(message, dtype=torch.uint8).to(comm_device(group))
