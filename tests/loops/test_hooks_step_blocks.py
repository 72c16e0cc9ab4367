"""Blocks of compiled steps do not change a run's weights, records, checkpoints or stops."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_parts import assert_identical, get_weights, make_data, make_loader, make_state
from ranks import run_ranks
from torch import nn

from stepwrap.loops import (
    CheckpointHook,
    EMAHook,
    EpochTrainLoop,
    Hook,
    HookList,
    IterTrainLoop,
    LogHook,
    LoopState,
    MeanLoss,
    SchedulerHook,
    StepBlocksHook,
    ValLoop,
    build_loader,
    find_checkpoint,
    load_checkpoint,
)
from stepwrap.wrappers import OptimWrapper, compile_step

# The batches of an epoch; the last one has a single sample.
BATCHES = 21


def compiled_state(run_dir: Path | None = None, accumulate: int = 1) -> LoopState:
    state = make_state(run_dir=run_dir, accumulate=accumulate, dropout=0.2)
    compile_step(state.model, min_steps=0)
    optimizer = torch.optim.AdamW(state.model.parameters(), lr=0.01)
    state.optim_wrapper = OptimWrapper(optimizer, accumulate, clip_grad={"max_norm": 0.5})
    return state


def our_hooks(state: LoopState) -> list[Any]:
    optimizer = state.optim_wrapper.optimizer
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    scheduler = SchedulerHook([(schedule, "step")])
    average = EMAHook(0.9)
    state.stateful |= {"scheduler": scheduler, "ema": average}
    saving = CheckpointHook(every_steps=10, every_epochs=1, keep_last=100)
    return [scheduler, average, LogHook(), saving]


class Interrupted:
    """A loader that sends a signal while one of its batches is read."""

    def __init__(self, loader: Any, at: int) -> None:
        self.loader, self.batch_sampler, self.at = loader, loader.batch_sampler, at

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.loader):
            if index == self.at:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch


def run(  # noqa: PLR0913
    steps: int,
    run_dir: Path,
    *hooks: Hook,
    loop: str = "epochs",
    accumulate: int = 1,
    interrupted_at: int | None = None,
    resumes: bool = False,
    **options: Any,
) -> LoopState:
    state = compiled_state(run_dir, accumulate)
    loader: Any = make_loader(2 * BATCHES - 1, shuffle=True, seed=4)
    if interrupted_at is not None:
        loader = Interrupted(loader, interrupted_at)
    options = {"log_every_steps": 7, **options}
    options["val_loop"] = ValLoop(build_loader(make_data(9), batch_size=8), {"loss": MeanLoss()})
    train_loop: Any = (
        EpochTrainLoop(loader, max_epochs=2, **options)
        if loop == "epochs"
        else IterTrainLoop(loader, max_steps=50, val_interval=12, **options)
    )
    hook_list = HookList([*our_hooks(state), StepBlocksHook(steps), *hooks])
    if resumes:
        path = find_checkpoint(run_dir)
        assert path is not None
        load_checkpoint(path).restore(state)
    train_loop.run(state, hook_list)
    return state


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in lines]


def read_checkpoints(run_dir: Path) -> dict[str, Any]:
    """Return the content of each checkpoint without the clock."""
    checkpoints = [load_checkpoint(file.parent) for file in run_dir.glob("**/checkpoint.json")]
    assert checkpoints
    return {
        f"{checkpoint.path.name}/{stem}": checkpoint.read(stem)
        for checkpoint in checkpoints
        for stem in checkpoint.stems
    }


def assert_same(actual: Any, expected: Any, name: str = "") -> None:
    """Compare nested containers, tensors bit by bit."""
    if isinstance(actual, dict):
        assert actual.keys() == expected.keys(), name
        for key in actual:
            if key != "clock_s":
                assert_same(actual[key], expected[key], f"{name}.{key}")
    elif isinstance(actual, (list, tuple)):
        assert len(actual) == len(expected), name
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            assert_same(*pair, f"{name}.{index}")
    elif isinstance(actual, torch.Tensor):
        assert torch.equal(actual, expected), name
    else:
        assert repr(actual) == repr(expected), name


def assert_same_runs(tmp_path: Path, *hooks: Hook, **options: Any) -> LoopState:
    usual = run(1, tmp_path / "usual", *hooks, **options)
    state = run(32, tmp_path / "blocks", *hooks, **options)
    # One program for each number of samples and, with accumulation, each place in a window.
    assert 0 < len(state.model.batch_runner.programs) <= 4
    assert_identical(get_weights(usual), get_weights(state))
    assert read_records(tmp_path / "usual") == read_records(tmp_path / "blocks")
    assert read_checkpoints(tmp_path / "usual")
    assert_same(read_checkpoints(tmp_path / "usual"), read_checkpoints(tmp_path / "blocks"))
    return state


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["epochs", "steps"])
def test_weights_records_and_checkpoints_are_the_same(tmp_path: Path, loop: str) -> None:
    assert_same_runs(tmp_path, loop=loop)


@pytest.mark.slow
def test_with_accumulation_and_steps_that_are_skipped(tmp_path: Path) -> None:
    assert_same_runs(tmp_path, accumulate=2, skip_steps=[5, "9-11"])


@pytest.mark.slow
def test_a_run_that_is_stopped_in_a_block_resumes_exactly(tmp_path: Path) -> None:
    uninterrupted = run(32, tmp_path / "whole")
    stopped = run(32, tmp_path / "parts", interrupted_at=11)
    # It stops after the step of the batch that was being read.
    assert (stopped.step, stopped.signal) == (12, signal.SIGTERM)
    resumed = run(32, tmp_path / "parts", resumes=True)
    assert_identical(get_weights(uninterrupted), get_weights(resumed))
    assert read_records(tmp_path / "whole") == read_records(tmp_path / "parts")


class Thaw(Hook):
    """Disable dropout at an event after some updates."""

    def __init__(self, event: str, step: int) -> None:
        self.step = step
        setattr(self, event, self.change)

    def change(self, state: LoopState, *_: Any) -> None:
        if state.step >= self.step:
            dropout: Any = state.model.module.net[2]
            assert isinstance(dropout, nn.Dropout)
            dropout.p = 0.0


@pytest.mark.slow
@pytest.mark.parametrize("event", ["on_update", "on_log", "on_eval_end"])
def test_changes_by_hooks_take_effect(
    tmp_path: Path, event: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "stepwrap")
    assert_same_runs(tmp_path, Thaw(event, 12), loop="steps")
    assert ("has no effect: Thaw" in caplog.text) is (event == "on_update")


def test_a_step_that_is_not_compiled_gains_nothing(caplog: pytest.LogCaptureFixture) -> None:
    weights = []
    for steps in (1, 8):
        state = make_state()
        EpochTrainLoop(make_loader(), max_epochs=2).run(state, HookList([StepBlocksHook(steps)]))
        weights.append(get_weights(state))
    assert_identical(*weights)
    (line,) = (message for message in caplog.messages if "StepBlocksHook" in message)
    assert re.search("no effect: .*compile: step", line)


@pytest.mark.parametrize("wrong", [0, -1, True, "32", 1.5])
def test_wrong_values(wrong: Any) -> None:
    with pytest.raises(ValueError, match="StepBlocksHook: steps must .*>= 1, got"):
        StepBlocksHook(wrong)


def _train_on_ranks(steps: int) -> dict[str, torch.Tensor]:
    state = compiled_state()
    loop = EpochTrainLoop(make_loader(83), max_epochs=2)
    loop.run(state, HookList([StepBlocksHook(steps)]))
    assert state.model.batch_runner.programs
    return get_weights(state)


@pytest.mark.slow
def test_two_ranks() -> None:
    usual, blocks = (run_ranks(_train_on_ranks, 2, steps) for steps in (1, 32))
    for actual, expected in zip(usual, blocks, strict=True):
        assert_identical(actual, expected)
