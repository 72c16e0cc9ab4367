"""The progress hook on a terminal, in a file and on several ranks."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hook_runs import Terminal, loader, metrics, new_state, scripted, train
from listeners import failing, on
from ranks import run_ranks

from stepwrap.loops import CheckpointHook, EarlyStopHook, ProgressHook, ThroughputHook
from stepwrap.loops.display.notebook import DISPLAY_DIR
from stepwrap.loops.evaluate import TestLoop, ValLoop
from stepwrap.loops.hook import HookList, Scalars
from stepwrap.loops.state import LoopState
from stepwrap.loops.train import EpochTrainLoop, IterTrainLoop

BORDERS = "╭╮╰╯│"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    yield terminal
    terminal.text()


def get_panel(rows: list[str]) -> list[str]:
    """Return the rows of the panel on a screen without its border; empty without a panel."""
    tops = [index for index, row in enumerate(rows) if "╭" in row]
    ends = [index for index, row in enumerate(rows) if "╰" in row]
    assert len(tops) == len(ends) <= 1, rows
    if not tops:
        assert not any(set(row) & set(BORDERS) for row in rows), rows
        return []
    box = rows[tops[0] : ends[0] + 1]
    assert len({len(row) for row in box}) == 1, rows
    assert not any(rows[ends[0] + 1 :]), rows
    return [row.strip("│ ") for row in box[1:-1]]


def panels(screens: list[list[str]]) -> list[list[str]]:
    return [panel for screen in screens if (panel := get_panel(screen))]


def read_log(screens: list[list[str]]) -> list[str]:
    """Return the final rows, and check that they contain no parts of a panel."""
    assert not get_panel(screens[-1])
    return [row for row in screens[-1] if row]


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (100, 30)])
def test_panel_shows_the_run(terminal: Terminal, columns: int, rows: int) -> None:
    terminal.resize(columns, rows)
    with terminal:
        train(new_state(), [ProgressHook(refresh_s=1e-6), ThroughputHook()])
    screens = terminal.screens()
    shown_panels = panels(screens)
    # The last column is empty.
    assert {len(row) for screen in screens for row in screen if "╭" in row} == {columns - 1}
    assert re.fullmatch(r"epoch 2/2 ━+ step 8/8 100% eta 0:00:00", shown_panels[-1][0])
    assert any(
        re.fullmatch(r"epoch 1/2 [━╸╺]+ step 3/8 38% eta 0:00:\d\d", panel[0])
        for panel in shown_panels
    )
    assert any(panel[2] == "validating batch 2" for panel in shown_panels)
    assert re.fullmatch(r"loss [\d.]+", shown_panels[-1][1])
    assert re.fullmatch(r"error [\d.]+ \(best [\d.]+ at step 8\)", shown_panels[-1][2])
    assert re.fullmatch(
        r"[\d.]+ samples/s  data wait \d+%  memory \d+\.\d\d GiB( .*)?", shown_panels[-1][3]
    )
    log = read_log(screens)
    # On a slow machine lines may be longer and wrap.
    assert [row.split(" step ")[0] for row in log[:-1] if " step " in row] == [
        *["epoch 1/2", "epoch 1/2", "val epoch 1/2"],
        *["epoch 2/2", "epoch 2/2", "val epoch 2/2"],
    ]
    assert re.fullmatch(
        r"done: step 8/8 in 0:00:\d\d error [\d.]+ \(best [\d.]+ at step 8\)", log[-1]
    )


@pytest.mark.parametrize(("columns", "rows"), [(50, 10), (50, 30), (100, 8)])
def test_panel_is_one_row_on_a_small_terminal(terminal: Terminal, columns: int, rows: int) -> None:
    terminal.resize(columns, rows)
    with terminal:
        train(new_state(), [on(collect_logs=many_values), ProgressHook(refresh_s=1e-6)], epochs=1)
    for screen in terminal.screens()[2:-1]:
        shown = [row for row in screen if row]
        assert re.match(r"(validating batch \d )?epoch 1/1 step \d/4 \d+%", shown[-1])
        assert len(shown[-1]) < columns


def many_values(state: LoopState, scalars: Scalars) -> None:
    scalars |= {f"lr/{group}": 1e-4 * group for group in range(1, 31)}
    scalars |= {f"part_{number}": 1.0 for number in range(20)}


def test_many_values_are_cut_in_the_panel_and_whole_in_the_log(terminal: Terminal) -> None:
    hooks = [on(collect_logs=many_values), ThroughputHook(), ProgressHook(refresh_s=1e-6)]
    with terminal:
        train(new_state(), hooks)
    screens = terminal.screens()
    values = [panel[1] for panel in panels(screens) if panel[1]]
    assert values
    assert all(re.fullmatch(r"loss [\d.]+  lr 0.003  (part_\d+ 1 +)+.*…", text) for text in values)
    lines = re.findall(
        r"((?:val )?epoch) \d/2 step (\d)/8 (?:loss [\d.]+ lr 0.003 (?:part_\d+ 1 ){20}"
        r"[\d.]+ samples/s (?:\(.*?\) )?eta 0:00:00|error [\d.]+)",
        # The terminal breaks long lines at any character.
        "".join(row.ljust(80) if len(row) > 78 else f"{row} " for row in read_log(screens)),
    )
    steps = [("epoch", "2"), ("epoch", "4"), ("val epoch", "4")]
    assert lines == [*steps, ("epoch", "6"), ("epoch", "8"), ("val epoch", "8")]


def test_the_time_left_is_known_after_the_first_step(terminal: Terminal) -> None:
    with terminal:
        train(new_state(), [ProgressHook(refresh_s=1e-6)], epochs=1)
    heads = [panel[0] for panel in panels(terminal.screens()) if "step 1/4" in panel[0]]
    assert heads
    assert all(re.search(r"eta 0:00:\d\d$", row) for row in heads)


def test_the_time_left_includes_later_evaluations(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]

    def wait(seconds: float) -> Any:
        def listener(*_: object) -> None:
            now_s[0] += seconds

        return listener

    for module in ("hooks.progress", "display.lines"):
        monkeypatch.setattr(f"stepwrap.loops.{module}.perf_counter", lambda: now_s[0])
    clock = on(on_batch_end=wait(1.0), on_eval_batch_end=wait(10.0))
    with terminal:
        train(new_state(), [clock, ProgressHook(refresh_s=1e-6)], epochs=4)
    heads = [panel[0] for panel in panels(terminal.screens())]
    # Each epoch has 4 steps of 1 s and 2 validation batches of 10 s.
    assert any(re.search(r"step 1/16 6% eta 0:00:15", head) for head in heads)
    assert any(re.search(r"step 5/16 31% eta 0:01:11", head) for head in heads)


@pytest.mark.parametrize(
    ("loop", "length"), [(EpochTrainLoop, {"max_epochs": 2}), (IterTrainLoop, {"max_steps": 8})]
)
def test_the_last_record_comes_before_the_validation_of_its_step(
    capsys: pytest.CaptureFixture[str], loop: Any, length: dict[str, int]
) -> None:
    validation = ValLoop(loader(8), metrics())
    train_loop = loop(loader(), val_loop=validation, log_every_steps=3, **length)
    train_loop.run(new_state(), HookList([ProgressHook()]))
    lines = capsys.readouterr().out.splitlines()
    shown = [re.match(r"(val )?epoch .*?(step \d)/8", line).group(1, 2) for line in lines]
    passes = (
        [(None, "step 3"), ("val ", "step 4")] if loop is EpochTrainLoop else [(None, "step 3")]
    )
    assert shown == [*passes, (None, "step 6"), (None, "step 8"), ("val ", "step 8")]


@pytest.mark.parametrize(
    ("keep_best", "shown"),
    [("error", "error 3 (best 2 at step 8)"), ("score", "score 1 (best 6 at step 8)")],
)
def test_the_metric_of_the_checkpoints_is_shown(
    terminal: Terminal, keep_best: str, shown: str
) -> None:
    state = new_state()
    state.stateful["hooks.checkpoint"] = CheckpointHook(keep_best=keep_best)
    measured = {
        "error": scripted(4.0, 2.0, 3.0),
        "score": scripted(5.0, 6.0, 1.0, higher_is_better=True),
    }
    with terminal:
        train(
            state,
            [ProgressHook()],
            epochs=3,
            sanity_val=False,
            val_loop=ValLoop(loader(8), measured),
        )
    screens = terminal.screens()
    assert panels(screens)[-1][2] == shown
    assert read_log(screens)[-1].endswith(shown)


@pytest.mark.parametrize("event", ["on_update", "on_eval_batch_end", "on_log"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no")], ids=repr)
def test_an_error_leaves_a_log_and_the_streams(
    terminal: Terminal, error: BaseException, event: str
) -> None:
    with terminal:
        streams = sys.stdout, sys.stderr
        with pytest.raises(type(error)):
            train(new_state(), [ProgressHook(), failing(error, event)])
        assert (sys.stdout, sys.stderr) == streams
    assert re.fullmatch(
        rf"ended at step \d/8: {type(error).__name__}", read_log(terminal.screens())[-1]
    )
    assert "\x1b[?25l" not in terminal.text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_log_and_the_streams(terminal: Terminal, number: signal.Signals) -> None:
    def stop(state: LoopState) -> None:
        if state.step == 3:
            os.kill(os.getpid(), number)

    with terminal:
        streams = sys.stdout, sys.stderr
        train(new_state(), [ProgressHook(refresh_s=1e-6), on(on_update=stop)])
        assert (sys.stdout, sys.stderr) == streams
    screens = terminal.screens()
    assert panels(screens)
    assert read_log(screens)[-1] == f"stopped at step 3: received {number.name}"


def test_panel_is_not_redrawn_at_each_update(terminal: Terminal) -> None:
    with terminal:
        train(
            new_state(),
            [ProgressHook(refresh_s=1000)],
            epochs=50,
            val_loop=None,
            log_every_steps=500,
        )
    assert terminal.text().count("step ") < 10


def test_other_output_stays_above_the_panel(terminal: Terminal) -> None:
    logger = logging.getLogger("stepwrap.test_progress")

    def speak(state: LoopState) -> None:
        if state.step == 1:
            print("printed\nin two lines")
        elif state.step == 2:
            print("\r 10%\r 50%", end="", file=sys.stderr, flush=True)
            print("\r100%", file=sys.stderr)
        elif state.step == 3:
            # Writes like another rank.
            os.write(terminal.stream.fileno(), b"from another process\n")
            logger.warning("logged")
        else:
            print("without an end", end="")

    with terminal:
        handler = logging.StreamHandler()
        logger.addHandler(handler)
        train(new_state(), [ProgressHook(refresh_s=1e-6), on(on_update=speak)], epochs=1)
        logger.removeHandler(handler)
        assert handler.stream is sys.stderr
    screens = terminal.screens()
    assert max(map(len, panels(screens))) == 4
    log = "\n".join(read_log(screens))
    assert re.fullmatch(
        r"printed\nin two lines\n100%\nepoch 1/1 step 2.*\n"
        r"from another process\nlogged\nepoch 1/1 step 4.*\nval .*\ndone: .*\nwithout an end",
        log,
    ), log


def test_resizing_leaves_no_part_of_a_panel(terminal: Terminal) -> None:
    sizes = {2: (100, 30), 4: (50, 30), 6: (70, 30), 8: (60, 30), 10: (100, 30)}

    def resize(state: LoopState) -> None:
        if state.step in sizes:
            terminal.resize(*sizes[state.step])
            print(f"resized to {sizes[state.step]}")

    with terminal:
        hooks = [ProgressHook(refresh_s=1e-6), on(on_update=resize)]
        train(new_state(), hooks, epochs=3, log_every_steps=100)
    screens = terminal.screens()
    # The last screen before the line still shows the old panel, cut off.
    calm = [
        before for before, after in pairwise(screens) if read_sizes(before) == read_sizes(after)
    ]
    widths = {len(row) for screen in calm for row in screen if "╭" in row}
    assert widths == {79, 99, 69, 59}
    assert len(panels(calm)) > 10
    rows = [row for row in read_log(screens) if row.startswith("resized")]
    assert rows == [f"resized to {size}" for size in sizes.values()]


def read_sizes(screen: list[str]) -> str:
    """Return the last size that a screen names."""
    return next((row for row in reversed(screen) if row.startswith("resized")), "")


def test_lines_if_the_output_is_not_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    train(new_state(), [ProgressHook(), ThroughputHook()])
    text = sys.stdout.getvalue()
    lines = text.splitlines()
    assert [line.split()[0] for line in lines] == ["epoch", "epoch", "val", "epoch", "epoch", "val"]
    assert re.fullmatch(
        r"epoch 1/2 step 2/8 loss [\d.]+ [\d.]+ samples/s( \(.*\))? eta 0:00:00", lines[0]
    )
    assert re.fullmatch(r"val epoch 1/2 step 4/8 error [\d.]+", lines[2])
    assert "\x1b" not in text


def test_lines_on_a_dumb_terminal(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with terminal:
        train(new_state(), [ProgressHook()])
    assert "\x1b" not in terminal.text()


def test_the_reason_for_stopping_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    state = new_state(lr=0.0)
    train(state, [ProgressHook(), EarlyStopHook("error", patience=1)], epochs=5)
    assert re.search("stopped at step 8: error .*lowest", capsys.readouterr().out)


def test_an_evaluation_alone_is_shown(terminal: Terminal) -> None:
    with terminal:
        TestLoop(loader(8), metrics()).run(new_state(), HookList([ProgressHook(refresh_s=1e-6)]))
    screens = terminal.screens()
    assert any("testing batch 2" in panel for panel in panels(screens))
    assert re.fullmatch(r"test epoch 1 step 0 error [\d.]+", read_log(screens)[-1])


def test_limits_of_the_speed_are_shown_once(
    terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = iter([0.3, 0.4, 0.6, 0.2])

    def limit(state: LoopState, scalars: Scalars) -> None:
        state.limits = {"rank 2": next(shares), "loading data": 0.5}

    with terminal:
        train(new_state(), [on(collect_logs=limit), ProgressHook(refresh_s=1e-6)])
    screens = terminal.screens()
    facts = re.compile(r"rank 2 limits|rank 2, loading|\d+%").findall
    assert [facts(row) for row in panels(screens)[-1][-2:]] == [
        ["rank 2 limits", "20%"],
        ["rank 2, loading", "50%"],
    ]
    assert [facts(row) for row in read_log(screens) if "rank 2" in row] == [
        ["rank 2 limits", "30%"],
        ["rank 2, loading", "50%"],
        ["rank 2 limits", "60%"],
    ]
    shares = iter([0.3, 0.2])
    train(new_state(), [on(collect_logs=limit), ProgressHook()], epochs=1)
    assert len(re.findall("rank 2 limits .*30%", capsys.readouterr().out)) == 1


def test_a_notebook_shows_the_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DISPLAY_DIR, str(tmp_path))
    texts: list[str] = []

    def look(state: LoopState) -> None:
        (path,) = tmp_path.glob("*.display")
        texts.append(json.loads(path.read_text())["data"]["text/plain"])

    train(new_state(), [ProgressHook(refresh_s=1e-6), on(90, on_update=look)], epochs=1)
    assert re.match(
        r"epoch 1/1 [━╸╺]+ step 3/4 75% eta", get_panel(["", *texts[2].splitlines()])[0]
    )
    look(new_state())
    assert texts[-1].splitlines()[-1].startswith("done: step 4/4 in 0:00:")


def _printed_by_rank() -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        train(new_state(), [ProgressHook(), ThroughputHook()])
    return out.getvalue()


def test_only_rank_0_prints() -> None:
    rank_0, second = run_ranks(_printed_by_rank, 2)
    assert "step 4/4" in rank_0
    assert second == ""


def test_refresh_time_must_be_positive() -> None:
    with pytest.raises(ValueError, match="refresh_s must be > 0, got 0"):
        ProgressHook(refresh_s=0)


def test_state_counts_the_running_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    hook = ProgressHook()
    state = LoopState(model=new_state().model, epoch=3, batch=2, step=7)
    hook.on_train_start(state)
    hook.on_log(state, {"loss": 0.25})
    assert capsys.readouterr().out == "epoch 4 step 7 loss 0.25\n"


def test_a_record_of_a_slow_run_is_shown_at_once(terminal: Terminal) -> None:
    hook, state = ProgressHook(refresh_s=0.001), new_state()
    with terminal:
        hook.on_train_start(state)
        state.step = 1
        hook.on_update(state)
        hook.on_log(state, {"loss": 0.125})
        hook.on_exception(state, ValueError())
    assert "loss 0.125" in terminal.text()


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        ({"samples_per_s": 12345.6}, "12346 samples/s"),
        ({"samples_per_s": 1e7}, "10000000 samples/s"),
        ({"samples_per_s": 999.87}, "999.9 samples/s"),
        ({"samples_per_s": 0.5}, "0.5 samples/s"),
        (
            {"samples_per_s": 5.0, "tokens_per_s": 1234567.8, "mfu": 0.414},
            "5 samples/s 1234568 tokens/s 41% MFU",
        ),
    ],
)
def test_speeds_are_shown_without_powers_of_ten(
    capsys: pytest.CaptureFixture[str], record: dict[str, float], shown: str
) -> None:
    hook, state = ProgressHook(), new_state()
    hook.on_train_start(state)
    hook.on_log(state, {"lr": 1e-5, **record})
    assert f"lr 1e-05 {shown}" in capsys.readouterr().out
