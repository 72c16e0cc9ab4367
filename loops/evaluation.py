"""What a training loop needs of an evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from .hook import HookList
from .state import LoopState, Phase

# A function that is called between two batches and may request a stop.
Poll: TypeAlias = Callable[[LoopState], object]


class Evaluation(ABC):
    """An evaluation that can run alone or inside another loop."""

    def run(self, state: LoopState, hooks: HookList) -> dict[str, float]:
        """Evaluate ``state.model`` and return the metrics; every rank must call this."""
        try:
            return self.evaluate(state, hooks, lambda _: None)
        except BaseException as error:
            hooks.emit_exception(state, error)
            raise

    @abstractmethod
    def evaluate(self, state: LoopState, hooks: HookList, poll: Poll) -> dict[str, float]:
        """Evaluate inside another loop; every rank must call this."""

    @abstractmethod
    def try_batch(self, state: LoopState) -> None:
        """Run one batch, to find mistakes before training; every rank must call this."""

    @abstractmethod
    def adapt_to(self, phase: Phase) -> Any:
        """Return this evaluation, or a copy of it that is part of another phase."""


def adapt_loop(loop: Any, phase: Phase) -> Any:
    """Return a loop for ``phase``, so that a test with a ``ValLoop`` is recorded as a test.

    Loops of other classes are returned as they are.
    """
    return loop.adapt_to(phase) if isinstance(loop, Evaluation) else loop


def require_step(model: nn.Module, name: str) -> None:
    if not hasattr(model, name):
        kind = type(model).__name__
        raise TypeError(
            f"the model must have {name}, got a {kind} without it; wrap it, as in "
            "SingleDevice(model)"
        )
