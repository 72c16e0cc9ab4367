"""The search for the best placement: all of them, or many starts and local search."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .descent import relaxed_starts
from .moves import improve
from .packing import pack
from .problem import Problem

# Up to here every placement is looked at.
EXHAUSTIVE_PLACEMENTS = 100_000
_CHUNK = 20_000
_STARTS = 16
# The best starts go on and are kicked. A round costs what its rows times pairs of models cost, so
# few models have many rows and few rounds, many models the reverse.
_ROUNDS = 8
_PAIRS_IN_ROUND = 10_000
_PAIRS_IN_ALL = 200_000
# Two costs that differ by less are the same cost, rounded.
_SAME = 1e-12


class Found(NamedTuple):
    """The best placement found.

    Attributes:
        assignment: index of the device of each model.
        fits: whether no device overflows; if not, it is the placement that lacks least.
        certain: whether there is nothing better (or, where it does not fit, nothing that fits).
    """

    assignment: Tensor
    fits: bool
    certain: bool


def search(problem: Problem, iterations: int, update_rate: float, seed: int) -> Found:
    """Return the best placement found; the same for the same arguments."""
    models, devices = problem.shape
    if devices**models <= EXHAUSTIVE_PLACEMENTS:
        return _best(problem, [_numbered(problem)], certain=True)
    generator = torch.Generator().manual_seed(seed)
    packed, certain = pack(problem.sizes.tolist(), problem.capacities.tolist())
    starts = [
        relaxed_starts(problem, iterations, update_rate, generator),
        torch.randint(devices, (_STARTS, models), generator=generator),
        torch.arange(devices)[:, None].expand(devices, models),
    ]
    if packed is not None:
        starts.append(torch.tensor([packed]))
    tried = improve(problem, torch.cat(starts))
    elite = tried[_ranking(problem, tried)[: max(4, min(_STARTS, _PAIRS_IN_ROUND // models**2))]]
    hopeless = packed is None and certain
    rounds = max(_ROUNDS, min(2 * models, _PAIRS_IN_ALL // models**2))
    for _ in range(0 if hopeless else rounds):
        kicked = improve(problem, _kick(elite, devices, generator))
        elite = _better(problem, elite, kicked)
    found = _best(problem, [elite], certain=False)
    return found._replace(certain=hopeless)


def _numbered(problem: Problem) -> Tensor:
    """Return every placement, `(devices ** models, models)`, the first devices first."""
    models, devices = problem.shape
    number = torch.arange(devices**models)[:, None]
    return number // devices ** torch.arange(models - 1, -1, -1) % devices


def _best(problem: Problem, candidates: list[Tensor], *, certain: bool) -> Found:
    every = torch.cat(candidates)
    costs = torch.cat([problem.cost(part) for part in torch.split(every, _CHUNK)])
    lacking = torch.cat([problem.overflow(part) for part in torch.split(every, _CHUNK)])
    least = lacking.min()
    costs = costs.masked_fill(lacking > least, torch.inf)
    # The first of equals, so that rounding does not choose among them.
    first = int((costs <= costs.min() + _SAME).nonzero()[0])
    return Found(every[first], bool(least == 0), certain)


def _ranking(problem: Problem, assignments: Tensor) -> Tensor:
    """Return the rows of `assignments`, best first."""
    by_cost = problem.cost(assignments).argsort(stable=True)
    return by_cost[problem.overflow(assignments)[by_cost].argsort(stable=True)]


def _kick(assignments: Tensor, devices: int, generator: torch.Generator) -> Tensor:
    """Return `assignments` with some models thrown somewhere."""
    rows, models = assignments.shape
    part = torch.rand(rows, 1, generator=generator) * 0.15 + 1.5 / models
    thrown = torch.rand(rows, models, generator=generator) < part
    return torch.where(
        thrown, torch.randint(devices, (rows, models), generator=generator), assignments
    )


def _better(problem: Problem, old: Tensor, new: Tensor) -> Tensor:
    """Return row by row the better one of `old` and `new`."""
    both = torch.stack([old, new])
    (old_cost, new_cost), (old_lacks, new_lacks) = problem.cost(both), problem.overflow(both)
    wins = (new_lacks < old_lacks) | ((new_lacks == old_lacks) & (new_cost < old_cost))
    return torch.where(wins[:, None], new, old)
