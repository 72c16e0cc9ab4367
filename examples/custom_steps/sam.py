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
        weights = [weight for weight in self.parameters() if weight.requires_grad]
        # Set aside the gradients of the window's earlier batches: backward would add to them.
        gathered = [None if weight.grad is None else weight.grad.clone() for weight in weights]
        for weight in weights:
            weight.grad = None
        # Pass the bare model, which has no no_sync: both backwards must average over the ranks.
        with optim_wrapper.optim_context(self.module):
            loss_before, _ = parse_losses(self(*data, mode="loss"))
        (
            loss_before * optim_wrapper.loss_scale
        ).backward()  # the scale does not change the direction
        climbed = [weight for weight in weights if weight.grad is not None]
        slopes = [weight.grad for weight in climbed if weight.grad is not None]
        with torch.no_grad():
            before = [weight.clone() for weight in climbed]
            norm = total_norm(slopes, like=climbed)
            for weight, slope in zip(climbed, slopes, strict=True):
                step = slope * (RHO / (norm + 1e-12))
                weight.add_(step.nan_to_num(0.0))  # no move where the scaled gradient overflowed
        for param, gradient in zip(weights, gathered, strict=True):
            param.grad = gradient
        with optim_wrapper.optim_context(self.module):
            second, logs = parse_losses(self(*data, mode="loss"))
        optim_wrapper.backward(optim_wrapper.scale_loss(second))
        with torch.no_grad():
            for param, value in zip(climbed, before, strict=True):
                param.copy_(value)
        if optim_wrapper.should_update():
            optim_wrapper.step()
            optim_wrapper.zero_grad()
        return {**logs, "sharpness": second.detach() - loss_before.detach()}
