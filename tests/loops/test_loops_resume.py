"""A resumed run ends with exactly the weights of an uninterrupted one."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from listeners import Records, on, stop_at
from loop_parts import Recorder, assert_identical, get_weights, make_data, make_state
from ranks import run_ranks
from stream_parts import Noisy, SaveAll

from stepwrap.loops import (
    EpochTrainLoop,
    HookList,
    IterTrainLoop,
    MeanLoss,
    ValLoop,
    build_loader,
    load_checkpoint,
    save_checkpoint,
)


def make_loop(kind: str, workers: int) -> EpochTrainLoop | IterTrainLoop:
    # With an odd number of batches per epoch and rank the first epoch ends inside a window.
    samples = 20 if dist.is_initialized() else 18
    loader = build_loader(
        Noisy(samples), batch_size=2, train=True, shuffle=True, seed=4, num_workers=workers
    )
    # Reading these also draws random numbers, which must not change the training.
    val_loop = ValLoop(build_loader(Noisy(6), batch_size=4), {"loss": MeanLoss()})
    if kind == "epochs":
        return EpochTrainLoop(loader, max_epochs=3, val_loop=val_loop, log_every_steps=3)
    return IterTrainLoop(loader, max_steps=8, val_interval=3, val_loop=val_loop, log_every_steps=5)


def resume_everywhere(folder: Path, kind: str, workers: int) -> int:
    """Resume from each save point of a run; return how many were inside a window."""
    state = make_state(accumulate=2, dropout=0.5)
    random.seed(dist.get_rank() if dist.is_initialized() else 0)
    hook, records = SaveAll(folder), Records()
    make_loop(kind, workers).run(state, HookList([hook, records]))
    inside = 0
    for _, path in hook.saved:
        resumed = make_state(accumulate=2, dropout=0.5)
        load_checkpoint(path).restore(resumed)
        inside += any(p.grad is not None for p in resumed.model.parameters())
        stopped_at, again = resumed.step, Records()
        make_loop(kind, workers).run(resumed, HookList([again]))
        assert_identical(get_weights(resumed), get_weights(state))
        step_records = list(zip(records.steps, records.records, strict=True))
        later = [step_record for step_record in step_records if step_record[0] > stopped_at]
        assert list(zip(again.steps, again.records, strict=True)) == later
        assert resumed.metrics == state.metrics
        assert (resumed.step, resumed.iteration) == (state.step, state.iteration)
    assert len(hook.saved) >= 8
    return inside


@pytest.mark.parametrize("kind", ["epochs", "steps"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_resume_is_exact_at_every_save_point(tmp_path: Path, kind: str, world_size: int) -> None:
    """With dropout, shuffling, augmentation, momentum and windows that cross epochs."""
    if world_size == 1:
        inside = [resume_everywhere(tmp_path, kind, 0)]
    else:
        inside = run_ranks(resume_everywhere, 2, tmp_path, kind, 0)
    assert all(count >= (1 if kind == "epochs" else 0) for count in inside)


def test_resume_is_exact_with_workers(tmp_path: Path) -> None:
    state = make_state(accumulate=2, dropout=0.5)
    hook = SaveAll(tmp_path)
    make_loop("epochs", 2).run(state, HookList([hook]))
    resumed = make_state(accumulate=2, dropout=0.5)
    load_checkpoint(hook.saved[7][1]).restore(resumed)
    assert resumed.batch
    make_loop("epochs", 2).run(resumed, HookList())
    assert_identical(get_weights(resumed), get_weights(state))


def test_evaluating_more_often_does_not_change_the_training() -> None:
    ends = []
    for interval in (1, 3):
        state = make_state(dropout=0.5)
        loop = make_loop("epochs", 0)
        loop.budget.intervals = [(0, interval)]
        loop.run(state, HookList())
        ends.append(get_weights(state))
    assert_identical(*ends)


@pytest.mark.parametrize("kind", ["epochs", "steps"])
def test_a_validation_cut_short_is_repeated_at_the_resume(tmp_path: Path, kind: str) -> None:
    uninterrupted = make_state(dropout=0.5)
    make_loop(kind, 0).run(uninterrupted, HookList())

    state = make_state(dropout=0.5)
    recorder = Recorder()
    stopping = on(on_eval_batch_end=lambda state, *_: state.request_stop("in the evaluation"))
    make_loop(kind, 0).run(state, HookList([stopping, recorder]))
    assert "val_end []" in recorder.events
    assert state.evaluated_at == -1
    path = save_checkpoint(tmp_path, state)

    resumed = make_state(dropout=0.5)
    load_checkpoint(path).restore(resumed)
    recorder = Recorder()
    make_loop(kind, 0).run(resumed, HookList([recorder]))
    next_event = [event for event in recorder.events if "epoch" not in event][1]
    assert next_event == "val_start"
    assert recorder.events.count("val_end ['loss']") == 3
    assert_identical(get_weights(resumed), get_weights(uninterrupted))
    assert resumed.metrics == uninterrupted.metrics


def test_a_finished_run_stays_as_it_is(tmp_path: Path) -> None:
    state = make_state()
    make_loop("epochs", 0).run(state, HookList())
    resumed = make_state()
    load_checkpoint(save_checkpoint(tmp_path, state)).restore(resumed)
    recorder = Recorder()
    make_loop("epochs", 0).run(resumed, HookList([recorder]))
    assert recorder.events == ["train_start", "train_end"]
    assert_identical(get_weights(resumed), get_weights(state))


def _save_inside_an_epoch(folder: Path) -> Path:
    state = make_state()
    hook = SaveAll(folder)
    make_loop("epochs", 0).run(state, HookList([hook]))
    return hook.saved[3][1]


def test_another_number_of_ranks_continues_with_updates_of_the_same_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = run_ranks(_save_inside_an_epoch, 2, tmp_path)[0]
    state = make_state()
    load_checkpoint(path).restore(state)
    assert load_checkpoint(path).meta["batch"] == 4
    assert re.search("saved at world size 2, .*has 1:", caplog.text)
    files = [load_checkpoint(path).read(f"rank_0000{rank}") for rank in (0, 1)]
    values = torch.cat([content["logs"]["values"]["loss"] for content in files])
    assert state.logs.means()["loss"].item() == pytest.approx(values.mean().item(), rel=1e-6)
    with caplog.at_level(logging.INFO):
        make_loop("epochs", 0).run(state, HookList())
    assert re.search("accumulative_counts is now 2, .*2 samples .*1 ranks", caplog.text)
    assert "last update of an epoch" not in caplog.text
    # The first run did 4 of its 5 updates per epoch.
    assert (state.epoch, state.step) == (3, 15)
    assert (state.iteration, state.optim_wrapper.inner_count) == (30, 30)


class _List:
    """A loader that `build_loader` did not create, with its batches by index."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self)):
            self.read.append(index)
            yield list(make_data(10)[index : index + 1])


def _train_lists(folder: Path, stop: int | None) -> list[int]:
    state, loader = make_state(), _List()
    if stop is None:
        load_checkpoint(folder / "step_00000006").restore(state)
    loop = EpochTrainLoop(loader, max_epochs=1, per_rank=True)
    loop.run(state, HookList([stop_at(stop)]))
    if stop is not None:
        save_checkpoint(folder, state)
    return [state.iteration, state.step, len(loader.read)]


def test_other_loaders_resume_at_the_same_fraction_of_the_epoch(tmp_path: Path) -> None:
    """6 of 10 batches on one rank correspond to 3 batches on each of two ranks."""
    run_ranks(_train_lists, 1, tmp_path, 6)
    assert run_ranks(_train_lists, 2, tmp_path, None) == [[13, 13, 10]] * 2
