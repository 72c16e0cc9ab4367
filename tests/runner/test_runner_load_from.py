"""`load_from`: a new training starts from the weights of another run or program."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from marks import slow
from parallel_runs import PLAN, Transformer, settings
from ranks import run_ranks
from safetensors.torch import save_file
from torch import Tensor, nn
from weights import apart, whole_weights

from stepwrap.loops import CheckpointError
from stepwrap.runner import Runner, load_model, load_weights
from stepwrap.runner.command.cli import main
from stepwrap.runner.failure import BuildError
from stepwrap.wrappers import StepFullyShardedDataParallel, SupervisedModel

Capture = pytest.CaptureFixture[str]
State = dict[str, Tensor]


def state(prefix: str = "net.") -> State:
    torch.manual_seed(7)
    net = Transformer(dtype="float64")
    return {f"{prefix}{name}": value.detach() for name, value in net.named_parameters()}


def _sharded(folder: Path, weights: State, save: Callable[[State, Path], Any], stem: str) -> None:
    folder.mkdir()
    kind = "safetensors" if stem == "model" else "bin"
    weight_map, names = {}, [f"{stem}-0000{n}-of-00002.{kind}" for n in (1, 2)]
    entries = list(weights.items())
    for file, shard in zip(names, (entries[:5], entries[5:]), strict=True):
        save(dict(shard), folder / file)
        weight_map |= {name: file for name, _ in shard}
    (folder / f"{stem}.{kind}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write(kind: str, weights: State) -> Path:
    """Write weights in a format that `load_from` reads; return the path."""
    path = Path("there")
    if kind == "state dict":
        torch.save(weights, path.with_suffix(".pt"))
        return path.with_suffix(".pt")
    if kind == "old file":
        torch.save(weights, path, _use_new_zipfile_serialization=False)
        return path
    if kind == "of a trainer":
        torch.save({"epoch": 3, "state_dict": weights}, path)
        return path
    if kind == "safetensors":
        save_file(weights, "there.safetensors")
        return Path("there.safetensors")
    if kind == "shards":
        _sharded(path, weights, save_file, "model")
        return path
    if kind == "shards of torch":
        _sharded(path, weights, torch.save, "pytorch_model")
        return path
    path.mkdir()
    if kind == "folder":
        save_file(weights, path / "model.safetensors")
    else:
        torch.save(weights, path / "pytorch_model.bin")
    return path


FORMS = (
    *("state dict", "old file", "of a trainer", "safetensors", "folder", "folder of torch"),
    *("shards", "shards of torch"),
)


def loaded(config: dict[str, Any]) -> State:
    return whole_weights(Runner.from_config(config).state.model.module)


@pytest.mark.parametrize("kind", FORMS)
def test_forms_of_files(kind: str) -> None:
    path = write(kind, state())
    torch.testing.assert_close(loaded(settings(load_from=str(path))), state(), rtol=0, atol=0)


WRAPPERS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp": (1, {"wrapper": {"type": "dp", "device_ids": ["cpu", "cpu"]}}),
    "ddp": (2, {"wrapper": {"type": "ddp"}}),
    "ddp on 3": (3, {"wrapper": {"type": "ddp"}}),
    "fsdp on 3": (3, {"wrapper": {"type": "fsdp", "shard": ["Block"]}}),
    "separate": (2, {"wrapper": {"type": "separate"}}),
    "fsdp": (2, {"wrapper": {"type": "fsdp", "shard": ["Block"]}}),
    "meta": (2, {"wrapper": {"type": "fsdp", "shard": ["Block"]}, "init_device": "meta"}),
    "tensor": (2, {"mesh": {"tensor": 2}, "tensor_parallel": {"plan": PLAN}}),
}


@pytest.mark.parametrize(
    "name", [*(n for n in WRAPPERS if "3" not in n), *slow("ddp on 3", "fsdp on 3")]
)
def test_every_wrapper_on_every_rank(name: str) -> None:
    ranks, sections = WRAPPERS[name]
    path = write("folder", state(""))
    section = {"path": str(path), "map": {"": "net."}}
    config = settings(ranks, load_from=section, **sections)
    config["model"]["net"]["dtype"] = "float32" if name == "meta" else "float64"
    expected = {key: value.to(getattr(torch, config["model"]["net"]["dtype"]))
                for key, value in state().items()}  # fmt: skip
    for weights in run_ranks(loaded, ranks, config):
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def test_weights_that_are_not_loaded_keep_their_initial_values() -> None:
    weights = {f"old.{name}": value for name, value in state("").items()}
    weights["old.head.weight"] = torch.zeros(3, 8)
    del weights["old.norm.bias"]
    weights["extra"] = torch.zeros(2)
    torch.save(weights, "other.pt")
    section = {"path": "other.pt", "map": {"old.": "net."}, "strict": False}
    loaded_weights, initial = loaded(settings(load_from=section)), loaded(settings())
    initial_names = {"net.head.weight", "net.norm.bias"}
    for name, value in loaded_weights.items():
        assert torch.equal(value, (initial if name in initial_names else state())[name])
    section = {"path": "other.pt", "map": {"old.": "net."}, "ignore": ["net.norm", "old.head.*"]}
    with pytest.raises(BuildError) as error:
        loaded(settings(load_from=section))
    assert "unexpected   extra" in str(error.value)
    assert "load_from.ignore: [net.norm, old.head.*, extra]" in str(error.value)
    section["ignore"].append("extra")
    again = loaded(settings(load_from=section))
    assert torch.equal(again["net.head.bias"], initial["net.head.bias"])
    assert torch.equal(again["net.embed.weight"], state()["net.embed.weight"])


def write_marker() -> None:
    Path("executed").touch()


class Marker:
    """An object whose unpickling would write a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return write_marker, ()


def test_objects_next_to_the_weights_are_skipped_and_never_executed() -> None:
    torch.save({"state_dict": state(), "meta": [Marker()], "scaler": {"x": Marker()}}, "theirs.pth")
    torch.testing.assert_close(loaded(settings(load_from="theirs.pth")), state(), rtol=0, atol=0)
    assert not Path("executed").exists()
    torch.load("theirs.pth", weights_only=False)
    assert Path("executed").exists()


PROBLEMS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "prefix": (
        {"path": "bare.pt"},
        ['load_from.map: {"": "net."} makes 27 of the missing weights fit'],
    ),
    "misspelt file": ({"path": "bar.pt"}, ["load_from: bar.pt does not exist; did you mean bare"]),
    "name of the Hub": ({"path": "org/model"}, ["load_from: org/model does not exist, nor does",
                                                "`hf download org/model --local-dir model`"]),
    "whole model": ({"path": "whole.pt"}, ["load_from: whole.pt: the file must contain a",
                                           "save model.state_dict() instead"]),
    "object among weights": ({"path": "object.pt"}, ["object.pt: the values of a state dict must be"
                                                     " tensors", "unlike head.bias"]),
    "no weights": ({"path": "epoch.pt"}, ["got a dict with the keys epoch"]),
    "no file in the folder": ({"path": "empty"}, ["the folder empty must be a run folder", "it has"
                                                  " notes.txt."]),
    "damaged": ({"path": "bad.safetensors"}, ["cannot be read as a safetensors file"]),
    "shard is missing": ({"path": "shard"}, ["lists 1 files next to it, of which 1 are missing, "
                                             "such as a.safetensors"]),
    "map": ({"path": "bare.pt", "map": {"heads.": "net."}},
            ["load_from.map.heads.: no name in the file begins with 'heads.'; did you mean head."]),
    "map to one name": ({"path": "bare.pt", "map": {"embed.": "norm."}},
                        ["load_from.map: ", "of the file both become norm.weight"]),
    "ignore": ({"path": "bare.pt", "map": {"": "net."}, "ignore": ["net.hed"]},
               ["load_from.ignore.0: neither the model nor the file has a weight 'net.hed'; did "
                "you mean net.head"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_mistakes_name_the_key_and_a_remedy(name: str) -> None:
    section, texts = PROBLEMS[name]
    torch.save(state(""), "bare.pt")
    torch.save(nn.Linear(2, 2), "whole.pt")
    torch.save({"epoch": 3}, "epoch.pt")
    torch.save({"state_dict": {**state(""), "head.bias": Marker()}}, "object.pt")
    Path("bad.safetensors").write_bytes(b"nothing")
    for folder, file in (("empty", "notes.txt"), ("shard", "model.safetensors.index.json")):
        Path(folder).mkdir()
        Path(folder, file).write_text('{"weight_map": {"a": "a.safetensors"}}')
    with pytest.raises(BuildError) as error:
        loaded(settings(load_from=section))
    for text in texts:
        assert text in str(error.value)


@pytest.mark.parametrize("file", ["../outside.safetensors", "within/a.safetensors"])
def test_an_index_may_name_only_files_next_to_it(file: str) -> None:
    Path("shard/within").mkdir(parents=True)
    for path in ("outside.safetensors", "shard/within/a.safetensors"):
        save_file(state(), path)
    weight_map = dict.fromkeys(state(), file)
    Path("shard/model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(BuildError) as error:
        loaded(settings(load_from={"path": "shard"}))
    text = f"index.json names the file {file}, which is not next to it; such a file is never read"
    assert text in str(error.value)


def _only_rank_0_has_the_file(rank_file: str) -> str:
    from stepwrap.collectives import get_rank

    if get_rank() == 0:
        Path(rank_file).write_bytes(Path("bare.pt").read_bytes())
    path = rank_file if get_rank() == 0 else "absent.pt"
    with pytest.raises(CheckpointError) as error:
        load_weights(
            SupervisedModel(Transformer(), nn.CrossEntropyLoss()), path, rename={"": "net."}
        )
    return str(error.value)


def test_a_file_that_one_rank_lacks_is_an_error_on_all() -> None:
    torch.save(state(""), "bare.pt")
    rank_0, second = run_ranks(_only_rank_0_has_the_file, 2, "own.pt")
    assert re.search(r"rank 1: own\.pt .*CheckpointError: absent\.pt ", rank_0)
    assert "absent.pt does not exist" in second


def test_a_shared_parameter_of_which_the_file_has_one_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight

    save_file({"embed.weight": torch.ones(4, 3)}, "tied.safetensors")
    model = Tied()
    assert load_weights(model, "tied.safetensors") == ["embed.weight"]
    assert torch.equal(model.head.weight, torch.ones(4, 3))


class Pair(nn.Module):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def _refused_values() -> str:
    model = StepFullyShardedDataParallel(SupervisedModel(Pair(), nn.MSELoss()))
    with pytest.raises(CheckpointError) as error:
        load_weights(model, "pair.pt", rename={"": "net."})
    return str(error.value)


def test_two_values_of_a_shared_parameter_are_refused_on_every_rank() -> None:
    weights = {name: value.detach().clone() for name, value in Pair().state_dict().items()}
    # The values differ in the part of the first rank only.
    weights["second.weight"][0] += 1
    torch.save(weights, "pair.pt")
    for text in run_ranks(_refused_values, 3):
        assert "net.second.weight   same as net.first.weight" in text


EMA = "hooks.ema={type: EMAHook, decay: 0.9}"


@pytest.mark.parametrize("nproc", [1, *slow(2)])
def test_a_run_starts_from_another_and_resumes_without_it(
    nproc: int, run: Path, capfd: Capture
) -> None:
    assert main(["train", "points.yaml", EMA, "train.max_epochs=1"]) == 0
    weights = load_model("runs/points").state_dict()
    words = ["train", "points.yaml", "--run-dir", "runs/tuned", f"launch.nproc={nproc}",
             "load_from={path: runs/points, ignore: [net.3]}", "optimizer.lr=0.0",
             "train.max_epochs=1", "--oversubscribe"]  # fmt: skip
    capfd.readouterr()
    assert main(words) == 0
    text = capfd.readouterr().err
    assert re.search("load_from: 2 weights .*SupervisedModel .*from runs/points", text)
    assert "ignored      net.3.weight   (2, 8)         (2, 8)" in text
    tuned = load_model("runs/tuned").state_dict()
    for name, value in tuned.items():
        assert torch.equal(value, weights[name]) == (not name.startswith("net.3"))

    Path("runs/points").rename("gone")
    assert main([*words[:-2], "train.max_epochs=2", "--resume", "--oversubscribe"]) == 0
    assert "load_from" not in capfd.readouterr().err
    assert main(["validate", "runs/tuned"]) == 0
    assert main([*words, "--fresh"]) == 2
    assert "load_from: runs/points does not exist" in capfd.readouterr().err


def test_the_line_of_the_config(run: Path, capsys: Capture) -> None:
    config = Path("points.yaml")
    line = len(config.read_text().splitlines()) + 2
    config.write_text(f"{config.read_text()}load_from:\n  path: runs/absent\n  strict: false\n")
    assert main(["check", "points.yaml"]) == 2
    assert f"points.yaml:{line - 1}: load_from: runs/absent does not" in capsys.readouterr().err
    assert main(["train", "points.yaml", "load_from.strct=1"]) == 2
    assert re.search(r"load_from\.strct: .*did you mean strict", capsys.readouterr().err)


def _proposals(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the settings of `load_from` that the error proposes."""
    with pytest.raises(BuildError) as error:
        Runner.from_config(config)
    lines = re.findall(
        r"load_from\.(map|ignore): ([{\[].*?[}\]]) (?:makes|leaves)", str(error.value)
    )
    return [{key: yaml.safe_load(value)} for key, value in lines]


PREFIXES = ("module.", "_orig_mod.module.", "module._orig_mod.", "a._orig_mod.b.", "a.b.c.")


def test_every_proposal_can_be_followed() -> None:
    for prefix in PREFIXES:
        torch.save(state(prefix), "old.pt")
        (proposal,) = _proposals(settings(load_from="old.pt"))
        assert list(proposal) == ["map"]
        section = {"path": "old.pt", **proposal}
        weights = whole_weights(Runner.from_config(settings(load_from=section)).state.model.module)
        assert apart(weights, state()) == 0


def test_what_would_be_refused_is_not_proposed() -> None:
    # With old. renamed to net. two names of the file would become one.
    torch.save({**state("old."), "net.norm.weight": torch.ones(8)}, "old.pt")
    assert _proposals(settings(load_from="old.pt")) == []
    weights = state()
    del weights["net.norm.weight"], weights["net.head.bias"]
    torch.save(weights, "part.pt")
    section = {"path": "part.pt", "ignore": ["net.head"]}
    (only,) = _proposals(settings(load_from=section))
    assert only == {"ignore": ["net.head", "net.norm"]}
    Runner.from_config(settings(load_from={**section, **only}))
