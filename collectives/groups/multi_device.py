"""Lists of tensors on any devices of one process, among the ranks: the `multigpu` calls.

Each rank reduces its list in order, one message goes between the ranks, and what comes back is
copied into the list. So all tensors end with the same bits, whatever devices they are on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..process.ranks import comm_device, members, place_in_group
from ..tensors.layout import checking
from ..tensors.memory import (
    Memory,
    check_like,
    checked_tensors,
    describe_list,
    start_all_gather,
    travel_device,
)
from ..tensors.operations import Reduction, checked_op
from ..transport.first_message import gather_numbers
from .group_reductions import ReduceOp, name_of, write
from .handle import Operation


def broadcast(
    group: dist.ProcessGroup,
    tensor_list: Sequence[torch.Tensor],
    src: int,
    src_tensor: int,
) -> Operation[None]:
    """Return the operation that copies one tensor of rank `src` into all tensors of all ranks."""

    def describe() -> str:
        return f"{describe_list(tensor_list)} from rank {src}"

    with checking("group.broadcast_multigpu", group, describe):
        targets = _alike("tensor_list", tensor_list, is_target=True)
        place_in_group(src, group)
        is_source = dist.get_rank() == src
        first = targets[_index("src_tensor", src_tensor, targets) if is_source else 0]
        memory = Memory(first, travel_device(group, first), is_read=is_source)

    def begin() -> list[dist.Work]:
        return [dist.broadcast(memory.bytes, src, group, async_op=True)]

    def finish() -> None:
        if not is_source:
            memory.store()
        write(first, [target for target in targets if target is not first])

    return Operation("group.broadcast_multigpu", group, describe, begin, finish)


def all_reduce(
    group: dist.ProcessGroup, tensor_list: Sequence[torch.Tensor], op: ReduceOp
) -> Operation[None]:
    """Return the operation that reduces all tensors of all ranks into each of them."""

    def describe() -> str:
        return f"{name_of(op)} of {describe_list(tensor_list)}"

    with checking("group.all_reduce_multigpu", group, describe):
        targets = _alike("tensor_list", tensor_list, is_target=True)
        total = _Total(targets, op, group)
    return Operation(
        "group.all_reduce_multigpu",
        group,
        describe,
        total.begin,
        lambda: write(total.result(), targets),
    )


def reduce(
    group: dist.ProcessGroup,
    tensor_list: Sequence[torch.Tensor],
    dst: int,
    op: ReduceOp,
    dst_tensor: int,
) -> Operation[None]:
    """Return the operation that reduces all tensors of all ranks into one of rank `dst`."""

    def describe() -> str:
        return f"{name_of(op)} of {describe_list(tensor_list)} to rank {dst}"

    with checking("group.reduce_multigpu", group, describe):
        targets = _alike("tensor_list", tensor_list, is_target=True)
        place_in_group(dst, group, "dst")
        is_destination = dist.get_rank() == dst
        place = _index("dst_tensor", dst_tensor, targets) if is_destination else 0
        total = _Total(targets, op, group, dst)

    def finish() -> None:
        if is_destination:
            write(total.result(), [targets[place]])

    return Operation("group.reduce_multigpu", group, describe, total.begin, finish)


def all_gather(
    group: dist.ProcessGroup,
    output_tensor_lists: Sequence[Sequence[torch.Tensor]],
    input_tensor_list: Sequence[torch.Tensor],
) -> Operation[None]:
    """Return the operation that gathers the tensors of all ranks in each of the output lists."""

    def describe() -> str:
        return describe_list(input_tensor_list)

    with checking("group.all_gather_multigpu", group, describe):
        inputs = _alike("input_tensor_list", input_tensor_list)
        lists = _output_lists(output_tensor_lists, inputs)
        device = travel_device(group, inputs[0])
        own = torch.cat([Memory(tensor, device, is_read=True).bytes for tensor in inputs])
    place, size = dist.get_rank(group), inputs[0].nbytes
    # By group rank: how many tensors, and their bytes.
    parts: list[tuple[int, torch.Tensor]] = []

    def begin() -> list[dist.Work]:
        for index, count in enumerate(_agreed_counts(group, inputs, len(lists[0]))):
            parts.append((count, own if index == place else own.new_empty(count * size)))
        return start_all_gather([part for _, part in parts], own, group)

    def finish() -> None:
        for outputs in lists:
            targets = iter(outputs)
            for count, part in parts:
                # Once for each device.
                values = part.to(outputs[0].device).view(inputs[0].dtype)
                for value in values.view(count, *inputs[0].shape):
                    write(value, [next(targets)])

    return Operation("group.all_gather_multigpu", group, describe, begin, finish)


class _Total:
    """The reduction of all tensors of all ranks."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        group: dist.ProcessGroup,
        dst: int | None = None,
    ) -> None:
        first, *others = [tensor.detach() for tensor in tensors]
        self._op = checked_op(name_of(op), first.dtype)
        self._group = group
        self._reduction = Reduction(first, self._op, group, others=others, dst=dst)
        self._count = torch.tensor(len(tensors), device=comm_device(group, prefer=first.device))

    def begin(self) -> list[dist.Work]:
        """Begin to communicate."""
        works = [self._reduction.start()]
        if self._op == "mean":
            # The ranks may have different numbers of tensors.
            works.append(dist.all_reduce(self._count, group=self._group, async_op=True))
        return works

    def result(self) -> torch.Tensor:
        """Return it."""
        return self._reduction.result(int(self._count) if self._op == "mean" else None)


def _alike(name: str, data: object, *, is_target: bool = False) -> list[torch.Tensor]:
    tensors = checked_tensors(name, data, is_target=is_target)
    for index, tensor in enumerate(tensors):
        check_like(f"{name}[{index}]", tensor, f"{name}[0]", tensors[0])
    return tensors


def _index(name: str, index: int, tensors: Sequence[torch.Tensor]) -> int:
    if not 0 <= index < len(tensors):
        raise ValueError(
            f"{name} must be a place in the list of {len(tensors)} tensors, got {index}"
        )
    return index


def _output_lists(data: object, inputs: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return one list of outputs for each input, all of one length."""
    name = "output_tensor_lists"
    if not isinstance(data, list | tuple) or len(data) != len(inputs):
        got = len(data) if isinstance(data, list | tuple) else type(data).__name__
        raise ValueError(
            f"{name} must have one list for each of the {len(inputs)} tensors in "
            f"input_tensor_list, got {got}"
        )
    lists = [_alike(f"{name}[{i}]", outputs, is_target=True) for i, outputs in enumerate(data)]
    for index, outputs in enumerate(lists):
        check_like(f"{name}[{index}][0]", outputs[0], "input_tensor_list[0]", inputs[0])
        if len(outputs) != len(lists[0]):
            raise ValueError(
                f"{name}[{index}] must have as many tensors as {name}[0], which has "
                f"{len(lists[0])}, got {len(outputs)}"
            )
    return lists


def _agreed_counts(
    group: dist.ProcessGroup, inputs: Sequence[torch.Tensor], room: int
) -> list[int]:
    """Return how many tensors each rank sends, by group rank.

    Raises:
        ValueError: on every rank, when some rank's tensors have another size, or its output lists
            another length than what all ranks send.
    """
    rows = gather_numbers([len(inputs), inputs[0].nbytes, room], group)
    by_rank = dict(zip(members(group), rows, strict=True))
    sent = ", ".join(f"{row[0]} of rank {rank}" for rank, row in by_rank.items())
    total = sum(row[0] for row in rows)
    for rank, (_, size, length) in by_rank.items():
        if size != rows[0][1]:
            raise ValueError(
                f"all_gather_multigpu() must get tensors of the same size on all ranks, got "
                f"{rows[0][1]} bytes on rank {members(group)[0]} and {size} on rank {rank}"
            )
        if length != total:
            raise ValueError(
                f"all_gather_multigpu() must get output lists of {total} tensors ({sent}), "
                f"got {length} on rank {rank}"
            )
    return [row[0] for row in rows]
