"""Collect the values that training steps log, and average them over steps and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..collectives import get_world_size, mean_scalars
from ..primitives.tensor_bits import as_float, widened, widest_float

# Used as the update number of values that were restored from a checkpoint.
_RESTORED = -1
# The NUL keeps the keys of weights apart from the names of logs, such as "loss weight".
_WEIGHT = "\0weight"
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
        raw = _collect_values(
            [entry for entry in self._raw if until is None or entry[0] <= until]
        ).items()
        return {
            "sums": {
                name: (total.cpu(), _move(n, "cpu")) for name, (total, n) in self._sums.items()
            },
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
        self._sums = {name: (_move(total, device), _move(n, device)) for name, (total, n) in sums}
        weights = state.get("weights", {})
        for name, values in state["values"].items():
            logs: list[Mapping[str, Any]] = [{name: _move(value, device)} for value in values]
            if name in weights:
                pairs = zip(logs, weights[name], strict=True)
                logs = [
                    WeightedLogs(scalar_logs, _move(weight, device))
                    for scalar_logs, weight in pairs
                ]
            self._raw.extend((_RESTORED, scalar_logs) for scalar_logs in logs)

    def sums(self) -> dict[str, tuple[Tensor, float | Tensor]]:
        """Return for each name the sum of its values since ``clear``, and their count or weight."""
        sums = dict(self._sums)
        for name, (values, weights) in _collect_values(self._raw).items():
            added: tuple[Tensor, float | Tensor] = _sum(name, values), len(values)
            if weights:
                added = _weighted_sum(name, values, weights)
            previous = sums.get(name)
            sums[name] = (
                added
                if previous is None
                else (_plus(previous[0], added[0]), previous[1] + added[1])
            )
        return sums


def _collect_values(raw: Sequence[_BatchLogs]) -> dict[str, tuple[list[Any], list[Any]]]:
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


def merged_means(
    scalars: Mapping[str, Any], sums: Mapping[str, tuple[Tensor, float | Tensor]]
) -> dict[str, float]:
    """Return the means over the ranks; every rank must call this.

    Args:
        scalars: values of this rank; all ranks count equally.
        sums: sums of this rank, and their counts or weights. Their means replace scalars of the
            same name.
    """
    if get_world_size() == 1:
        # The scalars are the means of these sums already.
        sums = {}
    weights = {f"{name}{_WEIGHT}": count for name, (_, count) in sums.items()}
    totals = {name: total for name, (total, _) in sums.items()}
    merged = mean_scalars({**scalars, **totals, **weights})
    # Not only the names of this rank: another one may have values that this one lacks.
    for key in [key for key in merged if key.endswith(_WEIGHT)]:
        name, weight = key.removesuffix(_WEIGHT), merged.pop(key)
        merged[name] = merged[name] / weight if weight else math.nan
    return merged


def _move(value: Any, device: torch.device | str) -> Any:
    """Move a tensor; leave float64, which sums of numbers have, if the device has no float64."""
    if not isinstance(value, Tensor):
        return value
    is_too_wide = value.dtype == torch.float64 and widest_float(torch.device(device)) != value.dtype
    return value if is_too_wide else value.to(device)


def _compact(name: str, values: list[Any]) -> Any:
    """Return values for a checkpoint: as one tensor if they have equal shapes and dtypes."""
    kinds = {(v.shape, v.dtype, v.device) if isinstance(v, Tensor) else None for v in values}
    if len(kinds) == 1 and None not in kinds:
        return torch.stack(values).detach().cpu()
    numbers = (bool, int, float)
    return [v if isinstance(v, numbers) else _tensor(name, v).detach().cpu() for v in values]


def are_finite(tensors: Sequence[Tensor]) -> list[bool]:
    """Return for each tensor whether it is finite; waits once for each device if all are."""
    # A finite sum has only finite terms, and is faster than a test of each element.
    finite = fetch([_sum_of_all(tensor).isfinite() for tensor in tensors])
    return [good or _is_finite(tensor) for good, tensor in zip(finite, tensors, strict=True)]


def _sum_of_all(tensor: Tensor) -> Tensor:
    return tensor.sum(dtype=torch.float32 if tensor.element_size() <= 2 else None)


def _is_finite(tensor: Tensor) -> bool:
    # Sums of 8-bit numbers do not overflow, and torch has no `isfinite` for them.
    return tensor.element_size() > 1 and bool(tensor.isfinite().all())


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
    tensors = [_tensor(name, value) for _, name, value in recent]
    entries = zip(recent, tensors, are_finite(tensors), strict=True)
    return [(step, n, str(tensor.tolist())) for (step, n, _), tensor, good in entries if not good]


def _sum(name: str, values: list[Any]) -> Tensor:
    """Return the sum of logged values; a value with several elements counts as its mean."""
    tensors = [value if isinstance(value, Tensor) else _tensor(name, value) for value in values]
    if len({tensor.dtype for tensor in tensors}) > 1:
        # Together, int64 and float32 would become float32.
        tensors = [as_float(tensor) for tensor in tensors]
    try:
        stacked = torch.stack(tensors).detach()
    except RuntimeError:
        # Custom steps may log tensors of several shapes, or numbers and tensors on a device.
        return reduce(_plus, (_sum(name, [tensor]) for tensor in tensors), torch.zeros(()))
    stacked = as_float(stacked)
    stacked = stacked if stacked.dtype == torch.float64 else stacked.float()
    return stacked.sum() if stacked.ndim == 1 else stacked.flatten(1).mean(1).sum()


def _plus(total: Tensor, value: Tensor) -> Tensor:
    """Add 0-d tensors; one may be on the CPU, with more bits than the device of the other has."""
    if total.device != value.device:
        device = (value if total.is_cpu else total).device
        if (widest := widest_float(device)) != torch.float64:
            total, value = total.to(device, widest), value.to(device, widest)
    return total + value


def _weighted_sum(name: str, values: list[Any], weights: list[Any]) -> tuple[Tensor, Tensor]:
    """Return the sum of the values times their weights, and the sum of the weights."""
    means = _stack([widened(_sum(name, [value])) for value in values])
    factors = _stack([_factor(weight) for weight in weights])
    factors = factors.to(means.device, means.dtype)
    # Values with a weight of 0 may be NaN.
    return torch.where(factors > 0, means * factors, 0.0).sum(), factors.sum()


def _stack(scalars: Sequence[Tensor]) -> Tensor:
    """Stack 0-d tensors on the device of the first one that is not on the CPU.

    A batch without samples has the number 0 as its weight, other batches have tensors.
    """
    device = next((scalar.device for scalar in scalars if not scalar.is_cpu), torch.device("cpu"))
    return torch.stack([scalar.to(device, widest_float(device)) for scalar in scalars])


def _factor(weight: float | Tensor) -> Tensor:
    if isinstance(weight, Tensor):
        return widened(weight)
    return torch.tensor(weight, dtype=torch.float64)


def _tensor(name: str, value: Any) -> Tensor:
    try:
        # Numbers have no dtype, and would get the default one.
        return torch.as_tensor(value, dtype=None if hasattr(value, "dtype") else torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"train_step must return numbers or tensors to log, got {name}={value!r}"
        ) from error
