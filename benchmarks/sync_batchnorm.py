"""The cost of synchronised BatchNorm in forward and backward, in milliseconds and as ratios.

A small CNN with three BatchNorm layers, and one such layer alone, over two ranks and over two
replicas in one process: without synchronisation, with stepwrap's layers in fp32 and in fp64, and
with a straightforward layer that sums twice in each direction (the sum, then the squared
deviations). The order is shuffled in every round; ratios are taken within a round. Gradients are
not exchanged between the ranks, because that costs the same for all.

With --device cuda the replicas share one device, and a single rank (NCCL) compares torch's
SyncBatchNorm with stepwrap's and the straightforward layer.

    python benchmarks/sync_batchnorm.py [--device cpu] [--rounds 30] [--batch 64]
"""

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from report import Report, parse_options
from torch import Tensor, nn
from turns import process_group, spawn, take_turns

from stepwrap.wrappers import ReplicationCallbackDataParallel, convert_sync_batchnorm

Contestant = Callable[[], object]
COPIES = 2
CHANNELS = 32
PEERS = ("two sums each way", "torch SyncBatchNorm")


class SumOverRanks(torch.autograd.Function):
    """Sums a tensor over the ranks, and its gradient as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


def sum_of_copies(copies: list[Tensor]) -> list[Tensor]:
    return [torch.stack(copies).sum(0)] * len(copies)


class TwoSums(nn.BatchNorm2d):
    """BatchNorm with two differentiable sums: of the values, then of the squared deviations."""

    meet: Any = None

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        self.meet = partial(ctx.session.rendezvous, ctx.layer, copy_id)

    def forward(self, x: Tensor) -> Tensor:
        count = x.new_tensor([x.numel() / x.size(1)])
        total = self._sum(torch.cat([x.sum((0, 2, 3)), count]))
        mean, count = total[:-1] / total[-1], total[-1].detach()
        deviation = x - mean[:, None, None]
        var = self._sum(deviation.square().sum((0, 2, 3))) / count
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)
        scale = self.weight * torch.rsqrt(var + self.eps)
        return deviation * scale[:, None, None] + self.bias[:, None, None]

    def _sum(self, value: Tensor) -> Tensor:
        return self.meet(value, sum_of_copies) if self.meet else SumOverRanks.apply(value)


def make_cnn(norm: type[nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False),
        norm(CHANNELS),
        nn.ReLU(),
        nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, stride=2, padding=1, bias=False),
        norm(2 * CHANNELS),
        nn.ReLU(),
        nn.Conv2d(2 * CHANNELS, 2 * CHANNELS, 3, stride=2, padding=1, bias=False),
        norm(2 * CHANNELS),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * CHANNELS, 10),
    )


def make_step(model: nn.Module, shape: tuple[int, ...], device: str) -> Contestant:
    """Return a step of forward and backward with a random gradient; a sum's would be zero."""
    x = torch.randn(shape, device=device, requires_grad=len(shape) == 4 and shape[1] == CHANNELS)
    cotangent = torch.randn_like(model(x))

    def step() -> None:
        model(x).backward(cotangent)
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def make_contestants(subject: str, arguments: Any, *, replicas: bool) -> dict[str, Contestant]:
    device = arguments.device
    on_one_rank = device == "cuda" and not replicas
    size = arguments.batch if replicas or on_one_rank else arguments.batch // COPIES
    shape = (size, CHANNELS if subject == "layer" else 3, 32, 32)

    def make(norm: type[nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        return (norm(CHANNELS) if subject == "layer" else make_cnn(norm)).to(device)

    models = {
        "not synchronised": make(nn.BatchNorm2d),
        "stepwrap": convert_sync_batchnorm(make(nn.BatchNorm2d)),
        "stepwrap, fp64": convert_sync_batchnorm(make(nn.BatchNorm2d), precision="fp64"),
        "two sums each way": make(TwoSums),
    }
    if on_one_rank:
        models["torch SyncBatchNorm"] = make(nn.SyncBatchNorm)
    if replicas:
        models = {
            name: ReplicationCallbackDataParallel(model, [device] * COPIES)
            for name, model in models.items()
        }
        models["no replicas"] = make(nn.BatchNorm2d)
    return {name: make_step(model, shape, device) for name, model in models.items()}


def measure(contestants: Mapping[str, Contestant], rounds: int) -> dict[str, list[float]]:
    """Return each contestant's milliseconds by round."""

    def milliseconds(step: Contestant) -> float:
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        for _ in range(3):
            step()
        return (time.perf_counter() - start) / 3 * 1e3

    runs = {name: partial(milliseconds, step) for name, step in contestants.items()}
    return take_turns(runs, rounds, warm_up=1)


def run_rank(rank: int, store: str, ranks: int, arguments: argparse.Namespace) -> None:
    with process_group(rank, ranks, store, "nccl" if arguments.device == "cuda" else "gloo"):
        for subject in ("CNN", "layer"):
            times = measure(make_contestants(subject, arguments, replicas=False), arguments.rounds)
            if rank == 0:
                title = f"{subject}, {ranks} rank{'s' if ranks > 1 else ''}"
                Report(arguments.json).add(title, "ms", times, "not synchronised", summary=PEERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64)
    arguments = parse_options(parser, {"rounds": 5})
    torch.set_num_threads(1)
    for subject in ("CNN", "layer"):
        times = measure(make_contestants(subject, arguments, replicas=True), arguments.rounds)
        title = f"{subject}, {COPIES} replicas on {arguments.device}"
        Report(arguments.json).add(title, "ms", times, "not synchronised", summary=PEERS)
    ranks = 1 if arguments.device == "cuda" else COPIES
    spawn(run_rank, ranks, ranks, arguments)


if __name__ == "__main__":
    main()
