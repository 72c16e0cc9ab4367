"""How fast training goes, and what it waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

from torch import Tensor

from ...registry import HOOKS
from ..checkpoints.weights import data_size
from ..hook import Hook, Scalars
from ..state import LoopState

_Path = tuple[Any, ...]


@HOOKS.register_module()
class ThroughputHook(Hook):
    """Adds speed to the log records.

    `samples_per_s` (of all ranks together; those of a tensor axis share theirs),
    `steps_per_s` (optimizer updates) and `data_share`, the part of the time, between 0 and 1,
    in which the loop waited for its next batch. Time spent in evaluations is left out. Nothing
    is synchronised: on an accelerator the figures are right over an interval,
    because every log record waits for the device, not within one step.

    The size of a batch is the first dimension of the first tensor in it.
    """

    # Last of all, so that the time of other hooks does not count as waiting for data.
    order = 95

    def __init__(self) -> None:
        self._path: _Path | None = ()
        self._start_interval(0)

    def on_train_start(self, state: LoopState) -> None:
        self._start_interval(state.step)

    def on_epoch_start(self, state: LoopState) -> None:
        self._mark_s = perf_counter()

    def on_batch_start(self, state: LoopState, batch: Any) -> None:
        self._waited_s += perf_counter() - self._mark_s
        if self._path is None:
            return
        # Written out here: this is called for every batch.
        try:
            first = batch
            for key in self._path:
                first = first[key]
            self._samples += first.shape[0]
        except (AttributeError, IndexError, KeyError, TypeError):
            self._path = _path_to_tensor(batch)
            if self._path is not None:
                self._samples += _size_at(batch, self._path)

    def on_batch_end(self, state: LoopState, batch: Any, logs: Mapping[str, Tensor]) -> None:
        self._mark_s = perf_counter()

    def collect_logs(self, state: LoopState, scalars: Scalars) -> None:
        elapsed_s = perf_counter() - self._since_s - self._evaluating_s
        steps = state.step - self._first_step
        # The reduction over the ranks is a mean, and samples are to be summed; ranks that share
        # a model's layers see the same ones.
        scalars["samples_per_s"] = self._samples * data_size(state.model) / elapsed_s
        scalars["steps_per_s"] = steps / elapsed_s
        scalars["data_share"] = min(1.0, self._waited_s / elapsed_s)
        self._start_interval(state.step)

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        self._mark_s = perf_counter()

    def on_eval_start(self, state: LoopState) -> None:
        self._eval_start_s = perf_counter()

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        self._mark_s = perf_counter()
        self._evaluating_s += self._mark_s - self._eval_start_s

    def on_save_point(self, state: LoopState) -> None:
        self._mark_s = perf_counter()

    def _start_interval(self, step: int) -> None:
        self._since_s = self._mark_s = self._eval_start_s = perf_counter()
        self._first_step = step
        self._samples = 0
        self._waited_s = 0.0
        self._evaluating_s = 0.0


def _size_at(batch: Any, path: _Path) -> int:
    for key in path:
        batch = batch[key]
    return int(batch.shape[0])


def _path_to_tensor(batch: Any) -> _Path | None:
    """Return the keys that lead to the first tensor with a first dimension, or None."""
    if isinstance(batch, Tensor):
        return () if batch.dim() else None
    items: Any = ()
    if isinstance(batch, Mapping):
        items = batch.items()
    elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        items = enumerate(batch)
    for key, part in items:
        below = _path_to_tensor(part)
        if below is not None:
            return (key, *below)
    return None
