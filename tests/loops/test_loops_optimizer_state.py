"""A resumed run continues with exactly the state that the optimizer had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

from stepwrap.loops import CheckpointError, LoopState, load_checkpoint, save_checkpoint
from stepwrap.loops.checkpoints.weights import get_weights
from stepwrap.wrappers import (
    OptimWrapper,
    SingleDevice,
    StepFullyShardedDataParallel,
    SupervisedModel,
)


class FullPrecision(torch.optim.Optimizer):
    """SGD that keeps a copy of the weights in float32, and a count of steps in each state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["weights"] = param.float()
                    state["bits"] = torch.zeros_like(param, dtype=torch.uint8)
                state["weights"].sub_(param.grad.float(), alpha=group["lr"])
                state["bits"] += 1
                param.copy_(state["weights"])


def make_state(kind: str, dtype: torch.dtype, wrap: type[Any] = SingleDevice) -> LoopState:
    torch.manual_seed(0)
    model = wrap(SupervisedModel(nn.Linear(6, 6), nn.MSELoss()).to(dtype))
    make: Any = FullPrecision if kind == "FullPrecision" else getattr(torch.optim, kind)
    return LoopState(model=model, optim_wrapper=OptimWrapper(make(model.parameters(), lr=1e-2)))


def train(state: LoopState, steps: range) -> dict[str, Tensor]:
    dtype = next(state.model.parameters()).dtype
    for index in steps:
        generator = torch.Generator().manual_seed(index)
        inputs, target = (torch.randn(8, 6, generator=generator).to(dtype) for _ in "xy")
        state.model.train_step([inputs, target], state.optim_wrapper)
        state.step += 1
    return {name: value.clone() for name, value in get_weights(state.model.module).items()}


def resume(folder: Path, kind: str, dtype: torch.dtype, wrap: type[Any]) -> None:
    state = make_state(kind, dtype, wrap)
    train(state, range(5))
    path = save_checkpoint(folder, state)
    expected = train(state, range(5, 30))
    resumed = make_state(kind, dtype, wrap)
    load_checkpoint(path).restore(resumed)
    actual = train(resumed, range(5, 30))
    for name, weight in expected.items():
        difference = (actual[name] - weight).abs().max()
        if hasattr(difference, "full_tensor"):
            difference = difference.full_tensor()
        assert difference == 0, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "kind", ["NAdam", "ASGD", "RAdam", "Adafactor", "Adamax", "Rprop", "FullPrecision"]
)
def test_state_keeps_its_type(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    resume(tmp_path, kind, dtype, SingleDevice)


@pytest.mark.parametrize("kind", ["NAdam", "FullPrecision"])
def test_state_of_sharded_weights_keeps_its_type(tmp_path: Path, kind: str) -> None:
    run_ranks(resume, 2, tmp_path, kind, torch.bfloat16, StepFullyShardedDataParallel)


def test_state_in_the_type_of_the_weights_follows_them(tmp_path: Path) -> None:
    """A run in float32 that is resumed in bfloat16 has moments in bfloat16."""
    state = make_state("AdamW", torch.float32)
    train(state, range(3))
    resumed = make_state("AdamW", torch.bfloat16)
    load_checkpoint(save_checkpoint(tmp_path, state)).restore(resumed)
    train(resumed, range(3, 5))
    moments = [values["exp_avg"] for values in resumed.optim_wrapper.optimizer.state.values()]
    assert {moment.dtype for moment in moments} == {torch.bfloat16}


def test_a_group_that_the_run_lacks_is_an_error(tmp_path: Path) -> None:
    """A hook adds the group in the middle of the run, and has not added it to the resumed one."""

    def make(has_bias: bool) -> LoopState:
        torch.manual_seed(0)
        model = SingleDevice(SupervisedModel(nn.Linear(6, 6), nn.MSELoss()))
        net = model.module.net
        optimizer = torch.optim.SGD([net.weight], lr=0.1, momentum=0.9)
        if has_bias:
            optimizer.add_param_group({"params": [net.bias]})
        return LoopState(model=model, optim_wrapper=OptimWrapper(optimizer))

    state = make(True)
    train(state, range(2))
    path = save_checkpoint(tmp_path, state)
    with pytest.raises((CheckpointError, ValueError), match="bias") as error:
        load_checkpoint(path).restore(make(False))
    assert "on_run_start" in str(error.value)
    resumed = make(True)
    load_checkpoint(path).restore(resumed)
