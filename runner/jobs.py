"""What each rank does for a command: build, run, report how it ended."""

from __future__ import annotations

import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ..collectives import agent_store, broadcast, get_rank, synchronize
from ..loops import CheckpointHook, NoteStepHook, find_checkpoint
from ..registry import (
    Config,
    ConfigError,
    Problem,
    RunSections,
    import_problems,
    load_config,
)
from ..wrappers import auto
from .failure import OversubscribedError, as_mistakes_in
from .launcher import launch, lonely_group
from .parallelism import needs_group
from .parts import build_parts
from .run_folder import (
    ConfigWriter,
    clear_results,
    in_use,
    occupied,
    resolve_checkpoint,
    saved_checkpoints,
)
from .runner import Runner, traced

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Settings of how a run is started, and those of optimizers and schedules that no state holds.
_OF_THE_START = ("run_dir", "resume", "launch", "import_from")
_OF_THE_RUN = ("type", "fused", "foreach", "capturable", "differentiable", "by", "metric")

# The loops that a command's parts are built for.
WANTED = {"train": ("train", "val", "test"), "validate": ("val",), "test": ("test",)}
WANTED["predict"] = ("test",)


@dataclass(frozen=True)
class Job:
    """One command, as it is handed to every rank; `run` has the checked sections of `config`."""

    command: str
    config: Config
    run: RunSections
    resume: bool | str = False
    checkpoint: str | None = None
    dry_run: bool = False
    fresh: bool = False
    debug: bool = False
    # Where predictions go.
    out: str = ""
    # A folder in which each rank notes its step, for a launcher that restarts the job.
    steps: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a job ended on one rank."""

    step: int
    epoch: int
    # Its number, where one has stopped the training.
    signal: int = 0
    # By phase, "val" and "test".
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    # Whose weights were evaluated last, "" for those at hand.
    checkpoint: str = ""
    # What the best checkpoint has, such as "lowest loss"; "" where none is kept.
    best_by: str = ""
    # The number of samples with predictions.
    predictions: int = 0

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.signal else 0


def run_job(job: Job) -> Outcome:
    """Do `job`; every rank must call this."""
    with prepared(job):
        return _run_here(job)


@contextmanager
def prepared(job: Job) -> Iterator[None]:
    """Have log lines, the modules that the config imports, and the group that its parts need."""
    with _console_log(job.debug):
        # What the config imports has to be there in a new process too.
        if failed := import_problems(job.config):
            raise ConfigError(failed)
        with lonely_group(needs_group(job.run)), traced(job.run.trace_collectives):
            yield


def on_ranks(
    run: RunSections, fn: Callable[..., T], args: Sequence[Any], **options: Any
) -> dict[int, T]:
    """Call `fn(*args)` on the ranks of a run and return the results, as `launch` does."""
    settings = run.launch
    backend = "gloo" if settings.backend == "auto" and run.device == "cpu" else settings.backend
    options |= {"timeout_s": settings.timeout_s, "oversubscribe": settings.oversubscribe}
    try:
        return launch(fn, args, nproc=settings.nproc, backend=backend, **options)
    except OversubscribedError as error:
        raise ConfigError([Problem("launch.nproc", str(error))]) from error


def run_dir_error(config: Config, what: str) -> ConfigError:
    """Return what is wrong with the run's folder, with the line that names it."""
    origin = config.origin("run_dir") if "run_dir" in config else ""
    return ConfigError([Problem("run_dir", what, origin)])


def refuse_occupied(job: Job, *, is_held: bool = False) -> None:
    """Refuse to train beside another run, or over its results unless asked to.

    Every rank must call this: rank 0 looks, and all raise the same ConfigError. With `is_held`
    there is no other run.
    """
    if job.command != "train" or job.dry_run:
        return
    problem, folder = "", Path(job.run.run_dir)
    if get_rank() == 0:
        problem = "" if is_held else in_use(folder)
        if not job.resume and not job.fresh:
            problem = problem or occupied(folder)
    problem = broadcast(problem)
    if problem:
        raise run_dir_error(job.config, problem)


def _go_on(job: Job) -> Job:
    """Return the job for this attempt: one that torchrun has started again goes on.

    Every rank must call this. The store of torchrun tells, not the folder: an attempt that is
    refused, for the results of another run that the folder holds, is started again as well.
    """
    if job.command != "train" or job.dry_run:
        return job
    saved: int | None = None
    run_dir = Path(job.run.run_dir)
    store = agent_store() if get_rank() == 0 else None
    if store is not None and store.check([_begun(run_dir)]):
        saved = len(saved_checkpoints(run_dir))
    saved = broadcast(saved)
    if saved is None:
        return job
    return next_attempt(job, has_saved=bool(saved))


def next_attempt(job: Job, *, has_saved: bool) -> Job:
    """Return the job that continues one that failed, after or before its first checkpoint."""
    if has_saved:
        return replace(job, resume=True, fresh=False)
    # The records of the failed attempt would be in the way.
    return job if job.resume else replace(job, fresh=True)


def _begun(run_dir: Path) -> str:
    return f"stepwrap/begun/{run_dir.resolve()}"


def _run_here(job: Job) -> Outcome:
    job = _go_on(job)
    refuse_occupied(job)
    with _folder(job) as folder:
        job = replace(job, run=replace(job.run, run_dir=str(folder)))
        with as_mistakes_in(job.config):
            parts = build_parts(job.run, WANTED[job.command], one_batch=job.dry_run)
        hooks = {"config.yaml": ConfigWriter(job.config), **parts["hooks"]}
        if job.steps:
            hooks["note_step"] = NoteStepHook(Path(job.steps, str(get_rank())))
        runner = Runner(**{**parts, "hooks": hooks})
        if job.command == "train":
            with runner.hold_run_dir():
                # Another run may have come and gone meanwhile.
                refuse_occupied(job, is_held=True)
                return _train(runner, job, folder)
        return _evaluate(runner, job, folder)


def _train(runner: Runner, job: Job, folder: Path) -> Outcome:
    if get_rank() == 0:
        if job.fresh:
            clear_results(folder)
        if job.resume:
            _log_changes(job, folder)
        folder.mkdir(parents=True, exist_ok=True)
        if store := agent_store():
            store.set(_begun(folder), "")
    # No rank may look for checkpoints before the old ones are gone.
    synchronize()
    state = runner.train(resume=job.resume)
    metrics = {"val": dict(state.metrics)} if state.evaluated_at >= 0 else {}
    savers = [one for one in state.stateful.values() if isinstance(one, CheckpointHook)]
    best_by = next((one.best_by(state) for one in savers if metrics), "")
    outcome = Outcome(state.step, state.running_epoch, state.signal, metrics, best_by=best_by)
    if state.signal or job.run.data.test is None:
        return outcome
    best = find_checkpoint(folder, "best")
    metrics["test"] = runner.test(best)
    return replace(outcome, checkpoint=str(best or ""))


def _log_changes(job: Job, folder: Path) -> None:
    """Name the settings that are not those that the run to go on from had."""
    if isinstance(job.resume, str) and job.resume not in ("best", "latest"):
        path = Path(job.resume)
        folder = path if (path / "checkpoints").is_dir() else path.parent.parent
    try:
        before = _flat(load_config(folder / "config.yaml").to_dict())
    except (ConfigError, OSError):
        logger.info("%s has no config.yaml to compare the settings with", folder)
        return
    now = _flat(job.config.to_dict())
    lines = [
        f"  {key}: {before.get(key, 'not set')} -> {now.get(key, 'not set')}{_effect(key)}"
        for key in dict.fromkeys((*before, *now))
        if before.get(key) != now.get(key) and key.split(".")[0] not in _OF_THE_START
    ]
    if lines:
        told = "\n".join(lines)
        logger.warning("settings that differ from those the run had so far:\n%s", told)


def _effect(key: str) -> str:
    parts = key.split(".")
    if parts[0] in ("optimizer", "schedulers") and parts[-1] not in _OF_THE_RUN:
        return " (has no effect: the state in the checkpoint goes on)"
    if key == "data.train.batch_size":
        return " (the most that a rank gets at once; an update keeps its samples)"
    return ""


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values in nested dicts and lists by their dotted paths."""
    items: Any = enumerate(value) if isinstance(value, list) else ()
    items = value.items() if isinstance(value, dict) else items
    flat = {k: v for key, one in items for k, v in _flat(one, f"{prefix}{key}.").items()}
    return flat or {prefix.removesuffix("."): value}


def _evaluate(runner: Runner, job: Job, folder: Path) -> Outcome:
    path = None if job.dry_run else resolve_checkpoint(folder, job.checkpoint or "")
    if job.command == "predict":
        count = runner.predict(job.out, checkpoint=path)
        state = runner.state
        return Outcome(state.step, state.running_epoch, 0, {}, str(path or ""), predictions=count)
    verb, phase = (runner.test, "test") if job.command == "test" else (runner.validate, "val")
    metrics = {phase: verb(path)}
    state = runner.state
    return Outcome(state.step, state.running_epoch, 0, metrics, str(path or ""))


@contextmanager
def _folder(job: Job) -> Iterator[Path]:
    """The run's folder; for a dry run one that is removed afterwards."""
    if not job.dry_run:
        yield Path(job.run.run_dir)
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
        # Rank 0 shows the same ones. Without a handler Python prints logged warnings itself.
        silence = logging.NullHandler()
        ours.addHandler(silence)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                yield
            finally:
                ours.removeHandler(silence)
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s" if debug else "%(message)s"))
    level = ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.INFO if debug else logging.WARNING)
    # Which checkpoint a run goes on from is news for everybody, which wrapper was chosen, and what
    # compiling has brought.
    for news in (f"{__package__}.runner", auto.__module__, "stepwrap.wrappers.compiled"):
        logging.getLogger(news).setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.setLevel(level)
