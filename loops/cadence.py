"""When something that happens every now and then is due."""

from __future__ import annotations

import math

from .state import LoopState


class Cadence:
    """Every so many updates, epochs or seconds; several may be given.

    Ask `due_step` after each update and `due_epoch` after each epoch, usually
    in `on_save_point`. The answer is the same on every rank.

    Args:
        every_steps: Optimizer updates between two times; None for never.
        every_epochs: Epochs between two times; None for never.
        every_secs: Seconds of training between two times; None for never.

    Raises:
        ValueError: A number is not positive, or a count is not whole.
    """

    def __init__(
        self,
        every_steps: int | None = None,
        every_epochs: int | None = None,
        every_secs: float | None = None,
    ) -> None:
        for name, value in (("every_steps", every_steps), ("every_epochs", every_epochs)):
            if value is not None and (isinstance(value, bool) or int(value) != value or value < 1):
                raise ValueError(f"{name} must be a whole number >= 1 or null, got {value!r}")
        if every_secs is not None and not every_secs > 0:
            raise ValueError(f"every_secs must be > 0 or null, got {every_secs!r}")
        self.every_steps = every_steps
        self.every_epochs = every_epochs
        self.every_secs = every_secs
        # On the clock of `state.clock_s`; the first question after a start sets it.
        self.due_at_s = math.inf if every_secs is None else -math.inf

    def due_step(self, state: LoopState) -> bool:
        """Say whether the time has come by the updates or by the clock."""
        by_steps = self.every_steps is not None and state.step % self.every_steps == 0
        # Asked at every update: no call while the time has not come.
        by_clock = state.clock_s >= self.due_at_s and self._due_by_clock(state)
        return state.step > 0 and (by_steps or by_clock)

    def due_epoch(self, state: LoopState) -> bool:
        """Say whether an epoch has just ended (`state.batch` is 0) and is one of those due."""
        if self.every_epochs is None or state.batch or not state.epoch:
            return False
        return state.epoch % self.every_epochs == 0

    def _due_by_clock(self, state: LoopState) -> bool:
        assert self.every_secs is not None
        first = self.due_at_s == -math.inf
        self.due_at_s = state.clock_s + self.every_secs
        return not first
