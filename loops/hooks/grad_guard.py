"""Skip updates whose gradients are not finite, or stop at the first one."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from ...collectives import all_gather_object, get_rank
from ...registry import HOOKS
from ...wrappers import OptimWrapper
from ...wrappers.layout import get_parameters, local_part, reshard
from ...wrappers.unwrap import plain_name, user_model
from ..logs import are_finite
from ..skipping.spike_guard import StepGuard, group_by_rank
from ..state import LoopState
from .nan_guard import NonFiniteError

logger = logging.getLogger(__name__)


@HOOKS.register_module()
class GradGuardHook(StepGuard):
    """Skip an update if a gradient of any rank is NaN or infinite, or stop there.

    All ranks decide together before the update, also if each has a part of the gradients. After a
    skipped step, the run continues as if the batches of its accumulation window did not exist; see
    docs/hooks.md. The hook adds ``skipped_steps`` to the log records: the number of skipped steps
    since the last one, with those that a loss scaler skips. Each step costs a small collective and
    waits for the device.

    Args:
        action: "skip", or "stop" to raise NonFiniteError on every rank. In float16, an overflow
            with finite losses is left to the loss scaler, unless its scale is already 1 or less.
        max_in_row: the allowed number of steps in a row that this hook skips.
            One more raises NonFiniteError.

    Raises:
        ValueError: an argument is not allowed.
        TypeError: when training starts: there are several optimizers, one needs a closure, or
            another hook decides on updates.
    """

    def __init__(self, *, action: str = "skip", max_in_row: int = 10) -> None:
        if action not in ("skip", "stop"):
            raise ValueError(f"GradGuardHook: action must be skip or stop, got {action!r}")
        if max_in_row < 0:
            raise ValueError(f"GradGuardHook: max_in_row must be at least 0, got {max_in_row!r}")
        super().__init__(0 if action == "stop" else max_in_row)

    def state_dict(self) -> dict[str, int]:
        return {"count": self._count, "in_row": self._in_row}

    def load_state_dict(self, state: dict[str, int], /) -> None:
        self._count, self._in_row = state["count"], state["in_row"]

    def allows(self, optim_wrapper: OptimWrapper) -> bool:
        """Return whether all gradients of all ranks are finite; every rank must call this."""
        state, losses = self._state, self.take_losses()
        if not state.together:
            return True
        gradients = {id(p): _values(p) for p in get_parameters(optim_wrapper.optimizer)}
        values = [gradient for gradient in gradients.values() if gradient is not None]
        flags = [not all(are_finite(values)), not all(are_finite(losses))]
        device = values[0].device if values else None
        rows = group_by_rank(torch.tensor(flags, dtype=torch.float32, device=device))
        has_bad_gradient, has_bad_loss = (any(column) for column in zip(*rows, strict=True))
        if not has_bad_gradient:
            self._in_row = 0
            return True
        if not has_bad_loss and _can_lower_scale(optim_wrapper):
            # The loss scaler must see the overflow, and skips the update.
            state.skipped = True
            return True
        self._refuse(state, gradients)
        return False

    def _refuse(self, state: LoopState, gradients: dict[int, Tensor | None]) -> None:
        by_rank = enumerate(all_gather_object(_describe(state, gradients)))
        texts = (f"{text} on rank {rank}" for rank, text in by_rank if text)
        text = next(texts, "a gradient is not finite")
        self._in_row += 1
        if self._in_row > self._max_in_row:
            raise NonFiniteError(
                f"step {state.step + 1}: {text}; at most {self._max_in_row} updates in a row may "
                "be skipped (GradGuardHook: action, max_in_row); lower the learning rate, clip the "
                "gradients, or check the data of that step"
            )
        if get_rank() == 0:
            logger.warning("skipped step %d: %s", state.step + 1, text)
        self.skip()


def _values(parameter: Tensor) -> Tensor | None:
    """Return this rank's values of a gradient."""
    if parameter.grad is None:
        return None
    local = local_part(parameter.grad)
    return local._values() if local.is_sparse else local


def _describe(state: LoopState, gradients: dict[int, Tensor | None]) -> str:
    """Describe the first gradient of this rank that is not finite; "" if there is none."""
    model = user_model(state.model)
    reshard(model)
    for name, parameter in model.named_parameters():
        gradient = gradients.get(id(parameter))
        if gradient is not None and (bad := int((~gradient.isfinite()).sum())):
            count = f"{bad} of {gradient.numel()} values not finite"
            return f"the gradient of {plain_name(name)!r} has {count}"
    return ""


def _can_lower_scale(optim_wrapper: Any) -> bool:
    """Return whether a loss scale may be the reason for an overflow."""
    return optim_wrapper.scales_losses and bool(optim_wrapper.loss_scale > 1)
