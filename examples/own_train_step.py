"""A custom optimization step: mixup, as a wrapper that a config names.

Run it: stepwrap train examples/own_train_step.yaml
"""

import torch
from torch import Tensor

from stepwrap.registry import MODEL_WRAPPERS
from stepwrap.wrappers import OptimWrapper, StepDistributedDataParallel, parse_losses


@MODEL_WRAPPERS.register_module()
class MixupDDP(StepDistributedDataParallel):
    """Trains on convex mixtures of two samples (Zhang et al. 2018, mixup)."""

    alpha = 0.2

    def train_step(
        self, data: tuple[Tensor, Tensor], optim_wrapper: OptimWrapper
    ) -> dict[str, Tensor]:
        images, labels = self.module.data_preprocessor(data, training=True)
        share = torch.distributions.Beta(self.alpha, self.alpha).sample().item()
        order = torch.randperm(len(images), device=images.device)
        mixed = share * images + (1 - share) * images[order]
        with optim_wrapper.optim_context(self):
            scores = self(mixed, mode="tensor")
            loss = self.module.loss
            losses = {
                "loss_first": share * loss(scores, labels),
                "loss_second": (1 - share) * loss(scores, labels[order]),
            }
        total, logs = parse_losses(losses)
        optim_wrapper.update_params(total)
        return logs
