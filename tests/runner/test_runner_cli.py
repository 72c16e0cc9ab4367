"""The words, outputs and exit codes of the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runner_parts import final_weights

from stepwrap.runner.cli import main

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["trian"], "there is no command trian; did you mean train?"),
        (
            ["train", "points.yaml", "--nprc", "2"],
            "there is no option --nprc; did you mean --nproc",
        ),
        (["train"], "CONFIG is missing"),
        (["train", "points.yaml", "--nproc", "0"], "must be a whole number from 1, got '0'"),
        (["list", "hoks"], "did you mean HOOKS?"),
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
    run: Path, capsys: Capture, words: list[str], told: str
) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
    assert not (run / "runs").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"optimzer.lr=1": "optimizer", "hooks.chekpoint.keep_last=2": "checkpoint"},
        {"model.net.widht=3": "width", "optimizer.lrr=2": "lr"},
    ],
    ids=["names", "arguments"],
)
def test_all_mistakes_of_a_kind_are_told_at_once(
    run: Path, capsys: Capture, wrong: dict[str, str]
) -> None:
    assert main(["train", "points.yaml", *wrong]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(wrong)
    for override, right in wrong.items():
        (line,) = [line for line in lines if line.startswith(f"override {override}: ")]
        assert right in line


def test_an_own_module_that_fails_is_told_with_its_place(run: Path, capsys: Capture) -> None:
    (run / "mine.py").write_text("def make():\n    return [][1]\n\n\nmake()\n")
    words = ["check", "points.yaml", "hooks.mine.type=mine.Hook"]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    told = (
        "hooks.mine.type: mine cannot be imported: IndexError: list index out of range (mine.py:2)"
    )
    assert told in line
    assert main([*words, "--debug"]) == 2
    trace = capsys.readouterr().err
    assert f'{run / "mine.py"}", line 5, in <module>' in trace
    assert f'{run / "mine.py"}", line 2, in make' in trace


def test_a_part_that_ends_the_program_is_a_mistake(run: Path, capsys: Capture) -> None:
    (run / "ends.py").write_text("import sys\n\n\ndef net():\n    sys.exit('no licence')\n")
    assert main(["check", "points.yaml", "model.net={type: ends.net}"]) == 2
    assert "model: cannot be built: SystemExit: no licence" in capsys.readouterr().err


def test_mistakes_that_need_no_class_are_told_without_torch(run: Path) -> None:
    script = (
        "import sys\n"
        "from stepwrap.runner.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else code)\n"
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
    for words in wrong:
        command = [sys.executable, "-c", script, "train", "points.yaml", words]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 2, ended.stderr
        assert len(ended.stderr.splitlines()) == 1


def test_train_writes_the_run_folder_and_ends_with_test_metrics(run: Path, capsys: Capture) -> None:
    assert main(["train", "points.yaml"]) == 0
    out = capsys.readouterr().out
    folder = run / "runs" / "points"
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "metrics.csv", "checkpoints", "curves.png"}
    assert "test (best checkpoint)" in out
    assert "curves: runs/points/curves.png" in out
    assert "best checkpoint: runs/points/checkpoints/step_" in out
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {record["phase"] for record in records} == {"train", "val", "test"}


def test_the_written_config_repeats_the_run(run: Path) -> None:
    assert main(["train", "points.yaml", "optimizer.lr=0.02", "seed=5"]) == 0
    assert main(["train", "runs/points/config.yaml", "--run-dir", "again"]) == 0
    first, again = final_weights(run / "runs/points"), final_weights(run / "again")
    assert all((first[name] == again[name]).all() for name in first)


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
    assert "there is no checkpoint in runs/points" in capsys.readouterr().err
    assert main(["train", "points.yaml"]) == 0
    trained = capsys.readouterr().out
    best = next(line for line in trained.splitlines() if line.startswith("best checkpoint: "))
    assert main(["test", "points.yaml"]) == 0
    tested = capsys.readouterr().out
    assert best.removeprefix("best ") in tested
    row = next(line for line in tested.splitlines() if "accuracy" in line and "│" in line)
    assert row.split("│")[2].strip() in trained
    assert main(["validate", "points.yaml", "--checkpoint", "latest"]) == 0
    assert "checkpoint: runs/points/checkpoints/step_00000048" in capsys.readouterr().out


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
    assert (
        "optimizer: cannot be built: ValueError: Invalid learning rate" in capsys.readouterr().err
    )


def test_an_error_in_the_run_is_one_message(run: Path, capsys: Capture) -> None:
    words = ["train", "points.yaml", "data.train.dataset.bad=9"]
    assert main(words) == 1
    first, place, hint, saved = capsys.readouterr().err.splitlines()
    assert saved.startswith("  the last checkpoint is runs/points/checkpoints/step_0")
    assert saved.endswith("; continue with: stepwrap train runs/points/config.yaml --resume")
    assert first == "ValueError: sample 9 is broken"
    assert place.startswith(f"  at {run / 'points.py'}:")
    assert "--debug" in hint
    assert main([*words, "--fresh", "--debug"]) == 1
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert f"{first}\n{place}\n" in err


def test_an_error_in_a_data_worker_is_one_message(run: Path, capsys: Capture) -> None:
    words = ["train", "points.yaml", "data.train.dataset.bad=9", "data.train.num_workers=1"]
    assert main(words) == 1
    first, place, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith(
        "ValueError: sample 9 is broken (Caught ValueError in DataLoader worker"
    )
    assert place.startswith(f"  at {run / 'points.py'}:")


def test_show_prints_a_config_that_can_be_run(run: Path, capsys: Capture) -> None:
    assert main(["show", "points.yaml", "optimizer.lr=0.5", "--origin"]) == 0
    out = capsys.readouterr().out
    assert "# override optimizer.lr=0.5" in out
    (run / "shown.yaml").write_text(out)
    assert main(["check", "shown.yaml"]) == 0


def test_plot_draws_on_demand(run: Path, capsys: Capture) -> None:
    assert main(["plot", "runs"]) == 1
    assert "has no metrics.jsonl" in capsys.readouterr().err
    (run / "metrics.jsonl").write_text('{"step": 1, "phase": "train", "loss": 2.0}\n{"step":')
    assert main(["plot", str(run)]) == 0
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_env_names_versions_and_devices(capsys: Capture) -> None:
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    for what in ("python", "torch", "torchmetrics", "cuda", "back-ends", "system"):
        assert f"\n{what} " in f"\n{out}"


def test_help_list_and_show_import_no_torch(run: Path) -> None:
    code = (
        "import contextlib, io, sys\n"
        "from stepwrap.runner.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "    codes = [main(['list']), main(['list', 'hooks']), main(['show', 'points.yaml'])]\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main(['--help'])\n"
        "print(codes, 'torch' in sys.modules, 'plot' in out.getvalue())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[0, 0, 0] False True"


def test_a_resume_may_stand_before_other_words(run: Path) -> None:
    assert main(["train", "--resume", "points.yaml", "train.max_epochs=1"]) == 0
    assert main(["train", "points.yaml", "--resume", "train.max_epochs=2"]) == 0
    assert len(final_weights(run / "runs/points")) == 4
