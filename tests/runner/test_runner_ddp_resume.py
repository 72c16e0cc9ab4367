"""Runs under the distributed wrappers, stopped and gone on with, and loaded elsewhere."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from test_runner_ddp_options import HERE, SAMPLES, flat, settings
from torch import Tensor

from stepwrap.loops import Hook, LoopState
from stepwrap.registry import HOOKS
from stepwrap.runner import Runner


@HOOKS.register_module()
class StopAt(Hook):
    """Asks for an end after an update, whoever makes it."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_update(self, state: LoopState) -> None:
        if state.step == self.step:
            state.request_stop("enough")


def train(config: dict[str, Any], folder: Path, stop: int = 0) -> tuple[Tensor, int]:
    hooks = {**config["hooks"]}
    if stop:
        hooks["stop"] = {"type": "test_runner_ddp_resume.StopAt", "step": stop}
    runner = Runner.from_config({**config, "hooks": hooks, "run_dir": str(folder)})
    state = runner.train(resume=True)
    return flat(runner.state.model), state.step


PAIR = {"type": f"{HERE}.Pair"}
TWO = {
    "first": {"type": "SGD", "lr": 0.5, "momentum": 0.9, "params": ["first.*"]},
    "second": {"type": "Adam", "lr": 0.01, "params": ["second.*"]},
}
SCHEDULES = [
    {"type": "ExponentialLR", "gamma": 0.9, "by": "step", "optimizer": name} for name in TWO
]
SEPARATE: dict[str, Any] = {"model": PAIR, "optimizer": TWO, "schedulers": SCHEDULES}
UNEVEN: dict[str, Any] = {
    "schedulers": {"type": "ExponentialLR", "gamma": 0.9, "by": "step"},
    "data": {
        "train": {
            "dataset": {"type": f"{HERE}.Points", "samples": SAMPLES + 1},
            "batch_size": 3,
            "shuffle": True,
        }
    },
}


@pytest.mark.parametrize(
    ("wrapper", "changes", "stop"),
    [
        ({"type": "separate"}, SEPARATE, 3),
        ({"type": "separate"}, SEPARATE, 4),
        ({"type": "ddp", "uneven_inputs": True}, UNEVEN, 3),
        ({"type": "ddp", "uneven_inputs": {"divide_by_initial_world_size": False}}, UNEVEN, 5),
        ({"type": "ddp", "uneven_inputs": True}, UNEVEN, 8),
        ({"type": "ddp", "comm_hook": "bf16_compress"}, {}, 3),
    ],
)
def test_resume(
    wrapper: dict[str, Any], changes: dict[str, Any], stop: int, tmp_path: Path
) -> None:
    config = settings(wrapper, **changes)
    whole = run_ranks(train, 2, config, tmp_path / "whole")
    assert [step for _, step in run_ranks(train, 2, config, tmp_path / "run", stop)] == [stop] * 2
    for (weights, step), (expected, last) in zip(
        run_ranks(train, 2, config, tmp_path / "run"), whole, strict=True
    ):
        assert step == last
        assert torch.equal(weights, expected)


def test_separate_goes_on_in_one_process(tmp_path: Path) -> None:
    """The same names, whatever the wrapper: twice the batch is what two ranks saw."""
    config = settings({"type": "separate"}, **SEPARATE)
    expected = run_ranks(train, 2, config, tmp_path / "whole")[0][0]
    run_ranks(train, 2, config, tmp_path / "run", 4)
    config["data"]["train"]["batch_size"] *= 2
    alone = {**config, "wrapper": {"type": "single"}}
    ((weights, _),) = run_ranks(train, 1, alone, tmp_path / "run", init=False)
    assert (weights - expected).abs().max().item() <= 1e-12
