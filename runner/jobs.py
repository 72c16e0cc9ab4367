"""The work of one rank for a command: build the parts, run the loops, report the outcome."""

from __future__ import annotations

import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ..collectives import agent_store, broadcast, get_rank, synchronize
from ..loops import CheckpointHook, FreezeHook, Hook, NoteStepHook, ProfileHook, find_checkpoint
from ..loops.metrics.inputs import MetricInputsError
from ..registry import (
    Config,
    ConfigError,
    Problem,
    RunSections,
    import_problems,
    load_config,
)
from ..registry.text.values import dotted, leaves
from ..wrappers import auto
from .failure import OversubscribedError, as_mistakes_in
from .launcher import launch, single_process_group
from .parts import build_parts
from .rank_layout import needs_group
from .run_folder import (
    ConfigWriter,
    clear_results,
    is_in_use,
    occupied,
    resolve_checkpoint,
    saved_checkpoints,
)
from .runner import Runner, traced

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Settings that may differ when a run is resumed.
_LAUNCH_SETTINGS = ("run_dir", "resume", "launch", "import_from")
# Settings of optimizers and schedules that are not part of their state.
_NOT_IN_STATE = ("type", "fused", "foreach", "capturable", "differentiable", "by", "metric")

# The loops to build for each command.
LOOPS_OF = {
    "train": ("train", "val", "test"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("test",),
}


@dataclass(frozen=True)
class Job:
    """A command as it is sent to every rank; ``run`` has the checked sections of ``config``."""

    command: str
    config: Config
    run: RunSections
    resume: bool | str | Path = False
    checkpoint: str | None = None
    dry_run: bool = False
    fresh: bool = False
    debug: bool = False
    # The file for predictions.
    out: str = ""
    # A folder in which each rank records its step, for a launcher that restarts the job.
    steps: str = ""
    # Hooks that the command adds to the config's hooks, by name.
    hooks: Mapping[str, Hook] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job on one rank."""

    step: int
    epoch: int
    # The number of the signal that stopped the training, or 0.
    signal: int = 0
    # By phase: "val" and "test".
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    # The checkpoint that was evaluated last; "" if the current weights were evaluated.
    checkpoint: str = ""
    # The validation metrics of `checkpoint`, if a training tested its best checkpoint.
    best_metrics: dict[str, float] = field(default_factory=dict)
    # Why the best checkpoint is the best, such as "lowest loss"; "" if no best one is kept.
    best_by: str = ""
    # The number of samples with predictions.
    predictions: int = 0

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.signal else 0


def run_job(job: Job) -> Outcome:
    """Run ``job`` and return its outcome; every rank must call this."""
    with prepared(job):
        return _run_here(job)


@contextmanager
def prepared(job: Job) -> Iterator[None]:
    """Set up logging, the config's imports and the process group; every rank must enter."""
    with _console_log(job.debug):
        # A newly started process has not imported the config's modules yet.
        if failed := import_problems(job.config):
            raise ConfigError(failed)
        with single_process_group(needs_group(job.run)), traced(job.run.trace_collectives):
            yield


def on_ranks(
    run: RunSections, fn: Callable[..., T], args: Sequence[Any], **options: Any
) -> dict[int, T]:
    """Call ``fn(*args)`` on the ranks of a run, and return the results by rank."""
    settings = run.launch
    backend = "gloo" if settings.backend == "auto" and run.device == "cpu" else settings.backend
    options |= {"timeout_s": settings.timeout_s, "oversubscribe": settings.oversubscribe}
    try:
        return launch(fn, args, nproc=settings.nproc, backend=backend, **options)
    except OversubscribedError as error:
        raise ConfigError([Problem("launch.nproc", str(error))]) from error


def run_dir_error(config: Config, message: str) -> ConfigError:
    """Return an error about the run's folder, with the line of the config that names it."""
    origin = config.origin("run_dir") if "run_dir" in config else ""
    return ConfigError([Problem("run_dir", message, origin)])


def require_free_run_dir(job: Job, *, is_locked: bool = False) -> None:
    """Raise if a training's folder is not free: in use, or with results that must be kept.

    Every rank must call this: rank 0 checks, and all raise the same ConfigError. Pass ``is_locked``
    if this run has locked the folder, so that only results are checked. Commands other than
    ``train`` and dry runs are not checked.
    """
    if job.command != "train" or job.dry_run:
        return
    problem, folder = "", Path(job.run.run_dir)
    if get_rank() == 0:
        problem = "" if is_locked else is_in_use(folder)
        if not job.resume and not job.fresh:
            problem = problem or occupied(folder)
    problem = broadcast(problem)
    if problem:
        raise run_dir_error(job.config, problem)


def _continued(job: Job) -> Job:
    """Return the job; if torchrun has restarted the ranks, return a job that continues the run.

    Every rank must call this. torchrun's store records whether an earlier attempt began. Results in
    the run's folder are not a sign of it, because they may belong to another run.
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
    """Return the job that continues a failed job, which left a checkpoint if ``has_saved``."""
    if has_saved:
        return replace(job, resume=True, fresh=False)
    # `fresh` removes the records of the failed attempt.
    return job if job.resume else replace(job, fresh=True)


def _begun(run_dir: Path) -> str:
    return f"stepwrap/begun/{run_dir.resolve()}"


def _run_here(job: Job) -> Outcome:
    job = _continued(job)
    require_free_run_dir(job)
    with _folder(job) as folder:
        job = replace(job, run=replace(job.run, run_dir=str(folder)))
        with as_mistakes_in(job.config):
            built = build_parts(_without_loaded(job), LOOPS_OF[job.command], one_batch=job.dry_run)
        hooks = {"config.yaml": ConfigWriter(job.config), **built["hooks"], **job.hooks}
        if job.steps:
            hooks["note_step"] = NoteStepHook(Path(job.steps, str(get_rank())))
        runner = Runner(**{**built, "hooks": hooks})
        runner.state.settings = job.config.to_dict()
        with _locating_inputs(job.config):
            if job.command == "train":
                with runner.hold_run_dir():
                    # Another run may have used the folder since the check above.
                    require_free_run_dir(job, is_locked=True)
                    return _train(runner, job, folder)
            return _evaluate(runner, job, folder)


@contextmanager
def _locating_inputs(config: Config) -> Iterator[None]:
    """Turn a ``MetricInputsError`` into a ConfigError with the line of the metric's setting."""
    try:
        yield
    except MetricInputsError as error:
        origin = config.origin(error.setting)
        raise ConfigError([Problem(error.setting, error.text, origin)]) from error


def _without_loaded(job: Job) -> RunSections:
    """Return the settings, without ``load_from`` if a checkpoint replaces those weights.

    Every rank must call this.
    """
    resumes = bool(job.resume)
    if job.resume is True:
        # Without a checkpoint the run starts from the beginning.
        resumes = broadcast(bool(saved_checkpoints(Path(job.run.run_dir))))
    return job.run.without_loaded() if resumes else job.run


def _train(runner: Runner, job: Job, folder: Path) -> Outcome:
    source: bool | Path = bool(job.resume)
    if job.resume and not isinstance(job.resume, bool):
        source = resolve_checkpoint(folder, job.resume, of_other_run="latest")
    if get_rank() == 0:
        if job.fresh:
            clear_results(folder)
        if source:
            _log_changes(job, folder if source is True else source.absolute().parent.parent)
        folder.mkdir(parents=True, exist_ok=True)
        if store := agent_store():
            store.set(_begun(folder), "")
    # No rank may look for checkpoints before rank 0 has removed the old ones.
    synchronize()
    state = runner.train(resume=source)
    metrics = {"val": dict(state.metrics)} if state.evaluated_at >= 0 else {}
    savers = [hook for hook in state.stateful.values() if isinstance(hook, CheckpointHook)]
    best_by = next((hook.best_by(state) for hook in savers if metrics), "")
    outcome = Outcome(state.step, state.running_epoch, state.signal, metrics, best_by=best_by)
    if state.signal or job.run.data.test is None:
        return outcome
    best = find_checkpoint(folder, "best")
    metrics["test"] = runner.test(best)
    # The checkpoint has restored the metrics of its validation.
    at_best = dict(state.metrics) if best is not None and metrics.get("val") else {}
    return replace(outcome, checkpoint=str(best or ""), best_metrics=at_best)


def _log_changes(job: Job, folder: Path) -> None:
    """Log the settings that differ from the config of the run in ``folder``, which is resumed."""
    try:
        before = _flat(load_config(folder / "config.yaml").to_dict())
    except (ConfigError, OSError):
        logger.info("cannot compare the settings: %s has no readable config.yaml", folder)
        return
    now = _flat(job.config.to_dict())
    lines = [
        f"  {key}: {before.get(key, 'not set')} -> {now.get(key, 'not set')}{_effect(key, job.run)}"
        for key in dict.fromkeys((*before, *now))
        if before.get(key) != now.get(key) and key.split(".")[0] not in _LAUNCH_SETTINGS
    ]
    if lines:
        logger.warning("settings that differ from the resumed run:\n%s", "\n".join(lines))


def _effect(key: str, run: RunSections) -> str:
    components = key.split(".")
    if components[0] in ("optimizer", "schedulers") and components[-1] not in _NOT_IN_STATE:
        return " (no effect: the state in the checkpoint is used)"
    if components[0] == "load_from" and run.adapter is None:
        return " (no effect: a resumed run does not load it)"
    if key == "data.train.batch_size":
        return " (limits a rank's micro-batch only; each update keeps its number of samples)"
    return ""


def _flat(settings: Any) -> dict[str, Any]:
    """Return the values of nested dicts and lists by dotted key path."""
    return {dotted(path): value for path, value in leaves(settings)}


def _evaluate(runner: Runner, job: Job, folder: Path) -> Outcome:
    path = None if job.dry_run else resolve_checkpoint(folder, job.checkpoint or "")
    if job.command == "predict":
        count = runner.predict(job.out, checkpoint=path)
        state = runner.state
        return Outcome(state.step, state.running_epoch, 0, {}, str(path or ""), predictions=count)
    is_test = job.command == "test"
    metrics = {"test": runner.test(path)} if is_test else {"val": runner.validate(path)}
    state = runner.state
    return Outcome(state.step, state.running_epoch, 0, metrics, str(path or ""))


@contextmanager
def _folder(job: Job) -> Iterator[Path]:
    """Yield the run's folder or, for a dry run, a temporary one that is removed at the end."""
    if not job.dry_run:
        yield Path(job.run.run_dir)
        return
    temporary = tempfile.mkdtemp(prefix="stepwrap_dry_run_") if get_rank() == 0 else ""
    folder = Path(broadcast(temporary))
    try:
        yield folder
        synchronize()
    finally:
        if get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _console_log(debug: bool) -> Iterator[None]:
    """Print rank 0's warnings as plain lines or, with ``debug``, the log messages of every rank."""
    package_logger = logging.getLogger("stepwrap")
    # Always shown: resumed checkpoint, loaded weights, frozen parameters, profile, chosen wrapper,
    # result of compiling.
    ours = (
        *(f"{__package__}.runner", f"{__package__}.pretrained", FreezeHook.__module__),
        *(ProfileHook.__module__, auto.__module__, "stepwrap.wrappers.compiled"),
    )
    loggers = [package_logger, *map(logging.getLogger, ours)]
    levels = [logger.level for logger in loggers]
    is_shown = debug or get_rank() == 0
    # Without any handler Python would print logged warnings itself.
    handler = logging.StreamHandler() if is_shown else logging.NullHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s" if debug else "%(message)s"))
    package_logger.addHandler(handler)
    with warnings.catch_warnings():
        if is_shown:
            for logger in loggers:
                logger.setLevel(logging.INFO)
            package_logger.setLevel(logging.INFO if debug else logging.WARNING)
        else:
            # Rank 0 shows the same warnings.
            warnings.simplefilter("ignore")
        try:
            yield
        finally:
            package_logger.removeHandler(handler)
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
