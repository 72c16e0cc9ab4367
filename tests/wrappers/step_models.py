"""Models that the tests of the wrappers train."""

from typing import Any

import torch
from torch import Tensor, nn

from stepwrap.wrappers import BaseModel, OptimWrapper, SupervisedModel


def mlp(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Return the same small network for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def classifier(dtype: torch.dtype = torch.float32, seed: int = 0) -> SupervisedModel:
    """Return `mlp` with a cross-entropy loss."""
    return SupervisedModel(mlp(dtype, seed), nn.CrossEntropyLoss())


def batches(
    count: int, size: int = 4, dtype: torch.dtype = torch.float32, seed: int = 1
) -> list[list[Tensor]]:
    """Return `count` batches of inputs `(size, 6)` and classes `(size,)`."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            torch.randn(size, 6, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(3, (size,), generator=generator),
        ]
        for _ in range(count)
    ]


def sgd(model: nn.Module, lr: float = 0.1, momentum: float = 0.0, **kwargs: Any) -> OptimWrapper:
    """Return an optimizer wrapper around plain SGD."""
    return OptimWrapper(torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum), **kwargs)


def flat(model: nn.Module) -> Tensor:
    """Return all parameters as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


class PlainModel(nn.Module):
    """A model with nothing but `forward(..., mode=)`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, inputs: Tensor, target: Tensor | None = None, mode: str = "tensor") -> Any:
        scores = self.net(inputs)
        if mode == "loss":
            return {"loss": nn.functional.cross_entropy(scores, target)}
        return list(scores) if mode == "predict" else scores


class HalfUsed(BaseModel):
    """`spare` is a layer that the loss never reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 1)
        self.spare = nn.Linear(6, 1)

    def forward(self, inputs: Tensor, target: Tensor | None = None, mode: str = "loss") -> Any:
        return {"loss": self.used(inputs).pow(2).mean()}


class OwnStep(PlainModel):
    """A model that brings its own training step."""

    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        loss = self(*data, mode="loss")["loss"] * 2
        optim_wrapper.update_params(loss)
        return {"doubled": loss.detach()}
