"""Weighted losses of copies on two devices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stepwrap.wrappers import OptimWrapper, StepDataParallel, SupervisedModel

pytestmark = pytest.mark.pretend


@pytest.mark.parametrize("devices", [[0, 1], [0, 1, 0]])
@pytest.mark.parametrize("ignored", [3, 4, 8])
def test_tokens_of_two_devices(ignored: int, devices: list[int]) -> None:
    """The loss of a batch is the mean over its targets, even if the second copy has none."""
    torch.manual_seed(0)
    net = nn.Linear(3, 5)
    inputs, targets = torch.randn(8, 3), torch.randint(5, (8,))
    targets[8 - ignored :] = -100
    loss = nn.functional.cross_entropy(net(inputs), targets, reduction="sum") / max(8 - ignored, 1)
    expected = torch.autograd.grad(loss, net.weight)[0]
    model = SupervisedModel(net, nn.CrossEntropyLoss()).cuda()
    wrapper = StepDataParallel(model, devices)
    optim = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=1.0), loss_weight="tokens")
    before = net.weight.detach().clone()
    wrapper.train_step((inputs, targets), optim)
    assert torch.allclose((before - net.weight).cpu(), expected, atol=1e-6)
