"""Check the section ``data``: its loaders, and several sets by name."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from typing import Any

from ...primitives.suggestions import nearest
from ..arguments import get_parameters, title
from ..catalog import DATALOADERS, DATASETS, SAMPLERS
from ..errors import Problem, shown_value
from ..imports import import_path
from ..registry import find_component
from .check_component import Later, component_check, object_problems
from .schema import PER_RANK, DataSection, LoaderSection, SetsSection
from .typed import check_section

LOADERS = ("train", "val", "test")
# The arguments that a run supplies to samplers.
_SUPPLIED = ("dataset", "data_source", "seed", "shuffle", "rank", "num_replicas", "world_size")
_SETTINGS = tuple(field.name for field in fields(LoaderSection))
_REQUIRED = ("dataset", "batch_size")
_OWN_LOADER = (
    "write a function that returns a DataLoader with it, and name it as a custom loader: "
    "{type: my_module.make_loader}; several processes divide its batches (docs/data.md)"
)
# Arguments of torch's DataLoader that a section lacks, with the setting to use instead.
_TORCH_ONLY = {
    "batch_sampler": f"set batch_size, shuffle and seed, or {_OWN_LOADER}",
    "collate_fn": "set collate",
    "generator": "set seed",
    **dict.fromkeys(("worker_init_fn", "multiprocessing_context", "timeout"), _OWN_LOADER),
}


def sets_in(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sections of ``data`` that hold several sets by name."""
    data = values.get("data")
    return {
        name: data[name]
        for name in LOADERS
        if isinstance(data, dict)
        and isinstance(data.get(name), dict)
        and _has_sets(name, data[name])
    }


def _has_sets(name: str, section: Mapping[str, Any]) -> bool:
    if isinstance(section.get("type"), str):
        return False
    if name == "train" and "dataset" in section:
        # Only one set is possible, and this is one: any other entry is a mistake in it.
        return False
    return any(_is_loader(key, value) for key, value in section.items())


def _is_loader(key: Any, value: Any) -> bool:
    """Return whether an entry of a section is a set named ``key``, and not a loader's setting."""
    if not isinstance(value, dict) or key in _TORCH_ONLY:
        return False
    if "type" in value:
        # A dict with a type is a set with a custom loader, or `dataset` with a misspelt key.
        return key not in _SETTINGS and not nearest(str(key), _REQUIRED, 1)
    return any(name in value for name in _REQUIRED)


def remove_sets(
    values: Mapping[str, Any], problems: list[Problem]
) -> tuple[dict[str, Any], dict[str, SetsSection]]:
    """Separate the ``data`` sections with several sets from the other settings, and check them.

    Problems are appended to ``problems``. Returns the other settings, and those sections with
    several sets that have no problems.
    """
    sets_by_loader = sets_in(values)
    single = dict(values)
    if sets_by_loader:
        single["data"] = {
            key: loader for key, loader in values["data"].items() if key not in sets_by_loader
        }
    checked = {}
    for name, section in sets_by_loader.items():
        before = len(problems)
        named = list(_name_problems(name, section))
        problems += named
        faulty = {problem.key for problem in named}
        sets = {
            set_name: _loader(loader, f"data.{name}.{set_name}", problems)
            for set_name, loader in section.items()
            if f"data.{name}.{set_name}" not in faulty
        }
        if len(problems) == before:
            checked[name] = SetsSection(sets=sets)
    return single, checked


def explain_loader_options(problems: list[Problem]) -> list[Problem]:
    """Name the settings that replace arguments of torch's DataLoader."""
    return [
        replace(problem, what=f"there is no such setting; {_TORCH_ONLY[name]}")
        if problem.key.startswith("data.")
        and (name := problem.key.rpartition(".")[2]) in _TORCH_ONLY
        and problem.what.startswith("there is no such setting")
        else problem
        for problem in problems
    ]


def add_sets(data: DataSection, sets: Mapping[str, SetsSection]) -> DataSection:
    """Return ``data`` with the sections of several sets."""
    val_section, test = sets.get("val", data.val), sets.get("test", data.test)
    return DataSection(train=data.train, val=val_section, test=test)


def _loader(value: Any, where: str, problems: list[Problem]) -> Any:
    if isinstance(value, dict) and "type" in value:
        return value
    return check_section(LoaderSection, value, where, problems, ("type",))


def _name_problems(name: str, section: Mapping[str, Any]) -> Iterator[Problem]:
    where = f"data.{name}"
    names = [str(key) for key, value in section.items() if _is_loader(key, value)]
    if name == "train":
        message = f"must be a single set, got several by name ({', '.join(names)})"
        yield Problem(where, f"{message}; only data.val and data.test can have several")
        return
    for key, value in section.items():
        path = f"{where}.{key}"
        if key in (*_SETTINGS, "type"):
            other_names = (
                ", ".join(set_name for set_name in names if set_name != key) or "sets by name"
            )
            remedy = "choose another name for the set"
            if not _is_loader(key, value):
                remedy = f"write it into each set, or add `_delete_: true` to {where} if inherited"
            message = (
                f"is a setting of a single set, but {where} has several ({other_names}); {remedy}"
            )
            yield Problem(path, message)
        elif not isinstance(key, str) or "." in key or "/" in key or key == "lr":
            message = "the name of a set must be text without '.' and '/', and not 'lr'"
            yield Problem(path, f"{message}, got {shown_value(key)}")


def data_checks(values: Mapping[str, Any]) -> Iterator[Problem | Later]:
    """Yield problems that can be found without classes, and the checks that need classes."""
    data = values.get("data")
    several = sets_in(values)
    if not isinstance(data, dict):
        return
    for name in LOADERS:
        if name in several:
            for set_name, loader in several[name].items():
                yield from _loader_checks(loader, f"data.{name}.{set_name}")
        else:
            yield from _loader_checks(data.get(name), f"data.{name}")


def _loader_checks(loader: Any, where: str) -> Iterator[Problem | Later]:
    if isinstance(loader, dict) and "type" in loader:
        arguments = {key: value for key, value in loader.items() if key != PER_RANK}
        yield component_check(arguments, DATALOADERS, where)
        if not isinstance(loader.get(PER_RANK, False), bool):
            text = f"must be true or false, got {shown_value(loader[PER_RANK])}"
            yield Problem(f"{where}.{PER_RANK}", text)
    elif isinstance(loader, dict):
        if isinstance(loader.get("dataset"), dict):
            yield component_check(loader["dataset"], DATASETS, f"{where}.dataset")
        if isinstance(loader.get("sampler"), dict):
            yield partial(_sampler_problems, loader, where)
        collate = loader.get("collate")
        if isinstance(collate, dict):
            yield component_check(collate, DATASETS, f"{where}.collate")
        elif isinstance(collate, str):
            yield partial(object_problems, _collate_function, collate, f"{where}.collate")


def taken_by_sampler(sampler: Mapping[str, Any]) -> list[str]:
    """Return the arguments that a run supplies to a sampler: those that it takes and lacks."""
    try:
        parameters = get_parameters(find_component(sampler, SAMPLERS))
    except (KeyError, TypeError):
        # The check of the section reports it.
        return []
    return [name for name in _SUPPLIED if name in parameters and name not in sampler]


def _sampler_problems(loader: Mapping[str, Any], where: str) -> Iterator[Problem]:
    sampler = loader["sampler"]
    supplied = taken_by_sampler(sampler)
    check = component_check(sampler, SAMPLERS, f"{where}.sampler", supplied)
    problems = [check] if isinstance(check, Problem) else list(check())
    yield from problems
    if problems:
        return
    if loader.get("shuffle") is True and not {"shuffle"} & {*supplied, *sampler}:
        name = title(find_component(sampler, SAMPLERS))
        yield Problem(f"{where}.shuffle", f"must be false: {name} determines the order")
    with suppress(KeyError, TypeError):
        kind = find_component(loader["dataset"], DATASETS)
        if "IterableDataset" in [base.__name__ for base in getattr(kind, "__mro__", ())]:
            text = f"{title(kind)} is read in its own order, because it is iterable"
            yield Problem(f"{where}.sampler", f"{text}; remove the sampler, or use a map-style one")


def _collate_function(path: str) -> None:
    if isinstance(import_path(path), type):
        raise TypeError(f"{path} is a class; write {{type: {path}}} to use an instance")
