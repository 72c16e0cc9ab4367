"""Sharpness-aware minimisation: two forwards and two backwards for each update (Foret et al. 2021).

Run it: stepwrap train examples/custom_steps/sam.yaml
"""

from typing import Any

import torch
from torch import Tensor

from stepwrap.registry import MODEL_WRAPPERS
from stepwrap.wrappers import OptimWrapper, StepDistributedDataParallel, parse_losses, total_norm

RHO = 0.05


@MODEL_WRAPPERS.register_module()
class SharpnessAwareDDP(StepDistributedDataParallel):
    """Takes the gradient at the point of highest loss within the distance RHO of the weights."""

    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        data = self.module.data_preprocessor(data, training=True)
        weights = [one for one in self.parameters() if one.requires_grad]
        # Set aside the gradients of the window's earlier batches: backward would add to them.
        gathered = [None if one.grad is None else one.grad.clone() for one in weights]
        for one in weights:
            one.grad = None
        # Pass the bare model, which has no no_sync: both backwards must average over the ranks.
        with optim_wrapper.optim_context(self.module):
            first, _ = parse_losses(self(*data, mode="loss"))
        (first * optim_wrapper.loss_scale).backward()  # the scale does not change the direction
        climbed = [one for one in weights if one.grad is not None]
        with torch.no_grad():
            before = [one.clone() for one in climbed]
            norm = total_norm([one.grad for one in climbed], like=climbed)
            for one in climbed:
                step = one.grad * (RHO / (norm + 1e-12))
                one.add_(step.nan_to_num(0.0))  # no move where the scaled gradient overflowed
        for one, gradient in zip(weights, gathered, strict=True):
            one.grad = gradient
        with optim_wrapper.optim_context(self.module):
            second, logs = parse_losses(self(*data, mode="loss"))
        optim_wrapper.backward(optim_wrapper.scale_loss(second))
        with torch.no_grad():
            for one, weight in zip(climbed, before, strict=True):
                one.copy_(weight)
        if optim_wrapper.should_update():
            optim_wrapper.step()
            optim_wrapper.zero_grad()
        return {**logs, "sharpness": second.detach() - first.detach()}
