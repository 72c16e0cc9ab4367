"""Steps of a fully sharded model that are not the usual one: several losses, failing, own sums."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_runs import largest_difference, network, own_batches, whole
from gan_models import Gan, gan_batches, optimizers
from ranks import run_ranks
from step_models import sgd
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stepwrap.loops.checkpoints.weights import set_gradients
from stepwrap.wrappers import (
    OptimWrapper,
    SingleDevice,
    StepFullyShardedDataParallel,
    SupervisedModel,
)

RANKS = 2
Build = Callable[..., nn.Module]


def supervised(seed: int = 0) -> SupervisedModel:
    return SupervisedModel(network("Net", torch.float64, seed), nn.CrossEntropyLoss())


def whole_batches(count: int) -> list[list[Tensor]]:
    """What all ranks see together."""
    by_rank = [own_batches(rank, torch.float64)[:count] for rank in range(RANKS)]
    return [
        [torch.cat(parts) for parts in zip(*pair, strict=True)]
        for pair in zip(*by_rank, strict=True)
    ]


def against_single(
    run: Callable[..., Any], build: Build = StepFullyShardedDataParallel, **options: Any
) -> float:
    """Run the same on this rank's part and on the whole in one process; how far they are apart."""
    sharded = build(supervised(dist.get_rank()), **{"shard": ["Block"], **options})
    run(sharded, own_batches(dist.get_rank(), torch.float64))
    single = SingleDevice(supervised())
    run(single, whole_batches(7))
    return largest_difference(whole(sharded.module), single.module.state_dict())


WAYS = ("optimizer", "wrapper", "restore")


def _dropping(how: str) -> Callable[[Any, Any], None]:
    def run(model: Any, data: list[Any]) -> None:
        optim = sgd(model, momentum=0.9)
        model.train_step(data[0], optim)
        with getattr(model, "no_sync", nullcontext)():
            model(*data[1], mode="loss")["loss"].backward()
        if how == "restore":
            set_gradients(model, {})
        else:
            {"optimizer": optim, "wrapper": model}[how].zero_grad()
        for batch in data[2:5]:
            model.train_step(batch, optim)

    return run


def _dropped() -> list[float]:
    same = [against_single(_dropping(how)) for how in WAYS]
    half = {"mixed_precision": {"reduce_dtype": "float32"}}
    return [*same, against_single(_dropping("optimizer"), **half)]


def test_zero_grad_drops_the_gradients_of_a_window() -> None:
    for *exact, half in run_ranks(_dropped, RANKS):
        assert max(exact) <= 1e-12
        assert half <= 1e-5


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise KeyError("this backward fails")


def _raise(*_: Any) -> None:
    raise KeyError("this forward fails")


def _plain_backward(model: Any, batch: Any) -> None:
    model(*batch, mode="loss")["loss"].backward()


def _failing(where: str, plain: bool) -> Callable[[Any, Any], None]:
    """Train on; one step raises inside the model, through the wrapper's step or without it."""

    def run(model: Any, data: list[Any]) -> None:
        optim = sgd(model, momentum=0.9)
        block = model.module.net.blocks[1]
        for at, batch in enumerate(data[:4]):
            if at == 2:
                hook = _raise if where == "forward" else lambda *args: _Failing.apply(args[2])
                handle = block.register_forward_hook(hook)
                with pytest.raises(KeyError, match="fails"):
                    _plain_backward(model, batch) if plain else model.train_step(batch, optim)
                handle.remove()
                optim.optimizer.zero_grad() if plain else optim.zero_grad()
            model.train_step(batch, optim)

    return run


def _after_errors() -> list[float]:
    return [
        against_single(_failing(where, plain), shard=shard)
        for where in ("forward", "backward")
        for plain in (True, False)
        for shard in (None, ["Block"])
    ]


def test_training_goes_on_after_an_error() -> None:
    for far in run_ranks(_after_errors, RANKS):
        assert max(far) <= 1e-12


def _late(model: Any, data: list[Any]) -> None:
    """Make the optimizer between a forward and its backward."""
    loss = model(*data[0], mode="loss")["loss"]
    if isinstance(model, StepFullyShardedDataParallel):
        with pytest.raises(ValueError, match="is a temporary unsharded view of fsdp"):
            sgd(model.module)
    optim = OptimWrapper(torch.optim.SGD(list(model.parameters()), lr=0.1))
    optim.update_params(loss)
    model.train_step(data[1], sgd(model))


def _late_optimizer() -> float:
    model = StepFullyShardedDataParallel(supervised(), shard=["Block"])
    model(*own_batches(0, torch.float64)[0], mode="loss")
    assert all(isinstance(one, DTensor) for one in model.parameters())
    return against_single(_late)


def test_an_optimizer_made_after_a_forward() -> None:
    assert max(run_ranks(_late_optimizer, RANKS)) <= 1e-12


class Decaying(StepFullyShardedDataParallel):
    """A step that adds a sum over parameters to its loss."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        with optim_wrapper.optim_context(self):
            losses = self(*self.module.data_preprocessor(data, True), mode="loss")
        decay = sum(one.square().sum().full_tensor() for one in self.parameters())
        loss = losses["loss"] + 0.01 * decay
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


class DecayingAlone(SingleDevice):
    """The same in one process."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        losses = self(*self.module.data_preprocessor(data, True), mode="loss")
        decay = sum(one.square().sum() for one in self.parameters())
        optim_wrapper.update_params(losses["loss"] + 0.01 * decay)
        return {}


def _decaying(kind: Any, data: list[Any], seed: int, **options: Any) -> Any:
    model = kind(supervised(seed), **options)
    optim = sgd(model, momentum=0.9, accumulative_counts=3, clip_grad={"max_norm": 0.5})
    for batch in data:
        model.train_step(batch, optim)
    return model.module


def _decayed() -> list[float]:
    data = own_batches(dist.get_rank(), torch.float64)
    expected = _decaying(DecayingAlone, whole_batches(7), 0).state_dict()
    models = [
        _decaying(Decaying, data, dist.get_rank(), shard=shard) for shard in (None, ["Block"])
    ]
    return [largest_difference(whole(model), expected) for model in models]


def test_a_sum_over_parameters_in_the_loss() -> None:
    for far in run_ranks(_decayed, RANKS):
        assert max(far) <= 1e-12


class Mixing(StepFullyShardedDataParallel):
    """Its sum is not made whole."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        losses = self(*data, mode="loss")
        loss = losses["loss"] + sum(one.square().sum() for one in self.module.parameters())
        optim_wrapper.update_params(loss)
        return {}


class Reaching(SupervisedModel):
    """Steps through a child of its child."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        net: Any = self.net
        loss = self.loss(net.head(net.blocks(data[0])), data[1])
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


def _told() -> list[str]:
    told = []
    for model in (
        Mixing(supervised(), shard=["Block"]),
        StepFullyShardedDataParallel(Reaching(network("Net", torch.float64), nn.MSELoss())),
    ):
        with pytest.raises(RuntimeError) as caught:
            model.train_step(own_batches(0, torch.float64)[0], sgd(model))
        told.append(str(caught.value))
    return told


def test_what_is_told_of_shards_in_wrong_places() -> None:
    for mixing, reaching in run_ranks(_told, RANKS):
        assert "sum(one.square().sum().full_tensor() for one in self.parameters())" in mixing
        assert "self(...)" in reaching
        assert "separate" in reaching


class StepsItself(SupervisedModel):
    """Calls its child, and evaluates with a weight that it does not call."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        with optim_wrapper.optim_context(self):
            loss = self.loss(self.net(data[0]), data[1])
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}

    def val_step(self, data: Any) -> Any:
        head: Any = self.net.head
        return nn.functional.linear(self.net.blocks(data[0]), head.weight, head.bias)


def _own_steps() -> list[float]:
    far = []
    for shard in (None, ["Block"], ["net"]):
        model: Any = StepFullyShardedDataParallel(
            StepsItself(network("Net", torch.float64, dist.get_rank()), nn.CrossEntropyLoss()),
            shard=shard,
        )
        single: Any = SingleDevice(
            StepsItself(network("Net", torch.float64), nn.CrossEntropyLoss())
        )
        optims = [
            sgd(one, accumulative_counts=3, clip_grad={"max_norm": 0.1}) for one in (model, single)
        ]
        own = own_batches(dist.get_rank(), torch.float64)
        for batch, everything in zip(own, whole_batches(7), strict=True):
            model.train_step(batch, optims[0])
            single.train_step(everything, optims[1])
            with torch.inference_mode():
                far.append((model.val_step(batch) - single.val_step(batch)).abs().max().item())
        far.append(largest_difference(whole(model.module), single.module.state_dict()))
    return far


def test_a_model_that_calls_its_child() -> None:
    for far in run_ranks(_own_steps, RANKS):
        assert max(far) <= 1e-12


def _trained_gan(accumulate: int, freeze: bool, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank())
    model = Gan(freeze=freeze)
    wrapper = StepFullyShardedDataParallel(model, **options)
    optims = optimizers(model, accumulate)
    for batch in gan_batches(6, dist.get_rank()):
        wrapper.train_step(batch, optims)
        with torch.no_grad():
            assert len(wrapper(*batch)) == 4
    return whole(model)


def _gans() -> list[float]:
    far = []
    for accumulate in (1, 3):
        for freeze in (True, False):
            single = Gan(freeze=freeze)
            optims = optimizers(single, accumulate)
            for pair in zip(*(gan_batches(6, rank) for rank in range(RANKS)), strict=True):
                batch = tuple(torch.cat(parts) for parts in zip(*pair, strict=True))
                single.train_step(batch, optims)
            for options in ({}, {"shard": ["generator", "discriminator"]}, {"shard": "Linear"}):
                weights = _trained_gan(accumulate, freeze, **options)
                far.append(largest_difference(weights, single.state_dict()))
    return far


@pytest.mark.slow
def test_a_model_with_two_optimizers() -> None:
    for far in run_ranks(_gans, RANKS):
        assert max(far) <= 1e-12


class GeneratorFirst(Gan):
    """Its discriminator is frozen when it is called for the first time."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        real, noise = data
        self.discriminator.requires_grad_(False)
        fooled = -self.discriminator(self.generator(noise)).mean()
        optim_wrapper["generator"].update_params(fooled)
        self.discriminator.requires_grad_(True)
        fake = self.generator(noise).detach()
        loss = self.discriminator(fake).mean() - self.discriminator(real).tanh().mean()
        optim_wrapper["discriminator"].update_params(loss)
        return {"loss": loss.detach()}


def _generator_first() -> float:
    single, model = GeneratorFirst(), GeneratorFirst()
    wrapper = StepFullyShardedDataParallel(model)
    optims = optimizers(single), optimizers(model)
    for pair in zip(*(gan_batches(4, rank) for rank in range(RANKS)), strict=True):
        single.train_step([torch.cat(parts) for parts in zip(*pair, strict=True)], optims[0])
        wrapper.train_step(pair[dist.get_rank()], optims[1])
    return largest_difference(whole(model), single.state_dict())


def test_a_child_that_is_frozen_at_first() -> None:
    assert max(run_ranks(_generator_first, RANKS)) <= 1e-12
