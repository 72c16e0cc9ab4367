"""`stepwrap checkpoint ...`: lists, contents, differences, hashes, removal and conversion."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from format_1.write import CASES, unpack
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

from stepwrap.loops import EMAHook, LoopState, find_checkpoint, load_checkpoint, save_checkpoint
from stepwrap.loops.checkpoints import tensor_files
from stepwrap.runner import load_weights
from stepwrap.runner.command.cli import COMMANDS, main
from stepwrap.runner.run_folder import locked_run_dir
from stepwrap.wrappers import OptimWrapper, SingleDevice, SupervisedModel

Capture = pytest.CaptureFixture[str]


class Net(nn.Module):
    """A net with tied weights, BatchNorm and a head in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 30)
        self.norm = nn.BatchNorm1d(30)
        self.head = nn.Linear(30, 50, bias=False)
        self.head.weight = self.embed.weight
        self.low = nn.Linear(30, 3, dtype=torch.bfloat16)


def make_state(seed: int) -> LoopState:
    torch.manual_seed(seed)
    model = SupervisedModel(Net(), nn.CrossEntropyLoss())
    model.net.norm.running_mean.normal_()
    model.net.norm.num_batches_tracked.fill_(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer.step()
    optimizer.zero_grad()
    state = LoopState(SingleDevice(model), OptimWrapper(optimizer))
    state.stateful = {"hooks.ema": EMAHook(decay=0.5)}
    state.stateful["hooks.ema"].on_train_start(state)
    with torch.no_grad():
        model.net.low.bias.add_(1)
    return state


def save(run: Path, step: int, *, is_best: bool = False, seed: int | None = None) -> Path:
    state = make_state(step if seed is None else seed)
    state.step = state.evaluated_at = step
    state.metrics = {"accuracy": step / 1000}
    return save_checkpoint(run / "checkpoints", state, is_best=is_best)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with the checkpoints of steps 8, 90, 800 (the best) and 1000."""
    run = tmp_path_factory.mktemp("saved") / "run"
    for step in (8, 90, 800, 1000):
        save(run, step, is_best=step == 800)
    return run


@pytest.fixture
def folder(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change into a folder with a copy of the run, and return the folder of its checkpoints."""
    shutil.copytree(saved, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return Path("run/checkpoints")


def step(number: int) -> str:
    return f"step_{number:08d}"


def checkpoint_path(number: int) -> str:
    return f"run/checkpoints/{step(number)}"


def read_weights(path: str | Path) -> dict[str, Tensor]:
    content: dict[str, Tensor] = load_checkpoint(path).read("model")
    return content


def call(*words: str | Path, code: int = 0) -> None:
    assert main(["checkpoint", *map(str, words)]) == code


def as_json(capsys: Capture, *words: str | Path, code: int = 0) -> Any:
    capsys.readouterr()
    call(*words, "--json", code=code)
    return json.loads(capsys.readouterr().out)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


# ls and verify.


def test_ls_shows_every_checkpoint(folder: Path, capsys: Capture) -> None:
    (folder / step(90)).rename(folder / f"abandoned_{step(90)}")
    (folder / step(8)).rename(folder / f"incomplete_{step(8)}")
    (folder / step(1000) / "optim.safetensors").unlink()
    (folder / "step_link").symlink_to(step(800))
    (folder / step(5)).mkdir()
    # A name may be longer than the others: the order is that of saving.
    save(folder.parent, 123456789)
    (folder / ".draft-1").mkdir()
    rows = {row["name"]: row for row in as_json(capsys, "ls", "run")["checkpoints"]}
    ordered = [f"incomplete_{step(8)}", f"abandoned_{step(90)}", step(800), step(1000)]
    assert [*rows][:5] == [*ordered, step(123456789)]
    assert [row["marks"] for row in rows.values()] == ["", "", "best", "", "latest", "", "", ""]
    states = {name: row["state"] for name, row in rows.items()}
    assert states[step(800)] == "complete"
    assert states[f"abandoned_{step(90)}"] == "abandoned"
    assert states[f"incomplete_{step(8)}"] == "incomplete"
    assert states[step(1000)] == "damaged: optim.safetensors: No such file or directory"
    assert states[step(5)] == "damaged: is not a checkpoint: it has no checkpoint.json"
    assert states["step_link"] == f"link to {step(800)}"
    assert states[".draft-1"].startswith("draft")
    files = sum(file.stat().st_size for file in (folder / step(800)).iterdir())
    assert rows[step(800)]["bytes"] == files
    assert rows[step(800)]["metrics"] == {"accuracy": 0.8}
    call("ls", folder)
    out = capsys.readouterr().out
    assert "accuracy 0.8" in out
    assert "interval" in out


@pytest.mark.parametrize("name", ["single", "fsdp"])
def test_verify_names_the_damaged_file(name: str, tmp_path: Path, capsys: Capture) -> None:
    run = unpack(name, tmp_path)
    call("verify", run)
    assert "1 checked, 0 damaged" in capsys.readouterr().out
    (checkpoint,) = run.glob("step_*")
    damage(checkpoint / "state.pt")
    damage(checkpoint / "rank_00000.pt")
    call("verify", checkpoint, code=1)
    out = capsys.readouterr().out
    assert "damaged: " in out
    assert "state.pt: checksum mismatch" in out
    assert "rank_00000.pt: checksum mismatch" in out


def test_verify_reads_all_checkpoints_of_a_run(folder: Path, capsys: Capture) -> None:
    (folder / step(90)).rename(folder / f"abandoned_{step(90)}")
    damage(folder / f"abandoned_{step(90)}" / "model.safetensors")
    damage(folder / step(8) / "checkpoint.json")
    call("verify", "run", code=1)
    out = capsys.readouterr().out
    assert "abandoned, damaged: model.safetensors: checksum mismatch" in out
    assert "damaged: checkpoint.json: " in out
    assert "4 checked, 2 damaged" in out
    rows = as_json(capsys, "verify", "run", code=1)["checkpoints"]
    assert [row["damaged"] for row in rows] == [True, False, False, True]
    call("verify", checkpoint_path(1000))


# inspect.


def test_inspect_prints_weights_and_contents(folder: Path, capsys: Capture) -> None:
    shown = as_json(capsys, "inspect", checkpoint_path(1000))
    rows = {row["name"]: row for row in shown["weights"]}
    weights = read_weights(checkpoint_path(1000))
    assert [*rows] == [*weights]
    for name, tensor in weights.items():
        row = rows[name]
        assert (row["shape"], row["dtypes"]) == ([*tensor.shape], [str(tensor.dtype)[6:]])
        if name == "net.head.weight":
            assert row["tied_to"] == "net.embed.weight"
            assert row["bytes"] == 0
        else:
            norm = torch.linalg.vector_norm(tensor.double()).item()
            assert row["norm"] == pytest.approx(norm, rel=1e-12)
            assert row["bytes"] == tensor.nbytes
    assert shown["saved"]["torch"] == torch.__version__
    assert shown["saved"]["world_size"] == 1
    assert shown["counters"]["step"] == 1000
    assert shown["optimizers"]["optimizer"].startswith("SGD 1 group(s), lr 0.1, 5 parameters")
    assert "9 tensors" in shown["states"]["hooks.ema"]
    assert "rng" in shown["ranks"]["rank_00000"]
    # A run's folder stands for the best checkpoint.
    call("inspect", "run", "--weights", "net.norm.*")
    out = capsys.readouterr().out
    assert f"path: run/checkpoints/{step(800)}\n" in out
    assert "step 800" in out
    assert "net.norm.running_var" in out
    assert "net.embed" not in out


def test_inspect_sums_up_modules(folder: Path, capsys: Capture) -> None:
    weights = read_weights(checkpoint_path(90))
    rows = {
        r["name"]: r
        for r in as_json(capsys, "inspect", checkpoint_path(90), "--depth", "2")["weights"]
    }
    assert [*rows] == ["net.embed", "net.norm", "net.head", "net.low"]
    assert rows["net.head"]["count"] == 0
    values = [weights["net.low.weight"].double().flatten(), weights["net.low.bias"].double()]
    assert rows["net.low"]["norm"] == pytest.approx(torch.cat(values).norm().item(), rel=1e-12)
    assert (rows["net.low"]["count"], rows["net.low"]["bytes"]) == (93, 186)
    (row,) = as_json(capsys, "inspect", checkpoint_path(90), "--depth", "1")["weights"]
    assert row["count"] == sum(t.numel() for n, t in weights.items() if "head" not in n)
    assert row["dtypes"] == ["float32", "int64", "bfloat16"]


@pytest.mark.parametrize("name", [*CASES])
def test_inspect_and_diff_read_old_formats(name: str, tmp_path: Path, capsys: Capture) -> None:
    run = unpack(name, tmp_path)
    checkpoint = find_checkpoint(run)
    assert checkpoint is not None
    shown = as_json(capsys, "inspect", run)
    weights = read_weights(checkpoint)
    norms = {row["name"]: row["norm"] for row in shown["weights"]}
    for key, tensor in weights.items():
        if isinstance(tensor, Tensor):
            wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
            norm = wide.norm().item()
            # JSON has no NaN.
            assert norms[key] == (pytest.approx(norm, rel=1e-12) if norm < float("inf") else None)
    assert len(shown["ranks"]) == CASES[name][0]
    call("inspect", checkpoint, "--depth", "1")
    call("diff", run, checkpoint)
    assert "model: equal" in capsys.readouterr().out


def test_inspect_reads_files(folder: Path, capsys: Capture) -> None:
    for name, row in (("model", "net.low.bias"), ("optim", "state.0.momentum_buffer")):
        call("inspect", f"{checkpoint_path(8)}/{name}.safetensors", "--weights", f"*{row[4:]}")
        assert row in capsys.readouterr().out
    values = torch.tensor([float("nan"), float("inf"), 1.0])
    save_file({"a": values}, "foreign.safetensors")
    (row,) = as_json(capsys, "inspect", "foreign.safetensors")["weights"]
    assert (row["non_finite"], row["norm"]) == (2, None)
    torch.save({"state_dict": {"a": torch.ones(4)}, "epoch": 3}, "other.pth")
    call("inspect", "other.pth")
    out = capsys.readouterr().out
    assert "other entries of the file: epoch\n" in out
    assert out.count("\na ") == 1


def test_inspect_reports_damage(folder: Path, capsys: Capture) -> None:
    damage(Path(checkpoint_path(8), "model.safetensors"))
    call("inspect", checkpoint_path(8), code=1)
    assert "is damaged: model.safetensors: checksum mismatch" in capsys.readouterr().err


# diff.


def test_diff_compares_all_contents(folder: Path, capsys: Capture) -> None:
    call("diff", checkpoint_path(8), checkpoint_path(8))
    out = capsys.readouterr().out
    assert out.count(": equal\n") == 4
    shown = as_json(capsys, "diff", checkpoint_path(8), checkpoint_path(90), code=1)
    assert {*shown["compared"]} == {"model", "optim", "state", "rank_00000"}
    rows = {(row["file"], row["name"]): row for row in shown["differences"]}
    a, b = read_weights(checkpoint_path(8)), read_weights(checkpoint_path(90))
    for name in ("net.embed.weight", "net.low.weight"):
        change = b[name].double() - a[name].double()
        row = rows["model", name]
        assert row["largest"] == change.abs().max().item()
        relative = (change.norm() / a[name].double().norm()).item()
        assert row["relative"] == pytest.approx(relative, rel=1e-12)
    assert rows["state", "counters.step"]["text"] == "8 -> 90"
    assert ("optim", "state.net.low.weight.momentum_buffer") in rows
    assert ("optim", "param_groups.0.lr") not in rows
    selected = as_json(
        capsys, "diff", checkpoint_path(8), checkpoint_path(90), "--weights", "net.low.*", code=1
    )
    assert {row["name"] for row in selected["differences"]} == {"net.low.weight", "net.low.bias"}


def _ordered_checkpoint(folder: str, names: str) -> Path:
    """Save a model with layers in an order, after an update, and return the checkpoint."""
    layers = {name: nn.Linear(2, 2) for name in names}
    for number, name in enumerate(sorted(layers)):
        for param in layers[name].parameters():
            param.data.fill_(number)
            param.grad = torch.full_like(param, number + 1)
    model = nn.ModuleDict(layers)
    optimizer = torch.optim.Adam(model.named_parameters())
    optimizer.step()
    optimizer.zero_grad()
    torch.manual_seed(0)
    return save_checkpoint(folder, LoopState(SingleDevice(model), OptimWrapper(optimizer)))


def test_diff_pairs_the_states_of_optimizers_by_parameter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [_ordered_checkpoint(folder, names) for folder, names in (("a", "xyz"), ("b", "zyx"))]
    call("diff", *paths)
    assert "optim: equal" in capsys.readouterr().out


def test_diff_of_files(folder: Path, capsys: Capture) -> None:
    nan, inf = float("nan"), float("inf")
    a = {"same": torch.tensor([nan, inf, 1.0]), "gone": torch.ones(1), "shape": torch.ones(2, 3)}
    b = {"same": torch.tensor([nan, inf, 1.0]), "new": torch.ones(1), "shape": torch.ones(3, 2)}
    a |= {"dtype": torch.ones(2), "nan": torch.tensor([1.0, 3.0, inf, nan])}
    b |= {"dtype": torch.ones(2).half(), "nan": torch.tensor([1.0, 5.0, inf, nan])}
    a["zero"], b["zero"] = torch.tensor([0.0]), torch.tensor([-0.0])
    # float64 lacks this number.
    a["integer"], b["integer"] = torch.tensor([2**60]), torch.tensor([2**60 + 1])
    save_file(a, "a.safetensors")
    torch.save(b, "b.pt")
    shown = as_json(capsys, "diff", "a.safetensors", "b.pt", code=1)["differences"]
    rows = {row["name"]: row for row in shown}
    assert rows.keys() == {"gone", "new", "shape", "dtype", "nan", "zero", "integer"}
    assert rows["gone"]["text"] == "only in A"
    assert rows["new"]["text"] == "only in B"
    assert rows["shape"]["text"] == "shape (2, 3) -> (3, 2)"
    assert rows["dtype"]["text"].startswith("dtype float32 -> float16")
    assert (rows["nan"]["largest"], rows["nan"]["text"]) == (2.0, "1 of 4 elements")
    assert rows["nan"]["relative"] == pytest.approx(2 / 10**0.5)
    assert rows["zero"]["text"] == "equal numbers, other bits"
    # Weights against a checkpoint: the rest has no counterpart.
    save_file({"a": torch.ones(1)}, "c.safetensors")
    assert as_json(capsys, "diff", "c.safetensors", checkpoint_path(8), code=1)["compared"] == [
        "model"
    ]


# prune.


def left(folder: Path) -> list[int]:
    return [int(path.name[5:13]) for path in sorted(folder.glob("step_*")) if path.is_dir()]


def test_prune_shows_and_removes(folder: Path, capsys: Capture) -> None:
    size = sum(f.stat().st_size for n in (8, 90) for f in (folder / step(n)).iterdir())
    call("prune", "run", "--keep-last", "1")
    out = capsys.readouterr().out
    assert "to remove: 2 of 4, " in out
    assert "--yes" in out
    assert left(folder) == [8, 90, 800, 1000]
    shown = as_json(capsys, "prune", "run", "--keep-last=1", "--keep", "step_*90", "--yes")
    assert shown["removed"] == [step(8)]
    shown = as_json(capsys, "prune", folder, "--keep-last", "1", "--yes")
    assert shown["kept"] == {step(800): "best", step(1000): "one of the last 1, latest"}
    assert shown["removed"] == [step(90)]
    assert left(folder) == [800, 1000]
    assert 0 < shown["bytes"] < size
    assert not [*folder.glob(".draft*")]
    assert not (folder.parent / "run.lock").exists()
    # One has to ask for the removal of these.
    call("prune", "run", "--keep-best", "--unprotected", "--yes")
    assert left(folder) == [800]
    shutil.copytree(folder / step(800), folder / f"abandoned_{step(800)}")
    shown = as_json(capsys, "prune", "run", "--keep", "abandoned*", "--unprotected", "--yes")
    assert shown["kept"][step(800)] == "no other undamaged one would be left"
    call("prune", "run", "--keep", "nothing", "--unprotected", "--yes")
    assert [path.name for path in folder.iterdir()] == [step(800)]


def test_prune_keeps_what_can_be_loaded(folder: Path, capsys: Capture) -> None:
    """The newest are damaged, so that earlier ones are the latest and the best."""
    save(folder.parent, 1001, is_best=True)
    for number in (1000, 1001):
        damage(folder / step(number) / "model.safetensors")
    (folder / step(5)).mkdir()
    (folder / "mine").symlink_to(step(8))
    (folder / step(90)).rename(folder / f"abandoned_{step(90)}")
    shown = as_json(capsys, "prune", "run", "--keep-last", "1", "--yes")
    assert shown["kept"] == {
        step(8): "mine links to it",
        step(800): "latest, best",
        step(1001): "one of the last 1",
        step(5): "no readable description",
    }
    assert left(folder) == [5, 8, 800, 1001]
    (folder / "mine").unlink()
    shown = as_json(capsys, "prune", "run", "--keep-last", "1", "--unprotected", "--yes")
    assert shown["removed"] == [step(8)]
    assert shown["kept"][step(800)] == "no other undamaged one would be left"


def test_prune_refuses_while_a_run_uses_the_folder(folder: Path, capsys: Capture) -> None:
    with locked_run_dir(folder.parent):
        for words in ((), ("--yes",)):
            call("prune", "run", "--keep-last=1", *words, code=2)
            assert "run is in use by process" in capsys.readouterr().err
    assert left(folder) == [8, 90, 800, 1000]


# average.


def test_average_equals_torch(folder: Path, capsys: Capture) -> None:
    paths = [checkpoint_path(number) for number in (8, 90, 800)]
    call("average", *paths, "--out", "soup.safetensors")
    out = capsys.readouterr().out
    assert f"not averaged, taken from {checkpoint_path(800)}: net.norm.num_batches_tracked" in out
    assert "stale: the BatchNorm statistics of 1 layer(s)" in out
    every = [read_weights(path) for path in paths]
    stored = load_file("soup.safetensors")
    # Tied weights are averaged and stored once.
    assert stored.keys() == every[0].keys() - {"net.head.weight"}
    for name, tensor in stored.items():
        mean = torch.stack([weights[name].double() for weights in every]).mean(0)
        expected = mean.to(tensor.dtype)
        if name.endswith("num_batches_tracked"):
            expected = every[-1][name]
        assert tensor.dtype == every[0][name].dtype
        assert torch.equal(tensor, expected)
    model = SupervisedModel(Net(), nn.CrossEntropyLoss())
    load_weights(model, "soup.safetensors")
    assert torch.equal(model.net.head.weight, stored["net.embed.weight"])
    load_model(model, "soup.safetensors")


def test_average_of_evaluated_weights_in_a_folder(folder: Path, capsys: Capture) -> None:
    words = ("average", checkpoint_path(8), checkpoint_path(90), "--out")
    call(*words, "plain")
    assert "evaluations used those in state.safetensors" in capsys.readouterr().out
    call(*words, "soup", "--evaluated")
    averages = [load_checkpoint(checkpoint_path(n)).read_model(evaluated=True) for n in (8, 90)]
    assert not torch.equal(
        averages[0]["net.low.bias"], read_weights(checkpoint_path(8))["net.low.bias"]
    )
    result = load_file("soup/model.safetensors")
    for name in ("net.low.bias", "net.embed.weight"):
        mean = torch.stack([weights[name].double() for weights in averages]).mean(0)
        assert torch.equal(result[name], mean.to(result[name].dtype))
    load_weights(SupervisedModel(Net(), nn.CrossEntropyLoss()), "soup")
    call(*words, "soup", "--force", code=2)
    assert "or a new folder, got soup" in capsys.readouterr().err


def test_average_of_other_files(folder: Path, capsys: Capture) -> None:
    same = {"i": torch.tensor([3]), "f": torch.tensor([60000.0, 1.0]).half()}
    torch.save({**same, "text": "a"}, "a.pt")
    torch.save({**same, "text": "b"}, "b.pt")
    call("average", "a.pt", "b.pt", "--out", "c.safetensors")
    # The sum of the halves would be infinite in float16.
    assert "not averaged, taken from b.pt: text\n" in capsys.readouterr().out
    assert torch.equal(load_file("c.safetensors")["f"], same["f"])
    torch.save({"i": torch.tensor([3.5]), "g": torch.ones(2)}, "d.pt")
    torch.save({"i": torch.tensor([3]), "f": torch.ones(3)}, "e.pt")
    call("average", "d.pt", "e.pt", "a.pt", "--out", "c.safetensors", "--force", code=2)
    error = capsys.readouterr().err
    for text in (
        "i has dtype torch.float32 in d.pt and torch.int64 in a.pt",
        "g is in d.pt, but not in a.pt",
        "f is in a.pt, but not in d.pt",
        "f has shape (3,) in e.pt and (2,) in a.pt",
    ):
        assert text in error
    assert error.count("\n") == 1


# convert and consolidate.


def test_convert_writes_both_formats(folder: Path, capsys: Capture) -> None:
    weights = read_weights(checkpoint_path(90))
    call("convert", checkpoint_path(90), "--out", "new/model.pt", "--to", "torch")
    call("convert", "new/model.pt", "--out", "model.safetensors")
    call("convert", "model.safetensors", "--out", "again.pth")
    capsys.readouterr()
    call("diff", f"{checkpoint_path(90)}/model.safetensors", "again.pth")
    for name in ("new/model.pt", "again.pth"):
        content = torch.load(name, weights_only=True)
        assert [*content] == [*weights]
        assert all(torch.equal(content[key], tensor) for key, tensor in weights.items())
        assert content["net.head.weight"].data_ptr() == content["net.embed.weight"].data_ptr()
    assert "net.head.weight" not in load_file("model.safetensors")
    call("convert", checkpoint_path(90), "--out", "ema.pt", "--evaluated")
    ema = load_checkpoint(checkpoint_path(90)).read_model(evaluated=True)
    assert torch.equal(torch.load("ema.pt")["net.low.bias"], ema["net.low.bias"])


def test_convert_keeps_the_names_of_a_foreign_file(folder: Path) -> None:
    model = Net()
    save_model(model, "foreign.safetensors")
    call("convert", "foreign.safetensors", "--out", "foreign.pt")
    model.load_state_dict(torch.load("foreign.pt"))


def test_convert_stores_slices_and_views(folder: Path) -> None:
    table = torch.arange(100_000.0)
    state = {"a": table[:4], "b": table[2:6], "c": table[:12].view(3, 4).t(), "d": table[:1]}
    state |= {"expanded": torch.ones(1).expand(5), "tied": state["a"]}
    torch.save(state, "views.pt")
    for out in ("own.safetensors", "own.pt"):
        call("convert", "views.pt", "--out", out)
        assert Path(out).stat().st_size < 8000
        content = torch.load(out) if out.endswith(".pt") else load_file(out)
        for name in content:
            assert torch.equal(content[name], state[name])
    content = torch.load("own.pt")
    assert content["tied"].data_ptr() == content["a"].data_ptr()
    assert len({tensor.untyped_storage().data_ptr() for tensor in content.values()}) == 5


def foreign_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a module whose classes can be pickled; remove it later to unpickle without it."""
    module = types.ModuleType("their_code")
    code = (
        "from torch import nn\n"
        "class Settings:\n    def __init__(self, **values): self.values = values\n"
        "class Callback: \n    def __init__(self): self.best = {'x': 1}\n"
        "class TheirNet(nn.Linear): pass\n"
    )
    exec(code, vars(module))
    monkeypatch.setitem(sys.modules, "their_code", module)
    return module


def test_convert_files_of_other_programs(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = foreign_module(monkeypatch)
    weights = OrderedDict(a=torch.ones(2), b=torch.ones(2, dtype=torch.bfloat16))
    lightning = {
        "epoch": 1,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": weights,
        "callbacks": {"ModelCheckpoint": theirs.Callback()},
        "optimizer_states": [],
        "hyper_parameters": theirs.Settings(lr=0.1),
    }
    mmengine = {"meta": {"cfg": theirs.Settings()}, "state_dict": weights, "message_hub": {}}
    mmengine["ema_state_dict"] = {"steps": torch.ones(1)}
    torch.save(lightning, "last.ckpt")
    torch.save(mmengine, "epoch_1.pth")
    monkeypatch.delitem(sys.modules, "their_code")
    call("convert", "last.ckpt", "--out", "a.safetensors")
    out = capsys.readouterr().out
    assert "left out: epoch, pytorch-lightning_version, callbacks, optimizer_states" in out
    call("convert", "epoch_1.pth", "--out", "b.safetensors")
    assert "mmengine's EMAHook stores the averages in state_dict" in capsys.readouterr().out
    for name in ("a", "b"):
        result = load_file(f"{name}.safetensors")
        assert result.keys() == weights.keys()
        assert all(torch.equal(result[key], tensor) for key, tensor in weights.items())


class Bomb:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_only_unsafe_runs_the_code_of_a_file(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"state_dict": {"a": torch.ones(2)}, "x": Bomb()}, "bomb.pt")
    call("convert", "bomb.pt", "--out", "a.safetensors", code=2)
    call("inspect", "bomb.pt", code=2)
    assert not Path("exploded").exists()
    capsys.readouterr()
    theirs = foreign_module(monkeypatch)
    net = theirs.TheirNet(2, 2)
    torch.save({"model": net, "epoch": 2}, "whole.pt")
    torch.save(net, "bare.pt")
    for name in ("whole", "bare"):
        call("convert", f"{name}.pt", "--out", f"{name}.safetensors", code=2)
        error = capsys.readouterr().err
        assert "--unsafe unpickles the file, which runs code that is in it" in error
        assert error.count("\n") == 1
        call("convert", f"{name}.pt", "--out", f"{name}.safetensors", "--unsafe")
        assert "warning: --unsafe unpickles" in capsys.readouterr().err
        assert torch.equal(load_file(f"{name}.safetensors")["weight"], net.weight)
    call("convert", "bomb.pt", "--out", "b.safetensors", "--unsafe")
    assert Path("exploded").exists()
    monkeypatch.delitem(sys.modules, "their_code")
    call("convert", "bare.pt", "--out", "c.safetensors", "--unsafe", code=2)
    assert "No module named 'their_code'" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_failed_write_keeps_the_old_file(
    suffix: str, folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Path(f"old.{suffix}")
    out.write_text("old")
    monkeypatch.setattr("os.fsync", fail)
    call("convert", checkpoint_path(8), "--out", out, "--force", code=1)
    assert "No space left" in capsys.readouterr().err
    assert out.read_text() == "old"
    assert sorted(path.name for path in Path().iterdir()) == [out.name, "run"]


def fail(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_consolidate_divided_and_sharded_models(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "MAX_BYTES", 400)
    divided = save(folder.parent, 1200)
    assert len([*divided.glob("model-*")]) == 3
    for path in (divided, divided / "model.safetensors.index.json"):
        call("consolidate", path, "--out", "one.safetensors", "--force")
        call("diff", path, "one.safetensors")
    assert load_file("one.safetensors").keys() == read_weights(divided).keys() - {"net.head.weight"}
    run = unpack("fsdp", Path())
    call("consolidate", run, "--out", "two.pt")
    weights, expected = torch.load("two.pt"), read_weights(next(run.glob("step_*")))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    # A folder of Hugging Face, whose files have no containers.
    Path("hub").mkdir()
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for name, file in names.items():
        save_file({name: torch.ones(2)}, f"hub/{file}")
    Path("hub/model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    call("consolidate", "hub", "--out", "three.safetensors")
    assert load_file("three.safetensors").keys() == {"a", "b"}


# Mistakes.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lst", "run"], "command lst; did you mean ls?"),
        (["ls"], "checkpoint ls: RUN is missing; usage: stepwrap checkpoint ls RUN"),
        (["ls", "rum"], "checkpoint ls: rum does not exist; did you mean run?"),
        (["ls", "x/y"], "checkpoint ls: x/y does not exist, nor does the folder x"),
        (["ls", checkpoint_path(8)], "is a checkpoint, and the run's folder is required"),
        (["prune", "note.txt", "--keep-best"], "note.txt is neither a run's folder nor"),
        (["prune", "run"], "a rule is required: --keep-last N, --keep-best or --keep PATTERN"),
        (
            ["inspect", f"{checkpoint_path(800)}-2"],
            f"does not exist; did you mean {checkpoint_path(800)}?",
        ),
        (["inspect", "note.txt"], "note.txt: the file must be written by torch.save"),
        (["inspect", "empty"], "the folder empty must be a run folder, a checkpoint, or have"),
        (["inspect", "run", "--weights", "net.lwo*"], "no weight matches 'net.lwo*'; did you mean"),
        (["verify", "empty"], "empty is not a checkpoint, because it has no checkpoint.json"),
        (["verify", "note.txt"], "note.txt is not a checkpoint"),
        (["diff", "run"], "checkpoint diff: B is missing"),
        (["average", "run", "run"], "checkpoint average: Missing option '--out'"),
        (["average", "run", "run", "--out", "a.pt"], "--out must be a file that ends in .safeten"),
        (["convert", "run", "--out", "a.txt"], "--out must end in .safetensors, .pt, .pth, .bin"),
        (["convert", "run", "--out", "a.pt", "--to", "safetensors"], "must end in .safetensors, g"),
        (["convert", "run", "--out", "old.pt"], "old.pt exists; --force replaces it"),
        (["convert", "run", "--out", "empty"], "--out must be a file, and empty is a folder"),
        (["convert", "old.pt", "--out", "a.pt"], "old.pt: the file must be written by torch.save"),
        (
            ["average", "run", "weights.safetensors", "--evaluated", "--out", "a.safetensors"],
            "--evaluated requires checkpoints, and weights.safetensors is a file of weights",
        ),
        (
            ["convert", f"{checkpoint_path(8)}/optim.safetensors", "--out", "a.pt"],
            "optim.safetensors has no weights",
        ),
        (["consolidate", "rum", "--out", "a.pt"], "rum does not exist; did you mean run?"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], message: str, folder: Path, capsys: Capture
) -> None:
    Path("note.txt").write_text("no weights")
    save_file({"a": torch.ones(1)}, "weights.safetensors")
    Path("old.pt").write_text("old")
    Path("empty").mkdir()
    call(*words, code=2)
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("stepwrap checkpoint")
    assert error.count("\n") == 1
    assert Path("old.pt").read_text() == "old"


def test_help_and_completion(capsys: Capture) -> None:
    call()
    names = ["average", "consolidate", "convert", "diff", "inspect", "ls", "prune", "verify"]
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in names)
    group: Any = COMMANDS.get_command(click.Context(COMMANDS), "checkpoint")
    context = click.Context(group, info_name="checkpoint", resilient_parsing=True)
    assert [proposal.value for proposal in group.shell_complete(context, "co")] == names[1:3]
    call("convert", "--help")
    out = capsys.readouterr().out
    assert "usage: stepwrap checkpoint convert path --out file" in " ".join(out.lower().split())
    assert "runs code" in " ".join(out.split())


def test_a_file_that_is_no_pickle_of_tensors(folder: Path, capsys: Capture) -> None:
    Path("list.pt").write_bytes(pickle.dumps([1, 2]))
    call("convert", "list.pt", "--out", "a.safetensors", code=2)
    assert capsys.readouterr().err.count("\n") == 1
