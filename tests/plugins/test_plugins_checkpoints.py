"""Lightning's strategies load checkpoints of our strategies, and the reverse."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_parts import QUIET, Automatic, Manual, join_lightning, loader, make_trainer, weights
from lightning_runs import WRAPPERS, whole_weights
from marks import slow
from ranks import run_ranks
from torch import Tensor, nn
from weights import apart

from stepwrap.plugins.lightning import StepStrategy

pytestmark = [pytest.mark.filterwarnings(ignored) for ignored in QUIET]
EPOCHS = 3


def _trained(cls: Any, strategy: Any, path: str, *, resume: str | None = None) -> Any:
    """Train for an epoch, or resume until the end; save a checkpoint; return the weights."""
    stops = 1 if resume is None else EPOCHS
    trainer = make_trainer(strategy, max_epochs=stops, limit_val_batches=0)
    trainer.fit(cls(), loader(), ckpt_path=resume)
    trainer.save_checkpoint(path)
    return whole_weights(trainer)


def _exchange(cls: type[Automatic], wrapper: str) -> dict[str, float]:
    """Save `ours.ckpt` and `theirs.ckpt`; compare resumed runs of both with a whole run."""
    join_lightning()
    _trained(cls, "ddp", "theirs.ckpt")
    trainer = make_trainer("ddp", max_epochs=EPOCHS, limit_val_batches=0)
    trainer.fit(cls(), loader())
    straight = whole_weights(trainer)
    _trained(cls, StepStrategy(wrapper), "ours.ckpt")
    ends = {
        "ours by us": _trained(cls, StepStrategy(wrapper), "last.ckpt", resume="ours.ckpt"),
        "ours by them": _trained(cls, "ddp", "last.ckpt", resume="ours.ckpt"),
        "theirs by us": _trained(cls, StepStrategy(wrapper), "last.ckpt", resume="theirs.ckpt"),
    }
    return {name: apart(end, straight) for name, end in ends.items()}


@pytest.mark.parametrize(
    ("cls", "wrapper"),
    [
        (Automatic, "ddp"),
        (Manual, "fsdp"),
        *slow((Automatic, "fsdp"), (Automatic, "separate"), (Manual, "ddp"), (Manual, "separate")),
    ],
)
def test_a_run_resumes_exactly_from_either_file(
    cls: type[Automatic], wrapper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our file can also be loaded without this package."""
    monkeypatch.chdir(tmp_path)
    exact = {"ours by us": 0, "ours by them": 0, "theirs by us": 0}
    for rank in run_ranks(_exchange, 2, cls, wrapper):
        assert rank == pytest.approx(exact, abs=1e-6)
    module = cls.load_from_checkpoint("ours.ckpt")
    theirs = torch.load("theirs.ckpt", weights_only=False)
    ours = torch.load("ours.ckpt", weights_only=False)
    assert apart(weights(module), theirs["state_dict"]) <= 1e-6
    assert list(ours) == list(theirs)
    assert all(type(value) is torch.Tensor for value in ours["state_dict"].values())
    for mine, other in zip(ours["optimizer_states"], theirs["optimizer_states"], strict=True):
        # Ours have the names of the parameters too.
        groups = [
            {k: v for k, v in group.items() if k != "param_names"} for group in mine["param_groups"]
        ]
        assert groups == other["param_groups"]
        for key, state in other["state"].items():
            assert list(mine["state"][key]) == list(state)
            for name, value in state.items():
                assert type(mine["state"][key][name]) is torch.Tensor
                torch.testing.assert_close(mine["state"][key][name], value, atol=1e-6, rtol=0)


class Ordered(Automatic):
    """A module whose layers of one size are registered in an order."""

    order = "abc"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        layers = {name: nn.Linear(64, 64) for name in "abc"}
        chain = _Chain({name: layers[name] for name in self.order})
        self.net = nn.Sequential(nn.Flatten(), chain, nn.Linear(64, 10))


class Reversed(Ordered):
    order = "cba"


class _Chain(nn.ModuleDict):
    def forward(self, inputs: Tensor) -> Tensor:
        for name in "abc":
            inputs = self[name](inputs).tanh()
        return inputs


def _reordered(wrapper: str) -> float:
    join_lightning()
    trainer = make_trainer(StepStrategy(wrapper), max_epochs=EPOCHS, limit_val_batches=0)
    trainer.fit(Ordered(), loader())
    straight = whole_weights(trainer)
    _trained(Ordered, StepStrategy(wrapper), "first.ckpt")
    end = _trained(Reversed, StepStrategy(wrapper), "last.ckpt", resume="first.ckpt")
    return apart({name: end[name] for name in straight}, straight)


@pytest.mark.parametrize("wrapper", ["ddp", *slow("fsdp")])
def test_layers_may_be_registered_in_another_order(
    wrapper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_ranks(_reordered, 2, wrapper) == pytest.approx([0, 0], abs=1e-6)


def _resume() -> dict[str, Any]:
    """Train, evaluate and train a module again by one Trainer, and load a file."""
    join_lightning()
    results = {}
    for wrapper in WRAPPERS:
        module = Automatic()
        trainer = make_trainer(StepStrategy(wrapper), limit_val_batches=0)
        trainer.fit(module, loader())
        trainer.save_checkpoint(f"again-{wrapper}.ckpt")
        after = whole_weights(trainer)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, loader())
        (tested,) = trainer.test(module, loader("test", 16), verbose=False)
        moved = apart(after, whole_weights(trainer))
        trainer.test(module, loader("test", 16), f"again-{wrapper}.ckpt", verbose=False)
        results[wrapper] = (moved, apart(after, whole_weights(trainer)), tested["test_loss"])
    return results


def test_one_trainer_fits_tests_and_loads_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for rank in run_ranks(_resume, 2):
        for moved, back, loss in rank.values():
            assert moved > 1e-3
            assert back == 0
            assert loss == pytest.approx(rank["ddp"][2], abs=1e-6)
