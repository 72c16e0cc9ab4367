"""Stopping at the first value that is not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection

from torch import Tensor

from ...collectives import all_gather_object, get_rank, mean_scalars
from ...registry import HOOKS
from ...wrappers import total_norm
from ...wrappers.sharding.layout import local_part, reshard
from ..checkpoints.weights import plain_name, user_model
from ..hook import Hook, Scalars
from ..schedule import Cadence
from ..state import LoopState, are_finite

logger = logging.getLogger(__name__)


class NonFiniteError(ArithmeticError):
    """A loss, log value or parameter is NaN or infinite."""


@HOOKS.register_module()
class NanGuardHook(Hook):
    """Raises NonFiniteError on every rank when a value of any rank is not finite.

    The message names the first bad value, its step and its rank. The steps in between are not
    synchronised with the device: their values are looked at together: with each log record, or at a
    cadence of their own (one small collective each time); the parameters also when training ends.

    Args:
        check: "weights" looks at the model's parameters, with the records only where a loss is not
            finite: a loss alone may be so, as where a loss scaler skips the update. "loss" looks
            at the log values with "loss" in their names, "all" at all log values and at the
            parameters; it adds `param_norm`, their L2 norm, to the log records.
        action: "raise", or "warn" to log a warning and continue.
        every_steps: Optimizer updates between two looks, instead of with the records.
        every_epochs: Passes over the data between two looks, instead of with the records.
        every_secs: Seconds of training between two looks, instead of with the records.
    """

    # After the hooks that write the record, so that the bad one is on file, and before those
    # that save, so that no bad weights are.
    order = 74

    def __init__(
        self,
        *,
        check: str = "weights",
        action: str = "raise",
        every_steps: int | None = None,
        every_epochs: int | None = None,
        every_secs: float | None = None,
    ) -> None:
        for name, value, allowed in (
            ("check", check, ("weights", "loss", "all")),
            ("action", action, ("raise", "warn")),
        ):
            if value not in allowed:
                raise ValueError(f"NanGuardHook: {name} must be one of {allowed}, got {value!r}")
        self._check = check
        self._raise = action == "raise"
        self._cadence = Cadence(every_steps, every_epochs, every_secs)
        self._ignored = {
            "on_update": every_steps is None and every_secs is None,
            "on_save_point": every_epochs is None,
            "on_train_end": check == "loss",
            "collect_logs": check != "all",
        }
        self._with_records = (every_steps, every_epochs, every_secs) == (None, None, None)
        self._looked_at = -1
        # What a record has shown since then.
        self._found: tuple[int, str] | None = None
        self._warned = False

    def ignores(self) -> Collection[str]:
        """Return the events that neither the cadence nor what is looked at needs."""
        return [event for event, ignored in self._ignored.items() if ignored]

    def on_train_start(self, state: LoopState) -> None:
        self._looked_at, self._found, self._warned = state.step, None, False

    def on_update(self, state: LoopState) -> None:
        if state.together and self._cadence.due_step(state):
            self._look_together(state)

    def on_save_point(self, state: LoopState) -> None:
        if self._cadence.due_epoch(state):
            self._look_together(state)

    def on_train_end(self, state: LoopState) -> None:
        self._look_together(state)

    def collect_logs(self, state: LoopState, scalars: Scalars) -> None:
        # Every rank does this: of sharded parameters each has a part.
        scalars["param_norm"] = total_norm([p for _, p in _named_parameters(state)])

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        bad = [k for k, v in record.items() if self._watches(k) and not math.isfinite(v)]
        if bad and self._with_records:
            self._report(state, f"{bad[0]} is {record[bad[0]]}")
        elif bad:
            # After the record its values are gone.
            self._found = self._first_value(state)
        if self._with_records:
            self._looked_at = state.step

    def _watches(self, name: str) -> bool:
        return self._check == "all" or "loss" in name

    def _look_together(self, state: LoopState) -> None:
        """Look and let the other ranks know; every rank must call this."""
        value, weights = self._look(state)
        bad_here = weights or (value and self._check != "weights")
        if mean_scalars({"nan_guard": 1.0 if bad_here else 0.0})["nan_guard"] > 0:
            self._report(state, "a value that is not finite")
        self._looked_at, self._found = state.step, None

    def _look(self, state: LoopState) -> tuple[tuple[int, str] | None, str]:
        """Return what of this rank is not finite: the first value, with its step; a parameter."""
        return self._first_value(state), "" if self._check == "loss" else bad_parameter(state)

    def _first_value(self, state: LoopState) -> tuple[int, str] | None:
        return self._found or state.logs.first_nonfinite(self._watches, after=self._looked_at)

    def _report(self, state: LoopState, else_text: str) -> None:
        """Raise or warn with the same text on every rank; every rank must call this."""
        by_rank = list(enumerate(all_gather_object(self._look(state))))
        weights = [(state.step, rank, text) for rank, (_, text) in by_rank if text]
        if self._check == "weights" and not weights:
            return
        values = [(value[0], rank, value[1]) for rank, (value, _) in by_rank if value]
        # Of the same step the value comes first: it tells more.
        found = sorted(values, key=lambda one: one[:2]) + weights
        step, rank, what = min(found, key=lambda one: one[0], default=(state.step, 0, else_text))
        text = f"{what} at step {step} on rank {rank}"
        if weights and what != weights[0][2]:
            text = f"{text}; {weights[0][2]}"
        if self._raise:
            raise NonFiniteError(
                f"{text}; lower the learning rate, clip the gradients, or look at the data of "
                "that step (hooks.nan_guard.action=warn, or NanGuardHook(action='warn'), goes on)"
            )
        if get_rank() == 0 and not self._warned:
            logger.warning("%s", text)
        # Weights that are not finite stay so.
        self._warned = self._check == "weights"


def bad_parameter(state: LoopState) -> str:
    """Return what is wrong with this rank's first parameter, or part, that is not finite."""
    named = [(name, local_part(param)) for name, param in _named_parameters(state)]
    finite = are_finite([part for _, part in named])
    for (name, part), good in zip(named, finite, strict=True):
        if not good:
            count = int((~part.isfinite()).sum())
            return f"parameter {name!r} has {count} of {part.numel()} values not finite"
    return ""


def _named_parameters(state: LoopState) -> list[tuple[str, Tensor]]:
    # Buffers are left out: causal masks hold infinities on purpose.
    model = user_model(state.model)
    reshard(model)
    named = model.named_parameters()
    return [(plain_name(n), p) for n, p in named if p.is_floating_point() and p.numel()]
