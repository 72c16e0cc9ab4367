"""Values that are not finite are found and named on every rank."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hook_runs import loader, new_state, train
from listeners import on, slow
from ranks import run_ranks
from torch import Tensor, nn

from stepwrap.collectives import get_rank
from stepwrap.loops import CheckpointHook, LoggerHook, LogHook, NanGuardHook, NonFiniteError
from stepwrap.loops.hook import Hook, Scalars
from stepwrap.loops.state import LoopState
from stepwrap.registry import HOOKS
from stepwrap.wrappers import AmpOptimWrapper


class PoisonHook(Hook):
    """Make the inputs of an update, or a parameter after it, infinite or NaN."""

    def __init__(self, *, step: int, param: str = "", rank: int = 0) -> None:
        self._step, self._param, self._rank = step, param, rank

    def on_batch_start(self, state: LoopState, batch: list[Tensor]) -> None:
        if self._hits(state.step + 1) and not self._param:
            batch[1][0] = float("nan")

    def on_update(self, state: LoopState) -> None:
        if self._hits(state.step) and self._param:
            state.model.module.get_parameter(self._param).data[0] = float("inf")

    def _hits(self, step: int) -> bool:
        return step == self._step and get_rank() == self._rank


class WithSpare(nn.Linear):
    """A model with a parameter that no output depends on."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.spare = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("settings", "bad", "log_every_steps", "samples", "bad_step"),
    [
        # Found with the record of the interval.
        ({}, 3, 4, 16, 4),
        ({}, 1, 3, 16, 3),
        # Found at the end, long before the next record.
        ({}, 3, 1000, 1200, 300),
        ({"every_steps": 1}, 2, 100, 16, 2),
    ],
)
def test_the_first_bad_loss_is_named(
    settings: dict[str, int], bad: int, log_every_steps: int, samples: int, bad_step: int
) -> None:
    state, hooks = new_state(), [NanGuardHook(**settings), PoisonHook(step=bad)]
    options = {"dataloader": loader(samples), "log_every_steps": log_every_steps}
    weights = "parameter 'net.weight' has 3 of 3 values not finite; "
    with pytest.raises(NonFiniteError, match=f"^loss is nan at step {bad} on rank 0; {weights}"):
        train(state, hooks, epochs=1, **options)
    assert state.step == bad_step


def test_weights_that_no_loss_shows_are_found_at_the_end() -> None:
    state = new_state(net=WithSpare(3, 1))
    text = r"^parameter 'net.spare' has 1 of 2 values not finite at step 8 on rank 0; lower"
    with pytest.raises(NonFiniteError, match=text):
        train(state, [NanGuardHook(), PoisonHook(step=2, param="net.spare")])
    assert state.epoch == 2


def test_a_bad_loss_is_allowed_if_the_scaler_skips_its_update() -> None:
    state = new_state()
    optimizer = torch.optim.SGD(state.model.parameters(), lr=0.01)
    state.optim_wrapper = AmpOptimWrapper(optimizer, dtype="float16", device="cpu")
    train(state, [NanGuardHook(), PoisonHook(step=3)], log_every_steps=1)
    assert state.step == 8
    with pytest.raises(NonFiniteError, match="loss.* nan .*step 3 .*rank 0; lower"):
        train(new_state(), [NanGuardHook(check="loss"), PoisonHook(step=3)], log_every_steps=1)


def test_a_bad_parameter_is_named() -> None:
    guard, poison = NanGuardHook(check="all"), PoisonHook(step=4, param="net.bias")
    text = r"parameter 'net.bias' has 1 of 1 values not finite at step 4 on rank 0"
    with pytest.raises(NonFiniteError, match=text):
        train(new_state(), [guard, poison])


def test_a_bad_complex_parameter_is_named() -> None:
    net = WithSpare(3, 1)
    net.spare = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    poison = PoisonHook(step=4, param="net.spare")
    with pytest.raises(NonFiniteError, match=r"parameter 'net\.spare' .*1 of 2 .*not finite"):
        train(new_state(net=net), [NanGuardHook(check="all"), poison])


def test_a_bad_log_value_is_named() -> None:
    bad = on(collect_logs=lambda state, scalars: scalars.update(ratio=float("inf")))
    train(new_state(), [NanGuardHook(check="loss"), bad])
    with pytest.raises(NonFiniteError, match="ratio is inf .*step 2 .*rank 0"):
        train(new_state(), [NanGuardHook(check="all"), bad])


@pytest.mark.parametrize("masked", [False, True])
def test_a_healthy_run_logs_nothing(masked: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Infinities in a buffer, for example a mask, are allowed."""
    caplog.set_level(logging.INFO)
    net = nn.Linear(3, 1)
    if masked:
        net.register_buffer("mask", torch.full((2,), float("-inf")))
    guards = [NanGuardHook(check="all"), NanGuardHook(check="all", every_steps=1)]
    state = train(new_state(net=net), guards)
    assert (state.step, caplog.messages) == (8, [])


def test_continuing_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    state = train(new_state(), [NanGuardHook(action="warn"), PoisonHook(step=3)])
    assert state.step == 8
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    message = "loss is nan at step 3 on rank 0; parameter 'net.weight' has 3 of 3 values not finite"
    assert caplog.messages == [message]


def test_the_bad_record_is_on_file_and_no_bad_checkpoint(tmp_path: Path) -> None:
    hooks: list[Hook] = [NanGuardHook(), LogHook(), CheckpointHook(), PoisonHook(step=2)]
    with pytest.raises(NonFiniteError):
        train(new_state(run_dir=tmp_path), hooks)
    assert '"step": 2' in (tmp_path / "metrics.jsonl").read_text()
    assert not (tmp_path / "checkpoints").exists()


def test_every_logger_gets_the_bad_record_first() -> None:
    shipped = [
        hook_class
        for hook_class in HOOKS.module_dict.values()
        if hook_class.__module__.startswith("stepwrap.")
    ]
    loggers = [
        LoggerHook,
        *(hook_class for hook_class in shipped if issubclass(hook_class, LoggerHook)),
    ]
    assert len(loggers) >= 5
    assert [
        hook_class.__name__ for hook_class in loggers if hook_class.order >= NanGuardHook.order
    ] == []


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"check": "losses"}, r"check must be one of \('weights', 'loss', 'all'\), got 'losses'"),
        ({"action": "stop"}, r"action must be one of \('raise', 'warn'\), got 'stop'"),
        ({"every_steps": 0}, "every_steps must be a whole number >= 1"),
        ({"every_secs": 0}, "every_secs must be > 0"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        NanGuardHook(**settings)


def test_a_check_each_pass_comes_before_its_checkpoint(tmp_path: Path) -> None:
    state = new_state(run_dir=tmp_path)
    hooks: list[Hook] = [NanGuardHook(every_epochs=2), CheckpointHook(), PoisonHook(step=2)]
    with pytest.raises(NonFiniteError, match="loss is nan .*step 2 .*rank 0"):
        train(state, hooks, epochs=3)
    assert (state.step, state.epoch) == (8, 2)
    assert not (tmp_path / "checkpoints" / "step_00000008").exists()


def test_a_check_by_the_clock() -> None:
    state = new_state()
    with pytest.raises(NonFiniteError, match="loss is nan .*step 1 .*rank 0"):
        train(state, [NanGuardHook(every_secs=1e-9), slow(0.06), PoisonHook(step=1)], epochs=1)


def test_a_model_without_a_wrapper() -> None:
    model, guard = nn.Linear(2, 1), NanGuardHook(check="all", every_steps=1)
    model.bias.data[0] = float("nan")
    scalars: Scalars = {}
    state = LoopState(model=nn.Linear(2, 1), step=1)
    guard.collect_logs(state, scalars)
    expected = torch.cat([p.flatten() for p in state.model.parameters()]).norm().item()
    assert float(scalars["param_norm"]) == pytest.approx(expected)
    with pytest.raises(NonFiniteError, match="parameter 'bias' .*1 of 1 .*not finite"):
        guard.on_update(LoopState(model=model, step=1))


@pytest.mark.gpu
def test_values_on_several_devices() -> None:
    guard = NanGuardHook(check="all", every_steps=1)
    state = LoopState(model=nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1).cuda()), step=1)
    guard.collect_logs(state, {})
    logs = {"ratio": torch.tensor(1.0), "loss": torch.tensor(float("nan"), device="cuda")}
    state.logs.append((1, logs))
    with pytest.raises(NonFiniteError, match="loss is nan"):
        guard.on_update(state)
    state.model[1].bias.data[0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"parameter '1.bias' has 1 of 1"):
        NanGuardHook(check="all", every_steps=1).on_update(state)


def _error_of_rank(settings: dict[str, Any], poison: dict[str, Any]) -> str:
    try:
        train(new_state(), [NanGuardHook(**settings), PoisonHook(rank=1, **poison)])
    except NonFiniteError as error:
        return str(error)
    return "none"


BAD_BIAS = {"step": 2, "param": "net.bias"}


@pytest.mark.parametrize(
    ("settings", "poison"),
    [
        *(({"every_steps": 1}, {"step": 1}), ({"check": "all"}, {"step": 1}), ({}, {"step": 1})),
        *(({"check": "all", "every_steps": 1}, BAD_BIAS), ({"check": "all"}, BAD_BIAS)),
    ],
    ids=repr,
)
def test_a_bad_value_of_rank_1_ends_both_ranks(
    settings: dict[str, Any], poison: dict[str, Any]
) -> None:
    rank_0, second = run_ranks(_error_of_rank, 2, settings, poison)
    assert rank_0 == second
    text = "loss is nan at step 1 on rank 1; "
    if poison is BAD_BIAS:
        text = "parameter 'net.bias' has 1 of 1 values not finite at step 2 on rank 1"
    assert rank_0.startswith(text)
