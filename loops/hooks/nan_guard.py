"""Stopping at the first value that is not finite."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...collectives import all_gather_object, get_rank, mean_scalars
from ...registry import HOOKS
from ...wrappers import local_part, reshard, total_norm
from ..cadence import Cadence
from ..hook import Hook, Scalars
from ..state import LoopState
from ..weights import plain_name, user_model

logger = logging.getLogger(__name__)

_Finding = tuple[int, int, str]  # step, rank, what is wrong: the smallest is the first one

# Batches whose values are kept for telling which was the first bad one.
_REMEMBERED = 4096
_CHECKS = ("loss", "all")
_ACTIONS = ("raise", "warn")


class NonFiniteError(ArithmeticError):
    """A loss, log value or parameter is NaN or infinite."""


@HOOKS.register_module()
class NanGuardHook(Hook):
    """Raises NonFiniteError on all ranks when a value of any rank is not finite.

    The message names the first bad value, its step and its rank. The steps in
    between are not synchronised with the device: their values are looked at
    together: with each log record, or at a cadence of their own (one small
    collective each time).

    Args:
        check: "loss" looks at the log values with "loss" in their names, "all"
            at all log values and at the model's parameters; it adds `param_norm`,
            their L2 norm, to the log records.
        action: "raise", or "warn" to log a warning and go on.
        every_steps: Optimizer updates between two looks, instead of with the records.
        every_epochs: Passes over the data between two looks, instead of with the records.
        every_secs: Seconds of training between two looks, instead of with the records.

    Raises:
        ValueError: A setting is out of range.
    """

    # After the hooks that write the record, so that the bad one is on file, and before those
    # that save, so that no bad weights are.
    order = 74

    def __init__(
        self,
        *,
        check: str = "loss",
        action: str = "raise",
        every_steps: int | None = None,
        every_epochs: int | None = None,
        every_secs: float | None = None,
    ) -> None:
        for name, value, allowed in (("check", check, _CHECKS), ("action", action, _ACTIONS)):
            if value not in allowed:
                raise ValueError(f"NanGuardHook: {name} must be one of {allowed}, got {value!r}")
        self._all = check == "all"
        self._raise = action == "raise"
        self._cadence = Cadence(every_steps, every_epochs, every_secs)
        self._ignored = {
            "on_update": every_steps is None and every_secs is None,
            "on_save_point": every_epochs is None,
            "on_log": (every_steps, every_epochs, every_secs) != (None, None, None),
        }
        self._seen: deque[tuple[int, Mapping[str, Tensor]]] = deque(maxlen=_REMEMBERED)

    def ignores(self) -> Collection[str]:
        """Without a cadence of its own it looks at the records, else at the cadence's events."""
        return [event for event, ignored in self._ignored.items() if ignored]

    def on_batch_end(self, state: LoopState, batch: Any, logs: Mapping[str, Tensor]) -> None:
        self._seen.append((state.step + 1, logs))

    def on_update(self, state: LoopState) -> None:
        if state.together and self._cadence.due_step(state):
            self._look_together(state)

    def on_save_point(self, state: LoopState) -> None:
        if self._cadence.due_epoch(state):
            self._look_together(state)

    def collect_logs(self, state: LoopState, scalars: Scalars) -> None:
        if self._all:
            # Every rank does this: of sharded parameters each has a part.
            scalars["param_norm"] = total_norm([p for _, p in _named_parameters(state)])

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        bad = [k for k, v in record.items() if self._watches(k) and not math.isfinite(v)]
        if bad:
            self._report(state, self._look(state), f"{bad[0]} is {record[bad[0]]}")
        self._seen.clear()

    def _watches(self, name: str) -> bool:
        return self._all or "loss" in name

    def _look_together(self, state: LoopState) -> None:
        """Look and let the other ranks know; every rank must call this."""
        found = self._look(state)
        bad_here = 0.0 if found is None else 1.0
        if mean_scalars({"nan_guard": bad_here})["nan_guard"] > 0:
            self._report(state, found, "a value that is not finite")
        self._seen.clear()

    def _look(self, state: LoopState) -> _Finding | None:
        """Return the first thing of this rank that is not finite."""
        values = [
            (step, name, torch.as_tensor(value))
            for step, logs in self._seen
            for name, value in logs.items()
            if self._watches(name)
        ]
        finite = _finite([value for _, _, value in values])
        for (step, name, value), good in zip(values, finite, strict=True):
            if not good:
                return step, get_rank(), f"{name} is {value.tolist()}"
        bad = bad_parameter(state) if self._all else ""
        return (state.step, get_rank(), bad) if bad else None

    def _report(self, state: LoopState, found: _Finding | None, else_text: str) -> None:
        """Raise or warn with the same text on every rank; every rank must call this."""
        findings = [part for part in all_gather_object(found) if part is not None]
        step, rank, what = min(findings, default=(state.step, 0, else_text))
        text = f"{what} at step {step} on rank {rank}"
        if self._raise:
            raise NonFiniteError(
                f"{text}; lower the learning rate, clip the gradients, or look at the data of "
                "that step (NanGuardHook: action 'warn' goes on)"
            )
        if get_rank() == 0:
            logger.warning("%s", text)


def bad_parameter(state: LoopState) -> str:
    """Return what is wrong with this rank's first parameter that is not finite, or nothing.

    Of sharded parameters it looks at this rank's parts.
    """
    named = [(name, local_part(param)) for name, param in _named_parameters(state)]
    finite = _finite([part for _, part in named])
    for (name, part), good in zip(named, finite, strict=True):
        if not good:
            count = int((~part.isfinite()).sum())
            return f"parameter {name!r} has {count} of {part.numel()} values not finite"
    return ""


def _finite(tensors: Sequence[Tensor]) -> list[bool]:
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


def _named_parameters(state: LoopState) -> list[tuple[str, Tensor]]:
    # Buffers are left out: causal masks hold infinities on purpose.
    model = user_model(state.model)
    reshard(model)
    named = model.named_parameters()
    return [(plain_name(n), p) for n, p in named if p.is_floating_point() and p.numel()]
