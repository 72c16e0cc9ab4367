"""Gradient descent on soft placements: the documented step, and the starts it gives."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .problem import Problem, Weights, terms

_STARTS = 4


class Steps(Protocol):
    """What a descent asks of an optimizer."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def step(self) -> object:
        """Change the parameters by their gradients."""


class _Adam:
    """Adam (Kingma and Ba, 2015, algorithm 1) on one tensor.

    The first use of torch's own imports its compiler, for longer than the whole search.
    """

    def __init__(self, values: Tensor, rate: float) -> None:
        self._values, self._rate, self._count = values, rate, 0
        self._mean, self._square = torch.zeros_like(values), torch.zeros_like(values)

    def zero_grad(self) -> None:
        self._values.grad = None

    @torch.no_grad()
    def step(self) -> None:
        gradient = self._values.grad
        assert gradient is not None
        self._count += 1
        self._mean.lerp_(gradient, 0.1)
        self._square.lerp_(gradient.square(), 0.001)
        mean = self._mean / (1 - 0.9**self._count)
        spread = (self._square / (1 - 0.999**self._count)).sqrt() + 1e-8
        self._values -= self._rate * mean / spread


def descend_once(
    optimizer: Steps,
    logits: Tensor,
    size: tuple[Tensor, Tensor],
    complexity: tuple[Tensor, Tensor],
    connection: tuple[Tensor, Tensor],
    weights: Weights,
) -> Tensor:
    """Change `logits`, `(..., models, devices)`, by a step; return the cost before, `(...)`."""
    optimizer.zero_grad()
    cost = terms(logits.softmax(-1), size, complexity, connection).total(weights)
    cost.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return cost.detach()


def relaxed_starts(
    problem: Problem, iterations: int, update_rate: float, generator: torch.Generator
) -> Tensor:
    """Return the likeliest devices after descents from several places, `(starts, models)`."""
    logits = torch.randn(_STARTS, *problem.shape, generator=generator).requires_grad_()
    optimizer = _Adam(logits, update_rate)
    size, complexity, connection = (
        (first.float(), second.float())
        for first, second in (
            (problem.sizes, problem.capacities),
            (problem.complexities, problem.compute),
            (problem.connection, problem.distance),
        )
    )
    with torch.enable_grad():
        for _ in range(iterations):
            descend_once(optimizer, logits, size, complexity, connection, problem.weights)
    return logits.detach().argmax(-1)
