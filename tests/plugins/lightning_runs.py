"""Runs of the Trainer in rank processes with our strategies and with Lightning's."""

import logging
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

import pytest
import torch
from lightning_parts import (
    Automatic,
    Calling,
    Manual,
    join_lightning,
    lightning,
    loader,
    make_trainer,
    small_net,
)
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader
from weights import apart

from stepwrap.plugins.lightning import StepStrategy
from stepwrap.plugins.lightning.tree import DDPStrategy

WRAPPERS = ("ddp", "fsdp", "separate")
MIXED = f"{lightning.__name__}.plugins.precision"


class Overflowing(Automatic):
    """A module in which one step has infinite gradients in one row of the last layer."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            net = getattr(self.net, "module", self.net)
            loss = loss + 1e38 * net[3](torch.zeros(2, 12))[:, 0].float().sum()
        return loss


# Modules and settings of the Trainer that change the step.
SETTINGS: dict[str, tuple[type[Automatic], dict[str, Any]]] = {
    "automatic": (Automatic, {}),
    "manual": (Manual, {}),
    "accumulation": (Automatic, {"accumulate_grad_batches": 2}),
    "accumulation, called": (Calling, {"accumulate_grad_batches": 3}),
    "norm": (Automatic, {"gradient_clip_val": 0.1}),
    "value": (Automatic, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "bf16-mixed": (Automatic, {"precision": "bf16-mixed"}),
    "16-mixed": (Automatic, {"gradient_clip_val": 0.1}),
    "overflow": (Overflowing, {}),
    "bf16-manual": (Manual, {"precision": "bf16-mixed"}),
}


def whole_weights(trainer: Any) -> dict[str, Tensor]:
    """Return the weights that a checkpoint would have; every rank must call this."""
    state = trainer.strategy.lightning_module_state_dict()
    return {name: value.detach().clone() for name, value in state.items()}


def _fit(setting: str, strategy: Any) -> tuple[dict[str, Tensor], dict[str, float], int]:
    cls, options = SETTINGS[setting]
    if setting in ("16-mixed", "overflow"):
        # On a CPU the Trainer would use bfloat16.
        plugin = import_module(MIXED).MixedPrecision("16-mixed", "cpu")
        options = {**options, "plugins": [plugin]}
    trainer = make_trainer(strategy, **options)
    trainer.fit(cls(), loader(), loader("val"))
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return whole_weights(trainer), logged, trainer.global_step


# Some releases do not average the first gradients of a static graph with manual optimization.
LOSES_FIRST = "post_backward" not in vars(DDPStrategy)
DDP_OPTIONS = ("static_graph", "find_unused_parameters", "gradient_as_bucket_view")


def _compare(settings: tuple[str, ...]) -> dict[tuple[str, str], Any]:
    join_lightning()
    distances: dict[tuple[str, str], Any] = {}
    for setting in settings:
        theirs = _fit(setting, "ddp")
        for wrapper in WRAPPERS:
            ours = _fit(setting, "stepwrap" if wrapper == "ddp" else StepStrategy(wrapper))
            logs = max(abs(ours[1][name] - value) for name, value in theirs[1].items())
            same = sorted(ours[1]) == sorted(theirs[1]) and ours[2] == theirs[2]
            distances[setting, wrapper] = (apart(ours[0], theirs[0]), logs, same)
        for option in DDP_OPTIONS:
            if option == "static_graph" and "manual" in setting and LOSES_FIRST:
                with pytest.raises(ValueError, match="update Lightning"):
                    _fit(setting, StepStrategy(**{option: True}))
                distances[setting, option] = 0.0
                continue
            ours = _fit(setting, StepStrategy(**{option: True}))
            distances[setting, option] = apart(ours[0], theirs[0])
    return distances


def compare(settings: Iterable[str]) -> list[dict[tuple[str, str], Any]]:
    """Return for each rank the differences from Lightning's ddp, by setting and wrapper."""
    return run_ranks(_compare, 2, tuple(settings))


class Messages(logging.Handler):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.logger = logging.getLogger(name)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> list[str]:
        self.logger.addHandler(self)
        return self.texts

    def __exit__(self, *error: object) -> None:
        self.logger.removeHandler(self)


def sent(run: Callable[[], object], names: Mapping[str, str]) -> dict[str, int]:
    """Return how often `run` calls each collective of `names`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    counts = {event.key: event.count for event in profile.key_averages()}
    return {name: counts.get(key, 0) for name, key in names.items()}


def plain_epoch(batch: int, norm: bool) -> nn.Module:
    """Train one epoch over whole batches in one process, without Lightning."""
    net = small_net(norm)
    # Adam would amplify the gradient of a bias before BatchNorm, which is rounding noise.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data: DataLoader[Any] = loader(batch=batch, undivided=True)
    for images, labels in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
    return net
