"""Batch normalisation of several chunks of one batch: the arithmetic and the node of the graph.

Statistics are counts, means and sums of squared deviations, which merge without cancellation
(Chan, Golub, LeVeque 1979). Vectors with one number per channel are always fp64; what is as large
as the input is computed in fp64 for fp32 and fp64 inputs on the CPU, in fp32 for halves and for
fp32 on other devices, and rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

EpsMode: TypeAlias = Literal["plus", "clamp"]

# Elements of a part of a tensor; twice this in fp64 has to fit into a core's cache.
_BLOCK = 2**16


class Moments(NamedTuple):
    """Values per channel of one chunk, their mean and sum of squared deviations."""

    num_values: int
    mean: Tensor
    m2: Tensor


class Statistics(NamedTuple):
    """Of the whole batch, per channel: what every chunk is normalised by.

    Attributes:
        var: the biased variance.
        inv_std: what the deviations are multiplied by.
        slope: 0 where `inv_std` does not depend on the variance, else 1; None: 1 everywhere.
    """

    num_values: int
    mean: Tensor
    var: Tensor
    inv_std: Tensor
    slope: Tensor | None = None

    def to(self, device: torch.device) -> Statistics:
        """The same numbers on another device."""
        if device == self.mean.device:
            return self
        tensors = (None if one is None else one.to(device) for one in self[1:])
        return Statistics(self.num_values, *tensors)  # type: ignore[arg-type]


def moments(x: Tensor) -> Moments:
    """Moments of `x` `(batch, channels, ...)`."""
    channels = x.size(1)
    if not x.numel():
        return no_moments(channels, x.device)
    dims = _all_but_channels(x)
    parts = []
    for part in _blocks(x):
        moved = part.to(_working_dtype(x), copy=True)
        mean = moved.mean(dims)
        moved.sub_(_as_channels(mean, moved))
        m2 = moved.mul_(moved).sum(dims)
        parts.append(Moments(part.numel() // channels, mean.double(), m2.double()))
    if len(parts) == 1:
        return parts[0]
    counts, means, m2s = zip(*parts, strict=True)
    return merge(counts, torch.stack(means), torch.stack(m2s))


def no_moments(channels: int, device: torch.device) -> Moments:
    """Those of a chunk without values."""
    zeros = torch.zeros(channels, dtype=torch.float64, device=device)
    return Moments(0, zeros, zeros)


def merge(counts: Sequence[int], means: Tensor, m2s: Tensor) -> Moments:
    """Moments of all chunks; `means` and `m2s` are `(chunks, channels)`."""
    count = sum(counts)
    weights = torch.tensor(counts, dtype=torch.float64, device=means.device).unsqueeze(1)
    mean = (weights * means).sum(0) / max(count, 1)
    return Moments(count, mean, (m2s + weights * (means - mean).square()).sum(0))


def statistics(merged: Moments, eps: float, mode: EpsMode) -> Statistics:
    """What to normalise by: (var + eps)^-1/2 for "plus", max(var, eps)^-1/2 for "clamp"."""
    count, mean, m2 = merged
    if count <= 1:
        size = torch.Size([count, mean.numel()])
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {size} "
            "in all chunks together"
        )
    var = m2 / count
    if mode == "plus":
        return Statistics(count, mean, var, (var + eps).rsqrt())
    return Statistics(count, mean, var, var.clamp(min=eps).rsqrt(), (var >= eps).double())


def normalise(
    x: Tensor, out: Tensor, *, stats: Statistics, weight: Tensor | None, bias: Tensor | None
) -> None:
    """Write the normalised `x` into `out`."""
    scale = _scale(stats, weight)
    rounded, rest = _rounded_mean(x, stats)
    shift = -rest * scale if bias is None else bias - rest * scale
    for part, result in zip(_blocks(x), _blocks(out), strict=True):
        moved = _moved(part, rounded)
        # Not addcmul, which on the CPU takes twice the time of both.
        result.copy_(moved.mul_(_as_channels(scale, moved)).add_(_as_channels(shift, moved)))


def gradient_sums(dy: Tensor, x: Tensor, stats: Statistics) -> Tensor:
    """`(2, channels)`: the sums of dy and of dy * xhat, the gradients of bias and weight."""
    dims = _all_but_channels(x)
    rounded, rest = _rounded_mean(x, stats)
    total = torch.zeros(2, x.size(1), dtype=torch.float64, device=x.device)
    for part, gradient in zip(_blocks(x), _blocks(dy), strict=True):
        moved = _moved(part, rounded)
        gradient = gradient.to(moved.dtype)
        total[0] += gradient.sum(dims)
        total[1] += moved.mul_(gradient).sum(dims)
    total[1] = (total[1] - rest * total[0]) * stats.inv_std
    return total


def input_gradient(
    dy: Tensor, x: Tensor, total: Tensor, *, stats: Statistics, weight: Tensor | None
) -> Tensor:
    """weight * inv_std * (dy - mean(dy) - xhat * mean(dy * xhat)), the means over all chunks."""
    mean_dy, mean_product = (total / stats.num_values).unbind()
    if stats.slope is not None:
        mean_product = mean_product * stats.slope
    scale = _scale(stats, weight)
    slope = -scale * stats.inv_std * mean_product
    rounded, rest = _rounded_mean(x, stats)
    shift = -scale * mean_dy - slope * rest
    dx = torch.empty_like(x)
    for part, gradient, result in zip(_blocks(x), _blocks(dy), _blocks(dx), strict=True):
        moved = _moved(part, rounded)
        moved.mul_(_as_channels(slope, moved)).add_(_as_channels(shift, moved))
        result.copy_(moved.add_(gradient.to(moved.dtype) * _as_channels(scale, moved)))
    return dx


def _blocks(x: Tensor) -> Sequence[Tensor]:
    """`x` in parts whose copies in fp64 stay in a CPU core's cache; whole on other devices."""
    if x.device.type != "cpu" or x.numel() <= _BLOCK:
        return (x,)
    samples = torch.split(x, max(1, _BLOCK * x.size(0) // x.numel()))
    if x.dim() < 3 or samples[0].numel() <= _BLOCK:
        return samples
    length = max(1, _BLOCK * x.size(2) // samples[0].numel())
    return [part for sample in samples for part in torch.split(sample, length, dim=2)]


def _rounded_mean(x: Tensor, stats: Statistics) -> tuple[Tensor, Tensor]:
    """The mean in the precision of the arithmetic, and what the rounding leaves."""
    rounded = stats.mean.to(_working_dtype(x))
    return rounded, stats.mean - rounded


def _moved(x: Tensor, mean: Tensor) -> Tensor:
    """A copy of `x`, less the mean, in the mean's precision."""
    moved = x.to(mean.dtype, copy=True)
    return moved.sub_(_as_channels(mean, moved))


def _scale(stats: Statistics, weight: Tensor | None) -> Tensor:
    return stats.inv_std if weight is None else stats.inv_std * weight


def _working_dtype(x: Tensor) -> torch.dtype:
    if x.dtype is torch.float64 or (x.dtype is torch.float32 and x.device.type == "cpu"):
        return torch.float64
    return torch.float32


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _as_channels(vector: Tensor, like: Tensor) -> Tensor:
    """`vector` in the precision of `like`, to be broadcast over it."""
    return vector.to(like.dtype).view(-1, *[1] * (like.dim() - 2))


class Chunk(NamedTuple):
    """One chunk of the batch, with the parameters that it is normalised with."""

    x: Tensor
    # To be filled; the node makes it its output.
    output: Tensor
    weight: Tensor | None
    bias: Tensor | None

    @property
    def in_graph(self) -> bool:
        """Whether any gradient is wanted."""
        tensors = (self.x, self.weight, self.bias)
        return any(one.requires_grad for one in tensors if one is not None)


class Plan(NamedTuple):
    """What a node needs besides its chunks.

    Attributes:
        moves_input: whether the gradient of any chunk's input, on any rank, is wanted.
        over_ranks: makes the gradient sums of this process those of all ranks.
    """

    stats: Statistics
    moves_input: bool
    over_ranks: Callable[[Tensor], Tensor] = lambda total: total


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
