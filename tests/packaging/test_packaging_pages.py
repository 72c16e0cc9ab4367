"""The README and the pages of docs/: names, tables, links and code are correct."""

import configparser
import contextlib
import inspect
import json
import math
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import yaml
from pages import blocks, find_all, page, section
from ranks import run_ranks
from source_tree import FILES, FOLDERS, ROOT
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torchmetrics.classification import MulticlassAccuracy
from warm import ended, run

import stepwrap.collectives
import stepwrap.collectives.dist
import stepwrap.wrappers
from stepwrap.collectives import trace_collectives
from stepwrap.loops import load_checkpoint
from stepwrap.registry import DEFAULT_HOOKS, HOOK_TYPES, HOOKS, MODEL_WRAPPERS
from stepwrap.runner.command.cli import COMMANDS, main
from stepwrap.wrappers import ReplicationCallbackDataParallel

README = page("README.md")


# The README.


def train_by_both_loops() -> dict[str, tuple[Tensor, Tensor]]:
    by_hand, ours, *_ = blocks(section(README, "Compared with a hand-written loop"), "python")
    data = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(12)]
    weights = []
    for code in (by_hand, ours):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        names: dict[str, Any] = {
            name: getattr(stepwrap.wrappers, name) for name in stepwrap.wrappers.__all__
        }
        names |= {"torch": torch, "contextlib": contextlib, "net": net, "loader": data}
        names |= {"DistributedDataParallel": DistributedDataParallel}
        names |= {"cross_entropy": cross_entropy, "clip_grad_norm_": clip_grad_norm_}
        exec(code, names)
        weights.append({name: value.detach() for name, value in net.named_parameters()})
    return {name: (value, weights[1][name]) for name, value in weights[0].items()}


def test_the_runner_of_the_page_reproduces_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code in blocks(page("reproduce"), "python"):
        exec(code, names)
    weights, reproduced = names["net"].state_dict(), names["same_net"].state_dict()
    assert all(torch.equal(value, reproduced[name]) for name, value in weights.items())


def test_the_loops_of_the_readme_compute_the_same_weights() -> None:
    for compared in run_ranks(train_by_both_loops, 2):
        for by_hand, ours in compared.values():
            assert torch.allclose(by_hand, ours, rtol=0, atol=1e-6)


def write_quick_start(folder: Path) -> None:
    (module,) = [code for code in blocks(README, "python") if code.startswith("# circle.py")]
    (config,) = blocks(README, "yaml")
    (folder / "circle.py").write_text(module)
    (folder / "circle.yaml").write_text(config)


@pytest.mark.slow
def test_the_first_program_of_the_readme_trains(tmp_path: Path) -> None:
    (program,) = [code for code in blocks(README, "python") if code.startswith("# first.py")]
    losses = find_all(r"loss ([\d.]+)", run("-c", program, cwd=tmp_path))
    assert float(losses[-1]) < 0.2
    assert (tmp_path / "runs" / "first" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_the_quick_start_of_the_readme_runs(tmp_path: Path) -> None:
    write_quick_start(tmp_path)
    commands = find_all(r"^stepwrap (.*)$", section(README, "Quick start"))
    outputs = [run("-m", "stepwrap.runner", *command.split(), cwd=tmp_path) for command in commands]
    *trained, exported = outputs
    assert len(trained) == 4
    for text in trained:
        assert float(find_all(r"accuracy ([\d.]+)", text)[-1]) > 0.95
    assert (tmp_path / "runs" / "circle" / "config.yaml").exists()
    assert "largest difference from the model: 0" in exported
    (use,) = [code for code in blocks(README, "python") if code.startswith("# use.py")]
    assert run("-c", use, cwd=tmp_path).strip() == "tensor([1, 0])"


@pytest.mark.slow
def test_the_run_from_python_repeats_the_run_of_the_readme(tmp_path: Path) -> None:
    write_quick_start(tmp_path)
    (code,) = blocks(section(page("extending"), "A run from Python"), "python")
    out = run("-c", code, cwd=tmp_path)
    assert float(re.search(r"'accuracy': ([\d.]+)", out)[1]) > 0.95
    assert {file.name for file in tmp_path.iterdir()} <= {
        "circle.py",
        "circle.yaml",
        "__pycache__",
    }


@pytest.mark.slow
def test_the_import_registers_the_strategy_of_lightning(tmp_path: Path) -> None:
    code, *_ = blocks(page("lightning"), "py")
    assert "StepStrategy" in run("-c", f"{code}\nprint(type(trainer.strategy))", cwd=tmp_path)


def test_the_readme_names_pages_and_commands_and_a_page_all_extras() -> None:
    links = set(find_all(r"\]\(([^)#]+)\)", README))
    assert {link for link in links if not (ROOT / link).exists()} == set()
    assert len([link for link in links if link.startswith("docs/")]) > 20

    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    # These extras are for developers of stepwrap only.
    extras = {*find_all(r"^\| `(\w+)` \|", page("install")), "docs", "test"}
    assert extras == set(parser["options.extras_require"])

    (commands,) = [text for text in blocks(README, "") if "make demo" in text]
    targets = " ".join(find_all(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text()))
    assert {"demo", "test", "test-all"} <= {*find_all(r"\bmake ([\w-]+)", commands)}
    assert {*find_all(r"\bmake ([\w-]+)", commands)} <= {*targets.split()}


# Architecture.

PATHS = ("a batch", "a config value", "a checkpoint", "a pool task", "an rpc call")


def test_the_page_on_the_architecture_has_every_room_and_names_files_that_exist() -> None:
    text = page("architecture")
    files = set(find_all(rf"\b(?:{'|'.join(FOLDERS)})/[\w/]+\.\w+", text))
    assert len(files) > 30
    assert not [file for file in sorted(files) if not (ROOT / file).is_file()]
    rooms = {f"{file.parent.relative_to(ROOT)}/" for file in FILES if file.name == "__init__.py"}
    assert sorted(find_all(r"^\| `([\w/]+/)` \| .{10,} \|$", text)) == sorted(rooms)


@pytest.mark.parametrize("subject", PATHS)
def test_each_path_names_its_files(subject: str) -> None:
    path = section(page("architecture"), f"The path of {subject}")
    assert len(set(find_all(r"`[\w/]+\.py`", path))) >= 4


# The command, configs, hooks and predictions.


@pytest.mark.slow
def test_the_page_on_fine_tuning(tmp_path: Path) -> None:
    text = page("finetuning")
    (tmp_path / "tuned.yaml").write_text(blocks(text, "yaml")[0])
    shown = blocks(text, "")
    for command in find_all(r"^stepwrap (.*)$", shown[0]):
        done = ended("-m", "stepwrap.runner", *command.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert shown[1].strip() in done.stderr
    for code in blocks(text, "python"):
        run("-c", code, cwd=tmp_path)


@pytest.mark.slow
def test_the_example_of_an_adapter(tmp_path: Path) -> None:
    text = section(page("finetuning"), "LoRA and other adapters")
    (tmp_path / "lora.yaml").write_text(blocks(text, "yaml")[0])
    commands, shown, *_ = blocks(text, "")
    outputs = [
        ended("-m", "stepwrap.runner", *command.split(), cwd=tmp_path)
        for command in find_all(r"^stepwrap (.*)$", commands)
    ]
    assert not any(done.returncode for done in outputs)
    assert shown.strip() in outputs[1].stderr
    small, large = (
        sum(
            file.stat().st_size
            for file in tmp_path.glob(f"runs/{run}/checkpoints/*/model.safetensors")
        )
        for run in ("lora", "digits_single")
    )
    assert small < large / 2


@pytest.mark.slow
def test_the_page_on_export(tmp_path: Path) -> None:
    *loads, export = blocks(page("export"), "python")
    run("-c", export, cwd=tmp_path)
    assert len(loads) == 3
    for code in loads:
        run("-c", code, cwd=tmp_path)


@pytest.mark.slow
def test_the_page_on_predictions(tmp_path: Path) -> None:
    (code,) = blocks(page("predictions"), "python")
    run("-c", code, cwd=tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["predictions.npz"]
    (data,) = blocks(page("predictions"), "yaml")
    assert set(yaml.safe_load(data)) == {"dataset", "batch_size"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["profiling", "reports", "trying_out"])
def test_the_first_commands_of_a_page_run(name: str, tmp_path: Path) -> None:
    (commands, *_) = blocks(page(name), "")
    for command in find_all(r"^stepwrap (.*)$", commands):
        run("-m", "stepwrap.runner", *command.split(), cwd=tmp_path)


@pytest.mark.slow
def test_the_examples_of_loggers_run(tmp_path: Path) -> None:
    shown, custom = blocks(page("loggers"), "python")
    run("-c", f"{shown}\n{custom}\nPrintLogger()", cwd=tmp_path)
    hooks = yaml.safe_load(blocks(page("loggers"), "yaml")[0])["hooks"]
    assert hooks.keys() <= HOOK_TYPES.keys()


def test_the_page_on_the_command_names_all_of_it() -> None:
    context = click.Context(COMMANDS)
    ours = (name for name, entry in COMMANDS.entries.items() if entry.dist.name == "stepwrap")
    names = sorted(ours)
    assert sorted(set(find_all(r"^stepwrap ([\w-]+) ", page("commands")))) == names
    takers = dict(find_all(r"^\| `--([\w-]+)\b.*?` \| (.*?) \|", page("commands")))
    assert takers.pop("debug") == "all"
    expected: dict[str, set[str]] = {}
    for name in names:
        command = COMMANDS.get_command(context, name)
        for subcommand in (command, *getattr(command, "commands", {}).values()):
            for option in subcommand.params:
                if isinstance(option, click.Option):
                    expected.setdefault(option.name.replace("_", "-"), set()).add(name)
    assert expected.pop("debug") == set(names)
    assert {option: set(names.split(", ")) for option, names in takers.items()} == expected


def test_the_page_on_configs_has_yaml_and_every_hook() -> None:
    full_config, *sections = blocks(page("configs"), "yaml")
    assert "model" in yaml.safe_load(full_config)
    assert all(isinstance(yaml.safe_load(text), dict) for text in sections)
    for name, kind in HOOK_TYPES.items():
        on = "on" if name in DEFAULT_HOOKS else "off"
        assert f"| {name} | {kind} | {on} |" in page("configs")


def shown_arguments(name: str, kind: str) -> dict[str, str]:
    """Return the arguments and defaults that the page on hooks lists for a hook."""
    text = section(page("hooks"), f"{name}: {kind}")
    shown = dict(find_all(r"^\| `(\w+)` \| (.*?) \| .{20,} \|$", text))
    assert shown or "No arguments." in text, f"{name}: no list of arguments"
    return shown


def test_the_page_on_hooks_lists_every_argument_and_default() -> None:
    shown = {name: shown_arguments(name, kind) for name, kind in HOOK_TYPES.items()}
    assert shown == {
        name: {
            parameter.name: "required"
            if parameter.default is parameter.empty
            else f"`{json.dumps(parameter.default)}`".replace('"', "")
            for parameter in inspect.signature(HOOKS.get(kind)).parameters.values()
        }
        for name, kind in HOOK_TYPES.items()
    }


@pytest.mark.slow
def test_the_example_of_stochastic_weight_averaging(tmp_path: Path) -> None:
    write_quick_start(tmp_path)
    (example,) = blocks(section(page("hooks"), "swa: SWAHook"), "yaml")
    (tmp_path / "circle.yaml").write_text(blocks(README, "yaml")[0])
    (tmp_path / "swa.yaml").write_text(f"_base_: circle.yaml\n{example}")
    run("-m", "stepwrap.runner", "train", "swa.yaml", cwd=tmp_path)
    # The averages of the epochs 3, 4 and 5.
    checkpoint = load_checkpoint(tmp_path / "runs" / "swa" / "checkpoints" / "step_00000320")
    swa = checkpoint.read("state")["stateful"]["hooks.swa"]
    assert swa["count"] == 3


def test_the_example_of_gradients_that_are_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = blocks(section(page("hooks"), "grad_guard: GradGuardHook"), "yaml")
    Path("broken_digits.py").write_text(
        "from stepwrap.configs.digits import Digits\nclass Broken(Digits):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.images[70] = float('nan')\n"
    )
    data = "data: {train: {dataset: {_delete_: true, type: broken_digits.Broken}, shuffle: false}}"
    Path("guarded.yaml").write_text(f"_base_: digits_single\n{data}\n{example}")
    words = ["limit_batches=4", "train.max_epochs=1", "train.log_every_steps=4"]
    assert main(["train", "guarded.yaml", *words, "data.train.in_memory=true"]) == 0
    record = json.loads(Path("runs/digits_single/metrics.jsonl").read_text().splitlines()[0])
    assert (record["step"], record["skipped_steps"]) == (4, 1)
    assert record["loss"] > 0


def test_the_page_on_schedules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = page("schedules")
    monkeypatch.setenv("COLUMNS", "70")
    named, in_front, example, plateau = blocks(text, "yaml")
    Path("named.yaml").write_text(named)
    Path("scheduled.yaml").write_text(example)
    for name, schedulers in {"in_front": in_front, "plateau": plateau}.items():
        short = schedulers.replace("{type", "{_delete_: true, type")
        Path(f"{name}.yaml").write_text(f"_base_: digits_single\n{short}")
        assert main(["check", f"{name}.yaml"]) == 0
    for command, shown in zip(blocks(text, ""), blocks(text, "text"), strict=True):
        capsys.readouterr()
        assert main(command.split()[1:]) == 0
        out = capsys.readouterr().out
        assert [line for line in shown.splitlines() if line not in out] == []
    # One batch in each epoch is enough for its rate.
    words = ["limit_batches=1", "train.log_every_steps=1", "hooks.progress=false"]
    assert main(["train", "scheduled.yaml", *words]) == 0
    lines = Path("runs/scheduled/metrics.jsonl").read_text().splitlines()
    rates = [record["lr"] for record in map(json.loads, lines) if record["phase"] == "train"]
    (table,) = find_all(r"^\| rate \|(.*)\|$", text)
    assert rates == pytest.approx([float(rate) for rate in table.split("|")], rel=1e-3)
    for code in blocks(text, "python"):
        exec(code, {})


@pytest.mark.slow
def test_the_page_on_schedules_continues_with_another_decay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    text = page("schedules")
    Path("named.yaml").write_text(blocks(text, "yaml")[0])
    words = ["hooks.progress=false", "train.log_every_steps=1"]
    for command in blocks(text, "sh")[0].splitlines():
        assert main([*command.split()[1:], *words]) == 0
    assert "has another rate" not in caplog.text
    for name, total, shape in (("sqrt", 152, lambda x: x**0.5), ("longer", 190, None)):
        lines = Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()
        records = [r for r in map(json.loads, lines) if r["phase"] == "train"]
        decay = round(total / 4)
        for record in records:
            share = max(0, record["step"] - 1 - (total - decay)) / decay
            fall = shape(share) if shape else (1 - math.cos(math.pi * share)) / 2
            assert record["lr"] == pytest.approx(0.003 * (1 - fall), rel=1e-9)
        assert records[-1]["step"] == total


@pytest.mark.slow
def test_the_page_on_sweeps(tmp_path: Path) -> None:
    text = page("sweeps")
    write_quick_start(tmp_path)
    (tmp_path / "space.yaml").write_text(blocks(text, "yaml")[0])
    command, shown = blocks(text, "")
    (words,) = find_all(r"^stepwrap (.*)$", command)
    out = run("-m", "stepwrap.runner", *words.split(), cwd=tmp_path)
    for line in shown.splitlines():
        # Numbers depend on the machine.
        pattern = re.sub(r"\d+", r"\\d+", re.escape(line.partition("optimizer.lr=")[0]))
        assert re.search(pattern, out), line


@pytest.mark.slow
def test_the_example_of_a_compiled_step_compiles_and_learns(tmp_path: Path) -> None:
    (code,) = blocks(section(page("performance"), "The compiled step"), "python")
    shown = 'print(f"programs {len(wrapper.batch_runner.programs)}")'
    out = run("-c", f"{code}\n{shown}", cwd=tmp_path)
    loss, programs = re.search(r"loss ([\d.]+)\nprograms (\d+)", out).groups()
    assert float(loss) < 0.5
    assert programs == "1"


# Collectives.

DOORS = {"own": stepwrap.collectives, "mmengine": stepwrap.collectives.dist}


def entries(door: str) -> list[tuple[str, str]]:
    """Return the two lines of each function."""
    functions, _, tail = page("collectives").partition("\n## mmengine's names\n")
    text = functions if door == "own" else tail.partition("\n## ")[0]
    return find_all(r"^- (`.+)\n  (.+)$", text)


def run_examples(door: str, folder: Path) -> int:
    """Run the page's examples one after the other; return their number."""
    os.chdir(folder)
    lines = [line for _, line in entries(door)]
    examples = [line.strip("`") for line in lines if re.fullmatch(r"`[^`]+`", line)]
    for code in examples:
        names: dict[str, Any] = {name: getattr(DOORS[door], name) for name in DOORS[door].__all__}
        names |= {
            "torch": torch,
            "MulticlassAccuracy": MulticlassAccuracy,
            "x": torch.ones(2, 3),
            "logs": {"loss_a": torch.tensor(1.0), "loss_b": torch.tensor(2.0)},
            "results": [1, 2, 3],
        }
        try:
            exec(code, names)
        except Exception as error:
            raise AssertionError(f"{code} raises {type(error).__name__}: {error}") from error
    return len(examples)


@pytest.mark.parametrize("door", DOORS)
def test_the_page_on_collectives_names_all_and_its_examples_run(door: str, tmp_path: Path) -> None:
    heads = [head.partition(": ")[0] for head, _ in entries(door)]
    named = {name for head in heads for name in find_all(r"`(\w+)", head)}
    assert named == set(DOORS[door].__all__)
    count = run_examples(door, tmp_path)
    assert count > 20
    assert run_ranks(run_examples, 2, door, tmp_path) == [count, count]


def run_the_introduction() -> dict[str, Any]:
    (code,) = blocks(page("collectives").partition("\n## ")[0], "py")
    names: dict[str, Any] = {}
    try:
        exec(code, names)
    finally:
        trace_collectives(False)
    return {key: names[key] for key in ("by_rank", "means")}


def test_the_example_at_the_top_of_the_page_on_collectives_runs() -> None:
    rank_0, second = run_ranks(run_the_introduction, 2)
    assert rank_0 == second
    assert len(rank_0["by_rank"]) == 2


# Data parallel.

SUBJECT = re.compile(
    r"Replication|Sync|Slave|Future|scatter|gather|replication|sync_|sbn|SingleDevice|"
    # Without the wrappers that shard or separate a model.
    r"(?<!Sharded)(?<!SeparateDistributed)DataParallel"
)


def test_the_page_on_data_parallel_names_every_public_name() -> None:
    text = page("data_parallel")
    offered = {name for name in stepwrap.wrappers.__all__ if SUBJECT.search(name)}
    # The page writes the classes of the layer as `SynchronizedBatchNorm1d`, `2d` and `3d`.
    short = {f"SynchronizedBatchNorm{dims}d" for dims in (2, 3)}
    assert offered - set(find_all(r"\w+", text)) - short == set()
    assert len(offered) > 15
    (config,) = blocks(text, "yaml")
    assert yaml.safe_load(config)["wrapper"]["sync_batchnorm"] is True
    assert all(MODEL_WRAPPERS.get(name) is not None for name in ("dp", "ddp"))


def test_the_code_of_the_page_on_data_parallel_runs() -> None:
    names: dict[str, Any] = {}
    (step,) = blocks(page("data_parallel"), "python")
    exec(step, names)
    assert names["losses"]["loss"].isfinite()
    assert int(names["net"][1].num_batches_tracked) == 1
    names = {"nn": nn, "partial": partial}
    (callback,) = blocks(page("data_parallel"), "py")
    exec(callback, names)
    wrapper = ReplicationCallbackDataParallel(names["Counts"](), device_ids=["cpu"] * 3)
    assert torch.allclose(wrapper(torch.ones(5, 2)), torch.full((5, 2), 0.2))
