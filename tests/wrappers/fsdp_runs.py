"""Training runs under the fully sharded wrapper and in plain PyTorch."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from step_models import batches, gather_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stepwrap.wrappers import OptimWrapper, StepFullyShardedDataParallel, SupervisedModel

STEPS = 7
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


class Block(nn.Module):
    """A residual block, with another one inside if `inner` is set."""

    def __init__(self, inner: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.inner = Block() if inner else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.tanh(self.up(inputs)))
        return inputs + self.inner(hidden)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(inner=True))
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.blocks(inputs))


class Frozen(Net):
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


class Small(nn.Sequential):
    """A net with parameters so small that most ranks have empty parts."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 1), nn.Linear(1, 3))


class TwoDtypes(Net):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.blocks(inputs)
        return self.head(hidden.double()).to(hidden.dtype)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(inputs)))


class CallsChild(SupervisedModel):
    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        with optim_wrapper.optim_context(self):
            loss = self.loss(self.net(data[0]), data[1])
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


NETWORKS = (Net, Frozen, Tied, Small, TwoDtypes, Normed)


def network(kind: str, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """Return the same network for the same seed."""
    torch.manual_seed(seed)
    net = {net_class.__name__: net_class for net_class in NETWORKS}[kind]().to(dtype)
    if kind == "TwoDtypes":
        net.head.double()
    return net


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole parameters and buffers by name; every rank must call this."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in model.state_dict().items()
    }


def own_batches(rank: int, dtype: torch.dtype) -> list[list[Tensor]]:
    return batches(STEPS, dtype=dtype, seed=10 + rank)


def whole_batches(ranks: int = 2, dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    """Return the combined batches of all ranks."""
    return gather_ranks([own_batches(rank, dtype) for rank in range(ranks)])


def supervised(
    kind: str = "Net", dtype: torch.dtype = torch.float64, seed: int = 0
) -> SupervisedModel:
    return SupervisedModel(network(kind, dtype, seed), nn.CrossEntropyLoss())


def train(
    kind: str = "Net",
    dtype: torch.dtype = torch.float64,
    *,
    optimizer: str = "momentum",
    accumulate: int = 1,
    wrapper: type[StepFullyShardedDataParallel] = StepFullyShardedDataParallel,
    **options: Any,
) -> dict[str, Tensor]:
    """Train on this rank's batches from other initial weights per rank; return whole weights."""
    model = wrapper(supervised(kind, dtype, dist.get_rank()), **options)
    optim = OptimWrapper(OPTIMIZERS[optimizer](model.parameters()), accumulative_counts=accumulate)
    # The end of training cuts the last window short.
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
    """Return the weights after training on the batches of all ranks in plain PyTorch."""
    net = network(kind, dtype)
    optim = OPTIMIZERS[optimizer](net.parameters())
    by_rank = [own_batches(rank, dtype) for rank in range(ranks)]
    for inputs, target in gather_ranks(by_rank, accumulate):
        optim.zero_grad()
        nn.functional.cross_entropy(net(inputs), target).backward()
        optim.step()
    return whole(net)


def largest_difference(actual: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference between tensors of the same names."""
    assert actual.keys() == other.keys()
    return max((actual[name] - other[name]).abs().max().item() for name in actual)
