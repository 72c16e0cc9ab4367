"""From checked settings to the optimizer, its wrapper and its learning-rate schedules."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..loops import Hook, SchedulerHook
from ..registry import OPTIM_WRAPPERS, OPTIMIZERS, PARAM_SCHEDULERS, RunSections, build_tree
from ..wrappers import build_optimizer
from ._building import building


def build_optimization(run: RunSections, model: nn.Module) -> tuple[Any, dict[str, Hook]]:
    """Return the optimizer wrapper over `model`, and the hook that steps its schedules, if any."""
    optimizer = _build_optimizer(run, model)
    with building("optim_wrapper"):
        supplied = {"optimizer": optimizer}
        optim_wrapper = build_tree(run.optim_wrapper, OPTIM_WRAPPERS, supplied)
    return optim_wrapper, _scheduler_hook(run, optimizer)


def _build_optimizer(run: RunSections, model: nn.Module) -> Optimizer:
    assert run.optimizer is not None
    settings = dict(run.optimizer)
    cls = OPTIMIZERS.resolve(settings.pop("type"))
    with building("optimizer"):
        return build_optimizer(cls, model.parameters(), **settings)


def _scheduler_hook(run: RunSections, optimizer: Optimizer) -> dict[str, Hook]:
    supplied = {"optimizer": optimizer}
    with building("schedulers"):
        pairs = [
            (build_tree(one.scheduler, PARAM_SCHEDULERS, supplied), one.by)
            for one in run.schedulers
        ]
    watched = next((one.metric for one in run.schedulers if one.metric), None)
    return {"schedulers": SchedulerHook(pairs, metric=watched)} if pairs else {}
