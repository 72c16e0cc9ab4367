"""The optimised loss and the logged values; models with typed outputs like Hugging Face's."""

import re
from collections import OrderedDict
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from step_models import sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from warm import run

from stepwrap.loops import HookList, LoopState, ValLoop
from stepwrap.loops.metrics.mean_loss import MeanLoss
from stepwrap.wrappers import SingleDevice, StepDataParallel, parse_losses
from stepwrap.wrappers.steps import step_checks


def values(logs: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in logs.items()}


def test_sum_of_tensors_and_lists() -> None:
    total, logs = parse_losses(
        {"loss_cls": torch.tensor(1.0), "loss_list": [torch.tensor(2.0), torch.tensor([1.0, 5.0])]}
    )
    assert total.item() == 6
    assert list(logs) == ["loss", "loss_cls", "loss_list"]
    assert [value.item() for value in logs.values()] == [6, 1, 5]


def test_total_keeps_its_name() -> None:
    total, logs = parse_losses(
        {"loss": torch.tensor(1.0), "loss_b": torch.tensor(2.0), "acc": torch.tensor(9.0)}
    )
    assert total.item() == 3
    assert values(logs) == {"loss": 3, "loss_b": 2, "acc": 9, "loss_raw": 1}
    assert next(iter(logs)) == "loss"


class Autoencoder(nn.Module):
    """A model that returns its total as a loss of its own if it is named ``total``."""

    def __init__(self, total: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.total = nn.Linear(3, 3), total

    def forward(self, x: Tensor, mode: str) -> dict[str, Tensor]:
        rebuilt = self.linear(x)
        recon, penalty = (rebuilt - x).square().mean(), 0.1 * rebuilt.square().mean()
        return {self.total: recon + penalty, "recon_loss": recon, "kl_loss": penalty}


@pytest.mark.parametrize(("total", "factor"), [("loss", 2), ("loss_scaled", 2), ("sum", 1)])
def test_a_total_among_the_losses_is_reported_once(
    total: str, factor: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training minimizes twice the sum, as with mmengine."""
    monkeypatch.setattr(step_checks, "_compared_losses", set())
    model, x = Autoencoder(total), torch.randn(4, 3)
    plain = Autoencoder(total)
    (factor * plain(x, "loss")[total]).backward()
    expected = plain.linear.weight.detach() - 0.1 * plain.linear.weight.grad
    wrapper = SingleDevice(model)
    optim_wrapper = sgd(wrapper, lr=0.1)
    wrapper.train_step([x], optim_wrapper)
    torch.testing.assert_close(model.linear.weight.detach(), expected)
    wrapper.train_step([x], optim_wrapper)
    text = "the entry 'loss' is the sum of recon_loss, kl_loss, and all of them are added"
    assert [text in message for message in caplog.messages] == [True] * (total == "loss")


def test_losses_that_are_no_total_are_not_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_checks, "_compared_losses", set())
    for loss, dtype in ((3.0, torch.float32), (0.0, torch.float32), (3.0, torch.bfloat16)):
        step_checks._compared_losses.clear()
        values = {"loss": loss, "a_loss": loss / 2, "b_loss": loss / 2 + (loss > 0) / 16}
        parse_losses({name: torch.tensor(v, dtype=dtype) for name, v in values.items()})
    parse_losses({"loss": torch.tensor(2.0), "a_loss": torch.tensor(1.0)})
    # The values of later steps are not compared.
    parse_losses({"loss": torch.tensor(2.0), "a_loss": torch.tensor(2.0)})
    assert caplog.messages == []


@pytest.mark.parametrize("losses", [{"acc": torch.tensor(9.0)}, {}, {"loss": []}])
def test_no_loss(losses: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="no loss to optimise.*" + "".join(losses)):
        parse_losses(losses)


def test_logs_are_detached_and_the_total_is_not() -> None:
    weight = torch.ones(3, requires_grad=True)
    total, logs = parse_losses({"loss_a": weight, "loss_b": [weight * 2], "acc": weight.sum()})
    assert not any(value.requires_grad for value in logs.values())
    total.backward()
    assert torch.allclose(weight.grad, torch.ones(3))


def test_names_that_contain_loss_count() -> None:
    total, _ = parse_losses({"closs": torch.tensor(1.0), "my_losses": torch.tensor([2.0, 4.0])})
    assert total.item() == 4


def test_integers_are_logged_with_all_bits_and_leave_the_dtype_of_the_loss() -> None:
    odd = 2**24 + 1
    integers = {"correct": torch.tensor([1, 2]), "tokens": torch.tensor(odd)}
    more = {"flags": [torch.tensor(True), torch.tensor(True)], "loss_b": torch.tensor(2)}
    total, logs = parse_losses({"loss": torch.tensor(1.0), **integers, **more})
    assert values(logs) == {
        "loss": 3,
        "correct": 1.5,
        "tokens": odd,
        "flags": 2,
        "loss_b": 2,
        "loss_raw": 1,
    }
    assert logs["tokens"].dtype == torch.float64
    assert total.dtype == torch.float32


def test_an_empty_list_is_ignored_if_there_is_another_loss() -> None:
    total, logs = parse_losses({"loss_a": torch.tensor(1.0), "loss_b": []})
    assert total.item() == 1
    assert list(logs) == ["loss", "loss_a"]


@pytest.mark.parametrize("value", [1.0, (torch.tensor(1.0),), [1.0], None])
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="loss_x is not a tensor or list of tensors"):
        parse_losses({"loss_x": value})


def test_a_bare_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="dict of losses, got Tensor"):
        parse_losses(torch.tensor(1.0))


PAGE = (Path(__file__).parents[2] / "docs/extending.md").read_text()


@dataclass
class Output(OrderedDict[str, Any]):
    """An output like `transformers.utils.ModelOutput`: fields that are not None are entries."""

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
    """A stand-in for a decoder's cache of keys and values, which is not a tensor."""


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


def test_outputs_that_are_not_losses_are_ignored() -> None:
    total, logs = parse_losses(Output(torch.tensor(2.0), torch.ones(2, 3), Cache()))
    assert total.item() == 2
    assert values(logs) == {"loss": 2}


def test_the_loss_is_the_total_and_scalars_are_logged() -> None:
    """The `loss` of a mixture of experts already includes its `aux_loss`."""
    weight = torch.tensor(3.0, requires_grad=True)
    output = Output(weight * 2, aux_loss=weight, temperature=torch.tensor(7))
    total, logs = parse_losses(output)
    total.backward()
    assert weight.grad == 2
    assert values(logs) == {"loss": 6, "aux_loss": 3, "temperature": 7}
    assert not any(value.requires_grad for value in logs.values())


def test_without_a_field_loss_all_losses_count() -> None:
    output = LossesOutput(torch.tensor(1.0), torch.tensor([2.0, 4.0]), torch.ones(2, 2))
    total, logs = parse_losses(output)
    assert total.item() == 4
    assert values(logs) == {"loss": 4, "loss_a": 1, "loss_b": 3}


def test_an_output_without_loss_asks_for_labels() -> None:
    text = r"Output has no loss to optimise, only \['aux_loss', 'logits'\]; .* usually as `labels`"
    with pytest.raises(ValueError, match=text):
        parse_losses(Output(logits=torch.ones(2, 3), aux_loss=torch.tensor(1.0)))


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_in_a_plain_dict_every_tensor_is_logged(kind: Any) -> None:
    _, logs = parse_losses(kind(loss=torch.tensor(1.0), logits=torch.ones(2)))
    assert set(logs) == {"loss", "logits"}
    with pytest.raises(TypeError, match="cache .*not a tensor .* Cache"):
        parse_losses(kind(loss=torch.tensor(1.0), cache=Cache()))


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_training_equals_a_plain_loop(copies: int) -> None:
    torch.manual_seed(0)
    model, plain = Classifier(), Classifier()
    plain.load_state_dict(model.state_dict())
    wrapper = StepDataParallel(model, ["cpu"] * copies) if copies else SingleDevice(model)
    optim, optimizer = sgd(model), torch.optim.SGD(plain.parameters(), lr=0.1)
    for seed in range(4):
        inputs = batch(seed=seed)
        logs = wrapper.train_step(inputs, optim)
        loss = plain(**inputs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert set(logs) == {"loss"}
        torch.testing.assert_close(logs["loss"], loss.detach())
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


def test_evaluation_returns_predictions_and_targets() -> None:
    wrapper = SingleDevice(Classifier())
    batches = [batch(6), batch(3, seed=1)]
    state = LoopState(model=wrapper)
    results = ValLoop(batches, {"loss": MeanLoss()}).run(state, HookList())
    losses = [wrapper.module(**inputs).loss.item() for inputs in batches]
    assert results["loss"] == pytest.approx((2 * losses[0] + losses[1]) / 3)
    outputs = wrapper.val_step(batches[0])
    assert isinstance(outputs, Output)
    assert torch.equal(outputs["preds"], outputs.logits)
    assert torch.equal(outputs["target"], batches[0]["labels"])


@pytest.mark.slow
def test_the_example_of_the_page_trains(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    section = PAGE.split("\n## A Hugging Face model\n")[1].split("\n## ")[0]
    for language, file in (("python", "sequences.py"), ("yaml", "gpt2.yaml")):
        (code,) = re.findall(rf"```{language}\n(.*?)```", section, flags=re.DOTALL)
        (tmp_path / file).write_text(code)
    text = run("-m", "stepwrap.runner", "train", "gpt2.yaml", cwd=tmp_path)
    losses = [float(loss) for loss in re.findall(r"^val .* loss ([\d.]+)$", text, re.MULTILINE)]
    assert losses[-1] < losses[0] / 2
    assert "logits" not in (tmp_path / "runs/gpt2/metrics.jsonl").read_text()
