"""Check whether dicts with a ``type`` can be built, without building them."""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

from ...primitives.suggestions import nearest
from ..arguments import argument_problems, plain_names
from ..errors import MOST_SHOWN, Problem, shown_value
from ..registry import Registry, find_type
from ..tree import (
    find_nested,
    find_reference,
    look_up_nested,
    nested_runtime,
    nested_table,
)
from .typed import value_problems

# A check that needs classes, to be called when they may be imported.
Later: TypeAlias = Callable[[], Iterator[Problem]]

_FLAGS = ("type", "_scope_")
_MISSPELT = "there is no such setting; did you mean type?"


def check_component(
    cfg: Any, registry: Registry, where: str, runtime_args: Collection[str] = ()
) -> list[Problem]:
    """Return the problems that would prevent ``build_tree`` from building ``cfg``.

    Args:
        cfg: the dict with a ``type``.
        registry: the registry of the type.
        where: the key path of ``cfg``, for the problems.
        runtime_args: names of arguments that the caller supplies, such as an optimizer's
            ``params``.
    """
    check = component_check(cfg, registry, where, runtime_args)
    return [check] if isinstance(check, Problem) else list(check())


def component_check(
    cfg: Any, registry: Registry, where: str, runtime_args: Collection[str] = ()
) -> Problem | Later:
    """Return a problem that can be found without the class, or the check that needs the class."""
    if not isinstance(cfg, Mapping):
        hint = f"; write {{type: {cfg}}}" if isinstance(cfg, str) and len(cfg) < MOST_SHOWN else ""
        return Problem(where, f"must be a dict with a type, got {shown_value(cfg)}{hint}")
    if "type" not in cfg:
        message = f"needs a type: a name of {registry.name} or an import path"
        return type_problem(cfg, where) or Problem(where, message)
    return partial(_class_problems, cfg, registry, where, runtime_args)


def type_problem(cfg: Mapping[str, Any], where: str) -> Problem | None:
    """Return a problem if ``cfg`` has a misspelt ``type``, otherwise None."""
    near = misspelt_type(cfg)
    return None if near is None else Problem(f"{where}.{near}", _MISSPELT)


def misspelt_type(cfg: Mapping[str, Any]) -> str | None:
    """Return the key of ``cfg`` that is a misspelt ``type``, None if there is none."""
    # dtype is an argument in torch, and similar to type.
    names = [
        k for k, v in cfg.items() if isinstance(k, str) and isinstance(v, str) and k != "dtype"
    ]
    near = nearest("type", names, limit=1)
    return near[0] if near and "type" not in cfg else None


def add_type(cfg: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return ``cfg`` with the default type ``kind``, unless it has a type or a misspelt one."""
    return {**cfg} if misspelt_type(cfg) is not None else {"type": kind, **cfg}


def object_problems(find: Callable[[Any], Any], setting: Any, where: str) -> Iterator[Problem]:
    """Look up the object of a setting by ``find``, and yield its error as a problem."""
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
        table = nested_table(cfg, registry) if is_nested else registry.at_scope(cfg.get("_scope_"))
    except KeyError as error:
        yield Problem(f"{where}._scope_", str(error), cause=error)
        return
    try:
        if is_nested:
            target, same = find_nested(cfg["type"], table)
            same = same and table.root is registry.root
            runtime_args = nested_runtime(target, dict.fromkeys(runtime_args), same)
        else:
            target = find_type(cfg["type"], table)
    except (KeyError, TypeError) as error:
        yield Problem(f"{where}.type", str(error), cause=error)
        return
    for name in cfg if not is_nested else ():
        if name in runtime_args:
            yield Problem(f"{where}.{name}", "is supplied by the run and cannot be set")
    arguments = {str(key): value for key, value in cfg.items() if key not in _FLAGS}
    wrong = [
        *argument_problems(target, [*arguments], runtime_args),
        *value_problems(target, arguments),
    ]
    for problem in wrong:
        yield Problem(f"{where}.{problem.name}", problem.what)
    if (require := getattr(target, "require_packages", None)) is not None:
        yield from object_problems(lambda _: require(), None, f"{where}.type")
    for key, value in arguments.items():
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
