"""The curves of a run, drawn from its `metrics.jsonl`."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

_NOT_CURVES = {"step", "epoch", "phase", "time"}
_COLORS = {"train": "C0", "val": "C1", "test": "C2"}
# A longer legend would hide the curves.
_MOST_LABELS = 10
Curves = dict[str, dict[str, list[tuple[float, float]]]]


def plots_available() -> bool:
    """Whether the extra `plots` is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def draw_curves(run_dir: Path) -> Path:
    """Draw every logged value against the update number into `run_dir/curves.png`.

    A value that was logged in training and in validation has one panel, and so have the
    learning rates of several parameter groups.

    Raises:
        ImportError: matplotlib is missing; the text names the extra.
        FileNotFoundError: the folder has no records.
    """
    if not plots_available():
        raise ImportError("drawing needs matplotlib: pip install 'stepwrap[plots]'")
    curves = read_curves(run_dir)
    if not curves:
        raise FileNotFoundError(f"{run_dir} has no metrics.jsonl with records to draw")
    from matplotlib.figure import Figure

    charts = _charts(curves)
    columns = min(3, len(charts))
    rows = -(-len(charts) // columns)
    figure = Figure(figsize=(4.5 * columns, 3.0 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel, (name, lines) in zip(panels, charts.items(), strict=False):
        _draw(panel, name, lines)
    for panel in panels[len(charts) :]:
        panel.set_visible(False)
    path = run_dir / "curves.png"
    figure.savefig(path, dpi=120)
    return path


def read_curves(run_dir: Path) -> Curves:
    """Return {value: {phase: [(step, number), ...]}} of the records in `run_dir`.

    The points are sorted by step, since `validate` and `test` add records of earlier
    checkpoints at the end of the file; of several records of one step the last one counts.
    """
    path = run_dir / "metrics.jsonl"
    curves: dict[str, dict[str, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            # A run that was killed may have left half a line at the end.
            continue
        for name, value in record.items():
            if name not in _NOT_CURVES and isinstance(value, int | float):
                curves[name][str(record.get("phase", "train"))][record["step"]] = value
    return {
        name: {phase: sorted(points.items()) for phase, points in phases.items()}
        for name, phases in curves.items()
    }


def _charts(curves: Curves) -> Curves:
    """Return the lines of each panel by their labels: phases, or groups of parameters."""
    charts: Curves = {}
    for name, phases in curves.items():
        title, _, group = name.partition("/")
        if title == "lr" and group:
            charts.setdefault("lr", {})[group] = next(iter(phases.values()))
        else:
            charts[name] = phases
    return charts


def _draw(panel: Any, name: str, lines: dict[str, list[tuple[float, float]]]) -> None:
    for label, points in lines.items():
        steps, values = zip(*points, strict=True)
        marker = "." if len(points) < 30 else ""
        panel.plot(steps, values, label=label, marker=marker, color=_COLORS.get(label))
    panel.set_title(name)
    panel.set_xlabel("step")
    panel.grid(alpha=0.3)
    if 1 < len(lines) <= _MOST_LABELS:
        panel.legend()
