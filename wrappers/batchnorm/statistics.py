"""Batch normalisation of several chunks of one batch: the arithmetic and the autograd node.

Statistics are counts, means and sums of squared deviations, which can be merged without
cancellation (Chan, Golub, LeVeque 1979). Vectors with one number per channel are always fp64.
Tensors of the size of the input are computed in the precision of the layer, or of the input if that
is higher, and are rounded only at the end. To normalise, the mean is rounded to this precision and
subtracted from every value first. This subtraction is nearly exact even if the mean is large. The
rounding error of the mean is computed in fp64 and corrected by the shift that is added after the
scaling. If all means are near zero, torch's CPU kernels do all of this in one pass.

On CUDA the kernels of torch's SyncBatchNorm are used, each of which reads the input once. They
accumulate in the precision of the layer. The moments of a chunk have this precision, and the mean
is rounded to it without a correction.
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

# Number of elements per block; two blocks in fp64 must fit into a core's cache.
_BLOCK = 2**17
# Added to the variance of a chunk before its square root, so that the result can be inverted.
_TINY = 1e-30
# The largest mean, in standard deviations, with which x * scale - mean * scale loses no digits.
_CENTRED = 2.0


class Moments(NamedTuple):
    """The number of values per channel, their mean and their sum of squared deviations.

    The number is a tensor if only the device knows it.
    """

    num_values: int | Tensor
    mean: Tensor
    m2: Tensor


class Statistics(NamedTuple):
    """Statistics of the whole batch, per channel, by which every chunk is normalised.

    Attributes:
        var: the biased variance.
        inv_std: the factor by which deviations from the mean are multiplied; see ``statistics``.
        slope: for each channel, 1 if ``inv_std`` depends on the variance, 0 if ``eps`` replaced the
            variance; None if all are 1.
        is_centred: whether all means are so near zero that they need not be subtracted first.
        precision: the minimum precision for tensors of the size of the input.
    """

    num_values: int | Tensor
    mean: Tensor
    var: Tensor
    inv_std: Tensor
    slope: Tensor | None = None
    is_centred: bool = False
    precision: torch.dtype = torch.float32

    def to(self, device: torch.device) -> Statistics:
        """Return the statistics on another device."""
        if device == self.mean.device:
            return self
        moved = (tensor.to(device) if isinstance(tensor, Tensor) else tensor for tensor in self)
        return Statistics(*moved)  # type: ignore[arg-type]


def moments(x: Tensor, precision: torch.dtype) -> Moments:
    """Return the moments of ``x``, of shape ``(batch, channels, ...)``."""
    channels = x.size(1)
    if not x.numel():
        return no_moments(channels, x.device)
    count = x.numel() // channels
    if _is_fused(x, precision):
        mean, inv_std = torch.batch_norm_stats(x, _TINY)
        return Moments(count, mean.double(), inv_std.double().pow(-2) * count)
    mean = x.mean(_all_but_channels(x), dtype=torch.promote_types(x.dtype, precision))
    total, products = _sums(x, mean)
    # The deviations sum to zero except for the rounding error of the mean.
    error = total / count
    return Moments(count, mean + error, (products - total * error).clamp_(min=0))


def no_moments(channels: int, device: torch.device) -> Moments:
    """Return the moments of a chunk without values."""
    zeros = torch.zeros(channels, dtype=torch.float64, device=device)
    return Moments(0, zeros, zeros)


def merge(counts: Sequence[int] | Tensor, means: Tensor, m2s: Tensor) -> Moments:
    """Merge the moments of all chunks; ``means`` and ``m2s`` are ``(chunks, channels)``."""
    if isinstance(counts, Tensor):
        count: int | Tensor = counts.sum()
        weights, divisor = counts.unsqueeze(1), count
    else:
        count = sum(counts)
        # Copying a list to an accelerator would wait for it.
        weights = torch.stack([means.new_full((1,), number) for number in counts])
        divisor = max(count, 1)
    mean = (weights * means).sum(0) / divisor
    return Moments(count, mean, (m2s + weights * (means - mean).square()).sum(0))


def statistics(merged: Moments, eps: float, mode: EpsMode) -> Statistics:
    """Compute the statistics of the whole batch from its merged moments.

    ``inv_std`` is (var + eps)^-1/2 with the mode "plus", and max(var, eps)^-1/2 with "clamp".
    """
    count, mean, m2 = merged
    if isinstance(count, int):
        check_count(count, mean.numel())
    var = m2 / count
    is_plus = mode == "plus"
    inv_std = (var + eps if is_plus else var.clamp(min=eps)).rsqrt()
    # Always False on accelerators, because reading the result would wait for the device.
    is_centred = mean.is_cpu and bool(((mean * inv_std).abs() <= _CENTRED).all())
    slope = None if is_plus else (var >= eps).double()
    return Statistics(count, mean, var, inv_std, slope, is_centred)


def check_count(count: int, channels: int) -> None:
    """Raise ValueError unless there is more than one value per channel."""
    if count <= 1:
        raise ValueError(
            "Expected more than 1 value per channel when training, got input size "
            f"{torch.Size([count, channels])} in all chunks together"
        )


def normalise(
    x: Tensor, out: Tensor, *, stats: Statistics, weight: Tensor | None, bias: Tensor | None
) -> None:
    """Write the normalised ``x`` into ``out``."""
    if _is_fused(x, stats.precision):
        # The epsilon is already part of inv_std.
        weight, bias, mean, inv_std = _for_kernel(x, weight, bias, stats.mean, stats.inv_std)
        torch.batch_norm_elemt(x, weight, bias, mean, inv_std, 0.0, out=out)
        return
    scale = _scale(stats, weight)
    if stats.is_centred and _is_fp32_on_cpu(x, stats):
        _affine(x, out, stats.mean, scale, bias)
        return
    mean, error = _rounded_mean(x, stats)
    shift = -error * scale if bias is None else bias - error * scale
    mean, scale, shift = (_as_channels(vector, mean.dtype, x) for vector in (mean, scale, shift))
    for block, result in zip(_blocks(x), _blocks(out), strict=True):
        centred = _minus_mean(block, mean, result)
        # On the CPU, addcmul would take twice the time.
        centred.mul_(scale).add_(shift)
        if centred is not result:
            result.copy_(centred)


def gradient_sums(dy: Tensor, x: Tensor, stats: Statistics) -> Tensor:
    """Return the sums of dy and dy * xhat, which are the gradients of bias and weight.

    The shape is ``(2, channels)``; xhat is the normalised input before weight and bias.
    """
    if _is_fused(x, stats.precision):
        mean, inv_std = _for_kernel(x, stats.mean, stats.inv_std)
        sums = torch.batch_norm_backward_reduce(
            _dense(dy), x, mean, inv_std, None, False, True, True
        )
        return torch.stack([sums[3], sums[2]]).double()
    mean, error = _rounded_mean(x, stats)
    if _is_fp32_on_cpu(x, stats):
        # With a scale of 1, torch's gradients of weight and bias are these sums.
        ones_like_mean = torch.ones_like(mean)
        _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            dy, x, ones_like_mean, None, None, mean, ones_like_mean, True, 0.0, [False, True, True]
        )
        total, products = of_bias.double(), of_weight.double()
    else:
        total, products = _sums(x, mean, dy)
    return torch.stack([total, (products - error * total) * stats.inv_std])


def input_gradient(
    dy: Tensor, x: Tensor, total: Tensor, *, stats: Statistics, weight: Tensor | None
) -> Tensor:
    """Return weight * inv_std * (dy - mean(dy) - xhat * mean(dy * xhat)).

    The means are over all chunks; ``total`` has the sums from ``gradient_sums`` of all chunks.
    """
    if _is_fused(x, stats.precision):
        return _fused_input_gradient(dy, x, total, stats, weight)
    mean_dy, mean_product = (total / stats.num_values).unbind()
    if stats.slope is not None:
        mean_product = mean_product * stats.slope
    scale = _scale(stats, weight)
    slope = -stats.inv_std * mean_product
    dx = torch.empty_like(x)
    if stats.is_centred and _is_fp32_on_cpu(x, stats):
        _affine(x, dx, stats.mean, slope, -mean_dy)
        return dx.add_(dy).mul_(_as_channels(scale, x.dtype, x))
    mean, error = _rounded_mean(x, stats)
    shift = -mean_dy - slope * error
    vectors = (mean, slope, shift, scale)
    mean, slope, shift, scale = (_as_channels(vector, mean.dtype, x) for vector in vectors)
    for block, gradient, result in zip(_blocks(x), _blocks(dy), _blocks(dx), strict=True):
        centred = _minus_mean(block, mean, result)
        centred.mul_(slope).add_(gradient.to(mean.dtype)).add_(shift).mul_(scale)
        if centred is not result:
            result.copy_(centred)
    return dx


def _is_fp32_on_cpu(x: Tensor, stats: Statistics) -> bool:
    """Return whether torch's CPU kernels can be used with the required precision."""
    return x.is_cpu and x.dtype is stats.precision is torch.float32 and x.numel() > 0


def _fused_input_gradient(
    dy: Tensor, x: Tensor, total: Tensor, stats: Statistics, weight: Tensor | None
) -> Tensor:
    sum_dy, sum_product = total.unbind()
    if stats.slope is not None:
        sum_product = sum_product * stats.slope
    # The kernel takes the sum of dy * (x - mean).
    mean, inv_std, weight, sum_dy, sum_centred = _for_kernel(
        x, stats.mean, stats.inv_std, weight, sum_dy, sum_product / stats.inv_std
    )
    count = torch.ones((), dtype=torch.int32, device=x.device) * stats.num_values
    return torch.batch_norm_backward_elemt(
        _dense(dy), x, mean, inv_std, weight, sum_dy, sum_centred, count.int()
    )


def _is_fused(x: Tensor, precision: torch.dtype) -> bool:
    """Return whether CUDA's kernels accept ``x`` and accumulate in the required precision."""
    has_precision = precision is torch.float32 or x.dtype is torch.float64
    return x.is_cuda and has_precision and x.numel() > 0 and _is_dense(x)


def _is_dense(x: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.is_contiguous() or (
        x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])
    )


def _dense(x: Tensor) -> Tensor:
    return x if _is_dense(x) else x.contiguous()


def _for_kernel(x: Tensor, *vectors: Tensor | None) -> list[Any]:
    """Return vectors in the precision in which CUDA's kernels compute."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return [vector if vector is None else vector.to(dtype) for vector in vectors]


def _affine(x: Tensor, out: Tensor, mean: Tensor, scale: Tensor, shift: Tensor | None) -> None:
    """Write (x - mean) * scale + shift into ``out``, by torch's batch norm in evaluation mode."""
    mean, scale = mean.to(x.dtype), scale.to(x.dtype)
    shift = None if shift is None else shift.to(x.dtype)
    ones_like_mean, unused = torch.ones_like(mean), mean.new_empty(0)
    torch.native_batch_norm(
        x, scale, shift, mean, ones_like_mean, False, 0.0, 0.0, out=(out, unused, unused)
    )


def _sums(x: Tensor, mean: Tensor, dy: Tensor | None = None) -> Tensor:
    """Return the sums of dy and dy * (x - mean), ``(2, channels)``; dy defaults to x - mean."""
    dims = _all_but_channels(x)
    mean = _as_channels(mean, mean.dtype, x)
    sums = []
    for block, gradient in zip(_blocks(x), _blocks(x if dy is None else dy), strict=True):
        centred = _minus_mean(block, mean)
        factor = centred if dy is None else gradient.to(mean.dtype)
        sums += [factor.sum(dims), centred.mul_(factor).sum(dims)]
    return torch.stack(sums).view(-1, 2, x.size(1)).sum(0, dtype=torch.float64)


def _blocks(x: Tensor) -> Sequence[Tensor]:
    """Split ``x`` into blocks that fit into a CPU core's cache; do not split on other devices."""
    if x.device.type != "cpu" or x.numel() <= _BLOCK:
        return (x,)
    samples = torch.split(x, max(1, _BLOCK * x.size(0) // x.numel()))
    if x.dim() < 3 or samples[0].numel() <= _BLOCK:
        return samples
    length = max(1, _BLOCK * x.size(2) // samples[0].numel())
    return [block for sample in samples for block in torch.split(sample, length, dim=2)]


def _rounded_mean(x: Tensor, stats: Statistics) -> tuple[Tensor, Tensor]:
    """Return the mean, rounded to the precision of the computation, and its rounding error."""
    rounded = stats.mean.to(torch.promote_types(x.dtype, stats.precision))
    return rounded, stats.mean - rounded


def _minus_mean(x: Tensor, mean: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``x - mean`` in the mean's dtype; write into ``out`` if it has this dtype."""
    has_dtype = out is not None and out.dtype is mean.dtype
    return torch.sub(x.to(mean.dtype), mean, out=out if has_dtype else None)


def _scale(stats: Statistics, weight: Tensor | None) -> Tensor:
    return stats.inv_std if weight is None else stats.inv_std * weight


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _as_channels(vector: Tensor, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return ``vector`` in a dtype, shaped to broadcast over the channels of ``like``."""
    return vector.to(dtype).view(-1, *[1] * (like.dim() - 2))


class Chunk(NamedTuple):
    """One chunk of the batch, with its parameters and a tensor for its output."""

    x: Tensor
    output: Tensor
    weight: Tensor | None
    bias: Tensor | None

    @property
    def is_in_graph(self) -> bool:
        """Whether a tensor of the chunk requires a gradient."""
        tensors = (self.x, self.weight, self.bias)
        return any(tensor.requires_grad for tensor in tensors if tensor is not None)


class BackwardOptions(NamedTuple):
    """The arguments of the joint autograd node in addition to its chunks.

    Attributes:
        input_needs_grad: whether the input of any chunk, on any rank, requires a gradient.
        sum_ranks: function that adds up the gradient sums over the ranks.
    """

    stats: Statistics
    input_needs_grad: bool
    sum_ranks: Callable[[Tensor], Tensor] = lambda total: total


def connect(options: BackwardOptions, chunks: Sequence[Chunk]) -> list[Tensor]:
    """Return the outputs of the chunks as outputs of one autograd node; the caller fills them.

    The backward of a joint node gets the gradients of all chunks at once, so it never waits. The
    backwards of separate nodes would have to wait for each other. On the CPU this would be a
    deadlock, because they all run in one thread.
    """
    outputs = [chunk.output for chunk in chunks]
    if not any(chunk.is_in_graph for chunk in chunks):
        return outputs
    tensors = [tensor for chunk in chunks for tensor in (chunk.x, chunk.weight, chunk.bias)]
    with torch.enable_grad():
        results: tuple[Tensor, ...] = _Joint.apply(options, outputs, *tensors)  # type: ignore[no-untyped-call]
    pairs = zip(chunks, results, strict=True)
    return [result if chunk.is_in_graph else result.detach() for chunk, result in pairs]


class _Joint(Function):
    """The autograd node of all chunks.

    Its inputs are the options, the outputs, then x, weight and bias of every chunk.
    """

    @staticmethod
    def forward(
        ctx: Any, options: BackwardOptions, outputs: list[Tensor], *tensors: Tensor | None
    ) -> Any:
        ctx.options = options
        ctx.save_for_backward(*tensors[0::3], *tensors[1::3])
        # Outputs in `ctx` would form a reference cycle, which would keep the whole graph alive.
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        options: BackwardOptions = ctx.options
        # Read once: each access unpacks the tensors again, which checkpointing does not allow.
        saved = ctx.saved_tensors
        inputs, weights = saved[: len(gradients)], saved[len(gradients) :]
        stats = [options.stats.to(x.device) for x in inputs]
        triples = list(zip(gradients, inputs, stats, strict=True))
        sums = [gradient_sums(*triple) for triple in triples]
        if options.input_needs_grad:
            total = torch.stack([tensor.to(sums[0].device) for tensor in sums]).sum(0)
            total = options.sum_ranks(total)
        needs_grad = ctx.needs_input_grad[2:]
        results: list[Tensor | None] = []
        for index, (dy, x, chunk_stats) in enumerate(triples):
            of_bias, of_weight = sums[index]
            of_x: Tensor | None = None
            x_needs, weight_needs, bias_needs = needs_grad[3 * index : 3 * index + 3]
            if x_needs:
                total = total.to(x.device)
                of_x = input_gradient(dy, x, total, stats=chunk_stats, weight=weights[index])
            # Autograd casts the sums to the dtypes of the parameters.
            results += [of_x, of_weight if weight_needs else None, of_bias if bias_needs else None]
        return None, None, *results
