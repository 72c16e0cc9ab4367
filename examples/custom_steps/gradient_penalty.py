"""A penalty on the gradient of the loss with respect to the pixels: a double backward.

Double backpropagation (Drucker and LeCun 1992). Run it:
stepwrap train examples/custom_steps/gradient_penalty.yaml
"""

from typing import Any

import torch
from torch import Tensor

from stepwrap.registry import MODEL_WRAPPERS
from stepwrap.wrappers import OptimWrapper, StepDistributedDataParallel, parse_losses

WEIGHT = 0.1


@MODEL_WRAPPERS.register_module()
class SmoothDDP(StepDistributedDataParallel):
    """Adds the mean over the samples of |d loss / d image|^2, times WEIGHT."""

    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        images, labels = self.module.data_preprocessor(data, training=True)
        images = images.detach().requires_grad_()
        with optim_wrapper.optim_context(self):
            loss = self.module.loss(self(images, mode="tensor"), labels)
        scale = optim_wrapper.loss_scale  # 1 except for float16, in which small slopes underflow
        # The gradient of the summed losses is, for each image, the gradient of its loss.
        (slope,) = torch.autograd.grad(loss * len(images) * scale, images, create_graph=True)
        penalty = (slope / scale).flatten(1).square().sum(1).mean()
        losses = {"loss_scores": loss, "loss_slope": WEIGHT * penalty}
        total, logs = parse_losses(losses)
        optim_wrapper.update_params(total)
        return logs
