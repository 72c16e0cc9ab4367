"""Search for good settings: the search space, Optuna's study, and one run for each trial."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...collectives import broadcast, get_rank
from ...loops import Hook, LoopState, Phase, mix_seed
from ...loops.metrics.evaluation import WatchedMetric
from ...registry import Config, ConfigError, Problem, RunSections, did_you_mean, load_config
from ...registry.errors import shown, shown_value
from ...registry.text.files import parse
from ...registry.text.values import dotted, leaves
from ..failure import LaunchError
from ..jobs import Outcome, launch_ranks, train_on_rank
from ..rank_processes import stop_error
from ..run_folder import saved_checkpoints
from ..sections import read_sections

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.storages import JournalStorage
    from optuna.trial import FrozenTrial, Trial

_RANGE = ("low", "high", "log", "step")
_EXAMPLE = "such as optimizer.lr: {low: 1e-4, high: 1e-1, log: true}"
_STUDY = "sweep"


@dataclass(frozen=True)
class Setting:
    """A setting that a sweep varies: a range or a list of choices.

    Attributes:
        origin: file and line of the setting.
        given: the setting as written in the file: ``low``, ``high``, ``log`` and ``step``, or
            ``choices``.
    """

    origin: str
    given: Mapping[str, Any]

    @property
    def samples(self) -> list[Any]:
        """The values to check before the first trial: all choices, or both ends of the range."""
        return list(self.given.get("choices", [self.given.get("low"), self.given.get("high")]))

    def distribution(self) -> BaseDistribution:
        """Return Optuna's distribution. Choices become JSON, because Optuna cannot store lists."""
        from optuna import distributions

        if "choices" in self.given:
            return distributions.CategoricalDistribution(list(map(json.dumps, self.samples)))
        log, step = self.given.get("log", False), self.given.get("step")
        low, high = self.samples
        if all(isinstance(bound, int) for bound in (low, high, step or 1)):
            return distributions.IntDistribution(low, high, log=log, step=step or 1)
        return distributions.FloatDistribution(low, high, log=log, step=step)

    def value(self, stored: Any) -> Any:
        """Convert a value that Optuna stores to a value of the setting."""
        return json.loads(stored) if "choices" in self.given else stored


def read_space(path: str) -> dict[str, Setting]:
    """Read a search space: a file that maps config keys, dotted or nested, to the values to try.

    Raises:
        ConfigError: the file cannot be read or has mistakes; the error lists all of them.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = getattr(error, "strerror", None) or str(error)
        raise ConfigError([Problem("", f"the space {path} cannot be read: {message}")]) from error
    values, origins = parse(text, shown(path))
    if not isinstance(values, dict) or not values:
        message = f"a space must map settings to the values to try, {_EXAMPLE}"
        raise ConfigError([Problem("", message, origins[""])])
    space = {key: Setting(origins[key], setting) for key, setting in _flat(values)}
    problems = []
    for key, setting in space.items():
        message, at = _mistake_in(setting.given)
        origin = origins.get(f"{key}.{at}", setting.origin)
        problems += [Problem(key, message, origin)] if message else []
    if problems:
        raise ConfigError(problems)
    return space


def _flat(values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, setting in values.items():
        for path, inner in leaves(setting, (key,), contents=_settings_in):
            yield dotted(path), inner


def _settings_in(setting: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the settings of a section; None for the values to try."""
    if not isinstance(setting, dict) or not setting or {*_RANGE, "choices"} & setting.keys():
        return None
    is_section = all(isinstance(entry, dict) for entry in setting.values())
    return setting.items() if is_section else None


def _mistake_in(setting: Any) -> tuple[str, str]:
    """Return a message about the first mistake and its key, or two empty strings."""
    if not isinstance(setting, dict):
        message = "must be {low: ..., high: ...} or {choices: [...]}"
        return f"{message}, got {shown_value(setting)}", ""
    allowed = (*_RANGE, "choices")
    if unknown := [key for key in setting if key not in allowed]:
        name = str(unknown[0])
        hint = did_you_mean(name, allowed) or f"; there is {', '.join(allowed)}"
        return f"{name} is unknown{hint}", name
    if "choices" in setting:
        choices = setting["choices"]
        if len(setting) > 1:
            return "choices and a range (low, high, log, step) exclude each other", "choices"
        if not isinstance(choices, list) or not choices:
            return f"choices must be a list of values, got {shown_value(choices)}", "choices"
        return "", ""
    return _mistake_in_range(setting)


def _mistake_in_range(setting: Mapping[str, Any]) -> tuple[str, str]:
    for key in ("low", "high", "step"):
        value = setting.get(key)
        if key == "step" and value is None:
            continue
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not math.isfinite(value)
        ):
            return f"{key} must be a number, got {shown_value(value)}", key
    low, high, step, log = (
        setting["low"],
        setting["high"],
        setting.get("step"),
        setting.get("log", False),
    )
    if not isinstance(log, bool):
        return f"log must be true or false, got {shown_value(log)}", "log"
    if not low < high:
        return f"low must be less than high, got {low} and {high}", "low"
    if step is not None and (step <= 0 or log):
        message = "log and step exclude each other" if log else f"step must be positive, got {step}"
        return message, "step"
    return (f"log needs a low above 0, got {low}", "low") if log and low <= 0 else ("", "")


def check_space(space: Mapping[str, Setting], source: str, overrides: Sequence[str]) -> None:
    """Check that the config accepts each choice and both ends of each range.

    Args:
        space: the settings to vary.
        source: the config file.
        overrides: overrides of the command line.

    Raises:
        ConfigError: the config does not accept a value, or has no such setting.
    """
    for at in range(max(len(setting.samples) for setting in space.values())):
        values = {key: setting.samples[at % len(setting.samples)] for key, setting in space.items()}
        try:
            read_sections(load_config(source, [*overrides, *as_overrides(values)]))
        except ConfigError as error:
            raise ConfigError([_located(problem, space) for problem in error.problems]) from error


def _located(problem: Problem, space: Mapping[str, Setting]) -> Problem:
    """If a value of the search space caused the problem, name its line as the origin."""
    key = next((key for key in space if problem.origin.startswith(f"override {key}=")), None)
    return problem if key is None else replace(problem, origin=space[key].origin)


def as_overrides(values: Mapping[str, Any]) -> list[str]:
    """Return values as overrides for the command line: ``key=value``, with the value as YAML."""
    return [f"{key}={_text(value)}" for key, value in values.items()]


def _text(value: Any) -> str:
    try:
        is_plain = isinstance(value, str) and parse(value, "")[0] == value
    except ConfigError:
        is_plain = False
    return value if is_plain else json.dumps(value)


class TrialHook(Hook):
    """Report each validation to the study, and stop the run if the study prunes the trial.

    Args:
        folder: the sweep's folder.
        trial_id: the id of the trial in the study's storage.
        metric: the name of the validation metric.
        prune: whether the study may prune the trial.
    """

    def __init__(self, folder: Path, trial_id: int, metric: str, *, prune: bool) -> None:
        self._folder, self._trial_id, self._prune = folder, trial_id, prune
        self._watched = WatchedMetric(metric, None, setting="stepwrap sweep: --metric")

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        if state.phase is not Phase.VAL or not metrics:
            return
        value = self._watched.value_in(metrics)
        is_last = state.max_steps is not None and state.step >= state.max_steps
        # Rank 0 asks the study, and all ranks act on its answer.
        if broadcast(get_rank() == 0 and self._report(value, state.step, is_last)):
            state.request_stop(f"the sweep pruned the trial at {self._watched.name} {value:.4g}")

    def _report(self, value: float, step: int, is_last: bool) -> bool:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.load_study(study_name=_STUDY, storage=_storage(self._folder))
        trial = optuna.trial.Trial(study, self._trial_id)
        trial.report(value, step)
        is_pruned = self._prune and not is_last and trial.should_prune()
        if is_pruned:
            trial.set_user_attr("pruned", True)
        return is_pruned


class Sweep:
    """Manage the trials of a sweep, which are stored in its folder so that it can be resumed.

    Args:
        folder: the sweep's folder.
        space: the settings to vary.
        metric: the name of the validation metric.
        higher_is_better: whether higher values of the metric are better.
        seed: the seed of the search.

    Raises:
        ValueError: the folder holds a sweep with another space, metric or direction.
    """

    def __init__(
        self,
        folder: Path,
        space: Mapping[str, Setting],
        *,
        metric: str,
        higher_is_better: bool,
        seed: int,
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder, self.space, self.metric = folder, space, metric
        self._higher_is_better = higher_is_better
        directions = optuna.study.StudyDirection
        direction = directions.MAXIMIZE if higher_is_better else directions.MINIMIZE
        self._study: Study = optuna.create_study(
            study_name=_STUDY,
            storage=_storage(folder),
            direction=direction,
            load_if_exists=True,
        )
        # The seed depends on the trials so far: a resumed sweep must not repeat earlier values.
        count = len(self._study.get_trials(deepcopy=False))
        self._study.sampler = optuna.samplers.TPESampler(seed=mix_seed(seed, count) % 2**32)
        space_settings = {key: dict(setting.given) for key, setting in space.items()}
        settings = {
            "space": space_settings,
            "metric": metric,
            "mode": "max" if higher_is_better else "min",
        }
        before = self._study.user_attrs.get("settings", settings)
        if changed := [key for key in settings if settings[key] != before[key]]:
            raise ValueError(f"{folder} holds a sweep with another {' and '.join(changed)}")
        self._study.set_user_attr("settings", settings)

    @property
    def trials(self) -> list[FrozenTrial]:
        """The trials that have ended, except interrupted ones."""
        ended = (trial for trial in self._study.get_trials() if trial.state.is_finished())
        return [trial for trial in ended if "interrupted" not in trial.user_attrs]

    def ranked(self) -> list[FrozenTrial]:
        """Return the completed trials, best first, then the pruned ones; leave out failed ones."""
        sign = -1 if self._higher_is_better else 1
        with_value = [trial for trial in self.trials if trial.value is not None]
        return sorted(with_value, key=lambda trial: (is_pruned(trial), sign * (trial.value or 0.0)))

    def get_values(self, trial: FrozenTrial | Trial) -> dict[str, Any]:
        """Return a trial's value of each setting, by config key."""
        return {key: setting.value(trial.params[key]) for key, setting in self.space.items()}

    def run_dir(self, trial: FrozenTrial | Trial) -> Path:
        """Return the folder of a trial's run."""
        return self.folder / str(trial.user_attrs["folder"])

    def repeat_interrupted(self) -> None:
        """Queue interrupted trials again; each keeps its folder and its values."""
        import optuna

        for trial in self._study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
            optuna.trial.Trial(self._study, trial._trial_id).set_user_attr("interrupted", True)
            self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            self._study.enqueue_trial(trial.params, user_attrs=trial.user_attrs)

    def next_trial(self) -> Trial:
        """Return the next interrupted trial in the queue, otherwise a trial with new values."""
        trial = self._study.ask(
            {key: setting.distribution() for key, setting in self.space.items()}
        )
        if "folder" not in trial.user_attrs:
            trial.set_user_attr("folder", f"trial_{trial.number:04d}")
        return trial

    def run(
        self, trial: Trial, source: str, overrides: Sequence[str], *, prune: bool
    ) -> FrozenTrial:
        """Train with the values of a trial, and return the ended trial.

        If training fails, nothing is raised: the trial is marked as failed and stores the error.

        Raises:
            ConfigError: this machine is too small for the number of processes.
            KeyboardInterrupt: Ctrl-C stopped the run; ``repeat_interrupted`` continues it.
            Terminated: SIGTERM stopped the run.
        """
        from optuna.trial import TrialState

        hook = TrialHook(self.folder, trial._trial_id, self.metric, prune=prune)
        run_dir = self.run_dir(trial)
        words = [
            *overrides,
            *as_overrides(self.get_values(trial)),
            f"run_dir={json.dumps(str(run_dir))}",
        ]
        try:
            value = _train(source, words, hook, run_dir).get(self.metric, math.nan)
        except (ConfigError, LaunchError) as error:
            if isinstance(error, ConfigError) and error.problems[0].key == "launch.nproc":
                # The machine is too small for any trial.
                raise
            trial.set_user_attr("error", str(error).partition("\n")[0])
            return self._study.tell(trial, state=TrialState.FAIL)
        if math.isnan(value):
            trial.set_user_attr("error", f"{self.metric} is nan")
            return self._study.tell(trial, state=TrialState.FAIL)
        # TrialHook may have marked the stored trial as pruned.
        trials = self._study.get_trials()
        stored = next(saved for saved in trials if saved.number == trial.number)
        if is_pruned(stored):
            return self._study.tell(trial, state=TrialState.PRUNED)
        return self._study.tell(trial, value)


def is_pruned(trial: FrozenTrial) -> bool:
    """Return whether a trial was stopped early because others were better."""
    return bool(trial.user_attrs.get("pruned"))


def _storage(folder: Path) -> JournalStorage:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(str(folder / "study.log")))


def _train(source: str, overrides: Sequence[str], hook: Hook, run_dir: Path) -> dict[str, float]:
    """Train on all ranks without the test, and return the metrics of the last validation."""
    config = load_config(source, overrides)
    run = read_sections(config)
    run = replace(run, data=replace(run.data, test=None))
    is_begun = bool(saved_checkpoints(run_dir))
    run_dir.mkdir(parents=True, exist_ok=True)
    # With an environment variable to set, `launch` starts a process even for a single rank.
    threads = os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()
    variables = {"OMP_NUM_THREADS": str(threads)} if run.launch.nproc == 1 else {}
    try:
        output = run_dir / "output.txt"
        trial = partial(_train_on_rank, config, run, output=output, resume=is_begun, hook=hook)
        results = launch_ranks(run, trial, environment=variables)
    except LaunchError as error:
        if error.signal:
            raise stop_error(error.signal) from error
        with (run_dir / "output.txt").open("a") as file:
            file.writelines(
                f"rank {failure.rank}: {failure.trace}\n" for failure in reversed(error.failures)
            )
        raise
    outcome = results[0]
    if outcome.signal:
        raise stop_error(outcome.signal)
    return outcome.metrics.get("val", {})


def _train_on_rank(
    config: Config, run: RunSections, *, output: Path, resume: bool, hook: Hook
) -> Outcome:
    """Train on one rank, with its output in a file."""
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    return train_on_rank(config, run, resume=resume, fresh=not resume, hooks={"trial": hook})
