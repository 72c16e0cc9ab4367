"""Metrics that process batches, in a validation of one process and of two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hook_runs import loader, new_state
from ranks import run_ranks
from torch import Tensor
from torch.utils.data import Dataset

from stepwrap.loops import HookList, ProcessMetric, ValLoop, build_loader


class Sample:
    """A prediction as mmengine's data elements are."""

    def __init__(self, value: float) -> None:
        self.value = value

    def to_dict(self) -> dict[str, float]:
        return {"value": self.value}


class Highest:
    """The highest prediction, and how many there were."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.dataset_meta: Any = None

    def process(self, data_batch: Any, data_samples: list[Any]) -> None:
        assert len(data_batch[0]) == len(data_samples)
        self.results += [sample["value"] for sample in data_samples]

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        return {"value": max(results), "of": len(results)}


def validate() -> dict[str, float]:
    state = new_state()
    predict = state.model.module.forward
    state.model.val_step = lambda batch: [Sample(float(one)) for one in predict(*batch)]
    metric = ProcessMetric(Highest())
    loop = ValLoop(loader(16), {"highest": metric})
    first = loop.run(state, HookList())
    assert loop.run(state, HookList()) == first
    return first


def test_results_of_all_batches_and_ranks() -> None:
    alone = validate()
    assert alone["highest/of"] == 16
    assert run_ranks(validate, 2) == [alone, alone]


def test_it_tells_the_metric_of_the_data() -> None:
    metric = Highest()
    ProcessMetric(metric, dataset_meta={"classes": ["a", "b"]})
    assert metric.dataset_meta == {"classes": ["a", "b"]}


class Described(Dataset[Any]):
    """Says of itself what metrics want to know, as mmengine's data sets do."""

    metainfo = {"classes": ("c", "d")}

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(1)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_data_set_tells_the_metric_unless_the_config_does(workers: int) -> None:
    told, untold = Highest(), Highest()
    metrics = {"told": ProcessMetric(told, {"classes": ["a"]}), "untold": ProcessMetric(untold)}
    data = build_loader(Described(), batch_size=4, num_workers=workers)
    ValLoop(data, metrics)
    assert told.dataset_meta == {"classes": ["a"]}
    assert untold.dataset_meta == {"classes": ("c", "d")}
