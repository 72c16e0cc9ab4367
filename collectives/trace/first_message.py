"""The first message of a collective: equal in size on every rank, whatever they call or pass."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..errors import Call, CollectiveError, Group, Place, tell, text_of
from ..process.ranks import comm_device, members

# One packet on any network; most objects that ranks exchange fit into it.
_BYTES = 1024
# Digests of the call and of what must be equal, the sender's host, the size below two flags.
_FIELDS = struct.Struct("<8s8s8sQ")
INLINE_BYTES = _BYTES - _FIELDS.size
_FAILED, _FOREIGN = 1 << 63, 1 << 62


class Header(NamedTuple):
    """What a rank says first: digests of the call and of what must agree, and what it sends."""

    call: bytes
    agreed: bytes
    host: bytes
    size: int
    has_failed: bool
    is_foreign: bool
    inline: memoryview


def meet(
    call: Call,
    *,
    agreed: str = "",
    pieces: Sequence[bytes | memoryview] = (),
    is_foreign: bool = False,
    host: bytes = b"",
    problem: Exception | None = None,
    failed_to: str = "pickle its object",
) -> list[Header]:
    """Exchange headers, by group rank; raise on every rank when some rank is in another call.

    What the `pieces` hold is in the message itself where it fits. `problem` is why this rank cannot
    take part.
    """
    own_call = digest(f"{call.name} {call.detail}")
    size = sum(map(len, pieces))
    flags = (_FAILED if problem else 0) | (_FOREIGN if is_foreign else 0)
    message = bytearray(_BYTES)
    _FIELDS.pack_into(message, 0, own_call, digest(agreed), host, size | flags)
    if 0 < size <= INLINE_BYTES:
        message[_FIELDS.size : _FIELDS.size + size] = b"".join(pieces)
    headers = [_decode(row) for row in gather_rows(_to_tensor(message, call.group), call.group)]
    if any(header.has_failed or header.call != own_call for header in headers):
        raise_disagreement(call, problem, failed_to)
    return headers


def raise_disagreement(
    call: Call, problem: Exception | None = None, failed_to: str = "take part"
) -> None:
    """Raise the same CollectiveError everywhere: who is where, with what; all ranks call this."""
    own = call.here(f"cannot {failed_to}: {text_of(problem)}" if problem else "").encode()
    sizes = gather_numbers([len(own)], call.group)
    padded = bytearray(own.ljust(max(sizes)[0]))
    rows = gather_rows(_to_tensor(padded, call.group), call.group)
    places = [Place.decode(bytes(row)) for row in rows]
    problems = [f"rank {place.rank} {place.problem}" for place in places if place.problem]
    if problems:
        where = tell(places, compare=False)
        raise CollectiveError(f"{call.name}(): {'; '.join(problems)} ({where})") from problem
    raise CollectiveError(
        f"the ranks {members(call.group)} must make the same call with the same structure, but "
        f"{tell(places)}"
    )


def digest(text: str) -> bytes:
    """Return 8 bytes that stand for the text."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def gather_rows(message: torch.Tensor, group: Group) -> list[memoryview]:
    """Return all ranks' messages, bytes on the communication device, which are equal in size."""
    rows = [torch.empty_like(message) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, message, group)
    if message.device.type != "cpu":
        rows = list(torch.stack(rows).cpu().unbind(0))
    return [row.numpy().data for row in rows]


def gather_numbers(
    numbers: Sequence[float], group: Group, kind: str = "q"
) -> list[tuple[int, ...]]:
    """Return all ranks' numbers, equally many, each in 64 bits: "q" integers, "d" floats."""
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
