"""Metrics that process batches, in a validation on one process and on two ranks."""

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
    """A prediction like mmengine's data elements."""

    def __init__(self, value: float) -> None:
        self.value = value

    def to_dict(self) -> dict[str, float]:
        return {"value": self.value}


class Highest:
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
    state.model.val_step = lambda batch: [
        Sample(float(prediction)) for prediction in predict(*batch)
    ]
    metric = ProcessMetric(Highest())
    loop = ValLoop(loader(16), {"highest": metric})
    results = loop.run(state, HookList())
    assert loop.run(state, HookList()) == results
    return results


def test_results_of_all_batches_and_ranks() -> None:
    alone = validate()
    assert alone["highest/of"] == 16
    assert run_ranks(validate, 2) == [alone, alone]


def test_dataset_meta_is_set_on_the_metric() -> None:
    metric = Highest()
    ProcessMetric(metric, dataset_meta={"classes": ["a", "b"]})
    assert metric.dataset_meta == {"classes": ["a", "b"]}


class Described(Dataset[Any]):
    metainfo = {"classes": ("c", "d")}

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(1)


@pytest.mark.parametrize("workers", [0, 1])
def test_dataset_meta_defaults_to_the_data_sets_metainfo(workers: int) -> None:
    metric, default = Highest(), Highest()
    metrics = {
        "given": ProcessMetric(metric, {"classes": ["a"]}),
        "default": ProcessMetric(default),
    }
    data = build_loader(Described(), batch_size=4, num_workers=workers)
    ValLoop(data, metrics)
    assert metric.dataset_meta == {"classes": ["a"]}
    assert default.dataset_meta == {"classes": ("c", "d")}
