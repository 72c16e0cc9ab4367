"""Find run folders, and read them while they grow; files are only parsed as JSON and YAML."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml

from ...primitives.files import is_locked
from ...registry import did_you_mean
from ...registry.directions import find_direction
from ...registry.text.values import below, dotted, leaves

_FIXED = {"step", "epoch", "phase", "time"}
_SKIPPED = {"checkpoints", "ledger", "media", "profile", "tensorboard", "wandb"}
_MARKS = ("metrics.jsonl", "config.yaml", "events.jsonl")
# A page shows the ends of a curve, and up to three points in each of this many intervals.
_INTERVALS = 750
_TAIL_BYTES, _MAX_TEXT, _MAX_RUNS = 1 << 14, 300, 2000

Json = dict[str, Any]


class Extreme(NamedTuple):
    """The best and the last value of a curve, with their steps; None if no direction is better."""

    best: float | None
    best_step: int | None
    last: float
    last_step: int


class Curve(NamedTuple):
    """The records of one value in one phase, by step; a value may be NaN."""

    name: str
    phase: str
    steps: list[int]
    times: list[float]
    values: list[float]


class RunError(ValueError):
    """A path is not a run folder; the message suggests another one."""


def find_runs(root: Path) -> dict[str, Path]:
    """Return up to 2,000 run folders in ``root``, also nested ones, by their relative paths.

    Symbolic links are not followed.
    """
    runs: dict[str, Path] = {}
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in _SKIPPED and name[0] != ".")
        if not set(_MARKS).isdisjoint(files):
            runs[os.path.relpath(folder, root)] = Path(folder)
        if len(runs) >= _MAX_RUNS:
            break
    return runs


def open_run(path: Path) -> Run:
    """Return the run in a folder.

    Raises:
        RunError: the path is not a run folder.
    """
    if any((path / name).is_file() for name in _MARKS):
        return Run(path, path.name or path.resolve().name)
    problem = "does not exist" if not path.exists() else "is not a run folder"
    parent = path if path.is_dir() else path.parent
    neighbours = [str(run) for run in find_runs(parent).values()] if parent.is_dir() else []
    hint = did_you_mean(str(path), neighbours) or (
        f"; there is {neighbours[0]}" if neighbours else ""
    )
    raise RunError(f"{path} {problem}: it has none of {', '.join(_MARKS)}{hint}")


class _Lines:
    """The JSON objects in a file that grows; each call returns the new ones."""

    def __init__(self, path: Path, root: Path) -> None:
        self._path, self._root = path, root
        self._inode, self._offset = 0, 0

    def read(self) -> tuple[bool, list[Json]]:
        """Return whether the file was replaced since the last call, and its new objects.

        An incomplete last line is left for the next call.
        """
        about = _status(self._path, self._root)
        if about is None:
            return False, []
        is_replaced = about.st_ino != self._inode or about.st_size < self._offset
        self._inode, self._offset = about.st_ino, 0 if is_replaced else self._offset
        if about.st_size == self._offset:
            return is_replaced, []
        records: list[Json] = []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                value = _parsed(line)
                records += [value] if value else []
        return is_replaced, records

    def tail(self, size: int) -> list[Json]:
        """Return the objects in the last ``size`` bytes of the file."""
        about = _status(self._path, self._root)
        if about is None:
            return []
        with self._path.open("rb") as file:
            file.seek(max(0, about.st_size - size))
            return [record for record in map(_parsed, file.read().splitlines()) if record]


class Run:
    """The content of a run folder; ``update`` reads the new records.

    Args:
        folder: the run folder.
        name: its name on pages.
        root: the folder outside of which no file is read; default: the run folder.
    """

    def __init__(self, folder: Path, name: str, root: Path | None = None) -> None:
        self.folder, self.name = folder, name
        self._root = (root or folder).resolve()
        self._records = _Lines(folder / "metrics.jsonl", self._root)
        self._events = _Lines(folder / "events.jsonl", self._root)
        self.events: list[Json] = []
        # Steps, times and values by (value, phase). A step that is recorded again counts once.
        self._curves: dict[tuple[str, str], tuple[array[int], array[float], array[float]]] = {}
        self._since_s = 0.0

    def update(self) -> Run:
        """Read the new records and events."""
        is_replaced, records = self._records.read()
        if is_replaced:
            self._curves.clear()
        for record in records:
            self._add(record)
        events_replaced, events = self._events.read()
        self.events = events if events_replaced else self.events + events
        return self

    def stamp(self) -> str:
        """Return a text that changes when the files change."""
        names = (*_MARKS, "phases.json", "environment.json", "checkpoints", "run.lock")
        statuses = (_status(self.folder / name, self._root) for name in names)
        times = (
            "-" if status is None else f"{status.st_mtime_ns}/{status.st_size}"
            for status in statuses
        )
        # A killed process leaves the file of its lock behind.
        return f"{' '.join(times)} {_is_locked(self.folder / 'run.lock', self._root)}"

    def glance(self) -> Json:
        """Return the run's entry in a list of runs; only the end of the records is read."""
        _, self.events = self._events.read()
        records = self._records.tail(_TAIL_BYTES)
        latest: Json = records[-1] if records else {}
        return {
            "id": self.name,
            "status": self.status()[0],
            "step": max(
                (record["step"] for record in records if type(record.get("step")) is int), default=0
            ),
            "time": _get_time(latest),
            "max_steps": self.read("environment.json").get("max_steps"),
        }

    def curves(self) -> Iterator[Curve]:
        """Yield the curves, each with its points sorted by step.

        Records may be in another order, since ``validate`` and ``test`` append results of earlier
        checkpoints.
        """
        for (name, phase), (steps, times, values) in self._curves.items():
            last_index = {step: at for at, step in enumerate(steps)}
            order = [last_index[step] for step in sorted(last_index)]
            series = [times[at] for at in order], [values[at] for at in order]
            yield Curve(name, phase, sorted(last_index), *series)

    def extremes(self) -> dict[str, Extreme]:
        """Return the best and last values of metrics and losses, under names like "val/loss"."""
        recorded = self.read("environment.json").get("higher_is_better")
        directions = recorded if isinstance(recorded, dict) else {}
        found: dict[str, Extreme] = {}
        for name, phase, steps, _, values in self.curves():
            finite = [at for at, value in enumerate(values) if math.isfinite(value)]
            if finite and (phase != "train" or "loss" in name):
                # Of training values, only losses are included.
                higher = phase != "train" and _direction(name, directions)
                last = finite[-1]
                best, best_step = None, None
                if higher is not None:
                    index = (max if higher else min)(finite, key=values.__getitem__)
                    best, best_step = values[index], steps[index]
                found[f"{phase}/{name}"] = Extreme(best, best_step, values[last], steps[last])
        return found

    def settings(self) -> dict[str, str]:
        """Return the settings in ``config.yaml`` by key path, as JSON texts."""
        text = _text(self.folder / "config.yaml", self._root)
        try:
            content = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
            settings = leaves(content if isinstance(content, dict) else [], contents=_entries)
            return {dotted(path): _as_json(value) for path, value in settings if path}
        except (yaml.YAMLError, RecursionError, ValueError):
            return {}

    def read(self, name: str) -> Json:
        """Return the object in a JSON file of the folder; empty if there is none."""
        return _parsed(_text(self.folder / name, self._root))

    def status(self) -> tuple[str, str]:
        """Return "training", "ended", "stopped", "failed" or "unknown", with an explanation."""
        if _is_locked(self.folder / "run.lock", self._root):
            return "training", ""
        turns = [event for event in self.events if event.get("event") in ("start", "end", "error")]
        if not turns:
            return "unknown", "the run has no hooks.run_info, so it has recorded no end"
        last_turn = turns[-1]
        text = str(last_turn.get("text", ""))
        if last_turn.get("event") == "error":
            return "failed", f"step {last_turn.get('step')}, rank {last_turn.get('rank')}: {text}"
        if last_turn.get("event") == "end":
            return ("stopped", text) if text else ("ended", "")
        return "unknown", "the run has recorded a start and no end: it was killed"

    def checkpoints(self) -> list[Json]:
        """Return the descriptions of the checkpoints, oldest first."""
        entries = []
        for folder in (self.folder / "checkpoints").glob("step_*"):
            about = self.read(f"checkpoints/{folder.name}/checkpoint.json")
            files = about.get("files")
            if about and isinstance(files, dict):
                sizes = (
                    entry.get("size", 0) for entry in files.values() if isinstance(entry, dict)
                )
                facts = {key: about.get(key) for key in ("step", "epoch", "best", "reason")}
                size = sum(file_size for file_size in sizes if isinstance(file_size, int))
                entries.append({"name": folder.name, **facts, "bytes": size})
        return sorted(entries, key=lambda checkpoint: str(checkpoint["name"]))

    def has_ledger(self) -> bool:
        """Return whether the run has recorded hashes of its steps."""
        return (self.folder / "ledger" / "rank_0.bin").is_file()

    def speed(self) -> dict[str, float]:
        """Return the medians of the recorded speeds, which are named ``*_per_s``."""
        medians: dict[str, float] = {}
        for name, _, _, _, values in self.curves():
            finite = list(filter(math.isfinite, values))
            if name.endswith("_per_s") and finite:
                medians[name] = median(finite)
        return medians

    def page_data(self) -> Json:
        """Return everything that a page shows about the run, as JSON without NaN."""
        status, reason = self.status()
        curves = [
            {"name": curve.name, "phase": curve.phase, **_thinned(curve, self._since_s)}
            for curve in self.curves()
        ]
        origins = {key: _short(str(origin)) for key, origin in self.read("origins.json").items()}
        return {
            "id": self.name,
            "status": status,
            "reason": reason,
            "curves": curves,
            "metrics": {name: extreme._asdict() for name, extreme in self.extremes().items()},
            "settings": self.settings(),
            "origins": origins,
            "environment": self.read("environment.json"),
            "phases": self.read("phases.json"),
            "warnings": [
                event for event in self.events if event.get("event") in ("warning", "error")
            ],
            "checkpoints": self.checkpoints(),
            "ledger": self.has_ledger(),
        }

    def _add(self, record: Json) -> None:
        step, time = record.get("step"), _get_time(record)
        if not isinstance(step, int) or not 0 <= step < 1 << 62:
            return
        self._since_s = time if not self._curves else self._since_s
        phase = str(record.get("phase", "train"))
        for name, value in record.items():
            if name in _FIXED or not isinstance(value, int | float | None):
                continue
            if (name, phase) not in self._curves:
                self._curves[name, phase] = array("q"), array("d"), array("d")
            steps, times, values = self._curves[name, phase]
            steps.append(step)
            times.append(time)
            values.append(_number(value))


def _direction(name: str, directions: Json) -> bool | None:
    """Return whether higher values are better; a test may have the metrics of other sets."""
    direction = find_direction(name, directions)
    if direction is None:
        metric = name.rpartition("/")[2]
        same = {up for key, up in directions.items() if key.rpartition("/")[2] == metric}
        direction = same.pop() if len(same) == 1 else None
    return direction


def _thinned(curve: Curve, since_s: float) -> Json:
    """Return the points that a page shows, with the seconds since the first record.

    Each interval contributes its lowest and highest value, and its first that is not finite.
    """
    _, _, steps, times, values = curve
    total = len(steps)
    chosen: set[int] = {0, total - 1}
    for interval in range(_INTERVALS):
        interval_indices = range(
            interval * total // _INTERVALS, (interval + 1) * total // _INTERVALS
        )
        finite = [at for at in interval_indices if math.isfinite(values[at])]
        if finite:
            chosen |= {choose(finite, key=values.__getitem__) for choose in (min, max)}
        chosen.update([at for at in interval_indices if not math.isfinite(values[at])][:1])
    shown = sorted(chosen)
    return {
        "step": [steps[at] for at in shown],
        "seconds": [round(max(0.0, times[at] - since_s), 3) for at in shown],
        "value": [values[at] if math.isfinite(values[at]) else None for at in shown],
        "points": total,
        "not_finite": [steps[at] for at in range(total) if not math.isfinite(values[at])][:3],
    }


def _entries(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the entries of a section or of a list of sections or lists, otherwise None."""
    if isinstance(value, list) and not any(isinstance(entry, dict | list) for entry in value):
        return None
    return below(value) or None


def _as_json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."


def _number(value: Any) -> float:
    """Return a finite number as a float, and NaN for all other values."""
    with suppress(OverflowError):
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return math.nan


def _get_time(record: Json) -> float:
    """Return the time of a record in seconds, and 0 if it has none."""
    time = _number(record.get("time"))
    return time if math.isfinite(time) else 0.0


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _parsed(text: str | bytes) -> Json:
    """Return the object in a JSON text, with None for NaN; empty for all other texts."""
    with suppress(ValueError, RecursionError):
        value = json.loads(text, parse_constant=lambda _: None, parse_float=_finite)
        if isinstance(value, dict):
            return value
    return {}


def _short(origin: str) -> str:
    """Return an origin with the last two parts of an absolute path."""
    return re.sub(r"^/.*/([^/]+/[^/]+)$", r"\1", origin)


def _status(path: Path, root: Path) -> os.stat_result | None:
    """Return the status of a readable file or folder inside ``root``; None for anything else."""
    try:
        real = path.resolve(strict=True)
        about = real.stat()
    except (OSError, RuntimeError, ValueError):
        return None
    is_usual = stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)
    may_read = is_usual and real.is_relative_to(root) and os.access(real, os.R_OK)
    return about if may_read else None


def _text(path: Path, root: Path) -> str:
    about = _status(path, root)
    if about is None or not stat.S_ISREG(about.st_mode):
        return ""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def _is_locked(path: Path, root: Path) -> bool:
    """Return whether a training holds the lock of its folder."""
    return _status(path, root) is not None and is_locked(path)


def read_all(paths: list[str], fail: Callable[[str], Exception]) -> list[Run]:
    """Return the runs in folders, each with a distinct name; raise ``fail(text)`` for mistakes."""
    runs = []
    for path in dict.fromkeys(map(os.path.normpath, paths)):
        try:
            runs.append(open_run(Path(path)).update())
        except RunError as error:
            raise fail(str(error)) from error
    names = [run.name for run in runs]
    for run in runs:
        run.name = run.name if names.count(run.name) == 1 else str(run.folder)
    return runs
