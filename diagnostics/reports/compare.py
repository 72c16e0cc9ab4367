"""Print the differences of runs as text: ``stepwrap compare``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from ...runner.command.command import Options, mistake
from .run_files import Run, read_all

_WIDTH = 80
# Settings that differ between all runs, and say nothing about the training.
_PLACES = ("run_dir", "resume", "import_from")


def run_compare(options: Options) -> int:
    """Print settings that differ, metrics and speed, and how to find the first difference."""
    runs = read_all(options.words, lambda text: mistake(f"stepwrap compare: {text}"))
    if len(runs) < 2:
        raise mistake("stepwrap compare: the runs are the same folder")
    for line in (*_settings(runs), *_metrics(runs), *_speeds(runs), *_ledgers(runs)):
        print(line)
    return 0


def _settings(runs: Sequence[Run]) -> Iterator[str]:
    settings = [run.settings() for run in runs]
    without = [run.name for run, values in zip(runs, settings, strict=True) if not values]
    if without:
        yield f"no settings: {', '.join(without)} (no readable config.yaml)"
    names = dict.fromkeys(name for values in settings for name in values)
    differing = [
        name
        for name in names
        if name not in _PLACES and len({values.get(name) for values in settings}) > 1
    ]
    yield "settings that differ:" if differing else "settings that differ: none"
    for name in differing:
        yield f"  {name}"
        yield from _rows(runs, [values.get(name, "not set") for values in settings])


def _metrics(runs: Sequence[Run]) -> Iterator[str]:
    extremes = [run.extremes() for run in runs]
    names = list(dict.fromkeys(name for by_name in extremes for name in by_name))
    yield "metrics, best and last:" if names else "metrics: no records yet"
    for name in names:
        yield f"  {name}"
        texts = []
        for extreme in (by_name.get(name) for by_name in extremes):
            text = "not recorded"
            if extreme is not None:
                best = "direction unknown"
                if extreme.best is not None:
                    best = f"{extreme.best:.6g} at step {extreme.best_step}"
                text = f"{best:<28}  {extreme.last:.6g} at step {extreme.last_step}"
            texts.append(text)
        yield from _rows(runs, texts)


def _speeds(runs: Sequence[Run]) -> Iterator[str]:
    speeds = [run.speed() for run in runs]
    names = list(dict.fromkeys(name for by_name in speeds for name in by_name))
    yield "speed, median:" if names else "speed: not recorded (hooks.throughput)"
    for name in names:
        yield f"  {name.replace('_per_s', ' per second')}"
        values = [by_name.get(name) for by_name in speeds]
        baseline = values[0]
        texts = [
            "not recorded"
            if value is None
            else f"{value:.4g}" + (f"  ({value / baseline:.2f} x)" if baseline and at else "")
            for at, value in enumerate(values)
        ]
        yield from _rows(runs, texts)


def _ledgers(runs: Sequence[Run]) -> Iterator[str]:
    recorded = [str(run.folder) for run in runs if run.has_ledger()]
    if len(recorded) > 1:
        yield "the runs have ledgers; find the first step at which they differ with:"
        yield f"  stepwrap bisect {recorded[0]} {recorded[1]}"


def _rows(runs: Sequence[Run], texts: Sequence[str]) -> Iterator[str]:
    """Yield one or several lines for each run; keep padding, which aligns columns of the texts."""
    width = min(max(len(run.name) for run in runs), 30)
    for run, text in zip(runs, texts, strict=True):
        name = run.name if len(run.name) <= width else f"...{run.name[3 - width :]}"
        lines = textwrap.wrap(text, _WIDTH - width - 6, drop_whitespace=False) or [""]
        yield f"    {name:<{width}}  {lines[0]}".rstrip()
        for line in lines[1:]:
            yield f"{'':<{width + 6}}{line}".rstrip()
