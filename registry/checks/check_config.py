"""The whole check of a run config, before any process starts."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..catalog import DATALOADERS, DATASETS, HOOKS, LOOPS, METRICS, MODEL_WRAPPERS, MODELS
from ..errors import ConfigError, Problem, did_you_mean, shown, shown_value
from ..imports import find_entry, import_entry, import_path, make_importable
from ..registry import Registry
from ..text.config import Config, config_from_dict
from ..tree import find_train_step
from .check_component import check_component, type_problem, with_type
from .optimizer_sections import optimization_problems, with_wrapper_type
from .schema import DEFAULT_HOOKS, HOOK_TYPES, Component, RunSections, SchedulerSection
from .typed import check_section

_LOOP_ARGS = ("dataloader", "metrics")
# Section -> its registry and the arguments that the run supplies.
_PARTS: dict[str, tuple[Registry, tuple[str, ...]]] = {
    "model": (MODELS, ()),
    "wrapper": (MODEL_WRAPPERS, ("module",)),
    "train": (LOOPS, ("dataloader", "val_loop")),
    "val": (LOOPS, _LOOP_ARGS),
    "test": (LOOPS, _LOOP_ARGS),
}
_IMPLIED_TYPES = {"val": "ValLoop", "test": "TestLoop"}
_LOADERS = ("train", "val", "test")
_WATCHING = ("metric", "keep_best")
_SCHEDULER_KEYS = ("by", "after", "until", "metric", "optimizer")


def name_problems(cfg: Mapping[str, Any]) -> list[Problem]:
    """Return the mistakes in a run config that can be found without any class, located.

    Those are keys, values of the sections, and names of what the config itself has. Neither the
    modules named in `imports` nor torch are imported for that: it takes milliseconds.
    """
    return _examined(cfg, imports=False).problems


def check_config(cfg: Mapping[str, Any]) -> RunSections:
    """Return the typed sections of a run config in which every part can be built.

    Imports the modules named in `imports` and those of the parts; builds nothing.

    Raises:
        ConfigError: with every problem found, each at its file and line.
    """
    sections, problems, _ = examine_config(cfg)
    if sections is None or problems:
        raise ConfigError(problems)
    return sections


class Examination(NamedTuple):
    """What a check has found.

    Attributes:
        sections: what could be read, with defaults for the rest; None where that is too little.
        problems: all that is wrong, located.
        faulty: the names of the sections that have problems.
    """

    sections: RunSections | None
    problems: list[Problem]
    faulty: frozenset[str]


def examine_config(cfg: Mapping[str, Any]) -> Examination:
    """Check like `check_config`, and also return the sections without mistakes."""
    return _examined(cfg, imports=True)


def _examined(cfg: Mapping[str, Any], *, imports: bool) -> Examination:
    config = cfg if isinstance(cfg, Config) else config_from_dict(cfg)
    values = config.to_dict()
    problems: list[Problem] = []
    hooks = _hooks(values.pop("hooks", None), problems)
    schedulers = _schedulers(values.pop("schedulers", None), problems)
    values = _with_implied(values)
    typed: list[Problem] = []
    sections = check_section(RunSections, values, "", typed)
    problems += typed
    failed = list(_import_problems(values.get("imports"), config.path.parent, imports=imports))
    problems += _part_problems(values, hooks, schedulers, imports=imports)
    problems += _need_problems(values)
    if sections is None:
        sections = _readable(values, typed)
    if sections is not None:
        sections = replace(
            sections,
            hooks=hooks,
            schedulers=list(schedulers.values()),
            run_dir=sections.run_dir or f"runs/{sections.name}",
        )
    faulty = frozenset(problem.key.partition(".")[0] for problem in [*failed, *problems])
    if sections is not None and not faulty & {"metrics", "hooks", "schedulers"}:
        problems += _metric_problems(sections)
    # What cannot be imported comes first: names may be missing for that reason alone.
    located = [*_located(failed, config), *_located(problems, config)]
    return Examination(sections, located, faulty)


def _readable(values: Mapping[str, Any], problems: list[Problem]) -> RunSections | None:
    """Return the sections without those that have a problem."""
    wrong = {problem.key.partition(".")[0] for problem in problems}
    kept = {key: value for key, value in values.items() if key not in wrong}
    return check_section(RunSections, {"model": {}, **kept}, "", [])


def _with_implied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with the types that go without saying, and without null sections."""
    full = {key: value for key, value in values.items() if value is not None}
    data = full.get("data")
    for key, kind in _IMPLIED_TYPES.items():
        wanted = isinstance(data, dict) and data.get(key) is not None
        given = full.get(key, {} if wanted else None)
        if isinstance(given, dict):
            full[key] = with_type(given, kind)
    optim_wrapper = full.get("optim_wrapper", {})
    if isinstance(optim_wrapper, dict):
        full["optim_wrapper"] = with_wrapper_type(optim_wrapper, full.get("optimizer"))
    return full


def _hooks(given: Any, problems: list[Problem]) -> dict[str, Component]:
    if given is not None and not isinstance(given, dict):
        problems.append(Problem("hooks", f"must be hooks by name, got {shown_value(given)}"))
        return {}
    wanted: dict[str, Any] = {**dict.fromkeys(DEFAULT_HOOKS, True), **(given or {})}
    hooks: dict[str, Component] = {}
    for name, settings in wanted.items():
        if settings is False:
            continue
        own = {} if settings is True or settings is None else settings
        if not isinstance(own, dict):
            what = f"must be true, false or the hook's settings, got {shown_value(settings)}"
            problems.append(Problem(f"hooks.{name}", what))
        elif (misspelt := type_problem(own, f"hooks.{name}")) is not None:
            problems.append(misspelt)
        elif "type" not in own and name not in HOOK_TYPES:
            hint = did_you_mean(name, HOOK_TYPES)
            what = f"needs a type, only {', '.join(HOOK_TYPES)} go without{hint}"
            problems.append(Problem(f"hooks.{name}", what))
        else:
            hooks[name] = {"type": HOOK_TYPES.get(name), **own}
    return hooks


def _schedulers(given: Any, problems: list[Problem]) -> dict[str, SchedulerSection]:
    """Return the schedulers by their key paths."""
    if given is None:
        return {}
    entries = {"schedulers": given}
    if isinstance(given, list):
        entries = {f"schedulers.{at}": entry for at, entry in enumerate(given)}
    found: dict[str, SchedulerSection] = {}
    for where, entry in entries.items():
        if not isinstance(entry, dict):
            problems.append(Problem(where, f"must be a dict with a type, got {shown_value(entry)}"))
            continue
        scheduler = {k: value for k, value in entry.items() if k not in _SCHEDULER_KEYS}
        ours = {key: entry[key] for key in _SCHEDULER_KEYS if key in entry}
        section = check_section(SchedulerSection, {"scheduler": scheduler, **ours}, where, problems)
        chosen = entry.get("optimizer")
        found[where] = section or SchedulerSection(scheduler=scheduler, optimizer=chosen)
    return found


def _import_problems(entries: Any, folder: Path, *, imports: bool) -> Iterator[Problem]:
    make_importable(folder)
    make_importable(Path.cwd())
    for at, entry in enumerate(entries if isinstance(entries, list) else []):
        if isinstance(entry, str):
            try:
                import_entry(entry) if imports else find_entry(entry)
            except ImportError as error:
                yield Problem(f"imports.{at}", str(error), cause=error)


def _part_problems(
    values: Mapping[str, Any],
    hooks: Mapping[str, Component],
    schedulers: Mapping[str, SchedulerSection],
    *,
    imports: bool,
) -> Iterator[Problem]:
    check = partial(check_component, imports=imports)
    for key, (registry, runtime_args) in _PARTS.items():
        if isinstance(values.get(key), dict):
            yield from check(values[key], registry, key, runtime_args)
    yield from optimization_problems(values, schedulers, imports=imports)
    for name, hook in hooks.items():
        yield from check(hook, HOOKS, f"hooks.{name}")
    yield from _train_step_problems(values.get("train_step"), imports=imports)
    metrics = values.get("metrics")
    for name, metric in metrics.items() if isinstance(metrics, dict) else ():
        yield from check(metric, METRICS, f"metrics.{name}")
    data = values.get("data")
    for name in _LOADERS:
        loader = data.get(name) if isinstance(data, dict) else None
        if isinstance(loader, dict) and "type" in loader:
            yield from check(loader, DATALOADERS, f"data.{name}")
        elif isinstance(loader, dict):
            yield from _loader_problems(loader, f"data.{name}", imports=imports)


def _train_step_problems(setting: Any, *, imports: bool) -> Iterator[Problem]:
    misspelt = type_problem(setting, "train_step") if isinstance(setting, dict) else None
    if misspelt is not None:
        yield misspelt
    elif imports and isinstance(setting, str | dict):
        try:
            find_train_step(setting)
        except (ImportError, TypeError) as error:
            yield Problem("train_step", str(error), cause=error)


def _loader_problems(loader: Mapping[str, Any], where: str, *, imports: bool) -> Iterator[Problem]:
    if isinstance(loader.get("dataset"), dict):
        yield from check_component(loader["dataset"], DATASETS, f"{where}.dataset", imports=imports)
    if imports and isinstance(loader.get("collate"), str):
        try:
            import_path(loader["collate"])
        except ImportError as error:
            yield Problem(f"{where}.collate", str(error), cause=error)


def _need_problems(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what one section needs of another."""
    data = values.get("data")
    has_data = {name for name in _LOADERS if isinstance(data, dict) and data.get(name) is not None}
    loops = [name for name in _LOADERS if name in values]
    for name in loops:
        if name not in has_data:
            yield Problem(f"data.{name}", f"this setting is missing: {name} needs data")
    if "train" in values and "optimizer" not in values:
        yield Problem("optimizer", "this setting is missing: train needs an optimizer")
    if not loops:
        yield Problem("", "nothing to run: set train, or data for val or test")


def _metric_problems(run: RunSections) -> Iterator[Problem]:
    """Yield the metrics that hooks and schedulers watch and the run does not have."""
    watched = {
        f"hooks.{name}.{key}": settings.get(key)
        for name, settings in run.hooks.items()
        for key in _WATCHING
    }
    several = len(run.schedulers) > 1
    for at, one in enumerate(run.schedulers):
        where = f"schedulers.{at}" if several else "schedulers"
        watched[f"{where}.metric"] = one.metric
        if one.metric is None and one.scheduler["type"] == "ReduceLROnPlateau":
            yield Problem(f"{where}.metric", "is missing: ReduceLROnPlateau watches a metric")
    if len({one.metric for one in run.schedulers} - {None}) > 1:
        yield Problem("schedulers", "all that watch a metric must watch the same one")
    for where, metric in watched.items():
        # A metric with several results is "name/part" in the records.
        if isinstance(metric, str) and metric.split("/")[0] not in run.metrics:
            known = ", ".join(run.metrics) or "none"
            what = f"there is no metric {metric!r}{did_you_mean(metric, run.metrics)}"
            yield Problem(where, f"{what}; the run's metrics are: {known}")


def _located(problems: list[Problem], config: Config) -> list[Problem]:
    """Return the problems with their origins, in the order of the files."""
    located = [
        replace(
            problem,
            origin=config.origin(problem.key),
            # What else the type takes is not the question then.
            what=f"{problem.what.partition('; it also takes ')[0]}{hint}" if hint else problem.what,
        )
        for problem in problems
        for hint in [_inheritance_hint(problem, config)]
    ]
    return sorted(dict.fromkeys(located), key=_place)


def _inheritance_hint(problem: Problem, config: Config) -> str:
    """Return the advice for an argument that a `_base_` left to a type set upon it."""
    section, _, name = problem.key.rpartition(".")
    kind = f"{section}.type"
    if name == "type" or not (config.has(problem.key) and config.has(kind)):
        return ""
    by = config.origin(kind)
    argument_file, _ = _place(replace(problem, origin=config.origin(problem.key)))
    type_file, _ = _place(replace(problem, origin=by))
    if argument_file == type_file or argument_file.startswith("override "):
        return ""
    if type_file == shown(config.path):
        return f"; it is inherited, `_delete_: true` beside the type ({by}) drops it"
    if type_file.startswith("override "):
        whole = f"'{section}={{type: {config.select(kind)}}}'"
        return f"; it is inherited, {whole} replaces the whole section and drops it"
    return ""


def _place(problem: Problem) -> tuple[str, int]:
    match = re.fullmatch(r"(.*):(\d+)", problem.origin)
    return (match[1], int(match[2])) if match else (problem.origin, 0)
