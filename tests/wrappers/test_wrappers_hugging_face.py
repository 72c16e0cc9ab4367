"""Models whose output is a typed mapping with `loss` and more, as those of Hugging Face."""

import re
from collections import OrderedDict
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stepwrap.loops import HookList, LoopState, ValLoop
from stepwrap.loops.metrics.mean_loss import MeanLoss
from stepwrap.wrappers import OptimWrapper, SingleDevice, StepDataParallel, parse_losses

PAGE = (Path(__file__).parents[2] / "docs/extending.md").read_text()


@dataclass
class Output(OrderedDict[str, Any]):
    """Has the shape of `transformers.utils.ModelOutput`: fields that are not None are entries."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Any = None
    aux_loss: Tensor | None = None
    temperature: Tensor | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if (value := getattr(self, field.name)) is not None:
                self[field.name] = value

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("no update")


@dataclass
class LossesOutput(OrderedDict[str, Any]):
    loss_a: Tensor
    loss_b: Tensor
    hidden: Tensor

    def __post_init__(self) -> None:
        self["loss_a"], self["loss_b"] = self.loss_a, self.loss_b
        self["hidden"] = self.hidden


class Cache:
    """Stands for the keys and values of a decoder, which are not tensors."""


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: Tensor, labels: Tensor | None = None, **options: Any) -> Output:
        logits = self.head(inputs)
        loss = None if labels is None else cross_entropy(logits, labels)
        return Output(loss, logits, Cache())


def batch(size: int = 6, *, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 4, generator=generator)
    return {"inputs": inputs, "labels": torch.arange(size) % 3}


def sgd(model: nn.Module) -> OptimWrapper:
    return OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))


def test_outputs_that_are_not_losses_are_ignored() -> None:
    total, logs = parse_losses(Output(torch.tensor(2.0), torch.ones(2, 3), Cache()))
    assert total.item() == 2
    assert {name: value.item() for name, value in logs.items()} == {"loss": 2}


def test_the_loss_is_the_total_and_scalars_are_logged() -> None:
    """The `loss` of a mixture of experts includes its `aux_loss` already."""
    weight = torch.tensor(3.0, requires_grad=True)
    output = Output(weight * 2, aux_loss=weight, temperature=torch.tensor(7))
    total, logs = parse_losses(output)
    total.backward()
    assert weight.grad == 2
    assert {name: value.item() for name, value in logs.items()} == {
        "loss": 6,
        "aux_loss": 3,
        "temperature": 7,
    }
    assert not any(value.requires_grad for value in logs.values())


def test_without_a_field_loss_all_losses_count() -> None:
    output = LossesOutput(torch.tensor(1.0), torch.tensor([2.0, 4.0]), torch.ones(2, 2))
    total, logs = parse_losses(output)
    assert total.item() == 4
    assert {name: value.item() for name, value in logs.items()} == {
        "loss": 4,
        "loss_a": 1,
        "loss_b": 3,
    }


def test_an_output_without_loss_asks_for_labels() -> None:
    text = r"Output has no loss to optimise, only \['aux_loss', 'logits'\]; .* usually as `labels`"
    with pytest.raises(ValueError, match=text):
        parse_losses(Output(logits=torch.ones(2, 3), aux_loss=torch.tensor(1.0)))


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_in_a_plain_dict_every_tensor_is_logged(kind: Any) -> None:
    _, logs = parse_losses(kind(loss=torch.tensor(1.0), logits=torch.ones(2)))
    assert set(logs) == {"loss", "logits"}
    with pytest.raises(TypeError, match="cache is not a tensor or list of tensors, got Cache"):
        parse_losses(kind(loss=torch.tensor(1.0), cache=Cache()))


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_training_equals_a_plain_loop(copies: int) -> None:
    torch.manual_seed(0)
    model, plain = Classifier(), Classifier()
    plain.load_state_dict(model.state_dict())
    wrapper = StepDataParallel(model, ["cpu"] * copies) if copies else SingleDevice(model)
    optim, optimizer = sgd(model), torch.optim.SGD(plain.parameters(), lr=0.1)
    for seed in range(4):
        given = batch(seed=seed)
        logs = wrapper.train_step(given, optim)
        loss = plain(**given).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert set(logs) == {"loss"}
        torch.testing.assert_close(logs["loss"], loss.detach())
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


def test_evaluation_returns_what_metrics_need() -> None:
    wrapper = SingleDevice(Classifier())
    batches = [batch(6), batch(3, seed=1)]
    state = LoopState(model=wrapper)
    results = ValLoop(batches, {"loss": MeanLoss()}).run(state, HookList())
    losses = [wrapper.module(**one).loss.item() for one in batches]
    assert results["loss"] == pytest.approx((2 * losses[0] + losses[1]) / 3)
    outputs = wrapper.val_step(batches[0])
    assert isinstance(outputs, Output)
    assert torch.equal(outputs["preds"], outputs.logits)
    assert torch.equal(outputs["target"], batches[0]["labels"])


def test_the_example_of_the_page_trains(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    section = PAGE.split("\n## A Hugging Face model\n")[1].split("\n## ")[0]
    for language, file in (("python", "sequences.py"), ("yaml", "gpt2.yaml")):
        (code,) = re.findall(rf"```{language}\n(.*?)```", section, flags=re.DOTALL)
        (tmp_path / file).write_text(code)
    text = run("-m", "stepwrap.runner", "train", "gpt2.yaml", cwd=tmp_path)
    losses = [float(one) for one in re.findall(r"^val .* loss ([\d.]+)$", text, re.MULTILINE)]
    assert losses[-1] < losses[0] / 2
    assert "logits" not in (tmp_path / "runs/gpt2/metrics.jsonl").read_text()
