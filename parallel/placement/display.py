"""Placements as a table and as a figure, and the error text if no placement fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .devices import Room
from .search import Found, Problem, excess, share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MIB = 1024**2
_SHOWN_MODELS = 6
_FRAME = "#5b6b7b"
_LABEL = 14


def does_not_fit(
    problem: Problem,
    rooms: Sequence[Room],
    units: Sequence[str],
    solution: Found,
    max_mem_ratio: float,
) -> str:
    """Return the error text with the memory that each device lacks in the closest placement."""
    lines = [_headline(problem, units, certain=solution.certain), "The closest placement:"]
    assignment = solution.assignment
    used = problem.used(assignment)
    over = excess(used, problem.capacities).tolist()
    for index, room in enumerate(rooms):
        placed_units = [units[unit] for unit in (assignment == index).nonzero().flatten().tolist()]
        lines.append(
            f"  {room.device}: needed {_format_bytes(float(used[index]))}, allowed "
            f"{_format_bytes(float(problem.capacities[index]))} = {max_mem_ratio:g} of "
            f"{_format_bytes(room.free_mib)} free"
            + (f", lacking {_format_bytes(over[index])}" if over[index] else "")
            + (f" ({_listed(placed_units)})" if placed_units else "")
        )
    lines.append(
        "Add devices (the CPU is one), raise max_mem_ratio, or lower model_size_multiplier (1 for "
        "models that are not trained)."
    )
    return "\n".join(lines)


def _headline(problem: Problem, units: Sequence[str], *, certain: bool) -> str:
    sizes, capacities = problem.sizes, problem.capacities
    total, allowed = _format_bytes(float(sizes.sum())), _format_bytes(float(capacities.sum()))
    largest = int(sizes.argmax())
    if excess(sizes.sum(), capacities.sum()) > 0:
        # machin documents this text.
        how = f"{total}, but only have {allowed} allowed memory in total"
    elif sizes[largest] > capacities.max():
        size = _format_bytes(float(sizes[largest]))
        how = f"{size} for {units[largest]} alone, more than any device allows"
    else:
        verdict = "no placement fits" if certain else "no placement was found that fits"
        how = f"{total} of {allowed} allowed memory in total, but {verdict} every device"
    return f"Estimated model will use {how}."


def placement_table(
    problem: Problem, rooms: Sequence[Room], names: Sequence[str], placed: Tensor
) -> str:
    """Return a table of the devices with their models, sizes and shares of the work."""
    used, work = problem.used(placed), share(problem.complexities) @ problem.one_hot(placed)
    target = share(problem.compute)
    rows: list[Sequence[str]] = [("device", "size", "allowed", "computes", "target", "models")]
    for index, room in enumerate(rooms):
        placed_models = (placed == index).nonzero().flatten().tolist()
        sizes = [_format_quantity(float(mib[index])) for mib in (used, problem.capacities)]
        shares = [_percent(float(device_share[index])) for device_share in (work, target)]
        models = ", ".join(names[model] for model in placed_models) or "-"
        rows.append((str(room.device), *sizes, *shares, models))
    apart = placed[:, None] != placed[None, :]
    crossing = torch.where(apart, problem.connection, 0.0).sum() / problem.connection.sum()
    return f"{_columns(rows)}\n{_percent(float(crossing.nan_to_num()))} of the connections cross"


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for label, *middle, models in rows:
        padded = [cell.rjust(width) for cell, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join([label.ljust(widths[0]), *padded, models]))
    return "\n".join(lines)


def _format_quantity(mib: float) -> str:
    """Return a size with a suitable unit."""
    value, unit = mib * 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def _percent(fraction: float) -> str:
    """Return a fraction as whole percents; small values other than 0 are "<1%"."""
    return "<1%" if 0 < fraction < 0.005 else f"{fraction:.0%}"


def _format_bytes(mib: float) -> str:
    exact = f"{mib * _MIB:,.0f} bytes"
    return exact if mib * 1024 < 1 else f"{exact} ({_format_quantity(mib)})"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN_MODELS
    shown = ", ".join(names[:_SHOWN_MODELS])
    return f"{shown} and {more} more" if more > 0 else shown


def draw(problem: Problem, rooms: Sequence[Room], names: Sequence[str], placed: Tensor) -> Figure:
    """Draw a matrix of the connections between all models, which are sorted by device.

    Each device is a frame on the diagonal. Connections outside of the frames cross devices.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'stepwrap[plots]'") from error
    order = placed.argsort(stable=True)
    both = share(problem.connection + problem.connection.T)[order][:, order]
    apart = placed[order][:, None] != placed[order]
    side = 0.3 * len(names) + 2.0
    figure = Figure(figsize=(side + 2.5, side), layout="constrained")
    axes = figure.subplots()
    top = float(both.fill_diagonal_(0.0).max()) or 1.0
    for chosen, colors in ((apart, "Reds"), (~apart, "Greys")):
        shown = both.masked_fill(~chosen | (both == 0), torch.nan)
        # vmin is negative so that weak connections are visible too.
        axes.imshow(shown.tolist(), cmap=colors, vmin=-top / 3, vmax=top)
    sizes = [
        f"{_short(names[model])} · {_format_quantity(float(problem.sizes[model]))}"
        for model in order
    ]
    axes.set_yticks(range(len(names)), sizes, size=8)
    axes.set_xticks(
        range(len(names)), [_short(names[model]) for model in order], rotation=90, size=8
    )
    counts = torch.bincount(placed, minlength=len(rooms)).tolist()
    # Devices without models may have the same position as another one.
    labels: dict[float, list[str]] = {}
    for index, (room, used) in enumerate(zip(rooms, problem.used(placed).tolist(), strict=True)):
        start, count = sum(counts[:index]) - 0.5, counts[index]
        axes.add_patch(Rectangle((start, start), count, count, fill=False, ec=_FRAME, lw=1.5))
        size = f"{_format_quantity(used)} of {_format_quantity(float(problem.capacities[index]))}"
        labels.setdefault(start + count / 2, []).append(f"{room.device}: {size}")
    axes.secondary_yaxis("right").set_yticks(list(labels), map("\n".join, labels.values()), size=8)
    crossing = _percent(float(both[apart].sum()))
    axes.set_title(f"placement: {crossing} of all connections cross (red)", size=10)
    return figure


def _short(name: str) -> str:
    return name if len(name) <= _LABEL else f"{name[: _LABEL - 1]}…"
