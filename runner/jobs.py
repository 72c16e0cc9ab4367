"""What each rank does for a command: build, run, tell how it ended."""

from __future__ import annotations

import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..collectives import broadcast, get_rank, get_world_size, synchronize
from ..loops import CheckpointHook, find_checkpoint
from ..registry import Config, ConfigError, RunSections, dump_config
from ..wrappers import auto
from ._tracing import traced
from .launcher import lonely_group
from .parts import BuildError, build_parts, needs_group
from .run_folder import clear_results, occupied, resolve_checkpoint
from .runner import Runner
from .sections import read_sections

# The loops that a command's parts are built for.
WANTED = {"train": ("train", "val", "test"), "validate": ("val",), "test": ("test",)}


@dataclass(frozen=True)
class Job:
    """One command, as it is handed to every rank."""

    command: str
    config: Config
    resume: bool | str = False
    checkpoint: str | None = None
    dry_run: bool = False
    fresh: bool = False
    debug: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a job ended on one rank.

    Attributes:
        step: Optimizer updates done.
        epoch: Finished epochs.
        signal: Number of the signal that stopped the training; 0 for none.
        metrics: Results by phase, "val" and "test".
        checkpoint: Whose weights were evaluated last, "" for those at hand.
        best_by: What the best checkpoint has, such as "lowest loss"; "" where none is kept.
    """

    step: int
    epoch: int
    signal: int = 0
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    checkpoint: str = ""
    best_by: str = ""

    @property
    def exit_code(self) -> int:
        """What a process ends with after this outcome, the same on every rank."""
        return 128 + self.signal if self.signal else 0


def run_job(job: Job) -> Outcome:
    """Do `job`; every rank must call this."""
    with _console_log(job.debug):
        run = read_sections(job.config, get_world_size())
        group: AbstractContextManager[None] = lonely_group() if needs_group(run) else nullcontext()
        with group, traced(run.trace_collectives):
            return _run_here(job, run)


def refuse_occupied(job: Job, run_dir: str) -> None:
    """Refuse to train over the results of another run, unless that is wished.

    Every rank must call this: rank 0 looks, and all raise the same ConfigError.
    """
    if job.command != "train" or job.resume or job.fresh or job.dry_run:
        return
    problem = broadcast(occupied(Path(run_dir)) if get_rank() == 0 else None)
    if problem is not None:
        origin = job.config.origin("run_dir") if "run_dir" in job.config else ""
        raise ConfigError([replace(problem, origin=origin)])


def _run_here(job: Job, run: RunSections) -> Outcome:
    refuse_occupied(job, run.run_dir)
    with _folder(job, run.run_dir) as folder:
        run = replace(run, run_dir=str(folder))
        runner = Runner(**_build(job, run))
        if job.command == "train":
            return _train(runner, job, run)
        return _evaluate(runner, job, folder)


def _build(job: Job, run: RunSections) -> dict[str, Any]:
    """Build the parts; raises what cannot be built as mistakes in the config."""
    try:
        return build_parts(run, WANTED[job.command], one_batch=job.dry_run)
    except BuildError as error:
        raise error.as_config_error(job.config) from error.cause


def _train(runner: Runner, job: Job, run: RunSections) -> Outcome:
    folder = Path(run.run_dir)
    if get_rank() == 0:
        if job.fresh:
            clear_results(folder)
        folder.mkdir(parents=True, exist_ok=True)
        dump_config({**job.config.to_dict(), "resume": False}, folder / "config.yaml")
    # No rank may look for checkpoints before the old ones are gone.
    synchronize()
    state = runner.train(resume=job.resume)
    metrics = {"val": dict(state.metrics)} if state.evaluated_at >= 0 else {}
    savers = [one for one in state.stateful.values() if isinstance(one, CheckpointHook)]
    best_by = next((one.best_by(state) for one in savers if metrics), "")
    outcome = Outcome(state.step, state.epoch, state.signal, metrics, best_by=best_by)
    if state.signal or run.data.test is None:
        return outcome
    best = find_checkpoint(folder, "best")
    metrics["test"] = runner.test(best)
    return replace(outcome, checkpoint=str(best or ""))


def _evaluate(runner: Runner, job: Job, folder: Path) -> Outcome:
    path = None if job.dry_run else _checkpoint(job, folder)
    verb, phase = (runner.test, "test") if job.command == "test" else (runner.validate, "val")
    metrics = {phase: verb(path)}
    state = runner.state
    return Outcome(state.step, state.epoch, 0, metrics, str(path or ""))


def _checkpoint(job: Job, folder: Path) -> Path:
    return resolve_checkpoint(folder, job.checkpoint or "")


@contextmanager
def _folder(job: Job, run_dir: str) -> Iterator[Path]:
    """The run's folder; for a dry run one that is removed afterwards."""
    if not job.dry_run:
        yield Path(run_dir)
        return
    mine = tempfile.mkdtemp(prefix="stepwrap_dry_run_") if get_rank() == 0 else ""
    folder = Path(broadcast(mine))
    try:
        yield folder
        synchronize()
    finally:
        if get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _console_log(debug: bool) -> Iterator[None]:
    """Show rank 0's warnings as plain lines; with `debug` everything from every rank."""
    ours = logging.getLogger("stepwrap")
    if get_rank() != 0 and not debug:
        with warnings.catch_warnings():
            # Python's own too: they would be the same as those of rank 0.
            warnings.simplefilter("ignore")
            yield
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s" if debug else "%(message)s"))
    level = ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.INFO if debug else logging.WARNING)
    # Which checkpoint a run goes on from is news for everybody, and which wrapper was chosen.
    for news in (f"{__package__}.runner", auto.__module__):
        logging.getLogger(news).setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.setLevel(level)
