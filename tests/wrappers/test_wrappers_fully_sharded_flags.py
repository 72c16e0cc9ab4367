"""Parameters of a fully sharded model that are frozen and unfrozen in training."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_runs import Block, network, own_batches, whole, whole_batches
from marks import slow
from on_ranks import assert_near, on_ranks
from step_models import sgd, train
from torch import Tensor, nn

from stepwrap.wrappers import (
    BaseModel,
    OptimWrapperDict,
    SingleDevice,
    StepFullyShardedDataParallel,
    SupervisedModel,
)


class Changing(SupervisedModel):
    """A model whose forward calls `first(net, at)` before the layers and `last(net, at)` after."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(network("Net", dtype), nn.CrossEntropyLoss())
        self.at, self.first, self.last = 0, _leave, _leave

    def forward(self, *inputs: Any, mode: str = "tensor", **kwargs: Any) -> Any:
        if mode == "loss":
            self.first(self.net, self.at)
        result = super().forward(*inputs, mode=mode, **kwargs)
        if mode == "loss":
            self.last(self.net, self.at)
        return result


def _leave(net: Any, at: int) -> None:
    """Change nothing."""


def _unfreeze(net: Any, at: int) -> None:
    """Train the head, then also a block, then all layers."""
    net.head.requires_grad_(True)
    net.blocks[1].requires_grad_(at >= 2)
    net.blocks[0].requires_grad_(at >= 4)


def _swap(net: Any, at: int) -> None:
    """Train one part and then another, also within an accumulation window."""
    if at in (1, 3):
        net.head.requires_grad_(at == 3)
        net.blocks[0].requires_grad_(at == 1)
    if at == 5:
        net.head.bias.requires_grad_(False)
        net.blocks[1].inner.requires_grad_(False)


def _trained(model: Any, data: list[Any], change: Any, where: str, accumulate: int) -> Any:
    bare = model.module
    optim = sgd(model, momentum=0.9, accumulative_counts=accumulate)
    if where in ("first", "last"):
        setattr(bare, where, change)
    for at, batch in enumerate(data[:6]):
        bare.at = at
        if where == "gathered":
            # After a forward without a backward the rest of the model stays gathered.
            model(batch[0], mode="tensor")
        if where in ("steps", "gathered"):
            change(bare.net, at)
        if where == "shards":
            for param, (_, flag) in zip(
                optim.optimizer.param_groups[0]["params"], _flags(change, at), strict=True
            ):
                model(batch[0], mode="tensor")
                param.requires_grad_(flag)
        model.train_step(batch, optim)
    return bare


def _flags(change: Any, at: int) -> list[tuple[str, bool]]:
    net = network("Net", torch.float64)
    for round_ in range(at + 1):
        change(net, round_)
    return [(name, param.requires_grad) for name, param in net.named_parameters()]


@pytest.mark.parametrize("where", ["steps", *slow("shards", "gathered", "first", "last")])
@pytest.mark.parametrize("change", [_unfreeze, _swap])
@on_ranks(2)
def test_parameters_may_be_frozen_and_thawed(change: Any, where: str) -> None:
    data = own_batches(dist.get_rank(), torch.float64)
    for accumulate in (1, 3):
        single = _trained(SingleDevice(Changing()), whole_batches(), change, where, accumulate)
        for options in ({}, {"shard": "Block"}, {"shard": "Block", "reshard_after_forward": False}):
            model = StepFullyShardedDataParallel(Changing(), **options)
            sharded = _trained(model, data, change, where, accumulate)
            assert_near(whole(sharded), dict(single.state_dict()), 1e-12)


@on_ranks(2)
def test_a_block_that_was_frozen_at_first_is_reduced_in_its_dtype() -> None:
    """Train in mixed precision; a block is frozen before or after the first forward."""
    data = own_batches(dist.get_rank(), torch.float32)
    policy = {"param_dtype": "bfloat16", "reduce_dtype": "float32", "output_dtype": "float32"}
    results = []
    for frozen in (True, False):
        bare = Changing(torch.float32)
        bare.net.blocks[0].requires_grad_(not frozen)
        model = StepFullyShardedDataParallel(bare, shard="Block", mixed_precision=policy)
        with torch.no_grad():
            model(data[0][0], mode="tensor")
        results.append(whole(_trained(model, data, _unfreeze, "steps", 1)))
    assert_near(*results, 0)


class Toggling(SupervisedModel):
    """A model that trains its children in turn and freezes the other one."""

    def train_step(self, data: Any, optim_wrapper: OptimWrapperDict) -> dict[str, Tensor]:
        net: Any = self.net
        for name in optim_wrapper:
            for other, member in optim_wrapper.items():
                for param in member.optimizer.param_groups[0]["params"]:
                    param.requires_grad_(other == name)
            loss = self.loss(net(data[0]) if name == "net" else self.out(net(data[0])), data[1])
            optim_wrapper[name].update_params(loss)
        return {"loss": loss.detach()}


@on_ranks(2)
def test_children_that_take_turns() -> None:
    """While only the last child is trained, no backward reaches the first, which stays gathered."""
    states = []
    for kind, data in (
        (SingleDevice, whole_batches()),
        (StepFullyShardedDataParallel, own_batches(dist.get_rank(), torch.float64)),
    ):
        bare = Toggling(network("Net", torch.float64), nn.CrossEntropyLoss())
        bare.out = nn.Linear(3, 3).double()
        bare.out.load_state_dict({"weight": torch.eye(3), "bias": torch.arange(3.0)})
        model: Any = kind(bare)
        train(model, data, OptimWrapperDict(out=sgd(bare.out), net=sgd(bare.net)))
        states.append(whole(bare))
    assert_near(*states, 1e-12)


class Nested(BaseModel):
    """A model whose loss calls the model itself, in one of several ways, and may fail."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.fails = way, False
        self.body, self.head = Block(), nn.Linear(6, 3)
        self.double()

    def forward(self, inputs: Tensor, target: Tensor | None = None, mode: str = "tensor") -> Any:
        if mode != "loss":
            scores = self.head(self.body(inputs))
            if mode == "raise":
                raise KeyboardInterrupt if self.way == "interrupt" else KeyError(mode)
            return scores
        if self.way == "caught":
            with pytest.raises(KeyError):
                self(inputs, mode="raise")
        if self.fails:
            self(inputs, mode="raise")
        loss = nn.functional.cross_entropy(self(inputs), target)
        if self.way == "twice":
            loss = loss + self(2 * inputs).square().mean()
        if self.way == "sum":
            loss = loss + 0.1 * self.head.weight.square().sum() + self._sum()
        return {"loss": loss}

    def _sum(self) -> Any:
        params = dict(self.named_parameters())
        return 0.1 * params["head.bias"].square().sum()


def _train_nested(model: Any, data: list[Any]) -> Any:
    optim = sgd(model, momentum=0.9, accumulative_counts=3)
    optim.initialize_count_status(nn.Module(), 0, 6)
    for at, batch in enumerate(data[:6]):
        if at == 3 and model.module.way in ("error", "interrupt"):
            _fail(model, batch, optim)
        model.train_step(batch, optim)
        if at == 1:
            with torch.no_grad():
                model(*batch, mode="loss")
    return model.module


def _fail(model: Any, batch: Any, optim: Any) -> None:
    """Fail in inner forwards (in a step, outside, in an evaluation), then in a backward."""
    model.module.fails = True
    for run in (
        lambda: model.train_step(batch, optim),
        lambda: model(*batch, mode="loss"),
        lambda: torch.no_grad()(model)(*batch, mode="loss"),
    ):
        with pytest.raises((KeyError, KeyboardInterrupt)):
            run()
        model.zero_grad()
    model.module.fails = False
    handle = model.module.body.register_forward_hook(_break_backward)
    with pytest.raises(KeyError, match="fails"):
        model.train_step(batch, optim)
    handle.remove()
    model.zero_grad()


def _break_backward(body: nn.Module, inputs: Any, output: Tensor) -> None:
    output.register_hook(_raise_in_backward)


def _raise_in_backward(gradient: Tensor) -> None:
    raise KeyError("this backward fails")


# Warnings that torch's own tracing raises.
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("way", ["error", *slow("once", "twice", "sum", "caught", "interrupt")])
@pytest.mark.parametrize("compiled", [False, *slow(True)])
@on_ranks(2)
def test_gradients_of_a_window_are_kept(way: str, compiled: bool) -> None:
    if way == "sum" and compiled:
        return
    single = _train_nested(SingleDevice(Nested(way)), whole_batches())
    for shard in ("Block",) if compiled else (None, "Block"):
        bare = Nested(way)
        model = StepFullyShardedDataParallel(bare, shard=shard)
        if compiled:
            bare.compile(backend="eager")
        sharded = _train_nested(model, own_batches(dist.get_rank(), torch.float64))
        assert_near(whole(sharded), dict(single.state_dict()), 1e-12)
