"""Clipping, half precision and averaged weights in configs, compared with plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from marks import slow
from parallel_runs import BATCH, PLAN, Sentences, Transformer, settings
from ranks import run_ranks
from torch import Tensor, nn
from torch.func import functional_call
from weights import apart, whole_weights

from stepwrap.loops import Hook, LoopState
from stepwrap.runner import Runner

SGD = {"type": "SGD", "lr": 0.1, "momentum": 0.9}
PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"wrapper": {"type": "ddp"}}),
    "fsdp": (2, {"wrapper": {"type": "fsdp", "shard": ["Block"]}}),
    "tensor": (1, {"mesh": {"tensor": 2}, "tensor_parallel": {"plan": PLAN}}),
}


@dataclass
class Hand:
    """The same training in plain PyTorch on whole batches.

    Attributes:
        clip: like `clip_grad` of a config.
        cast: dtype of autocast.
        scale: arguments of a `GradScaler`.
        decay: decay of the average of the weights, updated after every step.
        losses: loss of all data with the average, after each epoch.
    """

    clip: dict[str, Any] | None = None
    cast: torch.dtype | None = None
    scale: dict[str, Any] | None = None
    decay: float | None = None
    scales: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    average: dict[str, Tensor] = field(default_factory=dict)

    def train(self, dtype: str) -> dict[str, Tensor]:
        """Return the weights after two epochs."""
        torch.manual_seed(0)
        net = Transformer(dtype)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", enabled=self.scale is not None, **(self.scale or {}))
        self._follow(net)
        for at, batch in enumerate([*Sentences().words.split(BATCH)] * 2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=self.cast, enabled=self.cast is not None):
                loss = nn.functional.cross_entropy(net(batch[:, :-1]), batch[:, 1:])
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            self._clip(net)
            scaler.step(optimizer)
            scaler.update()
            self.scales.append(scaler.get_scale())
            self._follow(net)
            if self.decay is not None and at % 4 == 3:
                self.losses.append(compute_loss(self.average))
        return name_model(net)

    def _clip(self, net: nn.Module) -> None:
        if self.clip is not None:
            options = {name: value for name, value in self.clip.items() if name != "type"}
            by_value = self.clip.get("type") == "value"
            clip: Any = nn.utils.clip_grad_value_ if by_value else nn.utils.clip_grad_norm_
            clip(net.parameters(), **options)

    def _follow(self, net: nn.Module) -> None:
        if self.decay is not None:
            for name, value in name_model(net).items():
                before = self.average.get(name)
                mixed = value if before is None else torch.lerp(before, value, 1 - self.decay)
                self.average[name] = mixed.clone()


def name_model(net: nn.Module) -> dict[str, Tensor]:
    return {f"net.{name}": value.detach().clone() for name, value in net.named_parameters()}


def compute_loss(weights: dict[str, Tensor]) -> float:
    """Return the loss of all data with these weights."""
    params = {name.removeprefix("net."): value for name, value in weights.items()}
    words = Sentences().words
    with torch.no_grad():
        scores = functional_call(Transformer(), params, (words[:, :-1],))
    return nn.functional.cross_entropy(scores, words[:, 1:]).item()


class Watch(Hook):
    """Record the loss scale after every batch, and the losses of evaluations."""

    built: Watch

    def __init__(self) -> None:
        Watch.built = self
        self.scales: list[float] = []
        self.losses: list[float] = []

    def on_batch_end(self, state: LoopState, batch: Any, logs: Any) -> None:
        scaler = getattr(state.optim_wrapper, "loss_scaler", None)
        self.scales.append(1.0 if scaler is None else scaler.get_scale())

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        self.losses += metrics.values()


Outcome = tuple[dict[str, Tensor], list[float], list[float]]


def run(form: str, dtype: str, sections: dict[str, Any]) -> Outcome:
    """Train by a config; return whole weights, scales and losses of evaluations."""
    data_size, where = PLACES[form]
    extra = sections.pop("hooks", {})
    config = settings(data_size, optimizer=SGD, **where, **sections)
    config["model"]["net"]["dtype"] = dtype
    config["hooks"] = {**config["hooks"], **extra, "watch": {"type": Watch}}
    runner = Runner.from_config(config)
    runner.train()
    watch = Watch.built
    return whole_weights(runner.state.model.module), watch.scales, watch.losses


@pytest.mark.parametrize("form", PLACES)
@pytest.mark.parametrize(
    "clip",
    [
        {"type": "value", "clip_value": 0.003},
        {"max_norm": 0.1, "norm_type": 1.0},
        *slow({"type": "norm", "max_norm": 0.1}),
    ],
)
def test_clipping(form: str, clip: dict[str, Any]) -> None:
    expected = Hand(clip).train("float64")
    assert apart(expected, Hand().train("float64")) > 1e-2
    sections = {"optim_wrapper": {"clip_grad": clip}}
    for weights, _, _ in run_ranks(run, 2, form, "float64", sections):
        assert apart(weights, expected) <= 1e-12


# The first update overflows and is skipped; then the scale doubles after every third update.
SCALE = {"init_scale": 2.0**40, "backoff_factor": 2.0**-30, "growth_interval": 3}


@pytest.mark.parametrize("form", PLACES)
def test_float16_with_a_scaled_loss(form: str) -> None:
    """Half batches and split layers round differently: within 2e-4, for weights of about 0.3."""
    amp = {"type": "AmpOptimWrapper", "dtype": "float16", "loss_scale": SCALE}
    hand = Hand(cast=torch.float16, scale=SCALE)
    expected = hand.train("float32")
    assert hand.scales == [2.0**10] * 3 + [2.0**11] * 3 + [2.0**12] * 2
    for weights, scales, _ in run_ranks(run, 2, form, "float32", {"optim_wrapper": amp}):
        assert scales == hand.scales
        assert apart(weights, expected) <= 2e-4


@pytest.mark.parametrize("form", ["fsdp", *slow("ddp", "tensor")])
def test_bfloat16(form: str) -> None:
    """bfloat16 rounds 8 times as coarsely as float16: within 2e-3."""
    amp = {"type": "AmpOptimWrapper", "dtype": "bfloat16"}
    expected = Hand(cast=torch.bfloat16).train("float32")
    for weights, scales, _ in run_ranks(run, 2, form, "float32", {"optim_wrapper": amp}):
        assert set(scales) == {1.0}
        assert apart(weights, expected) <= 2e-3


@pytest.mark.parametrize("form", PLACES)
def test_averaged_weights_are_evaluated(form: str) -> None:
    hand = Hand(decay=0.8)
    expected = hand.train("float64")
    sections = {
        "data": {
            "train": {"dataset": {"type": Sentences}, "batch_size": BATCH // PLACES[form][0]},
            "val": {"dataset": {"type": Sentences}, "batch_size": BATCH // PLACES[form][0]},
        },
        "metrics": {"loss": {"type": "MeanLoss"}},
        "hooks": {"ema": {"decay": 0.8}},
    }
    for weights, _, losses in run_ranks(run, 2, form, "float64", sections):
        assert apart(weights, expected) <= 1e-12
        assert losses == pytest.approx(hand.losses, abs=1e-12)
    assert abs(compute_loss(expected) - hand.losses[-1]) > 1e-3
