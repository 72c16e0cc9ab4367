"""Models for tests of placements, and the objective computed pair by pair."""

import torch
from torch import Tensor


class Placed:
    """A module without parameters that remembers its device."""

    device: torch.device | None = None

    def to(self, device: torch.device) -> None:
        self.device = device


def written_out(
    assignments: Tensor,
    sizes: Tensor,
    compute: Tensor,
    connection: Tensor,
    distance: Tensor,
    weights: tuple[float, float],
) -> Tensor:
    """Return connection and complexity cost of `assignments`, `(rows, models)`, pair by pair."""
    pairs = distance[assignments[:, :, None], assignments[:, None, :]] / distance.sum()
    crossing = (pairs * connection).sum((1, 2)) / connection.sum().clamp_min(1e-9)
    loads = [
        torch.where(assignments == device, sizes, 0.0).sum(1) / sizes.sum()
        for device in range(len(distance))
    ]
    uneven = (torch.stack(loads, 1) - compute / compute.sum()).square().mean(1)
    return weights[0] * crossing + weights[1] * uneven


def overflows(assignments: Tensor, sizes: Tensor, capacities: Tensor) -> Tensor:
    """Return which rows exceed a device's memory."""
    used = [
        torch.where(assignments == device, sizes, 0.0).sum(1) for device in range(len(capacities))
    ]
    return (torch.stack(used, 1) > capacities * (1 + 1e-9)).any(1)
