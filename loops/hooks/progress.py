"""Progress: a bar on a terminal, plain lines elsewhere; records as one line of text."""

from __future__ import annotations

import atexit
import math
import sys
from collections.abc import Collection, Mapping
from datetime import timedelta
from time import perf_counter
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from ...collectives import get_rank
from ...registry import HOOKS
from ..hook import Hook
from ..state import LoopState

_VERBS = {"val": "validating", "test": "testing"}
# Told in words of their own at the end of the line.
_SPEED_KEYS = ("samples_per_s", "steps_per_s", "data_share")
_DATA_SHARE_SHOWN = 0.1


def train_line(state: LoopState, record: Mapping[str, float]) -> str:
    """`epoch 2/10 step 150/500 loss 0.123 lr 0.001 1234 samples/s eta 0:01:20`."""
    return " ".join(
        [epoch_text(state), step_text(state), values_text(record), *_speed(state, record)]
    )


def eval_line(state: LoopState, metrics: Mapping[str, float]) -> str:
    """`val epoch 2/10 step 150/500 accuracy 0.97`."""
    values = values_text(metrics) or ("cut short" if state.stop_reason else "no metrics")
    return " ".join([state.phase.value, epoch_text(state), step_text(state), values])


def epoch_text(state: LoopState) -> str:
    """`epoch 2/10`, counting the running epoch as one."""
    total = "" if state.max_epochs is None else f"/{state.max_epochs}"
    return f"epoch {state.running_epoch}{total}"


def step_text(state: LoopState) -> str:
    """`step 150/500`, in optimizer updates."""
    total = "" if state.max_steps is None else f"/{state.max_steps}"
    return f"step {state.step}{total}"


def values_text(values: Mapping[str, float]) -> str:
    """`loss 0.123 lr 0.001`: four digits each, the figures of speed left out.

    Of several learning rates (`lr/0`, `lr/1`, ...) only the highest is shown, as `lr`.
    """
    shown: dict[str, float] = {}
    for name, value in values.items():
        if name.startswith("lr/"):
            shown["lr"] = max(value, shown.get("lr", value))
        elif name not in _SPEED_KEYS:
            shown[name] = value
    return " ".join(f"{name} {value:.4g}" for name, value in shown.items())


def count_text(value: float) -> str:
    """`0.1235`, `123.5`, `12346`: four digits, but no power of ten."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _speed(state: LoopState, record: Mapping[str, float]) -> list[str]:
    words = []
    if "samples_per_s" in record:
        words.append(f"{count_text(record['samples_per_s'])} samples/s")
    if record.get("data_share", 0.0) > _DATA_SHARE_SHOWN:
        words.append(f"({record['data_share']:.0%} waiting for data)")
    steps_per_s = record.get("steps_per_s", 0.0)
    if state.max_steps is not None and steps_per_s > 0:
        left_s = round(max(0, state.max_steps - state.step) / steps_per_s)
        words.append(f"eta {timedelta(seconds=left_s)}")
    return words


class Silent:
    """Shows nothing: what ranks other than 0 have.

    Attributes:
        moves: Whether `advance` changes what is seen.
    """

    moves = False

    def advance(self, state: LoopState, eval_batches: int) -> None:
        """Show how far training, or the running evaluation, has come."""

    def log(self, state: LoopState, record: Mapping[str, float]) -> None:
        """Show a log record."""

    def start_eval(self, state: LoopState) -> None:
        """Show that an evaluation has started."""

    def end_eval(self, state: LoopState, metrics: Mapping[str, float]) -> None:
        """Show the results of the evaluation."""

    def say(self, line: str) -> None:
        """Show a line that stays."""

    def close(self) -> None:
        """Give the output back; the display can not be used any more."""


class Lines(Silent):
    """One line for each log record and each evaluation."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def log(self, state: LoopState, record: Mapping[str, float]) -> None:
        self.say(train_line(state, record))

    def end_eval(self, state: LoopState, metrics: Mapping[str, float]) -> None:
        self.say(eval_line(state, metrics))

    def say(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class Bar(Silent):
    """A bar over the whole run at the bottom of a terminal, with evaluations above it.

    Drawing it takes about half a millisecond: only `advance` does, for whoever looks at the time.
    """

    moves = True

    def __init__(self, stream: TextIO) -> None:
        # Only the columns with a ratio shrink: however many values there are, the place stays.
        values = Column(no_wrap=True, overflow="ellipsis", ratio=3)
        # No refreshing thread: it would compete with the training loop for the interpreter.
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            TextColumn("{task.fields[count]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[values]}", table_column=values),
            console=Console(file=stream),
            auto_refresh=False,
            expand=True,
        )
        self._train: TaskID | None = None
        self._eval: TaskID | None = None
        self._values = ""
        self._progress.start()
        # An error that reaches no hook must not leave a terminal without a cursor.
        atexit.register(self._progress.stop)

    def advance(self, state: LoopState, eval_batches: int) -> None:
        if self._eval is not None:
            self._progress.update(self._eval, count=f"batch {eval_batches}", refresh=True)
        else:
            self._update_train(state)

    def log(self, state: LoopState, record: Mapping[str, float]) -> None:
        speed = record.get("samples_per_s")
        suffix = "" if speed is None else f" {count_text(speed)} samples/s"
        self._values = values_text(record) + suffix

    def start_eval(self, state: LoopState) -> None:
        verb = _VERBS.get(state.phase.value, state.phase.value)
        self._eval = self._progress.add_task(verb, total=None, count="", values="")
        self._progress.refresh()

    def end_eval(self, state: LoopState, metrics: Mapping[str, float]) -> None:
        if self._eval is not None:
            self._progress.remove_task(self._eval)
            self._eval = None
        self.say(eval_line(state, metrics))

    def say(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._progress.refresh()

    def close(self) -> None:
        self._progress.stop()
        atexit.unregister(self._progress.stop)

    def _update_train(self, state: LoopState) -> None:
        shown: dict[str, Any] = {
            "description": epoch_text(state),
            "completed": state.step,
            "count": step_text(state),
            "values": self._values,
        }
        if self._train is None:
            self._train = self._progress.add_task(total=state.max_steps, **shown)
        else:
            self._progress.update(self._train, refresh=True, **shown)


def open_display(stream: TextIO, rank: int) -> Silent:
    """Return the display that fits this rank and this stream."""
    if shows_bar(stream, rank):
        return Bar(stream)
    return Lines(stream) if rank == 0 else Silent()


def shows_bar(stream: TextIO, rank: int) -> bool:
    """Say whether the display is a bar."""
    # A dumb terminal (an editor's shell) can not move its cursor.
    return rank == 0 and stream.isatty() and not Console(file=stream).is_dumb_terminal


@HOOKS.register_module()
class ProgressHook(Hook):
    """A progress bar on a terminal, one plain line a log record elsewhere.

    Writes to the standard output of rank 0; the other ranks are silent. It
    alone shows the records: `LogHook` writes them into files, and on the
    console only if told to. Of several learning rates it shows the highest; the
    files hold all of them.

    Args:
        refresh_s: Seconds between two drawings of the bar.
    """

    order = 80

    def __init__(self, *, refresh_s: float = 0.2) -> None:
        if not refresh_s > 0:
            raise ValueError(f"refresh_s must be > 0, got {refresh_s!r}")
        self._refresh_s = refresh_s
        self._display = Silent()
        self._opened = False
        self._training = False
        self._eval_batches = 0
        self._due_s = math.inf
        self._log_due_s = 0.0

    def ignores(self) -> Collection[str]:
        """Without a bar there is nothing to draw between two records."""
        return () if shows_bar(sys.stdout, get_rank()) else ("on_update", "on_eval_batch_end")

    def on_train_start(self, state: LoopState) -> None:
        self._training = True
        self._open()
        self._refresh(state)

    def on_update(self, state: LoopState) -> None:
        if perf_counter() >= self._due_s:
            self._refresh(state)

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        self._display.log(state, record)
        # By a time of its own: slow updates have just been shown, with the values before these.
        if self._display.moves and perf_counter() >= self._log_due_s:
            self._refresh(state)
            self._log_due_s = self._due_s

    def on_eval_start(self, state: LoopState) -> None:
        self._open()
        self._eval_batches = 0
        self._display.start_eval(state)

    def on_eval_batch_end(self, state: LoopState, batch: Any, outputs: Any) -> None:
        self._eval_batches += 1
        if perf_counter() >= self._due_s:
            self._refresh(state)

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        self._display.end_eval(state, metrics)
        if not self._training:
            self._close()

    def on_train_end(self, state: LoopState) -> None:
        self._refresh(state)
        if state.stop_reason:
            self._display.say(f"stopped at step {state.step}: {state.stop_reason}")
        self._training = False
        self._close()

    def on_exception(self, state: LoopState, error: BaseException) -> None:
        self._training = False
        self._close()

    def _open(self) -> None:
        if not self._opened:
            self._opened = True
            self._display = open_display(sys.stdout, get_rank())
            self._due_s = 0.0 if self._display.moves else math.inf

    def _close(self) -> None:
        if self._opened:
            self._display.close()
            self._display = Silent()
            self._opened = False
            self._due_s = math.inf

    def _refresh(self, state: LoopState) -> None:
        if self._display.moves:
            self._display.advance(state, self._eval_batches)
            self._due_s = perf_counter() + self._refresh_s
