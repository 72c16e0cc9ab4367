"""The cost of a placement, and the search for the best one: exhaustive, or a local search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

# If there are at most this many placements, all of them are evaluated.
EXHAUSTIVE_PLACEMENTS = 100_000
_CHUNK = 20_000
_STARTS = 20
# The best starting placements are the rows of a tensor, which each round perturbs. The time of a
# round grows with the number of rows times the number of pairs of models, so more models mean fewer
# rows. The number of rounds first rises with the number of models, then falls.
_ROUNDS = 12
_PAIRS_IN_ROUND = 10_000
_PAIRS_IN_ALL = 300_000
# Rows improved at once, times pairs of models. Tensors of this size fit into the CPU's cache.
_PAIRS = 50_000
# Smaller differences between costs are rounding errors.
_SAME = 1e-12
# Sizes that exactly fill a capacity may exceed it by this fraction, because of rounding.
_ROUNDING = 1e-9
# The cost of lacking as much memory as all models need. It outweighs all other costs.
_OVERFLOW = 1e6
# The maximum number of steps of `pack`, including backtracking; they take about 0.3 s.
_TRIES = 100_000
# MiB that count as rounding errors in `pack`: a tenth of a byte.
_TOLERANCE_MIB = 1e-7


@dataclass(frozen=True)
class Problem:
    """The models, the devices and the cost. In the search all tensors are float64 on the CPU.

    The cost has the formulas of machin's ``ModelAssigner``, but sums the connection term over the
    pairs of models: an average would shrink with the square of the number of models.

    Attributes:
        sizes: MiB, ``(models,)``.
        capacities: MiB that may be used, ``(devices,)``.
        complexities: in any unit, ``(models,)``.
        compute: in any unit, ``(devices,)``.
        connection: ``(models, models)``.
        distance: symmetric, zero diagonal, ``(devices, devices)``.
        weights: weights of the four terms, in the order of ``terms``.
    """

    sizes: Tensor
    capacities: Tensor
    complexities: Tensor
    compute: Tensor
    connection: Tensor
    distance: Tensor
    weights: Sequence[float]

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of models and of devices."""
        return len(self.sizes), len(self.capacities)

    def terms(self, shares: Tensor) -> dict[str, Tensor]:
        """Return the terms of the cost, each of shape ``(...)``.

        Args:
            shares: the fraction of each model on each device, ``(..., models, devices)``; each row
                sums to one.
        """
        between = share(self.connection)
        between = between - torch.diag(between.diagonal())
        apart, work = share(self.distance), share(self.complexities) @ shares
        return {
            "connection": (shares * (between @ shares @ apart.T)).sum((-2, -1)),
            "size": torch.relu(self.sizes @ shares - self.capacities).mean(-1),
            "complexity": (work - share(self.compute)).square().mean(-1),
            "entropy": torch.special.entr(shares).sum(-1).mean(-1),
        }

    def cost(self, shares: Tensor) -> Tensor:
        """Return the weighted sum of the terms, ``(...)``."""
        terms = self.terms(shares).values()
        weighted = [weight * term for weight, term in zip(self.weights, terms, strict=True)]
        return torch.stack(weighted).sum(0)

    def one_hot(self, assignment: Tensor) -> Tensor:
        """Return device indices ``(..., models)`` as shares ``(..., models, devices)``."""
        return torch.nn.functional.one_hot(assignment, len(self.capacities)).double()

    def used(self, assignment: Tensor) -> Tensor:
        """Return the MiB that each device holds, ``(..., devices)``."""
        return self.sizes @ self.one_hot(assignment)

    def overflow(self, assignment: Tensor) -> Tensor:
        """Return the sum of the MiB that devices lack, ``(...)``; 0 if all models fit."""
        return excess(self.used(assignment), self.capacities).sum(-1)

    def merged(self, groups: list[list[int]]) -> Problem:
        """Return the problem in which each of ``groups`` is one model.

        The costs are the same: models of a group are on the same device in both problems.
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


def excess(used: Tensor, capacities: Tensor) -> Tensor:
    """Return by how much ``used`` exceeds ``capacities``; rounding errors count as 0."""
    over = used - capacities
    return torch.where(over > capacities * _ROUNDING, over, 0.0)


def share(values: Tensor) -> Tensor:
    """Return ``values`` divided by their sum, or zeros if the sum is zero."""
    total = values.sum()
    return values / total if total > 0 else torch.zeros_like(values)


class Found(NamedTuple):
    """The best placement found.

    Attributes:
        assignment: index of the device of each model.
        fits: whether all models fit. If not, no other placement is known to lack less memory.
        certain: whether it is proven that this placement is the best or, if it does not fit, that
            none fits.
    """

    assignment: Tensor
    fits: bool
    certain: bool


def search(problem: Problem, iterations: int, seed: int) -> Found:
    """Return the best placement found, after at most ``iterations`` rounds of perturbation."""
    models, devices = problem.shape
    if devices**models <= EXHAUSTIVE_PLACEMENTS:
        every = torch.cartesian_prod(*[torch.arange(devices)] * models).reshape(-1, models)
        return _best(problem, every, certain=True)
    generator = torch.Generator().manual_seed(seed)
    packed, certain = pack(problem.sizes.tolist(), problem.capacities.tolist())
    starts = [
        torch.randint(devices, (_STARTS, models), generator=generator),
        torch.arange(devices)[:, None].expand(devices, models),
        torch.tensor([] if packed is None else [packed], dtype=torch.long).reshape(-1, models),
    ]
    moves = _Moves(problem)
    tried = moves.improve(torch.cat(starts))
    # Sorted by overflow, then by cost.
    tried = tried[problem.cost(problem.one_hot(tried)).argsort(stable=True)]
    tried = tried[problem.overflow(tried).argsort(stable=True)]
    elite = tried[: max(4, min(_STARTS, _PAIRS_IN_ROUND // models**2))]
    hopeless = packed is None and certain
    rounds = max(_ROUNDS, min(2 * models, _PAIRS_IN_ALL // models**2))
    for _ in range(0 if hopeless else min(iterations, rounds)):
        perturbed = moves.improve(_perturb(elite, devices, generator))
        elite = _better(problem, elite, perturbed)
    return _best(problem, elite, certain=hopeless)


def _best(problem: Problem, every: Tensor, *, certain: bool) -> Found:
    chunks = torch.split(every, _CHUNK)
    costs = torch.cat([problem.cost(problem.one_hot(chunk)) for chunk in chunks])
    lacking = torch.cat([problem.overflow(chunk) for chunk in chunks])
    least = lacking.min()
    costs = costs.masked_fill(lacking > least, torch.inf)
    # Of equally good placements take the first, so that rounding errors do not decide.
    best_row = int((costs <= costs.min() + _SAME).nonzero()[0])
    return Found(every[best_row], bool(least == 0), certain)


def _perturb(assignments: Tensor, devices: int, generator: torch.Generator) -> Tensor:
    """Return ``assignments`` with some models on random devices."""
    rows, models = assignments.shape
    moved_share = torch.rand(rows, 1, generator=generator) * 0.15 + 1.5 / models
    chosen = torch.rand(rows, models, generator=generator) < moved_share
    anywhere = torch.randint(devices, (rows, models), generator=generator)
    return torch.where(chosen, anywhere, assignments)


def _better(problem: Problem, current: Tensor, candidate: Tensor) -> Tensor:
    """Return the better one of ``current`` and ``candidate`` for each row."""
    both = torch.stack([current, candidate])
    old_cost, new_cost = problem.cost(problem.one_hot(both))
    old_lacks, new_lacks = problem.overflow(both)
    wins = (new_lacks < old_lacks) | ((new_lacks == old_lacks) & (new_cost < old_cost))
    return torch.where(wins[:, None], candidate, current)


class _Moves:
    """Local search on hard placements: a step moves one model, or exchanges two."""

    def __init__(self, problem: Problem) -> None:
        # The weighted parts of the problem, from which `_changes` computes changes of the cost.
        self._shape = problem.shape
        connection, _, complexity, _ = problem.weights
        between = share(problem.connection)
        self._pairs = ((between + between.T) * connection).fill_diagonal_(0.0)
        self._apart = share(problem.distance)
        self._sizes, self._capacities = problem.sizes, problem.capacities
        per_device = (complexity / problem.shape[1]) ** 0.5
        self._loads = share(problem.complexities) * per_device
        self._compute = share(problem.compute) * per_device
        self._unit = _OVERFLOW / max(float(problem.sizes.sum()), 1e-12)

    def improve(self, assignments: Tensor) -> Tensor:
        """Return ``assignments``, ``(rows, models)``, each row improved until no step helps.

        Rows that fit still fit afterwards.
        """
        rows = max(1, _PAIRS // self._shape[0] ** 2)
        return torch.cat([self._descend(chunk) for chunk in torch.split(assignments, rows)])

    def _descend(self, assignments: Tensor) -> Tensor:
        done = assignments.clone()
        active = torch.arange(len(done))
        for _ in range(10 * self._shape[0] + 100):
            gain, changed = self._best_step(done[active])
            better = gain < -_SAME
            if not better.any():
                break
            active = active[better]
            done[active] = changed[better]
        return done

    def _best_step(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the change of cost by the best step of each row, and the rows after the step."""
        models, devices = self._shape
        moves, swaps = self._changes(rows)
        move_gain, move = moves.flatten(1).min(1)
        swap_gain, swap = swaps.flatten(1).min(1)
        at = torch.arange(len(rows))
        moved, swapped = rows.clone(), rows.clone()
        moved[at, move // devices] = move % devices
        model, second = swap // models, swap % models
        swapped[at, model], swapped[at, second] = rows[at, second], rows[at, model]
        swap_wins = swap_gain < move_gain
        return torch.minimum(move_gain, swap_gain), torch.where(swap_wins[:, None], swapped, moved)

    def _changes(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the changes of cost by moves and by swaps.

        Their shapes are ``(rows, models, devices)`` and ``(rows, models, models)``.
        """
        shares = torch.nn.functional.one_hot(rows, self._shape[1]).double()
        uneven = self._loads @ shares - self._compute
        pull = self._pairs @ shares @ self._apart
        current_pull = pull.gather(2, rows[:, :, None])
        moves = pull - current_pull
        other_pull = pull.gather(2, rows[:, None, :].expand(-1, self._shape[0], -1)) - current_pull
        distances = self._apart[rows[:, :, None], rows[:, None, :]]
        swaps = other_pull + other_pull.mT + 2 * self._pairs * distances
        loads, uneven_here = self._loads, uneven.gather(1, rows)
        gap = uneven[:, None, :] - uneven_here[:, :, None]
        moves += 2 * loads[:, None] * (gap + loads[:, None])
        more = loads[None, :] - loads[:, None]
        swaps += 2 * more * (uneven_here[:, :, None] - uneven_here[:, None, :] + more)
        moves, swaps = self._add_overflow(moves, swaps, rows, self._sizes @ shares)
        moves.scatter_(2, rows[:, :, None], torch.inf)
        swaps.masked_fill_(rows[:, :, None] == rows[:, None, :], torch.inf)
        return moves, swaps

    def _add_overflow(
        self, moves: Tensor, swaps: Tensor, rows: Tensor, used: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add the cost of overflow to the changes: infinite if a row that fits would overflow."""
        sizes, room = self._sizes, self._capacities[rows]
        over = excess(used, self._capacities)
        over_here, used_here = over.gather(1, rows), used.gather(1, rows)
        leaves = excess(used_here - sizes, room) - over_here
        enters = excess(used[:, None, :] + sizes[:, None], self._capacities) - over[:, None, :]
        swap_overflow = excess(
            used_here[:, :, None] + sizes[None, :] - sizes[:, None], room[:, :, None]
        )
        swap_overflow = swap_overflow - over_here[:, :, None]
        lacks = (over.sum(1) > 0)[:, None, None]
        added = (leaves[:, :, None] + enters, swap_overflow + swap_overflow.mT)
        moves, swaps = (
            torch.where(lacks, cost + self._unit * more, cost.masked_fill(more > 0, torch.inf))
            for cost, more in zip((moves, swaps), added, strict=True)
        )
        return moves, swaps


def pack(sizes: list[float], capacities: list[float]) -> tuple[list[int] | None, bool]:
    """Search for a placement that fits.

    The largest models are placed first, each on the fullest device with enough space. If a model
    does not fit, the search backtracks.

    Returns:
        The device of each model and True; None and True if no placement fits; None and False if
        the search has reached its limit.
    """
    order = sorted(range(len(sizes)), key=lambda model: -sizes[model])
    ordered_sizes = [sizes[model] for model in order]
    spare = sum(capacities) - sum(sizes)
    if spare < -_TOLERANCE_MIB:
        return None, True
    free = list(capacities)
    chosen: list[int] = []
    choices = [_choices(ordered_sizes, 0, free, spare)]
    for _ in range(_TRIES):
        device = next(choices[-1], None)
        if device is not None:
            free[device] -= ordered_sizes[len(chosen)]
            chosen.append(device)
            if len(chosen) == len(order):
                placed = dict(zip(order, chosen, strict=True))
                return [placed[model] for model in range(len(sizes))], True
            choices.append(_choices(ordered_sizes, len(chosen), free, spare))
            continue
        choices.pop()
        if not chosen:
            return None, True
        undone = chosen.pop()
        free[undone] += ordered_sizes[len(chosen)]
    return None, False


def _choices(
    ordered_sizes: list[float], model: int, free: list[float], spare: float
) -> Iterator[int]:
    """Return the devices with space for a model, fullest first; of equally full ones, only one."""
    size, least = ordered_sizes[model], ordered_sizes[-1] - _TOLERANCE_MIB
    # Space is lost if not even the smallest model fits; at most `spare` may be lost.
    lost = sum(room for room in free if room < least)
    fitting = {}
    for device, room in enumerate(free):
        remaining = room - size
        gone = remaining if remaining < least and model < len(ordered_sizes) - 1 else 0.0
        if remaining >= -_TOLERANCE_MIB and lost + gone <= spare + _TOLERANCE_MIB:
            # Rounded, because backtracking leaves rounding errors.
            fitting[round(room, 7)] = device
    return iter([fitting[room] for room in sorted(fitting)])
