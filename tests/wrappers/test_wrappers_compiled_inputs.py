"""Tensors that a compiled step reads and updates."""

import copy
import re
from typing import Any

import pytest
import torch
from compiled_runs import (
    CHANGED_AT,
    Net,
    adamw,
    assert_same,
    at,
    batch_at,
    sgd,
    steps_compiled,
    train,
)
from marks import slow
from torch import Tensor, nn

from stepwrap.wrappers import OptimWrapper, SingleDevice, SupervisedModel, compile_step
from stepwrap.wrappers.optimizers.gates import Gate

# After a program has been verified at its step 10.
LATE = 14


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))
        self.head = self.heads[0]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        # Both heads get gradients.
        return self.head(x) + 0 * sum(head(x).sum() for head in self.heads)


def swapped(model: Any, _: OptimWrapper) -> None:
    layers = model.net.layers
    layers[0], layers[1] = layers[1], layers[0]


def other_head(model: Any, _: OptimWrapper) -> None:
    model.net.head = model.net.heads[1]


@pytest.mark.parametrize("change", [swapped, *slow(other_head)])
def test_other_modules_of_the_same_shape(change: Any) -> None:
    assert_same(1e-10, Layers, sgd, at({LATE: change}))


class PenaltyModel(nn.Module):
    """A model whose loss refers to the weights by a closure, which a copy of the model shares."""

    losses = ("loss",)

    def __init__(self) -> None:
        super().__init__()
        self.net = net = Net()
        self.penalty = lambda: net.first.weight.square().sum()

    def forward(self, x: Tensor, y: Tensor, *, mode: str) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(x), y) + 0.01 * self.penalty()}


def test_a_refused_verification_leaves_no_gradients() -> None:
    assert_same(0.0, PenaltyModel, sgd)


class InPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(1.1))


@pytest.mark.slow
def test_a_forward_that_changes_its_batch() -> None:
    def run(compiled: bool) -> Any:
        reused = [batch_at(index, torch.float64) for index in range(4)]
        options = {"make_batch": lambda index, _: reused[index % 4]}
        return [*train(compiled, InPlace, sgd, **options)[0].values(), *(x for x, _ in reused)]

    torch.testing.assert_close(run(True), run(False), rtol=1e-10, atol=1e-10)


class InPlacePenalty(PenaltyModel):
    def forward(self, x: Tensor, y: Tensor, *, mode: str) -> dict[str, Tensor]:
        return super().forward(x.mul_(1.1), y, mode=mode)


@pytest.mark.slow
def test_a_refused_step_restores_its_batch() -> None:
    assert_same(0.0, InPlacePenalty, sgd)


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, data: Any, training: bool = False) -> Any:
        return data[0] * self.scale, data[1]


def prepared() -> SupervisedModel:
    model: Any = SupervisedModel(Net(), nn.CrossEntropyLoss(), data_preprocessor=Scaling())
    model.losses = ("loss",)
    return model


@pytest.mark.slow
def test_a_preprocessor_with_parameters(caplog: pytest.LogCaptureFixture) -> None:
    assert_same(0.0, prepared, sgd)
    assert caplog.text.count("the batch require gradients") == 1


def some(parameters: Any) -> torch.optim.Optimizer:
    return sgd(list(parameters)[:2])


def test_gradients_of_parameters_that_no_optimizer_updates(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def add(model: Any, optim: OptimWrapper) -> None:
        optim.optimizer.add_param_group({"params": list(model.net.last.parameters())})

    assert_same(1e-10, Net, some, at({CHANGED_AT: add}))
    assert len(re.findall("gets gradients, .*not update it", caplog.text)) == 1


@pytest.mark.slow
def test_gradients_of_frozen_parameters() -> None:
    def change(index: int, model: Any, optim: OptimWrapper) -> None:
        frozen = model.net.first.weight
        frozen.requires_grad_(False)
        frozen.grad = torch.ones_like(frozen) if index == LATE else None

    assert_same(1e-10, Net, sgd, change)


def other_optimizer(model: Any, optim: OptimWrapper) -> None:
    optim.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def other_clip(_: Any, optim: OptimWrapper) -> None:
    clip: Any = optim.clip
    clip.options["max_norm"] = 0.01


def other_betas(_: Any, optim: OptimWrapper) -> None:
    optim.optimizer.param_groups[0]["betas"][0] = 0.1


def other_order(_: Any, optim: OptimWrapper) -> None:
    optim.optimizer.param_groups[0]["params"].reverse()


def use_lists(parameters: Any) -> torch.optim.Optimizer:
    optimizer = adamw(parameters)
    optimizer.param_groups[0]["betas"] = [0.9, 0.999]
    return optimizer


def clipped(optimizer: torch.optim.Optimizer) -> OptimWrapper:
    return OptimWrapper(optimizer, clip_grad={"max_norm": 0.5})


class Halved(Gate):
    def scale(self, loss: Tensor) -> Tensor:
        return loss / 2


def other_gate(_: Any, optim: OptimWrapper) -> None:
    optim.gates.append(Halved())


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [other_optimizer, other_clip, other_betas, other_order, other_gate]
)
def test_parts_of_the_optimizer_that_are_replaced(change: Any) -> None:
    assert_same(1e-10, Net, use_lists, at({LATE: change}), wrap=clipped)


REPLACED = [
    (nn.Module, "__call__"),
    *slow((OptimWrapper, "scale_loss")),
    (OptimWrapper, "update_params"),
]


@pytest.mark.parametrize(("owner", "name"), REPLACED)
def test_methods_of_base_classes_that_are_replaced(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    usual = getattr(owner, name)

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "update_params":
            return usual(self, args[0] * 2, *args[1:], **kwargs)
        output = usual(self, *args, **kwargs)
        return output * 2 if isinstance(output, Tensor) else output

    changes = {
        0: lambda *_: monkeypatch.undo(),
        LATE: lambda *_: monkeypatch.setattr(owner, name, doubled),
    }
    assert_same(1e-10, Net, sgd, at(changes))


class PartlyUsed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


def test_anomalous_parameters_are_detected_from_a_later_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrapper: Any = SingleDevice(SupervisedModel(PartlyUsed().double(), nn.CrossEntropyLoss()))
    compile_step(wrapper, backend="eager")
    optim = OptimWrapper(sgd(wrapper.parameters()))
    for index in range(LATE + 3):
        wrapper.detect_anomalous_params = index >= LATE
        wrapper.train_step(batch_at(index, torch.float64), optim)
    assert steps_compiled(wrapper) == LATE - 3
    assert caplog.text.count("net.unused.weight with shape") == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_gradients_held_in_another_layout(backend: str) -> None:
    def transpose(model: Any, optim: OptimWrapper) -> None:
        weight = model.net.first.weight
        weight.grad = weight.grad.t().contiguous().t()

    def accumulate(optimizer: torch.optim.Optimizer) -> OptimWrapper:
        return OptimWrapper(optimizer, accumulative_counts=2)

    assert_same(1e-10, Net, sgd, at({13: transpose}), wrap=accumulate, backend=backend)


class PairModel(nn.Module):
    losses = ("loss",)

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, y: Tensor, *, mode: str) -> dict[str, Tensor]:
        return {"loss": (self.net(x) - self.net(y)).square().mean() + self.net(x).square().mean()}


def test_train_steps_if_the_first_batch_has_one_tensor_twice() -> None:
    weights = []
    for compiled in (False, True):
        torch.manual_seed(0)
        wrapper: Any = SingleDevice(PairModel().double())
        if compiled:
            compile_step(wrapper, backend="eager")
        optim = OptimWrapper(adamw(wrapper.parameters()))
        data = [(tensor := batch_at(index, torch.float64)[0], tensor) for index in range(6)]
        data += [(batch_at(i, torch.float64)[0], batch_at(-i, torch.float64)[0]) for i in range(6)]
        wrapper.train_steps(data, optim)
        weights.append(wrapper.state_dict())
    assert steps_compiled(wrapper) > 6
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_logs_that_are_lists_of_tensors(caplog: pytest.LogCaptureFixture) -> None:
    class Listed(PairModel):
        def parse_losses(self, losses: Any) -> Any:
            return losses["loss"], {"loss": losses["loss"], "parts": [losses["loss"] * 2]}

    def make_batch(index: int, dtype: torch.dtype) -> Any:
        return batch_at(index, dtype)[0], batch_at(-index, dtype)[0]

    assert_same(0.0, Listed, sgd, make_batch=make_batch)
    assert caplog.text.count("logs is a list") == 1


@pytest.mark.slow
def test_ctrl_c_inside_a_verification_undoes_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper: Any = SingleDevice(SupervisedModel(Net().double(), nn.CrossEntropyLoss()))
    compile_step(wrapper, backend="eager")
    optim = OptimWrapper(sgd(wrapper.parameters()))
    for index in range(4):
        wrapper.train_step(batch_at(index, torch.float64), optim)
    before = copy.deepcopy(wrapper.state_dict())

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.Tensor, "backward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        wrapper.train_step(batch_at(4, torch.float64), optim)
    torch.testing.assert_close(wrapper.state_dict(), before, rtol=0, atol=0)
    assert optim.inner_count == 4
