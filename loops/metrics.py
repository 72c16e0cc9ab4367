"""Metrics: fed from the outputs of a step, merged over the ranks, flattened."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from ..collectives import (
    BaseMetric,
    MPI4PyDist,
    TorchCPUDist,
    TorchCUDADist,
    TorchDist,
    all_gather_object,
)
from ..registry import METRICS
from .data.loaders import SeededSamples
from .notes import add_note, describe, name_of

AnyMetric: TypeAlias = Metric | BaseMetric

_OF_ALL_RANKS = (TorchDist, TorchCPUDist, TorchCUDADist, MPI4PyDist)
# Words in the name of a metric, or of its class, that tell which values are better.
_FALLING = frozenset(
    ["err", "error", "errors", "loss", "losses", "mae", "mse", "nll", "perplexity", "rmse"]
)
_RISING = frozenset(["acc", "accuracy", "auc", "auroc", "f1", "iou", "precision", "recall"])
_WORD = re.compile(r"[A-Z]?[a-z]+[0-9]*|[A-Z]+[0-9]*(?![a-z])")
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@METRICS.register_module()
class MeanLoss(Metric):
    """Mean loss per sample, from the batches' mean losses and sample counts."""

    full_state_update = False
    higher_is_better = False
    total: Tensor
    samples: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("samples", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, loss: Tensor, num_samples: int) -> None:
        """Add one batch: its mean loss (0-d) and how many samples it had."""
        self.total += loss.detach().double() * num_samples
        self.samples += num_samples

    def compute(self) -> Tensor:
        """Return the mean over all samples; nan without any."""
        return self.total / self.samples


def feed_metric(name: str, metric: AnyMetric, outputs: Any, batch: Any) -> None:
    """Update one metric with the outputs of a step.

    A mapping is passed by keyword, each metric taking the arguments that its
    `update` (a BaseMetric's `add`) knows; anything else as `update(outputs, batch)`.

    An error of the metric's own gets a note with its name and the shapes it was given.

    Raises:
        ValueError: `outputs` lacks an argument that the metric needs.
    """
    update: Callable[..., None] = metric.add if isinstance(metric, BaseMetric) else metric.update
    args, kwargs = _arguments(name, metric, update, outputs, batch)
    try:
        update(*args, **kwargs)
    except Exception as error:
        given = describe(kwargs or args)
        add_note(error, f"in metric {name!r} ({name_of(metric)}), which was given {given}")
        raise


def _arguments(
    name: str, metric: AnyMetric, update: Callable[..., None], outputs: Any, batch: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what `update` takes of the outputs of a step."""
    if not isinstance(outputs, Mapping):
        return (outputs, batch), {}
    parameters = inspect.signature(update).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return (), dict(outputs)
    named = {key: p for key, p in parameters.items() if p.kind not in _VARIADIC}
    needed = [key for key, p in named.items() if p.default is inspect.Parameter.empty]
    missing = [key for key in needed if key not in outputs]
    if missing:
        raise ValueError(
            f"metric {name!r} ({type(metric).__name__}) needs {', '.join(needed)}, but the step "
            f"returned {', '.join(map(str, outputs)) or 'nothing'}: {', '.join(missing)} missing"
        )
    return (), {key: outputs[key] for key in named if key in outputs}


def empty_copies(metrics: Mapping[str, AnyMetric]) -> dict[str, AnyMetric]:
    """Return copies without results, whose updates `metrics` do not see.

    A metric that cannot be copied is left out.
    """
    copies: dict[str, AnyMetric] = {}
    for name, metric in metrics.items():
        # A BaseMetric may hold a process group, which cannot be copied; its results are a new list.
        with suppress(Exception):
            copies[name] = copy(metric) if isinstance(metric, BaseMetric) else deepcopy(metric)
            copies[name].reset()
    return copies


def directions_of(metrics: Mapping[str, AnyMetric]) -> dict[str, bool | None]:
    """Return by name whether higher values are better; None where that is not known.

    It is determined by `higher_is_better`, as torchmetrics has it, or by words such as "loss",
    "error" and "accuracy" in its name or its class's.
    """
    found: dict[str, bool | None] = {}
    for name, metric in metrics.items():
        found[name] = _direction(name, metric)
        if isinstance(metric, MetricCollection):
            parts = {f"{name}/{key}": part for key, part in metric.items()}
            found |= {key: _direction(key, part) for key, part in parts.items()}
    return found


def direction_of(name: str, known: Mapping[str, bool | None]) -> bool | None:
    """Say whether higher values of the result `name` are better, by `directions_of` the metrics."""
    own = known.get(name)
    if own is None:
        own = _by_words(name.rpartition("/")[2])
    above = name.rpartition("/")[0]
    return direction_of(above, known) if own is None and above else own


def _direction(name: str, metric: AnyMetric) -> bool | None:
    # What a wrapper of torchmetrics holds tells for it.
    parts = metric.modules() if isinstance(metric, Metric | MetricCollection) else [metric]
    told = {getattr(part, "higher_is_better", None) for part in parts} & {True, False}
    if told:
        return told.pop() if len(told) == 1 else None
    by_name = _by_words(name.rpartition("/")[2])
    return _by_words(type(metric).__name__) if by_name is None else by_name


def _by_words(text: str) -> bool | None:
    words = {word.lower() for word in _WORD.findall(text)}
    falls, rises = bool(words & _FALLING), bool(words & _RISING)
    return None if falls == rises else rises


def merge_metrics(metrics: Mapping[str, AnyMetric], group: dist.ProcessGroup | None = None) -> None:
    """Give every rank's metrics the states of the group's ranks; each of them must call this.

    One exchange for all of them. torchmetrics' own synchronisation waits for
    ever where ranks hold lists of unequal length, as they do when a rank had
    fewer batches than the others or none. A BaseMetric is left as it is: its
    own `compute` gathers.
    """
    of_torchmetrics = [metric for metric in metrics.values() if isinstance(metric, Metric)]
    parts = [part for metric in of_torchmetrics for part in _parts(metric)]
    mine = [{key: _on_cpu(getattr(part, key)) for key in _reductions(part)} for part in parts]
    by_rank = all_gather_object(mine, group)
    if len(by_rank) == 1:
        return
    for index, part in enumerate(parts):
        for key, reduction in _reductions(part).items():
            values = [states[index][key] for states in by_rank]
            setattr(part, key, _merged(values, reduction, part.device))


def compute_metrics(
    metrics: Mapping[str, AnyMetric],
    size: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """Return the results by name; "name/key" where a metric has several.

    Every rank must call this, with the metrics in the same order.

    Args:
        size: How many samples the data set has, where ranks were given some twice to be even.
        group: The ranks from which a BaseMetric gathers, unless its back-end is one of the
            user's own; default: those of its back-end.
    """
    results: dict[str, float] = {}
    with warnings.catch_warnings():
        # A rank may have had no batch of its own.
        warnings.filterwarnings("ignore", message=r"The ``compute`` method of metric")
        for name, metric in metrics.items():
            try:
                _flatten(name, _computed(metric, size, group), results)
            except Exception as error:
                add_note(
                    error, f"in metric {name!r} ({name_of(metric)}), as it computed its result"
                )
                raise
    return results


def _computed(metric: AnyMetric, size: int | None, group: dist.ProcessGroup | None) -> Any:
    if not isinstance(metric, BaseMetric):
        return metric.compute()
    with _gathering_from(metric, group):
        return metric.compute(size)


@contextmanager
def _gathering_from(metric: BaseMetric, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Let one of our back-ends that knows no group of its own gather from `group` meanwhile."""
    backend = metric.dist_backend
    of_all = type(backend) in _OF_ALL_RANKS and getattr(backend, "group", None) is None
    if group is not None and of_all:
        metric.dist_backend = TorchDist(group)
    try:
        yield
    finally:
        metric.dist_backend = backend


def _parts(metric: Metric) -> list[Metric]:
    """Return the metric and those inside it (a collection's, a wrapper's), unsynchronised."""
    parts = [part for part in metric.modules() if isinstance(part, Metric)]
    for part in parts:
        part.sync_on_compute = False
        part._to_sync = False
    return parts


def _reductions(metric: Metric) -> dict[str, Callable[[Tensor], Tensor] | None]:
    reductions: dict[str, Any] = metric._reductions
    return reductions


def _on_cpu(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.detach().cpu()
    if isinstance(state, (list, tuple)):
        return type(state)(_on_cpu(item) for item in state)
    return state


def _on_device(state: Any, device: torch.device) -> Any:
    if isinstance(state, Tensor):
        return state.to(device)
    if isinstance(state, (list, tuple)):
        return type(state)(_on_device(item, device) for item in state)
    return state


def _merged(
    values: Sequence[Any],
    reduction: Callable[[Tensor], Tensor] | None,
    device: torch.device,
) -> Any:
    """Return one state from every rank's, in rank order."""
    if isinstance(values[0], list):
        return [_on_device(item, device) for own in values for item in own]
    stacked = torch.stack([value.to(device) for value in values])
    return stacked if reduction is None else reduction(stacked)


def _flatten(name: str, value: Any, results: dict[str, float]) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            _flatten(f"{name}/{key}", item, results)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _flatten(f"{name}/{index}", item, results)
    elif getattr(value, "ndim", 0):
        _flatten(name, value.tolist(), results)
    else:
        results[name] = float(value)


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
