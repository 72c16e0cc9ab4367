"""Wrappers of torchmetrics give the results of their direct use, on one and on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import slow
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import (
    BootStrapper,
    ClasswiseWrapper,
    LambdaInputTransformer,
    MetricTracker,
    MinMaxMetric,
    MultioutputWrapper,
    Running,
)

from stepwrap.loops import HookList, LoopState, MeanLoss, ValLoop, build_loader
from stepwrap.loops.metrics.evaluation import compute_metrics
from stepwrap.wrappers import SingleDevice, SupervisedModel


def accuracy(average: str = "micro") -> MulticlassAccuracy:
    return MulticlassAccuracy(3, average=average)


def reverse(preds: Tensor) -> Tensor:
    return -preds


CLASSIFICATION: dict[str, Callable[[], Any]] = {
    "classwise": lambda: ClasswiseWrapper(accuracy("none")),
    "minmax": lambda: MinMaxMetric(accuracy()),
    "transformed": lambda: LambdaInputTransformer(accuracy(), reverse),
    "minmax_transformed": lambda: MinMaxMetric(LambdaInputTransformer(accuracy(), reverse)),
    "transformed_collection": lambda: LambdaInputTransformer(
        MetricCollection([accuracy()]), reverse
    ),
    "minmax_composition": lambda: MinMaxMetric(1 - accuracy()),
    "collection": lambda: MetricCollection({"a": MinMaxMetric(accuracy()), "b": accuracy()}),
    "bootstrap_composition": lambda: BootStrapper(1 - accuracy(), num_bootstraps=3, raw=True),
    "bootstrap": lambda: BootStrapper(accuracy(), num_bootstraps=3, raw=True),
    "composition": lambda: 1 - Running(accuracy(), window=2),
    "running": lambda: Running(accuracy(), window=2),
}
REGRESSION: dict[str, Callable[[], Any]] = {
    "multioutput": lambda: MultioutputWrapper(MeanSquaredError(), 3),
    "running_error": lambda: Running(MeanSquaredError(), window=2),
}
# Their results do not depend on how the samples are divided into batches.
EXACT = ("classwise", "minmax", "multioutput", "transformed", "collection", "minmax_composition")


def tensors(name: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    preds = torch.randn(26, 3, generator=generator)
    if name in REGRESSION:
        return preds, torch.randn(26, 3, generator=generator)
    return preds, torch.randint(0, 3, (26,), generator=generator)


def evaluate(name: str, batches: Any, **options: Any) -> dict[str, float]:
    loss = nn.MSELoss() if name in REGRESSION else nn.CrossEntropyLoss()
    model = SingleDevice(SupervisedModel(nn.Identity(), loss))
    metrics = {"metric": {**CLASSIFICATION, **REGRESSION}[name](), "loss": MeanLoss()}
    results = ValLoop(batches, metrics, **options).run(LoopState(model), HookList())
    return {key: value for key, value in results.items() if key != "loss"}


def evaluate_directly(name: str, batches: Any) -> dict[str, float]:
    metric = {**CLASSIFICATION, **REGRESSION}[name]()
    for preds, target in batches:
        metric.update(preds, target)
    return compute_metrics({"metric": metric})


@pytest.mark.parametrize("name", [*CLASSIFICATION, *REGRESSION])
def test_a_wrapper_gets_what_the_metric_inside_takes(name: str) -> None:
    batches = [*zip(*(tensor.split(8) for tensor in tensors(name)), strict=True)]
    torch.manual_seed(0)
    results = evaluate(name, batches)
    torch.manual_seed(0)
    assert results == evaluate_directly(name, batches)


def _evaluate_share(name: str) -> dict[str, float]:
    return evaluate(name, build_loader(TensorDataset(*tensors(name)), batch_size=5))


def _evaluate_on_ranks(names: list[str]) -> list[dict[str, float]]:
    return [_evaluate_share(name) for name in names]


def test_on_ranks_each_sample_counts_once() -> None:
    expected = [evaluate_directly(name, [tensors(name)]) for name in EXACT]
    for rank_results in run_ranks(_evaluate_on_ranks, 2, list(EXACT)):
        for results, direct in zip(rank_results, expected, strict=True):
            assert results == pytest.approx(direct, rel=1e-6)


def _bootstrap() -> tuple[dict[str, float], dict[str, float]]:
    """Return the results of a loop, and those with the synchronisation of torchmetrics."""
    rank = dist.get_rank()
    batches = [tuple(tensor[rank::2] for tensor in tensors("bootstrap"))] * 2
    torch.manual_seed(rank)
    results = evaluate("bootstrap", batches, per_rank=True)
    torch.manual_seed(rank)
    return results, evaluate_directly("bootstrap", batches)


@pytest.mark.parametrize("ranks", slow(2))
def test_bootstraps_are_merged_over_ranks(ranks: int) -> None:
    for results, direct in run_ranks(_bootstrap, ranks):
        assert results == pytest.approx(direct, rel=1e-6)


def _refuse_running() -> None:
    text = "metrics.metric: Running .* number of processes, which is 2: use the metric inside it"
    with pytest.raises(ValueError, match=text):
        _evaluate_share("running")


def test_a_window_of_batches_is_refused_on_ranks() -> None:
    run_ranks(_refuse_running, 2)


def test_wrappers_that_would_be_wrong_are_refused() -> None:
    with pytest.raises(TypeError, match=r"metrics\.best must .*inside a MetricTracker"):
        ValLoop([], {"best": MetricTracker(accuracy())})
    transformer = LambdaInputTransformer(accuracy(), reverse)
    model = SingleDevice(SupervisedModel(nn.Identity(), nn.CrossEntropyLoss()))
    loop = ValLoop([tensors("")], {"all": MetricCollection({"reversed": transformer})})
    with pytest.raises(ValueError, match=r"metrics.all: LambdaInputTransformer does not transform"):
        loop.run(LoopState(model), HookList())


def test_missing_inputs_of_a_wrapped_metric_are_named() -> None:
    class Sums(nn.Module):
        def val_step(self, data: Any) -> dict[str, Tensor]:
            return {"sums": data[0].sum()}

    loop = ValLoop([tensors("")], {"accuracy": MinMaxMetric(accuracy())})
    with pytest.raises(ValueError, match="MinMaxMetric needs preds, target"):
        loop.run(LoopState(Sums()), HookList())
