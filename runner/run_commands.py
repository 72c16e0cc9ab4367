"""The commands that build and run: train, validate, test, check, env."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from ..registry import Config, ConfigError, Problem, RunSections, load_config
from .failure import Terminated, TrainingFailed
from .jobs import Job, refuse_occupied, run_job
from .launcher import launch, lonely_group, started_outside
from .parts import BuildError, build_parts, needs_group, read_sections
from .report import report_check, report_environment, report_outcome
from .run_folder import saved_checkpoints

_NEEDED = {"train": "train", "validate": "data.val", "test": "data.test"}


def run_train(options: argparse.Namespace) -> int:
    """Train, and test at the end where there is test data."""
    config, run = _load(options)
    resume = options.resume if options.resume is not None else run.resume
    if options.fresh and resume:
        raise ConfigError([Problem("", "--fresh and --resume exclude each other")])
    if options.dry_run and resume:
        what = "--dry-run and --resume exclude each other: a dry run starts from the beginning"
        raise ConfigError([Problem("", what)])
    job = Job("train", config, resume=resume, fresh=options.fresh, dry_run=options.dry_run)
    if not started_outside():
        # Asked again by the ranks; here the answer comes before any is started.
        refuse_occupied(job, run.run_dir)
        if not options.dry_run:
            _make_folder(config, run.run_dir)
    return _run(job, options, run)


def _make_folder(config: Config, run_dir: str) -> None:
    try:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        origin = config.origin("run_dir") if "run_dir" in config else ""
        what = f"the folder {run_dir} cannot be made: {error.strerror}"
        raise ConfigError([Problem("run_dir", what, origin)]) from error


def run_validate(options: argparse.Namespace) -> int:
    """Evaluate a checkpoint on the validation data."""
    return _run_evaluation("validate", options)


def run_test(options: argparse.Namespace) -> int:
    """Evaluate a checkpoint on the test data."""
    return _run_evaluation("test", options)


def run_check(options: argparse.Namespace) -> int:
    """Report every mistake in a config, then build its parts on the CPU."""
    config = load_config(options.words[0], options.words[1:])
    run = replace(read_sections(config), device="cpu")
    group: AbstractContextManager[None] = lonely_group() if needs_group(run) else nullcontext()
    with group:
        try:
            parts = build_parts(run)
        except BuildError as error:
            raise ConfigError([error.as_problem(config)]) from error.cause
    report_check(options.words[0], run, parts)
    return 0


def run_env(options: argparse.Namespace) -> int:
    """Print versions and devices."""
    report_environment()
    return 0


def _run_evaluation(command: str, options: argparse.Namespace) -> int:
    config, run = _load(options)
    checkpoint = None if options.checkpoint in (None, True) else options.checkpoint
    return _run(Job(command, config, checkpoint=checkpoint), options, run)


def _run(job: Job, options: argparse.Namespace, run: RunSections) -> int:
    job = replace(job, dry_run=options.dry_run, debug=options.debug)
    settings = run.launch
    backend = "gloo" if settings.backend == "auto" and run.device == "cpu" else settings.backend
    with _telling_what_is_saved(job, Path(run.run_dir)):
        results = launch(
            run_job, (job,), nproc=settings.nproc, backend=backend, timeout_s=settings.timeout_s
        )
    if 0 not in results:
        # One of torchrun's other ranks: rank 0 does the talking.
        return next(iter(results.values())).exit_code
    return report_outcome(job, run, results[0])


@contextmanager
def _telling_what_is_saved(job: Job, folder: Path) -> Iterator[None]:
    """Put the checkpoint that a run has left, when a signal ended it later, into the error."""
    # Not find_checkpoint, which ranks call together: a signal may have come to one of them.
    before = saved_checkpoints(folder)
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        saved = saved_checkpoints(folder)
        if job.command != "train" or not saved:
            raise
        raise TrainingFailed(folder / "config.yaml", saved[-1]) from error
    except (KeyboardInterrupt, Terminated) as error:
        number = error.number if isinstance(error, Terminated) else signal.SIGINT
        saved = saved_checkpoints(folder)
        if job.command != "train" or not saved or saved == before:
            raise
        raise Terminated(number, str(saved[-1])) from error


def _load(options: argparse.Namespace) -> tuple[Config, RunSections]:
    """Read the config with the options laid upon it, and check all of it."""
    overrides = list(options.words[1:])
    if options.nproc is not None:
        overrides.append(f"launch.nproc={options.nproc}")
    if options.run_dir is not None:
        overrides.append(f"run_dir={json.dumps(options.run_dir)}")
    if options.device is not None:
        overrides.append(f"device={options.device}")
    config = load_config(options.words[0], overrides)
    world_size = int(os.environ.get("WORLD_SIZE") or 1) if started_outside() else None
    run = read_sections(config, world_size)
    needed = _NEEDED[options.command]
    section = getattr(run.data, needed.split(".")[1]) if "." in needed else run.train
    if section is None:
        raise ConfigError([Problem(needed, f"{options.command} needs this section, it is missing")])
    return config, run
