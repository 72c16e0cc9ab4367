"""What is to be placed where, and what a placement costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

# Sums of rounded sizes may pass a capacity that they just fill by this part of it.
_ROUNDING = 1e-9


class Weights(NamedTuple):
    """How much each term of the objective counts."""

    connection: float
    size: float
    complexity: float
    entropy: float


class Terms(NamedTuple):
    """The four terms of the objective, unweighted, each of shape `(...)`."""

    connection: Tensor
    size: Tensor
    complexity: Tensor
    entropy: Tensor

    def total(self, weights: Weights) -> Tensor:
        """Return the weighted sum."""
        return sum(
            (weight * term for weight, term in zip(weights, self, strict=True)),
            torch.zeros_like(self.connection),
        )


@dataclass(frozen=True)
class Problem:
    """Models, devices and what counts; all tensors float64 on the CPU.

    Attributes:
        sizes: MiB, `(models,)`.
        capacities: MiB that may be used, `(devices,)`.
        complexities: of any one unit, `(models,)`.
        compute: of any one unit, `(devices,)`.
        connection: `(models, models)`.
        distance: symmetric, zero diagonal, `(devices, devices)`.
        weights: of the four terms.
    """

    sizes: Tensor
    capacities: Tensor
    complexities: Tensor
    compute: Tensor
    connection: Tensor
    distance: Tensor
    weights: Weights

    @property
    def shape(self) -> tuple[int, int]:
        """How many models and how many devices there are."""
        return len(self.sizes), len(self.capacities)

    def terms(self, shares: Tensor) -> Terms:
        """Return the terms of placements, `(..., models, devices)`, rows summing to one."""
        return terms(
            shares,
            (self.sizes, self.capacities),
            (self.complexities, self.compute),
            (self.connection, self.distance),
        )

    def cost(self, assignment: Tensor) -> Tensor:
        """Return the objective of `assignment`, device indices `(..., models)`."""
        return self.terms(self.one_hot(assignment)).total(self.weights)

    def one_hot(self, assignment: Tensor) -> Tensor:
        """Return `assignment` as shares, `(..., models, devices)`."""
        return torch.nn.functional.one_hot(assignment, len(self.capacities)).double()

    def used(self, assignment: Tensor) -> Tensor:
        """Return the MiB that each device holds, `(..., devices)`."""
        return self.sizes @ self.one_hot(assignment)

    def overflow(self, assignment: Tensor) -> Tensor:
        """Return the MiB by which devices are too small, `(...)`; 0 where all fits."""
        return beyond(self.used(assignment), self.capacities).sum(-1)

    def merged(self, groups: list[list[int]]) -> Problem:
        """Return the problem whose models are `groups` of these.

        Models of one group stay together, so nothing crosses between them, and every placement
        costs what it costs here.
        """
        member = torch.zeros(self.shape[0], len(groups), dtype=torch.float64)
        for column, group in enumerate(groups):
            member[group, column] = 1.0
        return replace(
            self,
            sizes=self.sizes @ member,
            complexities=self.complexities @ member,
            connection=member.T @ self.connection @ member,
        )


def beyond(used: Tensor, capacities: Tensor) -> Tensor:
    """Return by how much `used` is more than `capacities`; what rounding adds is nothing."""
    over = used - capacities
    return torch.where(over > capacities * _ROUNDING, over, 0.0)


def share(values: Tensor) -> Tensor:
    """Return `values` divided by their sum; zeros where that is zero."""
    total = values.sum()
    return values / total if total > 0 else torch.zeros_like(values)


def terms(
    shares: Tensor,
    size: tuple[Tensor, Tensor],
    complexity: tuple[Tensor, Tensor],
    connection: tuple[Tensor, Tensor],
) -> Terms:
    """Return the four terms of placements.

    The formulas are those of machin's `ModelAssigner`; only the connection term is summed over the
    pairs of models, not averaged: averaged, it fades with the square of the number of models.

    Args:
        shares: how much of each model is on each device, `(..., models, devices)`.
        size: sizes of the models, capacities of the devices.
        complexity: complexities of the models, compute of the devices.
        connection: between models, and the distance between devices.
    """
    between = share(connection[0])
    apart = share(connection[1]).to(shares)
    between = (between - torch.diag(between.diagonal())).to(shares)
    crossing = (shares * (between @ shares @ apart.T)).sum((-2, -1))
    too_much = torch.relu(size[0] @ shares - size[1]).mean(-1)
    uneven = (share(complexity[0]) @ shares - share(complexity[1])).square().mean(-1)
    undecided = torch.special.entr(shares).sum(-1).mean(-1)
    return Terms(crossing, too_much, uneven, undecided)
