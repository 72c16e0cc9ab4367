"""Half precision with parameters on two devices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stepwrap.wrappers import AmpOptimWrapper

pytestmark = pytest.mark.pretend


def test_an_update_is_skipped_if_both_devices_overflow() -> None:
    """Fused steps look for a flag of 1, and torch adds up the flags of the devices."""
    parameters = [nn.Parameter(torch.ones(2, device=f"cuda:{index}")) for index in (0, 1)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    amp = AmpOptimWrapper(optimizer, dtype="float16", loss_scale={"init_scale": 4.0})
    for gradient in (1.0, float("inf"), 1.0):
        before = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 4.0 * gradient)
        amp.loss_scaler.scale(torch.ones((), device="cuda:0"))
        amp.step()
        amp.zero_grad()
        for parameter, weights in zip(parameters, before, strict=True):
            assert torch.equal(parameter, weights) == (gradient == float("inf"))
            assert parameter.isfinite().all()
