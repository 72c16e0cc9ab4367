"""Parcels between ranks: in the first message, through shared memory, or over the transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ._meeting import INLINE_BYTES, Header, meet, raise_disagreement
from ._shared_memory import Offer, take
from ._story import Call
from .process import comm_device, members
from .serialize import Parcel, unpack

# From this size on, mapping memory costs less than the transport between two processes.
_SHARED_FROM = 256 * 1024
# Padding all parcels to the largest is one collective; it may cost this many times the bytes.
_MOST_PADDING = 1.25
_DONE, _NOT_UNPICKLED, _NOT_MAPPED = range(3)
# By group rank; None where nothing was sent to this rank.
_Memory: TypeAlias = "list[memoryview | None]"


def exchange(
    call: Call, parcel: Parcel, problem: Exception | None, receivers: Sequence[int]
) -> dict[int, Any]:
    """Send every rank's parcel to the receivers; every rank of the group must call this.

    Args:
        parcel: may be empty: then nothing is sent.
        problem: why this rank could not make its parcel.
        receivers: global ranks, the same on all ranks.

    Returns:
        The objects by global rank of the sender, own copies; empty on ranks that do not receive.

    Raises:
        CollectiveError: on every rank, when one could not make its parcel or unpickle another's.
    """
    headers = meet(call, parcel=parcel, problem=problem)
    work = _Work(call, headers, parcel, receivers)
    largest = max(work.sizes)
    if largest >= _SHARED_FROM and len({header.host for header in headers}) == 1:
        objects = work.through_shared_memory()
        if objects is not None:
            return objects
    memory = work.over_the_transport() if largest else work.inline()
    return work.unpack(memory)


@dataclass(frozen=True)
class _Work:
    """One exchange whose headers are known."""

    call: Call
    headers: Sequence[Header]
    parcel: Parcel
    receivers: Sequence[int]

    @property
    def sizes(self) -> list[int]:
        """Bytes that are not in the headers, by group rank."""
        return [0 if h.size <= INLINE_BYTES else h.size for h in self.headers]

    @property
    def receives(self) -> bool:
        """Whether this rank is a receiver."""
        return dist.get_rank() in self.receivers

    def inline(self) -> _Memory:
        """Return what came in the headers."""
        return [h.inline if 0 < h.size <= INLINE_BYTES else None for h in self.headers]

    def through_shared_memory(self) -> dict[int, Any] | None:
        """Return the objects; None, on all ranks, when some rank has no or sees no such memory."""
        own_size = self.sizes[dist.get_rank(self.call.group)]
        # Open until all have agreed on the outcome: until then they may be mapping it.
        with Offer(self.parcel if own_size else Parcel()) as offer:
            places = _gather_numbers(offer.place, self.call)
            if any(place[-1] for place in places):
                return None
            memory = self.inline()
            try:
                for index, size in enumerate(self.sizes if self.receives else ()):
                    if size:
                        memory[index] = take(places[index], size)
            except OSError:
                return self._agree(_NOT_MAPPED)
            objects, problem = self._try_to_unpack(memory)
            return self._agree(_NOT_UNPICKLED if problem else _DONE, objects, problem)

    def over_the_transport(self) -> _Memory:
        """Return the parcels after one padded collective, or one exact message each."""
        device = comm_device(self.call.group)
        sizes, own = self.sizes, dist.get_rank(self.call.group)
        is_for_all = len(self.receivers) == len(sizes)
        if is_for_all and len(sizes) * max(sizes) <= _MOST_PADDING * sum(sizes):
            data = _fill(self.parcel, sizes[own], max(sizes)).to(device)
            buffers = [torch.empty_like(data) for _ in sizes]
            dist.all_gather(buffers, data, self.call.group)
        else:
            buffers = [
                _fill(self.parcel, size).to(device)
                if index == own
                else torch.empty(size if self.receives else 0, dtype=torch.uint8, device=device)
                for index, size in enumerate(sizes)
            ]
            for work in self._send(buffers, own):
                work.wait()
        memory = self.inline()
        for index, size in enumerate(sizes if self.receives else ()):
            if size:
                memory[index] = buffers[index][:size].cpu().numpy().data
        return memory

    def _send(self, buffers: Sequence[torch.Tensor], own: int) -> list[Any]:
        """Start the messages of exact size between the senders and the receivers."""
        ranks, group = members(self.call.group), self.call.group
        senders = [(index, ranks[index]) for index, size in enumerate(self.sizes) if size]
        if len(self.receivers) > 1:
            return [dist.broadcast(buffers[i], rank, group, async_op=True) for i, rank in senders]
        if self.receives:
            return [dist.irecv(buffers[i], rank, group) for i, rank in senders if i != own]
        return [dist.isend(buffers[own], self.receivers[0], group)] if self.sizes[own] else []

    def unpack(self, memory: _Memory) -> dict[int, Any]:
        """Return the objects; all ranks agree on the outcome where it can be a bad one."""
        objects, problem = self._try_to_unpack(memory)
        if any(header.is_foreign for header in self.headers):
            self._agree(_NOT_UNPICKLED if problem else _DONE, objects, problem)
        elif problem is not None:
            raise problem
        return objects

    def _try_to_unpack(self, memory: _Memory) -> tuple[dict[int, Any], Exception | None]:
        if not self.receives:
            return {}, None
        ranks = members(self.call.group)
        try:
            return {
                rank: unpack(part)
                for rank, part in zip(ranks, memory, strict=True)
                if part is not None
            }, None
        # A class that cannot be imported on one rank only; the others wait for its answer.
        except Exception as error:
            return {}, error

    def _agree(
        self, outcome: int, objects: dict[int, Any] | None = None, problem: Exception | None = None
    ) -> dict[int, Any] | None:
        """Return the objects when all ranks are done, None when one could not map memory."""
        worst = torch.tensor(outcome, device=comm_device(self.call.group))
        dist.all_reduce(worst, dist.ReduceOp.MAX, self.call.group)
        if worst == _NOT_UNPICKLED:
            raise_disagreement(self.call, problem, "unpickle what it received")
        return objects if worst == _DONE else None


def _fill(parcel: Parcel, size: int, padded_size: int | None = None) -> torch.Tensor:
    """Return the parcel as a uint8 tensor, with zeros at the end up to `padded_size`."""
    data = torch.empty(padded_size or size, dtype=torch.uint8)
    data[size:] = 0
    memory = data.numpy().data
    end = 0
    for piece in parcel.pieces() if size else ():
        memory[end : end + len(piece)] = piece
        end += len(piece)
    return data


def _gather_numbers(numbers: Sequence[int], call: Call) -> list[list[int]]:
    own = torch.tensor(numbers, dtype=torch.int64, device=comm_device(call.group))
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(call.group))]
    dist.all_gather(rows, own, call.group)
    numbers_by_rank: list[list[int]] = torch.stack(rows).tolist()
    return numbers_by_rank
