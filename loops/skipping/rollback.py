"""The request to continue a training from an earlier checkpoint."""

from __future__ import annotations

from collections.abc import Callable

from ..state import LoopState


class Rollback(BaseException):
    """Raised on every rank to make a training loop continue from an earlier checkpoint.

    Control flow, not an error; hence not an Exception, like KeyboardInterrupt.

    Args:
        reason: why the training goes back, and to which checkpoint.
        restore: restores the state of the checkpoint; every rank calls it.
    """

    def __init__(self, reason: str, *, restore: Callable[[LoopState], object]) -> None:
        super().__init__(reason)
        self.restore = restore
