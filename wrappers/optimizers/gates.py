"""Gates attach to an optimizer wrapper from outside, and may prevent its updates."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from ..features import model_features, optim_features
from ..steps.step_checks import has_own_step


class Gate:
    """Takes part in each micro-batch and update of an optimizer wrapper; this one does nothing."""

    def begin(self, model: Any) -> None:
        """Handle the start of the training of ``model``."""

    def enter(self, model: Any) -> None:
        """Handle the start of a forward of ``model``."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to run backward from; every rank must call this."""
        return loss

    def begin_backward(self, ends_window: bool) -> None:
        """Handle the start of a backward."""

    def allows(self, optim_wrapper: Any) -> bool:
        """Whether to update by the current (unclipped, scaled) gradients."""
        return True

    def clear(self) -> None:
        """Handle that the gradients are cleared."""


class UpdateGuard(Protocol):
    """Decides before each update whether it is made."""

    def note(self, loss: Tensor) -> None:
        """Receive the loss of a micro-batch, before its backward."""

    def allows(self, optim_wrapper: Any) -> bool:
        """Whether to update by the current (unclipped, scaled) gradients."""


class GuardGate(Gate):
    """Asks an ``UpdateGuard``."""

    def __init__(self, guard: UpdateGuard) -> None:
        self.guard = guard

    def scale(self, loss: Tensor) -> Tensor:
        """Report the loss, unchanged."""
        self.guard.note(loss.detach())
        return loss

    def allows(self, optim_wrapper: Any) -> bool:
        """Ask the guard."""
        return self.guard.allows(optim_wrapper)


class ClosureGate(Gate):
    """Refuses the updates of an optimizer that needs a closure."""

    def allows(self, optim_wrapper: Any) -> bool:
        """Raise ValueError."""
        raise ValueError(closure_advice(optim_wrapper.optimizer))


def closure_advice(optimizer: Optimizer) -> str:
    return (
        f"{type(optimizer).__name__} needs a closure that computes the loss again, several times "
        "in a step: override the wrapper's train_step and call "
        "optim_wrapper.update_by_closure(closure, self) there, or use an optimizer that steps from "
        "gradients, such as AdamW"
    )


def refuse_without_closure(optim_wrapper: Any, model: Any) -> None:
    """Raise ValueError if the optimizer needs a closure and no step of `model` can give one."""
    if optim_features(optim_wrapper).needs_closure and not has_own_step(model):
        raise ValueError(closure_advice(optim_wrapper.optimizer))


def check_closure(optim_wrapper: Any, model: Any = None) -> None:
    """Raise ValueError where ``optim_wrapper`` cannot update by a closure."""
    name = type(optim_wrapper.optimizer).__name__
    every = optim_wrapper.accumulative_counts
    if every != 1:
        raise ValueError(
            f"{name} with a closure needs accumulative_counts=1, got {every}: it computes "
            "the loss several times, always on the same data; use larger batches"
        )
    if optim_wrapper.loss_weight is not None:
        raise ValueError(
            f"{name} with a closure needs loss_weight=None: each of its losses must be the mean "
            "that it compares; compute that in the closure"
        )
    if optim_wrapper.clip is not None:
        raise ValueError(
            f"{name} with a closure needs clip_grad=None, got {optim_wrapper.clip}: it compares "
            "losses with gradients, which clipped are of another loss"
        )
    if optim_wrapper.scales_losses:
        raise ValueError(
            f"{name} with a closure takes no scaled loss: use dtype bfloat16 or float32"
        )
    if model_features(model).uneven_inputs is not None:
        raise ValueError(
            f"{name} with a closure needs as many batches on all ranks: leave uneven_inputs out"
        )
