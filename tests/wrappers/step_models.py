"""Models for the tests of the wrappers."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from stepwrap.wrappers import BaseModel, OptimWrapper, SupervisedModel


def mlp(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Return a small network whose weights depend only on the seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def classifier(dtype: torch.dtype = torch.float32, seed: int = 0) -> SupervisedModel:
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
    return OptimWrapper(torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum), **kwargs)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(model: Any, data: list[Any], optim: Any = None) -> None:
    """Call ``train_step`` with each batch, with plain SGD by default."""
    optim = sgd(model) if optim is None else optim
    for batch in data:
        model.train_step(batch, optim)


def train_plainly(
    net: nn.Module, data: list[Any], *, momentum: float = 0.0, max_norm: float | None = None
) -> list[float]:
    """Train a network in plain PyTorch with cross-entropy and SGD; return the losses."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum)
    losses = []
    for inputs, target in data:
        loss = nn.functional.cross_entropy(net(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def joined(outputs: Iterable[Any]) -> list[Tensor]:
    """Return one batch with the rows of all parts."""
    return [torch.cat(entries) for entries in zip(*outputs, strict=True)]


def gather_ranks(by_rank: list[list[Any]], window: int = 1) -> list[list[Tensor]]:
    """Return the combined batch of all ranks for every window of micro-batches."""
    return [
        joined(batch for data in by_rank for batch in data[start : start + window])
        for start in range(0, len(by_rank[0]), window)
    ]


class PlainModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, inputs: Tensor, target: Tensor | None = None, mode: str = "tensor") -> Any:
        scores = self.net(inputs)
        if mode == "loss":
            return {"loss": nn.functional.cross_entropy(scores, target)}
        return list(scores) if mode == "predict" else scores


class HalfUsed(BaseModel):
    """A model with a layer `spare` that the loss never reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 1)
        self.spare = nn.Linear(6, 1)

    def forward(self, inputs: Tensor, target: Tensor | None = None, mode: str = "loss") -> Any:
        return {"loss": self.used(inputs).pow(2).mean()}


class OwnStep(PlainModel):
    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        loss = self(*data, mode="loss")["loss"] * 2
        optim_wrapper.update_params(loss)
        return {"doubled": loss.detach()}
