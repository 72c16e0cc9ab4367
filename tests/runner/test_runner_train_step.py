"""A plain function as the training step, in Python and in configs."""

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from marks import slow
from parallel_runs import settings, trained
from ranks import run_ranks
from torch import Tensor, nn
from weights import apart

from stepwrap.loops import EpochTrainLoop, LoopState, load_checkpoint, save_checkpoint
from stepwrap.registry import ConfigError, config_from_dict
from stepwrap.runner import Runner
from stepwrap.runner.command.cli import main
from stepwrap.wrappers import (
    OptimWrapper,
    SingleDevice,
    StepDistributedDataParallel,
    SupervisedModel,
    with_train_step,
    wrap_model,
)

PAGE = (Path(__file__).parents[2] / "docs/custom_steps.md").read_text()
HERE = "test_runner_train_step"


def doubled(wrapper: Any, data: Any, optim_wrapper: Any, factor: float = 2.0) -> dict[str, Any]:
    """The usual step with a scaled loss; the logged loss keeps its graph."""
    with optim_wrapper.optim_context(wrapper):
        losses = wrapper(*data, mode="loss")
    optim_wrapper.update_params(factor * losses["loss"])
    return {"loss": losses["loss"], "factor": factor}


def batches() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [[torch.randn(4, 3, generator=generator), torch.tensor([0, 1, 1, 0])] for _ in range(3)]


def model() -> SupervisedModel:
    torch.manual_seed(0)
    return SupervisedModel(nn.Linear(3, 2), nn.CrossEntropyLoss())


def bare_step(wrapper: Any, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
    """A step that uses only `update_params` of the optimizer wrapper."""
    loss = wrapper(*data, mode="loss")["loss"]
    optim_wrapper.update_params(loss)
    return {"loss": loss}


def test_an_invalid_step_is_an_error() -> None:
    for wrong, message in (
        (SingleDevice, "must be a function"),
        (lambda wrapper, data: {}, "must take"),
        (3, "got 3"),
    ):
        with pytest.raises(TypeError, match=message):
            wrap_model(None, model(), train_step=wrong)
    with pytest.raises(TypeError, match="no train_step: give|already wrapped"):
        Runner(SingleDevice(model()), train_step=doubled)
    with pytest.raises(TypeError, match="class of a model wrapper"):
        with_train_step(nn.Linear, doubled)
    silent: Any = with_train_step(SingleDevice, lambda wrapper, data, optim_wrapper: None)(model())
    with pytest.raises(TypeError, match="return a dict .*got NoneType"):
        silent.train_step(batches()[0], None)


def test_logs_keep_no_graph() -> None:
    wrapper: Any = with_train_step(SingleDevice, doubled)(model())
    optim = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.1))
    assert not wrapper.train_step(batches()[0], optim)["loss"].requires_grad


STEP = {"type": f"{HERE}.doubled", "factor": 3.0}


def tripled(wrapper: Any, data: Any, optim_wrapper: Any) -> dict[str, Any]:
    return doubled(wrapper, data, optim_wrapper, factor=3.0)


def expected() -> dict[str, Tensor]:
    """Return the same weights from SGD with three times the rate."""
    return trained(settings(optimizer={"type": "SGD", "lr": 0.3}))


@pytest.mark.parametrize("wrapper", [None, "single", "dp", "ddp", "separate", "auto"])
def test_a_function_in_a_config_of_one_process(wrapper: str | None) -> None:
    chosen = None if wrapper is None else {"type": wrapper}
    config = settings(optimizer={"type": "SGD", "lr": 0.1}, wrapper=chosen, train_step=STEP)
    runner = Runner.from_config(config)
    runner.train()
    weights = {k: v.detach() for k, v in runner.state.model.module.named_parameters()}
    assert apart(weights, expected()) <= 1e-12


@pytest.mark.parametrize(
    ("wrapper", "step"),
    [
        ("ddp", STEP),
        ("fsdp", f"{HERE}.tripled"),
        *slow(
            ("auto", STEP), ("ddp", f"{HERE}.tripled"), ("fsdp", STEP), ("auto", f"{HERE}.tripled")
        ),
    ],
)
def test_a_function_in_a_config_of_two_ranks(wrapper: str, step: Any) -> None:
    chosen = {"type": wrapper}
    config = settings(2, optimizer={"type": "SGD", "lr": 0.1}, wrapper=chosen, train_step=step)
    for weights in run_ranks(trained, 2, config):
        assert apart(weights, expected()) <= 1e-12


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (f"{HERE}.dubled", "did you mean doubled"),
        ({"type": f"{HERE}.doubled", "factr": 1}, "unexpected keyword argument 'factr'"),
        (f"{HERE}.model", "is called with"),
        (f"{HERE}.SingleDevice", "is not a function"),
        ({"factor": 2.0}, "must be the import path of a function"),
        (["a"], "must be a section of settings or text"),
    ],
)
def test_mistakes_in_a_config(step: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        Runner.from_config(config_from_dict(settings(train_step=step)))
    assert {problem.key for problem in caught.value.problems} == {"train_step"}


class Carrying(SingleDevice):
    count = 0

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        self.count += 1
        return super().train_step(data, optim_wrapper)

    def step_state(self) -> dict[str, Any]:
        return {"count": self.count} if self.count else {}

    def load_step_state(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class CarryingDDP(StepDistributedDataParallel):
    train_step = Carrying.train_step
    count = 0
    step_state = Carrying.step_state
    load_step_state = Carrying.load_step_state


def carried(folder: Path, start: int, restore: bool) -> int:
    """Save or restore the state of this rank's step; return its count."""
    kind: Any = CarryingDDP if torch.distributed.is_initialized() else Carrying
    state = LoopState(kind(model()))
    if restore:
        load_checkpoint(folder / "step_00000000").restore(state)
    else:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        state.model.count = start + rank
        save_checkpoint(folder, state)
    return int(state.model.count)


def test_each_rank_gets_its_own_state_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run_ranks(carried, 2, tmp_path, 5, restore=False) == [5, 6]
    assert run_ranks(carried, 2, tmp_path, 5, restore=True) == [5, 6]
    with caplog.at_level(logging.WARNING):
        assert carried(tmp_path, 5, restore=True) == 0
    assert "starts with its initial state" in caplog.text


def test_the_page_is_true(tmp_path: Path) -> None:
    """Its functions and classes run, and its settings exist."""
    names: dict[str, Any] = {"with_train_step": with_train_step}
    names["StepDistributedDataParallel"] = SingleDevice
    codes = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    plain = codes[0].replace("import StepDistributedDataParallel, ", "import SingleDevice, ")
    plain = plain.replace("Careful(StepDistributedDataParallel)", "Careful(SingleDevice)")
    exec(plain.replace("register_module()", "register_module(force=True)"), names)
    exec(codes[1], names)
    names["model"] = bare = model()
    names |= {"Runner": Runner, "EpochTrainLoop": EpochTrainLoop, "loader": batches()}
    names["optim"] = OptimWrapper(torch.optim.SGD(bare.parameters(), lr=0.1))
    exec(codes[2].split("wrapper = ")[0], names)
    assert names["runner"].train().step == 9
    exec(codes[3], names)
    searching = type("Searching", (SingleDevice,), {"train_step": names["train_step"]})(model())
    optim = OptimWrapper(torch.optim.LBFGS(searching.parameters()))
    losses = [searching.train_step(batches()[0], optim)["loss"].item() for _ in range(2)]
    assert losses[1] < losses[0]
    careful = names["Careful"](model())
    optim = OptimWrapper(torch.optim.SGD(careful.parameters(), lr=0.1))
    assert set(careful.train_step(batches()[0], optim)) == {"loss"}
    for text in re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL):
        assert isinstance(yaml.safe_load(text), dict)


def test_a_function_goes_before_the_step_of_the_model() -> None:
    class Own(SupervisedModel):
        def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
            return {}

    wrapper: Any = wrap_model(
        None, Own(nn.Linear(3, 2), nn.CrossEntropyLoss()), train_step=bare_step
    )
    optim = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.1))
    assert "loss" in wrapper.train_step(batches()[0], optim)


class GanOfOwn(nn.Module):
    """A model with its own training step, whose forward takes neither ``mode`` nor a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, noise: Tensor) -> Tensor:
        return self.layer(noise)

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        with optim_wrapper.optim_context(self):
            loss = self(torch.randn(4, 2)).mean() - data[0].mean()
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


@dataclass
class Rewards:
    """Batches that no forward takes."""

    size: int = 8

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor]:
        return (torch.ones(1),)


def test_check_asks_nothing_of_the_forward_of_a_model_with_its_own_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "model": {"type": f"{HERE}.GanOfOwn"},
        "optimizer": {"type": "SGD", "lr": 0.1},
        "data": {"train": {"dataset": {"type": f"{HERE}.Rewards"}, "batch_size": 4}},
        "train": {"type": "EpochTrainLoop", "max_epochs": 1},
        "device": "cpu",
    }
    (tmp_path / "gan.yaml").write_text(yaml.safe_dump(config))
    assert main(["check", str(tmp_path / "gan.yaml")]) == 0
    output = capsys.readouterr().out
    assert "forward: not measured" in output
    assert "mode" not in output.replace("model", "")
