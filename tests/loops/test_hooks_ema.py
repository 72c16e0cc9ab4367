"""The moving average of the weights."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from hook_runs import loader, new_state, train, weights
from listeners import failing
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from stepwrap.loops import EMAHook, SWAHook
from stepwrap.loops.hook import Hook
from stepwrap.loops.state import LoopState


class WeightsHook(Hook):
    """Record the weights after each update and in each evaluation."""

    def __init__(self) -> None:
        self.updates: list[list[Tensor]] = []
        self.evaluated: list[list[Tensor]] = []

    def on_train_start(self, state: LoopState) -> None:
        self.updates.append(weights(state))

    def on_update(self, state: LoopState) -> None:
        self.updates.append(weights(state))

    def on_eval_batch_end(self, state: LoopState, batch: Any, outputs: Any) -> None:
        self.evaluated.append(weights(state))


def average(updates: list[list[Tensor]], *, decay: float, every_steps: int = 1) -> list[Tensor]:
    """Return the average by its formula, in double precision."""
    result = [tensor.double() for tensor in updates[0]]
    for tensors in updates[every_steps::every_steps]:
        result = [decay * a + (1 - decay) * b for a, b in zip(result, tensors, strict=True)]
    return result


@pytest.mark.parametrize("every_steps", [1, 3])
def test_average_by_the_formula(every_steps: int) -> None:
    weights_hook, ema = WeightsHook(), EMAHook(decay=0.7, every_steps=every_steps)
    train(new_state(), [ema, weights_hook])
    expected = average(weights_hook.updates, decay=0.7, every_steps=every_steps)
    for got, want in zip(ema.state_dict()["model"].values(), expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-7)


def test_until_its_start_the_average_is_a_copy() -> None:
    weights_hook, ema = WeightsHook(), EMAHook(decay=0.7, start_step=3)
    train(new_state(), [ema, weights_hook])
    expected = average(weights_hook.updates[3:], decay=0.7)
    for got, want in zip(ema.state_dict()["model"].values(), expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-7)
    early = EMAHook(decay=0.7, start_step=100)
    train(new_state(), [early])
    assert all(map(torch.equal, early.state_dict()["model"].values(), weights_hook.updates[-1]))


def test_evaluation_sees_the_average_and_training_its_own_weights() -> None:
    plain, weights_hook = WeightsHook(), WeightsHook()
    train(new_state(), [plain])
    ema = EMAHook(decay=0.7)
    train(new_state(), [ema, weights_hook])
    for with_ema, without in zip(weights_hook.updates, plain.updates, strict=True):
        assert all(map(torch.equal, with_ema, without))
    assert all(map(torch.equal, weights_hook.evaluated[-1], ema.state_dict()["model"].values()))
    assert not any(map(torch.equal, weights_hook.evaluated[-1], plain.evaluated[-1]))


def test_evaluation_with_the_plain_weights_on_request() -> None:
    weights_hook = WeightsHook()
    train(new_state(), [EMAHook(decay=0.7, evaluate_with_ema=False), weights_hook])
    assert all(map(torch.equal, weights_hook.evaluated[-1], weights_hook.updates[-1]))


def test_the_weights_come_back_after_a_failed_evaluation() -> None:
    state, weights_hook = new_state(), WeightsHook()
    with pytest.raises(OSError, match="no"):
        train(
            state, [EMAHook(decay=0.7), weights_hook, failing(OSError("no"), "on_eval_batch_end")]
        )
    assert all(map(torch.equal, weights(state), weights_hook.updates[-1]))


def test_buffers_are_the_models_own() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    state, ema = new_state(net=net), EMAHook()
    train(state, [ema])
    saved = ema.state_dict()["model"]
    state_dict = state.model.module.state_dict()
    assert saved.keys() == state_dict.keys()
    for name, _ in state.model.module.named_buffers():
        assert torch.equal(saved[name], state_dict[name])


def test_tied_weights_stay_tied() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    net[1].weight = net[0].weight
    state, ema = new_state(net=net), EMAHook(decay=0.5)
    train(state, [ema])
    saved = ema.state_dict()["model"]
    assert torch.equal(saved["net.0.weight"], saved["net.1.weight"])


def test_low_precision_is_averaged_in_float32() -> None:
    ema, state = EMAHook(decay=0.999), new_state(net=nn.Linear(3, 1, bias=False))
    state.model.to(torch.bfloat16)
    (param,) = state.model.parameters()
    param.data.fill_(0.0)
    ema.on_train_start(state)
    param.data.fill_(1.0)
    for state.step in range(1, 1001):
        ema.on_update(state)
    (got,) = ema.state_dict()["model"].values()
    torch.testing.assert_close(got, torch.full((1, 3), 1 - 0.999**1000), rtol=1e-4, atol=0)


class Spectrum(nn.Module):
    """Multiply the spectrum of the inputs with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.linear = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(inputs) * self.factors
        return self.linear(torch.fft.irfft(spectrum, n=3))


@pytest.mark.parametrize(
    ("hook", "rule", "first"),
    [
        (EMAHook(decay=0.7), get_ema_multi_avg_fn(0.7), True),
        (SWAHook(from_step=1), get_swa_multi_avg_fn(), False),
    ],
)
def test_complex_parameters_are_averaged_as_by_torch(
    hook: EMAHook | SWAHook, rule: Callable[..., None], first: bool
) -> None:
    """``first``: whether the average contains the weights before the first update."""
    net, batches = Spectrum(), list(loader())
    plain, weights_hook = deepcopy(net), WeightsHook()
    average = AveragedModel(plain, multi_avg_fn=rule)
    if first:
        average.update_parameters(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for inputs, targets in batches * 2:
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(inputs), targets).backward()
        optimizer.step()
        average.update_parameters(plain)
    train(new_state(net=net), [hook, weights_hook], dataloader=batches)
    saved = hook.state_dict()["model"]
    for name, expected in average.module.named_parameters():
        torch.testing.assert_close(saved[f"net.{name}"], expected.detach())
    for seen, expected in zip(weights_hook.evaluated[-1], average.parameters(), strict=True):
        torch.testing.assert_close(seen, expected.detach())


def test_a_resumed_run_has_the_same_average() -> None:
    uninterrupted = EMAHook(decay=0.7)
    train(new_state(), [uninterrupted])
    stopped_hook, second, state = EMAHook(decay=0.7), EMAHook(decay=0.7), new_state()
    train(state, [stopped_hook], epochs=1)
    second.load_state_dict(stopped_hook.state_dict())
    train(state, [second], epochs=2)
    for got, want in zip(
        second.state_dict()["model"].values(),
        uninterrupted.state_dict()["model"].values(),
        strict=True,
    ):
        assert torch.equal(got, want)


def test_a_test_alone_uses_the_restored_average() -> None:
    trained, restored, state = EMAHook(decay=0.7), EMAHook(decay=0.7), new_state()
    train(state, [trained])
    before = weights(state)
    restored.load_state_dict(trained.state_dict())
    restored.on_eval_start(state)
    assert all(map(torch.equal, weights(state), trained.state_dict()["model"].values()))
    restored.on_eval_end(state, {})
    assert all(map(torch.equal, weights(state), before))


def test_an_average_of_another_model_is_refused() -> None:
    ema = EMAHook()
    ema.load_state_dict({"model": {"net.weight": torch.zeros(1, 3)}})
    with pytest.raises(ValueError, match=r"lacks net.bias \(1 in all\)"):
        ema.on_train_start(new_state())


def test_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"decay must be within \[0, 1\), got 1.0"):
        EMAHook(decay=1.0)
    with pytest.raises(ValueError, match="every_steps must .*>= 1, got 0"):
        EMAHook(every_steps=0)


def _average_of_rank() -> list[Tensor]:
    ema = EMAHook(decay=0.5)
    train(new_state(), [ema])
    return list(ema.state_dict()["model"].values())


def test_the_average_is_equal_on_all_ranks() -> None:
    rank_0, second = run_ranks(_average_of_rank, 2)
    assert all(map(torch.equal, rank_0, second))


def test_a_model_without_a_wrapper() -> None:
    model, ema = nn.Linear(2, 1), EMAHook(decay=0.5)
    ema.on_train_start(LoopState(model=model))
    assert torch.equal(ema.state_dict()["model"]["weight"], model.weight)
