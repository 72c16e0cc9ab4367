"""Loss weights on one device: weights of batches, windows, errors."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from step_models import batches, classifier, flat, sgd, train
from torch import Tensor, nn
from weighted_models import SAMPLES, Tagger, difference, global_batch, split

from stepwrap.wrappers import (
    AmpOptimWrapper,
    LossWeight,
    OptimWrapper,
    OptimWrapperDict,
    SingleDevice,
    SupervisedModel,
)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


@pytest.mark.parametrize(
    ("setting", "batch", "weight"),
    [
        ("samples", [torch.zeros(3, 2), torch.zeros(3)], 3),
        ("samples", {"id": torch.tensor(7), "inputs": torch.zeros(5, 2)}, 5),
        ("samples", {"inputs": [torch.zeros(3, 8, 8), torch.zeros(3, 9, 9)]}, 2),
        ("samples", ({"a": "text"}, {"b": torch.zeros(4)}), 4),
        ("samples", torch.zeros(3, 2), 3),
        ("tokens", [torch.zeros(2, 3), torch.tensor([[1, -100, 0], [-100, -100, 2]])], 3),
        ("tokens", {"inputs": torch.zeros(2), "labels": torch.tensor([1, -100])}, 1),
        ("tokens", {"target": torch.tensor([0, 1])}, 2),
        ("tokens", [0, torch.tensor([[-100] * 70, [1] * 70]).T], 70),
        ("tokens", [0, torch.tensor([[-100] * 700, [1] * 700]).T], 700),
        ({"key": "mask"}, {"mask": torch.tensor([[True, False], [True, True]])}, 3),
        ({"key": 2}, (0, 0, torch.tensor([0.25, 0.5])), 0.75),
        ({"key": "count"}, {"count": 6}, 6),
        (len, [1, 2, 3], 3),
        ("builtins.len", [1, 2], 2),
        (lambda batch: torch.tensor([2.5]), None, 2.5),
    ],
)
def test_weight_of_a_batch(setting: Any, batch: Any, weight: float) -> None:
    assert LossWeight(setting).of(batch) == weight


def test_tokens_are_those_that_the_loss_counts(caplog: pytest.LogCaptureFixture) -> None:
    """Padding with 0; accumulated windows equal the whole batch."""
    torch.manual_seed(0)
    inputs, target = torch.randn(8, 5, dtype=torch.float64), torch.tensor([1, 0, 0, 2, 0, 0, 0, 1])

    def train_in(micro_batches: int) -> Tensor:
        torch.manual_seed(1)
        loss = nn.CrossEntropyLoss(ignore_index=0)
        model = SupervisedModel(nn.Linear(5, 3, dtype=torch.float64), loss)
        wrapper = SingleDevice(model)
        optim = OptimWrapper(
            _optimizer(model), accumulative_counts=micro_batches, loss_weight="tokens"
        )
        for batch in zip(inputs.chunk(micro_batches), target.chunk(micro_batches), strict=True):
            wrapper.train_step(list(batch), optim)
        return model.net.weight.detach()

    assert (train_in(4) - train_in(1)).abs().max() <= 1e-15
    assert not caplog.records


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (nn.CrossEntropyLoss(weight=torch.ones(3)), "class weights"),
        (nn.MSELoss(reduction="sum"), 'reduction="sum"'),
    ],
)
def test_a_loss_that_is_no_plain_mean_is_reported_once(
    loss: nn.Module, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    weight, model = LossWeight("samples"), SupervisedModel(nn.Linear(2, 3), loss)
    for _ in range(2):
        assert weight.of([torch.zeros(4, 2), torch.zeros(4)], model) == 4
    (message,) = caplog.messages
    assert text in message
    assert type(loss).__name__ in message


@pytest.mark.parametrize(
    ("setting", "error", "text"),
    [
        ("token", ValueError, "must be samples, tokens.* got 'token'; did you mean tokens"),
        ({"keys": "mask"}, ValueError, "must be {key: name or index}, got {'keys': 'mask'}"),
        ({"key": 1.5}, ValueError, "must be {key: name or index}"),
        (3, TypeError, "a function or its import path, got 3"),
        ("weighted_models.count_of_masks", ImportError, "did you mean count_of_mask"),
        ("weighted_models.SAMPLES", TypeError, "weighted_models.SAMPLES must be a function"),
    ],
)
def test_wrong_settings(setting: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        OptimWrapper(_optimizer(nn.Linear(1, 1)), loss_weight=setting)


@pytest.mark.parametrize(
    ("setting", "batch", "error", "text"),
    [
        (
            "tokens",
            {"image": torch.zeros(2), "class": torch.zeros(2)},
            KeyError,
            r"needs an entry labels, targets or target .* keys \['image', 'class'\].*{key: ...}",
        ),
        ("tokens", [torch.zeros(2)], KeyError, "needs a second entry .* has 1 entries"),
        ("tokens", [0, [1, 2]], TypeError, "needs targets in a tensor, got list"),
        ("tokens", torch.zeros(3, 2), KeyError, "needs a second entry .* is of type Tensor"),
        ({"key": 0}, torch.zeros(3, 2), KeyError, "needs that entry, .* is of type Tensor"),
        ("samples", {"text": "a"}, KeyError, r"needs a tensor, but the batch has the keys"),
        ({"key": "mask"}, {"masks": 1}, KeyError, r"'mask'.* needs that entry, .*\['masks'\]"),
        (
            {"key": "mask"},
            {"mask": [1, 0]},
            TypeError,
            "'mask'}.* got list: convert it to a tensor",
        ),
        ({"key": 0}, [np.ones(2)], TypeError, "'key': 0}.* got ndarray: convert it to a tensor"),
        (lambda batch: -1, [], ValueError, "at least 0, got -1"),
        (lambda batch: math.nan, [], ValueError, "finite number of at least 0, got nan"),
        (lambda batch: torch.ones(2), [], ValueError, r"one number for a batch, got shape \(2,\)"),
    ],
)
def test_batches_that_cannot_be_weighed(
    setting: Any, batch: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        LossWeight(setting).of(batch)


def test_one_batch_for_an_update_is_exact() -> None:
    """Without anything to average, no bit changes."""
    weights = []
    for setting in (None, "samples"):
        model = SingleDevice(classifier())
        optim_wrapper = sgd(model, momentum=0.9, loss_weight=setting)
        train(model, batches(4), optim_wrapper)
        weights.append(flat(model))
    assert torch.equal(*weights)
    assert optim_wrapper.last_weight == 4


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_nan_gradients_of_a_window_of_weight_zero_become_zero(kind: Any) -> None:
    """The weight is a tensor on an accelerator, which must not be compared in Python."""
    for weight, gradient in ((0.0, 0.0), (4.0, math.nan)):
        parameter = nn.Parameter(torch.ones(2))
        optim_wrapper = OptimWrapper(
            torch.optim.SGD([parameter], lr=1.0), accumulative_counts=2, loss_weight="samples"
        )
        parameter.grad = torch.full((2,), math.nan)
        optim_wrapper.window_weight = kind(weight)
        optim_wrapper.window.unit = 4.0
        optim_wrapper.step()
        expected = torch.full((2,), 1 - gradient)
        torch.testing.assert_close(parameter.detach(), expected, equal_nan=True)


def test_windows_end_with_a_pass() -> None:
    """Two passes of five micro-batches have windows of 3, 2, 3 and 2."""
    flat_weights, updates = [], []
    data = batches(5, size=2)
    model = SingleDevice(classifier(torch.float64))
    data = [[inputs.double(), target] for inputs, target in data]
    optim_wrapper = sgd(model, accumulative_counts=3, loss_weight="samples")
    optim_wrapper.initialize_count_status(model, 0, 10)
    for start in (0, 5):
        # The length of a pass may be given later.
        optim_wrapper.begin_pass(start, None)
        for index, batch in enumerate(data):
            if index == 4:
                optim_wrapper.begin_pass(start, 5)
            model.train_step(batch, optim_wrapper)
            if optim_wrapper.should_update():
                updates.append(optim_wrapper.inner_count)
    flat_weights.append(flat(model))
    undivided = SingleDevice(classifier(torch.float64))
    plain = sgd(undivided)
    for pass_data in (data[:3], data[3:]) * 2:
        inputs, target = zip(*pass_data, strict=True)
        undivided.train_step([torch.cat(inputs), torch.cat(target)], plain)
    flat_weights.append(flat(undivided))
    assert updates == [3, 5, 8, 10]
    torch.testing.assert_close(*flat_weights, rtol=0, atol=1e-12)


def test_without_weights_windows_continue_over_a_pass() -> None:
    optim_wrapper = sgd(classifier(), accumulative_counts=3)
    optim_wrapper.begin_pass(5, 4)
    assert [count for count in range(12) if _updates_at(optim_wrapper, count)] == [0, 3, 6, 9]


def _updates_at(optim_wrapper: OptimWrapper, count: int) -> bool:
    optim_wrapper._inner_count = count
    return optim_wrapper.should_update()


class _Masked(nn.Module):
    """A mean over a mask, which is NaN if the mask is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, values: Tensor, mask: Tensor, mode: str = "loss") -> dict[str, Tensor]:
        return {"loss": (self.weight * values * mask).sum() / mask.sum()}


@pytest.mark.parametrize("counts", [1, 2])
def test_a_window_of_weight_0_gives_gradients_of_0(counts: int) -> None:
    model = SingleDevice(_Masked())
    optim_wrapper = sgd(model, accumulative_counts=counts, loss_weight={"key": "mask"})
    values = torch.tensor([2.0, 4.0])
    for _ in range(counts):
        model.train_step({"values": values, "mask": torch.zeros(2)}, optim_wrapper)
    assert optim_wrapper.last_weight == 0
    assert model.module.weight.item() == 1
    for _ in range(counts):
        model.train_step({"values": values, "mask": torch.ones(2)}, optim_wrapper)
    assert model.module.weight.item() == pytest.approx(1 - 0.1 * 3)


def test_a_batch_that_does_not_count_has_no_weight() -> None:
    model = SingleDevice(classifier(torch.float64))
    optim_wrapper = sgd(model, accumulative_counts=2, loss_weight="samples")
    counted, other = batches(2, dtype=torch.float64)
    model.train_step(counted, optim_wrapper)
    optim_wrapper.batch_counts = False
    model.train_step(other, optim_wrapper)
    assert optim_wrapper.last_weight == 0
    alone = SingleDevice(classifier(torch.float64))
    alone.train_step(counted, sgd(alone))
    torch.testing.assert_close(flat(model), flat(alone), rtol=0, atol=1e-12)


def test_each_micro_batch_must_be_weighed() -> None:
    model = classifier()
    optim_wrapper = sgd(model, loss_weight="samples")
    inputs, target = batches(1)[0]
    with pytest.raises(RuntimeError, match=r"call optim_wrapper.weigh\(batch\)"):
        optim_wrapper.update_params(model(inputs, target, mode="loss")["loss"])
    optim_wrapper.weigh([inputs, target])
    optim_wrapper.update_params(model(inputs, target, mode="loss")["loss"])
    with pytest.raises(RuntimeError, match=r"call optim_wrapper.weigh\(batch\)"):
        optim_wrapper.backward(model(inputs, target, mode="loss")["loss"])
    with pytest.raises(RuntimeError, match=r"call optim_wrapper.weigh\(batch\)"):
        optim_wrapper.step()
    # A custom step may always call it.
    sgd(model).weigh([inputs, target])


def test_a_bare_model_weighs_by_itself() -> None:
    model, wrapped = classifier(torch.float64), SingleDevice(classifier(torch.float64))
    for module in (model, wrapped):
        optim_wrapper = sgd(module, accumulative_counts=2, loss_weight="samples")
        for size in (1, 5):
            module.train_step(batches(1, size, torch.float64)[0], optim_wrapper)
    assert torch.equal(flat(model), flat(wrapped))


def test_cleared_gradients_have_no_weight() -> None:
    """After a failed step the window continues with its remaining batches."""
    model = SingleDevice(classifier(torch.float64))
    optim_wrapper = sgd(model, accumulative_counts=3, loss_weight="samples")
    batch_1, *later_batches = batches(3, dtype=torch.float64)
    model.train_step(batch_1, optim_wrapper)
    optim_wrapper.zero_grad()
    train(model, later_batches, optim_wrapper)
    alone = SingleDevice(classifier(torch.float64))
    plain = sgd(alone, accumulative_counts=2)
    train(alone, later_batches, plain)
    torch.testing.assert_close(flat(model), flat(alone), rtol=0, atol=1e-12)


def test_the_unit_is_saved() -> None:
    """Otherwise a resumed float16 run overflows at other steps than an uninterrupted one."""
    model = SingleDevice(classifier())
    optim_wrapper = sgd(model, accumulative_counts=2, loss_weight="samples")
    train(model, batches(2, size=48), optim_wrapper)
    state = optim_wrapper.state_dict()
    assert state["stepwrap.loss_unit"] == 32
    again = sgd(model, accumulative_counts=2, loss_weight="samples")
    again.load_state_dict(state)
    again.weigh(batches(1, size=4)[0], model)
    assert again.scale_loss(torch.tensor(1.0)).item() == 4 / 32
    sgd(model).load_state_dict(state)
    assert "stepwrap.loss_unit" not in sgd(model).state_dict()


def test_members_are_weighed_together() -> None:
    net = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
    group = OptimWrapperDict(
        a=sgd(net["a"], accumulative_counts=2, loss_weight="samples"), b=sgd(net["b"])
    )
    assert group.loss_weight is group["a"].loss_weight
    assert OptimWrapperDict(b=sgd(net["b"])).loss_weight is None
    group.weigh([torch.zeros(3)])
    assert group.last_weight == group["a"].last_weight == 3
    group.batch_counts = False
    group.weigh([torch.zeros(3)])
    assert group.last_weight == 0
    assert not group.batch_counts
    group.begin_pass(0, 3)
    assert [count for count in range(1, 5) if _updates_at(group["a"], count)] == [2, 3, 4]


def test_a_closure_weighs_by_itself() -> None:
    optimizer = torch.optim.LBFGS(nn.Linear(2, 1).parameters())
    with pytest.raises(ValueError, match="LBFGS .*closure needs loss_weight=None"):
        OptimWrapper(optimizer, loss_weight="samples")


def test_float16_stays_in_range() -> None:
    """A loss times thousands of tokens and times the scale would overflow."""
    model = SingleDevice(Tagger("tokens", torch.float32))
    options = {"loss_scale": 2.0**12, "loss_weight": lambda b: 1e6 * len(b["labels"]) / SAMPLES}
    optim_wrapper = AmpOptimWrapper(_optimizer(model), 2, dtype="float16", **options)
    batch = global_batch(0, torch.float32)
    batch["labels"][:3] = 1
    train(model, split(batch, 2, seed=0), optim_wrapper)
    assert optim_wrapper.loss_scaler.get_scale() == 2.0**12
    assert difference(model.module.state_dict(), Tagger("tokens", torch.float32).state_dict()) > 0


def test_a_second_backward_of_weight_0_keeps_the_gradients_of_the_first() -> None:
    layer = nn.Linear(2, 1)
    optim = OptimWrapper(torch.optim.SGD(layer.parameters(), lr=1.0), loss_weight="samples")
    before = layer.weight.detach().clone()
    for rows in (3, 0):
        optim.weigh([torch.ones(rows, 2)])
        optim.backward(optim.scale_loss(layer(torch.ones(rows, 2)).sum()))
    optim.step()
    assert not torch.equal(layer.weight, before)
