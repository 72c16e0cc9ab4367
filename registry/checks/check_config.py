"""Check a whole run config, before any process starts."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ...primitives.suggestions import did_you_mean, meant_by
from ..catalog import ADAPTERS, HOOKS, LOOPS, METRICS, MODEL_WRAPPERS, MODELS
from ..errors import ConfigError, Problem, shortened, shown, shown_value
from ..imports import (
    find_entry,
    find_folders,
    import_entry,
    make_found_in,
    make_importable,
)
from ..registry import Registry
from ..text.config import Config, config_from_dict
from ..text.values import walk
from ..tree import find_train_step, find_transform
from .check_component import (
    Later,
    add_type,
    check_component,
    component_check,
    object_problems,
    type_problem,
)
from .data_sections import (
    LOADERS,
    add_sets,
    data_checks,
    explain_loader_options,
    remove_sets,
    sets_in,
)
from .optimizer_sections import add_wrapper_type, missing_setting, optimization_checks
from .schema import (
    DEFAULT_HOOKS,
    HOOK_TYPES,
    METRIC_KEYS,
    SCHEDULER_KEYS,
    Component,
    FreezeSection,
    LedgerSection,
    MetricSection,
    RunSections,
    SchedulerSection,
)
from .typed import check_section

_LOOP_ARGS = ("dataloader", "metrics")
# The registry of each section, and the arguments that the run supplies.
_PARTS: dict[str, tuple[Registry, tuple[str, ...]]] = {
    "model": (MODELS, ()),
    "wrapper": (MODEL_WRAPPERS, ("module",)),
    "train": (LOOPS, ("dataloader", "val_loop")),
    "val": (LOOPS, _LOOP_ARGS),
    "test": (LOOPS, _LOOP_ARGS),
}
_IMPLIED_TYPES = {"val": "ValLoop", "test": "TestLoop"}
_ADAPTER = "LoraConfig"
_WATCHING = ("metric", "keep_best")
# Keys whose values may be import paths.
_PATH_KEYS = ("type", "_ref_", "collate", "train_step", "transform")
_NOT_THERE = re.compile("there is no such setting|has no such argument")
_SECTIONS = tuple(field.name for field in fields(RunSections))


class Examination(NamedTuple):
    """The result of a check.

    Attributes:
        sections: the valid sections, with defaults for the others; None if too few are valid.
        problems: all problems, with their origins.
        faulty: the names of the sections that have problems.
        config: the checked config.
        later: the remaining checks, which need classes.
    """

    sections: RunSections | None
    problems: list[Problem]
    faulty: frozenset[str]
    config: Config
    later: list[Later]


def name_problems(cfg: Mapping[str, Any]) -> list[Problem]:
    """Return the problems of a run config that can be found without any class.

    These are problems of keys, of the sections' values, and of names that refer to other parts of
    the config. Neither torch nor the modules in ``imports`` are imported, so this is fast.
    """
    return examine_names(cfg).problems


def check_config(cfg: Mapping[str, Any]) -> RunSections:
    """Return the typed sections of a run config after checking that every part can be built.

    Imports the modules in ``imports`` and the parts' modules; builds nothing.

    Raises:
        ConfigError: the config has problems; each has its file and line.
    """
    examination = examine_config(cfg)
    if examination.sections is None or examination.problems:
        raise ConfigError(examination.problems)
    return examination.sections


def examine_config(cfg: Mapping[str, Any] | Examination) -> Examination:
    """Check like ``check_config``, but return the problems and the valid sections.

    Args:
        cfg: the settings, or the result of ``examine_names``, whose checks are not repeated.
    """
    names = cfg if isinstance(cfg, Examination) else examine_names(cfg)
    failed = import_problems(names.config)
    keys = {problem.key for problem in names.problems}
    later_problems = [
        problem for check in names.later for problem in check() if problem.key not in keys
    ]
    faulty = names.faulty | {_get_section(problem) for problem in [*failed, *later_problems]}
    # Failed imports come first: they may be the only reason for unknown names.
    named_problems = [
        problem for problem in names.problems if not problem.key.startswith("imports.")
    ]
    problems = [
        *failed,
        *sorted([*named_problems, *_located(later_problems, names.config)], key=_split_origin),
    ]
    return Examination(names.sections, problems, faulty, names.config, [])


def examine_names(cfg: Mapping[str, Any]) -> Examination:
    """Check like ``name_problems``, and return a result that ``examine_config`` can complete."""
    config = cfg if isinstance(cfg, Config) else config_from_dict(cfg)
    values = config.to_dict()
    failed = list(_import_problems(config, find_entry))
    problems: list[Problem] = []
    hooks = _hooks(values.pop("hooks", None), problems)
    schedulers = _schedulers(values.pop("schedulers", None), problems)
    metrics = _metrics(values.pop("metrics", None), problems)
    values = _add_implied(values)
    typed: list[Problem] = []
    single, sets = remove_sets(values, typed)
    sections = check_section(RunSections, single, "", typed)
    problems += explain_loader_options(typed)
    later: list[Later] = []
    for check in _checks(values, hooks, schedulers, metrics):
        problems.append(check) if isinstance(check, Problem) else later.append(check)
    problems += _need_problems(values)
    if sections is None:
        wrong = {_get_section(problem) for problem in typed}
        sound = {key: value for key, value in single.items() if key not in wrong}
        sections = check_section(RunSections, {"model": {}, **sound}, "", [])
    if sections is not None:
        if sections.ledger and "ledger" in hooks:
            message = "cannot be combined with hooks.ledger; set only one of them"
            problems.append(Problem("ledger", message))
        sections = replace(
            sections,
            hooks={**hooks, **_ledger_hook(sections.ledger)},
            schedulers=list(schedulers.values()),
            metrics=metrics,
            data=add_sets(sections.data, sets),
            run_dir=sections.run_dir or f"runs/{sections.name}",
        )
    faulty = frozenset(map(_get_section, [*failed, *problems]))
    related = {"metrics", "hooks", "schedulers"} | ({"data"} if sets_in(values) else set())
    if sections is not None and not faulty & related:
        problems += _metric_problems(sections)
    located = [*_located(failed, config), *_located(problems, config)]
    return Examination(sections, located, faulty, config, later)


def import_problems(config: Config) -> list[Problem]:
    """Import the modules in ``imports``; return the problems of those that fail."""
    return _located(list(_import_problems(config, import_entry)), config)


def source_folders(config: Config) -> list[str]:
    """Return the folders of the user's modules that a config names, for its ``import_from``."""
    return find_folders(_modules_named(config))


def model_problems(config: Config) -> list[Problem]:
    """Import the modules in ``imports``; return the problems of the model.

    Failed imports are only reported if the model has problems.
    """
    failed = import_problems(config)
    problems = check_component(config.to_dict().get("model"), MODELS, "model")
    return [*failed, *_located(problems, config)] if problems else []


def _get_section(problem: Problem) -> str:
    return problem.key.partition(".")[0]


def _add_implied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with default types, and without null sections."""
    full = {key: value for key, value in values.items() if value is not None}
    data = full.get("data")
    for key, kind in _IMPLIED_TYPES.items():
        has_data = isinstance(data, dict) and data.get(key) is not None
        section = full.get(key, {} if has_data else None)
        if isinstance(section, dict):
            full[key] = add_type(section, kind)
    if isinstance(full.get("adapter"), dict):
        full["adapter"] = add_type(full["adapter"], _ADAPTER)
    optim_wrapper = full.get("optim_wrapper", {})
    if isinstance(optim_wrapper, dict):
        full["optim_wrapper"] = add_wrapper_type(optim_wrapper, full.get("optimizer"))
    return full


def _hooks(given: Any, problems: list[Problem]) -> dict[str, Component]:
    if given is False:
        return {}
    if given is not None and not isinstance(given, dict):
        message = (
            "must be hooks by name, or false for none, got "
            f"{shown_value(given)}{_form_by_name(given, HOOK_TYPES)}"
        )
        problems.append(Problem("hooks", message))
        return {}
    settings_by_name: dict[str, Any] = {**dict.fromkeys(DEFAULT_HOOKS, True), **(given or {})}
    hooks: dict[str, Component] = {}
    for name, settings in settings_by_name.items():
        if settings is False:
            continue
        options = {} if settings is True or settings is None else settings
        if not isinstance(options, dict):
            message = f"must be true, false or the hook's settings, got {shown_value(settings)}"
            problems.append(Problem(f"hooks.{name}", message))
        elif (misspelt := type_problem(options, f"hooks.{name}")) is not None:
            problems.append(misspelt)
        elif "type" not in options and name not in HOOK_TYPES:
            hint = did_you_mean(name, HOOK_TYPES)
            message = f"needs a type; only {', '.join(HOOK_TYPES)} have a default{hint}"
            problems.append(Problem(f"hooks.{name}", message))
        else:
            hooks[name] = {"type": HOOK_TYPES.get(name), **options}
    return hooks


def _form_by_name(listed: Any, types: Mapping[str, str]) -> str:
    """Return "; write {...}" with the entries of a list by name, "" for other values.

    Args:
        types: the types of names that need none.
    """
    named: dict[str, Any] = {}
    for entry in listed if isinstance(listed, list) else ():
        component = {"type": entry} if isinstance(entry, str) else entry
        if not isinstance(component, dict):
            return ""
        kind = component.get("type")
        if not isinstance(kind, str):
            named |= component
            continue
        name = next((name for name, usual in types.items() if kind in (name, usual)), "")
        options = {key: value for key, value in component.items() if key != "type" or not name}
        named[name or kind.rpartition(".")[2].lower()] = options or True
    if not named:
        return ""
    text = yaml.safe_dump(named, default_flow_style=True, sort_keys=False, width=math.inf)
    return f"; write {shortened(text.strip(), 120)}"


def _ledger_hook(section: LedgerSection | bool) -> dict[str, Component]:
    if not section:
        return {}
    settings = asdict(LedgerSection() if section is True else section)
    return {"ledger": {"type": HOOK_TYPES["ledger"], **settings}}


def _schedulers(schedulers_setting: Any, problems: list[Problem]) -> dict[str, SchedulerSection]:
    """Return the schedulers by their key paths."""
    if schedulers_setting is None:
        return {}
    entries = {"schedulers": schedulers_setting}
    if isinstance(schedulers_setting, list):
        entries = {f"schedulers.{at}": entry for at, entry in enumerate(schedulers_setting)}
    sections: dict[str, SchedulerSection] = {}
    for where, entry in entries.items():
        if not isinstance(entry, dict):
            problems.append(Problem(where, f"must be a dict with a type, got {shown_value(entry)}"))
            continue
        scheduler = {k: value for k, value in entry.items() if k not in SCHEDULER_KEYS}
        ours = {key: entry[key] for key in SCHEDULER_KEYS if key in entry}
        section = check_section(SchedulerSection, {"scheduler": scheduler, **ours}, where, problems)
        chosen = entry.get("optimizer")
        sections[where] = section or SchedulerSection(scheduler=scheduler, optimizer=chosen)
    return sections


def _metrics(given: Any, problems: list[Problem]) -> dict[str, MetricSection]:
    if given is not None and not isinstance(given, dict):
        message = f"must be metrics by name, got {shown_value(given)}{_form_by_name(given, {})}"
        problems.append(Problem("metrics", message))
    sections: dict[str, MetricSection] = {}
    for name, entry in given.items() if isinstance(given, dict) else ():
        where = f"metrics.{name}"
        ours, metric = {}, entry
        if isinstance(entry, dict):
            ours = {key: entry[key] for key in METRIC_KEYS if key in entry}
            metric = {key: value for key, value in entry.items() if key not in METRIC_KEYS}
        section = None
        if isinstance(metric, dict):
            section = check_section(MetricSection, {"metric": metric, **ours}, where, problems)
        sections[name] = section or MetricSection(metric=metric)
    return sections


def _import_problems(config: Config, use: Callable[[str], None]) -> Iterator[Problem]:
    """Apply ``use`` (find or import) to each entry of ``imports``; yield errors as problems."""
    make_importable(config.path.parent)
    make_importable(Path.cwd())
    folders = config.select("import_from")
    for folder in folders if isinstance(folders, list) else []:
        make_found_in(Path(str(folder)), _modules_named(config))
    entries = config.select("imports")
    for at, entry in enumerate(entries if isinstance(entries, list) else []):
        if isinstance(entry, str):
            try:
                use(entry)
            except ImportError as error:
                yield Problem(f"imports.{at}", str(error), cause=error)


def _modules_named(config: Config) -> list[str]:
    """Return the modules in ``imports`` and the import paths in a config."""
    return [
        text
        for path, text in walk(config.to_dict())
        if isinstance(text, str)
        and all(name.isidentifier() for name in text.split("."))
        and (path[0] == "imports" or (path[-1] in _PATH_KEYS and "." in text))
    ]


def _checks(
    values: Mapping[str, Any],
    hooks: Mapping[str, Component],
    schedulers: Mapping[str, SchedulerSection],
    metrics: Mapping[str, MetricSection],
) -> Iterator[Problem | Later]:
    """Yield problems that can be found without classes, and the checks that need classes."""
    for key, (registry, runtime_args) in _PARTS.items():
        if isinstance(values.get(key), dict):
            yield component_check(values[key], registry, key, runtime_args)
    yield from optimization_checks(values, schedulers)
    if "adapter" in values and find_spec("peft") is None:
        yield Problem("adapter", "adapters need peft: pip install 'stepwrap[peft]'")
    elif "adapter" in values:
        yield component_check(values["adapter"], ADAPTERS, "adapter")
    freeze = values.get("freeze")
    for name, options in freeze.items() if isinstance(freeze, dict) else ():
        problems: list[Problem] = []
        check_section(FreezeSection, {} if options is None else options, f"freeze.{name}", problems)
        yield from problems
    for name, hook in hooks.items():
        yield component_check(hook, HOOKS, f"hooks.{name}")
    step = values.get("train_step")
    if isinstance(step, str | dict):
        misspelt = type_problem(step, "train_step") if isinstance(step, dict) else None
        yield misspelt or partial(object_problems, find_train_step, step, "train_step")
    for name, section in metrics.items():
        yield component_check(section.metric, METRICS, f"metrics.{name}")
        if section.transform is not None:
            where = f"metrics.{name}.transform"
            yield partial(object_problems, find_transform, section.transform, where)
    yield from data_checks(values)


def _need_problems(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield missing sections that others need, unless a misspelt key may be meant for them."""
    data = values.get("data")
    data_values = data if isinstance(data, dict) else {}
    meant = meant_by([key for key in values if key not in _SECTIONS], _SECTIONS)
    meant |= {
        f"data.{name}" for name in meant_by([k for k in data_values if k not in LOADERS], LOADERS)
    }
    loops = [name for name in LOADERS if name in values]
    for name in loops:
        if data_values.get(name) is None and not meant & {"data", f"data.{name}"}:
            yield Problem(f"data.{name}", f"this setting is missing: {name} needs data")
    if "train" in values and "optimizer" not in values and "optimizer" not in meant:
        yield Problem("optimizer", "this setting is missing: train needs an optimizer")
    if not loops and not meant & {"train", "data", "data.val", "data.test"}:
        yield Problem("", "nothing to run: set train, or data for val or test")


def _metric_problems(run: RunSections) -> Iterator[Problem]:
    """Yield problems with metrics that hooks and schedulers name, and sets that metrics name."""
    watched = {
        f"hooks.{name}.{key}": settings.get(key)
        for name, settings in run.hooks.items()
        for key in _WATCHING
    }
    several = len(run.schedulers) > 1
    for at, section in enumerate(run.schedulers):
        where = f"schedulers.{at}" if several else "schedulers"
        watched[f"{where}.metric"] = section.metric
        if section.metric is None and section.scheduler["type"] == "ReduceLROnPlateau":
            message = "is missing: ReduceLROnPlateau watches a metric"
            yield missing_setting(section, where, "metric", message)
    if len({section.metric for section in run.schedulers} - {None}) > 1:
        yield Problem("schedulers", "all that watch a metric must watch the same one")
    results = _validation_results(run)
    for where, metric in watched.items():
        if not isinstance(metric, str | None):
            message = f"must be the name of one metric, got {shown_value(metric)}"
            if isinstance(metric, list):
                message += "; choose one of them, or add a metric that combines them"
            yield Problem(where, message)
        # A metric with several results is "name/part" in the records.
        starts = [f"{result}/" for result in results]
        if isinstance(metric, str) and not f"{metric}/".startswith(tuple(starts)):
            message = f"there is no metric {shown_value(metric)}{did_you_mean(metric, results)}"
            remedy = f"the run's metrics are: {', '.join(results)}"
            if not results:
                remedy = "the run has none; add some, such as metrics: {loss: {type: MeanLoss}}"
            yield Problem(where, f"{message}; {remedy}")
    yield from _set_problems(run)


def _validation_results(run: RunSections) -> list[str]:
    """Return the names of the validation's metrics, such as "accuracy" or "noisy/accuracy"."""
    sets = [*run.data.get_sets("val")] or [""]
    return [
        f"{set_name}/{name}".removeprefix("/")
        for set_name in sets
        for name, metric in run.metrics.items()
        if metric.sets is None or set_name in metric.sets
    ]


def _set_problems(run: RunSections) -> Iterator[Problem]:
    """Yield sets that a metric names and that do not exist."""
    paths = {**run.data.get_sets("val"), **run.data.get_sets("test")}
    names = [name for name in paths if name]
    for metric, section in run.metrics.items():
        for at, name in enumerate(section.sets or ()):
            if name not in names:
                message = f"no set is named {shown_value(name)}{did_you_mean(name, names)}"
                set_names = ", ".join(names) or "none, data.val and data.test are single sets"
                yield Problem(
                    f"metrics.{metric}.sets.{at}", f"{message}; the sets are: {set_names}"
                )


def _located(problems: list[Problem], config: Config) -> list[Problem]:
    """Return the problems with their origins, in the order of the files."""
    located = []
    for problem in problems:
        what, hint = problem.what, _inheritance_hint(problem, config)
        if hint:
            # The hint replaces the list of the other arguments.
            what = what.partition("; it also takes ")[0] + hint
        elif _NOT_THERE.search(what):
            from .other_trainers import hint_elsewhere

            hint = hint_elsewhere(problem.key, is_similar="did you mean" in what)
            what = what.partition(";")[0] + hint if hint else what
        located.append(replace(problem, origin=config.origin(problem.key), what=what))
    return sorted(dict.fromkeys(located), key=_split_origin)


def _inheritance_hint(problem: Problem, config: Config) -> str:
    """Return advice if an argument comes from a ``_base_`` and its type was replaced."""
    section, _, name = problem.key.rpartition(".")
    kind = f"{section}.type"
    if name == "type" or not (config.has(problem.key) and config.has(kind)):
        return ""
    by = config.origin(kind)
    argument_file, _ = _split_origin(replace(problem, origin=config.origin(problem.key)))
    type_file, _ = _split_origin(replace(problem, origin=by))
    if argument_file == type_file or argument_file.startswith("override "):
        return ""
    if type_file == shown(config.path):
        return f"; it is inherited, `_delete_: true` next to the type ({by}) removes it"
    if type_file.startswith("override "):
        override = f"'{section}={{type: {config.select(kind)}}}'"
        return f"; it is inherited, {override} replaces the whole section and removes it"
    return ""


def _split_origin(problem: Problem) -> tuple[str, int]:
    match = re.fullmatch(r"(.*):(\d+)", problem.origin)
    return (match[1], int(match[2])) if match else (problem.origin, 0)
