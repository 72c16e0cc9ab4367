"""Local search on hard placements: one model moves, or two change places."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .problem import Problem, beyond, share

# An improvement that is smaller is rounding.
_NOTHING = 1e-12
# Where something overflows, this much of the total size outweighs any cost.
_OVERFLOW = 1e6
# Rows are worked on in parts, so that the pairs of all models stay in the cache.
_PAIRS = 50_000


class _Scaled(NamedTuple):
    """The parts of a problem as the deltas need them, weights worked in."""

    pairs: Tensor
    apart: Tensor
    sizes: Tensor
    capacities: Tensor
    loads: Tensor
    compute: Tensor
    unit: float


def improve(problem: Problem, assignments: Tensor) -> Tensor:
    """Return `assignments`, `(rows, models)`, each taken downhill until no step helps.

    A row that fits keeps fitting.
    """
    models, devices = problem.shape
    rows = max(1, _PAIRS // models**2)
    scaled = _scale(problem)
    steps = 10 * models + 100
    return torch.cat([_descend(scaled, part, steps) for part in torch.split(assignments, rows)])


def _scale(problem: Problem) -> _Scaled:
    between = share(problem.connection)
    between = (between + between.T) * problem.weights.connection
    per_device = (problem.weights.complexity / problem.shape[1]) ** 0.5
    return _Scaled(
        pairs=between.fill_diagonal_(0.0),
        apart=share(problem.distance),
        sizes=problem.sizes,
        capacities=problem.capacities,
        loads=share(problem.complexities) * per_device,
        compute=share(problem.compute) * per_device,
        unit=_OVERFLOW / max(float(problem.sizes.sum()), 1e-12),
    )


def _descend(scaled: _Scaled, assignments: Tensor, steps: int) -> Tensor:
    done = assignments.clone()
    active = torch.arange(len(done))
    for _ in range(steps):
        rows = done[active]
        gain, changed = _best_step(scaled, rows)
        better = gain < -_NOTHING
        if not better.any():
            break
        active = active[better]
        done[active] = changed[better]
    return done


def _best_step(scaled: _Scaled, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return how the best step of each row changes its cost, and the row after it."""
    moves, swaps = _deltas(scaled, rows)
    devices = moves.shape[2]
    models = rows.shape[1]
    move_gain, move = moves.flatten(1).min(1)
    swap_gain, swap = swaps.flatten(1).min(1)
    at = torch.arange(len(rows))
    moved, swapped = rows.clone(), rows.clone()
    moved[at, move // devices] = move % devices
    first, second = swap // models, swap % models
    swapped[at, first], swapped[at, second] = rows[at, second], rows[at, first]
    swap_wins = swap_gain < move_gain
    return torch.minimum(move_gain, swap_gain), torch.where(swap_wins[:, None], swapped, moved)


def _deltas(scaled: _Scaled, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the change of cost of every move and every swap.

    Returns:
        Moves `(rows, models, devices)`, swaps `(rows, models, models)`.
    """
    shares = torch.nn.functional.one_hot(rows, len(scaled.capacities)).double()
    used = scaled.sizes @ shares
    uneven = scaled.loads @ shares - scaled.compute
    pull = scaled.pairs @ shares @ scaled.apart
    here = pull.gather(2, rows[:, :, None])
    moves = pull - here
    there = pull.gather(2, rows[:, None, :].expand(-1, rows.shape[1], -1)) - here
    swaps = there + there.mT + 2 * scaled.pairs * scaled.apart[rows[:, :, None], rows[:, None, :]]
    loads, sizes = scaled.loads, scaled.sizes
    uneven_here, used_here = uneven.gather(1, rows), used.gather(1, rows)
    moves += 2 * loads[:, None] * (uneven[:, None, :] - uneven_here[:, :, None] + loads[:, None])
    more = loads[None, :] - loads[:, None]
    swaps += 2 * more * (uneven_here[:, :, None] - uneven_here[:, None, :] + more)
    over = beyond(used, scaled.capacities)
    lacks = over.sum(1) > 0
    room, over_here = scaled.capacities[rows], over.gather(1, rows)
    leaves = beyond(used_here - sizes, room) - over_here
    enters = beyond(used[:, None, :] + sizes[:, None], scaled.capacities) - over[:, None, :]
    change = beyond(used_here[:, :, None] + sizes[None, :] - sizes[:, None], room[:, :, None])
    change = change - over_here[:, :, None]
    moves = _weigh(moves, leaves[:, :, None] + enters, lacks, scaled.unit)
    swaps = _weigh(swaps, change + change.mT, lacks, scaled.unit)
    moves.scatter_(2, rows[:, :, None], torch.inf)
    swaps.masked_fill_(rows[:, :, None] == rows[:, None, :], torch.inf)
    return moves, swaps


def _weigh(costs: Tensor, overflow: Tensor, lacks: Tensor, unit: float) -> Tensor:
    """Return `costs` with what they change in `overflow`; a row that fits may not lose that."""
    kept = costs.masked_fill(overflow > 0, torch.inf)
    return torch.where(lacks[:, None, None], costs + unit * overflow, kept)
