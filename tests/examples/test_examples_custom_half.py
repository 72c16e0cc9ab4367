"""Worked steps that compute gradients themselves, in float16 and with a loss scale."""

from typing import Any

import custom_step_runs as runs
import gradient_penalty
import pytest
import sam
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stepwrap.configs.digits import Digits, SmallCNN
from stepwrap.wrappers import AmpOptimWrapper, SingleDevice, SupervisedModel

# So small that the gradients of an unscaled loss are zero in float16.
FACTOR = 1e-6
RADIUS, WEIGHT = 0.05, 1e6


class SmallLoss(nn.CrossEntropyLoss):
    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        return FACTOR * super().forward(scores, labels)


def model() -> SupervisedModel:
    torch.manual_seed(0)
    return SupervisedModel(SmallCNN(width=4, dropout=0.0), SmallLoss())


def batches() -> list[list[Tensor]]:
    data = Digits("train", "float32")
    return [[data.images[at : at + 16], data.labels[at : at + 16]] for at in range(0, 64, 16)]


def half() -> Any:
    return torch.autocast("cpu", dtype=torch.float16)


def compute_loss(net: nn.Module, batch: list[Tensor]) -> Tensor:
    with half():
        return FACTOR * cross_entropy(net(batch[0]), batch[1])


def plain_sam(net: nn.Module, batch: list[Tensor], scaler: Any) -> None:
    weights = list(net.parameters())
    slopes = torch.autograd.grad(scaler.scale(compute_loss(net, batch)), weights)
    slopes = tuple(slope / scaler.get_scale() for slope in slopes)
    norm = torch.cat([slope.flatten() for slope in slopes]).norm()
    assert norm > 0
    before = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for param, slope in zip(weights, slopes, strict=True):
            param += RADIUS * slope / norm
    (scaler.scale(compute_loss(net, batch)) / 2).backward()
    with torch.no_grad():
        for param, weight in zip(weights, before, strict=True):
            param.copy_(weight)


def plain_penalty(net: nn.Module, batch: list[Tensor], scaler: Any) -> None:
    images = batch[0].clone().requires_grad_()
    loss = compute_loss(net, [images, batch[1]])
    (slope,) = torch.autograd.grad(scaler.scale(loss) * len(images), images, create_graph=True)
    slope = slope / scaler.get_scale()
    penalty = WEIGHT * slope.flatten(1).square().sum(1).mean()
    (scaler.scale(loss + penalty) / 2).backward()


@pytest.mark.parametrize(
    ("cls", "backward", "lost"),
    # An infinite slope is logged.
    [(sam.SharpnessAwareDDP, plain_sam, 0), (gradient_penalty.SmoothDDP, plain_penalty, 2)],
)
def test_small_gradients_are_not_lost(
    cls: Any, backward: Any, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights equal plain PyTorch, with accumulation and an initial scale that is too large."""
    monkeypatch.setattr(gradient_penalty, "WEIGHT", WEIGHT)
    init_scale, scales = 2.0**40, {"init_scale": 2.0**40, "backoff_factor": 2.0**-16}
    plain = model().net
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", **scales)
    data = batches() * 2
    for at, batch in enumerate(data):
        backward(plain, batch, scaler)
        if at % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    wrapper: Any = runs.rebased(cls, SingleDevice)(model())
    amp = AmpOptimWrapper(
        torch.optim.AdamW(wrapper.parameters(), lr=3e-3), 2, dtype="float16", loss_scale=scales
    )
    logs = [wrapper.train_step(batch, amp) for batch in data]
    assert amp.loss_scaler.get_scale() == scaler.get_scale() < init_scale
    assert all(torch.stack([*log.values()]).isfinite().all() for log in logs[lost:])
    expected = dict(plain.state_dict())
    for name, value in wrapper.module.net.state_dict().items():
        assert (value - expected[name]).abs().max() <= 1e-5, name
