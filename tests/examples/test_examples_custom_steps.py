"""The steps of examples/custom_steps run by the runner, compared with plain PyTorch."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import custom_step_runs as runs
import gan
import pytest
import tbptt
import torch
from custom_step_runs import FOLDER, STEPS, TOLERANCE, doubles, expected
from marks import slow
from ranks import run_ranks
from torch import Tensor
from weights import apart

from stepwrap.loops import LoopState, load_checkpoint, save_checkpoint
from stepwrap.registry import load_config
from stepwrap.runner import Runner
from stepwrap.runner.command.cli import main
from stepwrap.runner.launcher import single_process_group
from stepwrap.wrappers import SingleDevice

# Two optimizers, a closure, and a state carried from batch to batch.
QUICK = ("gan", "lbfgs", "tbptt")
NARROW = ["model.net.width=4", "model.net.dropout=0.0"]
MODELS = {
    "gan": [],
    "gradient_penalty": NARROW,
    "sam": NARROW,
    "distillation": [
        *NARROW,
        "model.teacher.net.width=4",
        "model.run=teacher",
        "optimizer.lr=0.003",
    ],
    "lbfgs": [*NARROW, "optimizer.max_iter=5"],
    "tbptt": ["model.width=8"],
}
LOGS = {
    "gan": {"loss_d", "loss_g"},
    "gradient_penalty": {"loss", "loss_scores", "loss_slope"},
    "sam": {"loss", "sharpness"},
    "distillation": {"loss", "loss_soft", "loss_hard"},
    "lbfgs": {"loss"},
    "tbptt": {"loss"},
}


def changes(name: str, updates: int, ranks: int = 1) -> list[str]:
    """Return overrides that make an example small, with the batches of the plain version."""
    data = ["dtype=float64"]
    if name == "tbptt":
        data = [f"streams={runs.SIZE}", "block=8", f"limit={runs.COUNT * runs.SIZE}"]
    return [
        *MODELS[name],
        *(f"data.train.dataset.{name}" for name in data),
        f"data.train.batch_size={runs.SIZE // ranks}",
        "data.train.shuffle=false",
        "data.val=null",
        "data.test=null",
        f"train={{type: IterTrainLoop, max_steps: {updates}, log_every_steps: 1}}",
        "hooks.checkpoint={every_steps: 1, every_epochs: null, keep_last: null}",
        "hooks.progress=false",
        "schedulers=null",
    ]


def get_updates(name: str) -> int:
    return 2 if name in ("gradient_penalty", "sam", "distillation", "lbfgs") else runs.COUNT


def weights_in(run: Path, step: int) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = load_checkpoint(run / "checkpoints" / f"step_{step:08d}").read(
        "model.safetensors"
    )
    return weights


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder that contains a run of the teacher."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gan.DigitGan, "noise", runs.fixed_noise)
    with doubles():
        state = LoopState(SingleDevice(runs.teacher()))
        save_checkpoint(tmp_path / "teacher" / "checkpoints", state, is_best=True)
    # Each run collects garbage at its end; exclude all objects of imported modules.
    gc.freeze()
    yield tmp_path
    gc.unfreeze()


def command(name: str, run: str, updates: int, *words: str) -> None:
    with doubles():
        config = str(FOLDER / f"{name}.yaml")
        # Drawing the curves of a log takes longer than the rest of the run.
        words = (*words, *changes(name, updates), "hooks.log=false")
        assert main(["train", config, "--run-dir", run, *words]) == 0


def run_alone(name: str, run: str, updates: int) -> None:
    words = [*changes(name, updates), f"run_dir={run}"]
    with doubles(), single_process_group():
        Runner.from_config(load_config(FOLDER / f"{name}.yaml", words)).train()


@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in STEPS if name not in QUICK))])
def test_a_step_in_one_process(name: str, folder: Path) -> None:
    """The weights equal plain PyTorch, also after a resume; every update is logged."""
    updates = get_updates(name)
    run_alone(name, "run", updates)
    weights, plain = weights_in(folder / "run", updates), expected(name)
    assert apart({key: weights[key] for key in plain}, plain) <= TOLERANCE[name]
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == updates
    assert all(LOGS[name] <= record.keys() for record in records)
    command(name, "part", updates // 2)
    command(name, "part", updates, "--resume")
    again = weights_in(folder / "part", updates)
    assert all(torch.equal(again[key], weights[key]) for key in weights)


def train(name: str, folder: Path, more: list[str]) -> tuple[dict[str, Tensor], bool]:
    """Train on half of each batch; return the weights, and whether a resume gives the same."""
    gan.DigitGan.noise = runs.fixed_noise  # type: ignore[method-assign]
    updates = get_updates(name)
    weights_by_run = []
    with doubles():
        for run, ends in (("run", [updates]), ("part", [updates // 2, updates])):
            for end in ends:
                words = [*changes(name, end, 2), f"run_dir={folder / run}", *more]
                runner = Runner.from_config(load_config(FOLDER / f"{name}.yaml", words))
                runner.train(resume=end != ends[0])
            weights_by_run.append(runs.whole_weights(runner.state.model.module))
    return weights_by_run[0], all(
        torch.equal(weights_by_run[1][key], weights_by_run[0][key]) for key in weights_by_run[0]
    )


def check_two_ranks(name: str, folder: Path, *more: str) -> None:
    plain = expected(name)
    for weights, same in run_ranks(train, 2, name, folder, list(more)):
        assert apart(weights, plain) <= TOLERANCE[name]
        assert same


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.slow
def test_a_step_on_two_ranks(name: str, folder: Path) -> None:
    """With half the batch on each rank the weights equal plain PyTorch, also after a resume."""
    check_two_ranks(name, folder)


@pytest.mark.parametrize(
    ("path", "shard"),
    [
        ("sam.SharpnessAwareDDP", "Conv2d"),
        *slow(
            ("gan.AdversarialSteps", "generator, discriminator"),
            ("lbfgs.ClosureDDP", "Conv2d"),
        ),
    ],
)
def test_the_step_of_a_class_as_a_function(path: str, shard: str, folder: Path) -> None:
    """The config names another wrapper than the example does."""
    name = path.partition(".")[0]
    wrapper = f"wrapper={{type: fsdp, shard: [{shard}]}}"
    check_two_ranks(name, folder, wrapper, f"train_step={path}.train_step")


def test_carried_state_moves_to_the_models_device() -> None:
    """Checkpoints return tensors on the CPU."""
    model = runs.STEPS["tbptt"].model().to("meta")
    wrapper = runs.rebased(tbptt.TruncatedDDP, SingleDevice)(model)
    wrapper.load_step_state({"state": torch.ones(2, 8), "rows": torch.arange(2)})
    assert wrapper.state.is_meta
    assert wrapper.rows.is_meta
    assert wrapper.step_state().keys() == {"state", "rows"}


def test_the_files_are_short() -> None:
    for file in FOLDER.glob("*.py"):
        assert len(file.read_text().splitlines()) < 60, file.name
