"""The search for the best placement: all of them, or local search from a few starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .problem import Problem, beyond, share

# Up to here every placement is looked at.
EXHAUSTIVE_PLACEMENTS = 100_000
_CHUNK = 20_000
_DESCENTS, _RANDOM = 4, 16
# The best starts go on and are kicked. A round costs what its rows times pairs of models cost, so
# few models have many rows and few rounds, many models the reverse.
_ROUNDS = 8
_PAIRS_IN_ROUND = 10_000
_PAIRS_IN_ALL = 200_000
# Rows are improved in parts, so that the pairs of all models stay in the cache.
_PAIRS_AT_ONCE = 50_000
# Two costs that differ by less are the same cost, rounded.
_SAME = 1e-12
# Where something overflows, this much of the total size outweighs any cost.
_OVERFLOW = 1e6
# How many steps a packing has, onwards and back: about a third of a second.
_TRIES = 100_000
# In MiB: a tenth of a byte.
_NOTHING = 1e-7


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
        number = torch.arange(devices**models)[:, None]
        every = number // devices ** torch.arange(models - 1, -1, -1) % devices
        return _best(problem, every, certain=True)
    generator = torch.Generator().manual_seed(seed)
    packed, certain = pack(problem.sizes.tolist(), problem.capacities.tolist())
    starts = [
        _descended(problem, iterations, update_rate, generator),
        torch.randint(devices, (_RANDOM, models), generator=generator),
        torch.arange(devices)[:, None].expand(devices, models),
        torch.tensor([] if packed is None else [packed], dtype=torch.long).view(-1, models),
    ]
    local = _LocalSearch(problem)
    best = local.improve(torch.cat(starts))
    best = best[_ranking(problem, best)[: max(4, min(_RANDOM, _PAIRS_IN_ROUND // models**2))]]
    hopeless = packed is None and certain
    rounds = max(_ROUNDS, min(5 * models, _PAIRS_IN_ALL // models**2))
    for _ in range(0 if hopeless else rounds):
        kicked = local.improve(_kick(best, devices, generator))
        best = _better(problem, best, kicked)
    return _best(problem, best, certain=hopeless)


def _best(problem: Problem, every: Tensor, *, certain: bool) -> Found:
    costs = torch.cat([problem.cost(part) for part in torch.split(every, _CHUNK)])
    lacking = torch.cat([problem.overflow(part) for part in torch.split(every, _CHUNK)])
    least = lacking.min()
    costs = costs.masked_fill(lacking > least, torch.inf)
    # The first of equals, so that rounding does not choose among them.
    first = int((costs <= costs.min() + _SAME).nonzero()[0])
    return Found(every[first], bool(least == 0), certain)


def _descended(
    problem: Problem, iterations: int, rate: float, generator: torch.Generator
) -> Tensor:
    """Return the likeliest devices after descents by the gradients' signs, `(starts, models)`."""
    logits = torch.randn(_DESCENTS, *problem.shape, generator=generator, dtype=torch.float64)
    for _ in range(iterations):
        with torch.enable_grad():
            cost = problem.soft_cost(logits.requires_grad_()).sum()
        (gradient,) = torch.autograd.grad(cost, logits)
        logits = logits.detach() - rate * gradient.sign()
    return logits.argmax(-1)


def _ranking(problem: Problem, assignments: Tensor) -> Tensor:
    """Return the rows of `assignments`, best first."""
    by_cost = problem.cost(assignments).argsort(stable=True)
    return by_cost[problem.overflow(assignments)[by_cost].argsort(stable=True)]


def _kick(assignments: Tensor, devices: int, generator: torch.Generator) -> Tensor:
    """Return `assignments` with some models thrown somewhere."""
    rows, models = assignments.shape
    part = torch.rand(rows, 1, generator=generator) * 0.15 + 1.5 / models
    thrown = torch.rand(rows, models, generator=generator) < part
    somewhere = torch.randint(devices, (rows, models), generator=generator)
    return torch.where(thrown, somewhere, assignments)


def _better(problem: Problem, old: Tensor, new: Tensor) -> Tensor:
    """Return row by row the better one of `old` and `new`."""
    both = torch.stack([old, new])
    (old_cost, new_cost), (old_lacks, new_lacks) = problem.cost(both), problem.overflow(both)
    wins = (new_lacks < old_lacks) | ((new_lacks == old_lacks) & (new_cost < old_cost))
    return torch.where(wins[:, None], new, old)


class _LocalSearch:
    """One model moves, or two change places, as long as that helps.

    Without its overflow the cost is a quadratic form of the shares, so its gradient gives the
    change of every step.
    """

    def __init__(self, problem: Problem) -> None:
        between = share(problem.connection)
        between = (between + between.T) * problem.weights.connection
        per_device = (problem.weights.complexity / problem.shape[1]) ** 0.5
        self._problem = problem
        self._pairs = between.fill_diagonal_(0.0)
        self._apart = share(problem.distance)
        self._loads = share(problem.complexities) * per_device
        self._compute = share(problem.compute) * per_device
        self._unit = _OVERFLOW / max(float(problem.sizes.sum()), 1e-12)

    def improve(self, assignments: Tensor) -> Tensor:
        """Return `assignments`, `(rows, models)`, each taken downhill until no step helps.

        A row that fits keeps fitting.
        """
        rows = max(1, _PAIRS_AT_ONCE // self._problem.shape[0] ** 2)
        return torch.cat([self._descend(part) for part in torch.split(assignments, rows)])

    def _descend(self, assignments: Tensor) -> Tensor:
        done = assignments.clone()
        active = torch.arange(len(done))
        for _ in range(10 * done.shape[1] + 100):
            change, changed = self._best_step(done[active])
            better = change < -_SAME
            if not better.any():
                break
            active = active[better]
            done[active] = changed[better]
        return done

    def _best_step(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return how the best step of each row changes its cost, and the row after it."""
        moves, swaps = self._changes(rows)
        models, devices = self._problem.shape
        move_change, move = moves.flatten(1).min(1)
        swap_change, swap = swaps.flatten(1).min(1)
        at = torch.arange(len(rows))
        moved, swapped = rows.clone(), rows.clone()
        moved[at, move // devices] = move % devices
        first, second = swap // models, swap % models
        swapped[at, first], swapped[at, second] = rows[at, second], rows[at, first]
        swap_wins = swap_change < move_change
        return torch.minimum(move_change, swap_change), torch.where(
            swap_wins[:, None], swapped, moved
        )

    def _changes(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the change of cost of moves `(rows, models, devices)` and of swaps of models."""
        here, loads = rows[:, :, None], self._loads
        shares = self._problem.one_hot(rows)
        uneven = loads @ shares - self._compute
        slope = self._pairs @ shares @ self._apart + 2 * loads[:, None] * uneven[:, None, :]
        moves = slope - slope.gather(2, here) + 2 * loads.square()[:, None]
        there = moves.gather(2, rows[:, None, :].expand(-1, rows.shape[1], -1))
        both = self._pairs * self._apart[here, rows[:, None, :]] - 2 * loads[:, None] * loads
        swaps = there + there.mT + 2 * both
        lacks, move_overflow, swap_overflow = self._overflow_changes(rows)
        moves = self._weigh(moves, move_overflow, lacks).scatter_(2, here, torch.inf)
        swaps = self._weigh(swaps, swap_overflow, lacks)
        return moves, swaps.masked_fill_(here == rows[:, None, :], torch.inf)

    def _overflow_changes(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return which rows overflow, and by how much moves and swaps change that."""
        sizes, capacities = self._problem.sizes, self._problem.capacities
        used = self._problem.used(rows)
        over = beyond(used, capacities)
        here, room = used.gather(1, rows)[:, :, None], capacities[rows][:, :, None]
        over_here = over.gather(1, rows)[:, :, None]
        leaves = beyond(here - sizes[:, None], room) - over_here
        enters = beyond(used[:, None, :] + sizes[:, None], capacities) - over[:, None, :]
        change = beyond(here + sizes - sizes[:, None], room) - over_here
        return over.sum(1) > 0, leaves + enters, change + change.mT

    def _weigh(self, costs: Tensor, overflow: Tensor, lacks: Tensor) -> Tensor:
        """Return `costs` with what they change in `overflow`; a row that fits may not lose that."""
        kept = costs.masked_fill(overflow > 0, torch.inf)
        return torch.where(lacks[:, None, None], costs + self._unit * overflow, kept)


def pack(sizes: list[float], capacities: list[float]) -> tuple[list[int] | None, bool]:
    """Return the device of each model in some placement that fits, and whether that is certain.

    Largest first, each into the fullest device that takes it; where that ends nowhere, the last
    choices are undone. None with True means that nothing fits; None with False that the search
    was given up.
    """
    order = sorted(range(len(sizes)), key=lambda model: -sizes[model])
    wanted = [sizes[model] for model in order]
    spare = sum(capacities) - sum(sizes)
    if spare < -_NOTHING:
        return None, True
    free = list(capacities)
    chosen: list[int] = []
    choices = [_choices(wanted, 0, free, spare)]
    for _ in range(_TRIES):
        device = next(choices[-1], None)
        if device is not None:
            free[device] -= wanted[len(chosen)]
            chosen.append(device)
            if len(chosen) == len(order):
                placed = dict(zip(order, chosen, strict=True))
                return [placed[model] for model in range(len(sizes))], True
            choices.append(_choices(wanted, len(chosen), free, spare))
            continue
        choices.pop()
        if not chosen:
            return None, True
        undone = chosen.pop()
        free[undone] += wanted[len(chosen)]
    return None, False


def _choices(wanted: list[float], model: int, free: list[float], spare: float) -> Iterator[int]:
    """Yield the devices that take a model, fullest first, one of those that are equally full."""
    size, least = wanted[model], wanted[-1] - _NOTHING
    # What no model can use any more is lost, and no more than what is spare may be lost.
    lost = sum(room for room in free if room < least)
    fitting = {}
    for device, room in enumerate(free):
        rest = room - size
        gone = rest if rest < least and model < len(wanted) - 1 else 0.0
        if rest >= -_NOTHING and lost + gone <= spare + _NOTHING:
            # Undoing leaves rounding errors.
            fitting[round(room, 7)] = device
    return iter([fitting[room] for room in sorted(fitting)])
