"""Training runs under the fully sharded wrapper, and the same ones in plain PyTorch."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from step_models import batches
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stepwrap.wrappers import OptimWrapper, StepFullyShardedDataParallel, SupervisedModel

STEPS = 7
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


class Block(nn.Module):
    """A residual block with another one inside, where `inner` says so."""

    def __init__(self, inner: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.inner = Block() if inner else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.tanh(self.up(inputs)))
        return inputs + self.inner(hidden)


class Net(nn.Module):
    """Two blocks, of which the second has one inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(inner=True))
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.head(self.blocks(inputs))
        return scores


class Frozen(Net):
    """A part of it is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.head.bias.requires_grad_(False)


class Tied(Net):
    """Blocks that share a weight with each other, and one with the head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.lift = nn.Linear(3, 6)
        self.lift.weight = nn.Parameter(torch.empty(6, 3).uniform_(-0.5, 0.5))
        self.last = nn.Linear(3, 6, bias=False)
        self.last.weight = self.lift.weight

    def forward(self, inputs: Tensor) -> Tensor:
        scores = super().forward(inputs)
        return scores + self.last(scores)[:, :3] + self.lift(scores)[:, 3:]


class Small(nn.Module):
    """Parameters of which most ranks have nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 1), nn.Linear(1, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.second(self.first(inputs))
        return scores


class TwoDtypes(Net):
    """One layer is in fp64 in a network of another dtype."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.blocks(inputs)
        return self.head(hidden.double()).to(hidden.dtype)


class Normed(Net):
    """BatchNorm between the blocks and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norm(self.blocks(inputs)))
        return scores


def network(kind: str, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """Return the same network for the same seed."""
    torch.manual_seed(seed)
    net: nn.Module = {one.__name__: one for one in (Net, Frozen, Tied, Small, TwoDtypes, Normed)}[
        kind
    ]().to(dtype)
    if kind == "TwoDtypes":
        net.head.double()
    return net


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole parameters and buffers by name; every rank must call this."""
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone()
        for name, one in model.state_dict().items()
    }


def own_batches(rank: int, dtype: torch.dtype) -> list[list[Tensor]]:
    """Return the batches of one rank."""
    return batches(STEPS, dtype=dtype, seed=10 + rank)


def train(
    kind: str = "Net",
    dtype: torch.dtype = torch.float64,
    *,
    optimizer: str = "momentum",
    accumulate: int = 1,
    wrapper: type[StepFullyShardedDataParallel] = StepFullyShardedDataParallel,
    **options: Any,
) -> dict[str, Tensor]:
    """Train on this rank's batches and return the whole weights. Ranks start from other weights."""
    net = network(kind, dtype, seed=dist.get_rank())
    model = wrapper(SupervisedModel(net, nn.CrossEntropyLoss()), **options)
    optim = OptimWrapper(OPTIMIZERS[optimizer](model.parameters()), accumulative_counts=accumulate)
    # The last window is cut by the end of training.
    optim.initialize_count_status(nn.Module(), 0, STEPS)
    for batch in own_batches(dist.get_rank(), dtype):
        model.train_step(batch, optim)
    return whole(model.module.net)


def train_plainly(
    kind: str = "Net",
    dtype: torch.dtype = torch.float64,
    *,
    ranks: int,
    optimizer: str = "momentum",
    accumulate: int = 1,
) -> dict[str, Tensor]:
    """Return what plain PyTorch makes of the batches of all ranks together."""
    net = network(kind, dtype)
    optim = OPTIMIZERS[optimizer](net.parameters())
    by_rank = [own_batches(rank, dtype) for rank in range(ranks)]
    for start in range(0, STEPS, accumulate):
        window = [batch for data in by_rank for batch in data[start : start + accumulate]]
        inputs, target = (torch.cat(parts) for parts in zip(*window, strict=True))
        optim.zero_grad()
        nn.functional.cross_entropy(net(inputs), target).backward()
        optim.step()
    return whole(net)


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference between tensors of the same names."""
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)
