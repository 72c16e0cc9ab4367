"""Data sets that draw from the global random stream are the same for every command and section."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from runner_parts import assert_identical, final_weights
from torch.utils.data import random_split

from stepwrap.runner.command.cli import main

DIVIDED = '''
import json

import torch
from torch.utils.data import DataLoader, random_split

from points import Points

SIZES = {"train": 32, "val": 8, "test": 8}


def part(name, generator=None):
    """Return a part of the points, and record its indices."""
    if generator is not None:
        generator = torch.Generator().manual_seed(generator)
    parts = random_split(Points(), [*SIZES.values()], generator or torch.default_generator)
    chosen = parts[[*SIZES].index(name)]
    with open("drawn.jsonl", "a") as file:
        file.write(json.dumps([name, chosen.indices]) + "\\n")
    return chosen


def make_loader(name):
    return DataLoader(part(name), batch_size=8)
'''


def config(*, generator: int | None = None) -> str:
    options = "" if generator is None else f", generator: {generator}"
    sections = "".join(
        f"  {name}: {{dataset: {{_delete_: true, type: divided.part, name: {name}{options}}}}}\n"
        for name in ("train", "val")
    )
    return (
        f"_base_: points.yaml\nimports: [points.py, divided.py]\ndata:\n{sections}"
        "  test: {_delete_: true, type: divided.make_loader, name: test}\n"
    )


def take_drawn() -> dict[str, list[int]]:
    """Return the indices of the parts that the commands since the last call have drawn."""
    drawn: dict[str, list[int]] = {}
    for name, indices in map(json.loads, Path("drawn.jsonl").read_text().splitlines()):
        assert drawn.setdefault(name, indices) == indices
    Path("drawn.jsonl").unlink()
    return drawn


def test_every_command_and_section_draws_the_same(run: Path) -> None:
    (run / "divided.py").write_text(DIVIDED)
    (run / "divided.yaml").write_text(config())
    (run / "by_hand.yaml").write_text(config(generator=3))
    torch.manual_seed(3)
    expected = [part.indices for part in random_split(range(48), [32, 8, 8])]
    assert main(["train", "divided.yaml", "train.max_epochs=1"]) == 0
    trained = take_drawn()
    assert [trained["train"], trained["val"], trained["test"]] == expected
    for command, name in (("test", "test"), ("validate", "val")):
        assert main([command, "divided.yaml"]) == 0
        assert take_drawn() == {name: trained[name]}
    # Neither the initial weights nor the training notices that data was drawn.
    assert main(["train", "by_hand.yaml", "train.max_epochs=1"]) == 0
    assert_identical(final_weights(run / "runs/divided"), final_weights(run / "runs/by_hand"))
