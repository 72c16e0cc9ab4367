"""Evaluation if a step needs every rank, or if ranks share their samples."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loop_parts import Unsized, make_data, make_loader
from marks import slow
from ranks import run_ranks
from torch import Tensor, nn
from torchmetrics.classification import MulticlassConfusionMatrix

from stepwrap.collectives import BaseMetric, TorchCPUDist
from stepwrap.loops import (
    EpochTrainLoop,
    Hook,
    HookList,
    LoopState,
    MeanLoss,
    TestLoop,
    ValLoop,
    build_loader,
    seed_rng,
)
from stepwrap.wrappers import (
    OptimWrapper,
    Preparation,
    SingleDevice,
    StepFullyShardedDataParallel,
    SupervisedModel,
    build_mesh,
    wrap_model,
)

PLAN = Preparation(tensor_parallel={"net.0": "colwise", "net.2": "rowwise"})


class Targets(BaseMetric):
    """Count the samples of each class."""

    def add(self, target: Tensor) -> None:
        self._results += target.tolist()

    def compute_metric(self, results: list[int]) -> list[int]:
        return [results.count(result) for result in range(3)]


class Count:
    """Count the batches that hooks see; call a function at one of them."""

    def __init__(self, at: int = 0, action: Callable[[], object] = int) -> None:
        self.batches, self.at, self.action = 0, at, action

    def on_eval_batch_end(self, state: LoopState, batch: Any, outputs: Any) -> None:
        self.batches += 1
        if self.batches == self.at:
            self.action()


def make_model() -> SupervisedModel:
    seed_rng(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return SupervisedModel(net, nn.CrossEntropyLoss())


def make_metrics() -> dict[str, Any]:
    return {
        "confusion": MulticlassConfusionMatrix(3),
        "loss": MeanLoss(),
        "targets": Targets(),
        "elsewhere": Targets(dist_backend=TorchCPUDist()),
    }


def evaluate(samples: int, batch_size: int, *, sized: bool = True) -> tuple[dict[str, float], int]:
    """Evaluate, under FSDP in a group; return the results and this rank's number of batches."""
    wrap = StepFullyShardedDataParallel if dist.is_initialized() else SingleDevice
    loader: Any = build_loader(make_data(samples), batch_size=batch_size)
    # If only some loaders have a length, the ranks must still agree on the number of steps.
    has_length = sized or (dist.is_initialized() and samples % 2 and not dist.get_rank())
    loop = ValLoop(loader if has_length else Unsized(loader), make_metrics())
    state, count = LoopState(wrap(make_model())), Count()
    results = loop.run(state, HookList([count]))
    assert loop.run(state, HookList()) == results
    return results, count.batches


@pytest.mark.parametrize(
    ("world_size", "samples", "batch_size", "sized"),
    [
        (2, 1, 4, True),
        *slow(*((world, samples, 1, True) for world in (2, 4) for samples in (3, 5, 7))),
        (2, 1, 2, False),
        *slow((2, 7, 2, False), (4, 2, 2, False)),
    ],
)
def test_each_sample_counts_once_if_steps_are_collective(
    world_size: int, samples: int, batch_size: int, sized: bool
) -> None:
    """Also if a rank has no batch, and if loaders have no length."""
    alone, _ = evaluate(samples, batch_size)
    assert sum(value for name, value in alone.items() if name.startswith("conf")) == samples
    by_rank = run_ranks(evaluate, world_size, samples, batch_size, sized=sized)
    for rank, (metrics, batches) in enumerate(by_rank):
        assert metrics == pytest.approx(alone, rel=1e-6)
        rank_samples = len(range(rank, samples, world_size))
        assert batches == -(-rank_samples // batch_size)


class OneMore:
    """A loader whose length is one short."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))] * 2)


def _empty_and_longer_than_its_length() -> tuple[list[str], int]:
    state = LoopState(StepFullyShardedDataParallel(make_model()))
    texts = []
    for loader in ([], Unsized([])):
        with pytest.raises(ValueError, match="batches") as caught:
            TestLoop(loader, {}).run(state, HookList())
        texts.append(str(caught.value))
    count = Count()
    TestLoop(OneMore(), {}).run(state, HookList([count]))
    return texts, count.batches


def test_no_batches_and_more_batches_than_the_length() -> None:
    nothing = "the test loader has no batches on any rank"
    for texts, batches in run_ranks(_empty_and_longer_than_its_length, 2):
        assert texts == [nothing, nothing]
        assert batches == 2


class Breaks(Targets, Hook):
    """A loader, metric and hook that fails on one rank."""

    def __init__(self, where: str, at: int, rank: int) -> None:
        super().__init__()
        self._where = where
        self._left = at if dist.get_rank() == rank else -1

    def _count(self, where: str) -> None:
        if where == self._where:
            if not self._left:
                raise OSError("disk gone")
            self._left -= 1

    def __iter__(self) -> Iterator[Any]:
        for batch in build_loader(make_data(12), batch_size=1):
            self._count("loader")
            yield batch

    def add(self, target: Tensor) -> None:
        self._count("metric")

    def on_eval_batch_start(self, state: LoopState, batch: Any) -> None:
        self._count("start")

    def on_eval_batch_end(self, state: LoopState, batch: Any, outputs: Any) -> None:
        self._count("end")


def _broken(where: str, at: int, rank: int, kind: str) -> tuple[type, str]:
    if kind == "fsdp":
        model: Any = StepFullyShardedDataParallel(make_model())
    else:
        mesh = build_mesh({"data": 2, "tensor": 2})
        wrapper = StepFullyShardedDataParallel
        model = wrap_model(wrapper, make_model(), mesh=mesh, prepare=PLAN)
    breaks = Breaks(where, at, rank)
    loop = ValLoop(breaks, {"breaks": breaks})
    with pytest.raises((OSError, RuntimeError)) as caught:
        loop.run(LoopState(model), HookList([breaks]))
    # The group and the loop can still be used.
    loop = ValLoop(build_loader(make_data(5), batch_size=1), {"loss": MeanLoss()})
    assert loop.run(LoopState(model), HookList())["loss"] > 0
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("where", "at", "rank", "kind", "ranks"),
    [
        ("loader", 0, 1, "fsdp", 2),
        ("loader", 2, 0, "fsdp", 2),
        ("metric", 1, 1, "fsdp", 2),
        ("metric", 5, 0, "fsdp", 2),
        ("start", 1, 0, "fsdp", 2),
        ("end", 5, 1, "fsdp", 2),
        *slow(("metric", 1, 1, "fsdp x tensor", 4)),
    ],
)
def test_a_rank_that_fails_ends_the_evaluation_on_all(
    where: str, at: int, rank: int, kind: str, ranks: int
) -> None:
    outcomes = run_ranks(_broken, ranks, where, at, rank, kind)
    for failed_rank, (error, text) in enumerate(outcomes):
        if failed_rank == rank:
            assert (error, text) == (OSError, "disk gone")
        else:
            assert error is RuntimeError
            assert text == f"the evaluation failed on rank {rank}: OSError: disk gone"


def _interrupted(rank: int, at: int, sized: bool) -> tuple[int, int, dict[str, float], int]:
    model = StepFullyShardedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader: Any = build_loader(make_data(400), batch_size=1)
    val_loop = ValLoop(loader if sized else Unsized(loader), make_metrics())
    loop = EpochTrainLoop(make_loader(8), max_epochs=2, val_loop=val_loop)
    mine = at if dist.get_rank() == rank else 0
    count = Count(mine, lambda: os.kill(os.getpid(), signal.SIGTERM))
    state = LoopState(model, OptimWrapper(optimizer))
    loop.run(state, HookList([count]))
    return state.signal, state.epoch, state.metrics, count.batches


@pytest.mark.parametrize(("rank", "at", "sized"), [(0, 1, True), (1, 9, True), (1, 20, False)])
def test_a_signal_cuts_a_collective_evaluation_on_all_ranks(
    rank: int, at: int, sized: bool
) -> None:
    rank_0, second = run_ranks(_interrupted, 2, rank, at, sized)
    assert rank_0[:3] == second[:3] == (signal.SIGTERM, 1, {})
    assert at <= rank_0[3] == second[3] < 200


def _shared_samples(build: str, data: int) -> tuple[dict[str, float], int]:
    mesh = build_mesh({"data": data, "tensor": 2})
    wrapper = StepFullyShardedDataParallel if build == "fsdp" else None
    model = wrap_model(wrapper, make_model(), mesh=mesh, prepare=PLAN)
    loader = build_loader(make_data(7), batch_size=2, shard=(mesh.data_rank, mesh.data_size))
    count = Count()
    return ValLoop(loader, make_metrics()).run(LoopState(model), HookList([count])), count.batches


@pytest.mark.parametrize(("build", "data"), [*slow(("ddp", 2), ("fsdp", 2)), ("ddp", 1)])
def test_samples_that_ranks_share_count_once(build: str, data: int) -> None:
    alone, _ = evaluate(7, 2)
    for metrics, batches in run_ranks(_shared_samples, 2 * data, build, data):
        assert metrics == pytest.approx(alone, rel=1e-6)
        assert batches == 4 // data
