"""Tensors that a model creates in an evaluation and keeps, such as tables of positions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loop_parts import assert_identical, get_weights, make_data
from torch import Tensor, nn

from stepwrap.loops import EpochTrainLoop, EvalSets, HookList, LoopState, ValLoop, build_loader
from stepwrap.runner import Runner
from stepwrap.wrappers import OptimWrapper, SingleDevice, SupervisedModel


class Table(nn.Module):
    """Multiply by a table that is made in the first forward and kept in an attribute."""

    table: Tensor | None = None

    def stored(self) -> Tensor | None:
        return self.table

    def store(self, table: Tensor) -> None:
        self.table = table

    def forward(self, inputs: Tensor) -> Tensor:
        if self.stored() is None:
            self.store(torch.arange(inputs.shape[1]).float() / 4)
        return inputs * self.stored()


class Buffer(Table):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None, persistent=False)

    def stored(self) -> Tensor | None:
        return self.scale

    def store(self, table: Tensor) -> None:
        self.scale = table


class Cache(Table):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Tensor] = {}

    def stored(self) -> Tensor | None:
        return self.cache.get(4)

    def store(self, table: Tensor) -> None:
        self.cache[4] = table


class Helper(Cache):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = SimpleNamespace(tables=[])

    def stored(self) -> Tensor | None:
        return self.rotary.tables[-1] if self.rotary.tables else None

    def store(self, table: Tensor) -> None:
        self.rotary.tables.append(table)


# Models and the names of their tensors.
KEPT: dict[Any, str] = {
    Table: "net.1.table",
    Buffer: "net.1.scale",
    Cache: "net.1.cache.4",
    Helper: "net.1.rotary.tables.0",
    nn.LazyBatchNorm1d: "net.1.weight",
}


def make_run(layer: Any) -> LoopState:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), layer(), nn.Linear(4, 3))
    model = SupervisedModel(net, nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return LoopState(SingleDevice(model), OptimWrapper(optimizer))


def val_loop(inference_mode: bool | None = None) -> ValLoop:
    options = {} if inference_mode is None else {"inference_mode": inference_mode}
    return ValLoop(build_loader(make_data(4), batch_size=2), **options)


def train_loop(validation: Any = None) -> EpochTrainLoop:
    loader = build_loader(make_data(4), batch_size=2, train=True)
    return EpochTrainLoop(loader, max_epochs=1, val_loop=validation, val_begin=0, sanity_val=False)


@pytest.mark.parametrize("layer", KEPT)
def test_training_uses_what_an_evaluation_made(layer: Any) -> None:
    plain, validated, evaluated = (make_run(layer) for _ in range(3))
    train_loop().run(plain, HookList())
    train_loop(val_loop()).run(validated, HookList())
    assert_identical(get_weights(validated), get_weights(plain))
    # With the data sets of an evaluation by themselves, before training.
    EvalSets({"a": val_loop(), "b": val_loop()}).run(evaluated, HookList())
    train_loop().run(evaluated, HookList())
    assert_identical(get_weights(evaluated), get_weights(plain))


@pytest.mark.parametrize("layer", KEPT)
def test_inference_mode_names_the_tensor_and_its_evaluation(layer: Any) -> None:
    with pytest.raises(RuntimeError, match=r"(?i)inference tensor") as caught:
        train_loop(val_loop(inference_mode=True)).run(make_run(layer), HookList())
    notes = "\n".join(caught.value.__notes__)
    assert repr(KEPT[layer]) in notes
    assert "the validation after step 0" in notes
    assert "inference_mode: false" in notes


def test_tensors_of_the_users_code_are_named_too() -> None:
    state = make_run(Table)
    with torch.inference_mode():
        state.model.val_step(next(iter(build_loader(make_data(2), batch_size=2))))
    with pytest.raises(RuntimeError, match=r"(?i)inference tensor") as caught:
        train_loop().run(state, HookList())
    assert any(
        "'net.1.table'" in note and "your own code" in note for note in caught.value.__notes__
    )


def test_validate_before_train() -> None:
    model = make_run(Helper).model.module
    optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    runner = Runner(model, optim_wrapper=optim, train_loop=train_loop(), val_loop=val_loop())
    runner.validate()
    assert runner.train().step == 2


@pytest.mark.parametrize("inference_mode", [False, True])
def test_the_setting_chooses_the_mode(inference_mode: bool) -> None:
    modes = []

    class Look(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            modes.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
            return inputs

    val_loop(inference_mode).run(make_run(Look), HookList())
    assert modes == [(inference_mode, False)] * 2
