"""Layers that change their own weights or buffers: sanity validation, skipped steps, resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loop_parts import assert_identical
from stream_parts import SaveAll
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stepwrap.loops import (
    EpochTrainLoop,
    HookList,
    LoopState,
    MeanLoss,
    SpikeGuardHook,
    ValLoop,
    build_loader,
    load_checkpoint,
)
from stepwrap.wrappers import OptimWrapper, SingleDevice, SupervisedModel


class Tied(nn.Module):
    """An embedding whose forward shortens its rows, which are also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4, max_norm=1.0)

    def forward(self, words: Tensor) -> Tensor:
        return self.words(words) @ self.words.weight.T


class UnitNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, words: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        return self.weight[words]


class Centred(nn.Module):
    """Subtract a running mean that is in no state dict; `table` is a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 6)
        self.register_buffer("mean", torch.zeros(6), persistent=False)
        self.register_buffer("table", torch.arange(1000.0), persistent=False)
        self.register_buffer("grown", None, persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        values: Tensor = self.words(words)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * values.detach().mean(0)
            self.grown = self.mean if self.grown is None else torch.cat([self.grown, self.mean])
        return values - self.mean


def make_state(net: nn.Module) -> LoopState:
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=2.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    model = SupervisedModel(net, nn.CrossEntropyLoss())
    return LoopState(model=SingleDevice(model), optim_wrapper=OptimWrapper(optimizer))


def make_loader(order: list[int] | None = None, **options: Any) -> Any:
    words = torch.tensor([0, 1, 2, 3, 4, 5, 0, 2] if order is None else order)
    return build_loader(TensorDataset(words, (words + 1) % 6), batch_size=2, **options)


def train(state: LoopState, hooks: list[Any], **options: Any) -> dict[str, Tensor]:
    val_loop = ValLoop(make_loader(), {"loss": MeanLoss()})
    loop = EpochTrainLoop(
        make_loader(train=True), max_epochs=2, val_loop=val_loop, val_begin=2, **options
    )
    loop.run(state, HookList(hooks))
    return {name: value.clone() for name, value in state.model.state_dict().items()}


def test_the_validation_batch_before_training_restores_embeddings() -> None:
    weights = [train(make_state(Tied()), [], sanity_val=flag) for flag in (True, False)]
    assert_identical(*weights)


def test_another_weight_that_the_validation_batch_changes_is_named() -> None:
    with pytest.raises(ValueError, match=r"net\.weight") as error:
        train(make_state(UnitNorm()), [])
    assert "sanity_val" in str(error.value)
    train(make_state(UnitNorm()), [], sanity_val=False)


class RefuseSecond(SpikeGuardHook):
    """Refuse the second update, whatever its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def allows(self, optim_wrapper: OptimWrapper) -> bool:
        self.calls += 1
        accepted = super().allows(optim_wrapper)
        self._refused = self.calls == 2
        self._state.skipped = self._refused
        return accepted and not self._refused


def test_a_refused_step_leaves_no_trace_in_embeddings() -> None:
    state = make_state(Tied())
    loop = EpochTrainLoop(make_loader(train=True), max_epochs=1)
    loop.run(state, HookList([RefuseSecond()]))
    expected = make_state(Tied())
    accepted = make_loader([0, 1, 4, 5, 0, 2], train=True)
    EpochTrainLoop(accepted, max_epochs=1).run(expected, HookList())
    assert_identical(state.model.state_dict(), expected.model.state_dict())


def test_a_refused_step_that_changed_another_weight_is_an_error() -> None:
    loop = EpochTrainLoop(make_loader(train=True), max_epochs=1)
    with pytest.raises(ValueError, match=r"net\.weight"):
        loop.run(make_state(UnitNorm()), HookList([RefuseSecond()]))


def test_buffers_that_are_in_no_state_dict_continue(tmp_path: Path) -> None:
    state, hook = make_state(Centred()), SaveAll(tmp_path)
    weights = train(state, [hook])
    assert len(hook.saved) >= 8
    for _, path in hook.saved:
        saved = load_checkpoint(path).read("rank_00000")["transient_buffers"]
        assert sorted(saved) == ["net.grown", "net.mean"]
        resumed = make_state(Centred())
        load_checkpoint(path).restore(resumed)
        assert_identical(train(resumed, []), weights)
        for name in ("mean", "grown"):
            a, b = (getattr(run.model.module.net, name) for run in (state, resumed))
            assert torch.equal(a, b)
