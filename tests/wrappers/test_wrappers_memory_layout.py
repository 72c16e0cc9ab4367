"""Parameters whose strides change after wrapping, and optimizers that depend on the strides."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from marks import slow
from on_ranks import assert_near, on_ranks, raises_with
from step_models import joined
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stepwrap.loops.checkpoints.weights import get_gradients, set_gradients
from stepwrap.registry import MODEL_WRAPPERS
from stepwrap.wrappers import OptimWrapper, SingleDevice, SupervisedModel, wrap_model
from stepwrap.wrappers.optimizers.optimizer_fit import build_optimizer

STEPS = 4


def images(rank: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        [
            torch.randn(2, 3, 6, 6, generator=generator, dtype=torch.float64),
            torch.randint(3, (2,), generator=generator),
        ]
        for _ in range(STEPS)
    ]


def convolutions() -> SupervisedModel:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.Flatten(), nn.Linear(16, 3)]
    return SupervisedModel(nn.Sequential(*layers), nn.CrossEntropyLoss()).double()


def transpose(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.t().contiguous().t()


def to_channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


CHANGES = {"channels_last": to_channels_last, "transposed": transpose}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def trained(
    wrapper: Any,
    data: list[list[Tensor]],
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    changes: dict[int, Callable[[nn.Module], Any]] | None = None,
) -> list[Tensor]:
    """Train a wrapper, change its inner network before some steps, and return the weights."""
    optim, network = OptimWrapper(optimizer(wrapper.parameters())), wrapper.module.net
    for step, batch in enumerate(data):
        (changes or {}).get(step, lambda network: None)(network)
        wrapper.train_step(batch, optim)
    weights = [parameter.detach() for parameter in wrapper.module.parameters()]
    return [weight.full_tensor() if isinstance(weight, DTensor) else weight for weight in weights]


def trained_alone(changes: dict[int, Callable[[nn.Module], Any]] | None = None) -> list[Tensor]:
    joined_batches = [joined(batches) for batches in zip(images(0), images(1), strict=True)]
    return trained(SingleDevice(convolutions()), joined_batches, changes=changes)


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("name", "options"),
    [("ddp", {}), *slow(("separate", {}), ("ddp", {"static_graph": True}))],
)
@on_ranks(2)
def test_a_layout_that_changes_after_wrapping_is_named(
    name: str, options: dict[str, Any], change: str, before: int
) -> None:
    wrapper = wrap_model(MODEL_WRAPPERS.get(name), convolutions(), **options)
    data = images(torch.distributed.get_rank())
    layer, strides = ("net.4.weight", "(1, 3)") if change == "transposed" else ("net.0", "(27, 1,")
    with raises_with(RuntimeError, layer, strides, "before wrapping", "DistributedDataParallel"):
        trained(wrapper, data, changes={before: CHANGES[change]})


@on_ranks(2)
def test_layouts_before_wrapping_and_of_copies_are_right() -> None:
    data = images(torch.distributed.get_rank())
    for name in ("ddp", "separate"):
        model = convolutions()
        for change in CHANGES.values():
            change(model)
        wrapper: Any = wrap_model(MODEL_WRAPPERS.get(name), model)
        assert_near(trained(wrapper, data), trained_alone(), 1e-14)
    wrapper = wrap_model(MODEL_WRAPPERS.get("ddp"), convolutions())
    to_channels_last(wrapper.module)
    # A copy gets new buckets, in its own layout.
    assert_near(trained(copy.deepcopy(wrapper), data), trained_alone(), 1e-14)


@on_ranks(2)
def test_other_strides_of_the_same_memory_are_accepted() -> None:
    torch.manual_seed(0)
    model = SupervisedModel(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten()), nn.CrossEntropyLoss())
    wrapper = wrap_model(MODEL_WRAPPERS.get("ddp"), model)
    weight: Any = model.net[0].weight
    weight.data = weight.data.as_strided((4, 3, 1, 1), (3, 1, 3, 3))
    assert wrapper(torch.randn(2, 3, 1, 1), torch.tensor([0, 1]), mode="loss")["loss"].isfinite()


@pytest.mark.parametrize("before", [0, 2])
@on_ranks(2)
def test_fsdp_reads_replaced_shards_or_names_them(before: int) -> None:
    data, fsdp = images(torch.distributed.get_rank()), MODEL_WRAPPERS.get("fsdp")
    wrapper: Any = wrap_model(fsdp, convolutions())
    with raises_with(RuntimeError, "net.0.weight", "(27, 1, 9, 3)", "ddp"):
        trained(wrapper, data, changes={before: to_channels_last})

    def double(network: nn.Module) -> None:
        with torch.no_grad():
            network._apply(lambda weight: weight * 2)

    changes = {before: double}
    weights = trained(wrap_model(fsdp, convolutions()), data, changes=changes)
    assert_near(weights, trained_alone(changes), 1e-13)


def fused(kind: str) -> Callable[[Any], torch.optim.Optimizer]:
    options: dict[str, Any] = {"SGD": {"momentum": 0.9}, "AdamW": {}, "Adagrad": {}}[kind]
    return lambda parameters: getattr(torch.optim, kind)(parameters, 0.02, fused=True, **options)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad"])
def test_fused_optimizers_load_their_state_into_another_layout(kind: str, change: str) -> None:
    data = images(0)
    model = convolutions()
    expected = trained(SingleDevice(model), data, fused(kind))
    first, second = convolutions(), convolutions()
    optim = OptimWrapper(fused(kind)(first.parameters()))
    for batch in data[:2]:
        SingleDevice(first).train_step(batch, optim)
    CHANGES[change](second)
    second.load_state_dict(first.state_dict())
    resumed = OptimWrapper(fused(kind)(second.parameters()))
    resumed.load_state_dict(copy.deepcopy(optim.state_dict()))
    for batch in data[2:]:
        SingleDevice(second).train_step(batch, resumed)
    assert_near([weight.detach() for weight in second.parameters()], expected, 1e-14)


def test_the_gradients_of_a_window_are_restored_in_the_current_layout() -> None:
    saved, model = convolutions(), convolutions()
    saved.net(images(0)[0][0]).sum().backward()
    gradients = get_gradients(saved)
    to_channels_last(model)
    set_gradients(model, gradients)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradients[name])
        assert parameter.grad.stride() == parameter.stride()


def test_slices_are_not_updated_by_fused_kernels() -> None:
    values = torch.randn(4, 6)
    before, parameter = values.clone(), nn.Parameter(values[:, :3])
    optimizer = build_optimizer(torch.optim.AdamW, [parameter], lr=0.1)
    parameter.sum().backward()
    optimizer.step()
    assert torch.equal(values[:, 3:], before[:, 3:])
    assert not torch.equal(values[:, :3], before[:, :3])


def test_gradients_in_another_layout_are_refused_by_fused_optimizers() -> None:
    parameter = nn.Parameter(torch.randn(4, 6))
    optim = OptimWrapper(torch.optim.AdamW([parameter], fused=True))
    parameter.grad = torch.randn(6, 4).t()
    with raises_with(ValueError, "(4, 6)", "(6, 1)", "(1, 4)", "fused=False"):
        optim.step()
