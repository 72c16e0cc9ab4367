"""The commands that do not build a run: show, list, schema, plot, version."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...registry import (
    ConfigError,
    Problem,
    Registration,
    config_schema,
    format_config,
    list_registrations,
    load_config,
)
from .command import Options

# `steps_per_s` has nearly the same curve as `samples_per_s`; `slowest_rank` identifies a rank.
_NOT_CURVES = {"step", "epoch", "phase", "time", "steps_per_s", "slowest_rank"}
_COLORS = {"train": "C0", "val": "C1", "test": "C2"}
# A longer legend would hide the curves.
_MAX_LABELS = 10
_TEXT_ROWS = 9
_BLOCKS = " ▁▂▃▄▅▆▇█"
Curves = dict[str, dict[str, list[tuple[float, float]]]]


def run_show(options: Options) -> int:
    """Print the resolved config as YAML that can be run."""
    config = load_config(options.words[0], options.words[1:])
    print(format_config(config, origins=options.origin), end="")
    return 0


def run_schema(options: Options) -> int:
    """Print the JSON schema of run configs."""
    print(json.dumps(config_schema(), indent=1))
    return 0


def run_list(options: Options) -> int:
    """List the names in all registries, or the names, arguments and descriptions in one."""
    name = options.words[0] if options.words else None
    try:
        registries = list_registrations(name)
    except KeyError as error:
        raise ConfigError([Problem("", f"stepwrap list: {error}")]) from error
    for registry, entries in registries.items():
        print(registry)
        for line in _long_listing(entries) if name else _short_listing(entries):
            print(f"  {line}")
    if name is None:
        print("for arguments: stepwrap list REGISTRY. A type can also be any import path")
    return 0


def _long_listing(entries: Sequence[Registration]) -> Iterator[str]:
    rows: list[tuple[str, str]] = []
    for entry in entries:
        rows.append((" = ".join((entry.name, *entry.aliases)), entry.summary or entry.source))
        rows += [(f"  {declaration}", meaning) for declaration, meaning in entry.arguments]
    width = min(max((len(name) for name, _ in rows), default=0), 40)
    room = max(shutil.get_terminal_size().columns - width - 4, 30)
    for name, text in rows:
        if len(name) > width:
            yield name
            name = ""
        for line in textwrap.wrap(text, room) or [""]:
            yield f"{name:<{width}}  {line}".rstrip()
            name = ""


def _short_listing(entries: Sequence[Registration]) -> list[str]:
    our_names = [entry.name for entry in entries if entry.source.startswith("stepwrap.")]
    other_counts = Counter(entry.source for entry in entries if entry.name not in our_names)
    texts = [
        *our_names,
        *(f"{count} classes of {source}" for source, count in other_counts.items()),
    ]
    return textwrap.wrap(", ".join(texts) or "nothing yet", 96, break_on_hyphens=False)


def run_plot(options: Options) -> int:
    """Draw the curves of each run folder."""
    for folder in options.words:
        print(draw_curves(Path(folder)))
    return 0


def plots_available() -> bool:
    """Return whether the extra ``plots`` is installed."""
    return find_spec("matplotlib") is not None


def draw_curves(run_dir: Path) -> Path:
    """Plot the logged values against the step, and return the image's path.

    The image is ``run_dir/curves.png``. A panel shows one value in all phases and on all sets, or
    the learning rates of all parameter groups.

    Raises:
        ImportError: matplotlib is missing; the message names the extra.
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


def draw_lines(curves: dict[str, list[tuple[int, float]]], path: Path) -> Path:
    """Plot learning rates against the update, save the picture, and return its path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    _draw(figure.subplots(), "lr", {name: [*curve] for name, curve in curves.items()})
    figure.savefig(path, dpi=120)
    return path


def draw_text(curve: Sequence[tuple[int, float]]) -> Iterator[str]:
    """Yield the lines of a chart in which columns of blocks show the values of a curve."""
    width = min(shutil.get_terminal_size().columns, 100) - 12
    columns = min(width, len(curve))
    # Both ends are shown.
    picked = [curve[round(at * (len(curve) - 1) / max(1, columns - 1))] for at in range(columns)]
    highest = max(value for _, value in picked)
    eighths = [round(8 * _TEXT_ROWS * value / (highest or 1)) for _, value in picked]
    for row in reversed(range(_TEXT_ROWS)):
        blocks = "".join(_BLOCKS[min(max(height - 8 * row, 0), 8)] for height in eighths)
        label = f"{highest * (row + 1) / _TEXT_ROWS:>9.3g}" if row % 3 == 2 else " " * 9
        yield f"{label} │{blocks}".rstrip()
    start, end = f"{picked[0][0]:,}", f"{picked[-1][0]:,}"
    yield f"{'0':>9} └{'─' * columns}"
    yield f"{'update':>9}  {start}{end:>{max(columns - len(start), len(end) + 1)}}"


def read_curves(run_dir: Path) -> Curves:
    """Read the records in ``run_dir`` as {name: {phase: [(step, value), ...]}}.

    Points are sorted by step, because ``validate`` and ``test`` append records of earlier
    checkpoints. If a step has several records, the last one counts.
    """
    path = run_dir / "metrics.jsonl"
    curves: dict[str, dict[str, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            # A killed run may have left an incomplete last line.
            continue
        for name, value in record.items():
            if name not in _NOT_CURVES and isinstance(value, int | float):
                curves[name][str(record.get("phase", "train"))][record["step"]] = value
    return {
        name: {phase: sorted(points.items()) for phase, points in phases.items()}
        for name, phases in curves.items()
    }


def _charts(curves: Curves) -> Curves:
    """Assign the curves to panels: ``{panel: {label: points}}``.

    A label is the phase, followed by the name of the set if several sets have the value. For the
    panel ``lr`` it is the parameter group.
    """
    charts: Curves = {}
    values = Counter(name.partition("/")[2] or name for name in curves)
    for name, phases in curves.items():
        head, _, tail = name.partition("/")
        if head == "lr" and tail:
            charts.setdefault("lr", {})[tail] = next(iter(phases.values()))
        elif tail and values[tail] > 1:
            sets = {f"{phase} {head}": points for phase, points in phases.items()}
            charts.setdefault(tail, {}).update(sets)
        else:
            charts.setdefault(name, {}).update(phases)
    return charts


def _draw(panel: Any, name: str, lines: dict[str, list[tuple[float, float]]]) -> None:
    # The other colors are for sets and parameter groups.
    other_colors = (f"C{at}" for at in range(3, 3 + len(lines)))
    for label, points in lines.items():
        steps, values = zip(*points, strict=True)
        marker = "." if len(points) < 30 else ""
        panel.plot(
            steps,
            values,
            label=label,
            marker=marker,
            color=_COLORS.get(label) or next(other_colors),
        )
    panel.set_title(name)
    panel.set_xlabel("step")
    panel.grid(alpha=0.3)
    if 1 < len(lines) <= _MAX_LABELS:
        panel.legend()


def run_version(options: Options) -> int:
    """Print the version of stepwrap."""
    print(f"stepwrap {metadata.version('stepwrap')}")
    return 0
