"""`stepwrap verify-resume`: it names state that a run keeps outside its checkpoints."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import unsaved_parts
from marks import nightly
from runner_parts import Command

from stepwrap.diagnostics import read_ledger
from stepwrap.diagnostics.verify_hooks import TraceHook
from stepwrap.runner.command.cli import main

CONFIG = f"""\
imports: [{unsaved_parts.__file__}]
seed: 3
model:
  type: SupervisedModel
  net: {{type: unsaved_parts.Net}}
  loss: {{type: CrossEntropyLoss}}
optimizer: {{type: AdamW, lr: 0.01}}
data:
  train: {{dataset: {{type: unsaved_parts.Points}}, batch_size: 4, shuffle: true}}
train: {{type: EpochTrainLoop, max_epochs: 2, log_every_steps: 5}}
"""
DATA = "data.train.dataset.type=unsaved_parts"
NET = "model.net.type=unsaved_parts"
WORKERS = "data.train.num_workers=1"
# 12 steps in two epochs: step 9 is inside the second epoch, and step 7 has a checkpoint.
FAULTS = [
    ([f"{DATA}.WithOwn", WORKERS], "step 8, rank 0, data: batch.0 differs", "self.rng.random"),
    ([f"{DATA}.WithClock"], "step 1, rank 0, data: batch.0 differs before", "rng = np.random.def"),
    ([f"{DATA}.WithCount"], "step 8, rank 0, data: batch.0 differs", "    self.count += 1"),
    ([f"{DATA}.WithCount", WORKERS], "step 8, rank 0, data: batch.0 differs", "self.count += 1"),
    (
        ["data.train={type: unsaved_parts.plain_loader}"],
        "step 8, rank 0, data: batch.0 differs",
        "random.random() + float(np.random.rand())",
    ),
    ([f"{DATA}.WithCycle"], "step 8, rank 0, data: batch.0 differs", "return next(SHIFTS)"),
    ([f"{DATA}.WithCache"], "step 8, rank 0: the python random state differs", "= random.random()"),
    ([f"{NET}.Running"], "step 8, rank 0, forward: ", "self.mean = 0.9 * self.mean"),
    ([f"{NET}.GlobalDropout"], "step 8, rank 0, forward: ", "generator=MASKS"),
    (
        ["hooks.decay={type: unsaved_parts.Decay}"],
        "step 8, rank 0, update: net.0.weight differs",
        "self.count += 1",
    ),
    (
        ["hooks.shown={type: unsaved_parts.Shown}"],
        "step 10, rank 0, train record: smoothed differs",
        "self.mean = 0.5 * self.mean",
    ),
]
SAME = "sample ids, random states, losses, gradients, weights, optimizer state, logs"
# Each command starts several processes one after the other.
LIMIT_S = 500
WEIGHTED = "optim_wrapper={type: OptimWrapper, loss_weight: samples}"
DROPOUT = f"{NET}.WithDropout"
ELASTIC = [
    ([WEIGHTED], 0, ["the weights differ by at most "]),
    (
        [WEIGHTED, DROPOUT],
        0,
        ["the weights differ by at most ", "random numbers are drawn (torch)"],
    ),
    ([WEIGHTED, f"{NET}.WithNaN"], 1, ["the weights differ by at most inf, in net.3.seen"]),
    ([WEIGHTED, f"{NET}.Complex"], 0, ["the weights differ by at most "]),
]
Start = Callable[..., Command]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "verified.yaml"
    path.write_text(CONFIG)
    return path


# One fault each in a data set, a model and a hook.
IN_CI = (0, 7, 9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "difference", "line"),
    [
        case
        for number, fault in enumerate(FAULTS)
        for case in ([fault] if number in IN_CI else nightly(fault))
    ],
)
def test_state_outside_checkpoints_is_named(
    overrides: list[str], difference: str, line: str, config: Path, capsys: Capture
) -> None:
    assert main(["verify-resume", str(config), *overrides]) == 1
    shown = capsys.readouterr()
    (head,) = [text for text in shown.out.splitlines() if text.startswith("step ")]
    assert head.startswith(difference), shown
    assert any(f"  {site} " in shown.out for site in unsaved_parts.lines_with(line)), shown


@pytest.mark.slow
def test_lines_that_draw_or_change_attributes_are_seen(
    config: Path, capsys: Capture, tmp_path: Path
) -> None:
    for number, (overrides, _, line) in enumerate(FAULTS[i] for i in (0, 3, 4, 5, 7)):
        lines = tmp_path / f"lines_{number}"
        lines.mkdir()
        trace = f"hooks.trace={{type: {TraceHook.__module__}.TraceHook, folder: {lines}, rank: 0}}"
        words = [str(config), *overrides, trace, "train.max_epochs=1", "hooks.log=false"]
        assert main(["train", *words, "--run-dir", f"run_{number}"]) == 0
        events = [
            json.loads(row) for file in lines.iterdir() for row in file.read_text().splitlines()
        ]
        sites = {site for _, _, _, site in events}
        assert sites & {*unsaved_parts.lines_with(line)}, (overrides, events)
        by_workers = overrides[0].startswith("data.train=") or WORKERS in overrides
        assert {in_worker for _, in_worker, _, _ in events} == {by_workers}, [
            event for event in events if event[1] != by_workers
        ]


@pytest.mark.slow
def test_what_did_change_is_named_first(config: Path, capsys: Capture) -> None:
    assert main(["verify-resume", str(config), f"{DATA}.WithSpare"]) == 1
    text = capsys.readouterr().out
    (count,) = (at for at in unsaved_parts.lines_with("self.count += 1") if f"{at} " in text)
    (spare,) = unsaved_parts.lines_with("if self.spare is None")
    causes = [line.strip() for line in text.splitlines() if line.startswith("  ")]
    assert causes[0].startswith(f"{count} changes count of WithSpare")
    assert "state_dict()" in causes[0]
    assert causes[-1].startswith(f"{spare} may advance spare of WithSpare")
    assert "iterator" in causes[-1]
    assert "SHIFTS" not in text


def test_only_lines_that_run_are_recorded(config: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.mkdir()
    trace = f"hooks.trace={{type: {TraceHook.__module__}.TraceHook, folder: {lines}, rank: 0}}"
    words = [str(config), f"{DATA}.WithSpare", trace, "train.max_epochs=1", "hooks.log=false"]
    assert main(["train", *words, "--run-dir", "run"]) == 0
    (file,) = lines.iterdir()
    locations = [json.loads(row)[3] for row in file.read_text().splitlines()]
    text = Path(unsaved_parts.__file__).read_text().splitlines()
    shown = [text[int(location.rpartition(":")[2]) - 1].strip() for location in locations]
    assert shown == ["if self.spare is None:", "self.count += 1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kill-at=1"], "--kill-at must be at least 2"),
        (["--kill-at=0"], "must be a positive integer"),
        (["optimizer.lrr=1"], "optimizer.lrr"),
        (["--then=2", "wrapper={type: single}"], "wrapper.type: SingleDev"),
        (["train=null"], "verify-resume needs this section"),
    ],
)
def test_mistakes_are_found_before_the_training(
    words: list[str], message: str, config: Path, capsys: Capture
) -> None:
    assert main(["verify-resume", str(config), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_resumes_exactly_passes_and_is_kept(
    config: Path, capsys: Capture, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    words = ["verify-resume", str(config), f"{DATA}.WithGlobal", "--run-dir", str(runs)]
    assert main([*words, "--kill-at", "4"]) == 0
    uninterrupted, killed, same = capsys.readouterr().out.splitlines()
    assert re.search("uninterrupted .* 12 steps$", uninterrupted)
    assert re.search("killed .*step 4, resumed .*step 2$", killed)
    assert re.search(f"same .*: {SAME}$", same)
    assert read_ledger(runs / "killed").steps == [0, 1, 2, 3, 4]
    assert read_ledger(runs / "resumed").steps == read_ledger(runs / "uninterrupted").steps
    # The folder has results of other runs by now.
    assert main(words) == 1
    assert "the uninterrupted run has failed" in capsys.readouterr().err


@pytest.mark.slow
def test_all_ranks_are_killed_and_compared(start: Start, config: Path) -> None:
    words = ["verify-resume", config, "--nproc=2", "wrapper={type: ddp}", "train.max_epochs=4"]
    uninterrupted = start(*words)
    _, killed, same = uninterrupted.process.communicate(timeout=LIMIT_S)[0].splitlines()
    assert re.search("killed .*step 9, resumed .*step 7$", killed)
    assert re.search(f"same .*: {SAME}$", same)
    assert uninterrupted.wait_gone() == []
    noisy = start(*words, "hooks.noise={type: unsaved_parts.OnRankOne}")
    out, err = noisy.process.communicate(timeout=LIMIT_S)
    assert (noisy.process.returncode, err) == (1, ""), out
    head, cause = out.splitlines()[-2:]
    assert re.fullmatch("step 9, rank 1: .*numpy .*differs", head)
    assert any(site in cause for site in unsaved_parts.lines_with("np.random.rand(self.count)"))


@pytest.mark.slow
@pytest.mark.parametrize(("more", "code", "texts"), [ELASTIC[0], *nightly(*ELASTIC[1:])])
def test_a_resume_on_other_ranks_has_the_same_samples(
    more: list[str], code: int, texts: list[str], config: Path, capsys: Capture
) -> None:
    words = ["verify-resume", str(config), "--nproc=2", "wrapper={type: ddp}", "--then=3", *more]
    assert main(words) == code
    out = capsys.readouterr().out.splitlines()
    assert re.search("killed .*step 6, resumed .* 3 ranks .*step 4$", out[1]), out
    assert re.search("same .*samples .*each update .*order$", out[2])
    assert [text in line for text, line in zip(texts, out[3:], strict=True)] == [True] * len(texts)


@pytest.mark.nightly
def test_samples_that_fill_up_an_epoch_of_one_update_are_not_compared(
    config: Path, capsys: Capture
) -> None:
    words = [f"{DATA}.Twenty", "data.train.batch_size=12", "train.max_epochs=4"]
    words += ["--nproc=2", "wrapper={type: ddp}", "--then=3"]
    assert main(["verify-resume", str(config), *words]) == 0
    out = capsys.readouterr().out.splitlines()
    assert re.search("killed .*step 4, resumed .* 3 ranks .*step 3$", out[1]), out
    assert re.search("same .*samples .*each update .*order$", out[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["digits_single", "train.max_epochs=2"],
        *nightly(
            ["digits_ddp", "train.max_epochs=1", "--nproc=3"],
            ["digits_ddp", "train.max_epochs=1", "--nproc=4", "wrapper.type=separate"],
        ),
    ],
)
def test_shipped_configs_resume_exactly(words: list[str], capsys: Capture) -> None:
    assert main(["verify-resume", *words]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"the same in both runs: {SAME}"
