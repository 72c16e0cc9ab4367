"""Learning-rate schedules: PolyLR, a window in which another acts, and the hook that steps them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ...registry import HOOKS, PARAM_SCHEDULERS
from ..hook import Hook, Scalars
from ..metrics.scores import WatchedMetric
from ..state import LoopState, Phase

By = Literal["batch", "step", "epoch"]
_UNITS: tuple[By, ...] = ("batch", "step", "epoch")


@PARAM_SCHEDULERS.register_module()
class PolyLR(LRScheduler):
    """Decays the rates to `eta_min` as `(1 - step / total_iters) ** power`.

    torch's `PolynomialLR`, of what lies above `eta_min`. As there each step changes the rates as
    they are, so that other schedules may act besides.

    Args:
        optimizer: Whose rates it changes.
        total_iters: Steps after which the rates stay; at least 1.
        power: Of the polynomial; 1 is a straight line.
        eta_min: The rate at the end.
        last_epoch: Steps so far.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_iters: int,
        *,
        power: float = 1.0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        if total_iters < 1:
            raise ValueError(f"total_iters must be at least 1, got {total_iters}")
        self.total_iters = total_iters
        self.power = power
        self.eta_min = eta_min
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of the next step, one for each group."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        left = self.total_iters - self.last_epoch
        if self.last_epoch == 0 or left < 0:
            return rates
        share = (left / (left + 1)) ** self.power
        return [(rate - self.eta_min) * share + self.eta_min for rate in rates]


class ScheduleWindow:
    """Lets another scheduler act on the rates as they are from one count of steps to another.

    Before `after` and from `until` on the rates are left to other schedulers. That scheduler is
    made when its time has come, since a scheduler changes the rates as soon as it exists.

    Args:
        optimizer: Whose rates it changes.
        make: Returns a scheduler over it. Called once at the start as well, for its errors.
        after: Steps in which nothing is done.
        until: The count of steps from which on nothing is done any more; None for never.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        make: Callable[[Optimizer], LRScheduler],
        *,
        after: int = 0,
        until: int | None = None,
    ) -> None:
        if after < 0:
            raise ValueError(f"after must be at least 0, got {after}")
        if until is not None and until <= after:
            raise ValueError(f"until must be greater than after ({after}), got {until}")
        self.optimizer = optimizer
        self._make = make
        self._after = after
        self._until = until
        self._count = 0
        self._inner = None if after else make(optimizer)
        if after:
            self._made()

    def step(self) -> None:
        """Count one step, and let the scheduler act if it is within its part."""
        self._count += 1
        if self._until is not None and self._count >= self._until:
            return
        if self._inner is not None:
            self._inner.step()
        elif self._count >= self._after:
            self._inner = self._make(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the count, and the state of the scheduler where it has begun."""
        inner = None if self._inner is None else self._inner.state_dict()
        return {"count": self._count, "scheduler": inner}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; the rates themselves are the optimizer's."""
        self._count = state["count"]
        self._inner = None
        if state["scheduler"] is not None:
            self._inner = self._made()
            self._inner.load_state_dict(dict(state["scheduler"]))

    def _made(self) -> LRScheduler:
        """Return a new scheduler, with the groups' settings as they were."""
        groups = self.optimizer.param_groups
        before = [dict(group) for group in groups]
        try:
            return self._make(self.optimizer)
        finally:
            for group, settings in zip(groups, before, strict=True):
                group.clear()
                group.update(settings)


@HOOKS.register_module()
class SchedulerHook(Hook):
    """Steps torch's learning-rate schedulers and adds `lr` to the log records.

    docs/hooks.md says under which names. A schedule counts the loop's updates also where a loss
    scaler skips some, so that a rate depends on the update alone.

    Args:
        schedulers: Each scheduler with "step" (stepped after each update), "batch" (after each
            batch, also within an accumulation window) or "epoch" (after each pass over the data).
            `ReduceLROnPlateau` is stepped at the end of each validation whatever stands beside it.
        metric: Metric of the validation that `ReduceLROnPlateau` watches; a warning tells where
            that one's `mode` is not the metric's direction.
        optimizers: Several optimizers by their names in the records, where also those without a
            scheduler are; default: those of the schedulers, in their order.
    """

    # Before hooks that save: a checkpoint holds the schedules after this update.
    order = 30

    def __init__(
        self,
        schedulers: Sequence[tuple[LRScheduler | ScheduleWindow, By]],
        *,
        metric: str | None = None,
        optimizers: Mapping[str, Optimizer] | None = None,
    ) -> None:
        for scheduler, by in schedulers:
            if by not in _UNITS:
                name = type(scheduler).__name__
                raise ValueError(f"{name}: by must be 'batch', 'step' or 'epoch', got {by!r}")
        self._schedulers = [scheduler for scheduler, _ in schedulers]
        self._optimizers = dict(optimizers or {})
        plateau = self._plateau = [s for s in self._schedulers if isinstance(s, ReduceLROnPlateau)]
        if plateau and metric is None:
            raise ValueError("ReduceLROnPlateau needs `metric`, the name of the metric to watch")
        self._watched = WatchedMetric(metric or "", None, setting="ReduceLROnPlateau: metric")
        timed = [(s, by) for s, by in schedulers if s not in plateau]
        self._timed = {unit: [one for one, by in timed if by == unit] for unit in _UNITS}
        self._epochs: int | None = None

    def ignores(self) -> Collection[str]:
        """Return the end of batches, unless a schedule counts them."""
        return () if self._timed["batch"] else ("on_batch_end",)

    def on_train_start(self, state: LoopState) -> None:
        for scheduler in self._plateau:
            self._watched.warn_unless(scheduler.mode, state)
        if self._epochs is None:
            self._epochs = state.epoch
        self._finish_epochs(state.epoch)

    def on_batch_end(self, state: LoopState, batch: Any, logs: Mapping[str, Tensor]) -> None:
        _step(self._timed["batch"])

    def on_update(self, state: LoopState) -> None:
        _step(self._timed["step"])

    def on_eval_start(self, state: LoopState) -> None:
        # The validation after a pass comes before its save point, and a plateau acts on it.
        if state.phase is Phase.VAL:
            self._finish_epochs(state.epoch)

    def on_save_point(self, state: LoopState) -> None:
        # Not at the end of an epoch's events: the iteration loop's is inside a pass over the data.
        self._finish_epochs(state.epoch)

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        cut_short = not metrics and bool(state.stop_reason)
        if state.phase is not Phase.VAL or not self._plateau or cut_short:
            return
        value = self._watched.value_in(metrics)
        for scheduler in self._plateau:
            scheduler.step(value)

    def collect_logs(self, state: LoopState, scalars: Scalars) -> None:
        for name, optimizer in self._optimizers.items():
            scalars.update(_rates(f"lr/{name}", optimizer.param_groups))
        if not self._optimizers:
            used = dict.fromkeys(scheduler.optimizer for scheduler in self._schedulers)
            scalars.update(_rates("lr", [group for one in used for group in one.param_groups]))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each scheduler, and the epochs that they have counted."""
        states = [scheduler.state_dict() for scheduler in self._schedulers]
        return {"schedulers": states, "epochs": self._epochs}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Take over the schedulers' states; ValueError if there is another number of them."""
        saved: Sequence[Mapping[str, Any]] = state["schedulers"]
        if len(saved) != len(self._schedulers):
            raise ValueError(
                f"the checkpoint holds {len(saved)} schedulers, the run has "
                f"{len(self._schedulers)}: `schedulers` must be as it was"
            )
        for scheduler, part in zip(self._schedulers, saved, strict=True):
            scheduler.load_state_dict(dict(part))
        self._epochs = state["epochs"]

    def _finish_epochs(self, finished: int) -> None:
        # None: a validation without a training.
        if self._epochs is not None and self._epochs != finished:
            for _ in range(self._epochs, finished):
                _step(self._timed["epoch"])
            self._epochs = finished


def _rates(name: str, groups: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    if len(groups) == 1:
        return {name: groups[0]["lr"]}
    return {f"{name}/{group.get('name', at)}": group["lr"] for at, group in enumerate(groups)}


def _step(schedulers: Sequence[LRScheduler | ScheduleWindow]) -> None:
    for scheduler in schedulers:
        if getattr(scheduler.optimizer, "_opt_called", False):
            scheduler.step()
            continue
        # A loss scaler that starts too high skips the first updates, and torch knows of those of
        # this process alone: it would warn (pytorch/pytorch#44511).
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)`")
            scheduler.step()
