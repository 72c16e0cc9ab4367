"""Updates by a closure, and what stands in their way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..steps.step_checks import has_own_step


def closure_advice(optimizer: Optimizer) -> str:
    """What to do with an optimizer that needs a closure."""
    name = type(optimizer).__name__
    return (
        f"{name} needs a closure that computes the loss again, several times in a step: override "
        "the wrapper's train_step and call optim_wrapper.update_by_closure(closure, self) there, "
        "or use an optimizer that steps from gradients, such as AdamW"
    )


def refuse_without_closure(optim_wrapper: Any, model: Any) -> None:
    """Raise ValueError where no step of ``model`` could give the optimizer a closure.

    Args:
        optim_wrapper: of any kind, with one optimizer.
        model: the model wrapper that is to step it.
    """
    if getattr(optim_wrapper, "_needs_closure", False) and not has_own_step(model):
        raise ValueError(closure_advice(optim_wrapper.optimizer))


def check_closure(optim_wrapper: Any, model: Any = None) -> None:
    """Raise ValueError where ``optim_wrapper`` cannot update by a closure."""
    name = type(optim_wrapper.optimizer).__name__
    every = optim_wrapper._accumulative_counts
    if every != 1:
        raise ValueError(
            f"{name} with a closure needs accumulative_counts=1, got {every}: each of its losses "
            "must be that of the same data; use larger batches"
        )
    if optim_wrapper._clip is not None:
        raise ValueError(
            f"{name} with a closure needs clip_grad=None, got {optim_wrapper._clip}: it compares "
            "losses with gradients, which clipped are of another loss"
        )
    scaler = getattr(optim_wrapper, "loss_scaler", None)
    if scaler is not None and scaler.is_enabled():
        raise ValueError(
            f"{name} with a closure takes no scaled loss: use dtype bfloat16 or float32"
        )
    if getattr(model, "uneven_inputs", None) is not None:
        raise ValueError(
            f"{name} with a closure needs as many batches on all ranks: leave uneven_inputs out"
        )


def step_by_closure(optim_wrapper: Any, closure: Callable[[], Tensor], model: Any) -> Tensor:
    """Do what ``OptimWrapper.update_by_closure`` says."""
    check_closure(optim_wrapper, model)
    average: Callable[[Tensor], Tensor] | None = getattr(model, "average", None)
    if average is None:
        raise TypeError(
            "update_by_closure needs the model wrapper, which knows the ranks whose losses are to "
            f"be averaged, got {type(model).__name__}: give self, not self.module"
        )
    optim_wrapper._inner_count += 1

    def evaluate() -> Tensor:
        optim_wrapper.zero_grad()
        with optim_wrapper.optim_context(model):
            loss = closure()
        loss.backward()  # type: ignore[no-untyped-call]
        optim_wrapper._check_first()
        return average(loss.detach())

    first = optim_wrapper.optimizer.step(evaluate)
    optim_wrapper.zero_grad()
    return torch.as_tensor(first).detach()
