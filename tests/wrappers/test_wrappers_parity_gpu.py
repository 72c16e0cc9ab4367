"""Every wrapper follows plain PyTorch on one CUDA device, in a group of one rank over NCCL."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_cells import KINDS, Outcome, evaluate, run_cells, write_references
from parity_plain import Recipe

pytestmark = pytest.mark.gpu

# Pretend devices compute on the CPU, which the other tests of parity compare with all recipes.
IS_PRETEND = "PRETEND_CUDA" in os.environ
STEPS = 4 if IS_PRETEND else 10
ROWS = [kind for kind, row in KINDS.items() if 1 in row.axes]
ALL_RECIPES = [
    Recipe(model, *how, steps=STEPS)
    for model in ("transformer", "cnn")
    for how in (
        ("fp64", 3, True, "AdamW"),
        ("fp64", 1, False, "SGD"),
        ("fp32", 1, True, "AdamW"),
        ("fp32", 3, False, "SGD"),
        ("bf16", 3, True, "AdamW"),
        ("fp16", 1, True, "SGD"),
        ("fp16", 3, False, "AdamW"),
    )
]
RECIPES = ALL_RECIPES[::5] if IS_PRETEND else ALL_RECIPES


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    exact = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = exact
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parity") / "references.pt"
    write_references(path, [recipe for kind in ROWS for recipe in get_recipes(kind)], "cuda")
    return path


def get_recipes(kind: str) -> list[Recipe]:
    separate = KINDS[kind].wrapper == "separate"
    return [replace(recipe, separate=separate) for recipe in RECIPES]


def far(cells: list[Outcome]) -> list[str]:
    for cell in cells:
        print(f"{cell.kind} {cell.recipe}: {cell.parameters:.1e}, loss {cell.losses:.1e}")
    return [f"{cell.recipe}: {cell.losses:.1e}" for cell in cells if not cell.is_within]


@pytest.mark.parametrize("kind", ROWS)
def test_training_equals_plain_pytorch(kind: str, references: Path, tmp_path: Path) -> None:
    cells = run_cells(kind, get_recipes(kind), references, tmp_path, "cuda")
    assert far(cells) == []
    # The two replicas of dp are on one device; the other wrappers load its checkpoint.
    for cell in cells:
        for other in ROWS:
            recipe = cell.recipe
            (loss,) = evaluate(other, recipe.model, recipe.weights_dtype, [cell.checkpoint], "cuda")
            bound = 1e-12 if recipe.dtype == "fp64" else 2e-6
            assert abs(loss - cell.validation) <= bound * abs(cell.validation)


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
@pytest.mark.parametrize("offload", [True, {"pin_memory": False}])
def test_parameters_on_the_host(kind: str, offload: Any, references: Path) -> None:
    recipes = get_recipes(kind)
    assert far(run_cells(kind, recipes, references, device="cuda", cpu_offload=offload)) == []
