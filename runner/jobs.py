"""The work of one rank for a command: build the parts, run the loops, return the outcome."""

from __future__ import annotations

import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, ParamSpec, TypeVar

from ..collectives import agent_store, broadcast, get_rank, synchronize
from ..loops import (
    CheckpointHook,
    FreezeHook,
    Hook,
    LoopState,
    NoteStepHook,
    ProfileHook,
)
from ..loops.metrics.inputs import MetricInputsError
from ..registry import (
    Config,
    ConfigError,
    Problem,
    RunSections,
    import_problems,
    load_config,
)
from ..registry.local_paths import local_path, remote_url
from ..registry.text.values import dotted, leaves
from ..wrappers import auto
from .failure import OversubscribedError, as_mistakes_in
from .launcher import launch, single_process_group
from .parts import build_parts
from .rank_layout import needs_group
from .run_folder import (
    is_in_use,
    occupied,
    saved_checkpoints,
)
from .runner import Runner, traced

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# Settings that may differ when a run is resumed.
_LAUNCH_SETTINGS = ("run_dir", "resume", "launch", "import_from")
# Settings of optimizers and schedules that are not part of their state.
_NOT_IN_STATE = (
    *("type", "fused", "foreach", "capturable", "differentiable", "by", "metric"),
    *("lr_lambda", "period", "warmup_steps", "warmup", "total", "decay", "shape", "end"),
    "timescale",
)


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


def train_on_rank(
    config: Config,
    run: RunSections,
    *,
    resume: bool | str | Path = False,
    fresh: bool = False,
    dry_run: bool = False,
    debug: bool = False,
    hooks: Mapping[str, Hook] = MappingProxyType({}),
    steps: str = "",
) -> Outcome:
    """Train, then test the best checkpoint; every rank must call this.

    Args:
        config: the config.
        run: its checked sections.
        resume: as for ``Runner.train``.
        fresh: delete the results of an earlier run in the run's folder first.
        dry_run: train for one step, and keep nothing.
        debug: show the log messages of every rank.
        hooks: hooks in addition to the config's hooks, by name.
        steps: a folder in which each rank records its step, for a launcher that restarts the job.

    Raises:
        ConfigError: a part cannot be built, or the run's folder is not free.
    """
    with prepared(config, run, debug=debug), _run_folder(run, dry_run=dry_run) as run_dir:
        if not dry_run:
            resume, fresh = _next_after_restart(run, resume=resume, fresh=fresh)
            require_free_run_dir(config, run, resume=resume, fresh=fresh)
        run = replace(run, run_dir=run_dir)
        with as_mistakes_in(config):
            parts = build_parts(_without_loaded(run, resume), dry_run=dry_run)
        hooks = {**parts.hooks, **hooks}
        if steps:
            hooks["note_step"] = NoteStepHook(Path(steps, str(get_rank())))
        runner = Runner.from_parts(replace(parts, hooks=hooks), config)
        with _locating_inputs(config), runner.hold_run_dir():
            if not dry_run:
                # Another run may have used the folder since the check above.
                require_free_run_dir(config, run, resume=resume, fresh=fresh, is_locked=True)
            state = _train(runner, config, run, resume=resume, fresh=fresh)
            outcome = _training_outcome(state)
            if state.signal or run.data.test is None:
                return outcome
            return _test_best(runner, outcome)


def evaluate_on_rank(
    config: Config,
    run: RunSections,
    *,
    phase: Literal["val", "test"],
    checkpoint: str | None = None,
    dry_run: bool = False,
    debug: bool = False,
) -> Outcome:
    """Evaluate a checkpoint on the data of a phase; every rank must call this.

    Args:
        config: the config.
        run: its checked sections.
        phase: the data to evaluate on.
        checkpoint: as for ``resolve_checkpoint``; None for the best one, or the latest.
        dry_run: evaluate the initial weights on one batch.
        debug: show the log messages of every rank.
    """
    with prepared(config, run, debug=debug), _run_folder(run, dry_run=dry_run) as run_dir:
        runner = _build_evaluator(config, replace(run, run_dir=run_dir), phase, dry_run=dry_run)
        path = None if dry_run else runner.resolve(checkpoint or "")
        with _locating_inputs(config):
            metrics = runner.test(path) if phase == "test" else runner.validate(path)
        state = runner.state
        return Outcome(
            state.step, state.running_epoch, metrics={phase: metrics}, checkpoint=str(path or "")
        )


def predict_on_rank(
    config: Config,
    run: RunSections,
    *,
    out: str,
    checkpoint: str | None = None,
    debug: bool = False,
) -> Outcome:
    """Write predictions for the test data to the file ``out``; every rank must call this.

    The other arguments are the same as for ``evaluate_on_rank``.
    """
    with prepared(config, run, debug=debug):
        runner = _build_evaluator(config, run, "test")
        path = runner.resolve(checkpoint or "")
        with _locating_inputs(config):
            count = runner.predict(out, checkpoint=path)
        state = runner.state
        return Outcome(
            state.step, state.running_epoch, checkpoint=str(path or ""), predictions=count
        )


def _build_evaluator(
    config: Config, run: RunSections, phase: str, *, dry_run: bool = False
) -> Runner:
    with as_mistakes_in(config):
        parts = build_parts(run, (phase,), dry_run=dry_run)
    return Runner.from_parts(parts, config)


@contextmanager
def prepared(config: Config, run: RunSections, *, debug: bool = False) -> Iterator[None]:
    """Set up logging, the config's imports and the process group; every rank must enter."""
    with _console_log(debug):
        # A newly started process has not imported the config's modules yet.
        if failed := import_problems(config):
            raise ConfigError(failed)
        with single_process_group(needs_group(run)), traced(run.trace_collectives):
            yield


def on_ranks(
    run: RunSections, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> dict[int, T]:
    """Call ``fn`` with the arguments on the ranks of a run, and return the results by rank."""
    return launch_ranks(run, partial(fn, *args, **kwargs))


def launch_ranks(
    run: RunSections,
    call: Callable[[], T],
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> dict[int, T]:
    """Do the same as ``on_ranks``, with additional environment variables; see ``launch``."""
    settings = run.launch
    backend = "gloo" if settings.backend == "auto" and run.device == "cpu" else settings.backend
    try:
        return launch(
            call,
            nproc=settings.nproc,
            backend=backend,
            timeout_s=settings.timeout_s,
            oversubscribe=settings.oversubscribe,
            environment=environment,
        )
    except OversubscribedError as error:
        raise ConfigError([Problem("launch.nproc", str(error))]) from error


def run_dir_error(config: Config, message: str) -> ConfigError:
    """Return an error about the run's folder, with the line of the config that names it."""
    origin = config.origin("run_dir") if "run_dir" in config else ""
    return ConfigError([Problem("run_dir", message, origin)])


def require_free_run_dir(
    config: Config,
    run: RunSections,
    *,
    resume: bool | str | Path,
    fresh: bool,
    is_locked: bool = False,
) -> None:
    """Raise if a training's folder is not free: in use, or with results that must be kept.

    Every rank must call this: rank 0 checks, and all raise the same ConfigError. Pass ``is_locked``
    if this run has locked the folder, so that only results are checked.
    """
    problem, folder = "", local_path(run.run_dir)
    keeps = not resume and not fresh
    if get_rank() == 0:
        if url := remote_url(run.run_dir):
            # Imported here, because most runs have no URL.
            from .remote.runs import remote_problem

            problem = remote_problem(url, keeps=keeps, is_locked=is_locked)
        if not problem and not is_locked:
            problem = is_in_use(folder)
        # The working folder has also the files that were not uploaded.
        if not problem and keeps and (is_locked or not url):
            problem = occupied(folder)
    problem = broadcast(problem)
    if problem:
        raise run_dir_error(config, problem)


def _next_after_restart(
    run: RunSections, *, resume: bool | str | Path, fresh: bool
) -> tuple[bool | str | Path, bool]:
    """Return ``resume`` and ``fresh``; if torchrun has restarted the ranks, continue the run.

    Every rank must call this. torchrun's store records whether an earlier attempt began. Results in
    the run's folder are not a sign of it, because they may belong to another run.
    """
    saved: bool | None = None
    store = agent_store() if get_rank() == 0 else None
    if store is not None and store.check([_begun(local_path(run.run_dir))]):
        saved = _has_saved(run.run_dir)
    saved = broadcast(saved)
    if saved is None:
        return resume, fresh
    return next_attempt(resume, fresh, has_saved=saved)


def next_attempt(
    resume: bool | str | Path, fresh: bool, *, has_saved: bool
) -> tuple[bool | str | Path, bool]:
    """Return ``resume`` and ``fresh`` for the attempt after one that failed.

    Args:
        resume: the value of the failed attempt.
        fresh: the value of the failed attempt.
        has_saved: whether it left a checkpoint.
    """
    if has_saved:
        return True, False
    # `fresh` removes the records of the failed attempt.
    return resume, fresh or not resume


def _has_saved(run_dir: str) -> bool:
    """Return whether a run folder has a checkpoint; rank 0 calls this."""
    if saved_checkpoints(local_path(run_dir)):
        return True
    if not (url := remote_url(run_dir)):
        return False
    from .remote.runs import has_checkpoints

    return has_checkpoints(url)


def _begun(run_dir: Path) -> str:
    return f"stepwrap/begun/{run_dir.resolve()}"


@contextmanager
def _locating_inputs(config: Config) -> Iterator[None]:
    """Turn a ``MetricInputsError`` into a ConfigError with the line of the metric's setting."""
    try:
        yield
    except MetricInputsError as error:
        origin = config.origin(error.setting)
        raise ConfigError([Problem(error.setting, error.text, origin)]) from error


def _without_loaded(run: RunSections, resume: bool | str | Path) -> RunSections:
    """Return the settings, without ``load_from`` if a checkpoint replaces those weights.

    Every rank must call this.
    """
    resumes = bool(resume)
    if resume is True:
        # Without a checkpoint the run starts from the beginning.
        resumes = broadcast(get_rank() == 0 and _has_saved(run.run_dir))
    return run.without_loaded() if resumes else run


def _train(
    runner: Runner, config: Config, run: RunSections, *, resume: bool | str | Path, fresh: bool
) -> LoopState:
    folder = local_path(run.run_dir)
    source: bool | Path = bool(resume)
    if resume and not isinstance(resume, bool):
        source = runner.resolve(resume, "latest")
    if fresh:
        runner.clear_run_dir()
    if get_rank() == 0:
        if source:
            resumed_folder = folder if source is True else source.absolute().parent.parent
            _log_changes(config, run, resumed_folder)
        folder.mkdir(parents=True, exist_ok=True)
        if store := agent_store():
            store.set(_begun(folder), "")
    # No rank may look for checkpoints before rank 0 has removed the old ones.
    synchronize()
    return runner.train(resume=source)


def _training_outcome(state: LoopState) -> Outcome:
    metrics = {"val": dict(state.metrics)} if state.evaluated_at >= 0 else {}
    savers = [hook for hook in state.stateful.values() if isinstance(hook, CheckpointHook)]
    best_by = next((hook.best_by(state) for hook in savers if metrics), "")
    return Outcome(state.step, state.running_epoch, state.signal, metrics, best_by=best_by)


def _test_best(runner: Runner, outcome: Outcome) -> Outcome:
    """Test the best checkpoint in the run's folder; add the result to the training's outcome."""
    best = runner.find("best")
    metrics = {**outcome.metrics, "test": runner.test(best)}
    # The checkpoint has restored the metrics of its validation.
    at_best = dict(runner.state.metrics) if best is not None and metrics.get("val") else {}
    return replace(outcome, metrics=metrics, checkpoint=str(best or ""), best_metrics=at_best)


def _log_changes(config: Config, run: RunSections, folder: Path) -> None:
    """Log the settings that differ from the config of the run in ``folder``, which is resumed."""
    try:
        before = _flat(load_config(folder / "config.yaml").to_dict())
    except (ConfigError, OSError):
        logger.info("cannot compare the settings: %s has no readable config.yaml", folder)
        return
    now = _flat(config.to_dict())
    lines = [
        f"  {key}: {before.get(key, 'not set')} -> {now.get(key, 'not set')}{_effect(key, run)}"
        for key in dict.fromkeys((*before, *now))
        if before.get(key) != now.get(key) and key.split(".")[0] not in _LAUNCH_SETTINGS
    ]
    if lines:
        logger.warning("settings that differ from the resumed run:\n%s", "\n".join(lines))


def _effect(key: str, run: RunSections) -> str:
    components = key.split(".")
    if components[0] in ("optimizer", "schedulers") and components[-1] not in _NOT_IN_STATE:
        starts_later = components[-1] not in ("after", "until") and _starts_later(components, run)
        condition = " if the schedule has begun" if starts_later else ""
        return f" (no effect{condition}: the state in the checkpoint is used)"
    if components[0] == "load_from" and run.adapter is None:
        return " (no effect: a resumed run does not load it)"
    if key == "data.train.batch_size":
        return " (limits a rank's micro-batch only; each update keeps its number of samples)"
    return ""


def _starts_later(components: list[str], run: RunSections) -> bool:
    """Return whether a setting belongs to a schedule whose range starts after the first step."""
    if components[0] != "schedulers" or not components[1].isdigit():
        return False
    index = int(components[1])
    return index < len(run.schedulers) and run.schedulers[index].after > 0


def _flat(settings: Any) -> dict[str, Any]:
    """Return the values of nested dicts and lists by dotted key path."""
    return {dotted(path): value for path, value in leaves(settings)}


@contextmanager
def _run_folder(run: RunSections, *, dry_run: bool) -> Iterator[str]:
    """Yield the run's folder or, for a dry run, a temporary one that is removed at the end."""
    if not dry_run:
        yield run.run_dir
        return
    temporary = tempfile.mkdtemp(prefix="stepwrap_dry_run_") if get_rank() == 0 else ""
    folder: str = broadcast(temporary)
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
