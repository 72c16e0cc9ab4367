"""A small network and its training, for the tests of parameter groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stepwrap.wrappers import param_groups


def grouped(model: nn.Module, **paramwise: Any) -> list[dict[str, Any]]:
    return param_groups(model, lr=1.0, weight_decay=0.5, paramwise=paramwise)


def train(model: nn.Module, groups: list[dict[str, Any]], cls: Any, **kwargs: Any) -> list[Tensor]:
    optimizer = cls(groups, **kwargs)
    for step in range(3):
        optimizer.zero_grad()
        inputs = torch.arange(12.0).reshape(3, 4).double() + step
        model(inputs).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()
