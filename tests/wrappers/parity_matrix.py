"""Runs cells of the parity matrix on the warm ranks, and checks them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from parity_cells import KINDS, Outcome, run_cells
from parity_plain import Recipe, train_plain
from ranks import RanksError, run_ranks


def write_references(path: Path, recipes: Iterable[Recipe], device: str = "cpu") -> None:
    """Train what plain PyTorch trains, once for all rows, and write it for the ranks."""
    torch.save({one: train_plain(one, device) for one in dict.fromkeys(recipes)}, path)


def run_row(
    kind: str,
    world: int,
    recipes: list[Recipe],
    references: Path,
    checkpoints: Path | None = None,
    timeout_s: float = 300.0,
) -> list[Outcome]:
    """Run the cells of a row at a number of ranks; the worst rank counts.

    Raises:
        RanksError: a rank failed.
    """
    by_rank = run_ranks(
        run_cells, world, kind, recipes, references, checkpoints, timeout_s=timeout_s
    )
    return [
        replace(cells[0], parameters=worst(one.parameters for one in cells))
        for cells in zip(*by_rank, strict=True)
    ]


def worst(differences: Iterable[float]) -> float:
    """Largest of some differences; a NaN is the largest of all."""
    return max((math.inf if math.isnan(one) else one for one in differences), default=0.0)


def filled() -> Iterator[tuple[str, int]]:
    """Rows and numbers of ranks that can be."""
    for kind, row in KINDS.items():
        for world in row.axes:
            yield kind, world


def empty() -> Iterator[tuple[str, int, str]]:
    """Rows and numbers of ranks that cannot be, and why."""
    for kind, row in KINDS.items():
        for world, reason in row.why_not.items():
            yield kind, world, reason


def first_line(error: RanksError) -> str:
    """What went wrong, in a line."""
    text = next(iter(error.reports.values())).rstrip()
    return text.splitlines()[-1]
