"""Checkpoints of our strategies are Lightning's own, and the reverse."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_parts import (
    QUIET,
    Automatic,
    Manual,
    distance,
    join_lightning,
    loader,
    make_trainer,
    weights,
)
from lightning_runs import WRAPPERS, whole_weights
from ranks import run_ranks

from stepwrap.plugins.lightning import StepStrategy

pytestmark = [pytest.mark.filterwarnings(one) for one in QUIET]
EPOCHS = 3


def _trained(cls: Any, strategy: Any, path: str, *, resume: str | None = None) -> Any:
    """Train to the end, or where there is nothing to resume for an epoch; save; the weights."""
    stops = 1 if resume is None else EPOCHS
    trainer = make_trainer(strategy, max_epochs=stops, limit_val_batches=0)
    trainer.fit(cls(), loader(), ckpt_path=resume)
    trainer.save_checkpoint(path)
    return whole_weights(trainer)


def _exchange(folder: str) -> dict[str, Any]:
    join_lightning()
    found: dict[str, Any] = {}
    for cls in (Automatic, Manual):
        theirs = f"{folder}/{cls.__name__}.ckpt"
        _trained(cls, "ddp", theirs)
        trainer = make_trainer("ddp", max_epochs=EPOCHS, limit_val_batches=0)
        trainer.fit(cls(), loader())
        straight = whole_weights(trainer)
        for wrapper in WRAPPERS:
            ours, last = f"{folder}/{wrapper}-{cls.__name__}.ckpt", f"{folder}/last.ckpt"
            _trained(cls, StepStrategy(wrapper), ours)
            ends = {
                "ours by us": _trained(cls, StepStrategy(wrapper), last, resume=ours),
                "ours by them": _trained(cls, "ddp", last, resume=ours),
                "theirs by us": _trained(cls, StepStrategy(wrapper), last, resume=theirs),
            }
            distances = {name: distance(end, straight) for name, end in ends.items()}
            found[f"{wrapper}-{cls.__name__}"] = distances
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exchange")


@pytest.fixture(scope="module")
def exchanged(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(_exchange, 2, str(folder), timeout_s=120)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", ["Automatic", "Manual"])
def test_a_run_goes_on_from_either_file_as_if_uninterrupted(
    wrapper: str, kind: str, exchanged: list[dict[str, Any]]
) -> None:
    for rank in exchanged:
        assert rank[f"{wrapper}-{kind}"] == pytest.approx(
            {"ours by us": 0, "ours by them": 0, "theirs by us": 0}, abs=1e-6
        )


@pytest.mark.usefixtures("exchanged")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("cls", [Automatic, Manual])
def test_the_file_loads_without_us(wrapper: str, cls: type[Automatic], folder: Path) -> None:
    path = folder / f"{wrapper}-{cls.__name__}.ckpt"
    module = cls.load_from_checkpoint(path)
    theirs = torch.load(folder / f"{cls.__name__}.ckpt", weights_only=False)
    ours = torch.load(path, weights_only=False)
    assert distance(weights(module), theirs["state_dict"]) <= 1e-6
    assert list(ours) == list(theirs)
    assert all(type(one) is torch.Tensor for one in ours["state_dict"].values())
    for mine, other in zip(ours["optimizer_states"], theirs["optimizer_states"], strict=True):
        assert mine["param_groups"] == other["param_groups"]
        for key, state in other["state"].items():
            assert list(mine["state"][key]) == list(state)
            for name, value in state.items():
                assert type(mine["state"][key][name]) is torch.Tensor
                torch.testing.assert_close(mine["state"][key][name], value, atol=1e-6, rtol=0)


def _again() -> dict[str, Any]:
    """The same module is trained, evaluated and trained again by one Trainer, and loads a file."""
    join_lightning()
    found = {}
    for wrapper in WRAPPERS:
        module = Automatic()
        trainer = make_trainer(StepStrategy(wrapper), limit_val_batches=0)
        trainer.fit(module, loader())
        trainer.save_checkpoint(f"again-{wrapper}.ckpt")
        after = whole_weights(trainer)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, loader())
        (tested,) = trainer.test(module, loader("test", 16), verbose=False)
        moved = distance(after, whole_weights(trainer))
        trainer.test(module, loader("test", 16), f"again-{wrapper}.ckpt", verbose=False)
        found[wrapper] = (moved, distance(after, whole_weights(trainer)), tested["test_loss"])
    return found


def test_one_trainer_fits_tests_and_loads_again(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    for rank in run_ranks(_again, 2, timeout_s=120):
        for moved, back, loss in rank.values():
            assert moved > 1e-3
            assert back == 0
            assert loss == pytest.approx(rank["ddp"][2], abs=1e-6)
