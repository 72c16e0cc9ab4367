"""Metrics over the ranks: custom ones and torchmetrics."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import outcome, outcome_text
from ranks import on_ranks, run_ranks
from torchmetrics import CatMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from stepwrap.collectives import BaseMetric, TorchDist, get_dist_backend, metric_sync


class _Items(BaseMetric):
    """A metric that returns the collected items, or raises `error` if set."""

    error: Exception | None = None

    def add(self, values: Any) -> None:
        self._results.extend(values)

    def compute_metric(self, results: list[Any]) -> Any:
        if self.error is not None:
            raise self.error
        return results


class PickyError(Exception):
    """An error that cannot be made from a text."""

    def __init__(self, low: int, second: int) -> None:
        super().__init__(f"{low} is not {second}")


def test_one_process() -> None:
    metric = _Items()
    metric.add([1, 2])
    metric.add([3])
    assert metric.compute() == metric.compute() == [1, 2, 3]
    assert metric.compute(size=2) == [1, 2]
    assert metric.compute(size=0) == []
    with pytest.raises(ValueError, match="size must .*negative, got -1"):
        metric.compute(size=-1)
    metric.reset()
    assert metric.compute() == []


def test_a_call_does_not_change_the_results() -> None:
    metric = _Items()
    metric.add([1, 2])
    assert metric([3]) == [3]
    with pytest.raises(TypeError):
        metric(5)
    metric.error = LookupError("compute")
    with pytest.raises(LookupError):
        metric([6])
    metric.error = None
    assert metric.compute() == [1, 2]


def test_the_settings() -> None:
    meta = {"classes": ["a", "b"]}
    metric = _Items(meta)
    meta["classes"] = []
    assert metric.dataset_meta == {"classes": ["a", "b"]}
    assert metric.dataset_meta is not metric.dataset_meta
    assert _Items().dataset_meta is None
    assert _Items(logger=(logger := metric.logger)).logger is logger
    with pytest.raises(AssertionError, match="cat or unzip, got 'zip'"):
        _Items(dist_collect_mode="zip")
    with pytest.raises(AssertionError, match="got 'torch_gpu'"):
        _Items(dist_backend="torch_gpu")
    with pytest.raises(TypeError, match="abstract"):
        BaseMetric()  # type: ignore[abstract]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "torch_cpu"])
@on_ranks(4)
def test_four_ranks(backend: str) -> None:
    rank = dist.get_rank()
    strided = _Items(dist_backend=backend)
    strided.add(range(rank, 40, 4))
    blocked = _Items(dist_collect_mode="cat", dist_backend=backend)
    blocked.add(range(10 * rank, 10 * rank + 10))
    for metric in (strided, blocked):
        assert metric.compute() == list(range(40))
        assert metric.compute(size=39) == list(range(39))
        assert metric([rank]) == [rank]


@on_ranks(2)
def test_ranks_with_unequal_numbers_of_results() -> None:
    """None is a result like any other."""
    results = [["a", None, "c"], ["d", "e"]][dist.get_rank()]
    for mode, expected in (
        ("unzip", ["a", "d", None, "e", "c"]),
        ("cat", ["a", None, "c", "d", "e"]),
    ):
        metric = _Items(dist_collect_mode=mode)
        metric.add(results)
        assert metric.compute() == expected
        metric.reset()
        metric.add(results if dist.get_rank() else [])
        assert metric.compute() == ["d", "e"]


def _fail_on_rank_0() -> list[tuple[str, str]]:
    metric = _Items()
    metric.add([1])
    outcomes = []
    for error in (ZeroDivisionError("no samples"), PickyError(1, 2), KeyError("a")):
        # Only rank 0 computes, so the other ranks' errors never matter.
        metric.error = error if dist.get_rank() == 0 else OSError("never")
        outcomes.append(outcome(metric.compute))
    metric.error = None
    # Results that cannot be sent to rank 0, or back from it.
    metric.add([lambda: None] if dist.get_rank() == 1 else [])
    outcomes.append(outcome(metric.compute))
    metric.reset()
    metric.compute_metric = lambda results: lambda: None  # type: ignore[method-assign]
    outcomes.append(outcome(metric.compute))
    assert get_dist_backend().all_gather_object(dist.get_rank()) == [0, 1]
    return outcomes


def test_an_error_on_rank_0_is_one_on_all() -> None:
    by_rank = run_ranks(_fail_on_rank_0, 2)
    names = ["ZeroDivisionError", "CollectiveError", "KeyError", *["CollectiveError"] * 2]
    assert [[name for name, _ in outcomes] for outcomes in by_rank] == [names, names]
    assert by_rank[0][0][1] == "no samples"
    assert by_rank[1][0][1].startswith("compute_metric() on rank 0 (tests")
    assert by_rank[1][0][1].endswith("): no samples")
    assert all("PickyError: 1 is not 2" in outcomes[1][1] for outcomes in by_rank)
    assert all("rank 1" in outcomes[3][1] for outcomes in by_rank)


def _run_subgroup() -> Any:
    backend = TorchDist(dist.new_group([1, 2]))
    if dist.get_rank() == 0:
        return None
    metric = _Items(dist_backend=backend)
    metric.add([dist.get_rank()])
    accuracy = CatMetric(**metric_sync(backend))
    accuracy.update(torch.tensor([float(dist.get_rank())]))
    return metric.compute(), accuracy.compute().tolist()


def test_a_sub_group_without_rank_0() -> None:
    assert run_ranks(_run_subgroup, 3) == [None, ([1, 2], [1.0, 2.0]), ([1, 2], [1.0, 2.0])]


def _score(backend: str) -> tuple[float, list[float]]:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 10, generator=generator)
    target = torch.randint(10, (40,), generator=generator)
    metrics = MetricCollection(
        {
            "accuracy": MulticlassAccuracy(10, average="micro", **metric_sync(backend)),
            "seen": CatMetric(**metric_sync(backend)),
        }
    ).clone()
    samples = slice(0, 30) if rank == 0 else slice(30, 40)
    metrics["accuracy"].update(logits[samples], target[samples])
    metrics["seen"].update(target[samples].float())
    results = metrics.compute()
    assert results["accuracy"] == (logits.argmax(1) == target).float().mean()
    assert results["seen"].tolist() == target.tolist()
    # Only the result is synchronised, so later additions count once.
    metrics["seen"].update(torch.tensor([100.0 + rank]))
    return float(results["accuracy"]), metrics["seen"].compute()[-11:].tolist()


@pytest.mark.parametrize("backend", ["torch", "torch_cpu"])
def test_torchmetrics_over_any_back_end(backend: str) -> None:
    rank_0, second = run_ranks(_score, 2, backend)
    assert rank_0 == second
    assert rank_0[1][-1] == 101.0


def test_torchmetrics_in_one_process() -> None:
    metric = copy.deepcopy(CatMetric(**metric_sync()))
    metric.update(torch.tensor([1.0, 2.0]))
    assert metric.compute().tolist() == [1.0, 2.0]


@on_ranks(2)
def test_the_group_belongs_to_the_back_end() -> None:
    metric = CatMetric(process_group=dist.group.WORLD, **metric_sync())
    metric.update(torch.ones(1))
    text = outcome_text(metric.compute)
    assert text.startswith("ValueError: ")
    assert "metric_sync(TorchDist(group))" in text
