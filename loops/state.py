"""The state of a loop: counters, objects to save, requests to stop, and logs not yet recorded."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from ..collectives import mean_scalars
from ..registry.local_paths import require_local

if TYPE_CHECKING:
    from ..wrappers import LossWeight

# Used as the update number of values that were restored from a checkpoint.
_RESTORED = -1
_COUNTERS = ("epoch", "batch", "iteration", "step", "evaluated_at")
# The update that a batch belongs to, and the logs of that batch.
_BatchLogs: TypeAlias = "tuple[int, Mapping[str, Any]]"


class WeightedLogs(dict[str, Any]):
    """The logs of a batch, and their weight in means, which ``loss_weight`` determines.

    The weight is 0 if the batch does not count. Logs without a weight count equally.
    """

    def __init__(self, logs: Mapping[str, Any], weight: float | Tensor) -> None:
        super().__init__(logs)
        self.weight = weight


class LogBuffer:
    """Collect the logs of training steps without waiting for the device.

    ``append((update, logs))`` adds the logs of a batch. It is the ``append`` of a list, which saves
    a Python call for every batch.
    """

    def __init__(self) -> None:
        self._raw: list[_BatchLogs] = []
        self._sums: dict[str, tuple[Tensor, float | Tensor]] = {}
        # By name: the update and the text of the first non-finite value that `_sums` contains.
        self._nonfinite: dict[str, tuple[int, str]] = {}
        self.append = self._raw.append

    def __getstate__(self) -> dict[str, Any]:
        return {name: entry for name, entry in vars(self).items() if name != "append"}

    def __setstate__(self, entries: dict[str, Any]) -> None:
        vars(self).update(entries)
        # The `append` of a copy must not write into the original's list.
        self.append = self._raw.append

    def start(self) -> None:
        """Drop raw values that an earlier training left; keep values from a checkpoint."""
        self._raw[:] = [entry for entry in self._raw if entry[0] == _RESTORED]

    def means(self) -> dict[str, Tensor]:
        """Return the means of all values since ``clear``, on the device."""
        return {name: total / count for name, (total, count) in self.sums().items()}

    def fold(self) -> None:
        """Replace the raw values by sums on the device; waits for the device."""
        sums, nonfinite = self.sums(), self._nonfinite
        if not all(are_finite([total for total, _ in sums.values()])):
            for step, name, text in _not_finite(self._raw, _RESTORED):
                nonfinite.setdefault(name, (step, text))
        self.clear()
        self._sums, self._nonfinite = sums, nonfinite

    def clear(self) -> None:
        self._sums, self._nonfinite = {}, {}
        self._raw.clear()

    def drop(self, update: int) -> None:
        """Drop the logs of ``update``, which must be the last one."""
        while self._raw and self._raw[-1][0] == update:
            self._raw.pop()

    def first_nonfinite(self, watches: Callable[[str], bool], after: int) -> tuple[int, str] | None:
        """Return update and text of the first non-finite value after update ``after``, or None.

        Only values whose names ``watches`` accepts are considered.
        """
        values = [(step, name, text) for name, (step, text) in self._nonfinite.items()]
        values += _not_finite(self._raw, after)
        texts = [
            (s, f"{name} is {text}") for s, name, text in values if s > after and watches(name)
        ]
        return min(texts, key=lambda entry: entry[0], default=None)

    def state_dict(self, until: int | None = None) -> dict[str, Any]:
        """Return the folded sums, and the raw values up to update ``until`` (None: all).

        The raw values are kept, so that a resumed run sums them with the same rounding.
        """
        raw = _by_name([entry for entry in self._raw if until is None or entry[0] <= until]).items()
        return {
            "sums": {name: (total.cpu(), _on(n, "cpu")) for name, (total, n) in self._sums.items()},
            "values": {name: _compact(name, values) for name, (values, _) in raw},
            "weights": {
                name: _compact("weight", entry_weights)
                for name, (_, entry_weights) in raw
                if entry_weights
            },
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Restore a state to ``device``, on which training steps create their logs."""
        self.clear()
        sums = state["sums"].items()
        self._sums = {name: (total.to(device), _on(n, device)) for name, (total, n) in sums}
        weights = state.get("weights", {})
        for name, values in state["values"].items():
            logs: list[Mapping[str, Any]] = [{name: _on(value, device)} for value in values]
            if name in weights:
                pairs = zip(logs, weights[name], strict=True)
                logs = [
                    WeightedLogs(scalar_logs, _on(weight, device)) for scalar_logs, weight in pairs
                ]
            self._raw.extend((_RESTORED, scalar_logs) for scalar_logs in logs)

    def sums(self) -> dict[str, tuple[Tensor, float | Tensor]]:
        """Return for each name the sum of its values since ``clear``, and their count or weight."""
        sums = dict(self._sums)
        for name, (values, weights) in _by_name(self._raw).items():
            added: tuple[Tensor, float | Tensor] = _sum(name, values), len(values)
            if weights:
                added = _weighted_sum(name, values, weights)
            previous = sums.get(name)
            sums[name] = (
                added if previous is None else (previous[0] + added[0], previous[1] + added[1])
            )
        return sums


def _by_name(raw: Sequence[_BatchLogs]) -> dict[str, tuple[list[Any], list[Any]]]:
    """Return for each name its values and, if there are any, their weights."""
    by_name: dict[str, tuple[list[Any], list[Any]]] = {}
    for _, logs in raw:
        for name, value in logs.items():
            values, weights = by_name.setdefault(name, ([], []))
            values.append(value)
            if isinstance(logs, WeightedLogs):
                weights.append(logs.weight)
    return by_name


def mean_logs(states: Sequence[Mapping[str, Any]], rank_ratio: float) -> dict[str, Any]:
    """Average the ``LogBuffer`` states of all saved ranks, for a run with any number of ranks.

    Weighted values are scaled by ``rank_ratio``, the number of data ranks when saving divided by
    the current number, so that their total weight over all ranks stays the same.
    """
    sums: dict[str, tuple[Tensor, float | Tensor]] = {}
    weighted = False
    for state in states:
        buffer = LogBuffer()
        buffer.load_state_dict(state, torch.device("cpu"))
        for name, (total, count) in buffer.sums().items():
            before = sums.get(name, (torch.zeros(()), 0))
            sums[name] = (before[0] + total, before[1] + count)
            weighted = weighted or isinstance(count, Tensor)
    divisor = len(states) / (rank_ratio if weighted else 1)
    means = {name: (total / divisor, count / divisor) for name, (total, count) in sums.items()}
    return {"sums": means, "values": {}}


def merged_means(scalars: Mapping[str, Any], weighted: LogBuffer | None) -> dict[str, float]:
    """Return the means over the ranks; every rank must call this.

    Args:
        scalars: values of this rank; all ranks count equally.
        weighted: logs of this rank that count by their weights, or None. They replace scalars of
            the same name.
    """
    sums = {} if weighted is None else weighted.sums()
    # The NUL keeps these keys apart from the names of logs, such as "loss weight".
    weights = {f"{name}\0weight": count for name, (_, count) in sums.items()}
    totals = {name: total for name, (total, _) in sums.items()}
    merged = mean_scalars({**scalars, **totals, **weights})
    for name in sums:
        weight = merged.pop(f"{name}\0weight")
        merged[name] = merged[name] / weight if weight else math.nan
    return merged


def _on(value: Any, device: torch.device | str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _compact(name: str, values: list[Any]) -> Any:
    """Return values for a checkpoint: as one tensor if they have equal shapes and dtypes."""
    kinds = {(v.shape, v.dtype, v.device) if isinstance(v, Tensor) else None for v in values}
    if len(kinds) == 1 and None not in kinds:
        return torch.stack(values).detach().cpu()
    numbers = (bool, int, float)
    return [v if isinstance(v, numbers) else _tensor(name, v).detach().cpu() for v in values]


def are_finite(tensors: Sequence[Tensor]) -> list[bool]:
    """Return for each tensor whether it is finite; waits once for each device."""
    return fetch([tensor.isfinite().all() for tensor in tensors])


def fetch(scalars: Sequence[Tensor]) -> list[Any]:
    """Return 0-d tensors, all of the same dtype, as numbers; waits once for each device."""
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(scalars):
        by_device.setdefault(tensor.device, []).append(index)
    fetched: dict[int, Any] = {}
    for indices in by_device.values():
        values = torch.stack([scalars[index] for index in indices]).tolist()
        fetched.update(zip(indices, values, strict=True))
    return [fetched[index] for index in range(len(scalars))]


def _not_finite(raw: Sequence[_BatchLogs], after: int) -> list[tuple[int, str, str]]:
    recent = [(step, name, v) for step, logs in raw if step > after for name, v in logs.items()]
    finite = are_finite([torch.as_tensor(value) for _, _, value in recent])
    pairs = zip(recent, finite, strict=True)
    return [(step, n, str(torch.as_tensor(v).tolist())) for (step, n, v), good in pairs if not good]


def _sum(name: str, values: list[Any]) -> Tensor:
    """Return the sum of logged values; a value with several elements counts as its mean."""
    try:
        stacked = torch.stack(values).detach()
    except (TypeError, RuntimeError):
        # Custom steps may log values that are not tensors of one shape.
        return sum((_sum(name, [_tensor(name, value)]) for value in values), torch.zeros(()))
    stacked = stacked if stacked.dtype == torch.float64 else stacked.float()
    return stacked.sum() if stacked.ndim == 1 else stacked.flatten(1).mean(1).sum()


def _weighted_sum(name: str, values: list[Any], weights: list[Any]) -> tuple[Tensor, Tensor]:
    """Return the sum of the values times their weights, and the sum of the weights."""
    means = torch.stack([_sum(name, [value]).double() for value in values])
    factors = torch.stack([torch.as_tensor(weight, dtype=torch.float64) for weight in weights])
    factors = factors.to(means.device)
    # Values with a weight of 0 may be NaN.
    return torch.where(factors > 0, means * factors, 0.0).sum(), factors.sum()


def _tensor(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"train_step must return numbers or tensors to log, got {name}={value!r}"
        ) from error


class Phase(Enum):
    """The activity of a loop."""

    TRAIN = "train"
    VAL = "val"
    TEST = "test"
    PREDICT = "predict"


@runtime_checkable
class Stateful(Protocol):
    """An object that can be saved in a checkpoint and restored."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers, strings, lists and dicts."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore a state returned by ``state_dict``."""


@runtime_checkable
class WeightSource(Stateful, Protocol):
    """An entry of ``LoopState.stateful`` whose state contains the weights that evaluations use.

    Attributes:
        evaluated_entry: the key of these weights in the state; empty if evaluations use the
            model's own weights.
    """

    evaluated_entry: str


@runtime_checkable
class PartReader(Stateful, Protocol):
    """An object whose ``load_state_dict`` may read slices of saved tensors instead of whole ones.

    Attributes:
        reads_parts: whether ``load_state_dict`` accepts ``SavedTensor`` objects, which are read
            from disk when they are sliced.
    """

    reads_parts: bool


@dataclass
class DataPlace:
    """The position of the training in its data, in addition to the counters.

    Attributes:
        layout: how the data is split into updates, see ``loops.data.layout``; empty before the
            first training.
        reader: the stateful loader or iterator that reads the batches, if there is one.
        reader_state: the reader's state in a checkpoint, until the loop has restored it.
    """

    layout: dict[str, int] = field(default_factory=dict)
    reader: Stateful | None = None
    reader_state: Any = None


@dataclass(repr=False)
class LoopState:
    """The state of a loop; every hook receives it.

    The counters count finished batches, updates and epochs. They advance after the end event:
    in ``on_batch_end`` ``iteration`` is still this batch's index, and in ``on_epoch_end`` ``epoch``
    is still this epoch's index. They are up to date in ``on_update``, ``on_log``, the evaluation
    events and ``on_save_point``.

    Attributes:
        model: the model wrapper (``train_step``, ``val_step``, ``test_step``, ``module``).
        optim_wrapper: the optimizer wrapper; None without training.
        run_dir: the run's folder; None to write nothing.
        precision: creates the context in which evaluations run, unless ``optim_wrapper`` has one.
        loss_weight: the weight of losses in evaluations, unless ``optim_wrapper`` has one.
        dataloader: the loader of the training batches.
        stateful: further objects to save in checkpoints, by name.
        epoch: finished passes over the data.
        batch: finished batches of the running epoch.
        iteration: finished batches since the beginning.
        step: finished optimizer updates.
        max_epochs: the run's length in epochs, if known.
        max_steps: the run's length in updates, if known.
        max_iterations: the run's length in batches, if known.
        phase: the activity of the running loop.
        eval_set: the name of the set that is being evaluated, if there are several (``EvalSets``).
        metrics: results of the last evaluation.
        higher_is_better: whether higher values of a validation metric are better, by its name;
            None if unknown.
        evaluated_at: the ``step`` at which the last validation ended; -1 for never.
        inference_tensors: the evaluations that created tensors under inference mode, by the name of
            the attribute of the model that holds the tensor.
        recorded_at: the ``step`` of the last regular log record, not of a training's final one.
        logs: the logs of this rank's training steps since the record at ``recorded_at``.
        clock_s: seconds of training, including the time before a resume. Updated when the ranks
            exchange it, so that it is equal on all of them.
        phase_s: seconds that this rank has spent in each phase since the start, for reports:
            "training" and "evaluation". "data" (waiting for batches) and "hooks" are parts of
            "training"; "checkpoint" is a part of "hooks".
        stop_reason: why the loop should stop; empty if it should not.
        signal: number of the signal that stops the run (SIGTERM, SIGINT); 0 for none.
        in_step: whether a batch is being read or trained on. The counters do not include it yet,
            but it may have changed the random streams and the weights.
        data: the position of the training in its data.
        together: whether all ranks take part in this step. False for the last batches of a pass if
            this rank has more batches than others (``uneven_inputs``); hooks must not communicate
            then.
        updated_at: (epoch, batch, iteration) after the last update, where the current accumulation
            window begins; None if unknown.
        skip_steps: numbers of the steps without an update; their batches are read and discarded.
            None if no step is skipped.
        limits: causes that limit the speed of training, with their shares of the time, 0 to 1:
            "loading data", "hook <class>", or "rank <rank>" if the other ranks wait for it. Set by
            ``ThroughputHook``; equal on every rank.
        skipped: whether the last step made no update, because it is in ``skip_steps`` or because a
            guard rejected it.
        restored_from: the folder of checkpoints and the serial number of the restored one; None
            after the run has saved the next one.
        settings: the resolved config, or other settings, for loggers.
        media_loggers: functions ``(state, kind, name, item)`` of loggers; kinds are "image",
            "figure" and "text".

    Raises:
        ValueError: ``run_dir`` is a URL.
    """

    model: nn.Module
    optim_wrapper: Any = None
    run_dir: Path | None = None
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext
    loss_weight: LossWeight | None = None
    dataloader: Any = None
    stateful: dict[str, Stateful] = field(default_factory=dict)
    epoch: int = 0
    batch: int = 0
    iteration: int = 0
    step: int = 0
    max_epochs: int | None = None
    max_steps: int | None = None
    max_iterations: int | None = None
    phase: Phase = Phase.TRAIN
    eval_set: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    higher_is_better: dict[str, bool | None] = field(default_factory=dict)
    evaluated_at: int = -1
    inference_tensors: dict[str, str] = field(default_factory=dict)
    recorded_at: int = 0
    logs: LogBuffer = field(default_factory=LogBuffer)
    clock_s: float = 0.0
    phase_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    stop_reason: str = ""
    signal: int = 0
    in_step: bool = False
    data: DataPlace = field(default_factory=DataPlace)
    together: bool = True
    updated_at: tuple[int, int, int] | None = None
    skip_steps: set[int] | None = None
    skipped: bool = False
    limits: dict[str, float] = field(default_factory=dict)
    restored_from: tuple[Path, int] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    media_loggers: list[Callable[[LoopState, str, str, Any], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.run_dir is not None:
            require_local(self.run_dir, "run_dir")

    def __repr__(self) -> str:
        # A notebook prints what `train` returns.
        stopped = f", stop_reason={self.stop_reason!r}" if self.stop_reason else ""
        counters = f"epoch={self.epoch}, step={self.step}"
        return f"LoopState({counters}, metrics={self.metrics!r}{stopped})"

    @property
    def running_epoch(self) -> int:
        """The number of the running epoch, or of the one that has just ended; the first is 1."""
        return max(1, self.epoch + (self.batch > 0))

    def request_stop(self, reason: str) -> None:
        """Ask the loop to stop after this update; the first reason is kept.

        Every rank must call this at the same update. Decisions that depend only on reduced logs
        or metrics satisfy this.

        Raises:
            ValueError: ``reason`` is empty.
        """
        if not reason:
            raise ValueError("request_stop needs a reason that can be shown to the user")
        self.stop_reason = self.stop_reason or reason

    def log_image(self, name: str, image: Any) -> None:
        """Log an image with every logger; only calls on rank 0 have an effect.

        Args:
            name: the name of the image, such as "val/input".
            image: a tensor (channels, height, width) or (height, width); an array
                (height, width, channels) or (height, width); or a PIL image. It has 1, 3 or 4
                channels; floats are from 0 to 1, integers from 0 to 255.

        Raises:
            ValueError: the name is not allowed in a file's path, or the image has another shape.
        """
        self._log_media("image", name, image)

    def log_figure(self, name: str, figure: Any) -> None:
        """Log a matplotlib figure with every logger, without closing it; effective on rank 0 only.

        Raises:
            TypeError: ``figure`` is not a figure.
            ValueError: the name is not allowed in a file's path.
        """
        self._log_media("figure", name, figure)

    def log_text(self, name: str, text: str) -> None:
        """Log a text with every logger; only calls on rank 0 have an effect.

        Raises:
            ValueError: the name is not allowed in a file's path.
        """
        self._log_media("text", name, text)

    def _log_media(self, kind: str, name: str, content: Any) -> None:
        for receive in self.media_loggers:
            receive(self, kind, name, content)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, the clock, the last metrics and the data layout."""
        counters = {name: getattr(self, name) for name in (*_COUNTERS, "recorded_at", "clock_s")}
        return {**counters, "metrics": dict(self.metrics), "data_layout": dict(self.data.layout)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint; a request to stop is not part of it."""
        for name in _COUNTERS:
            setattr(self, name, int(state[name]))
        # Older checkpoints lack this entry and the logs since the last record.
        self.recorded_at = int(state.get("recorded_at", self.step))
        self.data.layout = {name: int(n) for name, n in state.get("data_layout", {}).items()}
        self.updated_at = None
        self.clock_s = float(state["clock_s"])
        self.metrics = {name: float(value) for name, value in state["metrics"].items()}
