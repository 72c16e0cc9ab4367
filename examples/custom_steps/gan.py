"""A generator and a discriminator with an optimizer each (Goodfellow et al. 2014).

Run it: stepwrap train examples/custom_steps/gan.yaml
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from stepwrap.registry import MODEL_WRAPPERS, MODELS
from stepwrap.wrappers import BaseModel, OptimWrapperDict, SeparateDistributedDataParallel


@MODELS.register_module()
class DigitGan(BaseModel):
    """Makes images (batch, 1, 8, 8) from noise (batch, 16), and scores (batch, 1) of images."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 64))
        self.discriminator = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 1))

    def noise(self, images: Tensor) -> Tensor:
        return torch.randn(len(images), 16, device=images.device, dtype=images.dtype)

    def forward(self, images: Tensor, labels: Any = None, mode: str = "predict") -> Any:
        return list(self.generator(self.noise(images)).sigmoid().unflatten(1, (1, 8, 8)))


@MODEL_WRAPPERS.register_module()
class AdversarialSteps(SeparateDistributedDataParallel):
    """Updates the discriminator, then the generator; each child averages its gradients."""

    def train_step(self, data: Any, optim_wrapper: OptimWrapperDict) -> dict[str, Tensor]:
        model = self.module
        real = model.data_preprocessor(data, training=True)[0].flatten(1)
        optim_d, optim_g = optim_wrapper["discriminator"], optim_wrapper["generator"]
        with optim_d.optim_context(model.discriminator):
            with torch.no_grad():
                fake = model.generator(model.noise(real)).sigmoid()
            loss_d = softplus(model.discriminator(fake)).mean()
            loss_d = loss_d + softplus(-model.discriminator(real)).mean()
        optim_d.update_params(loss_d)
        model.discriminator.requires_grad_(False)  # the next backward only passes through it
        with optim_g.optim_context(model.generator):
            fake = model.generator(model.noise(real)).sigmoid()
            loss_g = softplus(-model.discriminator(fake)).mean()
        optim_g.update_params(loss_g)
        model.discriminator.requires_grad_(True)
        return {"loss_d": loss_d.detach(), "loss_g": loss_g.detach()}
