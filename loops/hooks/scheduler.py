"""ScheduleWindow, and the hook that steps learning-rate schedulers."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CyclicLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from ...collectives import get_rank
from ...registry import HOOKS
from ...wrappers.features import optim_features
from ...wrappers.optimizers.param_groups import DEFAULT_GROUP
from ..data.loaders import get_length
from ..hook import Hook, Scalars
from ..metrics.evaluation import WatchedMetric
from ..schedule import get_members, get_window, is_weighted
from ..state import LoopState, Phase
from .named_schedules import RunSchedule, UnknownLengthError, Warmup, fit_to_run

logger = logging.getLogger(__name__)

By = Literal["batch", "step", "epoch"]
# The units, and their names in messages.
_UNITS: dict[By, str] = {"batch": "batches", "step": "updates", "epoch": "epochs"}


class ScheduleWindow:
    """Apply another scheduler within a range of steps only.

    The scheduler is created when ``after`` steps are done, since a scheduler changes the rates when
    it is created. The step that completes ``until`` is its last one, so a warm-up with
    ``total_iters=until`` hands over the full rate to the scheduler that starts ``after`` as many
    steps. Before and after the range, other schedulers control the rates.

    Args:
        optimizer: the optimizer whose rates to change.
        make: returns a scheduler for the optimizer. Called once on construction even if the range
            starts later, to find errors early.
        after: number of steps before the range.
        until: number of steps at which the range ends; None for no end.

    Attributes:
        after: number of steps before the range.
        until: number of steps at which the range ends; None for no end.

    Raises:
        ValueError: ``after`` is negative, or ``until`` is not greater than ``after``.
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
        self.after = after
        self.until = until
        self._make = make
        self._count = 0
        self._length: tuple[int | None, float | None] | None = None
        self._inner = None if after else make(optimizer)
        # Describes the schedule before the range starts.
        self._sample = self._inner or self._make_scheduler()

    @property
    def scheduler(self) -> LRScheduler:
        """The scheduler of the range; an equal one before the range starts."""
        return self._inner or self._sample

    def step(self) -> None:
        """Count one step, and step the scheduler if the count is in its range."""
        self._count += 1
        if self.until is not None and self._count > self.until:
            return
        if self._inner is not None:
            _advance(self._inner)
        elif self._count >= self.after:
            self._inner = self._start()

    def set_length(self, total: int | None, epoch: float | None = None) -> None:
        """Set the length of the run for a ``RunSchedule`` in the range; see there."""
        end = total if self.until is None else self.until
        self._length = None if end is None else max(1, end - self.after), epoch
        if isinstance(self._inner, RunSchedule):
            self._inner.set_length(*self._length)
        elif isinstance(self._sample, RunSchedule):
            self._sample.make_plan(*self._length)

    def state_dict(self) -> dict[str, Any]:
        """Return the range, the count, and the state of the scheduler if it has been created."""
        inner = None if self._inner is None else self._inner.state_dict()
        span = {"after": self.after, "until": self.until}
        return {"count": self._count, "scheduler": inner, **span}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the range, the count and the scheduler; the optimizer restores the rates."""
        self._count = state["count"]
        # Earlier releases did not save the range.
        self.after, self.until = state.get("after", self.after), state.get("until", self.until)
        self._inner = None
        if state["scheduler"] is not None:
            self._inner = self._make_scheduler()
            _load(self._inner, state["scheduler"])

    def _start(self) -> LRScheduler:
        scheduler = self._make(self.optimizer)
        if isinstance(scheduler, CyclicLR):
            # Its constructor sets the rate that the optimizer had first, not `base_lr`.
            scheduler.last_epoch -= 1
            scheduler.step()
        if isinstance(scheduler, RunSchedule) and self._length is not None:
            scheduler.set_length(*self._length)
        return scheduler

    def _make_scheduler(self) -> LRScheduler:
        """Return a new scheduler without changing the settings of the parameter groups."""
        groups = self.optimizer.param_groups
        before = [(dict(group), deepcopy(_tensors_in(group))) for group in groups]
        try:
            return self._make(self.optimizer)
        finally:
            for group, (settings, values) in zip(groups, before, strict=True):
                group.clear()
                group.update(settings)
                for name, tensor in _tensors_in(group).items():
                    tensor.copy_(values[name])


def _tensors_in(group: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the settings that are tensors, such as a learning rate, which change in place."""
    return {name: setting for name, setting in group.items() if isinstance(setting, Tensor)}


class Misfit(NamedTuple):
    """A schedule whose length does not fit the run.

    Attributes:
        position: the position of the scheduler in the hook.
        text: what does not fit, and the setting that would.
        distorts: whether updates of this run get a rate that is probably a mistake. False if the
            schedule only continues after the run, for example in a trial of a few epochs.
    """

    position: int
    text: str
    distorts: bool


def _leaves(scheduler: Any, after: int, until: int | None) -> Iterator[tuple[Any, int, int | None]]:
    """Yield the schedulers that are active at the end, with the ranges in which they act."""
    inner: Any = getattr(scheduler, "_schedulers", ())
    if isinstance(scheduler, ScheduleWindow):
        yield from _leaves(scheduler.scheduler, scheduler.after, scheduler.until)
    elif isinstance(scheduler, SequentialLR):
        yield from _leaves(inner[-1], after + (scheduler._milestones or [0])[-1], until)
    elif isinstance(scheduler, ChainedScheduler):
        for member in inner:
            yield from _leaves(member, after, until)
    else:
        yield scheduler, after, until


@HOOKS.register_module()
class SchedulerHook(Hook):
    """Step torch's learning-rate schedulers and add ``lr`` to the log records.

    With several parameter groups or optimizers, the names are ``lr/...``; see docs/schedules.md.
    Updates that a loss scaler skips are counted, so that a rate depends only on the number of the
    update.

    Args:
        schedulers: (scheduler, unit) pairs. The unit is "step" (stepped after each batch in which
            its optimizer was updated), "batch" (after each batch, also within an accumulation
            window) or "epoch" (after each pass over the data). ``ReduceLROnPlateau`` is always
            stepped at the end of each validation.
        metric: the validation metric for ``ReduceLROnPlateau``. A warning is logged if the
            scheduler's ``mode`` contradicts the metric's direction.
        optimizers: if there are several optimizers, all of them, also those without a scheduler.
            Each key is the name in the log records. Default: the schedulers' optimizers, in order.
        warmups: warm-ups in front of the schedulers, at most one for each optimizer.

    Raises:
        ValueError: a unit is unknown, or ``metric`` is missing.
    """

    # Before hooks that save, so that checkpoints contain the schedules after the update.
    order = 30

    def __init__(
        self,
        schedulers: Sequence[tuple[LRScheduler | ScheduleWindow, By]],
        *,
        metric: str | None = None,
        optimizers: Mapping[str, Optimizer] | None = None,
        warmups: Sequence[Warmup] = (),
    ) -> None:
        for scheduler, by in schedulers:
            if by not in _UNITS:
                name = type(scheduler).__name__
                raise ValueError(f"{name}: by must be 'batch', 'step' or 'epoch', got {by!r}")
        self._schedulers = [scheduler for scheduler, _ in schedulers]
        self._units = [by for _, by in schedulers]
        self._optimizers = dict(optimizers or {})
        self._warmups = list(warmups)
        plateau = self._plateau = [s for s in self._schedulers if isinstance(s, ReduceLROnPlateau)]
        if plateau and metric is None:
            raise ValueError("ReduceLROnPlateau needs `metric`, the name of the metric to watch")
        self._watched = WatchedMetric(metric or "", None, setting="ReduceLROnPlateau: metric")
        # A range that ends where another one starts takes its last step first.
        timed = [(s, by) for s, by in schedulers if s not in plateau]
        timed.sort(key=lambda pair: getattr(pair[0], "after", 0))
        self._timed = {unit: [s for s, by in timed if by == unit] for unit in _UNITS}
        # The rates of the last batch and of the last update, before the schedulers changed them.
        self._batch_rates: dict[str, float | Tensor] = {}
        self._update_rates: dict[str, float | Tensor] = {}
        # The last update before a scheduler was stepped by epoch or metric, and the rates before.
        self._kept_rates: tuple[int, dict[str, float | Tensor]] | None = None
        self._epochs: int | None = None
        # By the id of each of several optimizers: its micro-batches at the last update.
        self._counts: dict[int, int] = {}
        # Batches per update, now and in the checkpoint; None if no scheduler counts batches.
        self._window: int | None = None
        self._saved_window: int | None = None

    def ignores(self) -> Collection[str]:
        """Ignore ``on_batch_end`` unless a scheduler is stepped by batch."""
        return () if self._timed["batch"] else ("on_batch_end",)

    def misfits(self, state: LoopState) -> Iterator[Misfit]:
        """Yield the schedules whose lengths do not fit the run, as far as its length is known."""
        totals = _totals(state)
        for warmup in self._warmups:
            if (misfit := warmup.misfit(totals["step"])) is not None:
                yield Misfit(self._position(warmup), *misfit)
        for index, (scheduler, by) in enumerate(zip(self._schedulers, self._units, strict=True)):
            total = totals[by]
            if total is None:
                continue
            for leaf, after, until in _leaves(scheduler, 0, None):
                misfit = fit_to_run(leaf, after, until, total)
                if misfit is not None:
                    text, distorts = misfit
                    name, units = type(leaf).__name__, _UNITS[by]
                    yield Misfit(index, f"{name} counts {units}: {text}", distorts)

    def set_lengths(self, state: LoopState) -> None:
        """Tell the schedules the length of the run, as far as it is known.

        Raises:
            UnknownLengthError: a schedule depends on a length that is unknown.
        """
        totals, epochs = _totals(state), _epoch_lengths(state)
        with ExitStack() as stack:
            for warmup in self._warmups:
                stack.enter_context(warmup.lifted())
            for index, by in enumerate(self._units):
                scheduler = self._schedulers[index]
                if isinstance(scheduler, (RunSchedule, ScheduleWindow)):
                    with _note_position(index):
                        scheduler.set_length(totals[by], epochs[by])
        for warmup in self._warmups:
            with _note_position(self._position(warmup)):
                warmup.set_length(totals["step"], epochs["step"])

    def _position(self, warmup: Warmup) -> int:
        """Return the position of the first scheduler behind a warm-up."""
        return [scheduler.optimizer for scheduler in self._schedulers].index(warmup.optimizer)

    def on_train_start(self, state: LoopState) -> None:
        self._check_window(state)
        self._set_lengths_of_session(state)
        self._update_rates, self._kept_rates = {}, None
        self._counts = {}
        self._find_updated(state)
        for misfit in self.misfits(state):
            if misfit.distorts and get_rank() == 0:
                logger.warning("%s", misfit.text)
        for scheduler in self._plateau:
            self._watched.warn_unless(scheduler.mode, state)
        if self._epochs is None:
            self._epochs = state.epoch
        self._finish_epochs(state)

    def on_batch_end(self, state: LoopState, batch: Any, logs: Mapping[str, Tensor]) -> None:
        self._window = get_window(state.optim_wrapper)
        self._batch_rates = self._rates()
        self._step(self._timed["batch"])

    def on_update(self, state: LoopState) -> None:
        if self._timed["batch"]:
            self._update_rates = self._batch_rates
        elif self._timed["step"] or self._warmups:
            self._update_rates = self._rates()
        updated = self._find_updated(state)
        schedulers = self._timed["step"]
        self._step(
            schedulers if updated is None else [s for s in schedulers if s.optimizer in updated]
        )
        for warmup in self._warmups:
            if updated is None or warmup.optimizer in updated:
                warmup.step()

    def _step(
        self, schedulers: Sequence[LRScheduler | ScheduleWindow], *metric: float | Tensor
    ) -> None:
        """Step schedulers on the rates without the warm-ups."""
        with ExitStack() as stack:
            for warmup in self._warmups:
                stack.enter_context(warmup.lifted())
            for scheduler in schedulers:
                _step(scheduler, *metric)

    def _find_updated(self, state: LoopState) -> list[Optimizer] | None:
        """Return which of several optimizers were updated since the last call; None for one."""
        members = get_members(state.optim_wrapper)
        if len(members) < 2:
            return None
        updated = []
        for member in members:
            count = int(optim_features(member).inner_count)
            last_end = optim_features(member).window_start(count)
            if last_end > self._counts.get(id(member), count):
                updated.append(member.optimizer)
            self._counts[id(member)] = count
        return updated

    def _set_lengths_of_session(self, state: LoopState) -> None:
        """Set the lengths; report if settings other than the checkpoint's change the next rates."""
        before = self._rates()
        self.set_lengths(state)
        after = self._rates()
        if state.step and after != before and get_rank() == 0:
            rates = ", ".join(
                f"{name} {before[name]:.6g} -> {rate:.6g}"
                for name, rate in after.items()
                if rate != before[name]
            )
            logger.warning(
                "the settings or the length of the run differ from the checkpoint's, so update %d "
                "has another rate: %s",
                *(state.step + 1, rates),
            )

    def _check_window(self, state: LoopState) -> None:
        """Raise ValueError if a schedule counts batches and a resumed run has other batches."""
        saved, window = self._saved_window, get_window(state.optim_wrapper)
        self._saved_window = None
        if saved is not None and saved != window:
            raise ValueError(
                f"a schedule counts batches (by: batch), of which an update had {saved} when the "
                f"checkpoint was saved and has {window} now, so its rates would change at another "
                "speed: resume with the same number of processes, or use by: step from the start"
            )

    def on_eval_start(self, state: LoopState) -> None:
        # The validation after a pass comes before its save point, and may step a plateau scheduler.
        # Step the schedulers that count epochs before it.
        if state.phase is Phase.VAL:
            self._finish_epochs(state)

    def on_save_point(self, state: LoopState) -> None:
        # Not in `on_epoch_end`, which the iteration loop emits inside a pass over the data.
        self._finish_epochs(state)

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        cut_short = not metrics and bool(state.stop_reason)
        if state.phase is not Phase.VAL or not self._plateau or cut_short:
            return
        value = self._watched.value_in(metrics)
        self._keep_rates(state)
        self._step(self._plateau, value)

    def collect_logs(self, state: LoopState, scalars: Scalars) -> None:
        rates, earlier = self._update_rates, self._kept_rates
        if not rates and earlier is not None and earlier[0] == state.step:
            rates = earlier[1]
        scalars.update(rates or self._rates())

    def _rates(self) -> dict[str, float | Tensor]:
        rates: dict[str, float | Tensor] = {}
        for name, optimizer in self._optimizers.items():
            rates |= _rates(f"lr/{name}", optimizer.param_groups)
        if not self._optimizers:
            used = dict.fromkeys(scheduler.optimizer for scheduler in self._schedulers)
            groups = [group for optimizer in used for group in optimizer.param_groups]
            rates = _rates("lr", groups)
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each scheduler, and the number of epochs stepped so far."""
        states = [scheduler.state_dict() for scheduler in self._schedulers]
        state = {"schedulers": states, "epochs": self._epochs, "labels": self._labels()}
        warmups = [warmup.state_dict() for warmup in self._warmups]
        return {**state, "kinds": self._kinds(), "window": self._window, "warmups": warmups}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore the schedulers' states.

        Raises:
            ValueError: the number of schedulers or their classes differ.
        """
        saved: Sequence[Mapping[str, Any]] = state["schedulers"]
        if len(saved) != len(self._schedulers):
            raise ValueError(
                "`schedulers` must be the same as in the checkpoint, which has "
                f"{len(saved)} schedulers, got {len(self._schedulers)}"
            )
        warmups: Sequence[Mapping[str, Any]] = state.get("warmups", ())
        if len(warmups) != len(self._warmups):
            raise ValueError(
                f"the checkpoint has {len(warmups)} schedulers with `warmup`, got "
                f"{len(self._warmups)}: keep it, possibly with another length, or start a new run "
                "with load_from"
            )
        now, labels = self._labels(), list(state.get("labels", ()))
        kinds = list(state.get("kinds", self._kinds()))
        self._saved_window = state.get("window")
        if len(set(labels)) == len(labels) and set(labels) == set(now):
            # The order in the settings may have changed.
            order = [labels.index(label) for label in now]
            saved = [saved[position] for position in order]
            kinds = [kinds[position] for position in order]
        for index, (kind, saved_kind) in enumerate(zip(self._kinds(), kinds, strict=True)):
            if kind != saved_kind:
                raise ValueError(
                    f"schedulers[{index}] is a {kind}, but the checkpoint has the state of a "
                    f"{saved_kind} there: keep the schedule, or start a new run from the weights "
                    "with load_from"
                )
        for scheduler, part in zip(self._schedulers, saved, strict=True):
            _load(scheduler, part)
        for warmup, saved_warmup in zip(self._warmups, warmups, strict=True):
            warmup.load_state_dict(saved_warmup)
        self._epochs = state["epochs"]

    def _kinds(self) -> list[str]:
        schedulers = [
            scheduler.scheduler if isinstance(scheduler, ScheduleWindow) else scheduler
            for scheduler in self._schedulers
        ]
        # A run may be resumed with another RunSchedule: all of them have the same state.
        return [
            "RunSchedule" if isinstance(scheduler, RunSchedule) else type(scheduler).__name__
            for scheduler in schedulers
        ]

    def _labels(self) -> list[str]:
        """Describe the schedulers: class, range, unit, and the name of the optimizer."""
        names = {id(optimizer): name for name, optimizer in self._optimizers.items()}
        return [
            f"{kind} {getattr(scheduler, 'after', 0)} {getattr(scheduler, 'until', None)} {by} "
            f"{names.get(id(scheduler.optimizer), '')}".strip()
            for kind, scheduler, by in zip(
                self._kinds(), self._schedulers, self._units, strict=True
            )
        ]

    def _keep_rates(self, state: LoopState) -> None:
        """Keep the rates of the last update, unless a scheduler has changed them since."""
        if self._kept_rates is None or self._kept_rates[0] != state.step:
            self._kept_rates = state.step, self._rates()

    def _finish_epochs(self, state: LoopState) -> None:
        # None in a validation without training.
        if self._epochs is not None and self._epochs != state.epoch:
            self._keep_rates(state)
            for _ in range(self._epochs, state.epoch):
                self._step(self._timed["epoch"])
            self._epochs = state.epoch


def _load(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Restore a scheduler for the groups of the checkpoint, which the optimizer gets as well."""
    scheduler.load_state_dict(dict(state))
    functions, rates = getattr(scheduler, "lr_lambdas", ()), getattr(scheduler, "base_lrs", ())
    if functions and len(functions) != len(rates):
        if len(set(functions)) > 1:
            raise ValueError(
                f"{type(scheduler).__name__} has {len(functions)} functions, but the checkpoint "
                f"has {len(rates)} parameter groups: give one function for all groups"
            )
        scheduler.lr_lambdas = [functions[0] for _ in rates]


def _rates(name: str, groups: Sequence[Mapping[str, Any]]) -> dict[str, float | Tensor]:
    """Return the rate of each group; the default group has the name of a single one."""
    # Schedulers change rates that are tensors in place.
    values = [lr.clone() if isinstance(lr := group["lr"], Tensor) else lr for group in groups]
    if len(values) == 1:
        return {name: values[0]}
    labels = [group.get("name", index) for index, group in enumerate(groups)]
    names = [name if label == DEFAULT_GROUP else f"{name}/{label}" for label in labels]
    return dict(zip(names, values, strict=True))


@contextmanager
def _note_position(index: int) -> Iterator[None]:
    try:
        yield
    except UnknownLengthError as error:
        error.position = index
        raise


def _totals(state: LoopState) -> dict[By, int | None]:
    """Return the length of the run in each unit; None if unknown."""
    # The optimizers of a group may be updated differently often.
    steps = None if get_window(state.optim_wrapper) is None else state.max_steps
    return {"batch": state.max_iterations, "step": steps, "epoch": state.max_epochs}


def _epoch_lengths(state: LoopState) -> dict[By, float | None]:
    """Return the length of an epoch in each unit; None if unknown."""
    batches, window = get_length(state.dataloader), get_window(state.optim_wrapper)
    steps: float | None = None
    if batches is not None and window is not None:
        steps = batches / window
        # Windows of weighted losses end with the pass.
        steps = math.ceil(steps) if is_weighted(state.optim_wrapper) else steps
    return {"batch": batches, "step": steps, "epoch": 1}


def _step(scheduler: LRScheduler | ScheduleWindow, *metric: float | Tensor) -> None:
    if getattr(scheduler.optimizer, "_opt_called", False):
        _advance(scheduler, *metric)
        return
    # A loss scaler may skip the first updates. Torch then warns that the scheduler was stepped
    # before the optimizer (pytorch/pytorch#44511).
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)`")
        _advance(scheduler, *metric)


def _advance(scheduler: LRScheduler | ScheduleWindow, *metric: Any) -> None:
    """Step a scheduler, except a OneCycleLR at its last rate: torch computes one beyond its end."""
    if not isinstance(scheduler, OneCycleLR) or scheduler.last_epoch < scheduler.total_steps - 1:
        scheduler.step(*metric)
