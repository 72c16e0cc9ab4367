"""The first message of a collective: equal in size on every rank, whatever they call or pass."""

from __future__ import annotations

import functools
import hashlib
import os
import struct
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist

from ..errors import Call, CollectiveError, Place, tell, text_of
from ..process.ranks import comm_device, members
from .serialize import Parcel
from .shared_memory import is_available

# One packet on any network; most objects that ranks exchange fit into it.
_BYTES = 1024
_FIELDS = struct.Struct("<8s16s16sQB")
INLINE_BYTES = _BYTES - _FIELDS.size
_FAILED, _FOREIGN = 1, 2
_Group: TypeAlias = "dist.ProcessGroup | None"


@dataclass(frozen=True)
class Header:
    """What a rank says first.

    Attributes:
        call: digest of the call's name; a collective in which these differ cannot go on.
        agreed: digest of what the caller wants to be equal on all ranks.
        host: the same on two ranks when one can map the other's memory.
        size: bytes of the parcel, 0 without one.
        inline: the parcel itself where it fits, in memory of its own.
    """

    call: bytes
    agreed: bytes
    host: bytes
    size: int
    flags: int
    inline: memoryview

    @property
    def has_failed(self) -> bool:
        """Whether the rank cannot take part and says why in the next message."""
        return bool(self.flags & _FAILED)

    @property
    def is_foreign(self) -> bool:
        """Whether some rank may be unable to unpickle the parcel."""
        return bool(self.flags & _FOREIGN)


def meet(
    call: Call,
    *,
    agreed: str = "",
    parcel: Parcel | None = None,
    problem: Exception | None = None,
    failed_to: str = "pickle its object",
) -> list[Header]:
    """Exchange headers, by group rank; every rank of the group must call this.

    Args:
        problem: why this rank cannot take part.
        failed_to: what it could not do because of it.

    Raises:
        CollectiveError: on every rank, when some rank is in another call or has a problem.
    """
    parcel = parcel or Parcel()
    own = digest(f"{call.name} {call.detail}")[:8], digest(agreed), _host()
    size = parcel.size
    flags = (_FAILED if problem else 0) | (_FOREIGN if parcel.is_foreign else 0)
    message = bytearray(_BYTES)
    _FIELDS.pack_into(message, 0, *own, size, flags)
    if 0 < size <= INLINE_BYTES:
        message[_FIELDS.size : _FIELDS.size + size] = b"".join(parcel.pieces())
    headers = [_decode(row) for row in gather_rows(_to_tensor(message, call.group), call.group)]
    if any(h.has_failed or h.call != own[0] for h in headers):
        raise_disagreement(call, problem, failed_to)
    return headers


def raise_disagreement(
    call: Call, problem: Exception | None = None, failed_to: str = "take part"
) -> None:
    """Raise the same CollectiveError everywhere: who is where, with what; all ranks call this.

    Args:
        problem: what is wrong on this rank, if that is why.
        failed_to: what this rank could not do because of it.
    """
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
    """Return 16 bytes that stand for the text."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _decode(row: memoryview) -> Header:
    call, agreed, host, size, flags = _FIELDS.unpack_from(row)
    return Header(call, agreed, host, size, flags, row[_FIELDS.size : _FIELDS.size + size])


def gather_rows(message: torch.Tensor, group: _Group) -> list[memoryview]:
    """Return all ranks' messages, bytes on the communication device, which are equal in size."""
    rows = [torch.empty_like(message) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, message, group)
    if message.device.type != "cpu":
        rows = list(torch.stack(rows).cpu().unbind(0))
    return [row.numpy().data for row in rows]


def gather_numbers(numbers: Sequence[int], group: _Group) -> list[tuple[int, ...]]:
    """Return all ranks' numbers, equally many, each in 64 bits."""
    layout = struct.Struct(f"<{len(numbers)}q")
    rows = gather_rows(_to_tensor(bytearray(layout.pack(*numbers)), group), group)
    return [layout.unpack(row) for row in rows]


def _to_tensor(message: bytearray, group: _Group) -> torch.Tensor:
    return torch.frombuffer(message, dtype=torch.uint8).to(comm_device(group))


def _host() -> bytes:
    """Return what two ranks share when one can map the other's memory."""
    return _boot_and_processes() if is_available() else uuid.uuid4().bytes


@functools.cache
def _boot_and_processes() -> bytes:
    """Return what says: the same boot of one machine, and process ids that mean the same."""
    if not os.path.exists("/proc/self/ns/pid"):
        return uuid.uuid4().bytes
    with open("/proc/sys/kernel/random/boot_id") as file:
        return digest(f"{file.read()} {os.readlink('/proc/self/ns/pid')}")
