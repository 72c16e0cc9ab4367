"""Runs that resume with another number of ranks, and plain PyTorch on the same samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

from stepwrap.loops import (
    EpochTrainLoop,
    Hook,
    HookList,
    IterTrainLoop,
    LoopState,
    ShardedBatchSampler,
    build_loader,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from stepwrap.loops.checkpoints.weights import get_weights
from stepwrap.wrappers import (
    OptimWrapper,
    Preparation,
    SingleDevice,
    StepDistributedDataParallel,
    StepFullyShardedDataParallel,
    SupervisedModel,
    build_mesh,
    wrap_model,
)

EPOCHS = 2
# Replicas and shards, by number of ranks.
_HSDP = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2)}


def make_data(samples: int) -> TensorDataset:
    """Return inputs (samples, 4), targets (samples,) and the samples' numbers."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    target = torch.randint(0, 3, (samples,), generator=generator)
    return TensorDataset(inputs, target, torch.arange(samples))


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3)).double()


def make_optimizer(net: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=0.05)


def wrapped(kind: str, model: nn.Module) -> Any:
    """Wrap the model by `kind` for the current number of ranks."""
    ranks, device_type = dist.get_world_size(), next(model.parameters()).device.type
    if kind == "ddp":
        return StepDistributedDataParallel(model)
    if kind == "tensor":
        # At most two ranks share the data.
        tensor = ranks if ranks < 4 else 2
        mesh = build_mesh({"data": ranks // tensor, "tensor": tensor}, device_type)
        plan = Preparation(tensor_parallel={"net.0": "colwise", "net.2": "rowwise"})
        outer = StepDistributedDataParallel if ranks > tensor else SingleDevice
        return wrap_model(outer, model, mesh=mesh, prepare=plan)
    axes = {"data": ranks}
    if kind == "hsdp":
        axes = dict(zip(("replicate", "shard"), _HSDP[ranks], strict=True))
    mesh = build_mesh(axes, device_type)
    return wrap_model(StepFullyShardedDataParallel, model, mesh=mesh, shard=["net.0"])


class Follow(Hook):
    """Record the samples of each update whose batch counts; stop after an update."""

    def __init__(self, stop: int | None) -> None:
        self.stop = stop
        self.seen: list[tuple[int, list[int]]] = []
        self.record: dict[str, float] = {}

    def on_batch_start(self, state: LoopState, batch: Any) -> None:
        if getattr(state.optim_wrapper, "batch_counts", True):
            self.seen.append((state.step, batch[2].tolist()))

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        self.record = record

    def on_update(self, state: LoopState) -> None:
        if state.step == self.stop:
            state.request_stop("to resume with another number of ranks")


def train(
    kind: str,
    folder: Path,
    stop: int | None,
    *,
    samples: int,
    batch_size: int,
    accumulate: int,
    by_steps: int | None = None,
    device: str = "cpu",
    **optim: Any,
) -> dict[str, Any]:
    """Resume from the latest checkpoint, train until update `stop` and save, on every rank."""
    model = wrapped(kind, SupervisedModel(make_net(), nn.CrossEntropyLoss()).to(device))
    wrapper = OptimWrapper(make_optimizer(model), accumulate, **optim)
    state, follow = LoopState(model, wrapper), Follow(stop)
    group = model.data_group
    shard = dist.get_rank(group), dist.get_world_size(group)
    loader = build_loader(
        make_data(samples), batch_size=batch_size, train=True, shuffle=True, seed=7, shard=shard
    )
    loop: Any = EpochTrainLoop(loader, max_epochs=EPOCHS, log_every_steps=1000)
    if by_steps is not None:
        loop = IterTrainLoop(loader, max_steps=by_steps, log_every_steps=1000)
    path = find_checkpoint(folder)
    if path is not None:
        load_checkpoint(path).restore(state)
    loop.run(state, HookList([follow]))
    if stop is not None:
        save_checkpoint(folder, state)
    weights = {n: _whole(w).cpu() for n, w in get_weights(model.module).items()}
    counters = (state.epoch, state.batch, state.iteration, state.step, state.max_steps)
    counts = (wrapper.inner_count, wrapper.max_counts)
    return {
        "seen": follow.seen,
        "weights": weights,
        "counters": counters,
        "counts": counts,
        "record": follow.record,
        # Ranks of a tensor group see the same samples.
        "shard": shard[0],
    }


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def updates(samples: int, size: int) -> Iterator[list[int]]:
    """Yield the samples of every update, in the global order."""
    order = ShardedBatchSampler(samples, 1, shuffle=True, seed=7)
    for epoch in range(EPOCHS):
        order.set_position(epoch)
        epoch_samples = [index for batch in order for index in batch]
        for start in range(0, samples, size):
            yield epoch_samples[start : start + size]


def plain(samples: int, size: int) -> tuple[dict[str, Tensor], float]:
    """Return the weights that plain PyTorch gets from whole batches, and the mean loss."""
    net, data, losses = make_net(), make_data(samples), []
    optimizer = make_optimizer(net)
    for indices in updates(samples, size):
        inputs, target, _ = data[indices]
        loss = nn.functional.cross_entropy(net(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), len(indices)))
    mean = sum(loss * n for loss, n in losses) / sum(n for _, n in losses)
    return {f"net.{name}": w.detach() for name, w in net.state_dict().items()}, mean
