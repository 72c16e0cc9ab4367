"""Would these dicts build? Checked by name, nothing is built."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from .arguments import argument_problems, plain_names
from .build import find_type
from .errors import Problem, shown_value
from .registry import Registry
from .tree import find_nested, find_reference, nested_runtime
from .values import value_problems

_FLAGS = ("type", "_scope_")


def check_component(
    cfg: Any, registry: Registry, where: str, runtime_args: Collection[str] = ()
) -> list[Problem]:
    """Return what would keep `build_tree` from building `cfg`, nested parts included.

    Args:
        cfg: the dict with a `type`.
        registry: where the type is looked up.
        where: the key path of `cfg`, for the problems.
        runtime_args: names of arguments that the caller will supply, as an optimizer's `params`.
    """
    shape = _shape_problem(cfg, registry, where)
    if shape is not None:
        return [shape]
    try:
        table = registry.at_scope(cfg["_scope_"]) if "_scope_" in cfg else registry
        target = find_type(cfg["type"], table)
    except (KeyError, TypeError) as error:
        return [Problem(f"{where}.type", str(error))]
    taken = [
        Problem(f"{where}.{name}", "is supplied by the run itself and cannot be set")
        for name in cfg
        if name in runtime_args
    ]
    return taken + list(_call_problems(target, cfg, table, where, runtime_args))


def _shape_problem(cfg: Any, registry: Registry, where: str) -> Problem | None:
    if not isinstance(cfg, Mapping):
        hint = f"; write {{type: {cfg}}}" if isinstance(cfg, str) else ""
        return Problem(where, f"must be a dict with a type, got {shown_value(cfg)}{hint}")
    if "type" not in cfg:
        what = f"needs a type: a name of {registry.name} or an import path"
        return Problem(where, what)
    return None


def _call_problems(
    target: Any,
    cfg: Mapping[str, Any],
    registry: Registry,
    where: str,
    runtime_args: Collection[str],
) -> Iterator[Problem]:
    given = [str(key) for key in cfg if key not in _FLAGS]
    for problem in argument_problems(target, given, runtime_args):
        yield Problem(f"{where}.{problem.name}", problem.what)
    for problem in value_problems(target, {key: cfg[key] for key in given}):
        yield Problem(f"{where}.{problem.name}", problem.what)
    for key, value in cfg.items():
        if key not in _FLAGS and key not in plain_names(target):
            yield from _value_problems(value, registry, f"{where}.{key}", runtime_args)


def _value_problems(
    value: Any, registry: Registry, where: str, runtime_args: Collection[str]
) -> Iterator[Problem]:
    if isinstance(value, list | tuple):
        for at, item in enumerate(value):
            yield from _value_problems(item, registry, f"{where}.{at}", runtime_args)
    elif not isinstance(value, Mapping) or value.get("_raw_") is True:
        return
    elif "type" not in value and set(value) != {"_ref_"}:
        for key, inner in value.items():
            yield from _value_problems(inner, registry, f"{where}.{key}", runtime_args)
    elif "type" in value:
        yield from _nested_problems(value, registry, where, runtime_args)
    else:
        try:
            find_reference(value["_ref_"], registry)
        except (KeyError, TypeError) as error:
            yield Problem(f"{where}._ref_", str(error))


def _nested_problems(
    cfg: Mapping[str, Any], registry: Registry, where: str, runtime_args: Collection[str]
) -> Iterator[Problem]:
    try:
        table = registry.at_scope(cfg["_scope_"]) if "_scope_" in cfg else registry
        target, same = find_nested(cfg["type"], table)
    except (KeyError, TypeError) as error:
        yield Problem(f"{where}.type", str(error))
        return
    supplied = nested_runtime(target, dict.fromkeys(runtime_args), same)
    yield from _call_problems(target, cfg, table, where, supplied)
