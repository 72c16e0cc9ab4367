"""The size of the gradients."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...registry import HOOKS
from ...wrappers import total_norm
from ..hook import Hook, Scalars
from ..state import LoopState


@HOOKS.register_module()
class GradNormHook(Hook):
    """Adds `grad_norm`, the total L2 norm of the gradients, to the log records.

    It is taken right before each update, before clipping, and averaged over the
    updates of a log interval; with several optimizers it is `grad_norm/<name>`
    for each. Where the optimizer wrapper clips by norm, its figure is used, else
    the norm is computed here, that of the whole gradients where parameters are
    sharded. Updates that a loss scaler skips do not count.
    Nothing leaves the device before the record.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor | float] = {}
        self._handles: list[RemovableHandle] = []

    def on_train_start(self, state: LoopState) -> None:
        self._remove()
        wrapper: Any = state.optim_wrapper
        if isinstance(wrapper, Mapping) or hasattr(wrapper, "items"):
            members = {f"grad_norm/{name}": member for name, member in wrapper.items()}
        else:
            members = {"grad_norm": wrapper}
        # The gradients are gone when a hook of the loop is called: the update clears them.
        self._handles = [
            _stepping(member.optimizer).register_step_pre_hook(partial(self._measure, key, member))
            for key, member in members.items()
        ]

    def collect_logs(self, state: LoopState, scalars: Scalars) -> None:
        for key, total in self._sums.items():
            count = torch.as_tensor(self._counts[key], device=total.device)
            scalars[key] = total / count.clamp(min=1)

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        if state.recorded_at == state.step:
            self._sums.clear()
            self._counts.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the sums since the last log record."""
        return {"sums": dict(self._sums), "counts": dict(self._counts)}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go on from the sums of a checkpoint."""
        self._sums, self._counts = dict(state["sums"]), dict(state["counts"])

    def on_train_end(self, state: LoopState) -> None:
        self._remove()

    def on_exception(self, state: LoopState, error: BaseException) -> None:
        self._remove()

    @torch.no_grad()
    def _measure(
        self, key: str, wrapper: Any, optimizer: Optimizer, args: object, kwargs: object
    ) -> None:
        norm = getattr(wrapper, "grad_norm", None)
        if norm is None:
            norm = _norm(optimizer)
        count: Tensor | float = 1.0
        # A fused optimizer is called for updates that the loss scaler skips, and told so.
        overflow = getattr(optimizer, "found_inf", None)
        if overflow is not None:
            norm = torch.where(overflow == 0, norm, 0.0).squeeze()
            count = (overflow == 0).to(norm.dtype).squeeze()
        self._sums[key] = self._sums[key] + norm if key in self._sums else norm
        self._counts[key] = self._counts.get(key, 0.0) + count

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _stepping(optimizer: Any) -> Any:
    """What calls hooks: torch's optimizer for local SGD does not, but that inside it does."""
    return optimizer.optim if hasattr(optimizer, "averager") else optimizer


def _norm(optimizer: Optimizer) -> Tensor:
    every = (param for group in optimizer.param_groups for param in group["params"])
    params = [param for param in every if param.grad is not None]
    norm = total_norm([param.grad for param in params], like=params)
    # A fused optimizer gets the loss scaler's scale along with gradients that still bear it.
    scale = getattr(optimizer, "grad_scale", None)
    return norm if scale is None else norm / scale
