"""The page on collectives names every public function, and its examples run."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torchmetrics.classification import MulticlassAccuracy

import stepwrap.collectives
import stepwrap.collectives.dist
from stepwrap.collectives import trace_collectives

PAGE = (Path(__file__).parents[2] / "docs/collectives.md").read_text()
DOORS = {"own": stepwrap.collectives, "mmengine": stepwrap.collectives.dist}


def part(door: str) -> str:
    own, _, rest = PAGE.partition("\n## mmengine's names\n")
    return own if door == "own" else rest.partition("\n## ")[0]


def entries(door: str) -> list[tuple[str, str]]:
    """Return the two lines of each function."""
    return re.findall(r"^- (`.+)\n  (.+)$", part(door), flags=re.MULTILINE)


@pytest.mark.parametrize("door", DOORS)
def test_every_public_name_has_its_two_lines(door: str) -> None:
    heads = [head.partition(": ")[0] for head, _ in entries(door)]
    named = {name for head in heads for name in re.findall(r"`(\w+)", head)}
    assert named == set(DOORS[door].__all__)


def examples(door: str) -> list[str]:
    lines = [line for _, line in entries(door)]
    return [line.strip("`") for line in lines if re.fullmatch(r"`[^`]+`", line)]


def run_examples(door: str, folder: Path) -> int:
    """Run the page's examples one after the other; returns how many they are."""
    os.chdir(folder)
    for code in examples(door):
        offered = {name: getattr(DOORS[door], name) for name in DOORS[door].__all__}
        given: dict[str, Any] = {
            "torch": torch,
            "MulticlassAccuracy": MulticlassAccuracy,
            "x": torch.ones(2, 3),
            "logs": {"loss_a": torch.tensor(1.0), "loss_b": torch.tensor(2.0)},
            "results": [1, 2, 3],
        }
        try:
            exec(code, {**offered, **given})
        except Exception as error:
            raise AssertionError(f"{code} raises {type(error).__name__}: {error}") from error
    return len(examples(door))


@pytest.mark.parametrize("door", DOORS)
def test_the_examples_run_in_one_process_and_on_two_ranks(door: str, tmp_path: Path) -> None:
    count = run_examples(door, tmp_path)
    assert count > 20
    assert run_ranks(run_examples, 2, door, tmp_path) == [count, count]


def run_the_introduction() -> dict[str, Any]:
    introduction = PAGE.partition("\n## ")[0]
    (code,) = re.findall(r"```py\n(.*?)```", introduction, flags=re.DOTALL)
    names: dict[str, Any] = {}
    try:
        exec(code, names)
    finally:
        trace_collectives(False)
    return {key: names[key] for key in ("by_rank", "means")}


def test_the_example_at_the_top_runs() -> None:
    first, second = run_ranks(run_the_introduction, 2)
    assert first == second
    assert len(first["by_rank"]) == 2
