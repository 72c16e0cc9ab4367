"""The node of the autograd graph that normalises all chunks of a batch together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ...collectives import CollectiveError, calling, comm_device
from .statistics import Statistics, gradient_sums, input_gradient


@dataclass(frozen=True)
class Chunk:
    """One chunk of the batch, with the parameters that it is normalised with.

    Attributes:
        output: to be filled; the node makes it its output.
    """

    x: Tensor
    output: Tensor
    weight: Tensor | None
    bias: Tensor | None

    @property
    def in_graph(self) -> bool:
        """Whether any gradient is wanted."""
        tensors = (self.x, self.weight, self.bias)
        return any(one.requires_grad for one in tensors if one is not None)


@dataclass(frozen=True)
class Plan:
    """What a node needs besides its chunks.

    Attributes:
        layer: name of the layer's class, for errors.
        group: whose ranks hold further chunks, when `grouped`.
        moves_input: whether the gradient of any chunk's input, on any rank, is wanted.
        number: below 64, of this forward, the same on all ranks.
    """

    stats: Statistics
    layer: str
    moves_input: bool
    grouped: bool = False
    group: distributed.ProcessGroup | None = None
    number: int = 0

    def over_ranks(self, total: Tensor) -> Tensor:
        """The sums of all ranks; every rank's backward must call this.

        The forward's number and its square travel along. They are summed too, and only where the
        ranks' numbers are all equal can both sums be what each rank expects.

        Raises:
            CollectiveError: on every rank, when the ranks are in the backward of other forwards.
        """
        if not self.grouped:
            return total
        device = comm_device(self.group, prefer=total.device)
        numbers = total.new_tensor([[self.number], [self.number**2]])
        message = torch.cat([total, numbers], dim=1).to(device)
        with calling(f"{self.layer}.backward", self.group, lambda: f"{total.size(1)} channels"):
            distributed.all_reduce(message, group=self.group)
        world_size = distributed.get_world_size(self.group)
        expected = [world_size * self.number, world_size * self.number**2]
        if message[:, -1].tolist() != expected:
            raise CollectiveError(
                f"the ranks are in the backward of different calls of {self.layer}: all of them "
                "must use the same outputs, in the same order, for what they differentiate"
            )
        return message[:, :-1].to(total.device)


def join(plan: Plan, chunks: Sequence[Chunk]) -> list[Tensor]:
    """The outputs of the chunks as parts of the graph, their values yet to be filled in.

    One node for all chunks: its only backward has the gradients of all of them at hand and so
    never waits, which matters since on the CPU one thread runs the backward of every chunk.
    """
    outputs = [chunk.output for chunk in chunks]
    if not any(chunk.in_graph for chunk in chunks):
        return outputs
    parts = [(chunk.x, chunk.weight, chunk.bias) for chunk in chunks]
    flat = [tensor for part in parts for tensor in part]
    with torch.enable_grad():
        results: tuple[Tensor, ...] = _Joint.apply(plan, outputs, *flat)  # type: ignore[no-untyped-call]
    pairs = zip(chunks, results, strict=True)
    return [result if chunk.in_graph else result.detach() for chunk, result in pairs]


class _Joint(Function):
    """Inputs: plan, outputs, then x, weight and bias of every chunk."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, outputs: list[Tensor], *flat: Tensor | None) -> Any:
        ctx.plan = plan
        ctx.bias_dtypes = [bias.dtype if bias is not None else None for bias in flat[2::3]]
        ctx.save_for_backward(*flat[0::3], *flat[1::3])
        # Outputs must not be kept in `ctx`: a cycle through the graph would keep all of it.
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        plan: Plan = ctx.plan
        # Once: each reading unpacks them again, which checkpoints forbid.
        saved = ctx.saved_tensors
        inputs, weights = saved[: len(gradients)], saved[len(gradients) :]
        stats = [plan.stats.to(x.device) for x in inputs]
        triples = list(zip(gradients, inputs, stats, strict=True))
        sums = [gradient_sums(*triple) for triple in triples]
        wanted = ctx.needs_input_grad[2:]
        results: list[Tensor | None] = [None] * len(wanted)
        for index, (of_bias, of_weight) in enumerate(sums):
            if wanted[3 * index + 1]:
                results[3 * index + 1] = of_weight.to(weights[index].dtype)
            if wanted[3 * index + 2]:
                results[3 * index + 2] = of_bias.to(ctx.bias_dtypes[index])
        if plan.moves_input:
            device = sums[0].device
            total = plan.over_ranks(torch.stack([one.to(device) for one in sums]).sum(0))
            for index, (dy, x, own) in enumerate(triples):
                if wanted[3 * index]:
                    results[3 * index] = input_gradient(
                        dy, x, total.to(x.device), stats=own, weight=weights[index]
                    )
        return None, None, *results
