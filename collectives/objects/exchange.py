"""Parcels between ranks: in the first message, through shared memory, or over the transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ..errors import Call, CollectiveError, text_of
from ..process.ranks import comm_device, members
from ..transport.first_message import INLINE_BYTES, Header, gather_numbers, meet, raise_disagreement
from ..transport.serialize import Parcel, unpack
from ..transport.shared_memory import Offer, take

# From this size on, mapping memory costs less than the transport between two processes.
_SHARED_FROM = 2**20
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


def bytes_of(parcel: Parcel) -> torch.Tensor:
    """Return what is in the parcel as a uint8 tensor (bytes,) on the CPU."""
    data = torch.empty(parcel.size, dtype=torch.uint8)
    memory, end = data.numpy().data, 0
    for piece in parcel.pieces():
        memory[end : end + len(piece)] = piece
        end += len(piece)
    return data


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
            places = gather_numbers(offer.place, self.call.group)
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
        """Return the parcels, each after a message of its exact size.

        Broadcasts of all senders at once: with gloo twice as fast as one all_gather of parcels
        padded to the largest, also when all are equally large.
        """
        ranks, group = members(self.call.group), self.call.group
        own, device = dist.get_rank(group), comm_device(group)
        buffers: dict[int, torch.Tensor] = {}
        messages: list[Any] = []
        for index, size in enumerate(self.sizes):
            is_own = index == own
            if not size or not (is_own or self.receives):
                continue
            buffers[index] = (
                bytes_of(self.parcel).to(device)
                if is_own
                else torch.empty(size, dtype=torch.uint8, device=device)
            )
            if len(self.receivers) > 1:
                messages.append(dist.broadcast(buffers[index], ranks[index], group, async_op=True))
            elif not is_own:
                messages.append(dist.irecv(buffers[index], ranks[index], group))
            elif not self.receives:
                messages.append(dist.isend(buffers[index], self.receivers[0], group))
        for message in messages:
            message.wait()
        memory = self.inline()
        for index, buffer in buffers.items() if self.receives else ():
            memory[index] = buffer.cpu().numpy().data
        return memory

    def unpack(self, memory: _Memory) -> dict[int, Any]:
        """Return the objects; all ranks agree on the outcome where it can be a bad one."""
        objects, problem = self._try_to_unpack(memory)
        if any(header.is_foreign for header in self.headers):
            self._agree(_NOT_UNPICKLED if problem else _DONE, objects, problem)
        elif problem is not None:
            raise CollectiveError(
                f"{self.call.name}(): rank {dist.get_rank()} cannot unpickle what it received: "
                f"{text_of(problem)}"
            ) from problem
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
