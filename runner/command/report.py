"""How a run ended, told to the user."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ...loops import list_checkpoints
from ...registry import RunSections
from ..jobs import Job, Outcome
from .environment import describe_environment
from .plots import draw_curves, plots_available, read_curves


def report_outcome(job: Job, run: RunSections, outcome: Outcome) -> int:
    """Tell how a job ended; returns the exit code."""
    console = Console(highlight=False)
    folder = Path(run.run_dir)
    if outcome.signal:
        return _report_stop(console, folder, outcome)
    if any(outcome.metrics.values()):
        console.print(_table(job, run, outcome))
    if job.command != "train" and outcome.checkpoint:
        _say(console, "checkpoint", outcome.checkpoint)
    if job.dry_run:
        _say(console, "dry run", "every part has worked for one step; nothing was kept")
    elif job.command == "train":
        _report_files(console, folder, outcome.best_by)
    return 0


def report_check(config: str, run: RunSections, parts: Mapping[str, Any]) -> None:
    """Tell what a config describes, once it has been built."""
    wrapper, model = parts["model"], parts["model"].module
    count = sum(parameter.numel() for parameter in model.parameters())
    loops = [name for name in ("train", "val", "test") if parts.get(f"{name}_loop") is not None]
    console = Console(highlight=False)
    _say(console, config, "no mistakes; every part can be built")
    # fully_shard gives the model a class of its own.
    kind = next(one for one in type(model).__mro__ if "torch.distributed" not in one.__module__)
    _say(console, "model", f"{kind.__name__}, {count:,} parameters")
    _say(console, "wrapper", type(wrapper).__name__)
    _say(console, "loops", ", ".join(loops) or "none")
    _say(console, "hooks", ", ".join(parts["hooks"]) or "none")


def report_environment() -> None:
    """Print versions and devices."""
    console = Console(highlight=False)
    for what, value in describe_environment():
        _say(console, f"{what:<20}", value)


def _report_stop(console: Console, folder: Path, outcome: Outcome) -> int:
    name = "Ctrl-C" if outcome.signal == signal.SIGINT else signal.Signals(outcome.signal).name
    saved = list_checkpoints(folder / "checkpoints")
    what = f"at step {outcome.step} (epoch {outcome.epoch})"
    if not saved:
        _say(console, f"stopped by {name}", f"{what}; nothing is saved (hooks.checkpoint is off)")
    else:
        path, meta = saved[0]
        _say(console, f"stopped by {name}", f"{what}; saved {path}")
        _say_evaluated(console, folder, meta)
        _say(console, "continue with", f"stepwrap train {folder / 'config.yaml'} --resume")
    return outcome.exit_code


def _table(job: Job, run: RunSections, outcome: Outcome) -> Table:
    title = f"{run.name} at step {outcome.step}, epoch {outcome.epoch}"
    table = Table(title=title, min_width=len(title))
    table.add_column("metric")
    phases = [phase for phase in ("val", "test") if outcome.metrics.get(phase)]
    for phase in phases:
        best = phase == "test" and job.command == "train" and outcome.checkpoint
        table.add_column(f"{phase} (best checkpoint)" if best else phase, justify="right")
    names = dict.fromkeys(name for phase in phases for name in outcome.metrics[phase])
    for name in names:
        values = [outcome.metrics[phase].get(name, math.nan) for phase in phases]
        table.add_row(name, *(f"{value:.4f}" for value in values))
    return table


def _report_files(console: Console, folder: Path, best_by: str) -> None:
    if read_curves(folder):
        if plots_available():
            _say(console, "curves", str(draw_curves(folder)))
        else:
            _say(console, "curves", "not drawn: pip install 'stepwrap[plots]'")
    saved = list_checkpoints(folder / "checkpoints")
    best = [path for path, meta in saved if meta["best"]]
    if best:
        _say(console, "best checkpoint", str(best[0]))
        if best_by:
            _say(console, "best by", best_by)
    if saved:
        path, meta = saved[0]
        _say(console, "last checkpoint", str(path))
        _say_evaluated(console, folder, meta)


def _say_evaluated(console: Console, folder: Path, meta: Mapping[str, Any]) -> None:
    """Tell where the evaluated weights lie, where that is not with the model's own."""
    file, *keys = meta.get("evaluated", ["model.pt"])
    if keys:
        where = f"{file} of the checkpoint, under {' / '.join(keys)}; model.pt holds the plain ones"
        load = f"stepwrap.runner.load_model({str(folder)!r})"
        _say(console, "evaluated weights", f"in {where}; {load} returns the model with them")


def _say(console: Console, what: str, text: str) -> None:
    console.print(f"{what}: {text}", markup=False, soft_wrap=True)
