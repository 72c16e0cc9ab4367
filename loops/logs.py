"""Log values between two records: kept raw, averaged on the device when due."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..collectives import mean_scalars
from .hook import HookList, Scalars
from .state import LoopState


class LogBuffer:
    """Collects the logs of training steps without touching the device.

    `append` takes the dict of one step: it is a list's own method, since it is
    called for every batch.
    """

    def __init__(self) -> None:
        self._raw: list[Mapping[str, Any]] = []
        self._sums: dict[str, tuple[Tensor, int]] = {}
        self.append = self._raw.append

    def flush(self, state: LoopState, hooks: HookList) -> None:
        """Announce the means since the last record; every rank must call this."""
        self.fold()
        scalars: Scalars = {name: total / count for name, (total, count) in self._sums.items()}
        self._sums.clear()
        for collect in hooks.collect_logs:
            collect(state, scalars)
        record = mean_scalars(scalars)
        for listener in hooks.on_log:
            listener(state, record)

    def fold(self) -> None:
        """Turn the raw values into sums on the device."""
        by_name: dict[str, list[Any]] = {}
        for logs in self._raw:
            for name, value in logs.items():
                by_name.setdefault(name, []).append(value)
        self._raw.clear()
        for name, values in by_name.items():
            total, count = self._sums.get(name, (None, 0))
            new = _sum(name, values)
            self._sums[name] = (new if total is None else total + new, count + len(values))


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
