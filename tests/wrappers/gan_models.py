"""A model with two optimizers for the tests of separate children."""

from typing import Any

import torch
from torch import Tensor, nn

from stepwrap.wrappers import BaseModel, OptimWrapper, OptimWrapperDict

WIDTH = 5


class Gan(BaseModel):
    """Train a generator and a discriminator in turn; one layer is frozen, one has no parameters."""

    def __init__(
        self, dtype: torch.dtype = torch.float64, freeze: bool = True, clear: bool = True
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, WIDTH)).to(dtype)
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)).to(
            dtype
        )
        self.features = nn.Linear(WIDTH, WIDTH).to(dtype).requires_grad_(False)
        self.activation = nn.ReLU()
        self.freeze = freeze
        self.clear = clear

    def forward(self, real: Tensor, noise: Tensor, mode: str = "predict") -> Any:
        return list(self.generator(noise))

    def train_step(self, data: Any, optim_wrapper: OptimWrapperDict) -> dict[str, Tensor]:
        real, noise = data
        optims = optim_wrapper
        with optims["discriminator"].optim_context(self.discriminator):
            fake = self.generator(noise).detach()
            judged = self.discriminator(self.features(fake)).mean()
            loss = judged - self.discriminator(self.features(real)).tanh().mean()
        optims["discriminator"].update_params(loss)
        if self.freeze:
            self.discriminator.requires_grad_(False)
        with optims["generator"].optim_context(self.generator):
            fooled = -self.discriminator(self.features(self.generator(noise))).mean()
        optims["generator"].update_params(fooled)
        self.discriminator.requires_grad_(True)
        if self.clear and not self.freeze:
            optims["discriminator"].zero_grad()
        return {"loss_d": loss.detach(), "loss_g": fooled.detach()}


def optimizers(model: Gan, accumulate: int = 1) -> OptimWrapperDict:
    """Return Adam for the generator, SGD for the discriminator."""
    return OptimWrapperDict(
        generator=OptimWrapper(torch.optim.Adam(model.generator.parameters(), lr=0.01), accumulate),
        discriminator=OptimWrapper(
            torch.optim.SGD(model.discriminator.parameters(), lr=0.1, momentum=0.9),
            accumulate,
            clip_grad={"max_norm": 0.3},
        ),
    )


def gan_batches(
    count: int, rank: int, size: int = 4, dtype: torch.dtype = torch.float64
) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of rank `rank`: real samples and noise."""
    generator = torch.Generator().manual_seed(7 + rank)
    return [
        (
            torch.randn(size, WIDTH, generator=generator, dtype=torch.float64).to(dtype) + 1,
            torch.randn(size, 3, generator=generator, dtype=torch.float64).to(dtype),
        )
        for _ in range(count)
    ]
