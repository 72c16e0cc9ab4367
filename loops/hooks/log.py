"""Where the records of a run are written: JSON lines, the same as a CSV table, TensorBoard."""

from __future__ import annotations

import csv
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ...collectives import get_rank
from ...registry import HOOKS
from ..hook import Hook
from ..state import LoopState, Phase
from .progress import eval_line, train_line

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

Value = float | int | str | None
Record = dict[str, Value]

FIXED_COLUMNS = ("step", "epoch", "phase", "time")


class RecordFiles:
    """`metrics.jsonl` and `metrics.csv` in one folder, always with the same records.

    The table is derived from the JSON lines. Several processes may append to the same files, one
    writing each record at once.

    Args:
        folder: Created when it does not exist.
        keep: Records already there for which it is false are dropped, and so are those of other
            processes from now on; None to leave all as it is.
    """

    def __init__(self, folder: Path, *, keep: Callable[[Record], bool] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._json_path = folder / "metrics.jsonl"
        self._csv_path = folder / "metrics.csv"
        self._columns = list(FIXED_COLUMNS)
        if keep is None:
            self._json = _open_whole(self._json_path)
            self._csv = self._open_csv()
            return
        kept = [record for record in read_records(self._json_path) if keep(record)]
        temporary = self._json_path.with_name(self._json_path.name + ".tmp")
        temporary.write_text("".join(map(_json_line, kept)), encoding="utf-8")
        os.replace(temporary, self._json_path)
        self._json = self._json_path.open("a", encoding="utf-8")
        self._csv = self._rewrite_csv(kept)

    def append(self, record: Mapping[str, Value]) -> None:
        """Write one record to both files and flush them.

        Raises:
            FileNotFoundError: The folder is gone.
        """
        if not self._json_path.parent.is_dir():
            folder = self._json_path.parent
            raise FileNotFoundError(f"the run folder {folder} was removed while the run used it")
        finite = {key: _finite(value) for key, value in record.items()}
        if not _is_file(self._csv, self._csv_path):
            # Another process has found a new column.
            self._csv.close()
            self._csv = self._open_csv()
        self._json.write(_json_line(finite))
        self._json.flush()
        if self._add_columns([finite]):
            self._csv.close()
            # As a whole: the other process's records are in the lines too.
            self._csv = self._rewrite_csv(read_records(self._json_path))
            return
        csv.writer(self._csv).writerow(self._cells(finite))
        self._csv.flush()

    def close(self) -> None:
        """Close both files; further calls do nothing."""
        self._json.close()
        self._csv.close()

    def _add_columns(self, records: Iterable[Mapping[str, Value]]) -> bool:
        new = [k for k in dict.fromkeys(k for r in records for k in r) if k not in self._columns]
        self._columns += new
        return bool(new)

    def _cells(self, record: Mapping[str, Value]) -> list[Value]:
        values = (record.get(column, "") for column in self._columns)
        return ["nan" if value is None else value for value in values]

    def _open_csv(self) -> TextIO:
        """Open the table that is there for appending, or make it."""
        file = _open_whole(self._csv_path, newline="")
        with self._csv_path.open(encoding="utf-8", errors="replace", newline="") as table:
            columns = next(csv.reader(table), [])
        if columns:
            self._columns = columns
            return file
        file.close()
        return self._rewrite_csv(read_records(self._json_path))

    def _rewrite_csv(self, records: Sequence[Record]) -> TextIO:
        """Write the whole table under another name, put it in place and open it for appending."""
        self._add_columns(records)
        temporary = self._csv_path.with_name(self._csv_path.name + ".tmp")
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(self._columns)
            writer.writerows(self._cells(record) for record in records)
        os.replace(temporary, self._csv_path)
        return self._csv_path.open("a", encoding="utf-8", newline="")


def read_records(path: Path) -> list[Record]:
    """Read a `metrics.jsonl`, if there is one; a last line cut off by a crash is left out."""
    if not path.exists():
        return []
    records: list[Record] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _open_whole(path: Path, *, newline: str | None = None) -> TextIO:
    """Open for appending, on a new line also where a crash cut off the last one."""
    file = path.open("a", encoding="utf-8", newline=newline)
    with path.open("rb") as written:
        if written.seek(0, os.SEEK_END):
            written.seek(-1, os.SEEK_END)
            if written.read() != b"\n":
                file.write("\n")
                file.flush()
    return file


def _is_file(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _json_line(record: Mapping[str, Value]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _finite(value: Value) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@HOOKS.register_module()
class LogHook(Hook):
    """Writes each log record and evaluation into `metrics.jsonl` and `metrics.csv`.

    Only rank 0 writes, into `state.run_dir` (nothing if that is None), and flushes after each
    record. docs/hooks.md describes a record; a value named like one of its fixed four gets a `_`
    behind it. A resumed run drops the records that came after the restored checkpoint, so that no
    step appears twice. Its first record replaces that of an interval which the end of the earlier
    run cut short. An evaluation alone adds to the files, also while a training writes them.

    Args:
        console: Also log each record as a line at INFO, as `ProgressHook` shows it.
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


@HOOKS.register_module()
class TensorBoardHook(Hook):
    """Writes `train/...`, `val/...` and `test/...` scalars into `<run_dir>/tensorboard`.

    Only rank 0 writes; nothing if `state.run_dir` is None. The horizontal axis is the optimizer
    update. A resumed run hides what an earlier one wrote after the restored checkpoint.
    """

    order = 72

    def __init__(self) -> None:
        if find_spec("tensorboard") is None:
            raise ImportError(
                "TensorBoardHook needs TensorBoard; install it with "
                "`pip install stepwrap[tensorboard]`"
            )
        self._writer: SummaryWriter | None = None

    def on_train_start(self, state: LoopState) -> None:
        self._open(state)

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        self._write(state, "train", record)

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        self._open(state)
        self._write(state, state.phase.value, metrics)

    def on_run_end(self, state: LoopState) -> None:
        self._close()

    def on_train_end(self, state: LoopState) -> None:
        self._close()

    def on_exception(self, state: LoopState, error: BaseException) -> None:
        self._close()

    def _open(self, state: LoopState) -> None:
        if self._writer is not None or state.run_dir is None or get_rank() != 0:
            return
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(state.run_dir / "tensorboard", purge_step=state.step + 1)

    def _write(self, state: LoopState, phase: str, values: Mapping[str, float]) -> None:
        if self._writer is None:
            return
        for name, value in values.items():
            self._writer.add_scalar(f"{phase}/{name}", value, state.step)
        self._writer.flush()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
