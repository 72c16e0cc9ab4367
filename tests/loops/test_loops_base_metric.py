"""Metrics derived from BaseMetric, in an evaluation together with torchmetrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from marks import slow
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from stepwrap.collectives import BaseMetric
from stepwrap.loops import Hook, HookList, LoopState, ValLoop, build_loader
from stepwrap.loops.metrics.evaluation import feed_metrics
from stepwrap.wrappers import BaseModel, SingleDevice

CLASSES = 4


class Correct(BaseMetric):
    def add(self, preds: Tensor, target: Tensor) -> None:
        self._results += (preds.argmax(1) == target).tolist()

    def compute_metric(self, results: list[Any]) -> float:
        return sum(results) / len(results)


class Seen(BaseMetric):
    """The sample numbers that were added, in order, and their count."""

    def add(self, number: Tensor) -> None:
        self._results += number.unbind()

    def compute_metric(self, results: list[Any]) -> dict[str, Any]:
        return {"number": np.array([int(result) for result in results]), "count": len(results)}


class Scores(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def val_step(self, data: list[Tensor]) -> dict[str, Tensor]:
        scores, target, number = data
        return {"preds": scores * self.scale, "target": target, "number": number}

    def forward(self, *inputs: Tensor, mode: str = "tensor") -> Any:
        raise NotImplementedError


def make_samples(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(count, CLASSES, generator=generator)
    target = torch.randint(0, CLASSES, (count,), generator=generator)
    return TensorDataset(scores, target, torch.arange(count))


def deal_exactly(samples: TensorDataset) -> DataLoader[Any]:
    return build_loader(samples, batch_size=3)


def deal_evenly(samples: TensorDataset) -> DataLoader[Any]:
    return build_loader(samples, batch_size=3, train=True)


def deal_by_torch(samples: TensorDataset) -> DataLoader[Any]:
    sampler = DistributedSampler(samples, shuffle=False)
    return DataLoader(samples, batch_size=3, sampler=sampler)


def evaluate(count: int, deal: Callable[[TensorDataset], DataLoader[Any]]) -> dict[str, float]:
    torch_accuracy = MulticlassAccuracy(CLASSES, average="micro")
    metrics = {"seen": Seen(), "accuracy": torch_accuracy, "correct": Correct()}
    loop = ValLoop(deal(make_samples(count)), metrics)
    state = LoopState(SingleDevice(Scores()))
    results = loop.run(state, HookList())
    assert loop.run(state, HookList()) == results == state.metrics
    return results


@pytest.mark.parametrize("world_size", [3, *slow(2)])
@pytest.mark.parametrize("count", [1, 13, *slow(64)])
def test_a_base_metric_agrees_with_torchmetrics_on_any_number_of_ranks(
    count: int, world_size: int
) -> None:
    """13 samples in batches of 3 give ranks different numbers; with 1 sample a rank has none."""
    alone = evaluate(count, deal_exactly)
    assert [alone[f"seen/number/{n}"] for n in range(count)] == list(range(count))
    assert alone["correct"] == pytest.approx(alone["accuracy"], abs=1e-6)
    for metrics in run_ranks(evaluate, world_size, count, deal_exactly):
        assert metrics == alone


@pytest.mark.parametrize("deal", [deal_evenly, deal_by_torch])
def test_samples_that_come_twice_to_be_even_count_once(
    deal: Callable[[TensorDataset], DataLoader[Any]],
) -> None:
    alone = evaluate(13, deal_exactly)
    for metrics in run_ranks(evaluate, 3, 13, deal):
        assert metrics == alone


def test_all_samples_of_a_custom_sampler_count() -> None:
    """The length of a data set does not limit the samples of a custom sampler."""

    def twice(samples: TensorDataset) -> DataLoader[Any]:
        return DataLoader(samples, batch_size=3, sampler=[0, 1, 2, 0, 1, 2, 0])

    assert evaluate(3, twice)["seen/count"] == 7
    assert evaluate(12, deal_evenly)["seen/count"] == 12


class Pairs(BaseMetric):
    def add(self, outputs: list[int], batch: str) -> None:
        self._results.append((outputs, batch))

    def compute_metric(self, results: list[Any]) -> list[Any]:
        return results


def test_add_gets_the_arguments_of_update() -> None:
    pairs = Pairs()
    feed_metrics({"pairs": pairs}, [1, 2], "batch")
    feed_metrics({"pairs": pairs}, {"outputs": [3], "batch": "b", "other": 0}, None)
    assert pairs.compute() == [([1, 2], "batch"), ([3], "b")]
    with pytest.raises(ValueError, match=r"metrics\.correct: Correct needs preds, target") as e:
        feed_metrics({"correct": Correct()}, {"preds": 1}, None)
    assert "target missing" in str(e.value)


class Broken(Seen):
    def compute_metric(self, results: list[Any]) -> dict[str, Any]:
        raise KeyError("label")


def outcome_of_a_broken_one() -> str:
    loop = ValLoop(deal_exactly(make_samples(7)), {"broken": Broken(), "correct": Correct()})
    try:
        loop.run(LoopState(SingleDevice(Scores())), HookList())
    except KeyError as error:
        # The ranks are still in step.
        dist.barrier()
        return str(error)
    return "no error"


def test_an_error_of_compute_is_the_same_on_all_ranks() -> None:
    assert ["label" in text for text in run_ranks(outcome_of_a_broken_one, 2)] == [True, True]


@pytest.mark.parametrize("kind", ["loader", "list", "stream"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_results_of_divided_batches_keep_the_order_of_the_data(kind: str, ranks: int) -> None:
    for order in run_ranks(_order_of_results, ranks, kind):
        assert order == [float(number) for number in range(11)]


def _order_of_results(kind: str) -> list[float]:
    batches = DataLoader(make_samples(11), batch_size=2)
    data: Any = {"loader": batches, "list": [*batches], "stream": _Batches([*batches])}[kind]
    loop = ValLoop(data, {"seen": Seen()})
    values = loop.run(LoopState(SingleDevice(Scores())), HookList())
    return [values[f"seen/number/{index}"] for index in range(11)]


class _Batches:
    """An iterable that shows nothing but its batches."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return iter(self._batches)


class _OwnReset(Seen):
    def reset(self) -> None:
        self._results = []


def _orders_with_an_own_reset() -> list[list[float]]:
    loop = ValLoop(DataLoader(make_samples(7), batch_size=2), {"seen": _OwnReset()})
    runs = [loop.run(LoopState(SingleDevice(Scores())), HookList()) for _ in range(2)]
    return [[values[f"seen/number/{index}"] for index in range(7)] for values in runs]


def test_a_metric_may_have_a_reset_of_its_own() -> None:
    for orders in run_ranks(_orders_with_an_own_reset, 3):
        assert orders == [[float(number) for number in range(7)]] * 2


class _Look(Hook):
    def __init__(self, metric: Any) -> None:
        self._metric = metric

    def on_eval_batch_end(self, state: LoopState, batch: Any, outputs: Any) -> None:
        self._metric.compute()


def _values_with_a_look() -> list[float]:
    metric = MulticlassAccuracy(num_classes=2, average="micro")
    # Rank 0 has two of two right, the others have one.
    batch = [torch.eye(2), torch.tensor([0, int(dist.get_rank() == 0)]), torch.arange(2)]
    loop = ValLoop([batch], {"accuracy": metric}, per_rank=True)
    state = LoopState(SingleDevice(Scores()))
    return [loop.run(state, HookList([_Look(metric)]))["accuracy"] for _ in range(3)]


def test_a_hook_may_compute_a_metric_during_the_evaluation() -> None:
    values = run_ranks(_values_with_a_look, 3)
    assert values == [[pytest.approx(4 / 6)] * 3] * 3
