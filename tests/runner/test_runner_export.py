"""`stepwrap export` and `export_model`: exported files, and models that are refused."""

from __future__ import annotations

import resource
import warnings
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import slow
from programs import run as run_program
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.onnx import ONNXProgram

from stepwrap.runner import ExportError, export_model, load_model
from stepwrap.runner.command.cli import main
from stepwrap.wrappers import BaseModel, DataPreprocessor, SupervisedModel

Capture = pytest.CaptureFixture[str]

LOAD = {
    "pt2": "import torch; model = torch.export.load('model.pt2').module(); out = model(x)",
    "onnx": (
        "import onnxruntime; model = onnxruntime.InferenceSession('model.onnx'); "
        "out = torch.from_numpy(model.run(None, {'input0': x.numpy()})[0])"
    ),
    "safetensors": (
        "from torch import nn; from safetensors.torch import load_file; "
        "w = load_file('model.safetensors'); out = nn.functional.linear(x, w['net.weight'], "
        "w['net.bias'])"
    ),
}


def _net() -> SupervisedModel:
    return SupervisedModel(nn.Linear(2, 3), nn.CrossEntropyLoss())


def _batch(size: int = 4) -> list[Tensor]:
    return [torch.rand(size, 2), torch.zeros(size, dtype=torch.long)]


@pytest.mark.parametrize("kind", ["safetensors", *slow("pt2", "onnx")])
def test_files_are_loaded_without_stepwrap(kind: str, tmp_path: Path) -> None:
    model = _net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export = export_model(model, tmp_path / f"model.{kind}", _batch())
    assert export.difference < 1e-5
    # The target is not an input, because the outputs do not depend on it.
    assert export.inputs == ({} if kind == "safetensors" else {"input0": ("batch", 2)})
    x = torch.rand(7, 2)
    torch.save({"x": x, "expected": model.net(x).detach()}, tmp_path / "case.pt")
    code = (
        "import sys, torch; case = torch.load('case.pt'); x = case['x']\n"
        f"{LOAD[kind]}\n"
        "torch.testing.assert_close(out, case['expected'])\n"
        "assert 'stepwrap' not in sys.modules\nprint('equal')"
    )
    assert run_program("-c", code, cwd=tmp_path).strip() == "equal"
    assert {file.name for file in tmp_path.iterdir()} == {f"model.{kind}", "case.pt"}


def test_the_preprocessor_is_part_of_the_program(tmp_path: Path) -> None:
    model = SupervisedModel(
        nn.Linear(2, 3), nn.CrossEntropyLoss(), data_preprocessor=DataPreprocessor(5.0, 2.0)
    )
    export_model(model, tmp_path / "model.pt2", _batch())
    x = torch.rand(3, 2)
    output = torch.export.load(tmp_path / "model.pt2").module()(x)
    torch.testing.assert_close(output, model.net((x - 5) / 2))


class Named(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 3)

    def forward(self, tokens: Tensor, mask: Tensor, label: Any = None, mode: str = "tensor") -> Any:
        hidden = self.net(tokens) * mask[:, None]
        return {"scores": hidden, "total": hidden.sum(1)}


@pytest.mark.parametrize("kind", ["pt2", *slow("onnx")])
def test_named_inputs_and_several_outputs(kind: str, tmp_path: Path) -> None:
    batch = {"tokens": torch.rand(4, 2), "label": torch.zeros(4), "mask": torch.ones(4), "ids": "a"}
    del batch["ids"]
    export = export_model(Named(), tmp_path / f"model.{kind}", batch)
    assert export.inputs == {"tokens": ("batch", 2), "mask": ("batch",)}
    assert export.difference < 1e-5


@pytest.mark.parametrize("kind", ["safetensors", "pt2"])
def test_a_batch_with_a_number_as_a_tensor(kind: str, tmp_path: Path) -> None:
    export = export_model(_net(), tmp_path / f"model.{kind}", [torch.rand(4, 2), torch.tensor(2.0)])
    assert export.difference == 0.0


class ReadsValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class FixedSize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(4, -1)


@pytest.mark.parametrize(
    ("net", "size", "message"),
    [
        (ReadsValues(), 4, "torch.export cannot follow the model"),
        (FixedSize(), 4, "torch.export cannot follow the model"),
        (nn.Identity(), 1, "needs a batch of at least two samples"),
    ],
)
def test_models_that_cannot_be_exported(
    net: nn.Module, size: int, message: str, tmp_path: Path
) -> None:
    model = SupervisedModel(net, nn.CrossEntropyLoss())
    with pytest.raises(ExportError, match=message):
        export_model(model, tmp_path / "model.pt2", _batch(size))
    assert not list(tmp_path.iterdir())


class Drawing(nn.Module):
    """A model that draws random numbers in evaluation, so that two calls differ."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.rand_like(x)


def test_a_difference_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    model = SupervisedModel(Drawing(), nn.CrossEntropyLoss())
    with pytest.raises(ExportError, match=r"differs .*model by 0\.\d+, .*batch"):
        export_model(model, tmp_path / "model.pt2", _batch())
    assert not list(tmp_path.iterdir())


def test_the_training_mode_and_weights_stay(tmp_path: Path) -> None:
    model = _net().train()
    before = [param.clone() for param in model.parameters()]
    export_model(model, tmp_path / "model.safetensors", _batch())
    assert model.training
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("kind", ["safetensors", *slow("pt2", "onnx")])
def test_the_command_exports_the_evaluated_model(kind: str, run: Path, capsys: Capture) -> None:
    assert main(["train", "points.yaml", "hooks.ema={type: EMAHook, decay: 0.9}"]) == 0
    capsys.readouterr()
    assert main(["export", "runs/points", "--to", kind]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"exported: runs/points/model.{kind} (0.")
    assert "largest difference from the model: " in out
    assert ("input: input0 (batch, 2)" in out) == (kind != "safetensors")
    if kind == "pt2":
        x = torch.rand(5, 2)
        output = torch.export.load("runs/points/model.pt2").module()(x)
        torch.testing.assert_close(output, load_model("runs/points").net(x))


@pytest.mark.slow
def test_a_left_over_file_with_weights_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small models get a second file, too.
    save = partialmethod(ONNXProgram.save, external_data=True)
    monkeypatch.setattr(ONNXProgram, "save", save)
    leftover = tmp_path / "model.onnx.data"
    leftover.write_text("old")
    with pytest.raises(FileExistsError, match=r"new file, .*model\.onnx\.data exists"):
        export_model(_net(), tmp_path / "model.onnx", _batch())
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {leftover.name: "old"}
    leftover.unlink()
    export_model(_net(), tmp_path / "model.onnx", _batch())
    assert {file.name for file in tmp_path.iterdir()} == {"model.onnx", leftover.name}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "stepwrap export: --to (safetensors, pt2, onnx, peft) or --out is required"),
        (["--out", "m.bin"], "file that ends in .safetensors, .pt2, .onnx, got 'm.bin'"),
        (["--out", "m.peft"], "file that ends in .safetensors, .pt2, .onnx, got 'm.peft'"),
        (["--out", "m.pt2", "--to", "onnx"], "--to onnx and the suffix of m.pt2 differ"),
        (["--out", "old.pt2"], "an export needs a new file, and old.pt2 exists"),
        (["--out", "m.pt2"], "runs/points has no checkpoint: train first"),
    ],
)
def test_mistakes(words: list[str], message: str, run: Path, capsys: Capture) -> None:
    (run / "old.pt2").touch()
    assert main(["export", "points.yaml", *words]) in (1, 2)
    assert message in capsys.readouterr().err


def test_an_export_is_compared_with_the_live_model(tmp_path: Path) -> None:
    model, live = _net(), _net()
    with pytest.raises(ExportError, match=r"differs .*model by \d"):
        export_model(model, tmp_path / "model.safetensors", _batch(), live=live)
    assert not list(tmp_path.iterdir())
    live.load_state_dict(model.state_dict())
    assert export_model(model, tmp_path / "model.safetensors", _batch(), live=live).difference == 0


class Table(nn.Module):
    """A layer with buffers that share memory."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        table = torch.arange(12.0).reshape(2, 6)
        views = {
            "slices": (table[0, :3], table[0, 3:]),
            "overlapping": (table[0, :3], table[0, 1:4]),
            "expanded": (torch.tensor(2.0).expand(3), table[1:, :3].expand(4, 3)[1]),
            "unfolded": (table[0, :5].unfold(0, 3, 1)[0], table[0].unfold(0, 3, 1)),
            "transposed": (table[:, :3][0], table.t()),
            "one": (table[0, :3],) * 2,
        }
        self.layer = nn.Linear(2, 3)
        for name, view in zip("ab", views[kind], strict=True):
            self.register_buffer(name, view)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.a + self.b.sum()


KINDS = ("slices", "overlapping", "expanded", "unfolded", "transposed", "one")


@pytest.mark.parametrize("kind", ["safetensors", *slow("pt2", "onnx")])
def test_buffers_that_share_memory(kind: str, tmp_path: Path) -> None:
    for views in KINDS:
        model = SupervisedModel(Table(views), nn.CrossEntropyLoss())
        path = tmp_path / f"{views}.{kind}"
        assert export_model(model, path, _batch()).difference < 1e-5
        if kind == "safetensors":
            saved = load_file(path)
            for name, tensor in model.state_dict().items():
                assert torch.equal(saved[name], tensor)


def test_a_program_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: .*model\.pt2"):
            export_model(_net(), tmp_path / "model.pt2", _batch())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
