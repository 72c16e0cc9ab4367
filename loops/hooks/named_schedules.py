"""Schedules that take their length from the run, a warm-up before any other schedule, PolyLR."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    PolynomialLR,
)

from ...registry import PARAM_SCHEDULERS
from ..schedule import positive

# A number of steps, a share of the run (a float below 1), or a text such as "2 epochs".
Span: TypeAlias = int | float | str
Shape = Literal["linear", "sqrt", "cosine"]
_REASONS = "the training data has no length, or several optimizers accumulate differently"
_TEXT = re.compile(r"(\d+(?:\.\d+)?) *(step|epoch)s?")
_DECAYS: dict[Shape, Callable[[float], float]] = {
    "linear": lambda share: 1 - share,
    "sqrt": lambda share: 1 - math.sqrt(share),
    "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2,
}
# Names of LRScheduler, two of them private in torch 2.11 to 2.13, and `plan`.
_STATE = ("last_epoch", "base_lrs", "_step_count", "_last_lr", "plan")


@PARAM_SCHEDULERS.register_module()
class PolyLR(LRScheduler):
    """Decay the learning rates to ``eta_min`` as ``(1 - step / total_iters) ** power``.

    The same as torch's ``PolynomialLR``, applied to the part above ``eta_min``. Each step computes
    the rates from the current ones, so that other schedules can act at the same time.

    Args:
        optimizer: the optimizer whose rates to change.
        total_iters: steps after which the rates are constant; at least 1.
        power: power of the polynomial; 1 is a straight line.
        eta_min: final learning rate.
        last_epoch: index of the last step.

    Raises:
        ValueError: ``total_iters`` is less than 1.
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
        self.total_iters = positive("total_iters", total_iters)
        self.power = power
        self.eta_min = eta_min
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of the next step, one for each parameter group."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        remaining = self.total_iters - self.last_epoch
        if self.last_epoch == 0 or remaining < 0:
            return rates
        share = (remaining / (remaining + 1)) ** self.power
        return [(rate - self.eta_min) * share + self.eta_min for rate in rates]


class UnknownLengthError(ValueError):
    """A schedule depends on the length of the run, which is unknown.

    Attributes:
        position: the position of the schedule in its ``SchedulerHook``.
    """

    position: int = 0


class Plan(NamedTuple):
    """The phases of a schedule in steps.

    Attributes:
        total: length of the run; None if the schedule does not depend on it.
        warmup: steps of the warm-up.
        decay: steps of the decay at the end of the run; None if the schedule has no such phase.
    """

    total: int | None
    warmup: int
    decay: int | None = None


def parse_span(name: str, span: Span) -> tuple[float, Literal["step", "share", "epoch"]]:
    """Return the number and the unit of a span of the run.

    Args:
        name: the setting, for the error.
        span: a number of steps, a share of the run, or a text with one of the units.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(span, str) and (match := _TEXT.fullmatch(span)):
        number, unit = float(match[1]), match[2]
        if unit == "epoch":
            return number, "epoch"
        if number.is_integer():
            return number, "step"
    elif isinstance(span, float) and 0 <= span < 1:
        return span, "share"
    elif isinstance(span, int) and not isinstance(span, bool) and span >= 0:
        return span, "step"
    remedy = f"; write {span:.0f}" if isinstance(span, float) and span.is_integer() else ""
    raise ValueError(
        f"{name} must be a number of steps such as 500, a share of the run such as 0.05, or a text "
        f"such as '2 epochs', got {span!r}{remedy}"
    )


def count_steps(name: str, span: Span, total: int | None, epoch: float | None) -> int:
    """Return the number of steps in a span; a share above 0 has at least one.

    Args:
        name: the setting, for errors.
        span: see ``parse_span``.
        total: steps of the run; None if unknown.
        epoch: steps of an epoch; None if unknown.

    Raises:
        UnknownLengthError: the length that the unit needs is unknown.
        ValueError: the span is not allowed.
    """
    number, unit = parse_span(name, span)
    if unit == "step":
        return int(number)
    length = total if unit == "share" else epoch
    if length is None:
        period = "the run" if unit == "share" else "an epoch"
        remedy = "use IterTrainLoop with max_steps, or " if unit == "share" else ""
        raise UnknownLengthError(
            f"{name} is {span!r}, but the length of {period} is unknown: {_REASONS}; {remedy}set "
            f"{name} to a number of steps, such as 500"
        )
    # The last step of an epoch may be shared with the next epoch.
    steps = round(number * length) if unit == "share" else math.ceil(number * length - 1e-9)
    return max(steps, int(number > 0))


def set_rates(optimizer: Optimizer, rates: Sequence[float | Tensor]) -> None:
    """Set the rates of the first ``len(rates)`` parameter groups, those that are tensors in place.

    A hook may have added further groups.
    """
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def get_rates(optimizer: Optimizer) -> list[float | Tensor]:
    """Return the rate of each parameter group; those that are tensors are copied."""
    rates = (group["lr"] for group in optimizer.param_groups)
    return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]


class RunSchedule(LRScheduler):
    """Base of the schedules that are functions of the step's number and the length of the run.

    In a warm-up of ``n`` steps, step ``k`` (counted from 1) has ``k / n`` of the rate of each
    parameter group. The step after it has the whole rate, and ``factor`` continues from there.
    ``SchedulerHook`` sets the length. In your own loop, pass ``total``.

    Subclasses override ``factor``.

    Args:
        optimizer: the optimizer whose rates to change.
        warmup: steps of the warm-up; or a share of the run below 1, or a text such as "2 epochs".
        total: steps of the run. Default: the length of the training loop.
        last_epoch: index of the last step.

    Attributes:
        plan: the phases in steps; None before the length of the run is known.

    Raises:
        ValueError: an argument is not allowed.
    """

    needs_total: ClassVar[bool] = True

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        warmup: int | float | str = 0,
        total: int | None = None,
        last_epoch: int = -1,
    ) -> None:
        parse_span("warmup", warmup)
        self.warmup = warmup
        self.total = None if total is None else positive("total", total)
        self.plan: Plan | None = None
        with suppress(UnknownLengthError):
            self.plan = self.make_plan(None)
        super().__init__(optimizer, last_epoch)

    def factor(self, step: int, plan: Plan) -> float:
        """Return the share of the whole rate, ``step`` steps after the warm-up."""
        raise NotImplementedError

    def make_plan(self, total: int | None, epoch: float | None = None) -> Plan:
        """Return the phases in a run of ``total`` steps with ``epoch`` steps in each epoch.

        Raises:
            UnknownLengthError: a length is None, but the schedule depends on it.
            ValueError: a setting is not allowed.
        """
        total = total if self.total is None else self.total
        if total is None and self.needs_total:
            raise UnknownLengthError(
                f"the length of the run is unknown: {_REASONS}; use train: {{type: IterTrainLoop, "
                "max_steps: ...}, or set total to a number of steps"
            )
        return Plan(total, count_steps("warmup", self.warmup, total, epoch))

    def set_length(self, total: int | None, epoch: float | None = None) -> None:
        """Set the length of the run, and the rates of the coming step if it changes them.

        Args:
            total: steps of the run; None if unknown. A resumed schedule then keeps its length.
            epoch: steps of an epoch; None if unknown.

        Raises:
            UnknownLengthError: a length is None, but the schedule depends on it.
        """
        if total is None and self.plan is not None:
            total = self.plan.total
        self.plan = self.make_plan(total, epoch)
        if self._rates() != self.get_last_lr():
            set_rates(self.optimizer, self._rates())
            self._last_lr = get_rates(self.optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of the coming step, one for each parameter group."""
        if self.plan is None and self.last_epoch > 0:
            self.make_plan(None)
        # Until the length is known, before the first step, the rates stay as they are.
        return list(self.base_lrs) if self.plan is None else self._rates()

    def _rates(self) -> list[float | Tensor]:
        assert self.plan is not None
        step, warmup = self.last_epoch, self.plan.warmup
        if step < warmup:
            return [base * ((step + 1) / warmup) for base in self.base_lrs]
        return [base * self.factor(step - warmup, self.plan) for base in self.base_lrs]

    def misfit(self, steps: int) -> tuple[str, bool] | None:
        """Return what does not fit a run of ``steps``, and whether rates of the run are wrong."""
        if self.total is not None and self.total != steps:
            text = f"total is {self.total}, but it acts for {steps}"
            return f"{text}; remove total, or set total: {steps}", True
        phases = 0 if self.plan is None else self.plan.warmup + (self.plan.decay or 0)
        if phases > steps:
            names = "warmup and decay have" if self.plan and self.plan.decay else "warmup has"
            return f"{names} {phases}, but it acts for {steps}", True
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the first rates and the plan; the settings are not part of it."""
        state = {key: value for key, value in super().state_dict().items() if key in _STATE}
        return {**state, "plan": self.plan and list(self.plan)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position, the first rates and the plan."""
        plan = state_dict["plan"]
        super().load_state_dict({**state_dict, "plan": plan and Plan(*plan)})


@PARAM_SCHEDULERS.register_module(name="constant")
class ConstantRate(RunSchedule):
    """Keep the rates constant after the warm-up.

    Args:
        optimizer: the optimizer whose rates to change.
        warmup: steps of the warm-up; or a share of the run below 1, or a text such as "2 epochs".
        total: steps of the run. Default: the length of the training loop.
        last_epoch: index of the last step.

    Raises:
        ValueError: an argument is not allowed.
    """

    needs_total = False

    def factor(self, step: int, plan: Plan) -> float:
        """Return 1."""
        return 1.0


@PARAM_SCHEDULERS.register_module(name="inverse_sqrt")
class InverseSqrtDecay(RunSchedule):
    """Decay the rates as ``sqrt(timescale / (timescale + step))`` after the warm-up.

    Args:
        optimizer: the optimizer whose rates to change.
        timescale: steps in which the rates fall to ``sqrt(1 / 2)``. Default: the warm-up's steps.
        warmup: steps of the warm-up; or a share of the run below 1, or a text such as "2 epochs".
        total: steps of the run. Default: the length of the training loop.
        last_epoch: index of the last step.

    Raises:
        ValueError: both ``warmup`` and ``timescale`` are missing, or an argument is not allowed.
    """

    needs_total = False

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        timescale: int | None = None,
        warmup: int | float | str = 0,
        total: int | None = None,
        last_epoch: int = -1,
    ) -> None:
        self.timescale = None if timescale is None else positive("timescale", timescale)
        if not timescale and not parse_span("warmup", warmup)[0]:
            raise ValueError("inverse_sqrt needs warmup or timescale, a number of steps")
        super().__init__(optimizer, warmup=warmup, total=total, last_epoch=last_epoch)

    def factor(self, step: int, plan: Plan) -> float:
        """Return the share of the whole rate, ``step`` steps after the warm-up."""
        timescale = self.timescale or plan.warmup
        return math.sqrt(timescale / (timescale + step))


class _DecayToEnd(RunSchedule):
    """Decay the rates to ``end`` from the warm-up to the end of the run."""

    shape: ClassVar[Shape]

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        end: float = 0.0,
        warmup: int | float | str = 0,
        total: int | None = None,
        last_epoch: int = -1,
    ) -> None:
        self.end = _check_end(end)
        super().__init__(optimizer, warmup=warmup, total=total, last_epoch=last_epoch)

    def factor(self, step: int, plan: Plan) -> float:
        """Return the share of the whole rate, ``step`` steps after the warm-up."""
        return _decay(self.shape, step, _steps_left(plan), self.end)


@PARAM_SCHEDULERS.register_module(name="cosine")
class CosineDecay(_DecayToEnd):
    """Decay the rates to ``end`` along half a cosine, from the warm-up to the end of the run.

    Without a warm-up the same as torch's ``CosineAnnealingLR``, but constant after its end.

    Args:
        optimizer: the optimizer whose rates to change.
        end: the rate at the end, as a share of the rate of each parameter group.
        warmup: steps of the warm-up; or a share of the run below 1, or a text such as "2 epochs".
        total: steps of the run. Default: the length of the training loop.
        last_epoch: index of the last step.

    Raises:
        ValueError: an argument is not allowed.
    """

    shape = "cosine"


@PARAM_SCHEDULERS.register_module(name="linear")
class LinearDecay(_DecayToEnd):
    """Decay the rates to ``end`` in a straight line, from the warm-up to the end of the run.

    Args:
        optimizer: the optimizer whose rates to change.
        end: the rate at the end, as a share of the rate of each parameter group.
        warmup: steps of the warm-up; or a share of the run below 1, or a text such as "2 epochs".
        total: steps of the run. Default: the length of the training loop.
        last_epoch: index of the last step.

    Raises:
        ValueError: an argument is not allowed.
    """

    shape = "linear"


@PARAM_SCHEDULERS.register_module(name="wsd")
class WarmupStableDecay(RunSchedule):
    """Warm up, keep the rates constant, and decay them to ``end`` at the end of the run.

    The schedule of https://arxiv.org/abs/2404.06395. A run in its constant phase can be resumed
    with another length or decay; see docs/schedules.md.

    Args:
        optimizer: the optimizer whose rates to change.
        decay: steps of the decay, or a share or text as for ``warmup``.
        shape: shape of the decay. "sqrt" is ``1 - sqrt(share)`` of https://arxiv.org/abs/2405.18392.
        end: the rate at the end, as a share of the rate of each parameter group.
        warmup: steps of the warm-up; or a share of the run below 1, or a text such as "2 epochs".
        total: steps of the run. Default: the length of the training loop.
        last_epoch: index of the last step.

    Raises:
        ValueError: an argument is not allowed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        decay: int | float | str = 0.1,
        shape: Literal["linear", "sqrt", "cosine"] = "linear",
        end: float = 0.0,
        warmup: int | float | str = 0,
        total: int | None = None,
        last_epoch: int = -1,
    ) -> None:
        if shape not in _DECAYS:
            raise ValueError(f"shape must be {', '.join(_DECAYS)}, got {shape!r}")
        self.decay, self.shape, self.end = decay, shape, _check_end(end)
        parse_span("decay", decay)
        super().__init__(optimizer, warmup=warmup, total=total, last_epoch=last_epoch)

    def make_plan(self, total: int | None, epoch: float | None = None) -> Plan:
        """Return the phases; see ``RunSchedule``."""
        plan = super().make_plan(total, epoch)
        return plan._replace(decay=count_steps("decay", self.decay, plan.total, epoch))

    def factor(self, step: int, plan: Plan) -> float:
        """Return the share of the whole rate, ``step`` steps after the warm-up."""
        length = min(plan.decay or 0, _steps_left(plan))
        begin = _steps_left(plan) - length
        return 1.0 if step < begin else _decay(self.shape, step - begin, length, self.end)


def _check_end(end: float) -> float:
    if not 0 <= end <= 1:
        raise ValueError(f"end must be a share of the rate from 0 to 1, got {end!r}")
    return end


def _steps_left(plan: Plan) -> int:
    """Return the number of steps after the warm-up."""
    assert plan.total is not None
    return max(plan.total - plan.warmup, 0)


def _decay(shape: Shape, step: int, length: int, end: float) -> float:
    """Return the factor after ``step`` of ``length`` steps of a decay from 1 to ``end``."""
    return end + (1 - end) * _DECAYS[shape](step / length) if step < length else end


class Warmup:
    """Multiply the rates that schedules set by ``k / n`` in update ``k`` of the first ``n``.

    It acts in front of any schedule: create it after the schedules of the optimizer, and step them
    inside ``lifted``, in which the rates are those without the warm-up. ``SchedulerHook`` does both
    for its argument ``warmups``.

    Args:
        optimizer: the optimizer whose rates to change.
        length: updates of the warm-up; or a share of the run below 1, or a text such as "2 epochs".

    Raises:
        ValueError: ``length`` is not allowed.
    """

    def __init__(self, optimizer: Optimizer, length: Span) -> None:
        self.optimizer = optimizer
        self.steps: int | None = None
        self._length = length
        self._count = 0
        # The rates without the warm-up; None if they are the optimizer's.
        self._rates: list[float | Tensor] | None = None
        with suppress(UnknownLengthError):
            self.set_length(None)

    def set_length(self, total: int | None, epoch: float | None = None) -> None:
        """Set the number of updates of the run and of an epoch; None if unknown.

        Raises:
            UnknownLengthError: a length is None, but the warm-up depends on it.
        """
        if total is None and epoch is None and self.steps is not None:
            return
        steps = count_steps("warmup", self._length, total, epoch)
        with self.lifted():
            self.steps = steps

    def step(self) -> None:
        """Count an update."""
        with self.lifted():
            self._count += 1

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Give the optimizer the rates without the warm-up inside the context."""
        if self._rates is not None:
            set_rates(self.optimizer, self._rates)
            self._rates = None
        yield
        if self.steps is not None and self._count + 1 < self.steps:
            self._rates = get_rates(self.optimizer)
            factor = (self._count + 1) / self.steps
            set_rates(self.optimizer, [rate * factor for rate in self._rates])

    def misfit(self, steps: int | None) -> tuple[str, bool] | None:
        """Return what does not fit a run of ``steps``, and that its rates are wrong."""
        if self.steps is None or steps is None or self.steps <= steps:
            return None
        return f"warmup has {self.steps} updates, but the run has {steps}", True

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates, and the rates without the warm-up if they differ."""
        return {"count": self._count, "steps": self.steps, "rates": self._rates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; the optimizer restores the rates with the warm-up."""
        self._count, self.steps, self._rates = state["count"], state["steps"], state["rates"]


# The setting that is a schedule's number of steps.
_LENGTHS: dict[type, str] = {
    **dict.fromkeys((ConstantLR, LinearLR, PolynomialLR, PolyLR), "total_iters"),
    CosineAnnealingLR: "T_max",
    OneCycleLR: "total_steps",
}


def fit_to_run(
    scheduler: Any, after: int, until: int | None, total: int
) -> tuple[str, bool] | None:
    """Return what does not fit if a schedule acts in a run of ``total`` steps, None if it fits.

    Returns:
        A text, and whether updates of this run get a rate that is probably a mistake.
    """
    setting = _LENGTHS.get(type(scheduler))
    if setting is None and not isinstance(scheduler, RunSchedule):
        return None
    if after >= total:
        return f"it starts after {after}, but the run has {total}", False
    is_cut = until is not None and until < total
    span = (until if is_cut and until is not None else total) - after
    if setting is None:
        return scheduler.misfit(span)  # type: ignore[no-any-return]
    length = getattr(scheduler, setting)
    # Without another schedule after it, the last rate belongs to the step before the end.
    rates = span + is_cut
    text = f"{setting} is {length}, but it acts for {span}"
    if length < span and rates > length + 1 and (effect := _effect_after_end(scheduler)):
        return f"{text}: {effect} after {after + length}; set {setting}: {span}", True
    is_warm_up = isinstance(scheduler, (ConstantLR, LinearLR))
    if length > span + is_cut and not is_warm_up:
        return f"{text}: it ends before its last rate; set {setting}: {span}", False
    if length > span and is_warm_up:
        return f"{text}: it does not reach its last rate; set {setting}: {span}", is_cut
    return None


def _effect_after_end(scheduler: Any) -> str:
    if isinstance(scheduler, CosineAnnealingLR):
        return "the rate rises again"
    if isinstance(scheduler, OneCycleLR):
        return "the rate stays at its minimum"
    ends_at_zero = isinstance(scheduler, PolynomialLR) or 0 in (
        getattr(scheduler, "eta_min", 1),
        getattr(scheduler, "end_factor", 1),
    )
    return "the rate is 0" if ends_at_zero else ""
