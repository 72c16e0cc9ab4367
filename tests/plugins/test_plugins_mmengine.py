"""Our optimizer wrappers in mmengine's Runner, compared with mmengine's."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from warm import ended

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # Its import fails if OpenCV does not find libGL.
    reason = "mmengine, the extra of that name, cannot be imported"
    theirs = pytest.importorskip("mmengine.optim", reason=reason, exc_type=ImportError)
    from mmengine.hooks import Hook
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

from stepwrap.plugins import mmengine as ours

PATH = "stepwrap.plugins.mmengine"
DATA = [(torch.arange(4.0).sin() * (index + 1), index % 3) for index in range(20)]


class Classifier(BaseModel):
    """Two layers; with two optimizer wrappers each trains one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        for index, parameter in enumerate(self.parameters()):
            values = torch.linspace(-1, 1, parameter.numel()) / (index + 1)
            parameter.data.copy_(values.view_as(parameter))

    def forward(self, inputs: Tensor, target: Tensor, mode: str = "tensor") -> Any:
        return {"loss": F.cross_entropy(self.second(self.first(inputs).tanh()), target)}

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        if not hasattr(optim_wrapper, "keys"):
            return super().train_step(data, optim_wrapper)
        for name in ("first", "second"):
            with optim_wrapper[name].optim_context(self):
                loss = self(*data)["loss"]
            optim_wrapper[name].update_params(loss)
            optim_wrapper.zero_grad()
        return {"loss": loss.detach()}


class Notes(Hook):
    def __init__(self) -> None:
        self.rates: list[Any] = []

    def after_train_iter(self, runner: Runner, *_: Any, **__: Any) -> None:
        wrapper = runner.optim_wrapper
        self.rates.append((wrapper.get_lr(), wrapper.get_momentum()))


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """Ignore mmengine's warnings, and restore the log level and thread count that it changes."""
    level, threads = logging.root.level, torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.root.setLevel(level)
    torch.set_num_threads(threads)


def trained(wrapper: Any, folder: Path, *schedulers: Any, **more: Any) -> tuple[Any, ...]:
    """Return the optimizer wrapper, the weights and the rates of a run of two epochs."""
    model, notes = Classifier(), Notes()
    settings: dict[str, Any] = {
        "train_cfg": {"by_epoch": True, "max_epochs": 2},
        "param_scheduler": list(schedulers) or None,
        "experiment_name": f"{folder.name}{len(os.listdir(folder))}{id(model)}",
        "train_dataloader": {
            "dataset": DATA,
            "batch_size": 4,
            "sampler": {"type": "DefaultSampler", "shuffle": False},
            "collate_fn": {"type": "default_collate"},
        },
        **more,
    }
    wrapper = wrapper(model) if callable(wrapper) else wrapper
    runner = Runner(
        model,
        str(folder),
        optim_wrapper=wrapper,
        custom_hooks=[notes],
        log_level="ERROR",
        default_scope="mmengine",
        **settings,
    )
    runner.train()
    return runner.optim_wrapper, list(model.parameters()), notes.rates


def same(run: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Return whether two runs have the same weights and rates."""
    weights = [torch.equal(a, b) for a, b in zip(run[1], other[1], strict=True)]
    return all(weights) and run[2] == other[2] != []


def two_groups(library: Any) -> Any:
    """Return a factory of a wrapper with two groups of parameters."""

    def make(model: Classifier) -> Any:
        groups = [{"params": layer.parameters()} for layer in (model.first, model.second)]
        optimizer = SGD([{**groups[0], "lr": 0.2}, groups[1]], lr=0.1, momentum=0.9)
        return library.OptimWrapper(optimizer, 2, clip_grad={"max_norm": 0.5})

    return make


BY_BATCH = {"by_epoch": False, "end": 8}
SCHEDULERS = [
    {"type": "LinearLR", "start_factor": 0.1, **BY_BATCH},
    {"type": "MultiStepLR", "milestones": [3, 6], **BY_BATCH},
    {"type": "CosineAnnealingLR", "eta_min": 1e-3, **BY_BATCH},
    {"type": "PolyLR", "eta_min": 1e-3, "power": 0.9, **BY_BATCH},
    {"type": "OneCycleLR", "eta_max": 0.5, "total_steps": 10, "by_epoch": False},
    {"type": "LinearMomentum", "start_factor": 0.5, **BY_BATCH},
]


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda settings: settings["type"])
def test_weights_and_rates_equal_their_wrapper(scheduler: Any, tmp_path: Path) -> None:
    """Also with several groups, for which mmengine reports a base rate as well."""
    run, reference = (
        trained(two_groups(library), tmp_path, scheduler) for library in (ours, theirs)
    )
    assert type(run[0]) is ours.OptimWrapper
    assert set(run[2][0][0]) == {"base_lr", "lr"}
    if scheduler["type"] != "LinearMomentum":
        assert len({rates["base_lr"][0] for rates, _ in run[2]}) > 1
    assert same(run, reference)


def test_a_config_of_theirs_names_ours(tmp_path: Path) -> None:
    """mmengine's constructor builds the wrapper with options by parameter."""
    settings = {
        "optimizer": {"type": "AdamW", "lr": 0.01, "weight_decay": 0.1},
        "paramwise_cfg": {"custom_keys": {"first": {"lr_mult": 3}}},
        "accumulative_counts": 2,
    }
    run = trained({"type": f"{PATH}.OptimWrapper", **settings}, tmp_path, SCHEDULERS[2])
    assert type(run[0]) is ours.OptimWrapper
    assert same(run, trained({"type": "OptimWrapper", **settings}, tmp_path, SCHEDULERS[2]))
    amp = {"type": f"{PATH}.AmpOptimWrapper", "dtype": "bfloat16", **settings}
    assert type(trained(amp, tmp_path)[0]) is ours.AmpOptimWrapper


def test_several_optimizers(tmp_path: Path) -> None:
    def members(library: Any, model: Classifier) -> dict[str, Any]:
        return {
            name: library.OptimWrapper(SGD(getattr(model, name).parameters(), lr=rate))
            for name, rate in (("first", 0.1), ("second", 0.2))
        }

    by_name = {"param_scheduler": {"first": [SCHEDULERS[0]], "second": [SCHEDULERS[1]]}}
    makes = [
        lambda model: theirs.OptimWrapperDict(**members(theirs, model)),
        lambda model: ours.OptimWrapperDict(**members(ours, model)),
        lambda model: members(ours, model),
    ]
    reference, *runs = [trained(make, tmp_path, **by_name) for make in makes]
    assert set(reference[2][0][0]) == {"first.lr", "second.lr"}
    assert all(same(run, reference) for run in runs)


def test_a_run_resumes_from_their_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Their checkpoints hold pickled objects, which is safe for files of this test.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    runs = []
    for library in (ours, theirs):
        folder = tmp_path / library.__name__
        folder.mkdir()
        trained(two_groups(library), folder, SCHEDULERS[2])
        longer = {"train_cfg": {"by_epoch": True, "max_epochs": 3}, "resume": True}
        runs.append(trained(two_groups(library), folder, SCHEDULERS[2], **longer))
        assert len(runs[-1][2]) == 5
    assert same(*runs)


def test_without_mmengine_the_extra_is_named() -> None:
    code = f"import sys; sys.modules['mmengine'] = None; import stepwrap.plugins, {PATH}"
    done = ended("-c", code)
    assert done.returncode == 1
    assert "stepwrap.plugins.mmengine needs mmengine" in done.stderr
    assert "pip install 'stepwrap[mmengine]'" in done.stderr
