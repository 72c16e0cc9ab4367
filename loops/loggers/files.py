"""Write the records of a run as JSON lines and as a CSV table, and media as files."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...collectives import get_rank
from ...primitives.files import replacing
from ...registry import HOOKS
from ..display.lines import eval_line, train_line
from ..state import LoopState, Phase
from .logger import LoggerHook, is_new_run

logger = logging.getLogger(__name__)

Record = dict[str, float | int | str | None]

_FIXED = ("step", "epoch", "phase", "time")


@HOOKS.register_module()
class LogHook(LoggerHook):
    """Write each log record and evaluation into ``metrics.jsonl`` and ``metrics.csv``.

    Only rank 0 writes, into ``state.run_dir``; nothing is written if that is None. docs/hooks.md
    describes the records. Every record has ``step``, ``epoch``, ``phase`` and ``time``; a logged
    value with one of these names is written with a ``_`` at the end of its name. Images and figures
    are written to ``media/NAME_STEP.png``, texts to ``media/NAME_STEP.txt``.

    A resumed run removes the records after the restored checkpoint, so that no step appears twice.
    If the earlier run ended inside a log interval, its last record covers a part of the interval;
    the first record of the resumed run covers all of it and replaces that record. ``stepwrap
    validate`` and ``stepwrap test`` append to the files, even during training.

    Args:
        console: also log each record as a line at INFO, in the format of ``ProgressHook``.
    """

    order = 70
    can_replace = True

    def __init__(self, *, console: bool = False) -> None:
        super().__init__()
        self._console = console
        self._has_folder = False
        # The updates of a log interval that an earlier run left incomplete; empty if none.
        self._cut_short = range(0)

    def on_train_start(self, state: LoopState) -> None:
        self._attach(state)
        self._keep(state, lambda record: _is_past(record, state))
        if state.logs.means():
            self._cut_short = range(state.recorded_at + 1, state.step + 1)

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        if self._cut_short:
            # This record covers the whole interval, including the updates of the earlier run.
            steps, self._cut_short = self._cut_short, range(0)
            train = Phase.TRAIN.value
            self._keep(state, lambda r: r.get("phase") != train or r.get("step") not in steps)
        super().on_log(state, record)
        if self._console and get_rank() == 0:
            logger.info("%s", train_line(state, record))

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        super().on_eval_end(state, metrics)
        if self._console and get_rank() == 0:
            logger.info("%s", eval_line(state, metrics))

    def media(self, state: LoopState, name: str, item: Any) -> None:
        assert state.run_dir is not None
        path = state.run_dir / "media" / f"{name}_{state.step}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(item, str):
            path.with_name(f"{path.name}.txt").write_text(item, encoding="utf-8")
        elif hasattr(item, "savefig"):
            item.savefig(path.with_name(f"{path.name}.png"))
        else:
            _save_image(item, path.with_name(f"{path.name}.png"))

    def _keep(self, state: LoopState, keep: Callable[[Record], bool]) -> None:
        """Drop the records for which ``keep`` is false."""
        if state.run_dir is not None and get_rank() == 0:
            state.run_dir.mkdir(parents=True, exist_ok=True)
            self._has_folder = True
            lines = state.run_dir / "metrics.jsonl"
            _replace(lines, map(_json_line, filter(keep, _records_in(lines))))
            _rewrite_table(state.run_dir)

    def scalars(self, state: LoopState, phase: str, values: Mapping[str, float]) -> None:
        folder = state.run_dir
        assert folder is not None
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
        columns = _find_columns(table)
        if record.keys() <= set(columns):
            _append(table, _csv_line(record, columns))
        else:
            _rewrite_table(folder)


def _is_past(record: Record, state: LoopState) -> bool:
    """Return whether a record was written before the restored checkpoint and stays in the file."""
    step = record.get("step")
    if not isinstance(step, (int, float)) or step > state.step or is_new_run(state):
        return False
    if step < state.step or record.get("phase") != Phase.VAL.value:
        return True
    return state.evaluated_at == state.step


def _records_in(path: Path) -> list[Record]:
    """Return the records of a ``metrics.jsonl``, which may be missing; skip incomplete lines."""
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
    """Rewrite ``metrics.csv`` from ``metrics.jsonl``, to which other processes may have written."""
    records = _records_in(folder / "metrics.jsonl")
    columns = list(dict.fromkeys([*_FIXED, *(name for record in records for name in record)]))
    header = _csv_line({name: name for name in columns}, columns)
    _replace(folder / "metrics.csv", [header, *(_csv_line(record, columns) for record in records)])


def _find_columns(table: Path) -> list[str]:
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
    with replacing(path) as draft:
        draft.write_bytes("".join(lines).encode())


def _append(path: Path, line: str) -> None:
    """Append a line in a single write, after a line break if a crash cut off the last line."""
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            line = line if file.read() == b"\n" else f"\n{line}"
        file.write(line.encode())


def _save_image(image: Any, path: Path) -> None:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "state.log_image needs Pillow to write PNG files; install it with "
            "`pip install stepwrap[plots]`"
        ) from error
    Image.fromarray(image).save(path)
