"""The commands train, validate, test, predict and env, and their output."""

from __future__ import annotations

import os
import platform
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...collectives.process.slurm import describe_slurm
from ...loops import find_checkpoint, list_checkpoints, load_checkpoint
from ...loops.predictions.files import check_path, remove_leftovers
from ...primitives.stop_signals import signal_name
from ...registry import Config, ConfigError, Examination, Problem, RunSections
from ...registry.local_paths import local_path, remote_url
from ..failure import Terminated, TrainingFailed
from ..jobs import (
    Outcome,
    evaluate_on_rank,
    on_ranks,
    predict_on_rank,
    require_free_run_dir,
    run_dir_error,
    train_on_rank,
)
from ..launcher import launched_ranks, started_outside
from ..rank_processes import raising_stops
from ..run_folder import checkpoint_times, resolve_checkpoint, saved_checkpoints
from ..sections import read_sections
from .command import Options, mistake, output
from .print_commands import draw_curves, plots_available, read_curves
from .restarts import train_with_restarts

_DRY_RUN_WORKED = "dry run: every part worked for one step; nothing was kept"


def run_train(examined: Examination, options: Options) -> int:
    """Train, then evaluate the best checkpoint if the config has test data."""
    config, run = examined.config, _read_run(examined)
    resume: bool | str | Path = options.resume if options.resume is not None else run.resume
    if options.fresh and resume:
        raise ConfigError([Problem("", "--fresh and --resume exclude each other")])
    if options.dry_run and resume:
        message = "--dry-run and --resume exclude each other: a dry run starts from the beginning"
        raise ConfigError([Problem("", message)])
    if options.without_step and resume:
        first_step = min(
            int(str(step_text).partition("-")[0]) for step_text in options.without_step
        )
        resume = _checkpoint_before(first_step, run.run_dir, resume)
    if started_outside():
        return _train(config, run, options, resume=resume)
    if options.dry_run:
        with raising_stops():
            return _train(config, run, options, resume=resume)
    # The ranks check this again. Checking it here reports the problem before any rank is started.
    require_free_run_dir(config, run, resume=resume, fresh=options.fresh)
    with raising_stops(), _new_folder(config, local_path(run.run_dir), options):
        return _train(config, run, options, resume=resume)


def _checkpoint_before(step: int, run_dir: str, resume: bool | str | Path) -> bool | str | Path:
    """Return the value of ``resume`` for a run that skips ``step``.

    This is the checkpoint that the user named, or the latest one before ``step``; True if there are
    no checkpoints.

    Raises:
        ConfigError: every checkpoint, or the named one, already includes ``step``.
    """
    folder = _find_run(run_dir, "latest" if resume is True else str(resume), before=step)
    if resume is True:
        path = find_checkpoint(folder, before=step)
        if path is None and not saved_checkpoints(folder):
            return True
        if path is not None:
            # The copy of a remote checkpoint has its name.
            return path.name if remote_url(run_dir) else path
        message = f"{run_dir} has no earlier checkpoint; --fresh trains from the beginning"
        raise ConfigError([Problem("", f"--without-step {step}: {message}")])
    source = resolve_checkpoint(folder, str(resume), of_other_run="latest")
    done = load_checkpoint(source).meta["step"]
    if done >= step:
        message = f"{source} includes this step already; --resume alone finds an earlier checkpoint"
        raise ConfigError([Problem("", f"--without-step {step}: {message}")])
    return str(resume) if remote_url(run_dir) else source


def _find_run(run_dir: str, which: str, *, before: int | None = None) -> Path:
    """Return the run's folder; a URL is replaced by a copy that has a checkpoint."""
    if not remote_url(run_dir):
        return local_path(run_dir)
    # Imported here, because most runs have no URL.
    from ..remote.copies import run_copy

    return run_copy(run_dir, which, before=before)


@contextmanager
def _new_folder(config: Config, run_dir: Path, options: Options) -> Iterator[None]:
    """Create the run's folder; after an error remove the new folders that are still empty."""
    created = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"the folder {run_dir} cannot be created: {error.strerror}"
        if options.run_dir is not None:
            raise mistake(f"--run-dir: {message}") from error
        raise run_dir_error(config, message) from error
    try:
        yield
    except BaseException:
        for path in created:
            with suppress(OSError):
                path.rmdir()
        raise


def _train(config: Config, run: RunSections, options: Options, *, resume: bool | str | Path) -> int:
    """Train on all ranks, print the result, and return the exit code."""
    fresh, debug = options.fresh, options.debug
    with _naming_checkpoints(run.run_dir), raising_stops():
        if run.launch.max_restarts and not options.dry_run and not started_outside():
            outcomes = train_with_restarts(config, run, resume=resume, fresh=fresh, debug=debug)
        else:
            outcomes = on_ranks(
                run,
                train_on_rank,
                *(config, run),
                resume=resume,
                fresh=fresh,
                dry_run=options.dry_run,
                debug=debug,
            )
    outcome = outcomes.get(0)
    if outcome is None:
        # Under torchrun only rank 0 prints.
        return next(iter(outcomes.values())).exit_code
    if outcome.signal:
        _report_stop(run.run_dir, outcome)
        return outcome.exit_code
    columns = outcome.metrics
    if outcome.checkpoint:
        columns = {
            "val (last)": columns.get("val", {}),
            "val (best checkpoint)": outcome.best_metrics,
            "test (best checkpoint)": columns.get("test", {}),
        }
    _print_metrics(run.name, outcome, columns)
    if options.dry_run:
        print(_DRY_RUN_WORKED)
    else:
        _report_files(run.run_dir, outcome.best_by)
    return 0


def run_validate(examined: Examination, options: Options) -> int:
    """Evaluate a checkpoint on the validation data or, for ``test``, on the test data."""
    config, run = examined.config, _read_run(examined)
    with raising_stops():
        outcomes = on_ranks(
            run,
            evaluate_on_rank,
            *(config, run),
            phase="test" if options.command == "test" else "val",
            checkpoint=None if options.checkpoint is True else options.checkpoint,
            dry_run=options.dry_run,
            debug=options.debug,
        )
    outcome = outcomes.get(0)
    # Under torchrun only rank 0 prints.
    if outcome is not None:
        _print_metrics(run.name, outcome, outcome.metrics)
        if outcome.checkpoint:
            print(f"checkpoint: {outcome.checkpoint}")
        if options.dry_run:
            print(_DRY_RUN_WORKED)
    return 0


def run_predict(examined: Examination, options: Options) -> int:
    """Write predictions for each sample of the test data, or of `--data`, to a file."""
    with output(options) as out:
        try:
            check_path(out)
        except (ValueError, FileExistsError, ImportError) as error:
            raise mistake(f"stepwrap predict: --out: {error}") from error
        return _predict(examined, options, out)


def _predict(examined: Examination, options: Options, out: Path) -> int:
    config, run = examined.config, _read_run(examined)
    try:
        with raising_stops():
            outcomes = on_ranks(
                run,
                predict_on_rank,
                *(config, run),
                out=str(out),
                checkpoint=None if options.checkpoint is True else options.checkpoint,
                debug=options.debug,
            )
        if outcome := outcomes.get(0):
            if outcome.checkpoint:
                print(f"checkpoint: {outcome.checkpoint}")
            print(f"predictions: {outcome.predictions:,} samples in {options.out}")
        return 0
    finally:
        # Ranks that were killed could not remove their unfinished files.
        remove_leftovers(out)


@contextmanager
def _naming_checkpoints(run_dir: str) -> Iterator[None]:
    """Raise an error that names the last checkpoint if training fails or is stopped after a save.

    A ``ConfigError`` is raised unchanged.
    """
    folder = local_path(run_dir)
    # Not `find_checkpoint`: every rank must call it, but a signal may stop only one of them.
    before, set_aside = checkpoint_times(folder), checkpoint_times(folder, "incomplete_")
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        saved, aside = checkpoint_times(folder), checkpoint_times(folder, "incomplete_")
        if (saved, aside) == (before, set_aside):
            raise
        last_saved = next(reversed(saved), None)
        incomplete = next(reversed(aside), None) if aside != set_aside else None
        raise TrainingFailed(_resume_source(run_dir), last_saved, incomplete) from error
    except (KeyboardInterrupt, Terminated) as error:
        number = error.number if isinstance(error, Terminated) else signal.SIGINT
        saved = checkpoint_times(folder)
        if not saved or saved == before:
            raise
        raise Terminated(number, str(next(reversed(saved)))) from error


def _read_run(examined: Examination) -> RunSections:
    if line := describe_slurm(os.environ):
        print(line, file=sys.stderr, flush=True)
    return read_sections(examined, launched_ranks())


def _resume_source(run_dir: str) -> str:
    """Return what ``stepwrap train`` takes to continue a run."""
    return remote_url(run_dir) or str(local_path(run_dir) / "config.yaml")


def _report_stop(run_dir: str, outcome: Outcome) -> None:
    folder = local_path(run_dir)
    message = (
        f"stopped by {signal_name(outcome.signal)}: at step {outcome.step} (epoch {outcome.epoch})"
    )
    saved = list_checkpoints(folder / "checkpoints")
    if not saved:
        print(f"{message}; nothing was saved (hooks.checkpoint is off)")
    else:
        path, meta = saved[0]
        print(f"{message}; saved {path}")
        _report_evaluated(run_dir, meta)
        print(f"continue with: stepwrap train {_resume_source(run_dir)} --resume")


def _print_metrics(name: str, outcome: Outcome, columns: Mapping[str, Mapping[str, float]]) -> None:
    """Print a table of the metrics by column; print nothing if there are none."""
    columns = {title: metrics for title, metrics in columns.items() if metrics}
    if not columns:
        return
    # Imported lazily, so that training starts without waiting for it.
    from rich.console import Console
    from rich.table import Table

    title = f"{name} at step {outcome.step}, epoch {outcome.epoch}"
    table = Table(title=title, min_width=len(title))
    table.add_column("metric")
    for column in columns:
        table.add_column(column, justify="right")
    for name in dict.fromkeys(name for metrics in columns.values() for name in metrics):
        values = [metrics.get(name) for metrics in columns.values()]
        # Validation and test may have different data sets, and thus different metric names.
        table.add_row(name, *("" if value is None else f"{value:.4f}" for value in values))
    Console(highlight=False).print(table)


def _report_files(run_dir: str, best_by: str) -> None:
    folder, url = local_path(run_dir), remote_url(run_dir)
    if read_curves(folder):
        hint = "not drawn: pip install 'stepwrap[plots]'"
        print(f"curves: {draw_curves(folder) if plots_available() else hint}")
    saved = list_checkpoints(folder / "checkpoints")
    best = [path for path, meta in saved if meta["best"]]
    if best:
        print(f"best checkpoint: {best[0]}")
        if best_by:
            print(f"best by: {best_by}")
    if saved:
        path, meta = saved[0]
        print(f"last checkpoint: {path}")
        _report_evaluated(run_dir, meta)
    if url:
        print(f"uploaded: {url}")
        curves = folder / "curves.png"
        if curves.is_file():
            # Drawn after the run has ended.
            from ..remote.stores import Store

            Store(url).upload(curves, curves.name)


def _report_evaluated(run_dir: str, meta: Mapping[str, Any]) -> None:
    """Print where the evaluated weights are, unless they are the model's own weights."""
    file, *keys = meta.get("evaluated", ["model"])
    if keys:
        where = f"{file} of the checkpoint, under {' / '.join(keys)}"
        load = f"stepwrap.runner.load_model({run_dir!r})"
        print(f"evaluated weights: in {where} (not in model.safetensors); {load} loads the model")


_PACKAGES = (
    *("stepwrap", "torch", "torchmetrics", "omegaconf", "rich", "numpy"),
    *("matplotlib", "tensorboard", "scikit-learn", "pytorch-lightning", "mmengine", "mpi4py"),
)


def run_env(options: Options) -> int:
    """Print versions and devices, for a bug report."""
    facts = {"python": f"{platform.python_version()} ({sys.executable})"}
    for name in _PACKAGES:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = "not installed"
    facts["system"] = f"{platform.platform()}, {os.cpu_count()} cores"
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    facts["threads"] = f"{torch.get_num_threads()} (OMP_NUM_THREADS={threads})"
    if torch.cuda.is_available():
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        facts["cuda"] = f"{torch.version.cuda}, cudnn {cudnn}"
        for index in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(index)
            facts[f"cuda:{index}"] = f"{card.name}, {card.total_memory / 2**30:.0f} GiB"
        facts["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    else:
        facts["cuda"] = f"no device (torch built for CUDA {torch.version.cuda or 'none'})"
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type != "cuda":
        facts[device.type] = f"{torch.accelerator.device_count()} devices"
    backends = ("gloo", "nccl", "mpi", "ucc", "xccl")
    present = [name for name in backends if dist.is_backend_available(name)]
    facts["back-ends"] = ", ".join(present) or "none"
    for fact, value in facts.items():
        print(f"{fact:<20}: {value}")
    return 0
