"""Updates with gradients that are not finite are skipped on all ranks, or end the run."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_runs import Follow, wrapped
from marks import slow
from ranks import RanksError, run_ranks
from spiky_runs import BATCH, Spiky, differing, flatten, get_samples, make_state, sample_at, train
from torch import nn
from torch.utils.data import TensorDataset

from stepwrap.collectives import get_world_size
from stepwrap.loops import (
    CheckpointHook,
    EMAHook,
    EpochTrainLoop,
    GradGuardHook,
    HookList,
    LogHook,
    LoopState,
    NonFiniteError,
    SpikeGuardHook,
    build_loader,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from stepwrap.wrappers import AmpOptimWrapper, OptimWrapper, SupervisedModel

STEPS, BAD = 20, {3: math.nan, 4: math.inf, 11: -math.inf}


def spikes(accumulate: int = 1) -> dict[int, float]:
    """Return the targets that make the gradients of some steps NaN, on the last rank."""
    ranks = get_world_size()
    return {sample_at(step, ranks - 1, ranks, accumulate): value for step, value in BAD.items()}


def compare(kind: str, accumulate: int = 1, **options: Any) -> list[str]:
    """Return the differences from a run without the samples of the skipped steps."""
    ranks, wild = get_world_size(), spikes(accumulate)
    size = len(get_samples(range(STEPS), ranks, accumulate))
    options["accumulative_counts"] = accumulate
    state = train(make_state(kind, **options), Spiky(size, wild), [GradGuardHook(), EMAHook(0.5)])
    assert state.step == STEPS
    gone = get_samples([*BAD], ranks, accumulate)
    # In float16, both runs skip the overflows of the first steps.
    hooks = [GradGuardHook(), EMAHook(0.5)]
    other = train(make_state(kind, **options), Spiky(size, wild, without=gone), hooks)
    averages = [run.stateful["EMAHook"].state_dict()["model"] for run in (state, other)]
    return differing(flatten(state), flatten(other)) + differing(*averages)


@pytest.mark.parametrize(
    ("kind", "ranks", "accumulate"),
    [("ddp", 1, 2), ("ddp", 2, 1), ("fsdp", 2, 1), *slow(("fsdp", 3, 2), ("ddp", 3, 2))],
)
def test_skipped_updates_leave_no_trace(kind: str, ranks: int, accumulate: int) -> None:
    assert run_ranks(compare, ranks, kind, accumulate) == [[]] * ranks


def amp(optimizer: Any, **options: Any) -> AmpOptimWrapper:
    return AmpOptimWrapper(optimizer, dtype="float16", device="cpu", **options)


def compare_half(kind: str) -> list[str]:
    return compare(kind, optim=amp)


@pytest.mark.parametrize(("kind", "ranks"), [("ddp", 2), *slow(("fsdp", 2))])
def test_a_bad_loss_in_float16_leaves_the_loss_scale_as_it_is(kind: str, ranks: int) -> None:
    assert run_ranks(compare_half, ranks, kind) == [[]] * ranks


def overflow(kind: str, folder: Path, action: str) -> tuple[int, float]:
    """Return the skipped steps in the log, and the loss scale at the end."""

    def make(optimizer: Any) -> AmpOptimWrapper:
        return amp(optimizer, loss_scale={"init_scale": 2.0**40})

    size = len(get_samples(range(STEPS), get_world_size()))
    state = make_state(kind, optim=make, run_dir=folder)
    train(state, Spiky(size), [GradGuardHook(action=action), LogHook()], log_every_steps=STEPS)
    (line,) = (folder / "metrics.jsonl").read_text().splitlines()
    return json.loads(line)["skipped_steps"], state.optim_wrapper.loss_scaler.get_scale()


@pytest.mark.parametrize(
    ("kind", "action"), [("ddp", "skip"), *slow(("fsdp", "skip"), ("ddp", "stop"))]
)
def test_overflows_are_left_to_the_loss_scaler_and_counted_once(
    kind: str, action: str, tmp_path: Path
) -> None:
    for skipped, scale in run_ranks(overflow, 2, kind, tmp_path, action):
        # Each overflow halves the scale.
        assert scale == 2.0 ** (40 - skipped) < 2.0**40


class Doubled(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.double()


def train_doubled(folder: Path, stop: int | None) -> dict[str, torch.Tensor]:
    """Resume from the latest checkpoint and train in float64, until update `stop` if given."""
    model = wrapped("ddp", SupervisedModel(Doubled(), nn.MSELoss()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state, guard = LoopState(model, OptimWrapper(optimizer)), GradGuardHook()
    state.stateful = {"grad_guard": guard}
    inputs, targets = doubled_data()
    data = TensorDataset(inputs, targets, torch.arange(len(inputs)))
    loader = build_loader(data, batch_size=12 // get_world_size(), train=True)
    path = find_checkpoint(folder)
    if path is not None:
        load_checkpoint(path).restore(state)
    EpochTrainLoop(loader, max_epochs=2).run(state, HookList([guard, Follow(stop)]))
    save_checkpoint(folder, state)
    return {name: weight.detach().clone() for name, weight in model.module.state_dict().items()}


def doubled_data() -> tuple[torch.Tensor, torch.Tensor]:
    data = Spiky(60, {13: math.nan, 38: math.inf})
    return data.inputs.double(), data.targets.double()


def test_a_run_on_one_three_and_two_ranks_equals_plain_pytorch(tmp_path: Path) -> None:
    net, (inputs, targets) = Doubled(), doubled_data()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for start in [*range(0, 60, 12)] * 2:
        optimizer.zero_grad()
        batch = slice(start, start + 12)
        nn.functional.mse_loss(net(inputs[batch]), targets[batch]).backward()
        if all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters()):
            optimizer.step()
    for ranks, stop in ((1, 2), (3, 6), (2, None)):
        weights = run_ranks(train_doubled, ranks, tmp_path, stop)[0]
    for name, weight in net.state_dict().items():
        assert (weights[f"net.{name}"] - weight).abs().max() <= 1e-12


def test_skipped_steps_are_in_the_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "stepwrap")
    hooks = [LogHook(), GradGuardHook(), CheckpointHook(every_steps=4, keep_last=None)]
    data = Spiky(STEPS * BATCH, spikes())
    train(make_state(run_dir=tmp_path), data, hooks, log_every_steps=5)

    def counts() -> list[tuple[int, float]]:
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        return [(record["step"], record["skipped_steps"]) for record in map(json.loads, lines)]

    assert counts() == [(5, 2), (10, 0), (15, 1), (20, 0)]
    assert "step 3: the gradient of 'net.0.weight' has" in caplog.text
    # A run that resumes between two records counts on.
    (tmp_path / "metrics.jsonl").unlink()
    resumed, guard = make_state(run_dir=tmp_path), GradGuardHook()
    resumed.stateful = {"GradGuardHook": guard}
    load_checkpoint(tmp_path / "checkpoints/step_00000004").restore(resumed)
    train(resumed, data, [LogHook(), guard], log_every_steps=5)
    assert counts() == [(5, 2), (10, 0), (15, 1), (20, 0)]


def stop_at_the_first(kind: str) -> None:
    size = len(get_samples(range(STEPS), get_world_size()))
    train(make_state(kind), Spiky(size, spikes()), [GradGuardHook(action="stop")])


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_stopping_names_the_step_and_the_parameter_on_every_rank(kind: str) -> None:
    with pytest.raises(
        RanksError, match=r"NonFiniteError: step 3: the gradient of 'net\."
    ) as error:
        run_ranks(stop_at_the_first, 2, kind)
    assert len(error.value.reports) == 2


def test_too_many_in_a_row_end_the_run() -> None:
    data = Spiky(STEPS * BATCH, spikes())
    with pytest.raises(NonFiniteError, match=r"step 4: .* at most 1 updates in a row"):
        train(make_state(), data, [GradGuardHook(max_in_row=1)])


def test_two_hooks_that_decide_on_updates_are_refused() -> None:
    with pytest.raises(TypeError, match="GradGuardHook and SpikeGuardHook exclude each other"):
        train(make_state(), Spiky(8), [SpikeGuardHook(), GradGuardHook()])
    for wrong in ({"action": "stopp"}, {"max_in_row": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            GradGuardHook(**wrong)
