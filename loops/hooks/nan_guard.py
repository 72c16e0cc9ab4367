"""Stop at the first value that is not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection

from torch import Tensor

from ...collectives import all_gather_object, get_rank, mean_scalars
from ...registry import HOOKS
from ...wrappers import total_norm
from ...wrappers.layout import local_part, reshard
from ...wrappers.unwrap import plain_name, user_model
from ..hook import Hook, Scalars
from ..logs import are_finite
from ..schedule import Cadence
from ..state import LoopState

logger = logging.getLogger(__name__)


class NonFiniteError(ArithmeticError):
    """A loss, log value or parameter is NaN or infinite."""


@HOOKS.register_module()
class NanGuardHook(Hook):
    """Raise NonFiniteError on every rank if a value of any rank is not finite.

    The message names the first bad value, its step and its rank. The hook does not wait for the
    device at each step. It checks the values of several steps at once: with each log record, or at
    a separate interval, which costs one small collective each time. When training ends, the
    parameters are checked as well, unless ``check`` is "loss".

    Args:
        check: "weights" reports only parameters that are not finite. With log records they are
            checked only if a logged loss is not finite; at a separate interval and at the end of
            training they are always checked. A bad loss with finite parameters is accepted, since a
            loss scaler may skip the update. "loss" checks the log values with "loss" in their
            names. "all" checks all log values and the parameters; it adds ``param_norm``, their L2
            norm, to the log records.
        action: "raise", or "warn" to log a warning and continue.
        every_steps: optimizer updates between two checks, instead of with the records.
        every_epochs: passes over the data between two checks, instead of with the records.
        every_secs: seconds of training between two checks, instead of with the records.

    Raises:
        ValueError: an argument is not allowed.
    """

    # After the hooks that write the record, so that the bad record is in the files, and before
    # those that save, so that bad weights are not saved.
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
        self._target = check
        self._raise = action == "raise"
        self._cadence = Cadence(every_steps, every_epochs, every_secs)
        self._ignored = {
            "on_update": every_steps is None and every_secs is None,
            "on_save_point": every_epochs is None,
            "on_train_end": check == "loss",
            "collect_logs": check != "all",
        }
        self._with_records = (every_steps, every_epochs, every_secs) == (None, None, None)
        self._checked_at = -1
        # The first bad value of a log record since the last check.
        self._found: tuple[int, str] | None = None
        self._warned = False

    def ignores(self) -> Collection[str]:
        """Return the events that the settings do not need."""
        return [event for event, ignored in self._ignored.items() if ignored]

    def on_train_start(self, state: LoopState) -> None:
        self._checked_at, self._found, self._warned = state.step, None, False

    def on_update(self, state: LoopState) -> None:
        if state.together and self._cadence.due_step(state):
            self._check_together(state)

    def on_save_point(self, state: LoopState) -> None:
        if self._cadence.due_epoch(state):
            self._check_together(state)

    def on_train_end(self, state: LoopState) -> None:
        self._check_together(state)

    def collect_logs(self, state: LoopState, scalars: Scalars) -> None:
        # Every rank must call this, since each has a part of sharded parameters.
        scalars["param_norm"] = total_norm([p for _, p in _named_parameters(state)])

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        bad = [k for k, v in record.items() if self._watches(k) and not math.isfinite(v)]
        if bad and self._with_records:
            self._report(state, f"{bad[0]} is {record[bad[0]]}")
        elif bad:
            # Keep it for the next check: the log buffer is cleared after the record.
            self._found = self._first_value(state)
        if self._with_records:
            self._checked_at = state.step

    def _watches(self, name: str) -> bool:
        return self._target == "all" or "loss" in name

    def _check_together(self, state: LoopState) -> None:
        """Check this rank and exchange the result; every rank must call this."""
        value, weights = self._check_rank(state)
        bad_here = weights or (value and self._target != "weights")
        if mean_scalars({"nan_guard": 1.0 if bad_here else 0.0})["nan_guard"] > 0:
            self._report(state, "a value that is not finite")
        self._checked_at, self._found = state.step, None

    def _check_rank(self, state: LoopState) -> tuple[tuple[int, str] | None, str]:
        """Return this rank's first bad value with its step, and its first bad parameter."""
        return self._first_value(state), "" if self._target == "loss" else bad_parameter(state)

    def _first_value(self, state: LoopState) -> tuple[int, str] | None:
        return self._found or state.logs.first_nonfinite(self._watches, after=self._checked_at)

    def _report(self, state: LoopState, default: str) -> None:
        """Raise or warn with the same text on every rank; every rank must call this."""
        by_rank = list(enumerate(all_gather_object(self._check_rank(state))))
        weights = [(state.step, rank, text) for rank, (_, text) in by_rank if text]
        if self._target == "weights" and not weights:
            return
        values = [(value[0], rank, value[1]) for rank, (value, _) in by_rank if value]
        # Within a step, prefer the log value, which is more informative.
        problems = sorted(values, key=lambda problem: problem[:2]) + weights
        step, rank, problem_text = min(
            problems, key=lambda problem: problem[0], default=(state.step, 0, default)
        )
        text = f"{problem_text} at step {step} on rank {rank}"
        if weights and problem_text != weights[0][2]:
            text = f"{text}; {weights[0][2]}"
        if self._raise:
            raise NonFiniteError(
                f"{text}; lower the learning rate, clip the gradients, or check the data of that "
                "step. To continue anyway, set hooks.nan_guard.action=warn, or "
                "NanGuardHook(action='warn')"
            )
        if get_rank() == 0 and not self._warned:
            logger.warning("%s", text)
        # Bad weights stay bad: warn only once.
        self._warned = self._target == "weights"


def bad_parameter(state: LoopState) -> str:
    """Describe the first parameter that is not finite on this rank; "" if there is none.

    Only this rank's shards of sharded parameters are checked.
    """
    named = [(name, local_part(param)) for name, param in _named_parameters(state)]
    finite = are_finite([local for _, local in named])
    for (name, local), good in zip(named, finite, strict=True):
        if not good:
            count = int((~local.isfinite()).sum())
            return f"parameter {name!r} has {count} of {local.numel()} values not finite"
    return ""


def _named_parameters(state: LoopState) -> list[tuple[str, Tensor]]:
    # Buffers are not checked: causal masks contain infinities on purpose.
    model = user_model(state.model)
    reshard(model)
    named = model.named_parameters()
    return [
        (plain_name(n), p)
        for n, p in named
        if (p.is_floating_point() or p.is_complex()) and p.numel()
    ]
