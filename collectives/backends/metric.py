"""Metrics on any backend: BaseMetric for custom ones, metric_sync for torchmetrics."""

import copy
import functools
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from ..errors import attempt
from ..objects.agree import failure_of, raise_first
from ..objects.results import interleaved
from .base import BaseDistBackend
from .registry import BackendLike, get_dist_backend

T = TypeVar("T")

_MODES = ("cat", "unzip")


class BaseMetric(ABC):
    """A metric that keeps one result per sample and computes from the results of all ranks.

    Subclasses override ``add``, which appends to ``self._results``, and ``compute_metric``.

    Args:
        dataset_meta: information about the dataset that the metric needs, such as class names.
        dist_collect_mode: the order of the collected results: "unzip" takes one result from each
            rank in turn, which undoes a distributed sampler, or the results of one batch if the
            loop has divided whole batches; "cat" concatenates rank by rank.
        dist_backend: a name, a class or an instance; see ``get_dist_backend``.
        logger: default: the logger of this module.

    Attributes:
        batch_ends: the number of results after each batch, if ``compute`` takes the results of one
            batch from each rank in turn; otherwise None. The loops set it.

    Raises:
        AssertionError: the mode or the backend does not exist.
    """

    batch_ends: list[int] | None = None

    def __init__(
        self,
        dataset_meta: Mapping[str, Any] | None = None,
        dist_collect_mode: str = "unzip",
        dist_backend: BackendLike = None,
        logger: logging.Logger | None = None,
    ) -> None:
        if dist_collect_mode not in _MODES:
            expected = " or ".join(_MODES)
            raise AssertionError(f"dist_collect_mode must be {expected}, got {dist_collect_mode!r}")
        self.dataset_meta = dataset_meta
        self.dist_collect_mode = dist_collect_mode
        self.dist_backend = get_dist_backend(dist_backend)
        self.logger = logger or logging.getLogger(__name__)
        self._results: list[Any] = []

    @abstractmethod
    def add(self, *args: Any, **kwargs: Any) -> None:
        """Append the results of one batch to ``self._results``, one for each sample."""

    @abstractmethod
    def compute_metric(self, results: list[Any]) -> Any:
        """Return the metric of these results."""

    @property
    def dataset_meta(self) -> Mapping[str, Any] | None:
        """Information about the dataset; copied (shallowly) when set and when read."""
        return copy.copy(self._dataset_meta)

    @dataset_meta.setter
    def dataset_meta(self, dataset_meta: Mapping[str, Any] | None) -> None:
        self._dataset_meta = copy.copy(dataset_meta)

    def reset(self) -> None:
        """Delete all results; ``compute`` does not delete them."""
        self._results, self.batch_ends = [], None

    def end_batch(self) -> None:
        """Note that the results of a batch are complete, if ``batch_ends`` is not None."""
        if self.batch_ends is not None:
            self.batch_ends.append(len(self._results))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the metric of one batch on this rank, without changing the stored results."""
        stored, self._results = self._results, []
        try:
            self.add(*args, **kwargs)
            return self.compute_metric(self._results)
        finally:
            self._results = stored

    def compute(self, size: int | None = None) -> Any:
        """Return the metric of the results of all ranks; every rank must call this.

        The results stay until ``reset``. The backend's rank 0 computes; the others get a copy.

        Args:
            size: the number of results to use, from the start: the length of the dataset if a
                sampler has padded it.

        Raises:
            ValueError: on every rank, if ``size`` is negative on one.
            CollectiveError: on every rank, if results cannot be sent.
            Exception: on every rank, the error of ``compute_metric`` on rank 0; a CollectiveError
                if it cannot be rebuilt from its type and text.
        """
        problem: Exception | None = None
        if size is not None and size < 0:
            problem = ValueError(f"size must not be negative, got {size}")
        backend = self.dist_backend
        if not _has_peers(backend):
            if problem is not None:
                raise problem
            return self.compute_metric(self._results[:size])
        by_batch = self.batch_ends is not None
        local_results = self._split_batches() if by_batch else self._results
        by_rank = _gather(backend, local_results, problem, "compute() ")
        in_order = itertools.chain.from_iterable if self.dist_collect_mode == "cat" else interleaved
        results = list(in_order(by_rank))
        if by_batch:
            results = list(itertools.chain.from_iterable(results))
        compute = self.compute_metric
        value, error = (
            attempt(lambda: compute(results[:size])) if backend.rank == 0 else (None, None)
        )
        value, failure = backend.broadcast_object((value, failure_of(error, 0)), 0)
        if error is not None and failure is not None and failure.kind is type(error):
            raise error
        raise_first([failure], error, "compute_metric() ")
        return value

    def _split_batches(self) -> list[list[Any]]:
        """Return the results of each batch; those after the last batch are one more."""
        ends = [0, *(self.batch_ends or ()), len(self._results)]
        return [self._results[start:end] for start, end in itertools.pairwise(ends)]


def metric_sync(backend: BackendLike = None) -> dict[str, Any]:
    """Return the keyword arguments that make a torchmetrics metric use a backend.

        accuracy = MulticlassAccuracy(num_classes=10, **metric_sync("torch_cpu"))

    As torchmetrics requires, every rank's state must have the same number of tensors.

    Args:
        backend: a name, a class or an instance; see ``get_dist_backend``.
    """
    resolved = get_dist_backend(backend)
    return {
        "dist_sync_fn": functools.partial(_gather_state, resolved),
        "distributed_available_fn": functools.partial(_has_peers, resolved),
    }


def _gather_state(
    backend: BaseDistBackend, state: torch.Tensor, group: object = None
) -> list[torch.Tensor]:
    problem: Exception | None = None
    if group is not None:
        problem = ValueError(
            f"process_group must be None with metric_sync(), got {group}; pass the group to the "
            f"backend: metric_sync(TorchDist(group))"
        )
    states = _gather(backend, state.detach(), problem, "metric_sync() ")
    return [gathered_state.to(state.device) for gathered_state in states]


def _gather(
    backend: BaseDistBackend, local_value: T, problem: Exception | None, prefix: str
) -> list[T]:
    """Return all ranks' objects, or raise the first rank's problem on every rank."""
    gathered = backend.all_gather_object((failure_of(problem, backend.rank), local_value))
    raise_first([failure for failure, _ in gathered], problem, prefix)
    return [rank_value for _, rank_value in gathered]


def _has_peers(backend: BaseDistBackend) -> bool:
    return backend.is_initialized and backend.world_size > 1
