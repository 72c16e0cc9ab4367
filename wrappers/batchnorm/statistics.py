"""The arithmetic of batch normalisation over several chunks of one batch.

Statistics are counts, means and sums of squared deviations, which merge without cancellation
(Chan, Golub, LeVeque 1979). Vectors with one number per channel are always fp64; what is as large
as the input is computed in fp64 for fp32 and fp64 inputs on the CPU, in fp32 for halves and for
fp32 on other devices, and rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

EpsMode: TypeAlias = Literal["plus", "clamp"]

# Elements of a part of a tensor; twice this in fp64 has to fit into a core's cache.
_BLOCK = 2**16


@dataclass(frozen=True)
class Moments:
    """Of one chunk: values per channel, their mean and their sum of squared deviations.

    Attributes:
        mean: `(channels,)`, zeros when there are no values.
        m2: `(channels,)`.
    """

    count: int
    mean: Tensor
    m2: Tensor

    def to(self, device: torch.device) -> Moments:
        """The same numbers on another device."""
        return Moments(self.count, self.mean.to(device), self.m2.to(device))


@dataclass(frozen=True)
class Statistics:
    """Of the whole batch, per channel: what every chunk is normalised by.

    Attributes:
        var: the biased variance.
        inv_std: what the deviations are multiplied by.
        slope: 0 where `inv_std` does not depend on the variance, else 1; None: 1 everywhere.
    """

    count: int
    mean: Tensor
    var: Tensor
    inv_std: Tensor
    slope: Tensor | None = None

    def to(self, device: torch.device) -> Statistics:
        """The same numbers on another device."""
        if device == self.mean.device:
            return self
        slope = None if self.slope is None else self.slope.to(device)
        mean, var, inv_std = (one.to(device) for one in (self.mean, self.var, self.inv_std))
        return Statistics(self.count, mean, var, inv_std, slope)

    def unbiased_var(self) -> Tensor:
        """The estimate for the population."""
        return self.var * (self.count / (self.count - 1))


def moments(x: Tensor) -> Moments:
    """Moments of `x` `(batch, channels, ...)`."""
    channels = x.size(1)
    if not x.numel():
        zeros = torch.zeros(channels, dtype=torch.float64, device=x.device)
        return Moments(0, zeros, zeros)
    dims = _all_but_channels(x)
    counts, means, m2s = [], [], []
    for part in _blocks(x):
        moved = part.to(_working_dtype(x), copy=True)
        mean = moved.mean(dims)
        moved.sub_(_as_channels(mean, moved))
        counts.append(part.numel() // channels)
        means.append(mean.double())
        m2s.append(moved.mul_(moved).sum(dims).double())
    if len(counts) == 1:
        return Moments(counts[0], means[0], m2s[0])
    return Moments(*merge(counts, torch.stack(means), torch.stack(m2s)))


def merge(counts: Sequence[int], means: Tensor, m2s: Tensor) -> tuple[int, Tensor, Tensor]:
    """Count, mean and M2 of all chunks; `means` and `m2s` are `(chunks, channels)`."""
    count = sum(counts)
    weights = torch.tensor(counts, dtype=torch.float64, device=means.device).unsqueeze(1)
    mean = (weights * means).sum(0) / max(count, 1)
    return count, mean, (m2s + weights * (means - mean).square()).sum(0)


def statistics(merged: tuple[int, Tensor, Tensor], eps: float, mode: EpsMode) -> Statistics:
    """What to normalise by.

    Args:
        mode: "plus": (var + eps)^-1/2, as torch; "clamp": max(var, eps)^-1/2.

    Raises:
        ValueError: not more than one value per channel.
    """
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
    """weight * inv_std * (dy - mean(dy) - xhat * mean(dy * xhat)), the means over all chunks.

    Args:
        total: the sums over all chunks.
    """
    mean_dy, mean_product = (total / stats.count).unbind()
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
