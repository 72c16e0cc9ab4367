"""What a loop remembers: counters, parts, requests to stop, and log values not yet recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from ..collectives import mean_scalars

if TYPE_CHECKING:
    from ..wrappers import LossWeight

# Stands, as their update, beside the values of a checkpoint.
_RESTORED = -1


# The logs of a batch, and the update that it belongs to.
_BatchLogs: TypeAlias = "tuple[int, Mapping[str, Any]]"


class WeightedLogs(dict[str, Any]):
    """The logs of a batch with their weight in means, as `loss_weight` gives it.

    0 if they count nothing. Logs without a weight count equally.
    """

    def __init__(self, logs: Mapping[str, Any], weight: float | Tensor) -> None:
        super().__init__(logs)
        self.weight = weight


class LogBuffer:
    """Collects the logs of training steps without touching the device.

    `append` takes (update, logs). It is a list's own method, since it is called for every batch.
    """

    def __init__(self) -> None:
        self._raw: list[_BatchLogs] = []
        self._sums: dict[str, tuple[Tensor, float | Tensor]] = {}
        # By name, the first value that is not finite of those that are in `_sums`.
        self._nonfinite: dict[str, tuple[int, str]] = {}
        self.append = self._raw.append

    def start(self) -> None:
        """Drop raw values of an earlier training, but not those of a checkpoint."""
        self._raw[:] = [one for one in self._raw if one[0] == _RESTORED]

    def means(self) -> dict[str, Tensor]:
        """Return the means of all that was logged since `clear`, on the device."""
        return {name: total / count for name, (total, count) in self.sums().items()}

    def fold(self) -> None:
        """Turn the raw values into sums on the device; waits for it."""
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
        """Forget what the batches of the last update have logged."""
        while self._raw and self._raw[-1][0] == update:
            self._raw.pop()

    def first_nonfinite(self, watches: Callable[[str], bool], after: int) -> tuple[int, str] | None:
        """Return update and text of the first value after an update that is not finite, or None."""
        found = [(step, name, text) for name, (step, text) in self._nonfinite.items()]
        found += _not_finite(self._raw, after)
        told = [(s, f"{name} is {text}") for s, name, text in found if s > after and watches(name)]
        return min(told, key=lambda one: one[0], default=None)

    def state_dict(self, last: int | None = None) -> dict[str, Any]:
        """Return the raw values, up to update `last`: in two parts they would give another sum."""
        raw = _by_name([one for one in self._raw if last is None or one[0] <= last]).items()
        return {
            "sums": {name: (one.cpu(), _on(n, "cpu")) for name, (one, n) in self._sums.items()},
            "values": {name: _compact(name, values) for name, (values, _) in raw},
            "weights": {name: _compact("weight", some) for name, (_, some) in raw if some},
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from a state, on the device where the logs are made."""
        self.clear()
        sums = state["sums"].items()
        self._sums = {name: (one.to(device), _on(n, device)) for name, (one, n) in sums}
        weights = state.get("weights", {})
        for name, values in state["values"].items():
            logs: list[Mapping[str, Any]] = [{name: _on(value, device)} for value in values]
            if name in weights:
                pairs = zip(logs, weights[name], strict=True)
                logs = [WeightedLogs(one, _on(weight, device)) for one, weight in pairs]
            self._raw.extend((_RESTORED, one) for one in logs)

    def sums(self) -> dict[str, tuple[Tensor, float | Tensor]]:
        """Return by name the sum of what was logged since `clear`, and the count or the weight."""
        sums = dict(self._sums)
        for name, (values, weights) in _by_name(self._raw).items():
            new: tuple[Tensor, float | Tensor] = _sum(name, values), len(values)
            if weights:
                new = _weighed_sum(name, values, weights)
            old = sums.get(name)
            sums[name] = new if old is None else (old[0] + new[0], old[1] + new[1])
        return sums


def _by_name(raw: Sequence[_BatchLogs]) -> dict[str, tuple[list[Any], list[Any]]]:
    """Return all values of a name and, if they have any, their weights."""
    by_name: dict[str, tuple[list[Any], list[Any]]] = {}
    for _, logs in raw:
        for name, value in logs.items():
            values, weights = by_name.setdefault(name, ([], []))
            values.append(value)
            if isinstance(logs, WeightedLogs):
                weights.append(logs.weight)
    return by_name


def mean_logs(states: Sequence[Mapping[str, Any]], share: float) -> dict[str, Any]:
    """Return one state for any number of ranks to go on from: the mean of all the saved ranks.

    Of what is weighed each gets `share` of that mean, so that all together weigh as much as before.
    """
    sums: dict[str, tuple[Tensor, float | Tensor]] = {}
    weighed = False
    for state in states:
        buffer = LogBuffer()
        buffer.load_state_dict(state, torch.device("cpu"))
        for name, (total, count) in buffer.sums().items():
            before = sums.get(name, (torch.zeros(()), 0))
            sums[name] = (before[0] + total, before[1] + count)
            weighed = weighed or isinstance(count, Tensor)
    parts = len(states) / (share if weighed else 1)
    means = {name: (total / parts, count / parts) for name, (total, count) in sums.items()}
    return {"sums": means, "values": {}}


def merged_means(scalars: Mapping[str, Any], weighed: LogBuffer | None) -> dict[str, float]:
    """Return means over the ranks, by weight of what is `weighed`; every rank must call this."""
    sums = {} if weighed is None else weighed.sums()
    weights = {f"{name} weight": count for name, (_, count) in sums.items()}
    totals = {name: total for name, (total, _) in sums.items()}
    merged = mean_scalars({**scalars, **totals, **weights})
    for name in sums:
        weight = merged.pop(f"{name} weight")
        merged[name] = merged[name] / weight if weight else math.nan
    return merged


def _on(value: Any, device: torch.device | str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _compact(name: str, values: list[Any]) -> Any:
    """Values as a checkpoint takes them: as one tensor where that gives the same values back."""
    kinds = {(v.shape, v.dtype, v.device) if isinstance(v, Tensor) else None for v in values}
    if len(kinds) == 1 and None not in kinds:
        return torch.stack(values).detach().cpu()
    numbers = (bool, int, float)
    return [v if isinstance(v, numbers) else _tensor(name, v).detach().cpu() for v in values]


def are_finite(tensors: Sequence[Tensor]) -> list[bool]:
    """Say of each tensor whether it is finite, waiting once for each device."""
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    finite = [True] * len(tensors)
    for indices in by_device.values():
        answers = torch.stack([tensors[index].isfinite().all() for index in indices]).tolist()
        for index, answer in zip(indices, answers, strict=True):
            finite[index] = answer
    return finite


def _not_finite(raw: Sequence[_BatchLogs], after: int) -> list[tuple[int, str, str]]:
    recent = [(step, name, v) for step, logs in raw if step > after for name, v in logs.items()]
    finite = are_finite([torch.as_tensor(value) for _, _, value in recent])
    pairs = zip(recent, finite, strict=True)
    return [(step, n, str(torch.as_tensor(v).tolist())) for (step, n, v), good in pairs if not good]


def _sum(name: str, values: list[Any]) -> Tensor:
    """Return the sum of logged values; a custom step may log floats, or vectors (their mean)."""
    try:
        stacked = torch.stack(values).detach()
    except (TypeError, RuntimeError):
        # Not all are tensors of one shape, as the wrappers' own are.
        return sum((_sum(name, [_tensor(name, one)]) for one in values), torch.zeros(()))
    stacked = stacked if stacked.dtype == torch.float64 else stacked.float()
    return stacked.sum() if stacked.ndim == 1 else stacked.flatten(1).mean(1).sum()


def _weighed_sum(name: str, values: list[Any], weights: list[Any]) -> tuple[Tensor, Tensor]:
    """Return the sum of the values times their weights, and that of the weights."""
    means = torch.stack([_sum(name, [value]).double() for value in values])
    factors = torch.stack([torch.as_tensor(one, dtype=torch.float64) for one in weights])
    factors = factors.to(means.device)
    # What counts nothing may be NaN.
    return torch.where(factors > 0, means * factors, 0.0).sum(), factors.sum()


def _tensor(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"train_step must return numbers or tensors to log, got {name}={value!r}"
        ) from error


_COUNTERS = ("epoch", "batch", "iteration", "step", "evaluated_at")


class Phase(Enum):
    """What the running loop is doing."""

    TRAIN = "train"
    VAL = "val"
    TEST = "test"


@runtime_checkable
class Stateful(Protocol):
    """Anything that can be written into a checkpoint and read back."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers, strings, lists and dicts."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Take over a state returned by `state_dict`."""


@runtime_checkable
class WeightSource(Stateful, Protocol):
    """A part whose state has the weights with which evaluations run.

    Attributes:
        evaluated_entry: The key of the state under which they are; empty for the model's own.
    """

    evaluated_entry: str


@runtime_checkable
class PartReader(Stateful, Protocol):
    """A part that may read only its slices of saved tensors.

    Attributes:
        reads_parts: Whether `load_state_dict` takes objects that can be sliced for tensors.
    """

    reads_parts: bool


@dataclass
class DataPlace:
    """Where the training is in its data, in addition to the counters.

    Attributes:
        layout: How the data is cut into updates, as `loops.data.layout` describes it; empty before
            the first training.
        reader: Reads the batches of the loader, if it is stateful.
        reader_state: Its state in a checkpoint, until the loop has continued from there.
    """

    layout: dict[str, int] = field(default_factory=dict)
    reader: Stateful | None = None
    reader_state: Any = None


@dataclass(repr=False)
class LoopState:
    """What a loop remembers; every hook receives it.

    The counters count finished things. They advance after the end event of what they count: in
    `on_batch_end` `iteration` still is this batch's index, in `on_epoch_end` `epoch` still is this
    epoch's index; in `on_update`, `on_log`, the evaluation events and `on_save_point` all of them
    are up to date.

    Attributes:
        model: The model wrapper (`train_step`, `val_step`, `test_step`, `module`).
        optim_wrapper: The optimizer wrapper; None where nothing is trained.
        run_dir: The run's folder; None when nothing is to be written.
        precision: Makes the context that evaluations run in where `optim_wrapper` does not tell.
        loss_weight: What losses are means over in evaluations, where `optim_wrapper` does not tell.
        dataloader: What the training reads its batches from.
        stateful: Further things that belong into a checkpoint, by name.
        epoch: Finished passes over the data.
        batch: Batches done in the running epoch.
        iteration: Batches done in all.
        step: Optimizer updates done.
        max_epochs: The run's length in epochs, where known.
        max_steps: The run's length in updates, where known.
        phase: What the running loop is doing.
        metrics: Results of the last evaluation.
        higher_is_better: Whether higher values of a metric of the validation are better, by its
            name; None where that is not known.
        evaluated_at: `step` at which the last validation ended; -1 for never.
        recorded_at: `step` at which the last log record of a full interval was made.
        logs: What the training steps have logged since then, on this rank.
        clock_s: Seconds of training as of the last agreement between the ranks: equal on all of
            them, and kept over a resume.
        stop_reason: Why the loop is to stop; empty while it is not.
        signal: Number of the signal that stops the run (SIGTERM, SIGINT); 0 for none.
        in_step: A batch is being read or trained on: it is not in the counters yet, but maybe in
            the random streams and the weights.
        data: Where the training is in its data.
        together: All ranks are in this step. False in the last batches of a pass in which this
            rank has more than others (`uneven_inputs`): hooks must not communicate then.
        updated_at: (epoch, batch, iteration) of the last update, where the running accumulation
            window began; None where that is not known.
        skip_steps: Steps without an update, by number: their batches are read, and that is all.
            None where every step is made.
        skipped: The last step was skipped, before it began or by a guard: no weight has moved.
        restored_from: Folder and serial number of the checkpoint that the run has gone back to
            and not yet gone on from.
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
    phase: Phase = Phase.TRAIN
    metrics: dict[str, float] = field(default_factory=dict)
    higher_is_better: dict[str, bool | None] = field(default_factory=dict)
    evaluated_at: int = -1
    recorded_at: int = 0
    logs: LogBuffer = field(default_factory=LogBuffer)
    clock_s: float = 0.0
    stop_reason: str = ""
    signal: int = 0
    in_step: bool = False
    data: DataPlace = field(default_factory=DataPlace)
    together: bool = True
    updated_at: tuple[int, int, int] | None = None
    skip_steps: set[int] | None = None
    skipped: bool = False
    restored_from: tuple[Path, int] | None = None

    def __repr__(self) -> str:
        # A notebook prints what `train` returns.
        stopped = f", stop_reason={self.stop_reason!r}" if self.stop_reason else ""
        counters = f"epoch={self.epoch}, step={self.step}"
        return f"LoopState({counters}, metrics={self.metrics!r}{stopped})"

    @property
    def running_epoch(self) -> int:
        """The number of the epoch that is running, or has just ended; the first is 1."""
        return max(1, self.epoch + (self.batch > 0))

    def request_stop(self, reason: str) -> None:
        """Ask the loop to stop after this update; the first reason stays.

        With several ranks every rank must ask at the same update, as it happens by itself where the
        decision rests on reduced logs or metrics.
        """
        if not reason:
            raise ValueError("request_stop needs a reason that can be shown to the user")
        self.stop_reason = self.stop_reason or reason

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, the clock and the last metrics."""
        counters = {name: getattr(self, name) for name in (*_COUNTERS, "recorded_at", "clock_s")}
        return {**counters, "metrics": dict(self.metrics), "data_layout": dict(self.data.layout)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the counters of a checkpoint; a request to stop is not among them."""
        for name in _COUNTERS:
            setattr(self, name, int(state[name]))
        # Older checkpoints hold nothing of the logs since the last record.
        self.recorded_at = int(state.get("recorded_at", self.step))
        self.data.layout = {name: int(n) for name, n in state.get("data_layout", {}).items()}
        self.updated_at = None
        self.clock_s = float(state["clock_s"])
        self.metrics = {name: float(value) for name, value in state["metrics"].items()}
