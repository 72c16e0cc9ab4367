"""Where the run is, on the terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection
from time import perf_counter
from typing import Any

from ...collectives import get_rank
from ...registry import HOOKS
from ..hook import Hook
from ..state import LoopState
from ._display import Silent, open_display, shows_bar


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
