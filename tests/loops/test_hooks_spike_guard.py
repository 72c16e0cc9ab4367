"""Outlier steps are skipped on all ranks, as if their batches did not exist."""

from __future__ import annotations

import json
import logging
import math
import random
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import slow
from ranks import RanksError, run_ranks
from spiky_runs import Spiky, differing, flatten, get_samples, make_state, sample_at, train
from torch import nn

from stepwrap.collectives import get_world_size
from stepwrap.loops import (
    CheckpointHook,
    EMAHook,
    GradNormHook,
    Hook,
    LogHook,
    NanGuardHook,
    ProgressHook,
    SpikeError,
    SpikeGuardHook,
    ThroughputHook,
    find_checkpoint,
    load_checkpoint,
)
from stepwrap.wrappers import AmpOptimWrapper, OptimWrapper, SingleDevice

KINDS = (300.0, -1e4, math.nan, math.inf)
WARMUP = 8


def spikes_in(steps: int, count: int, world_size: int, accumulate: int) -> dict[int, float]:
    """Return wild samples by index, each in another step, on a random rank and batch."""
    chosen = random.Random(steps)
    spikes = {}
    for number, step in enumerate(chosen.sample(range(WARMUP + 1, steps + 1), count)):
        rank, batch = chosen.randrange(world_size), chosen.randrange(accumulate)
        index = sample_at(step, rank, world_size, accumulate, batch)
        spikes[index] = KINDS[number % len(KINDS)]
    return spikes


class Skipped(Hook):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_update(self, state: Any) -> None:
        self.steps += [state.step] * state.skipped


def compare(
    kind: str = "ddp", steps: int = 40, count: int = 12, accumulate: int = 1, **options: Any
) -> tuple[list[int], list[str]]:
    """Return the skipped steps, and the differences from a run without their samples."""
    world_size = get_world_size()
    per_step = len(get_samples({1}, world_size, accumulate))
    wild = spikes_in(steps, count, world_size, accumulate)
    expected = sorted({index // per_step + 1 for index in wild})
    options["accumulative_counts"] = accumulate
    noted = Skipped()
    data = Spiky(steps * per_step, wild)
    guard = SpikeGuardHook(warmup=WARMUP)
    state = train(make_state(kind, **options), data, [guard, noted, EMAHook(0.5)])
    assert noted.steps == expected
    assert (state.step, state.iteration) == (steps, steps * accumulate)
    without = Spiky(steps * per_step, wild, without=get_samples(expected, world_size, accumulate))
    other = train(make_state(kind, **options), without, [EMAHook(0.5)])
    names = differing(flatten(state), flatten(other))
    averages = [run_state.stateful["EMAHook"].state_dict()["model"] for run_state in (state, other)]
    return noted.steps, names + differing(*averages)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_spikes_leave_no_trace(accumulate: int) -> None:
    skipped, differences = compare(accumulate=accumulate)
    assert len(skipped) == 12
    assert not differences


@pytest.mark.parametrize("case", [("ddp", 30, 8, 2), ("fsdp", 30, 8, 1)])
def test_spikes_of_one_rank_are_left_out_on_all(case: Any) -> None:
    (rank_0, differences), (second, other_differences) = run_ranks(compare, 2, *case)
    assert rank_0 == second
    assert not differences + other_differences


@pytest.mark.parametrize(
    ("kind", "ranks", "accumulate"),
    slow(("ddp", 2, 1), ("ddp", 3, 2), ("fsdp", 2, 2), ("ddp", 1, 1)),
)
def test_a_hundred_spikes_on_random_ranks(kind: str, ranks: int, accumulate: int) -> None:
    for skipped, differences in run_ranks(compare, ranks, kind, 320, 100, accumulate):
        assert len(skipped) == 100
        assert not differences


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_spikes_leave_no_trace_in_mixed_precision(dtype: str) -> None:
    def amp(optimizer: Any, **options: Any) -> AmpOptimWrapper:
        return AmpOptimWrapper(optimizer, dtype=dtype, device="cpu", **options)

    clip = {"max_norm": 1.0}
    skipped, differences = compare(steps=30, count=8, optim=amp, clip_grad=clip)
    assert len(skipped) == 8
    assert not differences


def test_a_loss_scale_that_is_too_high_is_left_to_its_scaler() -> None:
    def amp(optimizer: Any) -> AmpOptimWrapper:
        return AmpOptimWrapper(optimizer, dtype="float16", device="cpu", loss_scale=scale)

    scale = {"init_scale": 2.0**40}
    noted = Skipped()
    state = train(make_state(optim=amp), Spiky(80), [SpikeGuardHook(warmup=4), noted])
    assert not noted.steps
    assert state.optim_wrapper.loss_scaler.get_scale() < 2.0**30


@pytest.mark.parametrize("watch", ["loss", "grad_norm"])
def test_one_figure_is_enough(watch: str) -> None:
    wild = {sample_at(12, 0, 1): 300.0}
    noted = Skipped()
    train(make_state(), Spiky(80, wild), [SpikeGuardHook(warmup=8, watch=watch), noted])
    assert noted.steps == [12]


def test_logs_hold_the_steps_that_were_made(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.WARNING, "stepwrap")
    hooks = [LogHook(), NanGuardHook(check="all"), SpikeGuardHook(warmup=4), GradNormHook()]
    wild = {sample_at(step, 0, 1): math.nan for step in (7, 8, 9, 12)}
    train(make_state(run_dir=tmp_path), Spiky(60, wild), hooks, log_every_steps=3)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    records = {record["step"]: record for record in map(json.loads, lines)}
    counts = [(step, record["skipped_steps"]) for step, record in records.items()]
    assert counts == [(3, 0), (6, 0), (9, 3), (12, 1), (15, 0)]
    assert "loss" not in records[9]
    losses = [record["loss"] for step, record in records.items() if step != 9]
    assert all(map(math.isfinite, losses))
    skips = [message for message in caplog.messages if message.startswith("skipped step")]
    assert "step 7: loss nan" in skips[0]
    assert "grad_norm nan" in skips[0]
    assert skips[0].count("rank 0") == 2
    assert len(skips) == 4


def test_the_steps_after_an_outlier_are_skipped_too(tmp_path: Path) -> None:
    wild = {sample_at(12, 0, 1): math.nan}
    noted, again = Skipped(), Skipped()
    hooks = [SpikeGuardHook(after=3), noted, CheckpointHook(every_steps=13, keep_last=None)]
    state = train(make_state(run_dir=tmp_path), Spiky(80, wild), hooks)
    assert noted.steps == [12, 13, 14, 15]
    # A run that resumes between them skips the remaining ones.
    resumed = make_state()
    hooks = [SpikeGuardHook(after=3), again]
    resumed.stateful = {"SpikeGuardHook": hooks[0]}
    load_checkpoint(tmp_path / "checkpoints/step_00000013").restore(resumed)
    train(resumed, Spiky(80, wild), hooks)
    assert again.steps == [14, 15]
    assert not differing(flatten(state), flatten(resumed))


def go_back(folder: Path) -> tuple[list[int], list[str], list[str]]:
    """Return the skipped steps, the differences from a run without the samples, the checkpoints."""
    world_size = get_world_size()
    wild = {sample_at(18, world_size - 1, world_size): math.nan}
    size = len(get_samples(range(1, 27), world_size))
    noted = Skipped()
    saver = CheckpointHook(every_steps=5, every_epochs=None, keep_last=None)
    hooks = [
        *(SpikeGuardHook(before=4, after=1), noted, saver),
        *(LogHook(), NanGuardHook(), ProgressHook(), ThroughputHook(), GradNormHook()),
    ]
    state = train(make_state(run_dir=folder), Spiky(size, wild), hooks, log_every_steps=1)
    gone = get_samples(range(14, 20), world_size)
    other = train(make_state(), Spiky(size, wild, without=gone))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == list(range(1, 27))
    saved = sorted(path.name for path in (folder / "checkpoints").glob("*"))
    return noted.steps, differing(flatten(state), flatten(other)), saved


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_back_to_before_the_samples_around(ranks: int, tmp_path: Path) -> None:
    for skipped, differences, saved in run_ranks(go_back, ranks, tmp_path):
        assert skipped == list(range(14, 20))
        assert not differences
        assert saved == [
            "abandoned_step_00000015",
            *(f"step_{step:08d}" for step in (5, 10, 15, 20, 25, 26)),
        ]


class Careful(SingleDevice):
    """A wrapper whose training step ignores errors."""

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        with suppress(Exception):
            return super().train_step(data, optim_wrapper)
        return {}


def test_a_training_step_that_ignores_errors_goes_back(tmp_path: Path) -> None:
    state = make_state(run_dir=tmp_path)
    state.model = Careful(state.model.module)
    noted = Skipped()
    saver = CheckpointHook(every_steps=5, every_epochs=None)
    wild = {sample_at(12, 0, 1): math.nan}
    train(state, Spiky(80, wild), [SpikeGuardHook(before=4), noted, saver])
    assert noted.steps == [8, 9, 10, 11, 12]


def test_without_an_earlier_checkpoint_only_the_step_is_skipped(caplog: Any) -> None:
    noted = Skipped()
    wild = {sample_at(12, 0, 1): math.nan}
    train(make_state(), Spiky(80, wild), [SpikeGuardHook(before=4), noted])
    assert noted.steps == [12]
    assert "no checkpoint before step 8" in caplog.text


def test_too_many_in_a_row_are_an_error() -> None:
    wild = {sample_at(step, 0, 1): math.nan for step in range(12, 20)}
    text = r"at most 3 outliers .* got 4, the last in step 15: loss nan on rank 0.*raise threshold"
    with pytest.raises(SpikeError, match=text):
        train(make_state(), Spiky(80, wild), [SpikeGuardHook(max_in_row=3)])


def raise_on_all(folder: Path) -> None:
    wild = {sample_at(step, 1, 2): math.nan for step in range(3, 9)}
    train(make_state(run_dir=folder), Spiky(80, wild), [SpikeGuardHook(max_in_row=2)])


def test_too_many_in_a_row_are_an_error_on_every_rank(tmp_path: Path) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(raise_on_all, 2, tmp_path)
    reports = caught.value.reports
    assert sorted(reports) == [0, 1]
    assert all(
        re.search("SpikeError: .*2 outliers .*max_in_row", text) for text in reports.values()
    )
    assert all("loss nan on rank 1" in text for text in reports.values())


def test_nothing_is_left_of_the_guard_after_the_training() -> None:
    state = make_state()
    train(state, Spiky(20), [SpikeGuardHook()])
    assert state.optim_wrapper.guard is None
    assert not find_checkpoint(Path("there is none"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"threshold": 0}, "threshold must be above 0, got 0"),
        ({"watch": "norm"}, "watch must be both, loss or grad_norm, got 'norm'"),
        ({"warmup": 1}, r"warmup must be from 2 to window \(128\), got 1"),
        ({"window": 16}, r"warmup must be from 2 to window \(16\), got 32"),
        ({"after": -1}, "after must be at least 0, got -1"),
    ],
)
def test_mistakes_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"SpikeGuardHook: {message}"):
        SpikeGuardHook(**wrong)


def test_an_optimizer_with_a_closure_cannot_be_guarded() -> None:
    state = make_state()
    state.optim_wrapper = OptimWrapper(torch.optim.LBFGS(nn.Linear(2, 2).parameters()))
    with pytest.raises(TypeError, match=r"one OptimWrapper.* got LBFGS; .*train\.skip_steps"):
        train(state, Spiky(20), [SpikeGuardHook()])
