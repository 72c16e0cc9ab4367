"""The learning rates of a run before it starts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ...loops import EpochTrainLoop, Hook, HookList, IterTrainLoop, LoopState, SchedulerHook
from ...loops.data.loaders import get_length
from ...loops.schedule import get_members, get_window, is_weighted
from ...registry import RunSections
from ...wrappers import OptimWrapper, OptimWrapperDict
from ...wrappers.features import optim_features
from ..parts import Parts, scheduler_hook

# Enough for a picture. Longer runs are sampled.
_MOST_POINTS = 2000
Curve = list[tuple[int, float]]


class _CountedUpdates(nn.Module):
    """A model wrapper whose training step counts a micro-batch and computes nothing."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        for member in get_members(optim_wrapper):
            member.skip_micro_batch()
        return {}


class _RatesHook(Hook):
    """Record the rates of updates as the log records of a run have them."""

    # After SchedulerHook.
    order = 40

    def __init__(self, schedule: SchedulerHook) -> None:
        self._schedule = schedule
        self.curves: dict[str, Curve] = defaultdict(list)

    def on_update(self, state: LoopState) -> None:
        total = state.max_steps or 1
        if state.step not in (1, total) and state.step % -(-total // _MOST_POINTS):
            return
        rates: dict[str, Any] = {}
        self._schedule.collect_logs(state, rates)
        for name, rate in rates.items():
            self.curves[name].append((state.step, float(rate)))


def planned_rates(run: RunSections, parts: Parts) -> dict[str, Curve]:
    """Return the rates of the updates of a run as {name in the records: [(update, rate), ...]}.

    The run's loop counts its batches and updates, but nothing is computed. Schedules that depend on
    a metric keep their first rate.

    Args:
        run: the checked settings.
        parts: the parts of the run; see ``rehearse``.

    Raises:
        ValueError: the length of the run is unknown, or its loop is not one of stepwrap's.
    """
    loop, optim_wrapper = parts.train_loop, parts.optim_wrapper
    length, window = get_length(loop.dataloader), get_window(optim_wrapper) or 1
    members = optim_wrapper if isinstance(optim_wrapper, Mapping) else {"": optim_wrapper}
    counts = {name: optim_features(member).accumulative_counts for name, member in members.items()}
    if is_weighted(optim_wrapper):
        # Such windows end with the pass.
        length, counts = length and -(-length // window), dict.fromkeys(counts, 1)
    optimizers = {name: _copy_groups(member.optimizer) for name, member in members.items()}
    wrappers = {
        name: OptimWrapper(optimizer, accumulative_counts=counts[name])
        for name, optimizer in optimizers.items()
    }
    state = LoopState(_CountedUpdates(), wrappers.get("") or OptimWrapperDict(**wrappers))
    hook: Any = scheduler_hook(run, optimizers).get("schedulers") or SchedulerHook(
        [], optimizers=optimizers
    )
    rates = _RatesHook(hook)
    _count(loop, length, max(counts.values())).run(state, HookList([hook, rates]))
    return dict(rates.curves)


def _copy_groups(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with the same groups and first rates, but one number in each group."""
    groups = [
        {
            **{key: group[key] for key in ("name",) if key in group},
            "params": [torch.zeros(1, requires_grad=True)],
            "lr": group.get("initial_lr", group["lr"]),
        }
        for group in optimizer.param_groups
    ]
    # Schedules such as OneCycleLR change the momentum as well.
    return SGD(groups, lr=optimizer.defaults["lr"], momentum=0.9)


def _count(loop: Any, length: int | None, window: int) -> EpochTrainLoop | IterTrainLoop:
    """Return a loop of the same length over batches without data."""
    settings: dict[str, Any] = {"log_every_steps": _MOST_POINTS, "sanity_val": False}
    if isinstance(loop, IterTrainLoop):
        batches = [0] * (length or loop.max_steps * window)
        return IterTrainLoop(batches, max_steps=loop.max_steps, **settings)
    if isinstance(loop, EpochTrainLoop) and length is not None:
        return EpochTrainLoop([0] * length, max_epochs=loop.max_epochs, **settings)
    problem = "the training data has no length" if length is None else "the loop is not stepwrap's"
    raise ValueError(f"the number of updates is unknown, because {problem}; use IterTrainLoop")
