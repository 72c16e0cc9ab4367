"""Runs with sharded checkpoints from the command line."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from runner_parts import run_command

from stepwrap.loops import find_checkpoint, load_checkpoint
from stepwrap.runner.command.cli import main

FSDP = ("wrapper={type: fsdp}",)
TENSOR = (
    "mesh={data: 1, tensor: 2}",
    "tensor_parallel={plan: {net.0: colwise, net.3: rowwise}}",
)
TRAIN = ("train", "points.yaml", "hooks.ema={decay: 0.9}")


@pytest.mark.slow
def test_a_sharded_run_is_tested_and_continued_elsewhere(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One process tests a checkpoint of two, and a run with split layers resumes from it."""
    assert run_ranks(run_command, 2, run, *TRAIN, "train.max_epochs=1", *FSDP) == [0, 0]
    (folder,) = (run / "runs").iterdir()
    path = find_checkpoint(folder)
    assert path is not None
    checkpoint = load_checkpoint(path)
    assert checkpoint.meta["format"] == 3
    weights = checkpoint.read("model")
    averages = checkpoint.read("state")["stateful"]["hooks.ema"]["model"]
    assert (
        weights.keys()
        == averages.keys()
        == {f"net.{n}.{p}" for n in (0, 3) for p in ("weight", "bias")}
    )
    assert not torch.equal(weights["net.0.weight"], averages["net.0.weight"])

    assert main(["test", *TRAIN[1:]]) == 0
    assert "accuracy" in capsys.readouterr().out

    resumed = ("train.max_epochs=2", "--resume", *TENSOR)
    assert run_ranks(run_command, 2, run, *TRAIN, *resumed) == [0, 0]
    path = find_checkpoint(folder)
    assert path is not None
    assert load_checkpoint(path).meta["epoch"] == 2
