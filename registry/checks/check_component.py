"""Would these dicts build? Checked by name, nothing is built."""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

from ..arguments import argument_problems, plain_names
from ..errors import MOST_SHOWN, Problem, nearest, shown_value
from ..registry import Registry, find_type
from ..tree import find_nested, find_reference, look_up_nested, nested_runtime
from .typed import value_problems

# A check that needs classes, for when they may be imported.
Later: TypeAlias = Callable[[], Iterator[Problem]]

_FLAGS = ("type", "_scope_")
_MISSPELT = "there is no such setting; did you mean type?"


def check_component(
    cfg: Any, registry: Registry, where: str, runtime_args: Collection[str] = ()
) -> list[Problem]:
    """Return the problems that would prevent `build_tree` from building `cfg` and its nested parts.

    Args:
        cfg: the dict with a `type`.
        registry: where the type is looked up.
        where: the key path of `cfg`, for the problems.
        runtime_args: names of arguments that the caller will supply, as an optimizer's `params`.
    """
    found = component_check(cfg, registry, where, runtime_args)
    return [found] if isinstance(found, Problem) else list(found())


def component_check(
    cfg: Any, registry: Registry, where: str, runtime_args: Collection[str] = ()
) -> Problem | Later:
    """Return what is wrong with `cfg` whatever its class, else the check that needs the class."""
    if not isinstance(cfg, Mapping):
        hint = f"; write {{type: {cfg}}}" if isinstance(cfg, str) and len(cfg) < MOST_SHOWN else ""
        return Problem(where, f"must be a dict with a type, got {shown_value(cfg)}{hint}")
    if "type" not in cfg:
        what = f"needs a type: a name of {registry.name} or an import path"
        return type_problem(cfg, where) or Problem(where, what)
    return partial(_class_problems, cfg, registry, where, runtime_args)


def type_problem(cfg: Mapping[str, Any], where: str) -> Problem | None:
    """Return the problem that a key of `cfg`, which has no `type`, is a misspelt one."""
    near = misspelt_type(cfg)
    return None if near is None else Problem(f"{where}.{near}", _MISSPELT)


def misspelt_type(cfg: Mapping[str, Any]) -> str | None:
    """Return the key of `cfg` that is meant for `type`; None when it has one, or nothing near."""
    # Of what torch itself has as an argument, dtype is nearest.
    names = [
        k for k, v in cfg.items() if isinstance(k, str) and isinstance(v, str) and k != "dtype"
    ]
    near = nearest("type", names, limit=1)
    return near[0] if near and "type" not in cfg else None


def with_type(cfg: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return `cfg` with the type that goes without saying, unless one is misspelt there."""
    return {**cfg} if misspelt_type(cfg) is not None else {"type": kind, **cfg}


def object_problems(find: Callable[[Any], Any], setting: Any, where: str) -> Iterator[Problem]:
    """Yield what `find` has to say about a setting that names an object."""
    try:
        find(setting)
    except (ImportError, KeyError, TypeError) as error:
        yield Problem(where, str(error), cause=error)


def _class_problems(
    cfg: Mapping[str, Any],
    registry: Registry,
    where: str,
    runtime_args: Collection[str],
    *,
    is_nested: bool = False,
) -> Iterator[Problem]:
    try:
        table = registry.at_scope(cfg.get("_scope_"))
        if is_nested:
            target, same = find_nested(cfg["type"], table)
            runtime_args = nested_runtime(target, dict.fromkeys(runtime_args), same)
        else:
            target = find_type(cfg["type"], table)
    except (KeyError, TypeError) as error:
        yield Problem(f"{where}.type", str(error), cause=error)
        return
    for name in cfg if not is_nested else ():
        if name in runtime_args:
            yield Problem(f"{where}.{name}", "is supplied by the run itself and cannot be set")
    given = {str(key): value for key, value in cfg.items() if key not in _FLAGS}
    wrong = [*argument_problems(target, [*given], runtime_args), *value_problems(target, given)]
    for problem in wrong:
        yield Problem(f"{where}.{problem.name}", problem.what)
    for key, value in given.items():
        if key not in plain_names(target):
            yield from _nested_problems(value, table, f"{where}.{key}", runtime_args)


def _nested_problems(
    value: Any, registry: Registry, where: str, runtime_args: Collection[str]
) -> Iterator[Problem]:
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping) or value.get("_raw_") is True:
        return
    near = misspelt_type(value)
    if "type" in value:
        yield from _class_problems(value, registry, where, runtime_args, is_nested=True)
    elif set(value) == {"_ref_"}:
        find = partial(find_reference, registry=registry)
        yield from object_problems(find, value["_ref_"], f"{where}._ref_")
    elif near is not None and look_up_nested(value[near], registry) is not None:
        yield Problem(f"{where}.{near}", _MISSPELT)
    else:
        for name, inner in value.items():
            yield from _nested_problems(inner, registry, f"{where}.{name}", runtime_args)
