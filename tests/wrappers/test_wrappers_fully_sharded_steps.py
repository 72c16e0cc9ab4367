"""Unusual steps of a fully sharded model: several losses, errors, sums over shards."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_runs import CallsChild, network, own_batches, supervised, whole, whole_batches
from gan_models import Gan, gan_batches, optimizers
from on_ranks import assert_near, on_ranks, raises_with
from step_models import gather_ranks, sgd, train
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stepwrap.loops.checkpoints.weights import set_gradients
from stepwrap.wrappers import (
    OptimWrapper,
    SingleDevice,
    StepFullyShardedDataParallel,
    SupervisedModel,
)


def assert_equals_single(run: Callable[..., Any], bound: float = 1e-12, **options: Any) -> None:
    """Compare training on this rank's part with one process on the whole batch."""
    model = supervised(seed=dist.get_rank())
    sharded = StepFullyShardedDataParallel(model, **{"shard": ["Block"], **options})
    run(sharded, own_batches(dist.get_rank(), torch.float64))
    single = SingleDevice(supervised())
    run(single, whole_batches())
    assert_near(whole(model), dict(single.module.state_dict()), bound)


@pytest.mark.parametrize(
    ("how", "options", "bound"),
    [
        ("optimizer", {}, 1e-12),
        ("wrapper", {}, 1e-12),
        ("restore", {}, 1e-12),
        ("optimizer", {"mixed_precision": {"reduce_dtype": "float32"}}, 1e-5),
    ],
)
@on_ranks(2)
def test_gradients_of_a_window_can_be_dropped(
    how: str, options: dict[str, Any], bound: float
) -> None:
    def run(model: Any, data: list[Any]) -> None:
        optim = sgd(model, momentum=0.9)
        model.train_step(data[0], optim)
        with getattr(model, "no_sync", nullcontext)():
            model(*data[1], mode="loss")["loss"].backward()
        if how == "restore":
            set_gradients(model, {})
        else:
            {"optimizer": optim, "wrapper": model}[how].zero_grad()
        train(model, data[2:5], optim)

    assert_equals_single(run, bound, **options)


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise KeyError("this backward fails")


def _raise(*_: Any) -> None:
    raise KeyError("this forward fails")


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("shard", [None, ["Block"]])
@on_ranks(2)
def test_training_continues_after_an_error(where: str, plain: bool, shard: Any) -> None:
    """The model raises in the wrapper's step or in a plain loop."""

    def fail(model: Any, batch: Any, optim: OptimWrapper) -> None:
        if plain:
            model(*batch, mode="loss")["loss"].backward()
        else:
            model.train_step(batch, optim)

    def run(model: Any, data: list[Any]) -> None:
        optim = sgd(model, momentum=0.9)
        block = model.module.net.blocks[1]
        for at, batch in enumerate(data[:4]):
            if at == 2:
                hook = _raise if where == "forward" else lambda *args: _Failing.apply(args[2])
                handle = block.register_forward_hook(hook)
                with pytest.raises(KeyError, match="fails"):
                    fail(model, batch, optim)
                handle.remove()
                (optim.optimizer if plain else optim).zero_grad()
            model.train_step(batch, optim)

    assert_equals_single(run, shard=shard)


@on_ranks(2)
def test_an_optimizer_made_after_a_forward() -> None:
    model = StepFullyShardedDataParallel(supervised(), shard=["Block"])
    model(*own_batches(0, torch.float64)[0], mode="loss")
    assert all(isinstance(param, DTensor) for param in model.parameters())

    def run(model: Any, data: list[Any]) -> None:
        """Create the optimizer between a forward and its backward."""
        loss = model(*data[0], mode="loss")["loss"]
        if isinstance(model, StepFullyShardedDataParallel):
            with pytest.raises(ValueError, match="temporary unsharded view of fsdp"):
                sgd(model.module)
        optim = OptimWrapper(torch.optim.SGD(list(model.parameters()), lr=0.1))
        optim.update_params(loss)
        model.train_step(data[1], sgd(model))

    assert_equals_single(run)


class Decaying(StepFullyShardedDataParallel):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        with optim_wrapper.optim_context(self):
            losses = self(*self.module.data_preprocessor(data, True), mode="loss")
        decay = sum(param.square().sum().full_tensor() for param in self.parameters())
        loss = losses["loss"] + 0.01 * decay
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


class DecayingAlone(SingleDevice):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        losses = self(*self.module.data_preprocessor(data, True), mode="loss")
        decay = sum(param.square().sum() for param in self.parameters())
        optim_wrapper.update_params(losses["loss"] + 0.01 * decay)
        return {}


@on_ranks(2)
def test_a_sum_over_parameters_in_the_loss() -> None:
    options: dict[str, Any] = {"accumulative_counts": 3, "clip_grad": {"max_norm": 0.5}}
    single = DecayingAlone(supervised())
    train(single, whole_batches(), sgd(single, momentum=0.9, **options))
    for shard in (None, ["Block"]):
        model = Decaying(supervised(seed=dist.get_rank()), shard=shard)
        data = own_batches(dist.get_rank(), torch.float64)
        train(model, data, sgd(model, momentum=0.9, **options))
        assert_near(whole(model.module), dict(single.module.state_dict()), 1e-12)


class Mixing(StepFullyShardedDataParallel):
    """A step that adds a sum over shards without gathering it."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        losses = self(*data, mode="loss")
        loss = losses["loss"] + sum(param.square().sum() for param in self.module.parameters())
        optim_wrapper.update_params(loss)
        return {}


class Reaching(SupervisedModel):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        net: Any = self.net
        loss = self.loss(net.head(net.blocks(data[0])), data[1])
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


@on_ranks(2)
def test_errors_about_shards_name_a_remedy() -> None:
    mixing = Mixing(supervised(), shard=["Block"])
    (batch,) = own_batches(0, torch.float64)[:1]
    advice = "sum(one.square().sum().full_tensor() for one in self.parameters())"
    with raises_with(RuntimeError, advice):
        mixing.train_step(batch, sgd(mixing))
    bare = Reaching(network("Net", torch.float64), nn.MSELoss())
    reaching = StepFullyShardedDataParallel(bare)
    with raises_with(RuntimeError, "self(...)", "separate"):
        reaching.train_step(batch, sgd(reaching))


class StepsItself(CallsChild):
    """A model that evaluates with the weight of a layer that it does not call."""

    def val_step(self, data: Any) -> Any:
        head: Any = self.net.head
        return nn.functional.linear(self.net.blocks(data[0]), head.weight, head.bias)


@pytest.mark.parametrize("shard", [None, ["Block"], ["net"]])
@on_ranks(2)
def test_a_model_that_calls_its_child(shard: Any) -> None:
    def stepping(seed: int) -> StepsItself:
        return StepsItself(network("Net", torch.float64, seed), nn.CrossEntropyLoss())

    model: Any = StepFullyShardedDataParallel(stepping(dist.get_rank()), shard=shard)
    single: Any = SingleDevice(stepping(0))
    options: dict[str, Any] = {"accumulative_counts": 3, "clip_grad": {"max_norm": 0.1}}
    optims = [sgd(wrapper, **options) for wrapper in (model, single)]
    rank_batches = own_batches(dist.get_rank(), torch.float64)
    for batch, everything in zip(rank_batches, whole_batches(), strict=True):
        model.train_step(batch, optims[0])
        single.train_step(everything, optims[1])
        with torch.inference_mode():
            assert_near(model.val_step(batch), single.val_step(batch), 1e-12)
    assert_near(whole(model.module), dict(single.module.state_dict()), 1e-12)


@pytest.mark.parametrize(("accumulate", "freeze"), [(1, True), (3, True), (1, False)])
@on_ranks(2)
def test_a_model_with_two_optimizers(accumulate: int, freeze: bool) -> None:
    single = Gan(freeze=freeze)
    data = [gan_batches(6, rank) for rank in range(2)]
    train(single, gather_ranks(data), optimizers(single, accumulate))
    for options in ({}, {"shard": ["generator", "discriminator"]}, {"shard": "Linear"}):
        torch.manual_seed(dist.get_rank())
        model = Gan(freeze=freeze)
        wrapper = StepFullyShardedDataParallel(model, **options)
        optims = optimizers(model, accumulate)
        for batch in data[dist.get_rank()]:
            wrapper.train_step(batch, optims)
            with torch.no_grad():
                assert len(wrapper(*batch)) == 4
        assert_near(whole(model), dict(single.state_dict()), 1e-12)


@on_ranks(2)
def test_gradients_of_another_optimizer_do_not_enter_an_update() -> None:
    data = [gan_batches(6, rank) for rank in range(2)]
    single = Gan()
    train(single, gather_ranks(data), optimizers(single))
    model = Gan(freeze=False, clear=False)
    wrapper = StepFullyShardedDataParallel(model, shard=["generator", "discriminator"])
    optims = optimizers(model)
    for batch in data[dist.get_rank()]:
        wrapper.train_step(batch, optims)
    assert_near(whole(model), dict(single.state_dict()), 1e-12)
    optims = optimizers(model, 3)
    # FSDP adds them to the gradients of an unfinished window.
    with pytest.raises(RuntimeError, match="'discriminator'.* cannot be dropped"):
        wrapper.train_step(data[0][0], optims)


class GeneratorFirst(Gan):
    """A GAN whose discriminator is frozen at its first call."""

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


@on_ranks(2)
def test_a_child_that_is_frozen_at_first() -> None:
    single, model = GeneratorFirst(), GeneratorFirst()
    data = [gan_batches(4, rank) for rank in range(2)]
    train(single, gather_ranks(data), optimizers(single))
    wrapper = StepFullyShardedDataParallel(model)
    train(wrapper, data[dist.get_rank()], optimizers(model))
    assert_near(whole(model), dict(single.state_dict()), 1e-12)
