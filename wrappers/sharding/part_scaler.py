"""A gradient scaler for ranks that hold only parts of the gradients.

Not part of ``optimizers/amp.py``, because its base class loads 600 modules of torch, which most
runs with mixed precision do not need.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from ..layout import get_parameters, local_part


class PartScaler(ShardedGradScaler):
    """A ``ShardedGradScaler`` that also supports parameters on several meshes.

    Every rank of ``process_group`` (default: all ranks) must call ``unscale_``, in which the ranks
    exchange whether any of them has infinite gradients.
    """

    def __init__(
        self, *args: Any, process_group: ProcessGroup | None = None, **options: Any
    ) -> None:
        # Always passed, because torch's default is the group that existed when it was imported.
        super().__init__(*args, process_group=process_group, **options)  # type: ignore[misc]

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        # Passes local parts, because torch's kernel takes all gradients at once and needs them on
        # one mesh.
        by_device: dict[torch.device, list[Any]] = {}
        for parameter in get_parameters(optimizer):
            if parameter.grad is not None:
                grad = local_part(parameter.grad)
                by_device.setdefault(grad.device, []).append(SimpleNamespace(grad=grad))
        overflows: dict[torch.device, Tensor] = {}
        for device, grads in by_device.items() or [(inv_scale.device, [])]:
            local: Any = SimpleNamespace(param_groups=[{"params": grads}])
            # torch would copy the scale to the host without waiting for the copy, and read it.
            scale, overflow = inv_scale.to(device), found_inf.to(device)
            overflows |= super()._unscale_grads_(local, scale, overflow, allow_fp16)
        return overflows

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale the gradients; find infinite values in the gradients of all ranks."""
        super().unscale_(optimizer)
        if self.is_enabled():
            # Fused steps combine this tensor with DTensors, so it must have no dimensions, and skip
            # the update only if it is 1. Torch gives the number of ranks with infinite gradients.
            optimizer_state = self._per_optimizer_states[id(optimizer)]
            for device, overflow in optimizer_state["found_inf_per_device"].items():
                optimizer_state["found_inf_per_device"][device] = overflow.squeeze().clamp(max=1)
