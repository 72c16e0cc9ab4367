"""Ranks that train with their own buffers, and the same training with plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from stepwrap.loops import EpochTrainLoop, MeanLoss, ValLoop
from stepwrap.runner import Runner
from stepwrap.wrappers import OptimWrapper, SupervisedModel, wrap_model

# Wrappers that do not copy buffers before each forward, with their options.
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("ddp", {"broadcast_buffers": False}),
    ("separate", {}),
    ("fsdp", {}),
]
EPOCHS = 3
LR = 0.2
OFF: dict[str, Any] = dict.fromkeys(("checkpoint", "progress", "log", "throughput", "run_info"))


class Centre(nn.Module):
    """Subtract a running mean, which differs between ranks and changes the gradients."""

    mean: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        return hidden - self.mean


def centred_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), Centre(6), nn.Tanh(), nn.Linear(6, 1)).double()


def make_batches(rank: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(10 + rank)
    options: Any = {"generator": generator, "dtype": torch.float64}
    return [[torch.randn(8, 4, **options) + rank, torch.randn(8, 1, **options)] for _ in range(3)]


def train_plainly() -> Tensor:
    """Return the weights after training one net per rank with averaged gradients."""
    nets = [centred_net() for _ in range(2)]
    for at in [0, 1, 2] * EPOCHS:
        gradients = []
        for rank, net in enumerate(nets):
            inputs, targets = make_batches(rank)[at]
            loss = mse_loss(net(inputs), targets)
            gradients.append(torch.autograd.grad(loss, list(net.parameters())))
        for net in nets:
            for param, *of_ranks in zip(net.parameters(), *gradients, strict=True):
                param.data -= LR * sum(of_ranks) / 2
    return torch.cat([param.detach().flatten() for param in nets[0].parameters()])


def make_runner(
    kind: str, options: dict[str, Any], *, validates: bool = False, **arguments: Any
) -> Runner:
    """Return a runner on this rank's batches; ``arguments`` are arguments of the runner."""
    batches = make_batches(dist.get_rank())
    wrapper = wrap_model(kind, SupervisedModel(centred_net(), nn.MSELoss()), **options)
    val_loop = ValLoop(batches, {"loss": MeanLoss()}, per_rank=True) if validates else None
    loop = EpochTrainLoop(batches, max_epochs=EPOCHS, per_rank=True, val_loop=val_loop)
    optim_wrapper = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=LR))
    hooks = {**OFF, **arguments.pop("hooks", {})}
    return Runner(wrapper, loop, optim_wrapper=optim_wrapper, hooks=hooks, **arguments)


def flat_weights(model: nn.Module) -> Tensor:
    whole_params = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([param.detach().flatten() for param in whole_params])
