"""Gates: objects in ``OptimWrapper.gates`` that can change losses and prevent updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from ..features import model_features, optim_features
from ..sharding.layout import parameters_of
from ..steps.step_checks import has_custom_step


class Gate:
    """Base class of objects that an optimizer wrapper calls in each micro-batch and update.

    By default its methods change nothing and allow every update.
    """

    def begin(self, model: Any) -> None:
        """Handle the start of the training of ``model``."""

    def enter(self, model: Any) -> None:
        """Handle the start of a forward of ``model``."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to run backward on; every rank must call this."""
        return loss

    def begin_backward(self, ends_window: bool) -> None:
        """Handle the start of a backward; ``ends_window`` is True in the last one of a window."""

    def allows(self, optim_wrapper: Any) -> bool:
        """Return whether to apply the current (unclipped, scaled) gradients."""
        return True

    def clear(self) -> None:
        """Handle the clearing of the gradients."""


class FreezeGate(Gate):
    """Freeze parameters for a number of updates by dropping their gradients before each update.

    Optimizers skip parameters without a gradient: neither weight decay nor momentum changes them,
    and their state is created in the first update that trains them. Backward still computes their
    gradients, because wrappers such as ddp expect the same parameters in every step.

    Attributes:
        steps: function that returns the number of updates so far.
        frozen: ``{n: parameters}``; the first ``n`` updates do not change these parameters.
    """

    def __init__(self, steps: Callable[[], int], frozen: Mapping[int, Sequence[Tensor]]) -> None:
        self.steps = steps
        self.frozen = frozen

    def allows(self, optim_wrapper: Any) -> bool:
        """Drop the gradients of frozen parameters; return whether any gradient is left."""
        done = self.steps()
        dropped = False
        for until, parameters in self.frozen.items():
            for parameter in parameters if done < until else ():
                parameter.grad, dropped = None, True
        if not dropped:
            optim_wrapper.gates.remove(self)
            return True
        return any(one.grad is not None for one in parameters_of(optim_wrapper.optimizer))


class UpdateGuard(Protocol):
    """An object that decides before each update whether it happens."""

    def note(self, loss: Tensor) -> None:
        """Receive the loss of a micro-batch before its backward."""

    def allows(self, optim_wrapper: Any) -> bool:
        """Return whether to apply the current (unclipped, scaled) gradients."""


class GuardGate(Gate):
    """Call an ``UpdateGuard`` as a gate."""

    def __init__(self, guard: UpdateGuard) -> None:
        self.guard = guard

    def scale(self, loss: Tensor) -> Tensor:
        self.guard.note(loss.detach())
        return loss

    def allows(self, optim_wrapper: Any) -> bool:
        return self.guard.allows(optim_wrapper)


class ClosureGate(Gate):
    """Raise ValueError when an optimizer that needs a closure is updated without one."""

    def allows(self, optim_wrapper: Any) -> bool:
        raise ValueError(_closure_advice(optim_wrapper.optimizer))


def _closure_advice(optimizer: Optimizer) -> str:
    return (
        f"{type(optimizer).__name__} needs a closure that computes the loss again, several times "
        "in a step: override the wrapper's train_step and call "
        "optim_wrapper.update_by_closure(closure, self) there, or use an optimizer that steps from "
        "gradients, such as AdamW"
    )


def refuse_without_closure(optim_wrapper: Any, model: Any) -> None:
    """Raise ValueError if the optimizer needs a closure and ``model`` has the default step."""
    if optim_features(optim_wrapper).needs_closure and not has_custom_step(model):
        raise ValueError(_closure_advice(optim_wrapper.optimizer))


def check_closure(optim_wrapper: Any, model: Any = None) -> None:
    """Raise ValueError if ``optim_wrapper`` cannot update by a closure."""
    every, clip = optim_wrapper.accumulative_counts, optim_wrapper.clip
    problem = ""
    if every != 1:
        problem = (
            f"needs accumulative_counts=1, got {every}: it computes the loss several times, always "
            "on the same data; use larger batches"
        )
    elif optim_wrapper.loss_weight is not None:
        problem = (
            f"needs loss_weight=None, got {optim_wrapper.loss_weight}: compute the "
            "weighted mean in the closure"
        )
    elif clip is not None:
        problem = f"needs clip_grad=None, got {clip}: its line search needs unclipped gradients"
    elif optim_wrapper.scales_losses:
        problem = "needs losses without a loss scale, got float16: use dtype bfloat16 or float32"
    elif model_features(model).uneven_inputs is not None:
        problem = "needs the same number of batches on all ranks: remove uneven_inputs"
    if problem:
        name = type(optim_wrapper.optimizer).__name__
        raise ValueError(f"{name} with a closure {problem}")
