"""Update metrics from the outputs of a step, merge them over the ranks, flatten and watch them."""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from functools import cache
from itertools import takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...collectives import (
    BaseMetric,
    MPI4PyDist,
    TorchCPUDist,
    TorchCUDADist,
    TorchDist,
    all_gather_object,
    get_rank,
    get_world_size,
)
from ...primitives.notes import add_note
from ...primitives.suggestions import did_you_mean
from ...registry import METRICS
from ...registry.directions import find_direction
from ...registry.text.values import leaves
from ..data.loaders import SeededSamples
from ..error_notes import describe, get_name
from ..state import LoopState
from .inputs import MetricInputs, MetricInputsError
from .wrapped import (
    get_update_parameters,
    prepare_wrappers,
    refuse_tracker,
    transforms_inputs,
)

if TYPE_CHECKING:
    from torchmetrics import Metric

logger = logging.getLogger(__name__)

AnyMetric: TypeAlias = "Metric | BaseMetric"

_GLOBAL_BACKENDS = (TorchDist, TorchCPUDist, TorchCUDADist, MPI4PyDist)


def start_metrics(
    metrics: Mapping[str, AnyMetric],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Move the metrics to the device and reset them; ``group`` will merge them.

    Raises:
        ValueError: the result of a wrapper of torchmetrics would be wrong.
    """
    for name, metric in metrics.items():
        if isinstance(metric, nn.Module):
            prepare_wrappers(name, metric, get_world_size(group))
            _move(metric, device)
            _separate_states(metric)
        metric.reset()
        if isinstance(metric, BaseMetric):
            # A subclass may override `reset`.
            metric.batch_ends = []


def _move(metric: nn.Module, device: torch.device) -> None:
    """Move a metric of torchmetrics and those inside it; keep their dtypes."""
    inner: list[Any] = [module for module in metric.modules() if hasattr(module, "_reductions")]
    dtypes = [module.dtype for module in inner]
    metric.to(device)
    for module, dtype in zip(inner, dtypes, strict=True):
        # `to` resets the dtype to float32, to which metrics convert their inputs.
        if module.dtype != dtype:
            module.set_dtype(dtype)


def _separate_states(metric: nn.Module) -> None:
    """Let each metric of a collection update its own states, unless the user has set the groups.

    A collection merges the metrics whose states are equal after the first batch, although they may
    differ after the next one: https://github.com/Lightning-AI/torchmetrics/issues/2596
    """
    collections: list[Any] = [m for m in metric.modules() if hasattr(m, "_enable_compute_groups")]
    for collection in collections:
        if collection._enable_compute_groups is True:
            collection._enable_compute_groups = collection._groups_checked = False
            collection._groups = {}


def feed_metrics(
    metrics: Mapping[str, AnyMetric],
    outputs: Any,
    batch: Any,
    weight_of: Callable[[Any], float | Tensor] | None = None,
    inputs: Mapping[str, MetricInputs] = MappingProxyType({}),
) -> None:
    """Update metrics with the outputs of a step.

    If the outputs are a mapping, each argument of ``update`` gets the value of its name. Any other
    result is passed as ``update(outputs, batch)``. A BaseMetric has ``add`` instead of ``update``.

    Args:
        metrics: the metrics by name.
        outputs: the result of the step.
        batch: the batch.
        weight_of: returns the weight of a batch, which replaces the argument ``num_samples`` of
            metrics that also take ``loss``.
        inputs: selects what a metric gets from the outputs, by the metric's name.
    """
    for name, metric in metrics.items():
        update = metric.add if isinstance(metric, BaseMetric) else metric.update
        chosen = inputs[name].select(name, outputs) if name in inputs else outputs
        args, kwargs = _arguments(name, metric, update, chosen, batch)
        if weight_of is not None and kwargs.keys() >= {"loss", "num_samples"}:
            kwargs["num_samples"] = weight_of(batch)
        try:
            update(*args, **kwargs)
            if isinstance(metric, BaseMetric):
                metric.end_batch()
        except Exception as error:
            description = describe(kwargs or args)
            add_note(
                error, f"in metric {name!r} ({get_name(metric)}), which was given {description}"
            )
            raise


def _arguments(
    name: str, metric: AnyMetric, update: Callable[..., None], outputs: Any, batch: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not isinstance(outputs, Mapping):
        return (outputs, batch), {}
    named = get_update_parameters(metric, update)
    if named is None:
        return (), dict(outputs)
    needed = [key for key, p in named.items() if p.default is inspect.Parameter.empty]
    missing = [key for key in needed if key not in outputs]
    if missing:
        text = (
            f"{type(metric).__name__} needs {', '.join(needed)}, but the step returned "
            f"{', '.join(map(str, outputs)) or 'nothing'}: {', '.join(missing)} missing"
        )
        if "loss" in missing:
            text += (
                "; a model that computes losses in training mode only, such as a detector, has "
                "none in evaluation: remove this metric, or give the model a val_step and a "
                "test_step that return a loss"
            )
        raise MetricInputsError(f"metrics.{name}", text)
    chosen = {key: outputs[key] for key in named if key in outputs}
    if not transforms_inputs(metric):
        return (), chosen
    by_position = list(takewhile(chosen.__contains__, named))
    return tuple(map(chosen.pop, by_position)), chosen


def split_inputs(
    metrics: Mapping[str, AnyMetric | MetricInputs],
) -> tuple[dict[str, AnyMetric], dict[str, MetricInputs]]:
    """Return the metrics themselves, and the inputs of those that have a ``MetricInputs``.

    Raises:
        TypeError: a metric cannot be used in a loop.
    """
    inputs = {name: metric for name, metric in metrics.items() if isinstance(metric, MetricInputs)}
    plain = {
        n: metric.metric if isinstance(metric, MetricInputs) else metric
        for n, metric in metrics.items()
    }
    for name, metric in plain.items():
        refuse_tracker(name, metric)
    return plain, inputs


def empty_copies(metrics: Mapping[str, AnyMetric]) -> dict[str, AnyMetric]:
    """Return copies without results; leave out metrics that cannot be copied."""
    copies: dict[str, AnyMetric] = {}
    for name, metric in metrics.items():
        # A BaseMetric may hold a process group, which deepcopy cannot copy; `reset` makes a new
        # list of results.
        with suppress(Exception):
            copies[name] = copy(metric) if isinstance(metric, BaseMetric) else deepcopy(metric)
            copies[name].reset()
    return copies


def merge_metrics(metrics: Mapping[str, AnyMetric], group: dist.ProcessGroup | None = None) -> None:
    """Merge the states of the metrics over the group; every rank of the group must call this.

    All metrics are merged in one exchange. The synchronization of torchmetrics is not used, since
    it hangs if ranks hold lists of unequal length. Every BaseMetric is left out, since its
    ``compute`` gathers the results.
    """
    leaf_metrics = [p for m in metrics.values() if isinstance(m, nn.Module) for p in _unsync(m)]
    cpu = torch.device("cpu")
    mine = [{key: _moved(getattr(p, key), cpu) for key in p._reductions} for p in leaf_metrics]
    by_rank = all_gather_object(mine, group)
    if len(by_rank) == 1:
        return
    for index, leaf_metric in enumerate(leaf_metrics):
        # A value that a hook has computed from this rank's states alone.
        leaf_metric._computed = None
        for key, reduction in leaf_metric._reductions.items():
            values = [_moved(states[index][key], leaf_metric.device) for states in by_rank]
            setattr(leaf_metric, key, _merged(values, reduction))
            is_mean = getattr(reduction, "__name__", "") == "dim_zero_mean"
            # A constant, such as the range of values of a PSNR, is the same on all ranks.
            if is_mean and get_rank(group) == 0 and not _are_equal(values):
                _warn_of_mean(type(leaf_metric).__name__, key)


def compute_metrics(
    metrics: Mapping[str, AnyMetric],
    group: dist.ProcessGroup | None = None,
    *,
    by_batch: bool = False,
) -> dict[str, float]:
    """Return the results by name; every rank must call this.

    If a metric has several results, their names are "name/key".

    Args:
        metrics: the metrics by name.
        group: the ranks from which a BaseMetric gathers, unless its back-end was defined by the
            user.
        by_batch: whether the ranks took whole batches in turn; otherwise single samples.
    """
    results: dict[str, float] = {}
    with warnings.catch_warnings():
        # Torchmetrics warns if `update` was not called, but a rank may have had no batch.
        warnings.filterwarnings("ignore", message=r"The ``compute`` method of metric")
        for name, metric in metrics.items():
            try:
                computed = leaves(_computed(metric, group, by_batch), (name,), contents=_results_in)
                results |= {"/".join(map(str, path)): float(value) for path, value in computed}
            except Exception as error:
                add_note(error, f"in the computation of metric {name!r} ({get_name(metric)})")
                raise
    return results


def _computed(metric: AnyMetric, group: dist.ProcessGroup | None, by_batch: bool) -> Any:
    if not isinstance(metric, BaseMetric):
        return metric.compute()
    if not by_batch:
        metric.batch_ends = None
    backend = metric.dist_backend
    is_global = type(backend) in _GLOBAL_BACKENDS and getattr(backend, "group", None) is None
    if group is not None and is_global:
        metric.dist_backend = TorchDist(group)
    try:
        return metric.compute()
    finally:
        metric.dist_backend = backend


def _unsync(metric: nn.Module) -> list[Any]:
    """Return a metric of torchmetrics and those inside it; turn off their synchronization."""
    leaf_metrics: list[Any] = [
        leaf_metric for leaf_metric in metric.modules() if hasattr(leaf_metric, "_reductions")
    ]
    for leaf_metric in leaf_metrics:
        leaf_metric.sync_on_compute = False
        leaf_metric._to_sync = False
    return leaf_metrics


def _moved(state: Any, device: torch.device) -> Any:
    if isinstance(state, Tensor):
        return state.detach().to(device)
    if isinstance(state, (list, tuple)):
        return type(state)(_moved(entry, device) for entry in state)
    return state


def _are_equal(tensors: Sequence[Tensor]) -> bool:
    return all(torch.equal(tensor, tensors[0]) for tensor in tensors)


@cache
def _warn_of_mean(metric_name: str, key: str) -> None:
    logger.warning(
        "%s: the state %r is averaged over the processes (dist_reduce_fx), whatever their numbers "
        "of samples, so the result depends on the number of processes; keep a total and a count "
        "with dist_reduce_fx='sum', and divide them in compute",
        *(metric_name, key),
    )


def _merged(values: Sequence[Any], reduction: Any) -> Any:
    """Merge the states of all ranks, given in rank order."""
    if isinstance(values[0], list):
        return [entry for rank_items in values for entry in rank_items]
    stacked = torch.stack(list(values))
    return stacked if reduction is None else reduction(stacked)


def _results_in(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the names or indices and values in a result; None for a single number."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    return enumerate(value.tolist()) if getattr(value, "ndim", 0) else None


@METRICS.register_module()
class ProcessMetric(BaseMetric):
    """An adapter for metrics with the interface of mmengine's BaseMetric.

    The adapter gathers the results of all ranks; the metric's ``prefix`` and ``collect_device``
    have no effect.

    Args:
        metric: a metric with ``process(data_batch, data_samples)``, which appends the results of
            one batch to ``results``, and ``compute_metrics(results)``.
        dataset_meta: facts about the data set, such as class names, that the metric needs;
            default: the data set's ``metainfo``, if it has one.
    """

    def __init__(self, metric: Any, dataset_meta: Mapping[str, Any] | None = None) -> None:
        super().__init__(dataset_meta)
        self._metric = metric
        self.higher_is_better: bool | None = getattr(metric, "higher_is_better", None)
        if dataset_meta is not None:
            metric.dataset_meta = dataset_meta

    def use_metainfo(self, loader: Any) -> None:
        """Set ``dataset_meta`` from the loader's data set, unless it is set."""
        dataset = getattr(loader, "dataset", None)
        # build_loader wraps data sets that are read by workers.
        dataset = dataset.samples if isinstance(dataset, SeededSamples) else dataset
        metainfo = getattr(dataset, "metainfo", None)
        if self.dataset_meta is None and metainfo is not None:
            self.dataset_meta = self._metric.dataset_meta = metainfo

    def add(self, data_samples: Iterable[Any], data_batch: Any) -> None:
        """Process the predictions of one batch."""
        # The metrics of mmengine expect its data elements as dicts.
        plain = [
            sample.to_dict() if hasattr(sample, "to_dict") else sample for sample in data_samples
        ]
        self._metric.results.clear()
        self._metric.process(data_batch, plain)
        self._results += self._metric.results

    def compute_metric(self, results: list[Any]) -> dict[str, Any]:
        """Return the values computed from the results of all batches."""
        values: dict[str, Any] = self._metric.compute_metrics(results)
        return values


class WatchedMetric:
    """A validation metric and the direction in which it improves.

    Args:
        name: the name of the metric's result.
        mode: "min", "max", or None to derive it from the metric.
        setting: the hook and its argument, for messages, such as "EarlyStopHook: metric".

    Attributes:
        argument: the argument of the hook.

    Raises:
        TypeError: ``name`` is not a str.
        ValueError: ``mode`` is not allowed.
    """

    def __init__(self, name: str, mode: str | None, *, setting: str) -> None:
        self._hook, _, self.argument = setting.partition(": ")
        if not isinstance(name, str):
            raise TypeError(f"{setting} must be the name of one metric, got {name!r}")
        if mode not in ("min", "max", None):
            raise ValueError(f"{self._hook}: mode must be 'min' or 'max', got {mode!r}")
        self.name = name
        self._setting = setting
        self._mode = mode

    def start(self, state: LoopState) -> None:
        """Log the direction before training, if it is derived from the metric; record it if not."""
        if self._mode is not None:
            # For reports, in which the setting takes precedence over the metric.
            state.higher_is_better = {**state.higher_is_better, self.name: self._mode == "max"}
        is_available = any(
            f"{self.name}/".startswith(f"{name}/") for name in state.higher_is_better
        )
        if self._mode is None and is_available:
            extreme = self.extreme(state)
            if get_rank() == 0:
                logger.info("%s: the best %s is the %s", self._hook, self.name, extreme)

    def extreme(self, state: LoopState) -> str:
        """Return which value is the best, "lowest" or "highest"; ValueError if unknown."""
        if self._mode is None:
            self._mode = self.mode_by(state.higher_is_better)
        return "highest" if self._mode == "max" else "lowest"

    def mode_by(self, directions: Mapping[str, bool | None]) -> str:
        """Return "min" or "max", if necessary by ``higher_is_better`` of metrics by name.

        Raises:
            ValueError: the direction is unknown.
        """
        if self._mode is not None:
            return self._mode
        higher = find_direction(self.name, directions)
        if higher is None:
            raise ValueError(
                f"{self._hook}: mode must be given, since neither higher_is_better nor the name of "
                f"{self.name!r} says which values are better; use 'max' for higher, 'min' for lower"
            )
        return "max" if higher else "min"

    def warn_unless(self, mode: str, state: LoopState) -> None:
        higher = find_direction(self.name, state.higher_is_better)
        if higher is not None and higher != (mode == "max") and get_rank() == 0:
            better = "higher" if higher else "lower"
            text = "%s: mode is %r, but %s values of %r are better"
            logger.warning(text, self._hook, mode, better, self.name)

    def value_in(self, metrics: Mapping[str, float]) -> float:
        """Return the metric's value; ValueError if the evaluation did not compute it."""
        if self.name in metrics:
            return metrics[self.name]
        guess = did_you_mean(self.name, metrics, limit=1, quoted=True)
        available = ", ".join(sorted(metrics)) or "none at all"
        raise ValueError(
            f"{self._setting} must name a metric of the evaluation, got {self.name!r}; "
            f"the last evaluation computed: {available}{guess}"
        )

    def improves(
        self, value: float, best: float | None, state: LoopState, *, min_delta: float = 0.0
    ) -> bool:
        """Return whether ``value`` beats ``best`` by more than ``min_delta``; NaN never does."""
        rising = self.extreme(state) == "highest"
        if best is None or math.isnan(value):
            return not math.isnan(value)
        return value > best + min_delta if rising else value < best - min_delta
