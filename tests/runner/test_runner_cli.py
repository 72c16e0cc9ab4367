"""Arguments, outputs and exit codes of the command line."""

import inspect
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from marks import slow
from programs import run as fresh
from ranks import run_ranks
from runner_parts import final_weights, records, run_command
from warm import ended

from stepwrap.registry import HOOKS, PARAM_SCHEDULERS, list_registrations, load_config
from stepwrap.runner import Runner
from stepwrap.runner.command.cli import main
from stepwrap.runner.command.print_commands import read_curves

BY_NAME = """

def step(wrapper, data, optim_wrapper):
    with optim_wrapper["net"].optim_context(wrapper):
        losses = wrapper(*data, mode="loss")
    optim_wrapper["net"].update_params(losses["loss"])
    return {"loss": losses["loss"].detach()}
"""
Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "command trian; did you mean train?"),
        (
            ["train", "points.yaml", "--nprc", "2"],
            "No such option '--nprc'. Did you mean '--nproc'?",
        ),
        (["train"], "CONFIG is missing"),
        (["train", "points.yaml", "--nproc", "0"], "must be a positive integer, got '0'"),
        (["train", "points.yaml", "--nproc"], "Option '--nproc' requires an argument"),
        (["train", "points.yaml", "--fresh=1"], "Option '--fresh' does not take a value"),
        (["train", "points.yaml", "--run-dir", "--fresh"], "requires a path, got the option --fr"),
        (["train", "--resume="], "CONFIG is missing"),
        (["compare"], "RUN_A is missing"),
        (["compare", "runs/a"], "RUN_B is missing; usage: stepwrap compare RUN_A RUN_B ..."),
        (["list", "hoks"], "did you mean HOOKS?"),
        (
            ["list", "hooks", "loops"],
            "unexpected argument 'loops'; usage: stepwrap list [REGISTRY]",
        ),
        (["env", "xx"], "unexpected argument 'xx'; usage: stepwrap env"),
        (["convert", "a.py", "b.py"], "unexpected argument 'b.py'; usage: stepwrap convert MM"),
        (["--verison"], "command --verison; did you mean version?"),
        (["train", "points.yml"], "did you mean points.yaml?"),
        (["train", "points.yaml", "--resume", "--fresh"], "exclude each other"),
        (["train", "points.yaml", "--dry-run", "--resume"], "--dry-run and --resume exclude each"),
        (["train", "points.yaml", "trace_collectives=maybe"], "trace_collectives"),
        (["train", "points.yaml", "train=null"], "train: train needs this section"),
        (["test", "points.yaml", "data.test=null"], "data.test: test needs this section"),
        (
            ["train", "points.yaml", "--nproc=2", "wrapper={type: single}"],
            "wrapper.type: SingleDev",
        ),
    ],
)
def test_mistakes_exit_with_2_and_one_line(
    run: Path, capsys: Capture, words: list[str], message: str
) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (run / "runs").exists()


@pytest.mark.parametrize("words", [["train", "--bogus"], ["train", "a.yaml", "--nproc", "0"]])
def test_mistakes_are_reported_by_one_rank_and_with_their_trace(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    assert main([*words, "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err
    # Set like torchrun.
    monkeypatch.setenv("RANK", "1")
    assert main(words) == 2
    assert capsys.readouterr().err == ""


def test_help_needs_no_other_words(capsys: Capture) -> None:
    assert main(["-h", "--debug"]) == 0
    assert "Commands:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [
        {"optimzer.lr=1": "optimizer", "hooks.chekpoint.keep_last=2": "checkpoint"},
        {"model.net.widht=3": "width", "optimizer.lrr=2": "lr"},
    ],
    ids=["names", "arguments"],
)
def test_all_mistakes_of_a_kind_are_reported_at_once(
    run: Path, capsys: Capture, wrong: dict[str, str]
) -> None:
    assert main(["train", "points.yaml", *wrong]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(wrong)
    for override, message in wrong.items():
        (line,) = [line for line in lines if line.startswith(f"override {override}: ")]
        assert message in line


def test_an_own_module_that_fails_is_reported_with_its_place(run: Path, capsys: Capture) -> None:
    (run / "mine.py").write_text("def make():\n    return [][1]\n\n\nmake()\n")
    words = ["check", "points.yaml", "hooks.mine.type=mine.Hook"]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    message = (
        "hooks.mine.type: mine cannot be imported: IndexError: list index out of range (mine.py:2)"
    )
    assert message in line
    assert main([*words, "--debug"]) == 2
    trace = capsys.readouterr().err
    assert f'{run / "mine.py"}", line 5, in <module>' in trace
    assert f'{run / "mine.py"}", line 2, in make' in trace


def test_a_part_that_ends_the_program_is_a_mistake(run: Path, capsys: Capture) -> None:
    (run / "ends.py").write_text("import sys\n\n\ndef net():\n    sys.exit('no licence')\n")
    assert main(["check", "points.yaml", "model.net={type: ends.net}"]) == 2
    assert re.search(r"model\.net: .*SystemExit: no licence", capsys.readouterr().err)


def test_mistakes_that_need_no_class_are_reported_without_torch(run: Path) -> None:
    script = (
        "import contextlib, io, sys\n"
        "from stepwrap.runner.command.cli import main\n"
        "for word in sys.argv[1:]:\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as err:\n"
        "        code = main(['train', 'points.yaml', word])\n"
        "    print(word, code, len(err.getvalue().splitlines()), 'torch' in sys.modules)\n"
    )
    wrong = [
        "optimzer.lr=1",
        "seed=zero",
        "model={typezq: SupervisedModel}",
        "hooks.checkpoint.keep_best=acuracy",
        "imports=[my_modls]",
        "data.val.batchsize=1",
        "train=null",
    ]
    lines = fresh("-c", script, *wrong).splitlines()
    assert lines == [f"{word} 2 1 False" for word in wrong]


def test_train_writes_the_run_folder_and_ends_with_test_metrics(run: Path, capsys: Capture) -> None:
    assert main(["train", "points.yaml"]) == 0
    out = capsys.readouterr().out
    folder = run / "runs" / "points"
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("config.yaml", "origins.json", "metrics.jsonl", "metrics.csv", "checkpoints"),
        *("curves.png", "environment.json", "events.jsonl", "phases.json"),
    }
    # The validation of the last step, and both results of the best checkpoint.
    header = next(line for line in out.splitlines() if "test (best checkpoint)" in line)
    titles = [title.strip() for title in re.split("[┃|]", header) if title.strip()]
    assert titles == ["metric", "val (last)", "val (best checkpoint)", "test (best checkpoint)"]
    row = next(line for line in out.splitlines() if re.search(r"^[│|] accuracy", line))
    final, best = (float(value) for value in re.findall(r"\d\.\d{4}", row)[:2])
    scores = [record["accuracy"] for record in records(folder) if record["phase"] == "val"]
    assert final == pytest.approx(scores[-1], abs=1e-4)
    assert best == pytest.approx(max(scores), abs=1e-4)
    assert "curves: runs/points/curves.png" in out
    assert "best checkpoint: runs/points/checkpoints/step_" in out
    assert {record["phase"] for record in records(folder)} == {"train", "val", "test"}


@pytest.mark.slow
def test_the_written_config_repeats_the_run(run: Path) -> None:
    assert main(["train", "points.yaml", "optimizer.lr=0.02", "seed=5"]) == 0
    assert main(["train", "runs/points/config.yaml", "--run-dir", "again"]) == 0
    weights, again = final_weights(run / "runs/points"), final_weights(run / "again")
    assert all((weights[name] == again[name]).all() for name in weights)


def test_results_are_never_overwritten_unasked(run: Path, capsys: Capture) -> None:
    words = ["train", "points.yaml", "train.max_epochs=1"]
    assert main(words) == 0
    before = (run / "runs/points/metrics.jsonl").read_bytes()
    assert main(words) == 2
    err = capsys.readouterr().err
    assert "--resume" in err
    assert "--run-dir runs/points-2" in err
    assert (run / "runs/points/metrics.jsonl").read_bytes() == before
    (run / "runs/points/notes.txt").write_text("mine")
    assert main([*words, "--fresh"]) == 0
    assert (run / "runs/points/notes.txt").read_text() == "mine"


def test_test_and_validate_take_the_best_checkpoint(run: Path, capsys: Capture) -> None:
    assert main(["test", "points.yaml"]) == 1
    assert "runs/points has no checkpoint" in capsys.readouterr().err
    assert main(["train", "points.yaml"]) == 0
    trained = capsys.readouterr().out
    best = next(line for line in trained.splitlines() if line.startswith("best checkpoint: "))
    assert main(["test", "points.yaml"]) == 0
    tested = capsys.readouterr().out
    assert best.removeprefix("best ") in tested
    row = next(line for line in tested.splitlines() if "accuracy" in line and "│" in line)
    assert row.split("│")[2].strip() in trained
    (newest,) = (run / "runs/points/checkpoints").glob("step_00000048*")
    for name in ("latest", newest.name):
        assert main(["validate", "points.yaml", "--checkpoint", name]) == 0
        assert f"checkpoint: runs/points/checkpoints/{newest.name}" in capsys.readouterr().out
    assert main(["validate", "points.yaml", "--checkpoint", "stop_00000045"]) == 1
    assert "runs/points; did you mean step_00000045" in capsys.readouterr().err


def test_the_best_checkpoint_by_a_loss_is_the_lowest(run: Path, capsys: Capture) -> None:
    """With a high learning rate the loss of the last epoch is the highest."""
    words = ("hooks.checkpoint.keep_best=loss", "optimizer.lr=5", "train.max_epochs=3")
    assert main(["train", "points.yaml", *words]) == 0
    out = capsys.readouterr().out
    assert "best by: lowest loss" in out
    evaluations = [record for record in records(run / "runs/points") if record["phase"] == "val"]
    losses = {record["step"]: record["loss"] for record in evaluations}
    best = min(losses, key=lambda step: losses[step])
    assert losses[best] < max(losses.values())
    assert f"best checkpoint: runs/points/checkpoints/step_{best:08}" in out


AMP = "{type: AmpOptimWrapper, dtype: bfloat16}"


@pytest.mark.parametrize("wrapper", [AMP, f"{{net: {AMP}}}"])
def test_test_and_validate_run_in_the_precision_of_the_training(run: Path, wrapper: str) -> None:
    words = ["points.yaml", f"optim_wrapper={wrapper}", "hooks.checkpoint.keep_best=null"]
    if "net:" in wrapper:
        (run / "points.py").write_text((run / "points.py").read_text() + BY_NAME)
        words += [
            "optimizer={_delete_: true, net: {type: AdamW, params: [net]}}",
            "schedulers=null",
        ]
        words += ["train_step=points.step"]
    assert main(["train", *words, "hooks.checkpoint.every_epochs=1"]) == 0
    assert main(["validate", *words]) == 0
    assert main(["test", *words, "--checkpoint", "latest"]) == 0
    logged = records(run / "runs/points")
    for phase in ("val", "test"):
        losses = [record["loss"] for record in logged if record["phase"] == phase]
        assert losses[-1] == losses[-2]
    assert main(["test", "points.yaml", "--checkpoint", "latest"]) == 0
    assert records(run / "runs/points")[-1]["loss"] != losses[-1]


DIVERGES = (
    "optimizer={type: SGD, lr: 1.0e+38, _delete_: true}",
    "hooks.progress=false",
    "schedulers=null",
)


@pytest.mark.parametrize("nproc", [1, *slow(2)])
def test_a_run_whose_weights_become_nan_ends_with_an_error(run: Path, nproc: int) -> None:
    """Also if nothing is saved, and on every rank."""
    words = ("train", "points.yaml", *DIVERGES, "hooks.checkpoint=false")
    assert run_ranks(run_command, nproc, run, *words) == [1] * nproc


def test_the_first_bad_step_is_named_and_can_be_tolerated(run: Path, capsys: Capture) -> None:
    words = ["train", "points.yaml", *DIVERGES]
    assert main(words) == 1
    err = capsys.readouterr().err
    assert re.search("NonFiniteError: loss .*(nan|inf) .*step 2 .*rank 0", err)
    assert "parameter 'net." in err
    assert "hooks.nan_guard.action=warn" in err
    assert main([*words, "hooks.nan_guard.action=warn", "--fresh"]) == 0
    out, err = capsys.readouterr()
    assert err.count("at step 2 on rank 0") == 1
    assert "NonFiniteError" not in err
    assert "test" in out


def test_a_dry_run_does_everything_once_and_keeps_nothing(run: Path, capsys: Capture) -> None:
    before = sorted(run.rglob("*"))
    assert main(["train", "points.yaml", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "nothing was kept" in out
    assert out.count("step 1/1") == 3
    assert [path for path in sorted(run.rglob("*")) if "__pycache__" not in str(path)] == before


def test_check_builds_the_parts(run: Path, capsys: Capture) -> None:
    assert main(["check", "points.yaml"]) == 0
    out = capsys.readouterr().out
    assert "points.yaml: no mistakes" in out
    assert "42 parameters" in out
    assert main(["check", "points.yaml", "optimizer.lr=-1"]) == 2
    assert re.search("optimizer: .*ValueError: Invalid learning rate", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("ranks", "accumulate", "length"),
    [
        (1, 1, "72 updates, 6 epochs, 72 batches on each rank"),
        (2, 2, "18 updates, 6 epochs, 36 batches on each rank"),
    ],
)
def test_check_prints_the_length_of_the_training_and_schedules_that_differ(
    run: Path, capsys: Capture, ranks: int, accumulate: int, length: str
) -> None:
    words = [
        "train.max_epochs=6",
        f"launch.nproc={ranks}",
        f"optim_wrapper.accumulative_counts={accumulate}",
        "schedulers=[{type: LinearLR, total_iters: 2, until: 2}, "
        "{type: CosineAnnealingLR, T_max: 4, after: 2}, {type: StepLR, step_size: 1}]",
    ]
    assert main(["check", "points.yaml", *words]) == 0
    out = capsys.readouterr().out
    assert f"\ntraining: {length}\n" in out
    assert "warning" not in out
    if ranks == 1:
        assert Runner.from_config(load_config("points.yaml", words)).train().step == 72
    words = [*words, "schedulers.1.T_max=2", "schedulers.2={type: CosineAnnealingLR, T_max: 40}"]
    assert main(["check", "points.yaml", *words]) == 0
    rises, ends = (line for line in capsys.readouterr().out.splitlines() if "warning" in line)
    assert "override" in rises
    assert re.search(r"schedulers\.1: CosineAnnealingLR .*epochs: T_max is 2, .* 4", rises)
    assert "set T_max: 4" in rises
    assert re.search(r"schedulers\.2: CosineAnnealingLR .*epochs: T_max is 40", ends)


def test_an_error_in_the_run_is_one_message(run: Path, capsys: Capture) -> None:
    words = ["train", "points.yaml", "data.train.dataset.bad=9"]
    assert main(words) == 1
    message, location, note, hint, aside = capsys.readouterr().err.splitlines()
    place_aside = "runs/points/checkpoints/incomplete_step_00000001"
    assert re.match(f"  {place_aside} .*after the last update; .*random", aside)
    again = f"; continue with: stepwrap train runs/points/config.yaml --resume {place_aside}"
    assert aside.endswith(again)
    assert message == "ValueError: sample 9 is broken"
    assert location.startswith(f"  at {run / 'points.py'}:")
    assert re.fullmatch(r"  .*batch \d+ .*epoch 1 .*Points .*points\.py:11", note)
    assert "--debug" in hint
    assert main([*words, "--fresh", "--debug"]) == 1
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert f"{message}\n{location}\n" in err


def test_an_error_in_a_data_worker_is_one_message(run: Path, capsys: Capture) -> None:
    words = ["train", "points.yaml", "data.train.dataset.bad=9", "data.train.num_workers=1"]
    assert main(words) == 1
    message, location, *_ = capsys.readouterr().err.splitlines()
    assert message.startswith("ValueError: sample 9 is broken (")
    assert "DataLoader worker" in message
    assert location.startswith(f"  at {run / 'points.py'}:")


def test_show_prints_a_config_that_can_be_run(run: Path, capsys: Capture) -> None:
    assert main(["show", "points.yaml", "optimizer.lr=0.5", "--origin"]) == 0
    out = capsys.readouterr().out
    assert "# override optimizer.lr=0.5" in out
    (run / "shown.yaml").write_text(out)
    assert main(["check", "shown.yaml"]) == 0


@pytest.mark.slow
def test_plot_draws_on_demand(run: Path, capsys: Capture) -> None:
    assert main(["plot", "runs"]) == 1
    assert "has no metrics.jsonl" in capsys.readouterr().err
    (run / "metrics.jsonl").write_text('{"step": 1, "phase": "train", "loss": 2.0}\n{"step":')
    assert main(["plot", str(run)]) == 0
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_plot_draws_every_run_that_is_named(tmp_path: Path, capsys: Capture) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        (folder / "metrics.jsonl").write_text('{"step": 1, "phase": "train", "loss": 2.0}\n')
    assert main(["plot", *map(str, folders)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        str(folder / "curves.png") for folder in folders
    ]
    assert all((folder / "curves.png").exists() for folder in folders)


def test_steps_per_second_have_no_curve(tmp_path: Path) -> None:
    record = {"step": 1, "phase": "train", "samples_per_s": 8.0, "steps_per_s": 2.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record))
    assert list(read_curves(tmp_path)) == ["samples_per_s"]


@pytest.mark.slow
def test_curves_are_in_the_order_of_steps_after_an_evaluation(run: Path) -> None:
    assert main(["train", "points.yaml"]) == 0
    checkpoint = next((run / "runs/points/checkpoints").glob("step_*"))
    curves = read_curves(run / "runs/points")
    for _ in range(2):
        assert main(["validate", "points.yaml", "--checkpoint", str(checkpoint)]) == 0
    again = read_curves(run / "runs/points")
    assert set(curves["accuracy"]["val"]) <= set(again["accuracy"]["val"])
    for points in again["accuracy"].values():
        steps = [step for step, _ in points]
        assert steps == sorted(set(steps))


def test_list_shows_all_of_a_hook(
    run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["list", "hooks"]) == 0
    out = capsys.readouterr().out
    text = " ".join(out.split())
    for entry in list_registrations("hooks")["HOOKS"]:
        hook = HOOKS.get(entry.name)
        assert " ".join(inspect.getdoc(hook).partition("\n")[0].split()) in text
        message = {
            declaration.partition(":")[0]: meaning for declaration, meaning in entry.arguments
        }
        assert list(message) == list(inspect.signature(hook).parameters)
        assert all(message.values()), message
    assert " ".join(["mode: str | None = None", '"max" if higher values']) in text
    assert "[...]" not in out


@pytest.mark.parametrize("name", ["constant", "cosine", "linear", "wsd", "inverse_sqrt", "PolyLR"])
def test_list_has_the_arguments_of_a_schedule_also_those_of_its_base(name: str) -> None:
    entries = list_registrations("param_schedulers")["PARAM_SCHEDULERS"]
    (entry,) = [entry for entry in entries if entry.name == name]
    arguments = [declaration.partition(":")[0] for declaration, _ in entry.arguments]
    assert arguments == list(inspect.signature(PARAM_SCHEDULERS.get(name)).parameters)
    assert all(meaning for _, meaning in entry.arguments)


def test_version_prints_the_packages_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"stepwrap {metadata.version('stepwrap')}\n"


def test_env_names_versions_and_devices(capsys: Capture) -> None:
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    for subject in ("python", "torch", "torchmetrics", "cuda", "back-ends", "system"):
        assert f"\n{subject} " in f"\n{out}"


def test_help_list_and_show_import_no_torch(run: Path) -> None:
    code = (
        "import contextlib, io, sys\n"
        "from stepwrap.runner.command.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "    codes = [main(['list']), main(['list', 'hooks']), main(['show', 'points.yaml'])]\n"
        "    codes += [main(['--version']), main(['--help']), main(['train', '--help'])]\n"
        "print(codes, 'torch' in sys.modules, 'plot' in out.getvalue())\n"
    )
    assert fresh("-c", code).strip() == "[0, 0, 0, 0, 0, 0] False True"


THEIRS = """
import click

@click.command()
@click.argument("name")
def greet(name):
    "Say hello."
    if name == "unknown":
        error = click.ClickException("unknown name")
        error.exit_code = 5
        raise error
    print("hello", name)
    return 7

def plain():
    "A command without its decorator."
"""


def test_other_packages_add_commands(tmp_path: Path) -> None:
    """A command that cannot be imported is reported in one line; the others work."""
    facts = tmp_path / "theirs-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    entries = "greet = theirs:greet\nlost = their_lost:run\ntrain = theirs:greet\n"
    entries += "plain = theirs:plain\n"
    (facts / "entry_points.txt").write_text(f"[stepwrap.commands]\n{entries}")
    (tmp_path / "theirs.py").write_text(THEIRS)

    def stepwrap(*words: str) -> tuple[int, list[str]]:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = ended("-m", "stepwrap.runner", *words, env=environment)
        return done.returncode, (done.stdout + done.stderr).splitlines()

    code, lines = stepwrap("--help")
    assert code == 0
    assert all(len(line) <= 80 for line in lines)
    for shown in ("greet .*", "lost .*", "plain .*", "train +train and validate.*"):
        assert any(re.fullmatch(f"  {shown}", line) for line in lines)
    assert stepwrap("greet", "you", "--debug") == (7, ["hello you"])
    assert stepwrap("greet") == (2, ["stepwrap greet: Missing argument 'NAME'."])
    why = "cannot be imported from their_lost: ModuleNotFoundError: No module named 'their_lost'"
    assert stepwrap("lost", "a", "--b") == (2, [f"stepwrap lost: {why}"])
    code, (line,) = stepwrap("plain")
    assert code == 2
    assert "is not a click.Command" in line
    assert stepwrap("greet", "unknown") == (5, ["stepwrap greet: unknown name"])


@pytest.mark.parametrize(
    ("typed", "proposed"),
    [
        ("stepwrap tr", "plain,train"),
        ("stepwrap train --overs", "plain,--oversubscribe"),
        ("stepwrap train mine.yaml --device cu", "plain,cuda"),
        ("stepwrap train mi", "file,mi"),
        ("stepwrap check digits_s", "plain,digits_single"),
        ("stepwrap train digits_single digits_s", "file,digits_s"),
        ("stepwrap replay digits_s", "file,digits_s"),
        ("stepwrap train digits_single optimizer.weight_d", "plain,optimizer.weight_decay="),
        ("stepwrap show digits_single launch.time", "plain,launch.timeout_s="),
        ("stepwrap check digits_single hooks.early_stop.pat", "plain,hooks.early_stop.patience="),
        ("stepwrap train digits_single data.val.pin", "plain,data.val.pin_memory="),
        ("stepwrap train digits_single train.max_e", "plain,train.max_epochs="),
    ],
)
def test_a_shell_completes_commands_options_and_configs(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path, typed: str, proposed: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    monkeypatch.setenv("_STEPWRAP_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(typed.count(" ")))
    assert main([]) == 0
    assert capsys.readouterr().out.splitlines() == [proposed]


BASH = """
eval "$(_STEPWRAP_COMPLETE=bash_source stepwrap)"
proposals() {
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
    _stepwrap_completion stepwrap 2> /dev/null  # compopt reports that no completion is running
    echo "${COMPREPLY[@]}"
}
proposals stepwrap ver
proposals stepwrap train --overs
proposals stepwrap train digits_s
proposals stepwrap train mine.yaml --device c
"""


@pytest.mark.slow
def test_bash_completes_with_the_line_of_the_page(tmp_path: Path) -> None:
    assert BASH.splitlines()[1] in (Path(__file__).parents[2] / "docs/commands.md").read_text()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH],
        cwd=tmp_path, env={**os.environ, "PATH": path}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "verify-resume version",
        "--oversubscribe",
        "digits_single",
        "cpu cuda",
    ]


@pytest.mark.slow
def test_a_resume_may_stand_before_other_words(run: Path) -> None:
    assert main(["train", "--resume", "points.yaml", "train.max_epochs=1"]) == 0
    assert main(["train", "points.yaml", "--resume", "train.max_epochs=2"]) == 0
    assert main(["train", "--resume", "runs/points", "train.max_epochs=2"]) == 0
    assert len(final_weights(run / "runs/points")) == 4
