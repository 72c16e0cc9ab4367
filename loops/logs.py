"""Log values between two records: kept raw, averaged on the device when due."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class LogBuffer:
    """Collects the logs of training steps without touching the device.

    `append` takes the update that a step belongs to and its dict of logs: it is a list's own
    method, since it is called for every batch.
    """

    def __init__(self) -> None:
        # Of each batch the update that it belongs to, and its logs.
        self._raw: list[tuple[int, Mapping[str, Any]]] = []
        # Raw values of a checkpoint, before those in `_raw`.
        self._earlier: dict[str, list[Any]] = {}
        self._sums: dict[str, tuple[Tensor, float]] = {}
        # By name, the first value that is not finite of those that are in `_sums`.
        self._nonfinite: dict[str, tuple[int, str]] = {}
        # The batch, counted over the run, with whose logs `_raw` begins.
        self._first = 0
        self.append = self._raw.append

    def start(self, iteration: int) -> None:
        """Let the next logs be those of batch `iteration` of the run."""
        self._raw.clear()
        self._first = iteration

    def means(self) -> dict[str, Tensor]:
        """Return the means of all that was logged since `clear`, on the device."""
        return {name: total / count for name, (total, count) in self._all_sums().items()}

    def fold(self) -> None:
        """Turn the raw values into sums on the device; waits for it."""
        self._sums = self._all_sums()
        if not all(are_finite([total for total, _ in self._sums.values()])):
            for step, name, text in _not_finite(self._raw):
                self._nonfinite.setdefault(name, (step, text))
        self._drop_raw()

    def clear(self) -> None:
        """Forget what was logged so far."""
        self._sums = {}
        self._nonfinite = {}
        self._drop_raw()

    def first_nonfinite(
        self, watches: Callable[[str], bool], after: int = -1
    ) -> tuple[int, str] | None:
        """Return update and text of the first value since `clear` that is not finite, or None.

        Args:
            watches: Says of a name whether its values count.
            after: Values up to this update do not count.
        """
        recent = [(step, logs) for step, logs in self._raw if step > after]
        found = [(step, name, text) for name, (step, text) in self._nonfinite.items()]
        found += _not_finite(recent)
        told = [(s, f"{name} is {text}") for s, name, text in found if s > after and watches(name)]
        return min(told, key=lambda one: one[0], default=None)

    def state_dict(self, iteration: int) -> dict[str, Any]:
        """Return what the next record is made of, without what came after batch `iteration`.

        The raw values are kept as they are: added up in two parts they would give another sum.
        """
        values = self._by_name(max(0, iteration - self._first))
        return {
            "sums": {name: (total.cpu(), count) for name, (total, count) in self._sums.items()},
            "values": {name: _compact(name, some) for name, some in values.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from a state, on the device where the logs are made."""
        self._raw.clear()
        self._nonfinite = {}
        self._sums = {n: (total.to(device), count) for n, (total, count) in state["sums"].items()}
        self._earlier = {
            name: [one.to(device) if isinstance(one, Tensor) else one for one in values]
            for name, values in state["values"].items()
        }

    def _all_sums(self) -> dict[str, tuple[Tensor, float]]:
        sums = dict(self._sums)
        for name, values in self._by_name(len(self._raw)).items():
            total, count = sums.get(name, (None, 0))
            new = _sum(name, values)
            sums[name] = (new if total is None else total + new, count + len(values))
        return sums

    def _drop_raw(self) -> None:
        self._first += len(self._raw)
        self._raw.clear()
        self._earlier.clear()

    def _by_name(self, count: int) -> dict[str, list[Any]]:
        """The raw values, of the first `count` batches in `_raw`."""
        by_name = {name: list(values) for name, values in self._earlier.items()}
        for _, logs in self._raw[:count]:
            for name, value in logs.items():
                by_name.setdefault(name, []).append(value)
        return by_name


def mean_logs(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one state for any number of ranks to go on from: the mean of all the saved ranks."""
    sums: dict[str, tuple[Tensor, float]] = {}
    for state in states:
        buffer = LogBuffer()
        buffer.load_state_dict(state, torch.device("cpu"))
        for name, (total, count) in buffer._all_sums().items():
            before = sums.get(name, (torch.zeros(()), 0))
            sums[name] = (before[0] + total, before[1] + count)
    shares = len(states)
    return {
        "sums": {name: (total / shares, count / shares) for name, (total, count) in sums.items()},
        "values": {},
    }


def _compact(name: str, values: list[Any]) -> Any:
    """Values as a checkpoint takes them: as one tensor where that gives the same values back."""
    if all(isinstance(value, Tensor) for value in values):
        alike = {(value.shape, value.dtype, value.device) for value in values}
        if len(alike) == 1:
            return torch.stack(values).detach().cpu()
    numbers = (bool, int, float)
    return [
        value if isinstance(value, numbers) else _tensor(name, value).detach().cpu()
        for value in values
    ]


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


def _not_finite(raw: Sequence[tuple[int, Mapping[str, Any]]]) -> Iterator[tuple[int, str, str]]:
    """Yield update, name and text of the values that are not finite."""
    values = [
        (step, name, torch.as_tensor(value)) for step, logs in raw for name, value in logs.items()
    ]
    finite = are_finite([value for _, _, value in values])
    for (step, name, value), good in zip(values, finite, strict=True):
        if not good:
            yield step, name, str(value.tolist())


def _sum(name: str, values: list[Any]) -> Tensor:
    """Return the sum of logged values; a custom step may log floats, or vectors (their mean)."""
    try:
        stacked = torch.stack(values).detach()
    except (TypeError, RuntimeError):
        # Not all are tensors of one shape, as the wrappers' own are.
        return sum((_sum(name, [_tensor(name, one)]) for one in values), torch.zeros(()))
    stacked = stacked if stacked.dtype == torch.float64 else stacked.float()
    return stacked.sum() if stacked.ndim == 1 else stacked.flatten(1).mean(1).sum()


def _tensor(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"train_step must return numbers or tensors to log, got {name}={value!r}"
        ) from error
