"""The record files of a run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from ...collectives import get_rank
from ...registry import HOOKS
from ..hook import Hook
from ..state import LoopState, Phase
from ._lines import eval_line, train_line
from ._records import FIXED_COLUMNS, Record, RecordFiles

logger = logging.getLogger(__name__)


@HOOKS.register_module()
class LogHook(Hook):
    """Writes each log record and evaluation into `metrics.jsonl` and `metrics.csv`.

    Rank 0 alone writes, into `state.run_dir` (nothing where that is None), and
    flushes after each record. A record is `{"step", "epoch", "phase", "time",
    ...}`: `step` in optimizer updates, `epoch` from 1 (`state.running_epoch`),
    `phase` one of "train", "val", "test", `time` in seconds since 1970, then the
    values by name; a value named like one of the four gets a `_` behind it. NaN and
    infinities are `null` in the JSON lines and `nan` in the table. A resumed
    run drops the records that came after the restored checkpoint, so that no
    step appears twice. Its first record replaces that of an interval which the
    end of the earlier run cut short. An evaluation alone adds to the files, also
    while a training writes them.

    Args:
        console: Also log each record as a line at INFO. Off, because
            `ProgressHook` shows them already.
    """

    order = 70

    def __init__(self, *, console: bool = False) -> None:
        self._console = console
        self._files: RecordFiles | None = None
        # The updates within which an earlier run ended inside a log interval.
        self._cut_short = range(0)

    def on_train_start(self, state: LoopState) -> None:
        self._close()
        self._open(state, keep=lambda record: _is_past(record, state))
        if state.logs.means():
            self._cut_short = range(state.recorded_at + 1, state.step + 1)

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        if self._cut_short:
            # Its part of the interval is in this record as well.
            cut_short, self._cut_short = self._cut_short, range(0)
            self._close()
            self._open(state, keep=lambda one: not _is_of_training(one, cut_short))
        self._write(state, "train", record)
        if self._console and get_rank() == 0:
            logger.info("%s", train_line(state, record))

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        if metrics:
            self._write(state, state.phase.value, metrics)
        if self._console and get_rank() == 0:
            logger.info("%s", eval_line(state, metrics))

    def on_train_end(self, state: LoopState) -> None:
        self._close()

    def on_run_end(self, state: LoopState) -> None:
        self._close()

    def on_exception(self, state: LoopState, error: BaseException) -> None:
        self._close()

    def _open(self, state: LoopState, *, keep: Callable[[Record], bool] | None = None) -> None:
        if state.run_dir is not None and get_rank() == 0:
            self._files = RecordFiles(state.run_dir, keep=keep)

    def _close(self) -> None:
        if self._files is not None:
            self._files.close()
            self._files = None

    def _write(self, state: LoopState, phase: str, values: Mapping[str, float]) -> None:
        if self._files is None:
            self._open(state)
        if self._files is None:
            return
        record: Record = {
            "step": state.step,
            "epoch": state.running_epoch,
            "phase": phase,
            "time": round(time.time(), 3),
        }
        named = {f"{k}_" if k in FIXED_COLUMNS else k: float(v) for k, v in values.items()}
        self._files.append({**record, **named})


def _is_of_training(record: Record, steps: range) -> bool:
    return record.get("phase") == Phase.TRAIN.value and record.get("step") in steps


def _is_past(record: Record, state: LoopState) -> bool:
    """Say whether the restored run has this record behind it, so that it will not come again."""
    step = record.get("step")
    if not isinstance(step, (int, float)) or step > state.step or state.step == 0:
        return False
    if step < state.step or record.get("phase") != Phase.VAL.value:
        return True
    return state.evaluated_at == state.step
