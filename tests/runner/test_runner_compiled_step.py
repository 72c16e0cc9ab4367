"""`compile: step` in a config gives the same run, also after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from stepwrap.configs.digits import SmallCNN
from stepwrap.loops import find_checkpoint, load_checkpoint
from stepwrap.runner.command.cli import main
from stepwrap.wrappers import SupervisedModel

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).parents[2] / "configs/digits_single.yaml"


def get_weights(run_dir: Path, *changes: str) -> dict[str, torch.Tensor]:
    settings = ["hooks.progress=false", f"run_dir={run_dir}", "model.net.width=8", *changes]
    assert main(["train", str(CONFIG), *settings]) == 0
    path = find_checkpoint(run_dir)
    assert path is not None
    model = SupervisedModel(SmallCNN(width=8), nn.CrossEntropyLoss())
    load_checkpoint(path).load_model(model)
    return model.state_dict()


def test_a_resumed_run_continues_with_the_same_numbers(tmp_path: Path) -> None:
    step = "compile={step: true, min_steps: 0}"
    usual = get_weights(tmp_path / "usual", "train.max_epochs=1")
    compiled = get_weights(tmp_path / "parts", step, "train.max_epochs=1")
    # After more steps, a rounding error may have changed the maximum of a pooling window.
    for name, value in usual.items():
        torch.testing.assert_close(compiled[name], value, rtol=0, atol=1e-6)
    assert any(not torch.equal(value, compiled[name]) for name, value in usual.items())
    resumed = get_weights(tmp_path / "parts", step, "train.max_epochs=2", "resume=true")
    uninterrupted = get_weights(tmp_path / "whole", step, "train.max_epochs=2")
    for name, value in uninterrupted.items():
        assert torch.equal(resumed[name], value), name
