"""Children averaged one by one (C-9 to C-11), over real processes."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gan_models import Gan, gan_batches, optimizers
from ranks import run_ranks
from sharded_models import whole
from step_models import batches, classifier, flat, mlp, sgd
from torch import Tensor, nn

from stepwrap.registry import MODEL_WRAPPERS
from stepwrap.wrappers import (
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


def _train_gan(freeze: bool, accumulate: int, **options: Any) -> Tensor:
    model = Gan(freeze=freeze)
    if dist.get_rank():
        # The ranks begin with the first one's weights.
        for parameter in model.parameters():
            parameter.data.add_(1.0 if parameter.requires_grad else 0.0)
    wrapper = SeparateDistributedDataParallel(model, **options)
    optims = optimizers(model, accumulate)
    optims.initialize_count_status(wrapper, 0, STEPS)
    for batch in gan_batches(STEPS, dist.get_rank()):
        logs = wrapper.train_step(batch, optims)
        assert set(logs) == {"loss_d", "loss_g"}
    return flat(wrapper)


def _gan_alone(accumulate: int) -> Tensor:
    """Return what one process makes of both ranks' batches, by plain optimizers."""
    model = Gan()
    adam = torch.optim.Adam(model.generator.parameters(), lr=0.01)
    descent = torch.optim.SGD(model.discriminator.parameters(), lr=0.1, momentum=0.9)
    by_rank = [gan_batches(STEPS, rank) for rank in range(2)]
    for index in range(STEPS):
        real, noise = (
            torch.cat(parts) for parts in zip(*[data[index] for data in by_rank], strict=True)
        )
        fake = model.generator(noise).detach()
        judged = model.discriminator(model.features(fake)).mean()
        loss = judged - model.discriminator(model.features(real)).tanh().mean()
        (loss / accumulate).backward()
        last = (index + 1) % accumulate == 0
        if last:
            nn.utils.clip_grad_norm_(model.discriminator.parameters(), 0.3)
            descent.step()
            descent.zero_grad()
        model.discriminator.requires_grad_(False)
        (
            -model.discriminator(model.features(model.generator(noise))).mean() / accumulate
        ).backward()
        model.discriminator.requires_grad_(True)
        if last:
            adam.step()
            adam.zero_grad()
    return flat(model)


@pytest.mark.parametrize(
    ("freeze", "accumulate", "options"),
    [
        (True, 1, {}),
        (True, 3, {}),
        (False, 1, {}),
        (True, 1, {"find_unused_parameters": True, "broadcast_buffers": True}),
        (True, 1, {"gradient_as_bucket_view": True, "comm_hook": "allreduce"}),
    ],
)
def test_two_optimizers_equal_one_process(
    freeze: bool, accumulate: int, options: dict[str, Any]
) -> None:
    """C-11."""
    expected = _gan_alone(accumulate)
    for weights in run_ranks(_train_gan, 2, freeze, accumulate, **options):
        assert (weights - expected).abs().max().item() <= 1e-12


def _default_step() -> Tensor:
    wrapper = SeparateDistributedDataParallel(classifier(torch.float64, seed=dist.get_rank()))
    optim = sgd(wrapper, momentum=0.9, accumulative_counts=2)
    for batch in batches(4, dtype=torch.float64, seed=dist.get_rank()):
        wrapper.train_step(batch, optim)
    assert set(wrapper.val_step(batch)) == {"preds", "target", "loss", "num_samples"}
    return flat(wrapper)


def test_a_model_without_a_step_of_its_own() -> None:
    net = mlp(torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    by_rank = [batches(4, dtype=torch.float64, seed=rank) for rank in range(2)]
    for start in (0, 2):
        window = [batch for data in by_rank for batch in data[start : start + 2]]
        inputs, target = (torch.cat(parts) for parts in zip(*window, strict=True))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), target).backward()
        optimizer.step()
    for weights in run_ranks(_default_step, 2):
        assert (weights - flat(net)).abs().max().item() <= 1e-12


def _structure() -> dict[str, Any]:
    model = Gan()
    names = list(model.state_dict())
    parameters = [name for name, _ in model.named_parameters()]
    weights = copy.deepcopy(model.state_dict())
    wrapper = SeparateDistributedDataParallel(model)
    seen: dict[str, Any] = {
        "kinds": {
            name: isinstance(child, StepDistributedDataParallel)
            for name, child in model.named_children()
        },
        "model": wrapper.module is model,
        "wrappers": (is_model_wrapper(wrapper), is_module_wrapper(wrapper)),
        "names": list(model.state_dict()) == names,
        "parameters": [name for name, _ in model.named_parameters()] == parameters,
        "outer": list(wrapper.state_dict()) == [f"module.{name}" for name in names],
    }
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    missing = model.load_state_dict(weights)
    seen["loaded"] = all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    seen["missing"] = (missing.missing_keys, missing.unexpected_keys)
    wrapper.load_state_dict(wrapper.state_dict())
    del weights["generator.0.bias"]
    weights["discriminator.9.bias"] = torch.zeros(1)
    misfits = model.load_state_dict(weights, strict=False)
    seen["misfits"] = (misfits.missing_keys, misfits.unexpected_keys)
    return seen


def test_names_and_kinds_of_children() -> None:
    """C-9."""
    for seen in run_ranks(_structure, 2):
        assert seen == {
            "kinds": {
                "data_preprocessor": False,
                "generator": True,
                "discriminator": True,
                "features": False,
                "activation": False,
            },
            "model": True,
            "wrappers": (True, True),
            "names": True,
            "parameters": True,
            "outer": True,
            "loaded": True,
            "missing": ([], []),
            "misfits": (["generator.0.bias"], ["discriminator.9.bias"]),
        }


def _no_sync() -> list[Any]:
    model = Gan()
    wrapper = SeparateDistributedDataParallel(model)
    children = [model.generator, model.discriminator]

    def flags() -> list[bool]:
        return [child.require_backward_grad_sync for child in children]

    seen = [flags()]
    with wrapper.no_sync():
        with wrapper.no_sync():
            seen.append(flags())
        seen.append(flags())
    seen.append(flags())
    with pytest.raises(KeyError), wrapper.no_sync():
        raise KeyError("inside")
    return [*seen, flags()]


def test_no_sync() -> None:
    """C-10."""
    on, off = [True, True], [False, False]
    assert run_ranks(_no_sync, 2) == [[on, off, off, on, on]] * 2


def _copies() -> list[tuple[bool, bool, bool]]:
    wrapper = SeparateDistributedDataParallel(Gan())
    batch = gan_batches(1, dist.get_rank())[0]
    before = flat(wrapper)
    results = []
    for again in (copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper))):
        again.train_step(batch, optimizers(again.module))
        weights = flat(again)
        everywhere = [torch.empty_like(weights) for _ in range(2)]
        dist.all_gather(everywhere, weights)
        names = list(again.module.state_dict()) == list(wrapper.module.state_dict())
        again.module.load_state_dict(wrapper.module.state_dict())
        results.append((torch.equal(*everywhere), not torch.equal(weights, before), names))
    wrapper(*batch)
    return results


def test_copies_train() -> None:
    assert run_ranks(_copies, 2) == [[(True, True, True)] * 2] * 2


class Direct(SupervisedModel):
    def __init__(self) -> None:
        super().__init__(mlp(), nn.CrossEntropyLoss())
        self.scale = nn.Parameter(torch.ones(()))


class Mixed(nn.Module):
    """Its second child cannot be wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.LazyLinear(2)


def _refusals() -> Iterator[str]:
    with pytest.raises(ValueError, match="scale belongs to Direct itself") as direct:
        SeparateDistributedDataParallel(Direct())
    yield str(direct.value)
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


def _refused() -> list[str]:
    return list(_refusals())


def test_refusals_leave_the_model_alone() -> None:
    for (text,) in run_ranks(_refused, 2):
        assert "put it into a child module, freeze it, or use StepDistributed" in text


class Versioned(nn.Linear):
    """Adds one to weights of its first version."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}bias"] = state[f"{prefix}bias"] + 1
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def _versions() -> tuple[bool, bool, bool]:
    model = SupervisedModel(nn.Sequential(Versioned(6, 3)), nn.CrossEntropyLoss())
    model.net.module = Versioned(6, 3)
    plain = copy.deepcopy(model).state_dict()
    bias = plain["net.0.bias"].clone()
    SeparateDistributedDataParallel(model)
    model.load_state_dict(model.state_dict())
    own = torch.equal(model.net.module[0].bias, bias)
    model.load_state_dict(plain)
    loaded = torch.equal(model.net.module[0].bias, bias)
    return own, loaded, list(plain) == list(model.state_dict())


def test_versions_of_modules_are_kept() -> None:
    assert run_ranks(_versions, 2) == [(True, True, True)] * 2


def test_without_a_group() -> None:
    with pytest.raises(ValueError, match="process group"):
        SeparateDistributedDataParallel(classifier())
    model = Gan()
    alone = wrap_model(SeparateDistributedDataParallel, model)
    assert isinstance(alone, SingleDevice)
    assert set(alone.train_step(gan_batches(1, 0)[0], optimizers(model))) == {"loss_d", "loss_g"}
    with pytest.raises(ValueError, match="scale belongs to"):
        wrap_model(SeparateDistributedDataParallel, Direct())


@pytest.mark.parametrize("name", ["separate", "MMSeparateDistributedDataParallel"])
def test_registered_names(name: str) -> None:
    assert MODEL_WRAPPERS.get(name) is SeparateDistributedDataParallel


def _in_pairs(kind: type[nn.Module]) -> tuple[Tensor, bool]:
    """Train with ranks 0 and 2, and 1 and 3, as pairs of their own."""
    pairs = [dist.new_group([first, first + 2]) for first in (0, 1)]
    mine = pairs[dist.get_rank() % 2]
    wrapper = kind(classifier(torch.float64), process_group=mine)
    optim = sgd(wrapper, momentum=0.9)
    for batch in batches(3, dtype=torch.float64, seed=dist.get_rank()):
        wrapper.train_step(batch, optim)
    wrapper.sync_buffers()
    return flat(wrapper), wrapper.data_group is mine


@pytest.mark.parametrize("kind", [SeparateDistributedDataParallel, StepDistributedDataParallel])
def test_a_group_of_ranks(kind: type[nn.Module]) -> None:
    results = run_ranks(_in_pairs, 4, kind)
    for rank, (weights, grouped) in enumerate(results):
        net = mlp(torch.float64)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        data = [batches(3, dtype=torch.float64, seed=one) for one in (rank % 2, rank % 2 + 2)]
        for both in zip(*data, strict=True):
            inputs, target = (torch.cat(parts) for parts in zip(*both, strict=True))
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs), target).backward()
            optimizer.step()
        assert (weights - flat(net)).abs().max().item() <= 1e-12
        assert grouped


def _gan_in_parts() -> Tensor:
    """Train with the generator split over two ranks, whose pairs see the batches of two ranks."""
    mesh = build_mesh({"data": 2, "tensor": 2})
    plan = {"generator.0": "colwise", "generator.2": "rowwise"}
    model = Gan()
    wrapper = wrap_model(
        SeparateDistributedDataParallel,
        model,
        mesh=mesh,
        prepare=Preparation(tensor_parallel=plan),
    )
    optims = optimizers(model)
    for batch in gan_batches(STEPS, mesh.data_rank):
        wrapper.train_step(batch, optims)
    return torch.cat([whole(parameter).flatten() for parameter in model.parameters()])


def test_children_with_split_layers() -> None:
    expected = _gan_alone(1)
    for weights in run_ranks(_gan_in_parts, 4):
        assert (weights - expected).abs().max().item() <= 1e-12
