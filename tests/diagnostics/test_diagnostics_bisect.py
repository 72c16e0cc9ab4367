"""`stepwrap bisect`: it names the faults that are injected into runs."""

import re
from pathlib import Path

import pytest
from bisect_faults import EVERY, SAMPLES
from bisect_faults import __file__ as FAULTS
from marks import nightly, slow
from ranks import run_ranks
from runner_parts import run_command
from warm import ended

from stepwrap.diagnostics import first_difference, read_ledger
from stepwrap.loops import ShardedBatchSampler
from stepwrap.runner.command.cli import main

CONFIG = f"""\
imports: [{FAULTS}]
seed: 3
model:
  type: SupervisedModel
  net: {{type: bisect_faults.Net}}
  loss: {{type: bisect_faults.Loss}}
optimizer: {{type: AdamW, lr: 0.01}}
data:
  train: {{dataset: {{type: bisect_faults.Images}}, batch_size: 4, shuffle: true}}
train: {{type: EpochTrainLoop, max_epochs: 2, log_every_steps: 5}}
hooks:
  checkpoint: {{every_steps: 2, every_epochs: null, keep_last: null}}
  progress: false
  log: false
"""
SPARSE = "ledger={every_steps: 4}"
FULL = "ledger={full: true}"
COMMAND = ("-m", "stepwrap.runner")
PARAMETERS = ("net.0.weight", "net.0.bias", "net.1.weight", "net.1.bias", "net.5.weight")


def get_step(sample: int) -> int:
    """Return the update that first reads a sample in a run on one rank."""
    sampler = ShardedBatchSampler(SAMPLES, 4, shuffle=True, seed=3)
    return next(b + 1 for b in range(6) if sample in sampler.get_indices(0, b))


def fault(kind: str, step: int, where: str = "", rank: int = 0) -> str:
    text = f"type: bisect_faults.Fault, kind: {kind}, step: {step}, where: '{where}', rank: {rank}"
    return f"hooks.fault={{{text}}}"


DATA = "data.train.dataset"
# An override that makes a run differ, and the reported difference.
ALONE = [
    (f"{DATA}.pixel=7", f"step {get_step(7)}, rank 0, data: batch.0"),
    (fault("kernel", 6, "net.0"), "step 6, rank 0, forward: output of net.0"),
    (fault("weight", 11, "net.5.bias"), "step 11, rank 0, update: net.5.bias"),
]
MORE = [
    (f"{DATA}.pixel=20", f"step {get_step(20)}, rank 0, data: batch.0"),
    (f"{DATA}.label=11", f"step {get_step(11)}, rank 0, data: batch.1"),
    (f"{DATA}.swap=[3, 9]", f"step {min(get_step(3), get_step(9))}, rank 0, data: batch.0"),
    ("data.train.seed=4", "step 1, rank 0, data: sample ids"),
    ("data.train.shuffle=false", "step 1, rank 0, data: sample ids"),
    (fault("item", 9, "0"), "step 9, rank 0, data: batch.0"),
    (fault("item", 5, "1"), "step 5, rank 0, data: batch.1"),
    *(
        (fault(kind, step, stream), f"step {step}, rank 0, random state: {stream}")
        for kind, step in (("draw", 7), ("seed", 3))
        for stream in ("python", "numpy", "torch")
    ),
    ("seed=4", "step 0, rank 0, update: net.0.weight"),
    (fault("kernel", 10, "net.5"), "step 10, rank 0, forward: output of net.5"),
    (fault("slope", 2, "net.2"), "step 2, rank 0, forward: output of net.2"),
    (fault("eps", 8, "net.1"), "step 8, rank 0, forward: output of net.1"),
    (fault("no_dropout", 5, "net.3"), "step 5, rank 0, forward: output of net.3"),
    (fault("loss", 7), "step 7, rank 0, forward: output of loss"),
    ("model.loss.label_smoothing=0.01", "step 1, rank 0, forward: output of loss"),
    ("model.loss.reduction=sum", "step 1, rank 0, forward: output of loss"),
    *(
        (fault("gradient", 3 + n, name), f"step {3 + n}, rank 0, gradient: {name}")
        for n, name in enumerate(PARAMETERS)
        # The gradient of a bias before a BatchNorm is only rounding errors.
        if name != "net.0.bias"
    ),
    (fault("zeroed", 6, "net.5.bias"), "step 6, rank 0, gradient: net.5.bias"),
    (
        "optim_wrapper={type: OptimWrapper, clip_grad: {max_norm: 0.01}}",
        "step 1, rank 0, gradient: net.0.weight",
    ),
    *(
        (fault("option", step, name), f"step {step}, rank 0, update: net.0.weight")
        for step, name in ((4, "lr"), (9, "weight_decay"), (6, "betas"))
    ),
    *(
        (fault("momentum", 5 + n, name), f"step {5 + n}, rank 0, update: {name}")
        for n, name in enumerate(("net.0.weight", "net.5.weight"))
    ),
    (fault("statistics", 8, "net.1"), "step 8, rank 0, update: net.1.running_mean"),
    *(
        (fault("weight", 2 * n + 1, name), f"step {2 * n + 1}, rank 0, update: {name}")
        for n, name in enumerate(PARAMETERS)
    ),
    (fault("weight", 0, "net.1.bias"), "step 0, rank 0, update: net.1.bias"),
    *(
        (fault("buffer", 7, f"net.1.{name}"), f"step 7, rank 0, update: net.1.{name}")
        for name in ("running_mean", "running_var", "num_batches_tracked")
    ),
]
# Of these, one or two of each part of a step are slow; the others run at night.
IN_CI = {
    "data.train.shuffle=false",
    "seed=4",
    fault("draw", 7, "numpy"),
    fault("no_dropout", 5, "net.3"),
    fault("gradient", 3, "net.0.weight"),
    fault("option", 4, "lr"),
    fault("buffer", 7, "net.1.running_var"),
}
ALONE += [case for more in MORE for case in (slow if more[0] in IN_CI else nightly)(more)]
ON_TWO_RANKS = [
    (fault("seed", 2, "numpy", rank=1), "step 2, rank 1, random state: numpy"),
    (fault("item", 3, "0", rank=1), "step 3, rank 1, data: batch.0"),
    (fault("kernel", 4, "net.5", rank=1), "step 4, rank 1, forward: output of net.5"),
    (fault("weight", 5, "net.5.weight", rank=1), "step 5, rank 1, update: net.5.weight"),
    # The fault is before the averaging, so all ranks have it.
    (fault("gradient", 3, "net.5.weight", rank=1), "step 3, rank 0, gradient: net.5.weight"),
    # The gradients are averaged before the update; DDP does not send buffers in the next step.
    (fault("unreduced", 2, rank=EVERY), "step 3, rank 1, update: net.1.running_mean"),
    (fault("draw", 6, "torch", rank=1), "step 6, rank 1, random state: torch"),
]


def train(run_dir: str, *overrides: str) -> None:
    assert main(["train", "faults.yaml", "--run-dir", run_dir, *overrides]) == 0


def train_here(folder: Path, run_dir: str, *overrides: str) -> None:
    assert run_command(folder, "train", "faults.yaml", "--run-dir", run_dir, *overrides) == 0


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "faults.yaml").write_text(CONFIG)
    return tmp_path


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train without a fault, with a ledger entry every fourth update."""
    folder = tmp_path_factory.mktemp("reference")
    (folder / "faults.yaml").write_text(CONFIG)
    run = folder / "run"
    assert main(["train", str(folder / "faults.yaml"), "--run-dir", str(run), SPARSE]) == 0
    return run


@pytest.mark.parametrize(("override", "difference"), ALONE)
def test_a_fault_between_two_entries_is_named(
    override: str,
    difference: str,
    config: Path,
    reference: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train("other", SPARSE, override)
    capsys.readouterr()
    assert main(["bisect", str(reference), "other"]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"the runs first differ at {difference}", lines
    assert len(lines) == 4


def test_a_fault_on_one_rank_is_named(config: Path) -> None:
    run_ranks(train_here, 2, config, "whole", FULL)
    uninterrupted = read_ledger(config / "whole")
    assert uninterrupted.steps == [*range(7)]
    for n, (override, difference) in enumerate(ON_TWO_RANKS):
        run_ranks(train_here, 2, config, f"run{n}", FULL, override)
        assert str(first_difference(uninterrupted, read_ledger(config / f"run{n}"))) == difference


def test_output_of_the_command(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("a", "ledger=true")
    train("b", "ledger=true", fault("loss", 5))
    train("c", "train.max_epochs=1")
    capsys.readouterr()
    assert main(["bisect", "a", "a"]) == 0
    assert re.fullmatch("no difference .* 13 steps .* 0 to 12\n", capsys.readouterr().out)
    assert main(["bisect", "a", "b", "--no-rerun"]) == 3
    agreed, difference = capsys.readouterr().out.splitlines()
    position = "step 5, rank 0, forward"
    assert re.search(f"agree .*step 4 .*differ .*{position}: loss$", agreed)
    assert re.search(f"first differ .*{position}: loss$", difference)
    assert main(["bisect", "a", "b"]) == 3
    again, *repeated, difference = capsys.readouterr().out.splitlines()
    assert again == agreed
    for run_dir, line in zip("ab", repeated, strict=True):
        checkpoint = Path(run_dir, "checkpoints/step_00000004")
        assert re.match(f"repeating .* 5 to 5 of {run_dir} .*{checkpoint}$", line)
    assert re.search(f"first differ .*{position}: output of loss$", difference)
    assert main(["bisect", "a", "c"]) == 2
    assert re.search("c has no ledger.*`ledger: {every_steps: 10}`", capsys.readouterr().err)
    assert main(["bisect", "a"]) == 2
    assert "RUN_B" in capsys.readouterr().err


def test_a_run_that_does_not_repeat_itself_is_named(
    config: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("other", SPARSE, fault("weight", 6, "net.5.bias"))
    settings = config / "other" / "config.yaml"
    settings.write_text(settings.read_text().replace("kind: weight", "kind: zeroed"))
    capsys.readouterr()
    assert main(["bisect", str(reference), "other"]) == 3
    out = capsys.readouterr().out.splitlines()
    assert "other is not repeatable" in out[-2]
    assert re.search("first differ .*step 8, rank 0, ", out[-1])


def test_a_run_whose_number_of_ranks_changed_is_not_repeated(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run_dir, *more in (["a"], ["b", fault("weight", 3, "net.5.bias")]):
        run_ranks(train_here, 2, config, run_dir, SPARSE, "train.max_epochs=1", *more)
        train(run_dir, SPARSE, *more, "--resume")
    capsys.readouterr()
    assert main(["bisect", "a", "b"]) == 3
    out = capsys.readouterr().out.splitlines()
    assert re.match("a .*not be repeated: .*ranks", out[-2])
    assert re.search("differ .*step 3, rank 0, update: group 0$", out[-1])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("ledger={every_stps: 5}", "ledger.every_stps: there is no such setting; did you mean"),
        ("ledger.every_steps=0", "ledger.every_steps: must be at least 1, got 0"),
        ("ledger=10", "ledger: must be a section of settings, got 10"),
        ("hooks.ledger={evry_steps: 1}", "hooks.ledger.evry_steps: LedgerHook has no such arg"),
    ],
)
def test_mistakes_in_the_section_are_named(
    setting: str, message: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "faults.yaml", setting]) == 2
    assert message in capsys.readouterr().err


def test_the_section_and_the_hook_exclude_each_other(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "faults.yaml", "ledger=true", "hooks.ledger={}"]) == 2
    assert re.search(r"ledger: .*combined .*hooks\.ledger", capsys.readouterr().err)


@pytest.mark.slow
def test_runs_of_two_ranks_are_repeated_on_two(config: Path) -> None:
    for run_dir, *more in (["a"], ["b", fault("item", 3, "0", rank=1)]):
        done = ended(
            *COMMAND, "train", "faults.yaml", "--nproc=2", "--run-dir", run_dir, SPARSE, *more
        )
        assert done.returncode == 0, done.stderr
    done = ended(*COMMAND, "bisect", "a", "b")
    assert (done.returncode, done.stderr) == (3, "")
    difference = done.stdout.splitlines()[-1]
    assert re.search(r"differ .*step 3, rank 1, data: batch\.0$", difference)
