"""Parameters that the loss does not reach (C-8)."""

import logging

import pytest
import torch
from step_models import HalfUsed, batches, sgd
from torch import nn

from stepwrap.wrappers import SingleDevice, detect_anomalous_params


def test_unused_layer_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = SingleDevice(HalfUsed(), detect_anomalous_params=True)
    wrapper = sgd(model)
    with caplog.at_level(logging.ERROR):
        for batch in batches(3):
            model.train_step(batch, wrapper)
    assert [record.getMessage() for record in caplog.records] == [
        "module.spare.weight with shape torch.Size([1, 6]) is not in the computational graph",
        "module.spare.bias with shape torch.Size([1]) is not in the computational graph",
    ]


def test_returns_the_names_and_logs_every_distinct_set(caplog: pytest.LogCaptureFixture) -> None:
    model = HalfUsed()
    inputs = torch.ones(1, 6)
    spare = ["spare.weight", "spare.bias"]
    used = ["used.weight", "used.bias"]
    with caplog.at_level(logging.ERROR):
        assert detect_anomalous_params(model.used(inputs).sum(), model) == spare
        assert detect_anomalous_params(model.spare(inputs).sum(), model) == used
        assert detect_anomalous_params(model.used(inputs).sum(), model) == spare
    assert len(caplog.records) == 4
    both = model.used(inputs).sum() + model.spare(inputs).sum()
    assert detect_anomalous_params(both, model) == []
    model.spare.requires_grad_(False)
    assert detect_anomalous_params(model.used(inputs).sum(), model) == []


def test_deep_graphs_after_backward() -> None:
    layer = nn.Linear(1, 1)
    loss = layer.weight.sum()
    for _ in range(20_000):
        loss = loss * 1.0
    loss.backward()
    assert detect_anomalous_params(loss, layer) == ["bias"]


def test_leaves_and_constants_as_loss() -> None:
    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.tensor(1.0))

    model = Scalar()
    assert detect_anomalous_params(model.value, model) == []
    assert detect_anomalous_params(torch.tensor(1.0), model) == ["value"]
