"""Show how far a run is: as lines, as a live panel, and to other processes."""

from __future__ import annotations

import math
import mmap
import os
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ...collectives import get_rank
from ...registry import HOOKS
from ..display.limits import limit_texts
from ..display.lines import (
    TimeLeft,
    epoch_text,
    eval_line,
    rates_text,
    step_text,
    train_line,
    values_text,
)
from ..display.notebook import DISPLAY_DIR, NotebookDisplay, is_in_notebook
from ..display.panel import Progress
from ..display.terminal import TerminalDisplay
from ..hook import EVENTS, Hook
from ..metrics.evaluation import WatchedMetric
from ..skipping.rollback import Rollback
from ..state import LoopState, Phase
from .checkpoint import CheckpointHook
from .profile import device_with_peak, resident_bytes

_GIB = 2.0**30
# The size of the file that has the number of the last update.
_BYTES = 8
# A cause that limits the speed is printed again when its share has grown by this much.
_SHARE_GROWTH = 0.25
_VERBS = {Phase.TEST: "testing", Phase.PREDICT: "predicting"}


def _display_kind() -> type[TerminalDisplay] | type[NotebookDisplay] | None:
    """Return the display for the output of this process; None for a file."""
    if is_in_notebook() or DISPLAY_DIR in os.environ:
        return NotebookDisplay
    # A dumb terminal, such as an editor's shell, cannot move its cursor.
    is_dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return TerminalDisplay if sys.stdout.isatty() and not is_dumb else None


class _MainMetric:
    """The last and best value of ``CheckpointHook``'s metric; by default, of the first metric."""

    def __init__(self, state: LoopState) -> None:
        savers = [hook for hook in state.stateful.values() if isinstance(hook, CheckpointHook)]
        saver = next((hook for hook in savers if hook.watched.name), None)
        self._watched = None if saver is None else saver.watched
        self._best = None if saver is None else saver.best
        self._last: float | None = None
        self._best_step: int | None = None

    def update(self, state: LoopState, metrics: Mapping[str, float]) -> None:
        if self._watched is None:
            self._watched = WatchedMetric(next(iter(metrics), ""), None, setting="ProgressHook")
        self._last = metrics.get(self._watched.name)
        # If the direction is unknown, no value is the best.
        with suppress(ValueError):
            if self._last is not None and self._watched.improves(self._last, self._best, state):
                self._best, self._best_step = self._last, state.step

    def text(self) -> str:
        """Return ``accuracy 0.97 (best 0.98 at step 150)``; empty before the first validation."""
        if self._watched is None or self._last is None:
            return ""
        step = "" if self._best_step is None else f" at step {self._best_step}"
        best = "" if self._best is None else f" (best {self._best:.4g}{step})"
        return f"{self._watched.name} {self._last:.4g}{best}"


@HOOKS.register_module()
class ProgressHook(Hook):
    """Print a line for each log record and evaluation; on a terminal, also show a live panel.

    Writes to the standard output of rank 0; the other ranks print nothing. Lines, warnings and
    other output appear above the panel. In a notebook, the panel and the last 20 lines are one
    display below the cell, updated in place, also for the ranks that ``launch`` starts there.
    ``LogHook`` writes all records into files.

    Args:
        refresh_s: seconds between two drawings of the panel, more than 0.

    Raises:
        ValueError: ``refresh_s`` is not more than 0.
    """

    order = 80

    def __init__(self, *, refresh_s: float = 0.2) -> None:
        if not refresh_s > 0:
            raise ValueError(f"refresh_s must be > 0, got {refresh_s!r}")
        self._refresh_s = refresh_s
        self._display: TerminalDisplay | NotebookDisplay | None = None
        # None outside of training.
        self._time_left: TimeLeft | None = None
        self._metric: _MainMetric | None = None
        self._record: Mapping[str, float] = {}
        # The printed causes that limit the speed, with their shares.
        self._printed: dict[str, float] = {}
        self._started_s = self._eval_start_s = 0.0
        self._eval_batches: int | None = None
        self._due_s = math.inf
        self._log_due_s = 0.0

    def ignores(self) -> Collection[str]:
        """Ignore all events on ranks other than 0, and updates of the panel if there is none."""
        if get_rank() != 0:
            return EVENTS
        return () if _display_kind() else ("on_update", "on_eval_batch_end")

    def on_train_start(self, state: LoopState) -> None:
        self._time_left, self._metric = TimeLeft(state.step), _MainMetric(state)
        self._record, self._printed = {}, {}
        self._started_s = perf_counter()
        self._open()
        self._refresh(state)

    def on_update(self, state: LoopState) -> None:
        if perf_counter() >= self._due_s:
            self._refresh(state)

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        self._record = record
        self._say(train_line(state, record))
        for name, text in limit_texts(state.limits).items():
            if state.limits[name] >= self._printed.get(name, -1.0) + _SHARE_GROWTH:
                self._printed[name] = state.limits[name]
                self._say(text)
        # If `on_update` has just drawn the panel, `_due_s` is too late: this record's line must not
        # wait for the next update, which may be slow.
        if perf_counter() >= self._log_due_s:
            self._refresh(state)
            self._log_due_s = self._due_s

    def on_eval_start(self, state: LoopState) -> None:
        self._open()
        if self._time_left is not None:
            self._time_left.update(state)
        self._eval_batches = 0
        self._refresh(state)
        self._eval_start_s = perf_counter()

    def on_eval_batch_end(self, state: LoopState, batch: Any, outputs: Any) -> None:
        self._eval_batches = (self._eval_batches or 0) + 1
        if perf_counter() >= self._due_s:
            self._refresh(state)

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        self._eval_batches = None
        self._say(eval_line(state, metrics))
        if self._metric is not None:
            self._metric.update(state, metrics)
        if self._time_left is not None:
            self._time_left.count_eval(state, perf_counter() - self._eval_start_s)
        self._refresh(state)
        if self._time_left is None:
            self._close()

    def on_train_end(self, state: LoopState) -> None:
        if state.stop_reason:
            self._say(f"stopped at step {state.step}: {state.stop_reason}")
        elif self._display is not None:
            seconds = timedelta(seconds=round(perf_counter() - self._started_s))
            metric = self._metric.text() if self._metric is not None else ""
            self._say(" ".join(filter(None, [f"done: {step_text(state)} in {seconds}", metric])))
        self._close()

    def on_exception(self, state: LoopState, error: BaseException) -> None:
        if self._display is not None and not isinstance(error, Rollback):
            self._say(f"ended at {step_text(state)}: {type(error).__name__}")
        self._close()

    def _open(self) -> None:
        kind = _display_kind()
        if self._display is None and kind is not None:
            self._display, self._due_s = kind(), 0.0

    def _close(self) -> None:
        self._time_left = self._metric = None
        if self._display is not None:
            self._display.close()
            self._display, self._due_s = None, math.inf

    def _say(self, line: str) -> None:
        if self._display is not None:
            self._display.say(line)
        else:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    def _refresh(self, state: LoopState) -> None:
        if self._display is not None:
            self._display.draw(self._progress(state))
            self._due_s = perf_counter() + self._refresh_s

    def _progress(self, state: LoopState) -> Progress:
        shown = Progress("" if state.run_dir is None else state.run_dir.name)
        if self._eval_batches is not None:
            verb = _VERBS.get(state.phase, "validating")
            words = [verb, state.eval_set, f"batch {self._eval_batches}"]
            shown.evaluation = " ".join(filter(None, words))
        words = [f"memory {resident_bytes() / _GIB:.2f} GiB"]
        if (device := device_with_peak()) is not None:
            peak = torch.get_device_module(device).max_memory_allocated()
            words.append(f"GPU {peak / _GIB:.2f} GiB")
        if self._time_left is not None and self._metric is not None:
            if self._eval_batches is None:
                self._time_left.update(state)
            shown.epoch, shown.step = epoch_text(state), step_text(state)
            shown.completed, shown.total = state.step, state.max_steps
            shown.eta, shown.metric = self._time_left.text(state), self._metric.text()
            shown.values = values_text(self._record, "  ")
            shown.limits = list(limit_texts(state.limits).values())
            if "data_share" in self._record:
                words.insert(0, f"data wait {self._record['data_share']:.0%}")
            words = [*(rates_text(self._record) or [self._time_left.speed_text()]), *words]
        shown.speed = "  ".join(filter(None, words))
        return shown


class NoteStepHook(Hook):
    """Write the number of the last complete update to a file, which survives a SIGKILL."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_BYTES))
        with path.open("r+b") as file:
            self._number = memoryview(mmap.mmap(file.fileno(), _BYTES)).cast("q")

    def on_train_start(self, state: LoopState) -> None:
        self._number[0] = state.step + 1

    def on_update(self, state: LoopState) -> None:
        self._number[0] = state.step + 1

    @staticmethod
    def read(path: Path) -> int:
        """Return the step that a process wrote; -1 if it has not started training."""
        return int.from_bytes(path.read_bytes(), sys.byteorder) - 1 if path.exists() else -1
