"""Dropout in a model that is split over a tensor group: different masks for different parts."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import slow
from on_ranks import gathered, on_ranks
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stepwrap.wrappers import (
    Preparation,
    StepDistributedDataParallel,
    StepFullyShardedDataParallel,
    SupervisedModel,
    build_mesh,
    parallelize,
    wrap_model,
)

PLAN: dict[str, Any] = {"qkv": "colwise", "out": "rowwise", "up": "colwise", "down": "rowwise"}
DTENSORS = {**PLAN, "up": {"type": "colwise", "local_output": False}}
SEQUENCE = {
    "qkv": {"type": "colwise", "input": "shard(1)"},
    "out": {"type": "rowwise", "output": "shard(1)"},
    "norm": {"type": "sequence", "local_output": True},
    "up": {"type": "colwise", "input": "shard(1)"},
    "down": {"type": "rowwise", "output": "shard(1)"},
}
PARTS = ("heads", "hidden", "noise")


def _mask(like: Tensor, rate: float = 0.5) -> Tensor:
    return functional.dropout(torch.ones_like(like), rate)


class Block(nn.Module):
    """Attention and a small network that keep the masks of all their dropouts, by name."""

    def __init__(self, heads: int = 6) -> None:
        super().__init__()
        self.width = 2 * heads
        self.qkv = nn.Linear(self.width, 3 * self.width)
        self.out, self.down = (nn.Linear(size * self.width, self.width) for size in (1, 2))
        self.up, self.norm = nn.Linear(self.width, 2 * self.width), nn.LayerNorm(self.width)
        self.dropout = nn.Dropout(0.5)
        self.masks: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, 3, 2))
        query, key, value = heads.permute(3, 0, 2, 1, 4)
        identity = torch.eye(value.shape[2]).expand(*value.shape[:2], -1, -1)
        arguments = (query, key, identity, None, 0.5)
        self.masks["heads"] = functional.scaled_dot_product_attention(*arguments) > 0
        mixed = functional.scaled_dot_product_attention(query, key, value)
        mixed = self.out(mixed.transpose(1, 2).flatten(2))
        self.masks["residual"] = self.dropout(torch.ones_like(mixed))
        self.masks["sample"] = mixed.new_empty((len(mixed), 1, 1)).bernoulli_()
        hidden = torch.tanh(self.up(mixed))
        self.masks["hidden"] = _mask(hidden)
        self.masks["noise"] = torch.rand_like(hidden)
        x = x + self.down(hidden * self.masks["hidden"])
        return x + self.down(hidden) * _mask(x)


def _local(tensor: Any) -> Tensor:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return torch.tensor(local.tolist())


@pytest.mark.parametrize(
    ("plan", "ranks", "split"),
    [
        (PLAN, 3, PARTS),
        (DTENSORS, 2, PARTS),
        (SEQUENCE, 2, (*PARTS, "residual")),
        *slow((SEQUENCE, 3, (*PARTS, "residual"))),
    ],
)
@on_ranks("ranks")
def test_parts_have_their_own_masks(plan: Any, ranks: int, split: tuple[str, ...]) -> None:
    torch.manual_seed(3)
    block = parallelize(Block(), build_mesh({"tensor": ranks}), plan)
    inputs = torch.randn(8, 6, 12)
    sequence = plan is SEQUENCE
    block(inputs.chunk(ranks, 1)[dist.get_rank()] if sequence else inputs)
    masks = {name: _local(mask) for name, mask in block.masks.items()}
    by_rank = gathered(masks)
    for masks in by_rank[1:]:
        differing = {name for name in masks if not torch.equal(masks[name], by_rank[0][name])}
        assert differing == set(split)
    states = gathered(torch.get_rng_state())
    assert all(torch.equal(states[0], state) for state in states)


@on_ranks(2)
def test_variance_of_a_sum_over_parts() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 32), nn.Dropout(0.5), nn.Linear(32, 1, bias=False))
    for parameter, value in zip(net.parameters(), (0.0, 1.0, 1 / 32), strict=True):
        nn.init.constant_(parameter, value)
    parallelize(net, build_mesh({"tensor": 2}), {"0": "colwise", "2": "rowwise"})
    # The mean of 32 independent values that are 0 or 2. With equal masks it would be 2 / 32.
    assert net(torch.zeros(20_000, 1)).var().item() == pytest.approx(1 / 32, rel=0.05)


@on_ranks(2)
def test_evaluation_draws_nothing() -> None:
    block = parallelize(Block(), build_mesh({"tensor": 2}), PLAN).eval()
    hidden = block.up(torch.ones(2, 3, 12))
    before = torch.get_rng_state()
    functional.dropout(hidden, 0.5, training=False)
    functional.dropout(hidden, 0.0)
    functional.scaled_dot_product_attention(hidden, hidden, hidden)
    assert torch.equal(torch.get_rng_state(), before)


class Net(nn.Module):
    """Two layers that are split, with dropout on the block's input and between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(torch.tanh(self.up(functional.dropout(x, 0.3)))))


class Blocks(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Net() for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.reentrant else block(x)
        return x


# A plan in which whole blocks work on parts of the sequence.
BLOCKS_PLAN = {
    "net.first": {"type": "rowwise", "input": "replicate", "output": "shard(1)"},
    "net.blocks.*.up": {"type": "colwise", "input": "shard(1)"},
    "net.blocks.0.down": {"type": "rowwise", "output": "shard(1)"},
    "net.blocks.1.down": {"type": "rowwise", "output": "shard(1)"},
}


def _gradients(wrapper: Any, mesh: Any, again: str = "") -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = SupervisedModel(Blocks(again == "reentrant"), nn.MSELoss()).double()
    prepare = Preparation(
        tensor_parallel=BLOCKS_PLAN,
        activation_checkpointing=["Net"] if again == "blocks" else None,
    )
    options = {"shard": ["Net"]} if wrapper is StepFullyShardedDataParallel else {}
    wrapped = wrap_model(wrapper, model, mesh=mesh, prepare=prepare, **options)
    # The ranks of a tensor group draw the same, and the groups draw differently.
    torch.manual_seed(mesh.data_rank)
    inputs = torch.arange(48, dtype=torch.float64).reshape(2, 4, 6) / 48
    target = torch.zeros(2, 2, 6, dtype=torch.float64)
    wrapped(inputs, target, mode="loss")["loss"].backward()
    named = wrapped.module.named_parameters()
    return {name: getattr(p.grad, "to_local", lambda p=p: p.grad)() for name, p in named}


@pytest.mark.parametrize(
    ("wrapper", "ranks"),
    [
        (None, 2),
        *slow((StepDistributedDataParallel, 4), (StepFullyShardedDataParallel, 4)),
    ],
)
@on_ranks("ranks")
def test_checkpointed_blocks_draw_the_same_again(wrapper: Any, ranks: int) -> None:
    mesh = build_mesh({"data": ranks // 2, "tensor": 2})
    once = _gradients(wrapper, mesh)
    ways = ["blocks"] if wrapper is StepFullyShardedDataParallel else ["blocks", "reentrant"]
    for again in ways:
        torch.testing.assert_close(_gradients(wrapper, mesh, again), once, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("wrapper", "options"),
    [
        (StepFullyShardedDataParallel, {}),
        *slow((StepDistributedDataParallel, {"find_unused_parameters": True})),
    ],
)
@on_ranks(4)
def test_groups_with_other_batches(wrapper: Any, options: dict[str, Any]) -> None:
    mesh = build_mesh({"data": 2, "tensor": 2})
    torch.manual_seed(0)
    model = SupervisedModel(Block(8), nn.MSELoss())
    plan = {f"net.{name}": style for name, style in DTENSORS.items()}
    prepare = Preparation(tensor_parallel=plan)
    wrapped = wrap_model(wrapper, model, mesh=mesh, prepare=prepare, **options)
    torch.manual_seed(mesh.data_rank)
    inputs = torch.randn(8, 6, 16)
    wrapped(inputs, inputs, mode="loss")["loss"].backward()
    masks = gathered({name: _local(mask) for name, mask in model.net.masks.items()})
    pairs = [(i, j) for i in range(4) for j in range(i)]
    for name in masks[0]:
        same = [(i, j) for i, j in pairs if torch.equal(masks[i][name], masks[j][name])]
        assert same == ([] if name in PARTS else [(1, 0), (3, 2)])


@on_ranks(2)
def test_compiled_blocks_with_dropout_are_refused() -> None:
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    prepare = Preparation(tensor_parallel=plan, compile={"blocks": ["Net"], "backend": "eager"})
    with pytest.raises(ValueError, match=r"blocks\.0\.dropout.*same mask.*rate to 0"):
        wrap_model(None, Blocks(False), mesh=build_mesh({"tensor": 2}), prepare=prepare)
