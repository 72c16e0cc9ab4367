"""The loss scale where each rank sees only parts of the gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from .layout import local_part


class PartScaler(ShardedGradScaler):
    """torch's ``ShardedGradScaler``, for parameters of several meshes as well.

    Every rank must call ``unscale_``: there they tell each other of infinities.
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        # torch's kernel takes all gradients at once, and fails when their meshes differ.
        parts = [
            SimpleNamespace(grad=local_part(parameter.grad))
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        local: Any = SimpleNamespace(param_groups=[{"params": parts}])
        return super()._unscale_grads_(local, inv_scale, found_inf, allow_fp16)
