"""The command ``sweep``, which searches for good settings."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...loops.metrics.directions import find_directions
from ...primitives.stop_signals import signal_name
from ...registry import Config, ConfigError, Examination, Problem, RunSections, did_you_mean
from ...registry.directions import find_direction
from ..failure import Terminated, as_mistakes_in
from ..finders.sweep import Sweep, as_overrides, check_space, is_pruned, read_space
from ..launcher import started_outside
from ..parts import rehearse
from ..rank_processes import raising_stops
from ..run_folder import locked_run_dir
from ..sections import read_sections
from .command import Options, mistake, train_with

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

# The final table has at most this many trials.
_SHOWN = 10


def run_sweep(examined: Examination, options: Options) -> int:
    """Train once for each trial; print the best trials and the command with the best values."""
    if find_spec("optuna") is None:
        raise mistake("stepwrap sweep needs Optuna: pip install 'stepwrap[sweep]'")
    if started_outside():
        message = (
            "starts the processes of each trial itself; use --nproc instead of torchrun or srun"
        )
        raise mistake(f"stepwrap sweep {message}")
    space = read_space(options.space)
    run = read_sections(examined)
    if run.train is None:
        raise ConfigError([Problem("train", "sweep needs this section, but it is missing")])
    check_space(space, options.source, options.overrides)
    metric, higher_is_better = _goal(examined.config, run, options)
    folder = Path(options.folder or Path("sweeps", run.name))
    if any(folder.glob("trial_*/output.txt")) and not options.resume:
        message = (
            f"{folder} already holds a sweep: continue it with --resume, or choose another one"
        )
        raise mistake(f"stepwrap sweep: {message} with --folder")
    with raising_stops(), locked_run_dir(folder):
        try:
            sweep = Sweep(
                folder, space, metric=metric, higher_is_better=higher_is_better, seed=run.seed
            )
        except ValueError as error:
            raise mistake(f"stepwrap sweep: {error}; choose another --folder") from error
        sweep.repeat_interrupted()
        which = "highest" if higher_is_better else "lowest"
        print(f"sweep {folder}: {options.trials} trials for the {which} {metric}", flush=True)
        stop = _run_trials(sweep, options)
    return _report(sweep, options, stop)


def _goal(config: Config, run: RunSections, options: Options) -> tuple[str, bool]:
    """Return the metric, and whether higher values of it are better."""
    with as_mistakes_in(config):
        metrics = rehearse(run).val_loop.metrics
    best = (run.hooks.get("checkpoint") or {}).get("keep_best")
    name = (options.metric or best or next(iter(metrics), "")).removeprefix("val/")
    if not any(f"{name}/".startswith(f"{metric}/") for metric in metrics):
        choices = ", ".join(metrics) or "none: the config needs metrics"
        hint = did_you_mean(name, metrics) or f"; there is {choices}"
        message = f"--metric must name a validation metric, got {name!r}{hint}"
        raise mistake(f"stepwrap sweep: {message}")
    higher = find_direction(name, find_directions(metrics))
    if options.mode is None and higher is None:
        message = f"whether higher values of {name} are better is unknown; use --mode max or min"
        raise mistake(f"stepwrap sweep: {message}")
    return name, higher is True if options.mode is None else options.mode == "max"


def _run_trials(sweep: Sweep, options: Options) -> int:
    """Run the remaining trials; return the number of the signal that stopped them, or 0."""
    try:
        while len(sweep.trials) < options.trials:
            trial = sweep.next_trial()
            words = " ".join(map(_format_setting, sweep.get_values(trial).items()))
            print(f"{sweep.run_dir(trial).name}: {words}", flush=True)
            done = sweep.run(trial, options.source, options.overrides, prune=not options.no_prune)
            print(f"  {_result(sweep, done)}", flush=True)
    except KeyboardInterrupt:
        return signal.SIGINT
    except Terminated as error:
        return error.number
    return 0


def _result(sweep: Sweep, done: FrozenTrial) -> str:
    if done.value is None:
        return f"failed: {done.user_attrs.get('error', '')} (see {sweep.run_dir(done)}/output.txt)"
    value = f"{sweep.metric} {done.value:.4g}"
    if is_pruned(done):
        return f"pruned at step {max(done.intermediate_values)}, {value}"
    return f"{value}, the best so far" if sweep.ranked()[0].number == done.number else value


def _report(sweep: Sweep, options: Options, stop: int) -> int:
    """Print the results so far, and return the exit code."""
    ranked, count = sweep.ranked(), len(sweep.trials)
    if ranked:
        _print_table(sweep, ranked)
    pruned = sum(map(is_pruned, ranked))
    numbers = f"{len(ranked) - pruned} completed, {pruned} pruned, {count - len(ranked)} failed"
    print(f"{count} trials: {numbers}")
    if ranked and not is_pruned(ranked[0]):
        print(f"best run: {sweep.run_dir(ranked[0])}")
        best = as_overrides(sweep.get_values(ranked[0]))
        print(f"train with its values: {train_with(options, *best)}")
    if stop:
        print(f"stopped by {signal_name(stop)}; the same command with --resume continues the sweep")
        return 128 + stop
    return 0 if ranked else 1


def _print_table(sweep: Sweep, ranked: list[FrozenTrial]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in ("trial", sweep.metric, *_short_names(sweep)):
        table.add_column(name, justify="left" if name == "trial" else "right", overflow="fold")
    for trial in ranked[:_SHOWN]:
        name = sweep.run_dir(trial).name.removeprefix("trial_")
        value = f"{trial.value:.4g}{' (pruned)' if is_pruned(trial) else ''}"
        table.add_row(name, value, *map(_number, sweep.get_values(trial).values()))
    Console(highlight=False).print(table)


def _short_names(sweep: Sweep) -> list[str]:
    """Return the last part of each key, or the whole key if other keys end in the same part."""
    short = [key.rpartition(".")[2] for key in sweep.space]
    pairs = zip(sweep.space, short, strict=True)
    return [key if short.count(name) > 1 else name for key, name in pairs]


def _format_setting(pair: tuple[str, Any]) -> str:
    return f"{pair[0]}={_number(pair[1])}"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
