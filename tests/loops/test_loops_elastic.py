"""A run that resumes with another number of ranks makes the same updates of the same samples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_runs import Follow, make_data, make_net, make_optimizer, plain, train, updates
from marks import slow
from ranks import run_ranks
from torch import nn

from stepwrap.loops import (
    EpochTrainLoop,
    Hook,
    HookList,
    LoopState,
    build_loader,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from stepwrap.wrappers import OptimWrapper, SingleDevice, SupervisedModel

KINDS = ["ddp", *slow("fsdp", "hsdp", "tensor")]


def _stages(
    kind: str, folder: Path, stages: list[tuple[int, int | None, int]], **options: Any
) -> list[list[dict[str, Any]]]:
    """Train in stages, each with a number of ranks, a last update and a batch size."""
    return [
        run_ranks(train, ranks, kind, folder, stop, batch_size=size, **options)
        for ranks, stop, size in stages
    ]


def _seen(stages: list[list[dict[str, Any]]]) -> list[set[int]]:
    """Return the samples of each update; fail if a sample came twice."""
    by_update: dict[int, list[int]] = {}
    for ranks in stages:
        shards = {rank_result["shard"]: rank_result["seen"] for rank_result in ranks}
        for updates_seen in shards.values():
            for update, samples in updates_seen:
                by_update.setdefault(update, []).extend(samples)
    assert all(len(set(samples)) == len(samples) for samples in by_update.values())
    assert sorted(by_update) == list(range(len(by_update)))
    return [set(by_update[update]) for update in sorted(by_update)]


def _difference(stages: list[list[dict[str, Any]]], expected: dict[str, torch.Tensor]) -> float:
    return max(
        (rank_result["weights"][name] - value).abs().max().item()
        for rank_result in stages[-1]
        for name, value in expected.items()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_one_three_two_and_four_ranks_within_an_epoch(kind: str, tmp_path: Path) -> None:
    """12 samples per update: two batches of 6 on one rank, then one batch on each rank."""
    stages = [(1, 2, 6), (3, 3, 6), (2, 4, 6), (4, None, 6)]
    done = _stages(kind, tmp_path, stages, samples=60, accumulate=2)
    assert _seen(done) == [set(update) for update in updates(60, 12)]
    assert _difference(done, plain(60, 12)[0]) <= 1e-12
    # The counters equal an uninterrupted run on as many ranks.
    data_ranks = len({rank_result["shard"] for rank_result in done[-1]})
    per_epoch = -(-12 // (6 * data_ranks))
    assert {rank_result["counters"] for rank_result in done[-1]} == {(2, 0, 10 * per_epoch, 10, 10)}
    assert {rank_result["counts"] for rank_result in done[-1]} == {(10 * per_epoch, 10 * per_epoch)}


# 10 samples per update, which 3 and 4 ranks cannot share equally; 7 in the last one.
_WEIGHED = [(1, 2, 5), (3, 3, 2), (2, 4, 2), (4, None, 2)]


@pytest.mark.parametrize("kind", KINDS)
def test_with_weights_a_run_resumes_on_any_number_of_ranks(kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"samples": 47, "loss_weight": "samples"}
    done = _stages(kind, tmp_path, _WEIGHED, accumulate=2, **options)
    assert _seen(done) == [set(update) for update in updates(47, 10)]
    weights, mean = plain(47, 10)
    assert _difference(done, weights) <= 1e-12
    per_epoch = 10 if kind == "tensor" else 5
    unbroken = _stages(kind, tmp_path / "unbroken", [(2, None, per_epoch)], accumulate=1, **options)
    assert _difference(done, unbroken[0][0]["weights"]) <= 1e-12
    # The last record covers all updates, because none was due before.
    for rank_result in done[-1] + unbroken[0]:
        assert rank_result["counters"][3:] == (10, 10)
        assert rank_result["record"]["loss"] == pytest.approx(mean, abs=1e-12)


def test_an_iteration_loop_resumes_on_other_ranks(tmp_path: Path) -> None:
    """Also in an iteration loop the short last window ends with each pass."""
    options: dict[str, Any] = {"samples": 47, "loss_weight": "samples", "by_steps": 10}
    done = _stages("ddp", tmp_path, _WEIGHED, accumulate=2, **options)
    assert _seen(done) == [set(update) for update in updates(47, 10)]
    assert _difference(done, plain(47, 10)[0]) <= 1e-12


def test_a_run_without_weights_resumes_with_weights(tmp_path: Path) -> None:
    """As the error below advises, 8 samples per update on 2 ranks continue on 3."""
    options: dict[str, Any] = {"samples": 40, "accumulate": 1}
    stages = _stages("ddp", tmp_path, [(2, 2, 4)], **options)
    later_stages = _stages("ddp", tmp_path, [(3, None, 4)], loss_weight="samples", **options)
    assert _seen(stages + later_stages) == [set(update) for update in updates(40, 8)]
    assert _difference(stages + later_stages, plain(40, 8)[0]) <= 1e-12


def _refused(folder: Path, **options: Any) -> str:
    with pytest.raises(ValueError, match="cannot share") as error:
        train("ddp", folder, None, **options)
    return str(error.value)


def test_an_impossible_share_is_an_error_that_lists_the_alternatives(tmp_path: Path) -> None:
    _stages("ddp", tmp_path / "a", [(2, 2, 4)], samples=40, accumulate=1)
    for message in run_ranks(_refused, 3, tmp_path / "a", samples=40, batch_size=4, accumulate=1):
        assert re.search("has 8 samples, .*3 ranks .*batch_size 4", message)
        assert "1, 2, 4, 8 as the number of ranks" in message
        assert "optim_wrapper.loss_weight: samples" in message
    # With 3 batches in a pass, windows of 2 cross its end, so their length must stay.
    _stages("ddp", tmp_path / "b", [(2, 2, 4)], samples=24, accumulate=2)
    (message,) = run_ranks(_refused, 1, tmp_path / "b", samples=24, batch_size=4, accumulate=2)
    assert "in 2 batches of each rank" in message
    assert re.search("2, 4, 8 .*ranks; .*batch_size >= 8 with 1", message)


def test_another_batch_size_keeps_the_global_batch(tmp_path: Path) -> None:
    """Padding is kept as well: the last update of 19 samples repeats the first sample."""
    stages = [(2, 3, 4), (2, None, 3)]
    done = _stages("ddp", tmp_path / "now", stages, samples=19, accumulate=1)
    uninterrupted = _stages("ddp", tmp_path / "whole", [(2, None, 4)], samples=19, accumulate=1)
    assert _difference(done, uninterrupted[0][0]["weights"]) <= 1e-12


@pytest.mark.parametrize(("batch_size", "count"), [(4, 1), (2, 2)])
def test_a_change_of_the_batches_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, batch_size: int, count: int
) -> None:
    for size, stop in ((4, 2), (batch_size, None)):
        model = SingleDevice(SupervisedModel(make_net(), nn.CrossEntropyLoss()))
        state = LoopState(model, OptimWrapper(make_optimizer(model)))
        loader = build_loader(make_data(16), batch_size=size, train=True, shuffle=True, seed=7)
        if stop is None:
            load_checkpoint(find_checkpoint(tmp_path)).restore(state)
        EpochTrainLoop(loader, max_epochs=1).run(state, HookList([Follow(stop)]))
        if stop is not None:
            save_checkpoint(tmp_path, state)
    change = f"an update keeps its 4 samples: accumulative_counts is now {count}"
    assert (change in caplog.text) == (count > 1)
    assert (state.step, state.iteration) == (4, 4 * count)


class _FailInside(Hook):
    """Save in the middle of a window, as after an error between two batches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_batch_start(self, state: LoopState, batch: Any) -> None:
        if state.iteration == 3:
            state.in_step = False
            save_checkpoint(self.folder, state)
            raise KeyError("inside a window")


def test_an_update_that_had_begun_begins_again(tmp_path: Path) -> None:
    def run(*hooks: Hook) -> LoopState:
        model = SingleDevice(SupervisedModel(make_net(), nn.CrossEntropyLoss()))
        optim = OptimWrapper(make_optimizer(model), 2, loss_weight="samples")
        state, path = LoopState(model, optim), find_checkpoint(tmp_path)
        if path is not None:
            load_checkpoint(path).restore(state)
        loader = build_loader(make_data(47), batch_size=5, train=True, shuffle=True, seed=7)
        return EpochTrainLoop(loader, max_epochs=2).run(state, HookList(hooks))

    with pytest.raises(KeyError, match="inside a window"):
        run(_FailInside(tmp_path))
    state = run()
    assert (state.iteration, state.step) == (20, 10)
    got = dict(state.model.module.named_parameters())
    for name, value in plain(47, 10)[0].items():
        assert (got[name] - value).abs().max().item() <= 1e-12
