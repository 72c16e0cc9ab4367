"""How a group reduces tensors, one or several of each rank: checked, as operations to be run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from ..process.ranks import place_in_group
from ..tensors.layout import checking, describe_tensor
from ..tensors.memory import check_like, checked_target, describe_dtype, one_per_rank
from ..tensors.operations import Reduction, checked_op
from .group_tensors import Exchanged
from .handle import Operation

ReduceOp: TypeAlias = "dist.ReduceOp.RedOpType | dist.ReduceOp | str"


def all_reduce(group: dist.ProcessGroup, tensor: torch.Tensor, op: ReduceOp) -> Operation[None]:
    """Return the operation that reduces a tensor in place on every rank."""

    def describe() -> str:
        return f"{name_of(op)} of {describe_tensor(tensor)}"

    with checking("group.all_reduce", group, describe):
        target = checked_target("tensor", tensor).detach()
        reduction = Reduction(target, checked_op(name_of(op), target.dtype), group)
    return Operation(
        "group.all_reduce",
        group,
        describe,
        lambda: [reduction.start()],
        lambda: write(reduction.result(), [target]),
    )


def reduce(
    group: dist.ProcessGroup, tensor: torch.Tensor, dst: int, op: ReduceOp
) -> Operation[None]:
    """Return the operation that reduces a tensor in place on global rank `dst`."""

    def describe() -> str:
        return f"{name_of(op)} of {describe_tensor(tensor)} to rank {dst}"

    with checking("group.reduce", group, describe):
        target = checked_target("tensor", tensor).detach()
        place_in_group(dst, group, "dst")
        reduction = Reduction(target, checked_op(name_of(op), target.dtype), group, dst=dst)

    def finish() -> None:
        if dist.get_rank() == dst:
            write(reduction.result(), [target])

    return Operation("group.reduce", group, describe, lambda: [reduction.start()], finish)


def reduce_scatter(
    group: dist.ProcessGroup,
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: ReduceOp,
) -> Operation[None]:
    """Return the operation that reduces, on each rank, what the ranks have at its place.

    The parts are exchanged and then reduced here in the order of the ranks: the traffic is that of
    a ring, gloo's own is three times as slow, and every dtype and operation has it.
    """

    def describe() -> str:
        return f"{name_of(op)} of {describe_dtype(output)}"

    with checking("group.reduce_scatter", group, describe):
        target = checked_target("output", output).detach()
        inputs = one_per_rank("input_list", input_list, group)
        place = dist.get_rank(group)
        check_like(f"input_list[{place}]", inputs[place], "output", output)
        checked = checked_op(name_of(op), target.dtype)
        parts = Exchanged(inputs, [target] * len(inputs), group)

    def finish() -> None:
        first, *others = parts.received()
        write(Reduction(first, checked, group, others=others).result(), [target])

    return Operation("group.reduce_scatter", group, describe, parts.begin, finish)


def name_of(op: ReduceOp) -> str:
    """Return one of our names for an operation of torch; a name as it is."""
    if isinstance(op, str):
        return op
    name = str(getattr(op, "op", op)).rpartition(".")[2].lower()
    return "mean" if name == "avg" else name


def write(result: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Copy the result into all of the tensors."""
    for target in targets:
        target.detach().copy_(result)
