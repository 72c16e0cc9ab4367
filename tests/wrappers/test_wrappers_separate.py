"""A model whose children are averaged separately, in several processes."""

import copy
import pickle
import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gan_models import Gan, gan_batches, optimizers
from marks import slow
from on_ranks import assert_near, on_ranks, raises_with, same_on_ranks
from sharded_models import whole
from step_models import batches, classifier, flat, gather_ranks, mlp, sgd, train, train_plainly
from torch import Tensor, nn

from stepwrap.wrappers import (
    BaseModel,
    Preparation,
    SeparateDistributedDataParallel,
    SingleDevice,
    StepDistributedDataParallel,
    SupervisedModel,
    build_mesh,
    is_model_wrapper,
    is_module_wrapper,
    wrap_model,
)

STEPS = 6


def gan_alone(accumulate: int) -> Tensor:
    """Train on both ranks' batches in one process with plain optimizers."""
    model = Gan()
    adam = torch.optim.Adam(model.generator.parameters(), lr=0.01)
    descent = torch.optim.SGD(model.discriminator.parameters(), lr=0.1, momentum=0.9)
    by_rank = [gan_batches(STEPS, rank) for rank in range(2)]
    for index, (real, noise) in enumerate(gather_ranks(by_rank)):
        fake = model.generator(noise).detach()
        judged = model.discriminator(model.features(fake)).mean()
        loss = judged - model.discriminator(model.features(real)).tanh().mean()
        (loss / accumulate).backward()
        is_end = (index + 1) % accumulate == 0
        if is_end:
            nn.utils.clip_grad_norm_(model.discriminator.parameters(), 0.3)
            descent.step()
            descent.zero_grad()
        model.discriminator.requires_grad_(False)
        fooled = -model.discriminator(model.features(model.generator(noise))).mean()
        (fooled / accumulate).backward()
        model.discriminator.requires_grad_(True)
        if is_end:
            adam.step()
            adam.zero_grad()
    return flat(model)


@pytest.mark.parametrize(
    ("freeze", "accumulate", "options"),
    [
        (True, 1, {}),
        (True, 3, {}),
        (False, 1, {}),
        (False, 3, {"gradient_as_bucket_view": True}),
        *slow((False, 3, {})),
        (True, 1, {"find_unused_parameters": True, "broadcast_buffers": True}),
        (True, 1, {"gradient_as_bucket_view": True, "comm_hook": "allreduce"}),
    ],
)
@on_ranks(2)
def test_two_optimizers_equal_one_process(
    freeze: bool, accumulate: int, options: dict[str, Any]
) -> None:
    model = Gan(freeze=freeze, clear=False)
    if dist.get_rank():
        # All ranks start with rank 0's weights.
        for parameter in model.parameters():
            parameter.data.add_(1.0 if parameter.requires_grad else 0.0)
    wrapper = SeparateDistributedDataParallel(model, **options)
    optims = optimizers(model, accumulate)
    optims.initialize_count_status(wrapper, 0, STEPS)
    for batch in gan_batches(STEPS, dist.get_rank()):
        assert set(wrapper.train_step(batch, optims)) == {"loss_d", "loss_g"}
    assert_near(flat(wrapper), gan_alone(accumulate), 1e-12)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_of_another_optimizer_do_not_enter_an_update(
    accumulate: int, caplog: pytest.LogCaptureFixture
) -> None:
    wrapper = SingleDevice(Gan(freeze=False, clear=False))
    optims = optimizers(wrapper.module, accumulate)
    optims.initialize_count_status(wrapper, 0, STEPS)
    for batch in gather_ranks([gan_batches(STEPS, rank) for rank in range(2)]):
        wrapper.train_step(batch, optims)
    assert_near(flat(wrapper), gan_alone(accumulate), 1e-12)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 1
    assert re.search(r"'generator' .*reaches .*'discriminator' \(0\.weight, 0\.bias", texts[0])


def test_a_backward_of_ones_own_adds_to_the_next_window() -> None:
    """A penalty that the training step adds before ``update_params`` is kept."""
    weights = []
    for apart in (True, False):
        model = Gan()
        optims = optimizers(model)
        judge, maker = optims["discriminator"], optims["generator"]
        for real, noise in gan_batches(STEPS, 0):
            with judge.optim_context(model.discriminator):
                loss = model.discriminator(real).mean()
                penalty = model.discriminator(real).square().mean()
            if apart:
                penalty.backward()
            judge.update_params(loss if apart else loss + penalty)
            model.discriminator.requires_grad_(False)
            with maker.optim_context(model.generator):
                fooled = -model.discriminator(model.generator(noise)).mean()
            maker.update_params(fooled)
            model.discriminator.requires_grad_(True)
        weights.append(flat(model))
    assert_near(*weights, 1e-12)


def test_two_optimizers_may_share_a_backward() -> None:
    weights = []
    for plain in (True, False):
        model = Gan()
        optims = optimizers(model)
        adam, descent = (optims[name].optimizer for name in ("generator", "discriminator"))
        for _, noise in gan_batches(STEPS, 0):
            with (
                optims["generator"].optim_context(model),
                optims["discriminator"].optim_context(model),
            ):
                loss = model.discriminator(model.generator(noise)).square().mean()
            if plain:
                loss.backward()
                adam.step()
                nn.utils.clip_grad_norm_(model.discriminator.parameters(), 0.3)
                descent.step()
                model.zero_grad()
                continue
            optims["generator"].backward(loss)
            for member in optims.values():
                member.step()
            optims.zero_grad()
        weights.append(flat(model))
    assert torch.equal(*weights)


@on_ranks(2)
def test_a_model_without_a_training_step() -> None:
    by_rank = [batches(4, dtype=torch.float64, seed=rank) for rank in range(2)]
    wrapper = SeparateDistributedDataParallel(classifier(torch.float64, seed=dist.get_rank()))
    rank_batches = by_rank[dist.get_rank()]
    train(wrapper, rank_batches, sgd(wrapper, momentum=0.9, accumulative_counts=2))
    assert set(wrapper.val_step(rank_batches[-1])) == {"preds", "target", "loss", "num_samples"}
    net = mlp(torch.float64)
    train_plainly(net, gather_ranks(by_rank, 2), momentum=0.9)
    assert_near(flat(wrapper), flat(net), 1e-12)


@dataclass
class Logits(OrderedDict[str, Any]):
    """An output without a loss."""

    logits: Tensor


class Untargeted(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, mode: str = "tensor") -> Any:
        return Logits(self.net(x))


class OwnStep(Untargeted):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        return super().train_step(data, optim_wrapper)


@pytest.mark.parametrize("kind", [Untargeted, OwnStep])
@on_ranks(2)
def test_a_batch_without_targets_is_described(kind: Any) -> None:
    wrapper = SeparateDistributedDataParallel(kind())
    with raises_with(ValueError, "Logits has no loss", "The batch has the keys x"):
        wrapper.train_step({"x": torch.ones(4, 6)}, sgd(wrapper))


@on_ranks(2)
def test_names_and_kinds_of_children() -> None:
    model = Gan()
    names = list(model.state_dict())
    parameters = [name for name, _ in model.named_parameters()]
    weights = copy.deepcopy(model.state_dict())
    wrapper = SeparateDistributedDataParallel(model)
    children = dict(model.named_children())
    averaged = [
        n for n, child in children.items() if isinstance(child, StepDistributedDataParallel)
    ]
    assert averaged == ["generator", "discriminator"]
    assert {"data_preprocessor", "features", "activation"} < set(children)
    assert wrapper.module is model
    assert is_model_wrapper(wrapper)
    assert is_module_wrapper(wrapper)
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_parameters()] == parameters
    assert list(wrapper.state_dict()) == [f"module.{name}" for name in names]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert model.load_state_dict(weights) == ([], [])
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    wrapper.load_state_dict(wrapper.state_dict())
    del weights["generator.0.bias"]
    weights["discriminator.9.bias"] = torch.zeros(1)
    misfits = model.load_state_dict(weights, strict=False)
    assert misfits == (["generator.0.bias"], ["discriminator.9.bias"])


@on_ranks(2)
def test_no_sync() -> None:
    model = Gan()
    wrapper = SeparateDistributedDataParallel(model)

    def flags() -> list[bool]:
        children = (model.generator, model.discriminator)
        return [child.require_backward_grad_sync for child in children]

    on, off = [True, True], [False, False]
    assert flags() == on
    with wrapper.no_sync():
        with wrapper.no_sync():
            assert flags() == off
        assert flags() == off
    assert flags() == on
    with pytest.raises(KeyError), wrapper.no_sync():
        raise KeyError("inside")
    assert flags() == on


@on_ranks(2)
def test_copies_train() -> None:
    wrapper = SeparateDistributedDataParallel(Gan())
    data = gan_batches(1, dist.get_rank())
    before = flat(wrapper)
    for again in (copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper))):
        train(again, data, optimizers(again.module))
        assert same_on_ranks(flat(again))
        assert not torch.equal(flat(again), before)
        assert list(again.module.state_dict()) == list(wrapper.module.state_dict())
        again.module.load_state_dict(wrapper.module.state_dict())
    wrapper(*data[0])


class Direct(SupervisedModel):
    def __init__(self) -> None:
        super().__init__(mlp(), nn.CrossEntropyLoss())
        self.scale = nn.Parameter(torch.ones(()))


class Mixed(nn.Module):
    """A model whose second child cannot be wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.LazyLinear(2)


@on_ranks(2)
def test_refusals_leave_the_model_alone() -> None:
    texts = (
        "scale belongs to Direct itself",
        "put it into a child module, freeze it, or use StepDistributed",
    )
    with raises_with(ValueError, *texts):
        SeparateDistributedDataParallel(Direct())
    with pytest.raises(ValueError, match="nothing to average"):
        SeparateDistributedDataParallel(classifier().requires_grad_(False))
    listed = SupervisedModel(nn.ModuleList([nn.Linear(2, 2)]), nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match=r"SupervisedModel.net is a ModuleList"):
        SeparateDistributedDataParallel(listed)
    mixed = Mixed()
    with pytest.raises(RuntimeError, match="uninitialized"):
        SeparateDistributedDataParallel(mixed)
    assert type(mixed.first) is nn.Linear
    with pytest.raises(TypeError, match="did you mean find_unused_parameters"):
        SeparateDistributedDataParallel(classifier(), find_unused=True)
    with pytest.raises(TypeError, match="detect_anomalous_params"):
        SeparateDistributedDataParallel(classifier(), detect_anomalous_params=True)


class Versioned(nn.Linear):
    """A layer that adds one to weights of its first version when loading."""

    _version = 2

    def _load_from_state_dict(
        self, state: Any, prefix: str, metadata: Any, *load_args: Any
    ) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}bias"] = state[f"{prefix}bias"] + 1
        super()._load_from_state_dict(state, prefix, metadata, *load_args)


@on_ranks(2)
def test_versions_of_modules_are_kept() -> None:
    model = SupervisedModel(nn.Sequential(Versioned(6, 3)), nn.CrossEntropyLoss())
    model.net.module = Versioned(6, 3)
    plain = copy.deepcopy(model).state_dict()
    bias = plain["net.0.bias"].clone()
    SeparateDistributedDataParallel(model)
    model.load_state_dict(model.state_dict())
    assert torch.equal(model.net.module[0].bias, bias)
    model.load_state_dict(plain)
    assert torch.equal(model.net.module[0].bias, bias)
    assert list(plain) == list(model.state_dict())


def test_without_a_group() -> None:
    model = Gan()
    alone = wrap_model(SeparateDistributedDataParallel, model)
    assert isinstance(alone, SingleDevice)
    assert set(alone.train_step(gan_batches(1, 0)[0], optimizers(model))) == {"loss_d", "loss_g"}
    with pytest.raises(ValueError, match="scale belongs to"):
        wrap_model(SeparateDistributedDataParallel, Direct())


@pytest.mark.parametrize("kind", [SeparateDistributedDataParallel, StepDistributedDataParallel])
@on_ranks(4)
def test_a_group_of_ranks(kind: Any) -> None:
    """Ranks 0 and 2 train as a pair, as do ranks 1 and 3."""
    pairs = [dist.new_group([rank, rank + 2]) for rank in (0, 1)]
    group = pairs[dist.get_rank() % 2]
    by_rank = [batches(3, dtype=torch.float64, seed=rank) for rank in range(4)]
    wrapper = kind(classifier(torch.float64), process_group=group)
    train(wrapper, by_rank[dist.get_rank()], sgd(wrapper, momentum=0.9))
    wrapper.sync_buffers()
    assert wrapper.data_group is group
    net = mlp(torch.float64)
    train_plainly(net, gather_ranks(by_rank[dist.get_rank() % 2 :: 2]), momentum=0.9)
    assert_near(flat(wrapper), flat(net), 1e-12)


@on_ranks(4)
def test_children_with_split_layers() -> None:
    """The generator is split over pairs of ranks; there are batches for two data ranks."""
    mesh = build_mesh({"data": 2, "tensor": 2})
    plan = {"generator.0": "colwise", "generator.2": "rowwise"}
    model = Gan()
    prepare = Preparation(tensor_parallel=plan)
    wrapper = wrap_model(SeparateDistributedDataParallel, model, mesh=mesh, prepare=prepare)
    train(wrapper, gan_batches(STEPS, mesh.data_rank), optimizers(model))
    weights = torch.cat([whole(parameter).flatten() for parameter in model.parameters()])
    assert_near(weights, gan_alone(1), 1e-12)
