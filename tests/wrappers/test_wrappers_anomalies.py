"""Parameters that the loss does not reach."""

import logging

import pytest
import torch
from on_ranks import on_ranks
from step_models import HalfUsed, batches, sgd, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stepwrap.wrappers import (
    BaseModel,
    SingleDevice,
    StepDistributedDataParallel,
    detect_anomalous_params,
)
from stepwrap.wrappers.steps.step_checks import watch_gradients


def test_unused_layer_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = SingleDevice(HalfUsed(), detect_anomalous_params=True)
    wrapper = sgd(model)
    with caplog.at_level(logging.ERROR):
        train(model, batches(3), wrapper)
    assert [record.getMessage() for record in caplog.records] == [
        "module.spare.weight with shape torch.Size([1, 6]) is not in the computational graph",
        "module.spare.bias with shape torch.Size([1]) is not in the computational graph",
    ]


def test_the_search_can_be_switched_on_and_off() -> None:
    model = SingleDevice(HalfUsed())
    for detect in (True, True, False, False, True):
        model.detect_anomalous_params = detect
        assert model.detect_anomalous_params is detect


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
    model = nn.ParameterDict({"value": torch.tensor(1.0)})
    assert detect_anomalous_params(model["value"], model) == []
    assert detect_anomalous_params(torch.tensor(1.0), model) == ["value"]


class Checkpointed(BaseModel):
    """A model whose `inner` runs under activation checkpointing and `spare` never runs."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(6, 6), nn.Linear(6, 6)
        self.spare = nn.Linear(6, 6)
        self.use_reentrant = use_reentrant

    def forward(self, inputs: Tensor, target: Tensor, mode: str = "loss") -> dict[str, Tensor]:
        hidden = checkpoint(self.inner, self.first(inputs), use_reentrant=self.use_reentrant)
        return {"loss": hidden.square().mean()}


SPARE = ["spare.weight", "spare.bias"]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_activation_checkpointing(
    use_reentrant: bool, accumulate: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = SingleDevice(Checkpointed(use_reentrant), detect_anomalous_params=True)
    wrapper = sgd(model, accumulative_counts=accumulate)
    with caplog.at_level(logging.ERROR):
        train(model, batches(4), wrapper)
    assert [record.args[0] for record in caplog.records] == [f"module.{n}" for n in SPARE]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_by_hand(use_reentrant: bool) -> None:
    model = Checkpointed(use_reentrant)
    inputs, target = batches(1)[0]
    loss = model(inputs, target)["loss"]
    with watch_gradients(model) as received:
        loss.backward()
    assert detect_anomalous_params(loss, model) == SPARE
    model.zero_grad()
    assert detect_anomalous_params(loss, model, received=received) == SPARE
    if use_reentrant:
        # Gradients were cleared, so `inner` is reported as well, as documented.
        assert detect_anomalous_params(loss, model) == ["inner.weight", "inner.bias", *SPARE]


def test_old_gradients_do_not_count() -> None:
    model = HalfUsed()
    model.spare(torch.ones(1, 6)).sum().backward()
    loss = model.used(torch.ones(1, 6)).sum()
    loss.backward()
    assert detect_anomalous_params(loss, model) == SPARE


@pytest.mark.parametrize("use_reentrant", [False, True])
@on_ranks(2)
def test_activation_checkpointing_under_ddp(use_reentrant: bool) -> None:
    model = StepDistributedDataParallel(
        Checkpointed(use_reentrant), detect_anomalous_params=True, static_graph=True
    )
    optim = sgd(model)
    train(model, batches(3), optim)
    reported: set[tuple[str, ...]] = model._anomalies_seen
    expected = {tuple(f"module.{name}" for name in SPARE)}
    assert reported == expected
