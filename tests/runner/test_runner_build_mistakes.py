"""Mistakes that are found only by building are reported together and leave nothing behind."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from marks import slow

from stepwrap.registry import ConfigError, config_from_dict, load_config
from stepwrap.runner.command.cli import main
from stepwrap.runner.sections import read_sections

Capture = pytest.CaptureFixture[str]

NETS = '''
import os
from pathlib import Path

from torch import nn

from points import Net, Points


class Failing(Net):
    """Notes in which process it was built."""

    def __init__(self):
        super().__init__()
        with Path("built.txt").open("a") as file:
            print(os.environ.get("RANK", "launcher"), file=file)
        raise ValueError("no such net")


class Absent(Points):
    def __init__(self):
        raise FileNotFoundError("no points here")


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.gen, self.dis = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x, y, mode="tensor"):
        return {"loss": self.dis(self.gen(x)).mean()}

    def train_step(self, data, optim_wrapper):
        return {}
'''
FAILING = "model.net={type: wrong_nets.Failing}"
ABSENT = "data.train={dataset: {type: wrong_nets.Absent}, batch_size: 4}"
GAN = [
    "model={type: wrong_nets.Gan}",
    "optimizer={gen: {type: SGD}, dis: {type: SGD}}",
    "schedulers=[]",
]
ZERO = "optimizer={type: ZeroRedundancyOptimizer, optimizer_class: SGD, lr: 0.1}"
LOCAL = "optimizer={type: PostLocalSGD, optimizer_class: SGD, period: 2, lr: 0.1}"
UNEVEN = "wrapper={type: ddp, uneven_inputs: true}"


@pytest.fixture
def nets(run: Path) -> Path:
    (run / "wrong_nets.py").write_text(NETS)
    sys.modules.pop("wrong_nets", None)
    config = (run / "points.yaml").read_text()
    (run / "points.yaml").write_text(config.replace("[points.py]", "[points.py, wrong_nets.py]"))
    return run


def mistakes(capsys: Capture, *words: str) -> str:
    assert main([words[0], "points.yaml", *words[1:]]) == 2
    err = capsys.readouterr().err
    assert not any(noise in err for noise in ("(rank", "--debug", "Error: points.yaml"))
    return err


@pytest.mark.parametrize(("nproc", "built"), [("1", {"launcher"}), *slow(("2", {"0", "1"}))])
def test_parts_are_built_once(nets: Path, capsys: Capture, nproc: str, built: set[str]) -> None:
    (nets / "mine").mkdir()
    err = mistakes(capsys, "train", FAILING, "--nproc", nproc, "--run-dir", "mine/first/run")
    message, location = err.splitlines()
    assert re.search(r": model\.net: .*ValueError: no such net$", message)
    assert location.startswith(f"  at {nets / 'wrong_nets.py'}:")
    lines = (nets / "built.txt").read_text().splitlines()
    assert len(set(lines)) == len(lines)
    assert set(lines) <= built
    assert list((nets / "mine").iterdir()) == []


def test_parts_that_cannot_be_built_are_reported_together(nets: Path, capsys: Capture) -> None:
    err = mistakes(capsys, "check", FAILING, ABSENT, "hooks.checkpoint.keep_last=0")
    for section in ("model.net", "data.train.dataset", "hooks.checkpoint.keep_last"):
        assert err.count(f"{section}: cannot be built: ") == 1, err


def test_settings_that_do_not_fit_the_model_are_reported_together(
    nets: Path, capsys: Capture
) -> None:
    blocks = ("wrapper.shard=[Blok]", "activation_checkpointing=[Blok]", "freeze=[layer]")
    err = mistakes(capsys, "check", "wrapper={type: fsdp}", *blocks)
    for text in blocks:
        assert f"override {text}: {text.partition('=')[0]}: cannot be built: ValueError: no " in err


def test_mistakes_of_all_sections_are_reported_together(nets: Path, capsys: Capture) -> None:
    wrong = [
        "optimizer.lrr=1",
        "seed=x",
        "mesh={dat: 2}",
        "compile={fulgraph: true}",
        "tensor_parallel={plan: {net.0: columnwise}}",
        "hooks.checkpoint.keep_best=acuracy",
    ]
    with pytest.raises(ConfigError) as caught:
        read_sections(load_config("points.yaml", wrong))
    err = str(caught.value)
    assert len(err.splitlines()) == 7
    # The command first reports only mistakes that it finds without imports.
    expected = [line for line in err.splitlines() if ": seed: " in line or ".keep_best: " in line]
    assert mistakes(capsys, "check", *wrong).splitlines() == expected
    for message in (
        "optimizer.lrr: AdamW has no such argument",
        "seed: must be a whole number",
        "mesh: a mesh has no axis 'dat'",
        "compile: compile has no argument 'fulgraph'",
        "tensor_parallel: needs a tensor axis",
        "tensor_parallel.plan.net.0: a style must be one of colwise",
        "hooks.checkpoint.keep_best: there is no metric 'acuracy'",
    ):
        assert message in err, err


def test_sections_that_depend_on_an_invalid_one_are_not_reported() -> None:
    """With an invalid mesh, sections that need a mesh are not checked."""
    config = config_from_dict(
        {
            "model": {"type": "torch.nn.Identity"},
            "mesh": "tensor",
            "tensor_parallel": {"plan": {"net": "colwise"}},
        }
    )
    with pytest.raises(ConfigError) as caught:
        read_sections(config)
    assert [problem.key for problem in caught.value.problems] == ["mesh", ""]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_nccl_needs_a_device(backend: str) -> None:
    config = {"model": {"type": "torch.nn.Identity"}, "launch": {"nproc": 2, "backend": backend}}
    with pytest.raises(ConfigError, match=r"launch\.backend: .*use gloo or auto"):
        read_sections(config_from_dict(config))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (GAN, "wrapper: cannot be built: TypeError: Gan overrides train_step"),
        (GAN, "averaging of the gradients. Set `wrapper: {type: separate}`"),
        (
            ["model.loss={type: CrossEntropyLoss, weight: [[1], [1, 2]]}"],
            "weight: [[1], [1, 2]]}: model.loss.weight: cannot be built: ValueError: expected seq",
        ),
        (
            ["metrics.m={type: Accuracy, task: multiclass, num_class: 3}"],
            "metrics.m.num_class: cannot be built: ValueError: Optional arg `num_classes` must be "
            "type `int` when task is ClassificationTask.MULTICLASS. Got <class 'NoneType'>; did "
            "you mean num_classes?",
        ),
        (
            ["optim_wrapper={type: AmpOptimWrapper, dtype: bf16}"],
            "optim_wrapper.dtype: cannot be built: ValueError: dtype should be any of",
        ),
        (["optim_wrapper={type: AmpOptimWrapper, dtype: bf16}"], "; did you mean bfloat16?\n"),
        (["optim_wrapper={type: AmpOptimWrapper, dtype: fp16}"], "; did you mean float16?\n"),
        (["loss={type: MSELoss}"], "loss: there is no such setting; did you mean model.loss?\n"),
        (["max_epochs=3"], "max_epochs: there is no such setting; did you mean train.max_epochs?"),
        (["zzzzz=3"], "zzzzz: there is no such setting; docs/configs.md describes the settings\n"),
        (
            ["model.net={type: wrong_nets.Gann}"],
            "registry; wrong_nets has no Gann; did you mean Gan or nn?\n",
        ),
        ([*GAN, "wrapper={type: ddp}"], "under StepDistributedDataParallel"),
        (["freeze=['*']"], "freeze: cannot be built: ValueError: every parameter is frozen"),
        (
            ["wrapper={type: ddp, uneven_inputs: true, sync_batchnorm: true}"],
            "wrapper.uneven_inputs: excludes sync_batchnorm",
        ),
        ([UNEVEN, ZERO], "wrapper.uneven_inputs: does not work with an optimizer that"),
        ([UNEVEN, LOCAL], "wrapper.uneven_inputs: does not work with an optimizer that"),
        ([UNEVEN, "optim_wrapper.accumulative_counts=2"], "needs accumulative_counts=1"),
        ([UNEVEN, "train={type: IterTrainLoop, max_steps: 2}"], "needs an EpochTrainLoop"),
        (
            ["wrapper={type: auto, fsdp: {shard: [Blok]}}"],
            "wrapper.fsdp.shard: cannot be built: ValueError: no module of the model has the class",
        ),
        (["wrapper={type: auto, shard: [Net]}"], "did you mean wrapper.fsdp.shard?"),
        (["wrapper={type: ddp, comm_hook: foo}"], "wrapper.comm_hook: cannot be built: ValueE"),
        (["optim_wrapper.loss_weight=token"], "optim_wrapper.loss_weight: must be samples, tokens"),
        (["optim_wrapper.loss_weight=token"], "got 'token'; did you mean tokens?"),
        (
            ["optim_wrapper={loss_weight: {keys: mask}}"],
            "loss_weight: must be {key: name or index}",
        ),
        (
            ["optim_wrapper.loss_weight=wrong_nets.Nett"],
            "wrong_nets has no Nett; did you mean Net?",
        ),
        (
            [
                "wrapper={type: ddp, comm_hook: {type: powerSGD}}",
                "optim_wrapper.loss_weight=samples",
            ],
            "optim_wrapper: cannot be built: ValueError: loss_weight needs gradients that are",
        ),
    ],
)
def test_check_refuses_runs_that_could_not_start(
    nets: Path, capsys: Capture, words: list[str], message: str
) -> None:
    assert message in mistakes(capsys, "check", "launch.nproc=2", *words)


def test_loss_weights_in_a_config(nets: Path, capsys: Capture) -> None:
    for weight in ("samples", "{key: 1}", "builtins.len"):
        assert main(["check", "points.yaml", f"optim_wrapper.loss_weight={weight}"]) == 0, weight
    words = ["train.max_epochs=1", "optim_wrapper.loss_weight=samples"]
    assert main(["train", "points.yaml", *words]) == 0
    # `loss_weight` is a setting of all optimizers, not the name of one.
    words = [*GAN, "optim_wrapper={loss_weight: {key: 1}}"]
    assert main(["check", "points.yaml", *words]) == 0


@pytest.mark.parametrize("optimizer", [ZERO, *slow(LOCAL)])
def test_optimizers_that_work_over_ranks(nets: Path, capsys: Capture, optimizer: str) -> None:
    for nproc in (1, 2):
        assert main(["check", "points.yaml", optimizer, f"launch.nproc={nproc}"]) == 0
    assert main(["train", "points.yaml", optimizer, "train.max_epochs=1", "schedulers=[]"]) == 0


def test_check_names_wrapper_and_model(nets: Path, capsys: Capture) -> None:
    for wrapper, name in (("fsdp", "StepFullyShardedDataParallel"), ("ddp", "StepDistributedData")):
        words = ["check", "points.yaml", f"wrapper={{type: {wrapper}}}", "launch.nproc=2"]
        assert main(words) == 0
        out = capsys.readouterr().out
        assert "model: SupervisedModel, 42 parameters" in out
        assert f"wrapper: {name}" in out


def test_checkpoints_of_other_runs_are_not_reported(nets: Path, capsys: Capture) -> None:
    assert main(["train", "points.yaml", "train.max_epochs=1"]) == 0
    capsys.readouterr()
    bad = "data.train.dataset.bad=9"
    for option in (
        ["--dry-run", "data.train.batch_size=48"],
        ["--fresh", "hooks.checkpoint=false"],
    ):
        assert main(["train", "points.yaml", bad, *option]) == 1
        assert "the last checkpoint" not in capsys.readouterr().err


def test_resume_under_another_wrapper_names_the_override(nets: Path, capsys: Capture) -> None:
    with (nets / "points.yaml").open("a") as file:
        file.write("wrapper: {type: fsdp, shard: [Linear]}\n")
    err = mistakes(capsys, "train", "--resume", "wrapper.type=ddp")
    assert re.search(r"wrapper\.shard: StepDistributedDataParallel .*no such argument", err)
    assert "inherited, 'wrapper={type: ddp}' replaces" in err
