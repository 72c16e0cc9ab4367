"""Schedules that follow the length of the run, and warm-ups, compared with closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hook_runs import loader, metrics, new_state, train
from hook_runs import rates as get_rates
from hypothesis import given
from hypothesis import strategies as st
from listeners import stop_at
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

from stepwrap.loops import (
    ConstantRate,
    CosineDecay,
    Hook,
    InverseSqrtDecay,
    IterTrainLoop,
    LinearDecay,
    LoopState,
    PolyLR,
    RunSchedule,
    SchedulerHook,
    ScheduleWindow,
    ValLoop,
    Warmup,
    WarmupStableDecay,
)
from stepwrap.loops.hook import HookList
from stepwrap.loops.hooks.named_schedules import UnknownLengthError, count_steps, parse_span
from stepwrap.loops.hooks.scheduler import By
from stepwrap.wrappers import OptimWrapper, OptimWrapperDict

Make = Callable[[Optimizer], RunSchedule]


def new_optimizer(*rates: float, tensor: bool = False) -> Optimizer:
    groups = [
        {
            "params": [torch.nn.Parameter(torch.zeros(1))],
            "lr": torch.tensor(rate, dtype=torch.float64) if tensor else rate,
        }
        for rate in rates or (1.0,)
    ]
    return SGD(groups)


def decayed(shape: str, share: float, end: float) -> float:
    shapes = {
        "linear": 1 - share,
        "sqrt": 1 - share**0.5,
        "cosine": math.cos(share * math.pi / 2) ** 2,
    }
    return end + (1 - end) * shapes[shape]


# Schedules of 20 updates with a warm-up of 4, and the factor of update k, counted from 1.
FORMS: dict[str, tuple[Make, Callable[[int], float]]] = {
    "constant": (partial(ConstantRate, warmup=4), lambda k: 1),
    "inverse sqrt": (partial(InverseSqrtDecay, warmup=4), lambda k: (4 / (k - 1)) ** 0.5),
    "linear": (
        partial(LinearDecay, warmup=4, total=20, end=0.1),
        lambda k: decayed("linear", (k - 5) / 16, 0.1),
    ),
    "cosine": (
        partial(CosineDecay, warmup=4, total=20, end=0.1),
        lambda k: decayed("cosine", (k - 5) / 16, 0.1),
    ),
    **{
        f"wsd, {shape}": (
            partial(WarmupStableDecay, warmup=0.2, total=20, decay=0.25, shape=shape, end=0.1),
            lambda k, shape=shape: 1 if k < 16 else decayed(shape, (k - 16) / 5, 0.1),
        )
        for shape in ("linear", "sqrt", "cosine")
    },
}


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_each_update_has_the_rate_of_the_closed_form(name: str, tensor: bool) -> None:
    make, form = FORMS[name]
    optimizer = new_optimizer(0.4, 0.001, tensor=tensor)
    schedule = make(optimizer)
    for update in range(1, 21):
        factor = update / 4 if update <= 4 else form(update)
        actual = [float(group["lr"]) for group in optimizer.param_groups]
        assert actual == pytest.approx([0.4 * factor, 0.001 * factor], rel=1e-12)
        optimizer.step()
        schedule.step()


def test_without_a_warm_up_they_agree_with_torch() -> None:
    ours, theirs = new_optimizer(0.3), new_optimizer(0.3)
    actual = get_rates(ours, 9, CosineDecay(ours, total=9))
    expected = get_rates(theirs, 9, CosineAnnealingLR(theirs, T_max=9))
    assert sum(actual, []) == pytest.approx(sum(expected, []), rel=1e-12)


@pytest.mark.parametrize("make", [CosineDecay, LinearDecay, WarmupStableDecay])
def test_after_the_end_the_rates_stay(make: Callable[..., RunSchedule]) -> None:
    optimizer = new_optimizer()
    rates = get_rates(optimizer, 12, make(optimizer, total=8, end=0.25))
    assert rates[8:] == [[0.25]] * 4


@pytest.mark.parametrize("warmup", [0, 1, 7, 8, 9])
@pytest.mark.parametrize("make", [CosineDecay, LinearDecay, WarmupStableDecay])
def test_warm_ups_of_any_length(make: Callable[..., RunSchedule], warmup: int) -> None:
    optimizer = new_optimizer()
    rates = get_rates(optimizer, 8, make(optimizer, total=8, warmup=warmup))
    assert rates[:warmup] == [[k / warmup] for k in range(1, min(warmup, 8) + 1)]
    assert rates[warmup : warmup + 1] in ([], [[1.0]])


class Rates(Hook):
    """Record the rate of each update."""

    order = 90

    def __init__(self) -> None:
        self.used: list[list[float]] = []

    def on_batch_start(self, state: LoopState, batch: Any) -> None:
        groups = state.optim_wrapper.param_groups
        groups = groups if isinstance(groups, list) else sum(groups.values(), [])
        self.used.append([float(group["lr"]) for group in groups])


def run_rates(
    *makes: tuple[Callable[[Optimizer], Any], By],
    warmup: Any = None,
    accumulate: int = 1,
    epochs: int = 3,
    **settings: Any,
) -> list[float]:
    """Return the rate of each of the four batches of each epoch in a run with the schedules."""
    state, used = new_state(lr=1.0, accumulative_counts=accumulate), Rates()
    optimizer = state.optim_wrapper.optimizer
    pairs = [(make(optimizer), by) for make, by in makes]
    warmups = [] if warmup is None else [Warmup(optimizer, warmup)]
    metric = "error" if any(isinstance(s, ReduceLROnPlateau) for s, _ in pairs) else None
    hook = SchedulerHook(pairs, metric=metric, warmups=warmups)
    train(state, [hook, used], epochs=epochs, **settings)
    return sum(used.used, [])


def test_the_length_is_that_of_the_loop() -> None:
    rates = run_rates((partial(CosineDecay, warmup=0.25), "step"), epochs=4)
    expected = [k / 4 for k in range(1, 5)] + [decayed("cosine", i / 12, 0) for i in range(12)]
    assert rates == pytest.approx(expected, rel=1e-12)


def test_accumulation_counts_updates() -> None:
    rates = run_rates((partial(LinearDecay, warmup="1 epoch"), "step"), accumulate=2, epochs=3)
    assert rates[::2] == rates[1::2] == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25], rel=1e-12)


@pytest.mark.parametrize(
    ("by", "expected"),
    [("epoch", [1] * 4 + [0.5] * 4), ("batch", [1 - k / 8 for k in range(8)])],
)
def test_other_units(by: By, expected: list[float]) -> None:
    assert run_rates((LinearDecay, by), epochs=2) == pytest.approx(expected, rel=1e-12)


def test_the_iteration_loop_knows_its_length_without_the_data() -> None:
    state, used = new_state(lr=1.0), Rates()
    hook = SchedulerHook([(CosineDecay(state.optim_wrapper.optimizer), "step")])
    batches = list(loader())
    endless = (batch for _ in range(9) for batch in batches)
    IterTrainLoop(endless, max_steps=6).run(state, HookList([hook, used]))
    expected = [decayed("cosine", k / 6, 0) for k in range(6)]
    assert sum(used.used, []) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", [CosineDecay, partial(ConstantRate, warmup=0.1)])
def test_an_unknown_length_is_an_error_before_the_first_update(schedule: Make) -> None:
    batches = list(loader())
    with pytest.raises(UnknownLengthError, match="the length of the run is unknown"):
        run_rates((schedule, "step"), dataloader=(batch for batch in batches))


def test_an_unknown_length_with_a_total() -> None:
    batches = list(loader())
    make = partial(LinearDecay, total=4)
    rates = run_rates((make, "step"), dataloader=(batch for batch in batches), epochs=1)
    assert rates == [1, 0.75, 0.5, 0.25]


def test_another_total_is_a_warning_with_both_numbers(caplog: pytest.LogCaptureFixture) -> None:
    run_rates((partial(LinearDecay, total=4), "step"), epochs=2)
    assert "total is 4, but it acts for 8" in caplog.text


def test_phases_longer_than_the_run(caplog: pytest.LogCaptureFixture) -> None:
    run_rates((partial(WarmupStableDecay, warmup=6, decay=3), "step"), epochs=2)
    assert "warmup and decay have 9, but it acts for 8" in caplog.text
    run_rates((partial(StepLR, step_size=9), "epoch"), warmup=9, epochs=2)
    assert "warmup has 9 updates, but the run has 8" in caplog.text


def window(optimizer: Optimizer, **span: int) -> ScheduleWindow:
    return ScheduleWindow(optimizer, partial(LinearDecay, warmup=2), **span)


def test_in_a_range_the_length_is_that_of_the_range() -> None:
    rates = run_rates((partial(window, after=2), "step"), epochs=2)
    assert rates == pytest.approx([1, 1, 0.5, 1, 1, 0.75, 0.5, 0.25], rel=1e-12)
    rates = run_rates((partial(window, after=2, until=6), "step"), epochs=2)
    assert rates == pytest.approx([1, 1, 0.5, 1, 1, 0.5, 0, 0], rel=1e-12)


# Schedules of torch, most of which compute a rate from the previous one.
BEHIND: dict[str, tuple[Callable[[Optimizer], Any], By]] = {
    "step": (partial(StepLR, step_size=2), "epoch"),
    "exponential": (partial(ExponentialLR, gamma=0.9), "step"),
    "poly": (partial(PolyLR, total_iters=12), "step"),
    "lambda": (partial(LambdaLR, lr_lambda=lambda n: 1 / (1 + n)), "batch"),
    "restarts": (partial(CosineAnnealingWarmRestarts, T_0=3), "step"),
    "one cycle": (partial(OneCycleLR, max_lr=2.0, total_steps=12, cycle_momentum=False), "step"),
    "cyclic": (
        partial(CyclicLR, base_lr=0.1, max_lr=1, step_size_up=2, cycle_momentum=False),
        "step",
    ),
    "plateau": (
        partial(ReduceLROnPlateau, patience=0, threshold=1e9, threshold_mode="abs"),
        "epoch",
    ),
    "named": (CosineDecay, "epoch"),
    "range": (
        lambda o: ScheduleWindow(o, partial(ExponentialLR, gamma=0.5), after=1, until=3),
        "epoch",
    ),
}


@pytest.mark.parametrize("name", BEHIND)
def test_a_warm_up_in_front_of_any_schedule(name: str) -> None:
    plain = run_rates(BEHIND[name])
    assert plain != [1.0] * 12
    factors = [min(1, k / 7) for k in range(1, 13)]
    expected = [rate * factor for rate, factor in zip(plain, factors, strict=True)]
    assert run_rates(BEHIND[name], warmup=7) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("length", [0.5, "1.5 epochs", "6 steps", 6])
def test_units_of_a_warm_up(length: Any) -> None:
    rates = run_rates((partial(StepLR, step_size=9), "epoch"), warmup=length)
    assert rates == pytest.approx([min(1, k / 6) for k in range(1, 13)], rel=1e-12)


def test_a_warm_up_in_an_own_loop() -> None:
    optimizer = new_optimizer(0.5)
    schedule = StepLR(optimizer, 1, gamma=0.5)
    warmup, used = Warmup(optimizer, 3), []
    for _ in range(3):
        for _ in range(2):
            used.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            warmup.step()
        with warmup.lifted():
            schedule.step()
    assert used == pytest.approx([0.5 / 3, 1 / 3, 0.25, 0.25, 0.125, 0.125], rel=1e-12)


def test_two_optimizers_have_their_own_schedules() -> None:
    state = new_state(lr=1.0)
    first, second = (SGD(state.model.parameters(), lr=rate) for rate in (1.0, 0.1))
    state.optim_wrapper = OptimWrapperDict(a=OptimWrapper(first), b=OptimWrapper(second))
    state.model.train_step = lambda data, optim: (
        [o.skip_micro_batch() for o in optim.values()] and {}
    )  # type: ignore[method-assign]
    pairs: list[tuple[LRScheduler, By]] = [
        (LinearDecay(first), "step"),
        (StepLR(second, 9), "step"),
    ]
    hook = SchedulerHook(pairs, optimizers={"a": first, "b": second}, warmups=[Warmup(second, 4)])
    used = Rates()
    train(state, [hook, used])
    assert used.used == [[1 - k / 8, pytest.approx(0.1 * min(1, (k + 1) / 4))] for k in range(8)]


def resumed_rates(
    before: Callable[[Optimizer], Any],
    after: Callable[[Optimizer], Any],
    *,
    at: int,
    epochs: int,
) -> list[float]:
    """Return the rates of a run of 8 updates that is stopped, and resumed with other settings."""
    state, used = new_state(lr=1.0), Rates()
    hook = SchedulerHook([(before(state.optim_wrapper.optimizer), "step")])
    train(state, [hook, stop_at(at), used])
    resumed = new_state(lr=1.0)
    other = SchedulerHook([(after(resumed.optim_wrapper.optimizer), "step")])
    other.load_state_dict(hook.state_dict())
    resumed.optim_wrapper.load_state_dict(state.optim_wrapper.state_dict())
    for name in ("step", "iteration", "epoch", "batch"):
        setattr(resumed, name, getattr(state, name))
    train(resumed, [other, used], epochs=epochs)
    return sum(used.used, [])


STABLE = partial(WarmupStableDecay, warmup=2, decay=2)


@pytest.mark.parametrize(
    ("second", "epochs", "shape", "decay"),
    [
        (partial(STABLE, decay=0.25, shape="sqrt"), 4, "sqrt", 4),
        (partial(STABLE, decay=4, shape="cosine"), 2, "cosine", 4),
        (STABLE, 3, "linear", 2),
    ],
)
def test_a_constant_phase_continues_into_another_decay(
    second: Make, epochs: int, shape: str, decay: int, caplog: pytest.LogCaptureFixture
) -> None:
    rates = resumed_rates(STABLE, second, at=4, epochs=epochs)
    begin = epochs * 4 - decay
    decays = [decayed(shape, k / decay, 0) for k in range(decay)]
    assert rates == pytest.approx([0.5, 1, *[1] * (begin - 2), *decays], rel=1e-12)
    assert "has another rate" not in caplog.text


def test_a_constant_schedule_continues_into_a_decay() -> None:
    rates = resumed_rates(partial(ConstantRate, warmup=2), partial(STABLE, decay=4), at=4, epochs=3)
    assert rates == pytest.approx([0.5, *[1] * 8, 0.75, 0.5, 0.25], rel=1e-12)


@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_range_is_resumed(at: int) -> None:
    make = partial(window, after=2)
    rates = resumed_rates(make, make, at=at, epochs=2)
    assert rates == pytest.approx([1, 1, 0.5, 1, 1, 0.75, 0.5, 0.25], rel=1e-12)


def test_a_change_of_the_next_rate_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    rates = resumed_rates(LinearDecay, LinearDecay, at=4, epochs=4)
    assert rates == pytest.approx(
        [*(1 - k / 8 for k in range(4)), *(1 - k / 16 for k in range(4, 16))]
    )
    assert "update 5 has another rate: lr 0.5 -> 0.75" in caplog.text


def test_a_resumed_run_keeps_a_length_that_became_unknown() -> None:
    state = new_state(lr=1.0)
    schedule = LinearDecay(state.optim_wrapper.optimizer)
    schedule.set_length(8)
    other = LinearDecay(new_state(lr=1.0).optim_wrapper.optimizer)
    other.load_state_dict(schedule.state_dict())
    other.set_length(None)
    assert other.plan == (8, 0, None)


def test_a_removed_warm_up_is_refused_at_a_resume() -> None:
    optimizer = new_optimizer()
    pairs: list[tuple[LRScheduler, By]] = [(StepLR(optimizer, 1), "step")]
    saved = SchedulerHook(pairs, warmups=[Warmup(optimizer, 5)]).state_dict()
    with pytest.raises(ValueError, match="1 schedulers with `warmup`"):
        SchedulerHook(pairs).load_state_dict(saved)


@given(st.integers(0, 10**9), st.sampled_from(["step", "epoch"]), st.sampled_from(["", " ", "  "]))
def test_texts_of_spans(number: int, unit: str, gap: str) -> None:
    for plural in ("", "s"):
        assert parse_span("warmup", f"{number}{gap}{unit}{plural}") == (number, unit)


NO_SPANS = st.one_of(
    st.text().filter(lambda text: "step" not in text and "epoch" not in text),
    st.floats().filter(lambda number: not 0 <= number < 1),
    st.sampled_from([True, False, None, "1.5 steps", "-1 epochs", "2 epochs.", "1e3 steps"]),
    st.integers(max_value=-1),
)


@given(NO_SPANS)
def test_other_spans_are_refused(span: Any) -> None:
    with pytest.raises(ValueError, match="warmup must be"):
        parse_span("warmup", span)


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 10**7))
def test_a_share_is_rounded(share: float, total: int) -> None:
    steps = count_steps("warmup", share, total, None)
    assert abs(steps - share * total) <= (1 if share else 0)
    assert steps >= (share > 0)


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (partial(CosineDecay, end=2), "end must be"),
        (partial(CosineDecay, total=0), "total must be"),
        (partial(CosineDecay, warmup=500.0), "write 500"),
        (partial(WarmupStableDecay, decay="two epochs"), "decay must be"),
        (partial(WarmupStableDecay, shape="square"), "shape must be"),
        (InverseSqrtDecay, "warmup or timescale"),
    ],
)
def test_mistakes_in_arguments(make: Make, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        make(new_optimizer())


def test_in_an_own_loop_the_total_is_needed() -> None:
    optimizer = new_optimizer()
    schedule = CosineDecay(optimizer)
    optimizer.step()
    with pytest.raises(UnknownLengthError, match="total"):
        schedule.step()


def test_a_metric_is_not_needed_for_the_length() -> None:
    rates = run_rates((LinearDecay, "step"), val_loop=ValLoop(loader(8), metrics()), epochs=1)
    assert rates == [1, 0.75, 0.5, 0.25]
