"""What a group does with tensors but reducing them: checked, as operations to be run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from ..process.ranks import members, place_in_group
from ..tensors.barrier import start_barrier
from ..tensors.layout import checked_tensor, checking, describe_tensor
from ..tensors.memory import (
    Memory,
    check_like,
    checked_target,
    describe_dtype,
    one_per_rank,
    start_all_gather,
    travel_device,
)
from .handle import Operation

_Group: TypeAlias = dist.ProcessGroup


def nothing() -> None:
    """Finish what needs no finishing."""


def send(group: _Group, name: str, tensor: torch.Tensor, dst: int, tag: int) -> Operation[None]:
    """Return the operation that sends a message to global rank `dst`."""
    checked_tensor("tensor", tensor)
    _check_peer("dst", dst, tag, group)
    memory = Memory(tensor, travel_device(group, tensor), is_read=True)
    return Operation(
        name,
        group,
        lambda: f"{describe_tensor(tensor)} to rank {dst}, tag {tag}",
        lambda: [_begun(dist.isend(memory.bytes, dst, group, tag))],
        nothing,
        failed=f"could not send to rank {dst} (tag {tag})",
    )


def recv(
    group: _Group, name: str, tensor: torch.Tensor, src: int | None, tag: int
) -> Operation[int]:
    """Return the operation that receives a message; its outcome is the sender's global rank."""
    checked_target("tensor", tensor)
    _check_peer("src", src, tag, group)
    memory = Memory(tensor, travel_device(group, tensor), is_read=False)
    works: list[dist.Work] = []

    def begin() -> list[dist.Work]:
        works.append(_begun(dist.irecv(memory.bytes, src, group, tag)))
        return works

    def finish() -> int:
        memory.store()
        return members(group)[works[0]._source_rank()] if src is None else src

    sender = f"any rank of {members(group)}" if src is None else f"rank {src}"
    return Operation(
        name,
        group,
        lambda: f"{describe_tensor(tensor)} from {sender}, tag {tag}",
        begin,
        finish,
        failed=f"received nothing from {sender} (tag {tag})",
    )


def broadcast(group: _Group, tensor: torch.Tensor, src: int) -> Operation[None]:
    """Return the operation that overwrites the tensor with that of global rank `src`."""

    def describe() -> str:
        return f"{describe_tensor(tensor)} from rank {src}"

    with checking("group.broadcast", group, describe):
        place_in_group(src, group)
        is_source = dist.get_rank() == src
        (checked_tensor if is_source else checked_target)("tensor", tensor)
        memory = Memory(tensor, travel_device(group, tensor), is_read=is_source)
    return Operation(
        "group.broadcast",
        group,
        describe,
        lambda: [dist.broadcast(memory.bytes, src, group, async_op=True)],
        nothing if is_source else memory.store,
    )


def all_gather(
    group: _Group, tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor
) -> Operation[None]:
    """Return the operation that gathers tensors, also of different shapes, on every rank."""

    def describe() -> str:
        return describe_dtype(tensor)

    with checking("group.all_gather", group, describe):
        checked_tensor("tensor", tensor)
        targets = one_per_rank("tensor_list", tensor_list, group, is_target=True)
        place = dist.get_rank(group)
        check_like(f"tensor_list[{place}]", targets[place], "tensor", tensor)
        device = travel_device(group, tensor)
        own = Memory(tensor, device, is_read=True)
        parts = [Memory(target, device, is_read=False) for target in targets]
    return Operation(
        "group.all_gather",
        group,
        describe,
        lambda: start_all_gather([part.bytes for part in parts], own.bytes, group),
        lambda: _store_all(parts),
    )


def gather(
    group: _Group,
    tensor: torch.Tensor,
    gather_list: Sequence[torch.Tensor] | None,
    dst: int,
) -> Operation[None]:
    """Return the operation that gathers tensors of one shape on global rank `dst`."""

    def describe() -> str:
        return f"{describe_tensor(tensor)} to rank {dst}"

    with checking("group.gather", group, describe):
        checked_tensor("tensor", tensor)
        place_in_group(dst, group, "dst")
        targets = _list_on("gather_list", gather_list, dst, group, is_target=True)
        for index, target in enumerate(targets):
            check_like(f"gather_list[{index}]", target, "tensor", tensor)
        device = travel_device(group, tensor)
        own = Memory(tensor, device, is_read=True)
        parts = [Memory(target, device, is_read=False) for target in targets]
    memory = [part.bytes for part in parts] or None
    return Operation(
        "group.gather",
        group,
        describe,
        lambda: [dist.gather(own.bytes, memory, dst, group, async_op=True)],
        lambda: _store_all(parts),
    )


def scatter(
    group: _Group,
    tensor: torch.Tensor,
    scatter_list: Sequence[torch.Tensor] | None,
    src: int,
) -> Operation[None]:
    """Return the operation that gives each rank its tensor of the list on global rank `src`."""

    def describe() -> str:
        return f"{describe_tensor(tensor)} from rank {src}"

    with checking("group.scatter", group, describe):
        checked_target("tensor", tensor)
        place_in_group(src, group)
        sources = _list_on("scatter_list", scatter_list, src, group)
        for index, source in enumerate(sources):
            check_like(f"scatter_list[{index}]", source, "tensor", tensor)
        device = travel_device(group, tensor)
        own = Memory(tensor, device, is_read=False)
        memory = [Memory(source, device, is_read=True).bytes for source in sources] or None
    return Operation(
        "group.scatter",
        group,
        describe,
        lambda: [dist.scatter(own.bytes, memory, src, group, async_op=True)],
        own.store,
    )


def all_to_all(
    group: _Group,
    output_list: Sequence[torch.Tensor],
    input_list: Sequence[torch.Tensor],
) -> Operation[None]:
    """Return the operation that sends the tensor at each place to the rank at that place."""

    def describe() -> str:
        return describe_dtype(input_list)

    with checking("group.all_to_all", group, describe):
        inputs = one_per_rank("input_tensor_list", input_list, group)
        outputs = one_per_rank("output_tensor_list", output_list, group, is_target=True)
        place = dist.get_rank(group)
        names = (f"{kind}_tensor_list[{place}]" for kind in ("output", "input"))
        check_like(next(names), outputs[place], next(names), inputs[place])
        parts = Exchanged(inputs, outputs, group)

    def finish() -> None:
        for output, part in zip(outputs, parts.received(), strict=True):
            output.detach().copy_(part)

    return Operation("group.all_to_all", group, describe, parts.begin, finish)


def barrier(group: _Group) -> Operation[None]:
    """Return the operation that waits for all ranks."""
    return Operation("group.barrier", group, lambda: "", lambda: [start_barrier(group)], nothing)


class Exchanged:
    """Tensors of one dtype, one for each rank, exchanged for those that the ranks have for us.

    Args:
        outputs: tensors like those that come; they are not written to.
    """

    def __init__(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], group: _Group
    ) -> None:
        device = travel_device(group, inputs[0])
        memory = [Memory(tensor, device, is_read=True).bytes for tensor in inputs]
        self._outputs, self._group = outputs, group
        self._sizes = [output.nbytes for output in outputs], [part.numel() for part in memory]
        self._sent = torch.cat(memory)
        self._received = torch.empty(sum(self._sizes[0]), dtype=torch.uint8, device=device)

    def begin(self) -> list[dist.Work]:
        """Begin to communicate."""
        sent, received, group = self._sent, self._received, self._group
        return [dist.all_to_all_single(received, sent, *self._sizes, group, async_op=True)]

    def received(self) -> list[torch.Tensor]:
        """Return what has come, by group rank."""
        pieces = torch.split(self._received, self._sizes[0])
        return [
            piece.view(output.dtype).view(output.shape)
            for piece, output in zip(pieces, self._outputs, strict=True)
        ]


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "only ranks that are no members get none"
    return work


def _check_peer(name: str, rank: int | None, tag: int, group: _Group) -> None:
    if len(members(group)) == 1:
        raise ValueError(
            f"a message needs another member, but the group has only rank {dist.get_rank()}"
        )
    if rank is not None:
        place_in_group(rank, group, name)
        if rank == dist.get_rank():
            raise ValueError(f"{name} must be another rank than this one, got {rank}")
    if tag < 0:
        raise ValueError(f"tag must not be negative, got {tag}")


def _list_on(
    name: str, tensors: object, rank: int, group: _Group, *, is_target: bool = False
) -> list[torch.Tensor]:
    """Return the tensors that only one rank passes; none on the others."""
    if dist.get_rank() == rank:
        return one_per_rank(name, tensors, group, is_target=is_target)
    if tensors:
        raise ValueError(f"{name} must be None on all ranks but {rank}, got one here")
    return []


def _store_all(parts: Sequence[Memory]) -> None:
    for part in parts:
        part.store()
