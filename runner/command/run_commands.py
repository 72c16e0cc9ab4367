"""The commands that build and run: train, validate, test, check, env."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from ...registry import Config, ConfigError, Problem, RunSections
from ..build.parts import BuildError, rehearse
from ..build.sections import read_sections
from ..failure import Terminated, TrainingFailed
from ..guard import raising_stops
from ..jobs import Job, refuse_occupied, run_job
from ..launcher import launch, started_outside
from ..run_folder import new_folder, saved_checkpoints
from .report import report_check, report_environment, report_outcome


def run_train(options: argparse.Namespace) -> int:
    """Train, and test at the end where there is test data."""
    config, run = _load(options)
    resume = options.resume if options.resume is not None else run.resume
    if options.fresh and resume:
        raise ConfigError([Problem("", "--fresh and --resume exclude each other")])
    if options.dry_run and resume:
        what = "--dry-run and --resume exclude each other: a dry run starts from the beginning"
        raise ConfigError([Problem("", what)])
    job = Job("train", config, run, resume, fresh=options.fresh, dry_run=options.dry_run)
    if started_outside():
        return _run(job, options, run)
    # Asked again by the ranks; here the answer comes before any is started.
    refuse_occupied(job, run.run_dir)
    folder = nullcontext() if options.dry_run else _folder_for(config, run.run_dir)
    with raising_stops(), folder:
        return _run(job, options, run)


@contextmanager
def _folder_for(config: Config, run_dir: str) -> Iterator[None]:
    """Make the run's folder, before anything else can fail; nothing empty is left of it."""
    with ExitStack() as stack:
        try:
            stack.enter_context(new_folder(Path(run_dir)))
        except OSError as error:
            origin = config.origin("run_dir") if "run_dir" in config else ""
            what = f"the folder {run_dir} cannot be made: {error.strerror}"
            raise ConfigError([Problem("run_dir", what, origin)]) from error
        yield


def run_validate(options: argparse.Namespace) -> int:
    """Evaluate a checkpoint on the validation data."""
    return _run_evaluation("validate", options)


def run_test(options: argparse.Namespace) -> int:
    """Evaluate a checkpoint on the test data."""
    return _run_evaluation("test", options)


def run_check(options: argparse.Namespace) -> int:
    """Report every mistake in a config, then build its parts on the CPU."""
    run = read_sections(options.examined)
    try:
        parts = rehearse(run)
    except BuildError as error:
        raise error.as_config_error(options.examined.config) from error.cause
    report_check(options.words[0], run, parts)
    return 0


def run_env(options: argparse.Namespace) -> int:
    """Print versions and devices."""
    report_environment()
    return 0


def _run_evaluation(command: str, options: argparse.Namespace) -> int:
    config, run = _load(options)
    checkpoint = None if options.checkpoint in (None, True) else options.checkpoint
    return _run(Job(command, config, run, checkpoint=checkpoint), options, run)


def _run(job: Job, options: argparse.Namespace, run: RunSections) -> int:
    job = replace(job, dry_run=options.dry_run, debug=options.debug)
    settings = run.launch
    backend = "gloo" if settings.backend == "auto" and run.device == "cpu" else settings.backend
    with _telling_what_is_saved(job, Path(run.run_dir)), raising_stops():
        results = launch(
            run_job, (job,), nproc=settings.nproc, backend=backend, timeout_s=settings.timeout_s
        )
    if 0 not in results:
        # One of torchrun's other ranks: rank 0 does the talking.
        return next(iter(results.values())).exit_code
    return report_outcome(job, run, results[0])


@contextmanager
def _telling_what_is_saved(job: Job, folder: Path) -> Iterator[None]:
    """Put the checkpoint that a run has left, or had started from, into the error of its end."""
    # Not find_checkpoint, which ranks call together: a signal may have come to one of them.
    before, set_aside = _stamped(folder), _stamped(folder, "incomplete_")
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        saved, aside = _stamped(folder), _stamped(folder, "incomplete_")
        if job.command != "train" or (saved, aside) == (before, set_aside):
            raise
        last = next(reversed(saved), None)
        rest = next(reversed(aside), None) if aside != set_aside else None
        raise TrainingFailed(folder / "config.yaml", last, rest) from error
    except (KeyboardInterrupt, Terminated) as error:
        number = error.number if isinstance(error, Terminated) else signal.SIGINT
        saved = _stamped(folder)
        if job.command != "train" or not saved or saved == before:
            raise
        raise Terminated(number, str(next(reversed(saved)))) from error


def _stamped(folder: Path, prefix: str = "step_") -> dict[Path, int]:
    """Return the checkpoints in a folder, the last one last, with their times."""
    return {path: path.stat().st_mtime_ns for path in saved_checkpoints(folder, prefix)}


def _load(options: argparse.Namespace) -> tuple[Config, RunSections]:
    """Return the config, and all of it checked."""
    told = os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1
    world_size = int(told) if started_outside() else None
    return options.examined.config, read_sections(options.examined, world_size)
