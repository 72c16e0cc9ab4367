"""The part of docs/parity.md on loss weights: global batches in unequal pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from parity_cells import KINDS
from parity_matrix import first_line, worst
from ranks import RanksError, run_ranks
from weighted_models import LENGTH, SAMPLES
from weighted_runs import BOUNDS, Apart, all_cells, run_weighted

Row = tuple[str, int]
_COLUMNS: list[tuple[str, str, Callable[[Apart], bool]]] = [
    ("samples fp64", "fp64", lambda one: one.cell.counted == "samples"),
    ("tokens fp64", "fp64", lambda one: one.cell.counted == "tokens"),
    ("mask, function fp64", "fp64", lambda one: one.cell.counted in ("mask", "own")),
    ("fp32", "fp32", lambda one: True),
    ("bf16", "bf16", lambda one: True),
    ("fp16", "fp16", lambda one: True),
]
_HEAD = """## Unequal pieces, weighted

With `loss_weight` ([wrappers.md](wrappers.md#loss-weights)), against whole batches by hand. Each of
{updates} updates has {samples} sequences of {length} places, half of which have no label, and some
sequences none at all. They are cut at random into unequal pieces: as many as there are ranks with
data of their own, times micro-batches (1 or 3). With and without clipping; SGD with momentum. The
figures are the largest differences of a weight or of an update's loss, averaged by weight. Bounds:
{fp64} in fp64, {fp32} in fp32, and {bf16} under autocast, which is compared with fp32 by hand. Of
{cells} cells, {within} are within the bounds.
"""


def run_rows(rows: Iterable[Row], failures: list[str]) -> dict[Row, list[Apart]]:
    """Run all weighted cells of the rows; the worst rank counts, what fails is told."""
    found: dict[Row, list[Apart]] = {}
    for kind, world in rows:
        try:
            by_rank = run_ranks(run_weighted, world, kind, all_cells(), timeout_s=600)
        except RanksError as error:
            failures.append(f"weighted, {kind}, {world} ranks: {first_line(error)}")
            continue
        found[kind, world] = cells = [
            replace(
                same[0],
                weights=worst(one.weights for one in same),
                losses=worst(one.losses for one in same),
            )
            for same in zip(*by_rank, strict=True)
        ]
        told = worst(one.weights for one in cells if one.cell.dtype == "fp64")
        print(f"{kind:15} {world} weighted fp64 {told:.1e}", flush=True)
    return found


def section(found: dict[Row, list[Apart]]) -> str:
    """Return the part of the page."""
    cells = [one for row in found.values() for one in row]
    head = _HEAD.format(
        updates=max((one.cell.updates for one in cells), default=0),
        samples=SAMPLES,
        length=LENGTH,
        cells=len(cells),
        within=sum(one.is_within for one in cells),
        **{dtype: f"{bound:.0e}" for dtype, bound in BOUNDS.items()},
    )
    lines = [
        "| Wrapper | Ranks | " + " | ".join(title for title, _, _ in _COLUMNS) + " |",
        "|---|---|" + "---|" * len(_COLUMNS),
    ]
    for kind, row in KINDS.items():
        for world in row.axes:
            if mine := found.get((kind, world)):
                figures = " | ".join(_figure(mine, *column[1:]) for column in _COLUMNS)
                lines.append(f"| {kind} | {world} | {figures} |")
    return "\n".join([head, *lines])


def broken(found: dict[Row, list[Apart]]) -> list[str]:
    """Say which cells broke their bounds, and by what."""
    return [
        f"{kind}, {world} ranks, {one.cell}: {one.weights:.1e}, loss {one.losses:.1e}"
        for (kind, world), cells in found.items()
        for one in cells
        if not one.is_within
    ]


def _figure(cells: Iterable[Apart], dtype: str, belongs: Callable[[Apart], bool]) -> str:
    mine = [one for one in cells if one.cell.dtype == dtype and belongs(one)]
    value = worst(max(one.weights, one.losses) for one in mine)
    return f"{value:.1e}" if value <= BOUNDS[dtype] else f"**{value:.1e}**"
