"""Overfitting, limited batches, and searches for a learning rate and a batch size."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from warm import ended

from stepwrap.loops import LoopState
from stepwrap.registry import load_config
from stepwrap.runner import Runner
from stepwrap.runner.command.cli import main
from stepwrap.runner.finders.batch_size import BatchSizeFit, largest_batch_size, try_batch_size
from stepwrap.runner.finders.learning_rate import RangeTest, RangeTestHook
from stepwrap.runner.sections import read_sections
from stepwrap.wrappers import OptimWrapper

QUIET = ["hooks.progress=false", "hooks.checkpoint=false"]


def runner(tmp_path: Path, *words: str) -> Runner:
    return Runner.from_config(load_config("digits_single", [f"run_dir={tmp_path}", *QUIET, *words]))


def first_batches(trained: Runner) -> dict[str, list[Any]]:
    loops = {"train": trained._train_loop, "val": trained._val_loop, "test": trained._test_loop}
    return {name: [batch[1] for batch in loop.dataloader] for name, loop in loops.items()}


def test_limited_batches_are_the_same_in_each_pass(tmp_path: Path) -> None:
    limited = runner(tmp_path, "limit_batches=2", "data.train.batch_size=16")
    state = limited.train()
    assert state.step == 2 * state.epoch
    batches = first_batches(limited)
    assert [len(labels) for labels in batches["train"]] == [16, 16]
    assert len(batches["val"]) <= 2
    again = first_batches(runner(tmp_path / "b", "limit_batches=2", "data.train.batch_size=16"))
    sorted_labels = [
        sorted(label for labels in read_batches["train"] for label in labels.tolist())
        for read_batches in (batches, again)
    ]
    assert sorted_labels[0] == sorted_labels[1]
    # A random selection has several classes, unlike the first samples of a sorted data set.
    assert len(set(sorted_labels[0])) > 4


def test_overfitting_trains_and_evaluates_on_the_same_samples(tmp_path: Path) -> None:
    words = ("overfit=1", "data.train.batch_size=32", "train.max_epochs=60", "schedulers=[]")
    overfitted = runner(tmp_path, *words)
    state = overfitted.train()
    batches = first_batches(overfitted)
    assert [labels.tolist() for labels in batches["train"]] == [
        labels.tolist() for labels in batches["val"]
    ]
    assert [labels.tolist() for labels in batches["train"]] == [
        labels.tolist() for labels in batches["test"]
    ]
    assert state.step == 60
    assert state.metrics["accuracy"] == 1.0
    assert overfitted.test()["accuracy"] == 1.0


def test_a_limit_of_a_custom_loader_or_of_tensors_in_memory(tmp_path: Path) -> None:
    limited = runner(tmp_path, "limit_batches=1", "data.train.in_memory=true")
    assert len(limited._train_loop.dataloader) == 1
    assert len(first_batches(limited)["train"]) == 1


def test_the_options_are_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits_single", "--overfit", "0"]) == 2
    assert "positive integer, got '0'" in capsys.readouterr().err
    assert read_sections(load_config("digits_single", ["overfit=3"])).overfit == 3


def test_the_suggestion_is_where_the_loss_falls_fastest() -> None:
    rates = [10 ** (at / 10 - 5) for at in range(50)]
    losses = [2 - 1.5 / (1 + math.exp(-(at - 25))) + (at > 40) * (at - 40) for at in range(50)]
    assert RangeTest(rates, losses, False).suggestion == pytest.approx(rates[25])
    assert RangeTest(rates, [1.0] * 50, False).suggestion is None
    assert RangeTest(rates[:2], [1.0, 2.0], True).suggestion is None


@pytest.mark.parametrize(
    ("limit", "start", "most", "best"),
    [(100, 8, None, 96), (3, 8, None, 3), (0, 8, None, 0), (1000, 8, 64, 64), (1000, 8, 50, 50)],
)
def test_the_largest_size_is_found_in_few_tries(
    limit: int, start: int, most: int | None, best: int
) -> None:
    tried: list[int] = []

    def fits(size: int) -> BatchSizeFit:
        tried.append(size)
        return BatchSizeFit.FITS if size <= limit else BatchSizeFit.TOO_LARGE

    good, reason = largest_batch_size(fits, start, most)
    assert good == best
    assert len(tried) < 12
    assert len(tried) == len(set(tried))
    assert (reason is BatchSizeFit.FITS) == (good == most)


def test_lr_find_draws_a_curve_and_suggests_a_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["lr-find", "digits_single", "--low", "1e-5", "--high", "100", "--steps", "40"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "suggestion: " in out
    rate = float(out.rsplit("optimizer.lr=", 1)[1])
    assert 1e-5 < rate < 1
    assert {path.name for path in tmp_path.iterdir()} <= {"lr_find.png"}
    assert main([*words, "--optimizer", "x"]) == 2
    assert "there is no optimizer 'x'" in capsys.readouterr().err
    assert main(["lr-find", "digits_single", "--low", "2", "--high", "1"]) == 2
    assert re.search("--low .*above 0 .*--high, got 2 and 1", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("rates", "expected"), [((0.1, 0.05, 0.0), (8.0, 4.0, 0.0)), ((0.0, 0.0), (8.0, 8.0))]
)
def test_lr_find_keeps_the_ratios_of_groups(
    rates: tuple[float, ...], expected: tuple[float, ...]
) -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    state = LoopState(nn.Linear(1, 1))
    state.optim_wrapper = OptimWrapper(torch.optim.SGD(groups, lr=rates[0]))
    RangeTestHook(8.0, 16.0, 2).on_train_start(state)
    assert tuple(group["lr"] for group in state.optim_wrapper.optimizer.param_groups) == expected


RENAMED = """
from stepwrap.wrappers import SingleDevice


class Renamed(SingleDevice):
    def train_step(self, data, optim_wrapper):
        return {"score": super().train_step(data, optim_wrapper)["loss"]}
"""


def test_lr_find_needs_a_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "renamed_step.py").write_text(RENAMED)
    words = ["lr-find", "digits_single", "wrapper.type=renamed_step.Renamed"]
    assert main(words) == 1
    needed = "lr-find needs a train_step that logs 'loss', but it logs score"
    assert needed in capsys.readouterr().err


FAILING = """
from torch import nn


class Failing(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.layer, self.error = nn.Linear(64, 10), error

    def forward(self, inputs):
        if len(inputs) > 8:
            raise RuntimeError(self.error)
        return self.layer(inputs.flatten(1))
"""


@pytest.mark.parametrize(
    "error",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
    ],
)
def test_libraries_report_missing_memory_in_their_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "failing_net.py").write_text(FAILING)
    net = {"type": "failing_net.Failing", "error": error}
    config = load_config("digits_single", [f"model.net={json.dumps({'_delete_': True, **net})}"])
    for size, fit in ((8, BatchSizeFit.FITS), (16, BatchSizeFit.TOO_LARGE)):
        assert try_batch_size(config, read_sections(config), size=size) is fit


HUNGRY = """
import torch
from torch import nn


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return torch.ones(4), torch.tensor(0)


class Hungry(nn.Module):
    # Allocates 256 MiB per sample, on one rank only, without using them.
    def __init__(self, rank=-1):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.rank = rank

    def forward(self, inputs):
        from stepwrap.collectives import get_rank

        if self.rank in (-1, get_rank()):
            self.kept = torch.empty(len(inputs), 2**26)
        return self.layer(inputs)
"""
CONFIG = {
    "model": {
        "type": "SupervisedModel",
        "net": {"type": "hungry.Hungry", "rank": 1},
        "loss": {"type": "CrossEntropyLoss"},
    },
    "optimizer": {"type": "SGD", "lr": 0.1},
    "data": {"train": {"dataset": {"type": "hungry.Points"}, "batch_size": 8}},
    "train": {"type": "EpochTrainLoop", "max_epochs": 1},
}


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_does_not_block_the_others(tmp_path: Path) -> None:
    (tmp_path / "hungry.py").write_text(HUNGRY)
    (tmp_path / "config.yaml").write_text(json.dumps(CONFIG))
    words = ["batch-size-find", "config.yaml", "--nproc", "2", "--memory-gib", "24"]
    done = ended("-m", "stepwrap.runner", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "batch size 8: fits" in lines
    assert any(line.endswith(": out of memory") for line in lines)
    size = int(lines[-1].rsplit("=", 1)[1])
    # 24 GiB of address space hold fewer than 96 samples of 256 MiB.
    assert 8 <= size < 96
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_data_set_may_be_too_small_for_larger_batches(tmp_path: Path) -> None:
    words = ["batch-size-find", "digits_single", "data.train.batch_size=512", "--max-size", "4096"]
    done = ended("-m", "stepwrap.runner", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "limited by the data set" in done.stdout


@pytest.mark.slow
def test_lr_find_on_two_ranks(tmp_path: Path) -> None:
    words = ["lr-find", "digits_ddp", "--nproc", "2", "--low", "1e-5", "--steps", "30"]
    done = ended("-m", "stepwrap.runner", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "stepwrap train digits_ddp --nproc=2 optimizer.lr=" in done.stdout
