"""Loaders that would give every rank the same data are divided among the ranks."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from loop_parts import assert_identical, get_weights, make_data, make_state
from marks import slow
from ranks import run_ranks
from stream_parts import SaveAll
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    WeightedRandomSampler,
    get_worker_info,
)
from torchmetrics import SumMetric

from stepwrap.loops import (
    EpochTrainLoop,
    Hook,
    HookList,
    LoopState,
    TestLoop,
    ValLoop,
    load_checkpoint,
)
from stepwrap.runner import Runner
from stepwrap.wrappers import BaseModel, OptimWrapper, StepDistributedDataParallel

# Raised by StatefulDataLoader 0.11 with torch 2.13.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

SAMPLES = 8


class Backwards(Sampler[int]):
    """A user's sampler, which does not know the ranks."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES - 1, -1, -1))


class Lines(IterableDataset[Any]):
    """A stream that gives every rank all samples."""

    def __iter__(self) -> Iterator[Any]:
        return iter(make_data(SAMPLES))


class Batches:
    """A user's loader, with a position and a length."""

    def __init__(self, per_rank: bool = False) -> None:
        self.at, self.data = 0, list(DataLoader(make_data(SAMPLES), batch_size=2))
        if per_rank:
            self.data = self.data[dist.get_rank() :: dist.get_world_size()]

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.data):
            self.at += 1
            yield self.data[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Noisy(Dataset[Any]):
    """Samples with random numbers, also from a stream that no seed reaches."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        inputs, target = make_data(SAMPLES)[index]
        generator = torch.Generator()
        generator.seed()
        inputs[1:] += torch.rand(3, generator=generator)
        return inputs, target


def make_loader(kind: str) -> Any:
    data, options = make_data(SAMPLES), {"batch_size": 2}
    if kind == "list":
        return list(DataLoader(data, **options))
    if kind in ("own loader", "per rank"):
        return Batches(kind == "per rank")
    if kind == "stream":
        return DataLoader(Lines(), **options)
    if kind == "own data":
        rank, ranks = dist.get_rank(), dist.get_world_size()
        return DataLoader(Subset(data, range(rank, SAMPLES, ranks)), **options)
    if kind == "torchdata":
        return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(
            data, **options
        )
    if kind == "noise":
        return DataLoader(Noisy(), num_workers=1, **options)
    sampler = {
        "own sampler": Backwards(),
        "weighted": WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, replacement=False),
        "distributed": DistributedSampler(data) if kind == "distributed" else None,
    }.get(kind)
    return DataLoader(data, sampler=sampler, shuffle=kind == "shuffled" or None, **options)


class Numbers(Hook):
    """Keep the numbers of the samples that this rank trains on or evaluates, by epoch."""

    def __init__(self) -> None:
        self.by_epoch: dict[int, list[int]] = {}

    def on_batch_start(self, state: LoopState, batch: Any) -> None:
        numbers = batch[0][:, 0].round().int().tolist()
        self.by_epoch.setdefault(state.epoch, []).extend(numbers)

    on_eval_batch_start = on_batch_start


def train(kind: str, per_rank: bool = False) -> dict[int, list[int]]:
    torch.manual_seed(dist.get_rank())
    hook = Numbers()
    loop = EpochTrainLoop(make_loader(kind), max_epochs=2, per_rank=per_rank)
    loop.run(make_state(), HookList([hook]))
    return hook.by_epoch


ALL = list(range(SAMPLES))


@pytest.mark.parametrize(
    "kind",
    [
        *("plain", "shuffled", "list", "own loader", "distributed", "own data"),
        *slow("own sampler", "weighted", "stream", "torchdata", "noise", "per rank"),
    ],
)
def test_a_training_reads_each_sample_once(kind: str) -> None:
    by_rank = run_ranks(train, 2, kind)
    for epoch in (0, 1):
        numbers = [rank[epoch] for rank in by_rank]
        assert [len(rank_numbers) for rank_numbers in numbers] == [4, 4]
        assert sorted(numbers[0] + numbers[1]) == ALL, kind
    if kind in ("shuffled", "weighted"):
        assert by_rank[0][0] != by_rank[0][1]


class Augmented(Dataset[Any]):
    """Samples with random numbers from the streams of torch, NumPy and Python."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        info: Any = get_worker_info()
        drawn = [torch.rand(()).item(), float(np.random.rand()), random.random(), info.seed % 997]
        return (torch.tensor([index, *drawn], dtype=torch.float64),)


class Drawn(Hook):
    def __init__(self) -> None:
        self.rows: list[list[float]] = []

    def on_batch_start(self, state: LoopState, batch: Any) -> None:
        self.rows += batch[0].tolist()


class Rows(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1, dtype=torch.float64)

    def forward(self, rows: torch.Tensor, mode: str = "loss") -> Any:
        return {"loss": self.layer(rows).mean()}


def _draw() -> list[list[float]]:
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Augmented(), batch_size=2, num_workers=1, generator=generator)
    model = StepDistributedDataParallel(Rows())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hook = Drawn()
    state = LoopState(model=model, optim_wrapper=OptimWrapper(optimizer))
    EpochTrainLoop(loader, max_epochs=1).run(state, HookList([hook]))
    return hook.rows


def test_workers_of_a_seeded_loader_draw_other_numbers_on_each_rank() -> None:
    rows = [row for rank_rows in run_ranks(_draw, 2) for row in rank_rows]
    assert sorted(row[0] for row in rows) == ALL
    for column in (1, 2, 3):
        assert len({row[column] for row in rows}) == SAMPLES
    assert len({row[4] for row in rows}) == 2


def test_per_rank_says_that_the_data_is_divided() -> None:
    assert [rank[0] for rank in run_ranks(train, 2, "plain", True)] == [ALL, ALL]


def test_ranks_without_a_batch_in_the_last_round_repeat_one() -> None:
    """Four batches on three ranks."""
    assert [rank[0] for rank in run_ranks(train, 3, "own loader")] == [
        [0, 1, 6, 7],
        [2, 3, 6, 7],
        [4, 5, 6, 7],
    ]


class Count(SumMetric):
    def update(self, num_samples: int) -> None:
        super().update(num_samples)


def _evaluate(kind: str, make: Any) -> float:
    loop = make(make_loader(kind), {"count": Count()})
    results = [loop.run(make_state(), HookList())["count"] for _ in range(2)]
    assert results[0] == results[1]
    return float(results[0])


@pytest.mark.parametrize("make", [ValLoop, TestLoop])
@pytest.mark.parametrize(
    "kind",
    ["plain", "own loader", *slow("list", "own sampler", "stream", "torchdata", "per rank")],
)
def test_an_evaluation_counts_each_sample_once(kind: str, make: Any) -> None:
    """Also on three ranks, of which two have no batch in the last round."""
    for ranks in (2, 3):
        assert run_ranks(_evaluate, ranks, kind, make) == [SAMPLES] * ranks


def _resume(folder: Path, kind: str) -> None:
    options: dict[str, Any] = {"max_epochs": 2}
    state, hook = make_state(), SaveAll(folder)
    torch.manual_seed(3)
    EpochTrainLoop(make_loader(kind), **options).run(state, HookList([hook]))
    for done, path in hook.saved:
        resumed, again = make_state(), SaveAll()
        torch.manual_seed(3)
        load_checkpoint(path).restore(resumed)
        EpochTrainLoop(make_loader(kind), **options).run(resumed, HookList([again]))
        assert len(again.read) == len(hook.read) - done
        assert_identical(get_weights(resumed), get_weights(state))


@pytest.mark.parametrize("kind", ["shuffled", "own loader", *slow("list", "stream")])
def test_a_divided_run_resumes_exactly(tmp_path: Path, kind: str) -> None:
    run_ranks(_resume, 2, tmp_path, kind)


class Shuffled:
    """A user's loader whose order differs on each rank."""

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(dist.get_rank()))
        return iter(DataLoader(Subset(make_data(SAMPLES), order.tolist()), batch_size=6))


def _messages(kind: str) -> str:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("stepwrap.loops.data.shares")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    loader: Any = Shuffled() if kind == "own order" else make_loader(kind)
    if kind == "own seeds":
        generator = torch.Generator().manual_seed(dist.get_rank())
        data = make_data(SAMPLES)
        loader = DataLoader(data, batch_size=2, shuffle=True, generator=generator)
    EpochTrainLoop(loader, max_epochs=1).run(make_state(), HookList())
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("plain", "each of the 2 ranks takes its share"),
        ("own order", "the first batches of the ranks have samples in common"),
        *slow(("own seeds", "the same data set, but in another order"), ("own data", "")),
    ],
)
def test_it_is_said_once_with_the_setting_that_changes_it(kind: str, text: str) -> None:
    first, second = run_ranks(_messages, 2, kind)
    assert text in first
    assert first.count("per_rank: true") == bool(text)
    assert not second


def _predict(folder: Path) -> tuple[int, str]:
    path = folder / "predictions.jsonl"
    runner = Runner(make_state().model, test_loop=TestLoop(make_loader("plain")), hooks=())
    count = runner.predict(path)
    return count, path.read_text()


def test_predictions_of_a_plain_loader_have_each_sample_once(tmp_path: Path) -> None:
    alone = _predict(tmp_path / "alone")
    assert alone[0] == SAMPLES
    assert run_ranks(_predict, 2, tmp_path / "both") == [alone] * 2
