"""Write the records of a run: as JSON lines, as a CSV table, and for TensorBoard."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ...collectives import get_rank
from ...registry import HOOKS
from ..hook import Hook
from ..state import LoopState, Phase
from .progress import eval_line, train_line

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

Record = dict[str, float | int | str | None]

_FIXED = ("step", "epoch", "phase", "time")


@HOOKS.register_module()
class LogHook(Hook):
    """Write each log record and evaluation into ``metrics.jsonl`` and ``metrics.csv``.

    Only rank 0 writes, into ``state.run_dir``; nothing is written if that is None. docs/hooks.md
    describes a record; a value with the name of one of its four fixed columns gets a ``_`` at the
    end of its name. A resumed run drops the records after the restored checkpoint, so that no step
    appears twice. If the earlier run ended inside a log interval, the first record of the resumed
    run replaces the record of that part. A separate evaluation adds to the files, even while a
    training run writes them.

    Args:
        console: Also log each record as a line at INFO, in the format of ``ProgressHook``.
    """

    order = 70

    def __init__(self, *, console: bool = False) -> None:
        self._console = console
        self._has_folder = False
        # The updates of the log interval that the end of an earlier run cut short.
        self._cut_short = range(0)

    def on_train_start(self, state: LoopState) -> None:
        self._keep(state, lambda record: _is_past(record, state))
        if state.logs.means():
            self._cut_short = range(state.recorded_at + 1, state.step + 1)

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        if self._cut_short:
            # This record includes the part of the interval that was cut short.
            steps, self._cut_short = self._cut_short, range(0)
            train = Phase.TRAIN.value
            self._keep(state, lambda r: r.get("phase") != train or r.get("step") not in steps)
        self._write(state, "train", record)
        if self._console and get_rank() == 0:
            logger.info("%s", train_line(state, record))

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        if metrics:
            self._write(state, state.phase.value, metrics)
        if self._console and get_rank() == 0:
            logger.info("%s", eval_line(state, metrics))

    def _keep(self, state: LoopState, keep: Callable[[Record], bool]) -> None:
        """Drop the records for which ``keep`` is false."""
        if state.run_dir is not None and get_rank() == 0:
            state.run_dir.mkdir(parents=True, exist_ok=True)
            self._has_folder = True
            lines = state.run_dir / "metrics.jsonl"
            _replace(lines, map(_json_line, filter(keep, _records_in(lines))))
            _rewrite_table(state.run_dir)

    def _write(self, state: LoopState, phase: str, values: Mapping[str, float]) -> None:
        folder = state.run_dir
        if folder is None or get_rank() != 0:
            return
        if not self._has_folder:
            folder.mkdir(parents=True, exist_ok=True)
            self._has_folder = True
        if not folder.is_dir():
            raise FileNotFoundError(f"the run folder {folder} was removed while the run used it")
        figures = (state.step, state.running_epoch, phase, round(time.time(), 3))
        record: Record = dict(zip(_FIXED, figures, strict=True))
        for name, value in values.items():
            # JSON has no NaN.
            finite = float(value) if math.isfinite(value) else None
            record[f"{name}_" if name in _FIXED else name] = finite
        _append(folder / "metrics.jsonl", _json_line(record))
        table = folder / "metrics.csv"
        columns = _columns_of(table)
        if record.keys() <= set(columns):
            _append(table, _csv_line(record, columns))
        else:
            _rewrite_table(folder)


def _is_past(record: Record, state: LoopState) -> bool:
    """Return whether a record precedes the restored checkpoint, so that it stays in the file."""
    step = record.get("step")
    # Without an update or a validation, the run starts from the beginning.
    is_new = state.step == 0 and state.evaluated_at != 0
    if not isinstance(step, (int, float)) or step > state.step or is_new:
        return False
    if step < state.step or record.get("phase") != Phase.VAL.value:
        return True
    return state.evaluated_at == state.step


def _records_in(path: Path) -> list[Record]:
    """Return the records of a ``metrics.jsonl``, if it exists, without lines cut off by a crash."""
    records: list[Record] = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _rewrite_table(folder: Path) -> None:
    """Rewrite the table from the JSON lines, since several processes may have added lines."""
    records = _records_in(folder / "metrics.jsonl")
    columns = list(dict.fromkeys([*_FIXED, *(name for record in records for name in record)]))
    header = _csv_line({name: name for name in columns}, columns)
    _replace(folder / "metrics.csv", [header, *(_csv_line(one, columns) for one in records)])


def _columns_of(table: Path) -> list[str]:
    if not table.exists():
        return []
    with table.open(encoding="utf-8", errors="replace", newline="") as file:
        return next(csv.reader(file), [])


def _csv_line(record: Record, columns: Iterable[str]) -> str:
    values = (record.get(column, "") for column in columns)
    line = io.StringIO(newline="")
    csv.writer(line).writerow(["nan" if value is None else value for value in values])
    return line.getvalue()


def _json_line(record: Record) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _replace(path: Path, lines: Iterable[str]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes("".join(lines).encode())
    os.replace(temporary, path)


def _append(path: Path, line: str) -> None:
    """Append a line by a single write, on a new line if a crash has cut off the last one."""
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            line = line if file.read() == b"\n" else f"\n{line}"
        file.write(line.encode())


@HOOKS.register_module()
class TensorBoardHook(Hook):
    """Write ``train/...``, ``val/...`` and ``test/...`` scalars into ``<run_dir>/tensorboard``.

    Only rank 0 writes; nothing is written if ``state.run_dir`` is None. The horizontal axis is the
    optimizer update. A resumed run hides values that were written after the restored checkpoint.

    Raises:
        ImportError: TensorBoard is not installed.
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
        if self._writer is None and state.run_dir is not None and get_rank() == 0:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(state.run_dir / "tensorboard", purge_step=state.step + 1)

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        self._write(state, "train", record)

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        self.on_train_start(state)
        self._write(state, state.phase.value, metrics)

    def on_run_end(self, state: LoopState) -> None:
        self._close()

    def on_train_end(self, state: LoopState) -> None:
        self._close()

    def on_exception(self, state: LoopState, error: BaseException) -> None:
        self._close()

    def _write(self, state: LoopState, phase: str, values: Mapping[str, float]) -> None:
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(f"{phase}/{name}", value, state.step)
            self._writer.flush()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
