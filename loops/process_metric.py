"""Metrics that process batches and compute from a list of results, as mmengine's do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from ..collectives import BaseMetric
from ..registry import METRICS
from .data import SeededSamples


class Processor(Protocol):
    """What a metric of that kind has."""

    results: list[Any]
    dataset_meta: Any

    def process(self, data_batch: Any, data_samples: list[Any]) -> None:
        """Append to `results` what counts of one batch."""

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """Return the figures of all results by name."""


@METRICS.register_module()
class ProcessMetric(BaseMetric):
    """A metric with `process(data_batch, data_samples)` and `compute_metrics(results)`.

    Subclasses of mmengine's BaseMetric are of this kind. The results of all ranks come together
    here; the metric's own `prefix` and `collect_device` have no effect.

    Args:
        metric: One such.
        dataset_meta: What the metric is to know of the data set, such as class names; default:
            the data set's own `metainfo`, where it has one.
    """

    def __init__(self, metric: Processor, dataset_meta: Mapping[str, Any] | None = None) -> None:
        super().__init__(dataset_meta)
        self._metric = metric
        self.higher_is_better: bool | None = getattr(metric, "higher_is_better", None)
        if dataset_meta is not None:
            metric.dataset_meta = dataset_meta

    def tell_of(self, loader: Any) -> None:
        """Tell the metric of a loader's data set, unless it has been told of one."""
        dataset = getattr(loader, "dataset", None)
        # What build_loader lays around a data set that workers read.
        dataset = dataset.samples if isinstance(dataset, SeededSamples) else dataset
        known = getattr(dataset, "metainfo", None)
        if self.dataset_meta is None and known is not None:
            self.dataset_meta = self._metric.dataset_meta = known

    def add(self, data_samples: Iterable[Any], data_batch: Any) -> None:
        """Process the predictions of one batch."""
        plain = [_as_dict(sample) for sample in data_samples]
        self._metric.results.clear()
        self._metric.process(data_batch, plain)
        self._results += self._metric.results

    def compute_metric(self, results: list[Any]) -> dict[str, Any]:
        """Return the figures of all results."""
        return self._metric.compute_metrics(results)


def _as_dict(sample: Any) -> Any:
    # mmengine's data elements; its metrics expect the dicts of them.
    to_dict = getattr(sample, "to_dict", None)
    return sample if to_dict is None else to_dict()
