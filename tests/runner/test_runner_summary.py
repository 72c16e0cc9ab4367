"""``stepwrap summary``: layers, shapes, parameters and FLOPs of a model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from warm import ended

from stepwrap.parallel import ModelComplexityEstimator
from stepwrap.runner.command.cli import main
from stepwrap.runner.finders.summary import format_quantity, summarize
from stepwrap.wrappers import BaseModel, SupervisedModel


def make_model() -> SupervisedModel:
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(256, 10))
    net[0].requires_grad_(False)
    return SupervisedModel(net, nn.CrossEntropyLoss())


def test_layers_shapes_parameters_and_flops_of_a_model() -> None:
    batch = (torch.rand(2, 1, 8, 8), torch.tensor([0, 1]))
    model_summary = summarize(make_model(), batch)
    assert model_summary.error is None
    rows = {
        layer.name: (layer.kind, layer.shape, layer.parameters) for layer in model_summary.layers
    }
    assert rows["net"] == ("Sequential", (2, 10), 40 + 2570)
    assert rows["net.0"] == ("Conv2d", (2, 4, 8, 8), 40)
    assert rows["net.2"] == ("Linear", (2, 10), 2570)
    assert (model_summary.parameters, model_summary.trainable, model_summary.samples) == (
        2610,
        2570,
        2,
    )
    assert model_summary.size_bytes == 4 * 2610
    # Two operations per product: the convolution has 9 products per output, the layer 256.
    assert model_summary.flops == 2 * (2 * 4 * 64 * 9 + 2 * 10 * 256)


class Attention(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(inputs, inputs, inputs)


def test_attention_and_recurrent_layers_count() -> None:
    """Two products of 64 x 64 x 32 for each head of each sample."""
    attention = SupervisedModel(Attention(), nn.CrossEntropyLoss())
    assert summarize(attention, (torch.rand(2, 2, 64, 32), torch.tensor([0, 1]))).flops == 2097152
    recurrent = SupervisedModel(nn.LSTM(3, 5, batch_first=True), nn.CrossEntropyLoss())
    # Four gates; 2 samples of 7 steps.
    expected = 2 * 2 * 7 * 4 * 5 * (3 + 5)
    assert summarize(recurrent, (torch.rand(2, 7, 3), torch.tensor([0, 1]))).flops == expected


@pytest.mark.parametrize("training", [True, False])
def test_attention_counts_in_an_encoder_as_in_the_estimator(training: bool) -> None:
    net = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).train(training)
    model, inputs = SupervisedModel(net, nn.CrossEntropyLoss()), torch.rand(2, 8, 16)
    model.train(training)
    fast = torch.backends.mha.get_fastpath_enabled()
    assert (
        summarize(model, (inputs, torch.tensor([0, 1]))).flops
        == ModelComplexityEstimator(net, inputs).estimate_complexity()
        # Projections to 3 * 16 and 16, the two layers, and the two products of attention.
        == 2 * 2 * 8 * 16 * (3 * 16 + 16 + 2 * 32) + 2 * 2 * 2 * 8 * 8 * 16
    )
    assert {module.training for module in model.modules()} == {training}
    assert torch.backends.mha.get_fastpath_enabled() == fast


class Broken(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, inputs: Tensor, mode: str = "loss") -> Tensor:
        return self.inner(inputs)


def test_a_forward_that_fails_is_reported_and_leaves_the_model_as_it_was() -> None:
    model = Broken().train()
    model_summary = summarize(model, [torch.rand(2, 4)])
    assert "cannot be multiplied" in str(model_summary.error)
    assert {layer.name: layer.shape for layer in model_summary.layers}["inner"] is None
    assert model_summary.parameters == 12
    assert model.training
    assert not model.inner._forward_hooks


TEXTS = """
import torch
from torch import nn


class Texts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.EmbeddingBag(8, 2)
        self.head = nn.Linear(2, 3)

    def forward(self, text):
        return self.head(self.layer(torch.tensor([[len(one)] for one in text])))


def texts():
    return [{"text": "a"}, {"text": "bcd"}]
"""
OF_TEXTS = {
    "model": {
        "type": "SupervisedModel",
        "input_key": "text",
        "net": {"type": "texts.Texts"},
        "loss": {"type": "CrossEntropyLoss"},
    },
    "data": {"test": {"dataset": {"type": "texts.texts"}, "batch_size": 2}},
}


def test_a_batch_without_tensors_has_no_number_of_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "texts.py").write_text(TEXTS)
    (tmp_path / "config.yaml").write_text(json.dumps(OF_TEXTS))
    for command in ("summary", "check"):
        assert main([command, "config.yaml"]) == 0
        # Two samples with 2 * 3 products each.
        assert re.search("^forward: 24 FLOPs ", capsys.readouterr().out, re.M)


def test_units() -> None:
    assert format_quantity(1_234_567, "FLOPs") == "1.23 MFLOPs"
    assert format_quantity(12, "FLOPs") == "12 FLOPs"


def test_the_command_fits_a_narrow_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["summary", "digits_single"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["layer", "class", "output", "parameters"]
    assert all(len(line) <= 80 for line in lines)
    assert lines[-2].startswith("parameters: ")
    assert "FLOPs for a batch of" in lines[-1]
    assert main(["summary", "digits_single", "--depth", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) < len(lines)
    assert main(["check", "digits_single"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert lines[-2] in shown
    # The totals of a training batch differ.
    assert any(lines[-1].rpartition(", ")[2] in line for line in shown)


@pytest.mark.slow
def test_train_with_profile(tmp_path: Path) -> None:
    words = ["train", "digits_single", "--profile", "train.max_epochs=1", "hooks.profile.steps=5"]
    done = ended("-m", "stepwrap.runner", *words, "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "profile of steps 11 to 15" in done.stderr
    assert (tmp_path / "run" / "profile" / "rank0.json").stat().st_size > 0
