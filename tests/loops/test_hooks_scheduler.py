"""Learning-rate schedules, compared with the same schedules stepped by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hook_runs import loader, new_state, train
from hook_runs import rates as get_rates
from listeners import stop_at
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from stepwrap.loops import (
    CheckpointHook,
    EpochTrainLoop,
    GradNormHook,
    SchedulerHook,
    ScheduleWindow,
)
from stepwrap.loops.checkpoints.checkpoint import list_checkpoints
from stepwrap.loops.checkpoints.restore import load_checkpoint
from stepwrap.loops.hook import Hook, HookList
from stepwrap.loops.state import LoopState
from stepwrap.loops.train import IterTrainLoop
from stepwrap.wrappers import (
    AmpOptimWrapper,
    BaseModel,
    OptimWrapper,
    OptimWrapperDict,
    SingleDevice,
)


class RatesHook(Hook):
    """Record the rate of each update, and the rates in the records."""

    # After the schedule, which may act when a batch starts.
    order = 90

    def __init__(self) -> None:
        self.used: list[float] = []
        self.logged: list[dict[str, float]] = []

    def on_batch_start(self, state: LoopState, batch: Any) -> None:
        self.used.append(get_optimizer(state).param_groups[0]["lr"])

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        self.logged.append({k: v for k, v in record.items() if k.startswith("lr")})


def get_optimizer(state: LoopState) -> Optimizer:
    assert isinstance(state.optim_wrapper, OptimWrapper)
    return state.optim_wrapper.optimizer


def warm_up_and_cosine(optimizer: Optimizer) -> LRScheduler:
    schedulers = [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 5)]
    return SequentialLR(optimizer, schedulers, milestones=[3])


def schedule_plainly(
    make: Callable[[Optimizer], LRScheduler], steps: int, *, lr: float
) -> list[float]:
    """Return the rates of `make`'s schedule for successive steps."""
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    return [rate for (rate,) in get_rates(optimizer, steps, make(optimizer))]


def test_by_step() -> None:
    state, rates = new_state(), RatesHook()
    schedule = SchedulerHook([(warm_up_and_cosine(get_optimizer(state)), "step")])
    train(state, [schedule, rates])
    assert rates.used == schedule_plainly(warm_up_and_cosine, 8, lr=0.05)


@pytest.mark.parametrize(
    ("by", "accumulate", "powers"),
    [("step", 2, [0, 0, 1, 1, 2, 2, 3, 3]), ("epoch", 1, [0] * 4 + [1] * 4)],
)
def test_by_step_counts_updates_and_by_epoch_passes(
    by: str, accumulate: int, powers: list[int]
) -> None:
    state, rates = new_state(accumulative_counts=accumulate), RatesHook()
    train(state, [SchedulerHook([(StepLR(get_optimizer(state), 1), by)]), rates])
    assert rates.used == pytest.approx([0.05 * 0.1**power for power in powers])


def test_by_epoch_in_the_iteration_loop_counts_passes_over_the_data() -> None:
    state, rates = new_state(), RatesHook()
    schedule = SchedulerHook([(StepLR(get_optimizer(state), 1), "epoch")])
    IterTrainLoop(loader(), max_steps=10).run(state, HookList([schedule, rates]))
    assert rates.used == pytest.approx([0.05] * 4 + [0.005] * 4 + [0.0005] * 2)


def test_plateau_follows_the_metric() -> None:
    state = new_state(lr=0.0)
    get_optimizer(state).param_groups[0]["lr"] = 1e-30
    plateau = ReduceLROnPlateau(get_optimizer(state), patience=0, min_lr=0, eps=0)
    train(state, [SchedulerHook([(plateau, "epoch")], metric="error")], epochs=3)
    assert get_optimizer(state).param_groups[0]["lr"] == pytest.approx(1e-32)


def test_a_plateau_against_the_direction_of_its_metric_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = new_state()
    plateaus = [ReduceLROnPlateau(get_optimizer(state), mode=mode) for mode in ("min", "max")]
    train(state, [SchedulerHook([(plateau, "epoch") for plateau in plateaus], metric="error")])
    message = "ReduceLROnPlateau: mode is 'max', but lower values of 'error' are better"
    assert caplog.messages == [message]


def test_plateau_needs_a_metric_that_exists() -> None:
    state = new_state()
    plateau = ReduceLROnPlateau(get_optimizer(state))
    with pytest.raises(ValueError, match="ReduceLROnPlateau needs `metric`"):
        SchedulerHook([(plateau, "epoch")])
    with pytest.raises(ValueError, match="got 'acc'; .*computed: error"):
        train(state, [SchedulerHook([(plateau, "epoch")], metric="acc")])


def test_rates_are_logged() -> None:
    state, rates = new_state(), RatesHook()
    train(state, [SchedulerHook([(StepLR(get_optimizer(state), 4), "step")]), rates])
    assert [record["lr"] for record in rates.logged] == pytest.approx([0.05, 0.05, 0.005, 0.005])


@pytest.mark.parametrize("by", ["batch", "step", "epoch"])
def test_the_logged_rate_is_the_one_that_the_update_used(by: str) -> None:
    state, rates, used = new_state(accumulative_counts=2), RatesHook(), []
    optimizer = get_optimizer(state)
    optimizer.register_step_pre_hook(lambda opt, *_: used.append(opt.param_groups[0]["lr"]))
    schedule = SchedulerHook([(StepLR(optimizer, 1, gamma=0.5), by)])
    train(state, [schedule, rates], log_every_steps=1)
    assert len(used) == 4
    assert [record["lr"] for record in rates.logged] == used


@pytest.mark.parametrize("validates", [True, False])
def test_the_record_at_the_end_has_the_rate_of_the_last_update(validates: bool) -> None:
    state, rates = new_state(), RatesHook()
    optimizer = get_optimizer(state)
    schedule = SchedulerHook([(StepLR(optimizer, 1, gamma=0.5), "epoch")])
    settings = {} if validates else {"val_loop": None}
    train(state, [schedule, rates], epochs=3, log_every_steps=50, **settings)
    assert rates.used[-1] == 0.05 * 0.25
    assert [record["lr"] for record in rates.logged] == rates.used[-1:]
    # The next record after the same update number of another session has its own rate.
    train(state, [schedule, rates], epochs=4, log_every_steps=3, val_loop=None)
    assert [record["lr"] for record in rates.logged[1:]] == [0.05 * 0.125] * 2


class _StopAfterEval(Hook):
    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        if state.epoch == 2:
            state.request_stop("enough")


@pytest.mark.parametrize("with_epochs", [True, False])
def test_the_record_at_an_early_stop_has_the_rate_of_the_last_update(with_epochs: bool) -> None:
    state, rates = new_state(), RatesHook()
    optimizer = get_optimizer(state)
    # The error falls, so that a plateau of mode "max" acts from the second validation on.
    schedules: list[Any] = [(ReduceLROnPlateau(optimizer, mode="max", patience=0), "epoch")]
    if with_epochs:
        schedules.append((StepLR(optimizer, 1, gamma=0.5), "epoch"))
    schedule = SchedulerHook(schedules, metric="error")
    train(state, [schedule, rates, _StopAfterEval()], epochs=9, log_every_steps=50)
    assert len(rates.used) == 8
    assert optimizer.param_groups[0]["lr"] < rates.used[-1] / 5
    assert [record["lr"] for record in rates.logged] == rates.used[-1:]


def test_each_group_is_logged() -> None:
    state, rates = new_state(), RatesHook()
    get_optimizer(state).add_param_group({"params": [torch.zeros(1)], "lr": 0.5})
    train(state, [SchedulerHook([(StepLR(get_optimizer(state), 9), "step")]), rates], epochs=1)
    assert rates.logged[0] == pytest.approx({"lr/0": 0.05, "lr/1": 0.5})


def test_named_optimizers_and_groups_are_logged_by_name() -> None:
    state, rates = new_state(), RatesHook()
    other = SGD([{"params": [torch.zeros(1)], "name": "head"}, {"params": [torch.ones(1)]}], lr=3.0)
    schedules = [(StepLR(get_optimizer(state), 9), "step")]
    hook = SchedulerHook(schedules, optimizers={"net": get_optimizer(state), "other": other})
    train(state, [hook, rates], epochs=1)
    expected = {"lr/net": 0.05, "lr/other/head": 3.0, "lr/other/1": 3.0}
    assert rates.logged[0] == pytest.approx(expected)


@pytest.mark.parametrize("fused", [False, True])
def test_first_updates_that_a_scaler_skips_neither_warn_nor_shift_the_schedule(fused: bool) -> None:
    used: list[tuple[int, float]] = []
    state = new_state()
    optimizer = SGD(state.model.parameters(), lr=0.05, fused=fused)
    scaling = {"init_scale": 2.0**17, "growth_interval": 1000}
    state.optim_wrapper = AmpOptimWrapper(
        optimizer, dtype=torch.float16, device="cpu", loss_scale=scaling
    )
    optimizer.register_step_post_hook(
        lambda o, *_: used.append((state.step, o.param_groups[0]["lr"]))
    )
    schedule = SchedulerHook([(warm_up_and_cosine(optimizer), "step")])
    train(state, [schedule, GradNormHook()], epochs=3)
    # A fused optimizer is called and skips the update itself.
    assert fused or len(used) < 12
    rates = schedule_plainly(warm_up_and_cosine, 12, lr=0.05)
    assert used == [(step, rates[step]) for step, _ in used]


def test_the_schedule_continues_after_a_resume() -> None:
    def run(epochs: int, restored: dict[str, Any] | None) -> tuple[list[float], dict[str, Any]]:
        state, rates = new_state(), RatesHook()
        hook = SchedulerHook([(warm_up_and_cosine(get_optimizer(state)), "step")])
        if restored is not None:
            state.load_state_dict(restored["counters"])
            get_optimizer(state).load_state_dict(restored["optimizer"])
            hook.load_state_dict(restored["hook"])
        train(state, [hook, rates], epochs=epochs)
        states = {"counters": state.state_dict(), "hook": hook.state_dict()}
        return rates.used, {**states, "optimizer": get_optimizer(state).state_dict()}

    rates_before, saved = run(1, None)
    second, _ = run(2, saved)
    assert rates_before + second == run(2, None)[0]


def test_another_number_of_schedulers_is_refused() -> None:
    optimizer = get_optimizer(new_state())
    hook = SchedulerHook([(StepLR(optimizer, 1), "step")])
    with pytest.raises(ValueError, match="which has 1 schedulers, got 0"):
        SchedulerHook([]).load_state_dict(hook.state_dict())


class _Pair(BaseModel):
    """Two layers, each with an optimizer; the second one is used in some batches only."""

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.a, self.b, self.every, self.batches = nn.Linear(2, 1), nn.Linear(2, 1), every, 0

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, torch.Tensor]:
        self.batches += 1
        names = "ab" if self.batches % self.every == 0 else "a"
        for name in names:
            with optim_wrapper[name].optim_context(self):
                loss = getattr(self, name)(data[0]).square().mean()
            optim_wrapper[name].update_params(loss)
        return {"loss": loss.detach()}


@pytest.mark.parametrize(("window", "every"), [(4, 1), (1, 4), (2, 2), (1, 1)])
def test_a_schedule_counts_the_updates_of_its_optimizer(window: int, every: int) -> None:
    model = _Pair(every)
    a, b = (SGD(layer.parameters(), lr=1.0) for layer in (model.a, model.b))
    optim_wrapper = OptimWrapperDict(
        a=OptimWrapper(a), b=OptimWrapper(b, accumulative_counts=window)
    )
    state = LoopState(model=SingleDevice(model), optim_wrapper=optim_wrapper)
    hook = SchedulerHook([(StepLR(optimizer, 1, 0.5), "step") for optimizer in (a, b)])
    EpochTrainLoop([[torch.ones(1, 2)]] * 8, max_epochs=1).run(state, HookList([hook]))
    assert a.param_groups[0]["lr"] == 0.5**8
    assert b.param_groups[0]["lr"] == 0.5 ** (8 // (window * every))


def _windows(order: Sequence[int], until: int = 4) -> SchedulerHook:
    optimizer = get_optimizer(new_state())
    optimizer.step()
    ranges: list[dict[str, Any]] = [{"until": until}, {"after": until}]
    factors = (lambda optimizer: StepLR(optimizer, 1, 0.5), lambda optimizer: StepLR(optimizer, 2))
    windows = [
        ScheduleWindow(optimizer, make, **span) for make, span in zip(factors, ranges, strict=True)
    ]
    return SchedulerHook([(windows[index], "step") for index in order])


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_ranges_of_one_class_are_restored_in_any_order() -> None:
    saved = _windows([0, 1])
    for scheduler in saved._schedulers:
        for _ in range(6):
            scheduler.step()
    restored = _windows([1, 0])
    restored.load_state_dict(saved.state_dict())
    states = restored.state_dict()["schedulers"]
    assert states == saved.state_dict()["schedulers"][::-1]
    # The range of the checkpoint applies, as the message of a resumed run says.
    longer = _windows([0, 1], until=8)
    longer.load_state_dict(saved.state_dict())
    assert [window.until for window in longer._schedulers] == [4, None]


def test_the_state_of_another_class_is_refused() -> None:
    optimizer = get_optimizer(new_state())
    saved = SchedulerHook([(StepLR(optimizer, 1), "step")]).state_dict()
    other = SchedulerHook([(ExponentialLR(optimizer, 0.9), "step")])
    with pytest.raises(ValueError, match=r"schedulers\[0\] is a ExponentialLR, .* StepLR"):
        other.load_state_dict(saved)


def test_a_schedule_that_counts_batches_needs_the_same_window() -> None:
    saved = SchedulerHook([(StepLR(get_optimizer(new_state()), 1), "batch")])
    train(new_state(accumulative_counts=2), [saved], epochs=1)
    state = new_state()
    resumed = SchedulerHook([(StepLR(get_optimizer(state), 1), "batch")])
    resumed.load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match="an update had 2 .* has 1 now"):
        train(state, [resumed], epochs=2)


def test_the_unit_is_checked() -> None:
    scheduler = StepLR(get_optimizer(new_state()), 1)
    with pytest.raises(ValueError, match="StepLR: by .*'batch', 'step' or 'epoch', got 'pass'"):
        SchedulerHook([(scheduler, "pass")])  # type: ignore[list-item]


def epochs_with_a_plateau(
    folder: Path, *, epochs: int, stop: int = -1, resume: bool = False
) -> list[float]:
    """Train epochs of 4 batches with 3 batches per update; return the rates of all batches."""
    state, rates = new_state(run_dir=folder, accumulative_counts=3), RatesHook()
    optimizer = get_optimizer(state)
    plateau = ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.7)
    cosine = CosineAnnealingLR(optimizer, 8, eta_min=0.02)
    schedule = SchedulerHook([(cosine, "epoch"), (plateau, "epoch")], metric="error")
    state.stateful["hooks.scheduler"] = schedule
    if resume:
        load_checkpoint(list_checkpoints(folder / "checkpoints")[0][0]).restore(state)
    train(state, [schedule, CheckpointHook(every_epochs=None), stop_at(stop), rates], epochs=epochs)
    return [*rates.used, optimizer.param_groups[0]["lr"]]


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 7, 8])
def test_an_epoch_schedule_with_a_plateau_resumes_exactly(tmp_path: Path, stop: int) -> None:
    uninterrupted = epochs_with_a_plateau(tmp_path / "whole", epochs=6)
    before = epochs_with_a_plateau(tmp_path, epochs=6, stop=stop)
    second = epochs_with_a_plateau(tmp_path, epochs=6, resume=True)
    assert before[:-1] + second == uninterrupted


@pytest.mark.parametrize("max_steps", [3, 4, 5, 6, 8])
def test_an_extended_iteration_run_steps_once_a_pass(tmp_path: Path, max_steps: int) -> None:
    def run(folder: Path, steps: int, *, resume: bool = False) -> list[float]:
        state, rates = new_state(run_dir=folder), RatesHook()
        schedule = SchedulerHook([(StepLR(get_optimizer(state), 1), "epoch")])
        state.stateful["hooks.scheduler"] = schedule
        if resume:
            load_checkpoint(list_checkpoints(folder / "checkpoints")[0][0]).restore(state)
        hooks = [schedule, CheckpointHook(), rates]
        IterTrainLoop(loader(), max_steps=steps).run(state, HookList(hooks))
        return rates.used

    before = run(tmp_path, max_steps)
    assert before + run(tmp_path, 13, resume=True) == run(tmp_path / "whole", 13)
