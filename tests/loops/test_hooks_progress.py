"""The progress hook on a terminal, in a file and on other ranks."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hook_runs import Terminal, loader, metrics, new_state, train
from listeners import failing, on
from ranks import run_ranks

from stepwrap.loops import EarlyStopHook, ProgressHook, ThroughputHook
from stepwrap.loops.evaluate import TestLoop, ValLoop
from stepwrap.loops.hook import HookList, Scalars
from stepwrap.loops.state import LoopState
from stepwrap.loops.train import EpochTrainLoop, IterTrainLoop

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal(columns=140)
    yield terminal
    terminal.text()


def test_bar_shows_epoch_step_values_and_speed(terminal: Terminal) -> None:
    with terminal:
        train(new_state(), [ProgressHook(refresh_s=1e-6), ThroughputHook()])
    text = terminal.text()
    assert "epoch 1/2" in text
    assert "epoch 2/2" in text
    assert "step 8/8" in text
    assert re.search(r"loss \d+\.\d+", text)
    assert re.search(r"\d samples/s", text)
    assert "validating" in text
    assert re.search(r"val epoch 1/2 step 4/8 error \d", text)


def _drawn(terminal: Terminal) -> list[str]:
    """Return what was written to the terminal, line by line and frame by frame."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.text())
    return [frame.rstrip() for frame in re.split(r"\r|\n", plain)]


def many_values(state: LoopState, scalars: Scalars) -> None:
    scalars |= {f"lr/{group}": 1e-4 * group for group in range(1, 31)}
    scalars |= {f"part_{part}": 1.0 for part in range(20)}


def test_many_values_leave_the_place_of_the_run_on_the_bar(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    with terminal:
        train(new_state(), [on(collect_logs=many_values), ProgressHook(refresh_s=1e-6)])
    bars = [frame for frame in _drawn(terminal) if re.search("[━╸╺]", frame)]
    assert any("validating" in frame for frame in bars)
    for frame in (frame for frame in bars if "validating" not in frame):
        assert re.fullmatch(r"epoch [12]/2 +[━╸╺]{20,} step \d/8( eta 0:\d\d:\d\d)?", frame), frame
        assert len(frame) <= 72


@pytest.mark.parametrize("columns", [80, 200])
def test_training_lines_stay_above_the_bar_and_are_whole(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    hooks = [on(collect_logs=many_values), ThroughputHook(), ProgressHook(refresh_s=1000)]
    with terminal:
        train(new_state(), hooks)
    text = " ".join(frame for frame in _drawn(terminal) if not re.search("[━╸╺]", frame))
    told = re.sub(" +", " ", text)
    lines = re.findall(
        r"((?:val )?epoch) \d/2 step (\d)/8 (?:loss [\d.]+ lr 0.003 (?:part_\d+ 1 ){20}"
        r"[\d.]+ samples/s (?:\(.*?\) )?eta 0:00:00|error [\d.]+)",
        told,
    )
    steps = [("epoch", "2"), ("epoch", "4"), ("val epoch", "4")]
    assert lines == [*steps, ("epoch", "6"), ("epoch", "8"), ("val epoch", "8")]
    assert "…" not in told


def test_the_time_left_is_known_after_the_first_step(terminal: Terminal) -> None:
    with terminal:
        train(new_state(), [ProgressHook(refresh_s=1e-6)], epochs=1)
    bars = [frame for frame in _drawn(terminal) if re.search("[━╸╺]", frame)]
    first = [frame for frame in bars if "step 1/4" in frame]
    assert first
    assert all(re.search(r"eta 0:00:\d\d$", frame) for frame in first)
    assert not any("-:--:--" in frame for frame in bars)


@pytest.mark.parametrize(
    ("loop", "length"), [(EpochTrainLoop, {"max_epochs": 2}), (IterTrainLoop, {"max_steps": 8})]
)
def test_the_last_record_comes_before_the_validation_of_its_step(
    capsys: pytest.CaptureFixture[str], loop: Any, length: dict[str, int]
) -> None:
    validation = ValLoop(loader(8), metrics())
    made = loop(loader(), val_loop=validation, log_every_steps=3, **length)
    made.run(new_state(), HookList([ProgressHook()]))
    lines = capsys.readouterr().out.splitlines()
    told = [re.match(r"(val )?epoch .*?(step \d)/8", line).group(1, 2) for line in lines]
    passes = (
        [(None, "step 3"), ("val ", "step 4")] if loop is EpochTrainLoop else [(None, "step 3")]
    )
    assert told == [*passes, (None, "step 6"), (None, "step 8"), ("val ", "step 8")]


def test_bar_gives_the_cursor_and_stdout_back(terminal: Terminal) -> None:
    with terminal:
        train(new_state(), [ProgressHook()])
        assert sys.stdout is terminal.stream
    text = terminal.text()
    assert HIDE in text
    assert text.rindex(SHOW) > text.rindex(HIDE)


@pytest.mark.parametrize("event", ["on_update", "on_eval_batch_end", "on_log"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no")], ids=repr)
def test_bar_gives_the_cursor_back_after_an_error(
    terminal: Terminal, error: BaseException, event: str
) -> None:
    with terminal:
        with pytest.raises(type(error)):
            train(new_state(), [ProgressHook(), failing(error, event)])
        assert sys.stdout is terminal.stream
    text = terminal.text()
    assert text.rindex(SHOW) > text.rindex(HIDE)


def test_bar_is_not_redrawn_at_each_update(terminal: Terminal) -> None:
    with terminal:
        train(
            new_state(),
            [ProgressHook(refresh_s=1000)],
            epochs=50,
            val_loop=None,
            log_every_steps=500,
        )
    assert terminal.text().count("step ") < 10


def test_what_others_print_stays_above_the_bar(terminal: Terminal) -> None:
    printing = on(on_update=lambda state: print(f"said at {state.step}"))
    with terminal:
        train(new_state(), [ProgressHook(), printing], epochs=1)
    assert re.search(r"(\r|\x1b\[2K)said at 3\r?\n", terminal.text())


def test_lines_where_the_output_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert "stopped at step 8: error was lowest at" in capsys.readouterr().out


def test_an_evaluation_alone_is_shown(terminal: Terminal) -> None:
    with terminal:
        TestLoop(loader(8), metrics()).run(new_state(), HookList([ProgressHook(refresh_s=1e-6)]))
    text = terminal.text()
    assert "testing" in text
    assert "test epoch 1 step 0 error" in text
    assert text.rindex(SHOW) > text.rindex(HIDE)


def _printed_by_rank() -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        train(new_state(), [ProgressHook(), ThroughputHook()])
    return out.getvalue()


def test_only_rank_0_prints() -> None:
    first, second = run_ranks(_printed_by_rank, 2)
    assert "step 4/4" in first
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
