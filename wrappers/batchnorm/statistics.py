"""Batch normalisation of several chunks of one batch: the arithmetic and the node of the graph.

Statistics are counts, means and sums of squared deviations, which merge without cancellation
(Chan, Golub, LeVeque 1979). Vectors with one number per channel are always fp64; what is as large
as the input is computed in the precision of the layer, or the input's where that is higher, and
rounded once, at the end. From every value a mean in that precision is subtracted first, which is
exact or nearly so where it is large; what the mean lost by rounding is added to the vectors. Where
all means are near zero, torch's kernels for the CPU do the same in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

EpsMode: TypeAlias = Literal["plus", "clamp"]
Precision: TypeAlias = Literal["fp32", "fp64"]

# Elements of a part of a tensor; twice this in fp64 has to fit into a core's cache.
_BLOCK = 2**17
# Standard deviations: means below it cost no digits in x * scale - mean * scale.
_CENTRED = 2.0


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
        is_centred: all means are so near to zero that they need not be subtracted first.
        precision: what is as large as the input is computed in this at least.
    """

    num_values: int
    mean: Tensor
    var: Tensor
    inv_std: Tensor
    slope: Tensor | None = None
    is_centred: bool = False
    precision: torch.dtype = torch.float32

    def to(self, device: torch.device) -> Statistics:
        """The same numbers on another device."""
        if device == self.mean.device:
            return self
        moved = (one.to(device) if isinstance(one, Tensor) else one for one in self)
        return Statistics(*moved)  # type: ignore[arg-type]


def moments(x: Tensor, precision: torch.dtype) -> Moments:
    """Moments of `x` `(batch, channels, ...)`."""
    channels = x.size(1)
    if not x.numel():
        return no_moments(channels, x.device)
    count = x.numel() // channels
    mean = x.mean(_all_but_channels(x), dtype=torch.promote_types(x.dtype, precision))
    total, products = _sums(x, mean)
    # What rounding left of the mean.
    rest = total / count
    return Moments(count, mean + rest, (products - total * rest).clamp_(min=0))


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
    is_plus = mode == "plus"
    inv_std = (var + eps if is_plus else var.clamp(min=eps)).rsqrt()
    # On accelerators nobody looks, as that would wait.
    is_centred = mean.is_cpu and bool(((mean * inv_std).abs() <= _CENTRED).all())
    slope = None if is_plus else (var >= eps).double()
    return Statistics(count, mean, var, inv_std, slope, is_centred)


def normalise(
    x: Tensor, out: Tensor, *, stats: Statistics, weight: Tensor | None, bias: Tensor | None
) -> None:
    """Write the normalised `x` into `out`."""
    scale = _scale(stats, weight)
    if stats.is_centred and _is_fp32_on_cpu(x, stats):
        _affine(x, out, stats.mean, scale, bias)
        return
    mean, rest = _rounded_mean(x, stats)
    shift = -rest * scale if bias is None else bias - rest * scale
    mean, scale, shift = (_as_channels(one, mean.dtype, x) for one in (mean, scale, shift))
    for part, result in zip(_blocks(x), _blocks(out), strict=True):
        moved = _moved(part, mean, result)
        # Not addcmul, which on the CPU takes twice the time of both.
        moved.mul_(scale).add_(shift)
        if moved is not result:
            result.copy_(moved)


def gradient_sums(dy: Tensor, x: Tensor, stats: Statistics) -> Tensor:
    """`(2, channels)`: the sums of dy and of dy * xhat, the gradients of bias and weight."""
    mean, rest = _rounded_mean(x, stats)
    if _is_fp32_on_cpu(x, stats):
        # In one pass over both: torch's gradients of weight and bias, where the scale is 1.
        one = torch.ones_like(mean)
        _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            dy, x, one, None, None, mean, one, True, 0.0, [False, True, True]
        )
        total, products = of_bias.double(), of_weight.double()
    else:
        total, products = _sums(x, mean, dy)
    return torch.stack([total, (products - rest * total) * stats.inv_std])


def input_gradient(
    dy: Tensor, x: Tensor, total: Tensor, *, stats: Statistics, weight: Tensor | None
) -> Tensor:
    """weight * inv_std * (dy - mean(dy) - xhat * mean(dy * xhat)), the means over all chunks."""
    mean_dy, mean_product = (total / stats.num_values).unbind()
    if stats.slope is not None:
        mean_product = mean_product * stats.slope
    scale = _scale(stats, weight)
    slope = -stats.inv_std * mean_product
    dx = torch.empty_like(x)
    if stats.is_centred and _is_fp32_on_cpu(x, stats):
        _affine(x, dx, stats.mean, slope, -mean_dy)
        return dx.add_(dy).mul_(_as_channels(scale, x.dtype, x))
    mean, rest = _rounded_mean(x, stats)
    shift = -mean_dy - slope * rest
    vectors = (mean, slope, shift, scale)
    mean, slope, shift, scale = (_as_channels(one, mean.dtype, x) for one in vectors)
    for part, gradient, result in zip(_blocks(x), _blocks(dy), _blocks(dx), strict=True):
        moved = _moved(part, mean, result)
        moved.mul_(slope).add_(gradient.to(mean.dtype)).add_(shift).mul_(scale)
        if moved is not result:
            result.copy_(moved)
    return dx


def _is_fp32_on_cpu(x: Tensor, stats: Statistics) -> bool:
    """Whether torch's kernels for the CPU compute in the precision that is wanted."""
    return x.is_cpu and x.dtype is stats.precision is torch.float32 and x.numel() > 0


def _affine(x: Tensor, out: Tensor, mean: Tensor, scale: Tensor, shift: Tensor | None) -> None:
    """Write (x - mean) * scale + shift into `out` by torch's batch norm in evaluation."""
    mean, scale = mean.to(x.dtype), scale.to(x.dtype)
    shift = None if shift is None else shift.to(x.dtype)
    one, unused = torch.ones_like(mean), mean.new_empty(0)
    torch.native_batch_norm(x, scale, shift, mean, one, False, 0.0, 0.0, out=(out, unused, unused))


def _sums(x: Tensor, mean: Tensor, dy: Tensor | None = None) -> Tensor:
    """`(2, channels)`: the sums of dy and of dy * (x - mean); dy is x - mean by default."""
    dims = _all_but_channels(x)
    mean = _as_channels(mean, mean.dtype, x)
    sums = []
    for part, gradient in zip(_blocks(x), _blocks(x if dy is None else dy), strict=True):
        moved = _moved(part, mean)
        factor = moved if dy is None else gradient.to(mean.dtype)
        sums += [factor.sum(dims), moved.mul_(factor).sum(dims)]
    return torch.stack(sums).view(-1, 2, x.size(1)).sum(0, dtype=torch.float64)


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
    rounded = stats.mean.to(torch.promote_types(x.dtype, stats.precision))
    return rounded, stats.mean - rounded


def _moved(x: Tensor, mean: Tensor, into: Tensor | None = None) -> Tensor:
    """`x` less the mean, in the mean's precision: `into` where that has it, else a new tensor."""
    is_fit = into is not None and into.dtype is mean.dtype
    return torch.sub(x.to(mean.dtype), mean, out=into if is_fit else None)


def _scale(stats: Statistics, weight: Tensor | None) -> Tensor:
    return stats.inv_std if weight is None else stats.inv_std * weight


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _as_channels(vector: Tensor, dtype: torch.dtype, like: Tensor) -> Tensor:
    """`vector` in a precision, to be broadcast over the channels of `like`."""
    return vector.to(dtype).view(-1, *[1] * (like.dim() - 2))


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
