"""Placements in words: the table, and why nothing fits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .devices import Room
from .problem import Problem, beyond, share
from .search import Found

_MIB = 1024**2
_SHOWN_MODELS = 6


def does_not_fit(
    problem: Problem,
    rooms: Sequence[Room],
    units: Sequence[str],
    found: Found,
    max_mem_ratio: float,
) -> str:
    """Return how much each device lacks in `found`, the placement that lacks least."""
    total, allowed = float(problem.sizes.sum()), float(problem.capacities.sum())
    lines = [_headline(problem, units, total, allowed, certain=found.certain)]
    lines.append("What comes nearest:")
    assignment = found.assignment
    used = problem.used(assignment)
    over = beyond(used, problem.capacities).tolist()
    for index, room in enumerate(rooms):
        here = [units[unit] for unit in (assignment == index).nonzero().flatten().tolist()]
        lines.append(
            f"  {room.device}: needed {_in_bytes(float(used[index]))}, allowed "
            f"{_in_bytes(float(problem.capacities[index]))} = {max_mem_ratio:g} of "
            f"{_in_bytes(room.free_mib)} free"
            + (f", lacking {_in_bytes(over[index])}" if over[index] else "")
            + (f" ({_listed(here)})" if here else "")
        )
    lines.append(
        "Add devices (the CPU is one), raise max_mem_ratio, or lower model_size_multiplier (1 for "
        "models that are not trained)."
    )
    return "\n".join(lines)


def _headline(
    problem: Problem, units: Sequence[str], total: float, allowed: float, *, certain: bool
) -> str:
    if beyond(problem.sizes.sum(), problem.capacities.sum()) > 0:
        return (
            f"Estimated model will use {_in_bytes(total)}, but only have {_in_bytes(allowed)} "
            "allowed memory in total."
        )
    largest = int(problem.sizes.argmax())
    if problem.sizes[largest] > problem.capacities.max():
        return (
            f"Estimated model will use {_in_bytes(float(problem.sizes[largest]))} for "
            f"{units[largest]} alone, more than any device allows."
        )
    verdict = "no placement fits" if certain else "no placement was found that fits"
    return (
        f"Estimated model will use {_in_bytes(total)} of {_in_bytes(allowed)} allowed memory in "
        f"total, but {verdict} on the single devices."
    )


def placement_table(
    problem: Problem, rooms: Sequence[Room], names: Sequence[str], placed: Tensor
) -> str:
    """Return who sits where, how full each device is, and what crosses."""
    used, work = problem.used(placed), share(problem.complexities) @ problem.one_hot(placed)
    wanted = share(problem.compute)
    rows = [("device", "size", "allowed", "computes", "should", "models")]
    for index, room in enumerate(rooms):
        here = (placed == index).nonzero().flatten().tolist()
        rows.append(
            (
                str(room.device),
                in_mib(float(used[index])),
                in_mib(float(problem.capacities[index])),
                percent(float(work[index])),
                percent(float(wanted[index])),
                ", ".join(names[model] for model in here) or "-",
            )
        )
    apart = placed[:, None] != placed[None, :]
    crossing = torch.where(apart, problem.connection, 0.0).sum() / problem.connection.sum()
    return f"{_columns(rows)}\n{percent(float(crossing.nan_to_num()))} of the connections cross"


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *middle, last in rows:
        padded = [cell.rjust(width) for cell, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *padded, last]))
    return "\n".join(lines)


def in_mib(mib: float) -> str:
    """Return a size in the unit that suits it."""
    value, unit = mib * 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def percent(part: float) -> str:
    """Return a part of one as whole percents; a little is not nothing."""
    return "<1%" if 0 < part < 0.005 else f"{part:.0%}"


def _in_bytes(mib: float) -> str:
    exact = f"{mib * _MIB:,.0f} bytes"
    return exact if mib * 1024 < 1 else f"{exact} ({in_mib(mib)})"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN_MODELS
    shown = ", ".join(names[:_SHOWN_MODELS])
    return f"{shown} and {more} more" if more > 0 else shown
