"""Every wrapper follows plain PyTorch; `make parity` runs the whole matrix."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import nightly, slow
from parity_cells import (
    BOUNDS,
    KINDS,
    WEIGHTS,
    WORLDS,
    Outcome,
    empty,
    filled,
    load_all,
    run_row,
    write_references,
)
from parity_plain import Recipe, train_plain

STEPS = 5
ROWS = [
    ("single", 1),
    ("dp, 2 replicas", 1),
    ("ddp", 2),
    ("fsdp", 1),
    ("fsdp", 2),
    ("hsdp", 4),
    ("tp 2", 2),
    ("ddp x tp", 4),
    ("fsdp x tp", 4),
    ("separate", 2),
]
QUICK = {("single", 1), ("ddp", 2)}
# One row with sharding and one with four ranks are slow; the others run at night.
IN_CI = {("fsdp", 2), ("fsdp x tp", 4)}


def group_runs(row: tuple[str, int], quick: set[tuple[str, int]]) -> list[Any]:
    if row in quick:
        return [row]
    return slow(row) if row in IN_CI else nightly(row)


CASES = [case for row in ROWS for case in group_runs(row, QUICK)]
# Quick tests of test_wrappers_optimizer_fit.py also compare fsdp with plain PyTorch.
LOADS = [case for row in ROWS for case in group_runs(row, {*QUICK, ("fsdp", 2)})]
RECIPES = [
    Recipe(model, *how, steps=STEPS)
    for model in ("transformer", "cnn")
    for how in (
        ("fp64", 3, True, "AdamW"),
        ("fp64", 1, False, "SGD"),
        ("fp32", 1, True, "SGD"),
        ("bf16", 1, False, "AdamW"),
        ("fp16", 1, True, "SGD"),
    )
]
RECIPES += [
    Recipe(model, *how, steps=STEPS, weight=weight)
    for model, weights in WEIGHTS.items()
    for weight in weights
    for how in (
        ("fp64", 3, True, "AdamW"),
        ("fp64", 1, False, "SGD"),
        ("fp32", 3, True, "SGD"),
        ("fp16", 3, True, "SGD"),
    )
]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parity") / "references.pt"
    write_references(path, [recipe for kind, _ in ROWS for recipe in get_recipes(kind)])
    return path


@pytest.fixture(scope="module")
def saved() -> dict[str, list[Outcome]]:
    """Return the results of the cells by row, with their checkpoints."""
    return {}


def get_recipes(kind: str) -> list[Recipe]:
    separate = KINDS[kind].wrapper == "separate"
    return [replace(recipe, separate=separate) for recipe in RECIPES]


@pytest.mark.parametrize(("kind", "world"), CASES)
def test_training_equals_plain_pytorch(
    kind: str,
    world: int,
    references: Path,
    saved: dict[str, list[Outcome]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    cells = run_row(kind, world, get_recipes(kind), references, checkpoints)
    saved[f"{kind} {world}"] = cells
    far = [f"{cell.recipe}: {cell.parameters:.1e}, loss {cell.losses:.1e}" for cell in cells]
    assert [text for text, cell in zip(far, cells, strict=True) if not cell.is_within] == []


@pytest.mark.parametrize(("kind", "world"), LOADS)
def test_every_checkpoint_loads_under_every_wrapper(
    kind: str, world: int, saved: dict[str, list[Outcome]]
) -> None:
    sources = [cell for cells in saved.values() for cell in cells if cell.recipe.optimizer == "SGD"]
    if not sources:
        pytest.skip("no checkpoints: run the whole file")
    loads = load_all(kind, world, sources)
    far = [f"{load.source.kind} {load.source.recipe}: {load.difference:.1e}" for load in loads]
    assert [text for text, load in zip(far, loads, strict=True) if not load.is_within] == []


def test_bounds_detect_other_training(references: Path, tmp_path: Path) -> None:
    """A small difference in the training exceeds the bounds."""
    recipe, weighted = RECIPES[0], replace(RECIPES[0], weight="tokens")
    for expected, other in (
        (recipe, replace(recipe, clip=False)),
        (recipe, replace(recipe, accumulate=1, steps=3 * STEPS)),
        (recipe, replace(recipe, optimizer="SGD")),
        (weighted, replace(weighted, weight="samples")),
    ):
        path = tmp_path / "other.pt"
        torch.save({expected: train_plain(other)}, path)
        (cell,) = run_row("single", 1, [expected], path)
        assert not cell.is_within
        assert cell.parameters > 1e3 * BOUNDS["fp64"]


def test_every_cell_is_filled_or_has_a_reason() -> None:
    cells = [*filled(), *((kind, world) for kind, world, reason in empty() if reason)]
    assert sorted(cells) == sorted((kind, world) for kind in KINDS for world in WORLDS)
