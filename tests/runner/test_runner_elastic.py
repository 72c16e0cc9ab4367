"""Loss weights in configs: resumes on other numbers of ranks, uneven data, validations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from test_runner_ddp_options import EPOCHS, Net, Points, flat, settings
from test_runner_ddp_resume import train
from torch import nn
from torch.utils.data import TensorDataset

from stepwrap.runner import Runner
from stepwrap.runner.parts import build_parts
from stepwrap.runner.sections import read_sections

# 25 samples in updates of 12 leave one sample for the last update.
SAMPLES, SIZE = 25, 12
WEIGHTED = {"type": "OptimWrapper", "accumulative_counts": 2, "loss_weight": "samples"}


def _settings(wrapper: dict[str, Any], **changes: Any) -> dict[str, Any]:
    config = settings(wrapper, **{"optim_wrapper": WEIGHTED, **changes})
    config["data"]["train"]["dataset"]["samples"] = SAMPLES
    return config


def _plain() -> torch.Tensor:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    for _ in range(EPOCHS):
        for start in range(0, SAMPLES, SIZE):
            inputs, target = Points(SAMPLES)[start : start + SIZE]
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs), target).backward()
            optimizer.step()
    return flat(net)


def test_uneven_inputs_accumulate_with_weights(tmp_path: Path) -> None:
    config = _settings({"type": "ddp", "uneven_inputs": True})
    for weights, step in run_ranks(train, 2, config, tmp_path):
        assert (weights - _plain()).abs().max().item() <= 1e-12
        assert step == EPOCHS * 3


def test_a_run_resumes_on_more_ranks(tmp_path: Path) -> None:
    """Like `stepwrap train --nproc 2` and then `--nproc 3 --resume`."""
    config = _settings({"type": "ddp"})
    assert [step for _, step in run_ranks(train, 2, config, tmp_path, 1)] == [1, 1]
    for weights, step in run_ranks(train, 3, config, tmp_path):
        assert (weights - _plain()).abs().max().item() <= 1e-12
        assert step == EPOCHS * 3


class Masked(TensorDataset):
    """Data in which the first half of the targets is ignored."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        inputs = torch.randn(10, 4, generator=generator, dtype=torch.float64)
        target = (inputs.sum(1) > 0).long()
        target[:5] = -100
        super().__init__(inputs, target)


def test_a_separate_validation_uses_the_same_weights(tmp_path: Path) -> None:
    config = _settings({"type": "single"}, run_dir=str(tmp_path), launch={})
    config["optim_wrapper"] = {**WEIGHTED, "loss_weight": "tokens"}
    config["metrics"] = {"loss": {"type": "MeanLoss"}}
    config["data"]["val"] = {
        "dataset": {"type": "test_runner_elastic.Masked"},
        "batch_size": 4,
    }
    runner = Runner.from_config(config)
    state = runner.train()
    inputs, target = Masked()[:]
    with torch.no_grad():
        expected = nn.functional.cross_entropy(state.model.module.net(inputs), target).item()
    assert state.metrics["loss"] == pytest.approx(expected, abs=1e-12)
    alone = Runner.from_parts(build_parts(read_sections(config), {"val"}))
    assert alone.state.optim_wrapper is None
    assert alone.validate("latest") == pytest.approx({"loss": expected}, abs=1e-12)
