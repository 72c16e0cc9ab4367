"""Evaluation is exact for any number of ranks; arguments and synchronisation of metrics."""

from __future__ import annotations

import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loop_parts import Unsized, make_data, make_loader, make_state
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, MinMaxMetric
from torchmetrics.classification import (
    BinaryAccuracy,
    MulticlassAccuracy,
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)

from stepwrap.loops import (
    EpochTrainLoop,
    EvalSets,
    HookList,
    LoopState,
    MeanLoss,
    TestLoop,
    ValLoop,
    build_loader,
    load_checkpoint,
    save_checkpoint,
)
from stepwrap.loops.metrics.evaluation import compute_metrics, feed_metrics, merge_metrics
from stepwrap.wrappers import (
    AmpOptimWrapper,
    BaseModel,
    OptimWrapper,
    SingleDevice,
    StepDistributedDataParallel,
    SupervisedModel,
)

CLASSES = 10


class Answers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, scores: Tensor) -> Tensor:
        return scores * self.scale


def evaluate(samples: int, batch_size: int) -> dict[str, float]:
    """Evaluate random scores against random targets on this rank's share."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(samples, CLASSES, generator=generator)
    targets = torch.randint(0, CLASSES, (samples,), generator=generator)
    metrics: dict[str, Metric] = {
        "accuracy": MulticlassAccuracy(CLASSES, average="micro"),
        "confusion": MulticlassConfusionMatrix(CLASSES),
        "calibration": MulticlassCalibrationError(CLASSES),
        "many": MetricCollection([MulticlassF1Score(CLASSES), MulticlassAccuracy(CLASSES)]),
        "loss": MeanLoss(),
    }
    loader = build_loader(TensorDataset(scores, targets), batch_size=batch_size)
    model = SingleDevice(SupervisedModel(Answers(), nn.CrossEntropyLoss()))
    loop = ValLoop(loader, metrics)
    state = LoopState(model)
    result = loop.run(state, HookList())
    assert loop.run(state, HookList()) == result
    assert state.metrics == result
    return result


def test_each_sample_counts_once_on_one_two_and_three_ranks() -> None:
    """1,797 samples are divisible by neither the ranks nor the batch size."""
    alone = evaluate(1797, 64)
    counts = {name: value for name, value in alone.items() if name.startswith("confusion")}
    assert len(counts) == CLASSES**2
    assert sum(counts.values()) == 1797
    for world_size in (2, 3):
        for metrics in run_ranks(evaluate, world_size, 1797, 64):
            assert metrics.keys() == alone.keys()
            assert {name: metrics[name] for name in counts} == counts
            assert metrics["accuracy"] == alone["accuracy"]
            assert metrics["calibration"] == pytest.approx(alone["calibration"], abs=1e-6)
            assert metrics["loss"] == pytest.approx(alone["loss"], rel=1e-6)


def test_the_batch_size_does_not_matter() -> None:
    assert evaluate(97, 97)["accuracy"] == evaluate(97, 5)["accuracy"]


def test_a_rank_without_batches_neither_hangs_nor_warns() -> None:
    """Warnings are also errors on the ranks."""
    alone = evaluate(2, 1)
    for metrics in run_ranks(evaluate, 3, 2, 1):
        assert metrics["accuracy"] == alone["accuracy"]
        assert metrics["calibration"] == alone["calibration"]


def test_an_evaluation_without_any_batch_is_named() -> None:
    loop = ValLoop([], {"loss": MeanLoss()})
    with pytest.raises(ValueError, match="val loader has no batches"):
        loop.run(make_state(), HookList())
    with pytest.raises(ValueError, match="test loader has no batches"):
        TestLoop(iter(()), {}).run(make_state(), HookList())


def _evaluate_nothing(how: str) -> str:
    """Evaluate loaders without length and batches; return the error."""
    make = TestLoop if how == "test" else ValLoop
    state, empty = make_state(), make(Unsized([]), {"loss": MeanLoss()})
    loop: Any = empty
    if how == "one of several sets":
        full = make(build_loader(make_data(4), batch_size=2), {"loss": MeanLoss()})
        loop = EvalSets({"full": full, "none": empty})
    elif how == "training":
        loop = EpochTrainLoop(make_loader(4), max_epochs=1, val_loop=empty)
    with pytest.raises(ValueError, match="loader has no batches") as caught:
        loop.run(state, HookList())
    assert state.metrics == {}
    return " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


@pytest.mark.parametrize("how", ["training", "validate", "test", "one of several sets"])
def test_several_ranks_without_any_batch_are_an_error_as_for_one_process(how: str) -> None:
    alone = _evaluate_nothing(how)
    assert "'none'" in alone or how != "one of several sets"
    assert run_ranks(_evaluate_nothing, 2, how) == [alone] * 2


def test_a_model_without_the_step_is_named() -> None:
    with pytest.raises(TypeError, match="must have val_step, .*Linear"):
        ValLoop([1]).run(LoopState(nn.Linear(1, 1)), HookList())


def test_missing_metric_inputs_name_both_sides() -> None:
    with pytest.raises(
        ValueError, match=r"metrics.acc: MulticlassAccuracy needs preds, target"
    ) as e:
        feed_metrics({"acc": MulticlassAccuracy(3)}, {"logits": 1, "target": 2}, None)
    assert "returned logits, target: preds missing" in str(e.value)


def test_optional_metric_inputs_are_passed_when_there() -> None:
    metric = MeanMetric()
    feed_metrics({"mean": metric}, {"value": 1.0, "weight": 1.0, "other": 9}, None)
    feed_metrics({"mean": metric}, {"value": 4.0, "weight": 2.0}, None)
    assert metric.compute().item() == 3.0


class Pairs(Metric):
    """Count outputs and batch elements of steps that do not return a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", torch.zeros(2), dist_reduce_fx="sum")
        self.add_state("items", [], dist_reduce_fx=None)

    def update(self, outputs: list[Any], batch: Any) -> None:
        self.seen += torch.tensor([len(outputs), len(batch[0])])
        self.items.append(torch.tensor([len(outputs)]))

    def compute(self) -> dict[str, Any]:
        return {"sums": self.seen, "batches": len(self.items), "nested": [{"x": 1}]}


class Listing(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def forward(self, inputs: Tensor, target: Tensor, mode: str = "tensor") -> Any:
        return list(self.net(inputs))


def _count_pairs() -> dict[str, float]:
    loop = TestLoop(build_loader(make_data(7), batch_size=2), {"pairs": Pairs()})
    return loop.run(LoopState(SingleDevice(Listing())), HookList())


def test_other_outputs_come_with_their_batch_and_results_are_flattened() -> None:
    expected = {"pairs/sums/0": 7, "pairs/sums/1": 7, "pairs/batches": 4, "pairs/nested/0/x": 1}
    assert _count_pairs() == expected
    # torchmetrics cannot gather lists of unequal length (2, 2 and 1 on three ranks).
    by_rank = run_ranks(_count_pairs, 3)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    assert by_rank[0]["pairs/sums/0"] == 7


class MeanOfMeans(Metric):
    """A metric whose state depends on how the samples are divided."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.add_state("level", torch.zeros(()), dist_reduce_fx=reduction)

    def update(self, value: Tensor) -> None:
        self.level = value

    def compute(self) -> Tensor:
        return self.level


def _warnings_of_merging(reduction: str, is_constant: bool = False) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("stepwrap.loops.metrics.evaluation")
    logger.addHandler(handler)
    for _ in range(2):
        metric = MeanOfMeans(reduction)
        metric.update(torch.tensor(1.0 if is_constant else float(dist.get_rank())))
        merge_metrics({"level": metric})
    logger.removeHandler(handler)
    return messages


def test_a_state_that_is_averaged_over_processes_is_reported_once() -> None:
    assert run_ranks(_warnings_of_merging, 3, "mean", True) == [[], [], []]
    (message,), *others = run_ranks(_warnings_of_merging, 3, "mean")
    for fact in ("MeanOfMeans", "'level'", "dist_reduce_fx='sum'"):
        assert fact in message
    assert others == [[], []]
    assert run_ranks(_warnings_of_merging, 3, "sum") == [[], [], []]


def test_mean_loss_weighs_by_samples() -> None:
    metric = MeanLoss()
    metric.update(torch.tensor(1.0), 3)
    metric.update(torch.tensor(5.0), 1)
    assert metric.compute().item() == 2.0
    merge_metrics({"loss": metric})
    assert compute_metrics({"loss": metric}) == {"loss": 2.0}


def test_only_one_warning_is_silenced() -> None:
    class Warns(MeanLoss):
        def compute(self) -> Tensor:
            warnings.warn("something else", UserWarning, stacklevel=1)
            return super().compute()

    with pytest.raises(UserWarning, match="something else"):
        compute_metrics({"loss": Warns()})


def _validated_and_saved(folder: Path) -> list[dict[str, float]]:
    def make() -> LoopState:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        model = StepDistributedDataParallel(SupervisedModel(net, nn.CrossEntropyLoss()))
        return LoopState(model, OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1)))

    val_loop = ValLoop(build_loader(make_data(16), batch_size=4), {"loss": MeanLoss()})
    loader = build_loader(make_data(16), batch_size=4, train=True)
    state, other = make(), make()
    EpochTrainLoop(loader, max_epochs=1, val_loop=val_loop).run(state, HookList())
    load_checkpoint(save_checkpoint(folder, state)).load_model(other.model)
    return [state.metrics, val_loop.run(other, HookList())]


def test_running_statistics_equal_the_saved_ones(tmp_path: Path) -> None:
    """Under DDP they differ between ranks after a training step."""
    (in_the_run, of_the_saved), other_rank = run_ranks(_validated_and_saved, 2, tmp_path)
    assert in_the_run == of_the_saved
    assert other_rank == [in_the_run, of_the_saved]


def test_a_test_leaves_the_results_of_the_validation() -> None:
    state = make_state()
    state.metrics, state.evaluated_at = {"accuracy": 0.5}, 0
    loader = build_loader(make_data(4), batch_size=2)
    assert set(TestLoop(loader, {"loss": MeanLoss()}).run(state, HookList())) == {"loss"}
    assert state.metrics == {"accuracy": 0.5}


class Kinds(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.seen: set[torch.dtype] = set()

    def forward(self, inputs: Tensor, targets: Tensor, mode: str = "tensor") -> Any:
        self.seen.add(self.layer(inputs).dtype)
        return []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_evaluation_runs_in_the_precision_of_the_training(dtype: torch.dtype) -> None:
    model = Kinds()
    optim = AmpOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), dtype=dtype)
    loader = build_loader(make_data(4), batch_size=2)
    ValLoop(loader).run(LoopState(SingleDevice(model), optim), HookList())
    assert model.seen == {dtype}
    model.seen.clear()
    ValLoop(loader).run(LoopState(SingleDevice(model)), HookList())
    assert model.seen == {torch.float32}
    # The state's precision is used unless the optimizer wrapper sets one.
    half = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    plain = OptimWrapper(optim.optimizer)
    for wrapper, expected in ((optim, dtype), (plain, torch.bfloat16), (None, torch.bfloat16)):
        model.seen.clear()
        state = LoopState(SingleDevice(model), wrapper)
        state.precision = half
        ValLoop(loader).run(state, HookList())
        assert model.seen == {expected}


def _states_of_a_collection() -> list[float]:
    rank = torch.distributed.get_rank()
    metrics = MetricCollection({"all": CatMetric(), "mean": MeanMetric()})
    for value in [[0.0], [1.0, 2.0], []][rank]:
        metrics.update(torch.tensor(value))
    merge_metrics({"many": metrics})
    # Only this rank computes, so no further exchange is possible.
    return [] if rank else metrics["all"].compute().tolist() + [metrics["mean"].compute().item()]


def test_a_collection_is_merged_over_ranks_with_unequal_states() -> None:
    assert run_ranks(_states_of_a_collection, 3)[0] == [0.0, 1.0, 2.0, 1.0]


class Echo(nn.Module):
    """A model whose outputs are the batches."""

    def val_step(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch


def share_of_batches(metrics: dict[str, Any], batches: list[dict[str, Tensor]]) -> dict[str, float]:
    """Evaluate every world_size-th batch on this rank, twice."""
    distributed = torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else 0
    size = torch.distributed.get_world_size() if distributed else 1
    loop = ValLoop(batches[rank::size], metrics)
    results = loop.run(LoopState(Echo()), HookList())
    assert loop.run(LoopState(Echo()), HookList()) == results
    return results


def test_metrics_keep_the_dtype_that_the_user_has_set() -> None:
    values = torch.full((4,), 1e8, dtype=torch.float64) + 0.5
    metrics = {
        "mean": MeanMetric().set_dtype(torch.float64),
        "inside": MinMaxMetric(MeanMetric().set_dtype(torch.float64)),
        "many": MetricCollection({"mean": MeanMetric().set_dtype(torch.float64)}),
    }
    batches = [{"value": value} for value in values]
    expected = {"mean": 1e8 + 0.5, "inside/raw": 1e8 + 0.5, "many/mean": 1e8 + 0.5}
    for world_size in (1, 2):
        for results in run_ranks(share_of_batches, world_size, metrics, batches):
            assert {name: results[name] for name in expected} == expected


def test_metrics_whose_first_states_are_equal_stay_separate() -> None:
    """The second batch is above one threshold only."""
    metrics = {
        "many": MetricCollection(
            {"low": BinaryAccuracy(threshold=0.5), "high": BinaryAccuracy(threshold=0.7)}
        )
    }
    target = torch.tensor([0, 1])
    batches = [
        {"preds": torch.tensor([0.1, 0.9]), "target": target},
        {"preds": torch.tensor([0.2, 0.8]), "target": target},
        *({"preds": torch.tensor([0.6, 0.6]), "target": target},) * 3,
        {"preds": torch.tensor([0.1, 0.6]), "target": target},
    ]
    for world_size in (1, 3):
        for results in run_ranks(share_of_batches, world_size, metrics, batches):
            assert results == pytest.approx({"many/low": 9 / 12, "many/high": 8 / 12})


def test_groups_that_the_user_has_set_are_kept() -> None:
    members = {"low": BinaryAccuracy(threshold=0.5), "high": BinaryAccuracy(threshold=0.7)}
    metrics = MetricCollection(members, compute_groups=[["low", "high"]])
    batch = {"preds": torch.tensor([0.6]), "target": torch.tensor([1])}
    assert share_of_batches({"many": metrics}, [batch]) == {"many/low": 1.0, "many/high": 1.0}
