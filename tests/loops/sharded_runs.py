"""Runs of a small model under every kind of parallelism, for tests of checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from marks import slow
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stepwrap.loops import EMAHook, LoopState
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
from stepwrap.wrappers.layout import as_dtensor, get_layout

# The kind of parallelism and the number of ranks.
CASES = [
    *(("ddp", 2), ("fsdp", 2), ("tensor", 2), ("fsdp x tensor", 4)),
    *slow(("fsdp", 4), ("hsdp", 4), ("ddp x tensor", 4)),
]
_PLAN = {"net.0": "colwise", "net.2": "rowwise"}
WIDTH = 512


def make_net(seed: int = 0) -> nn.Sequential:
    """Return a net: layers of the plan (0, 2), others, and one that cannot be split evenly."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5), nn.LayerNorm(5), nn.Linear(5, 3)
    )


def make_run(kind: str, *, seed: int = 0, run_dir: Path | None = None, **optim: Any) -> LoopState:
    """Return a run with AdamW and an averaging hook; every rank must call this."""
    model = SupervisedModel(make_net(seed), nn.CrossEntropyLoss())
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    axes: dict[str, int] = {"data": ranks}
    if kind == "hsdp":
        axes = {"replicate": 2, "shard": ranks // 2}
    elif "tensor" in kind:
        axes = {"data": ranks // 2, "tensor": 2}
    wrapper: Any = StepDistributedDataParallel if "ddp" in kind else SingleDevice
    wrapper = StepFullyShardedDataParallel if kind[:4] in ("fsdp", "hsdp") else wrapper
    options: dict[str, Any] = {"shard": ["net.4"]} if kind[:4] in ("fsdp", "hsdp") else {}
    if ranks > 1:
        options["mesh"] = build_mesh(axes)
    if "tensor" in kind:
        options["prepare"] = Preparation(tensor_parallel=_PLAN)
    wrapped = wrap_model(wrapper, model, **options)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    state = LoopState(wrapped, OptimWrapper(optimizer, **optim), run_dir)
    state.stateful["hooks.ema"] = EMAHook(decay=0.5)
    return state


def batch(state: LoopState, index: int) -> list[Tensor]:
    """Return this rank's share of the batch `index` of 8 samples."""
    generator = torch.Generator().manual_seed(index)
    inputs = torch.randn(8, 4, generator=generator)
    target = torch.randint(3, (8,), generator=generator)
    size, rank = 1, 0
    if dist.is_initialized():
        group = state.model.data_group
        size, rank = dist.get_world_size(group), dist.get_rank(group)
    return [inputs.chunk(size)[rank], target.chunk(size)[rank]]


def train(state: LoopState, indices: Iterable[int]) -> None:
    """Train on batches as the loops do, with the averaging hook."""
    ema: Any = state.stateful["hooks.ema"]
    ema.on_train_start(state)
    for index in indices:
        if state.updated_at is None:
            state.updated_at = (state.epoch, state.batch, state.iteration)
        state.model.train_step(batch(state, index), state.optim_wrapper)
        state.batch += 1
        state.iteration += 1
        if state.optim_wrapper.should_update():
            state.step += 1
            state.updated_at = (state.epoch, state.batch, state.iteration)
            ema.on_update(state)


def contents(state: LoopState) -> dict[str, Tensor]:
    """Return whole weights, averages and optimizer state; every rank must call this."""
    tensors = {f"model.{k}": v for k, v in get_weights(state.model.module).items()}
    average = state.stateful["hooks.ema"].state_dict()["model"]
    tensors |= {f"ema.{k}": v for k, v in average.items()}
    for key, values in state.optim_wrapper.state_dict()["state"].items():
        tensors |= {f"optim.{key}.{name}": value for name, value in values.items()}
    wholes = {}
    for name, value in tensors.items():
        value = value.full_tensor() if isinstance(value, DTensor) else value
        wholes[name] = value.detach().clone()
    return wholes


def gradients(state: LoopState) -> list[Tensor | None]:
    """Return whole gradients; every rank must call this."""
    grads: list[Tensor | None] = []
    for param in state.model.parameters():
        grad = param.grad
        if grad is None:
            grads.append(None)
            continue
        if not isinstance(grad, DTensor):
            grad = as_dtensor(grad, get_layout(param))
        grads.append((grad.full_tensor() if isinstance(grad, DTensor) else grad).clone())
    return grads


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Return whether both have the same names and bit-identical tensors."""
    return actual.keys() == expected.keys() and all(
        torch.equal(actual[n], expected[n]) for n in actual
    )
