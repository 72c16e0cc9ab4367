"""Placements shown: the table, the picture, and why nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .devices import Room
from .search import Found, Problem, beyond, share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MIB = 1024**2
_SHOWN_MODELS = 6
_CROSSES, _STAYS, _MODEL, _FRAME = "#d1495b", "#9aa5b1", "#cfe3f5", "#5b6b7b"
_WIDTH, _GAP = 2.3, 1.1
_LINES = 120
_LABEL = 14


def does_not_fit(
    problem: Problem,
    rooms: Sequence[Room],
    units: Sequence[str],
    found: Found,
    max_mem_ratio: float,
) -> str:
    """Return how much each device lacks in `found`, the placement that lacks least."""
    lines = [_headline(problem, units, certain=found.certain), "What comes nearest:"]
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


def _headline(problem: Problem, units: Sequence[str], *, certain: bool) -> str:
    sizes, capacities = problem.sizes, problem.capacities
    total, allowed = _in_bytes(float(sizes.sum())), _in_bytes(float(capacities.sum()))
    largest = int(sizes.argmax())
    if beyond(sizes.sum(), capacities.sum()) > 0:
        how = f"{total}, but only have {allowed} allowed memory in total"
    elif sizes[largest] > capacities.max():
        size = _in_bytes(float(sizes[largest]))
        how = f"{size} for {units[largest]} alone, more than any device allows"
    else:
        verdict = "no placement fits" if certain else "no placement was found that fits"
        how = f"{total} of {allowed} allowed memory in total, but {verdict} on the single devices"
    return f"Estimated model will use {how}."


def placement_table(
    problem: Problem, rooms: Sequence[Room], names: Sequence[str], placed: Tensor
) -> str:
    """Return who sits where, how full each device is, and what crosses."""
    used, work = problem.used(placed), share(problem.complexities) @ problem.one_hot(placed)
    wanted = share(problem.compute)
    rows: list[Sequence[str]] = [("device", "size", "allowed", "computes", "should", "models")]
    for index, room in enumerate(rooms):
        here = (placed == index).nonzero().flatten().tolist()
        sizes = [_in_mib(float(mib[index])) for mib in (used, problem.capacities)]
        parts = [_percent(float(part[index])) for part in (work, wanted)]
        models = ", ".join(names[model] for model in here) or "-"
        rows.append((str(room.device), *sizes, *parts, models))
    apart = placed[:, None] != placed[None, :]
    crossing = torch.where(apart, problem.connection, 0.0).sum() / problem.connection.sum()
    return f"{_columns(rows)}\n{_percent(float(crossing.nan_to_num()))} of the connections cross"


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *middle, last in rows:
        padded = [cell.rjust(width) for cell, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *padded, last]))
    return "\n".join(lines)


def _in_mib(mib: float) -> str:
    """Return a size in the unit that suits it."""
    value, unit = mib * 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def _percent(part: float) -> str:
    """Return a part of one as whole percents; a little is not nothing."""
    return "<1%" if 0 < part < 0.005 else f"{part:.0%}"


def _in_bytes(mib: float) -> str:
    exact = f"{mib * _MIB:,.0f} bytes"
    return exact if mib * 1024 < 1 else f"{exact} ({_in_mib(mib)})"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN_MODELS
    shown = ", ".join(names[:_SHOWN_MODELS])
    return f"{shown} and {more} more" if more > 0 else shown


class _Box(NamedTuple):
    """Where a model is drawn."""

    left: float
    middle: float
    device: int


def draw(problem: Problem, rooms: Sequence[Room], names: Sequence[str], placed: Tensor) -> Figure:
    """Draw the models in their devices, and how much crosses from device to device."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'stepwrap[plots]'") from error
    rows = max(3, int(torch.bincount(placed).max()))
    wide, side = 1.75 * len(rooms) + 0.5, 0.45 * len(rooms) + 1.6
    figure = Figure(figsize=(wide + side, max(3.6, 0.3 * rows + 2.0)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[wide, side])
    boxes = _draw_devices(left, problem, rooms, names, placed, rows)
    _draw_connections(left, problem, boxes)
    _draw_crossing(right, problem, rooms, placed)
    return figure


def _draw_devices(
    axes: Any,
    problem: Problem,
    rooms: Sequence[Room],
    names: Sequence[str],
    placed: Tensor,
    rows: int,
) -> list[_Box]:
    """Draw each device as a column of its models; return where the models are."""
    from matplotlib.patches import FancyBboxPatch, Rectangle

    used = problem.used(placed).tolist()
    boxes: dict[int, _Box] = {}
    for index, (room, full) in enumerate(zip(rooms, used, strict=True)):
        left, allowed = index * (_WIDTH + _GAP), float(problem.capacities[index])
        frame = FancyBboxPatch((left, -rows), _WIDTH, rows + 1.9, boxstyle="round,pad=0.12")
        frame.set(fc="#f6f8fa", ec=_FRAME)
        axes.add_patch(frame)
        middle, size = left + _WIDTH / 2, f"{_in_mib(full)} of {_in_mib(allowed)}"
        axes.text(middle, 1.55, str(room.device), ha="center", va="center", weight="bold")
        axes.text(middle, 0.95, size, ha="center", va="center", size=7.5)
        part = full / allowed if allowed else 0.0
        axes.add_patch(Rectangle((left, 0.4), _WIDTH, 0.22, fc="white", ec=_FRAME, lw=0.6))
        axes.add_patch(Rectangle((left, 0.4), _WIDTH * part, 0.22, fc=_FRAME, ec="none"))
        for row, model in enumerate((placed == index).nonzero().flatten().tolist()):
            boxes[model] = box = _Box(left, -row - 0.3, index)
            shape = Rectangle((left + 0.1, box.middle - 0.3), _WIDTH - 0.2, 0.6, zorder=3)
            shape.set(fc=_MODEL, ec=_FRAME, lw=0.6)
            axes.add_patch(shape)
            name = names[model]
            short = name if len(name) <= _LABEL else f"{name[: _LABEL - 1]}…"
            label = f"{short} · {_in_mib(float(problem.sizes[model]))}"
            axes.text(middle, box.middle, label, ha="center", va="center", size=6.5, zorder=4)
    axes.set_xlim(-0.5, len(rooms) * (_WIDTH + _GAP) - _GAP + 0.5)
    axes.set_ylim(-rows - 0.3, 2.2)
    axes.set_axis_off()
    return [boxes[model] for model in range(len(names))]


def _draw_connections(axes: Any, problem: Problem, boxes: Sequence[_Box]) -> None:
    """Draw the strongest connections; those that cross between columns stand out."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import FancyArrowPatch

    both = (problem.connection + problem.connection.T).triu(1)
    pairs = sorted(both.nonzero().tolist(), key=lambda pair: -float(both[pair[0], pair[1]]))
    for first, second in pairs[:_LINES]:
        start, end = sorted((boxes[first], boxes[second]))
        strength = float(both[first, second] / both.max())
        crosses = start.device != end.device
        edge = start.left + _WIDTH - 0.1
        # A straight line behind other columns would seem to end in them.
        bend = -0.12 * (end.device - start.device - 1) if crosses else 0.5
        line = FancyArrowPatch(
            (edge, start.middle),
            (end.left + 0.1 if crosses else edge, end.middle),
            connectionstyle=f"arc3,rad={bend}",
            arrowstyle="-",
            color=_CROSSES if crosses else _STAYS,
            lw=0.5 + 2.5 * strength,
            alpha=0.75,
            zorder=2,
        )
        axes.add_patch(line)
    more = f", the strongest {_LINES} of {len(pairs)}" if len(pairs) > _LINES else ""
    axes.set_title(f"who sits where{more}", size=10)
    lines = [Line2D([], [], color=color, lw=2) for color in (_CROSSES, _STAYS)]
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0)}
    axes.legend(lines, ["crosses", "stays"], ncols=2, fontsize=8, **place)


def _draw_crossing(axes: Any, problem: Problem, rooms: Sequence[Room], placed: Tensor) -> None:
    """Draw how much of all connection strength is between each two devices."""
    where = problem.one_hot(placed)
    between = where.T @ share(problem.connection) @ where
    both = between + between.T - torch.diag(between.diagonal())
    lower = both.tril()
    apart = lower - torch.diag(lower.diagonal())
    shown = apart.masked_fill(apart == 0, torch.nan)
    axes.imshow(shown.tolist(), cmap="Reds", vmin=0, vmax=max(0.01, float(apart.max())) * 1.6)
    for row, column in lower.nonzero().tolist():
        color = _FRAME if row == column else "black"
        text = _percent(float(lower[row, column]))
        axes.text(column, row, text, ha="center", va="center", size=8, color=color)
    labels = [str(room.device) for room in rooms]
    axes.set_xticks(range(len(rooms)), labels, rotation=90, size=8)
    axes.set_yticks(range(len(rooms)), labels, size=8)
    axes.spines[:].set_visible(False)
    axes.set_title(
        f"what crosses: {_percent(float(apart.sum()))} of all connections\n"
        "(on the diagonal what stays)",
        size=10,
    )
