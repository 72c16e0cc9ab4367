"""Whole trees of parts: nested dicts with a `type` are built before what contains them."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any

from .arguments import (
    annotations_of,
    are_numbers,
    blame,
    is_tensor,
    parameters_of,
    plain_names,
    required_names,
)
from .catalog import COMM_HOOKS, DATASETS, MODEL_WRAPPERS, MODELS
from .errors import RegistryKeyError, did_you_mean, under_key
from .imports import import_path
from .registry import Registry, check_arguments, find_type, merged, missed


def build_tree(
    cfg: Mapping[str, Any], registry: Registry, default_args: Mapping[str, Any] | None = None
) -> Any:
    """Build `cfg` like `build_from_cfg`, its nested dicts with a `type` first.

    A nested type is looked up in the same registry, as an import path, then in MODELS and
    DATASETS, for a model wrapper in COMM_HOOKS before these. One from the same registry gets
    those of `default_args` that it requires (schedulers in a SequentialLR get the optimizer).
    A list of numbers for an argument annotated as a Tensor, optional or not, becomes one (float32).
    `{_ref_: torch.nn.ReLU}` is the object itself, not called; a dict with `_raw_: true` is passed
    as a plain dict, and so is every dict for an argument that the class lists in `config_plain`.

    Raises:
        TypeError, KeyError: as `build_from_cfg`.
        Exception: whatever a constructor raises, with notes.
    """
    wanted = merged(cfg, default_args)["type"]
    own = dict(cfg.items())
    table = registry.at_scope(own.get("_scope_"))
    return _call(find_type(wanted, table), own, table, default_args or {})


def find_nested(wanted: Any, registry: Registry) -> tuple[Any, bool]:
    """Return what a nested `type` names and whether it is of the same registry, or raise KeyError.

    The text tells about each registry that was asked.
    """
    if not isinstance(wanted, str):
        return find_type(wanted, registry), False
    found = look_up_nested(wanted, registry)
    if found is not None:
        return found
    missing = missed(registry, wanted)
    text = str(missing)
    scope, _ = registry.split_scope_key(wanted)
    for other in _looked_in_next(registry):
        if scope not in {None, *(member.scope for member in other.family())}:
            # An import path means the same in every registry.
            continue
        # Of a kind that need not be the one that is wanted, only what is very near.
        near = "" if missing.__cause__ else did_you_mean(wanted, other.names(), cutoff=0.8)
        text += f"; nor is it in {other.name}{near}"
    raise RegistryKeyError(text) from missing.__cause__


def look_up_nested(wanted: str, registry: Registry) -> tuple[Any, bool] | None:
    """Return what `find_nested` does of a name, or None."""
    for table in (registry, *_looked_in_next(registry)):
        found = table.get(wanted)
        if found is not None:
            return found, table is registry
    return None


def _looked_in_next(registry: Registry) -> list[Registry]:
    around = (COMM_HOOKS,) if registry is MODEL_WRAPPERS else ()
    return [other for other in (*around, MODELS, DATASETS) if other is not registry]


def find_reference(wanted: Any, registry: Registry) -> Any:
    """Return what `_ref_` names, a registered name or any import path; else raise KeyError."""
    if isinstance(wanted, str) and "." in wanted:
        with suppress(ImportError):
            return import_path(wanted)
    return find_nested(wanted, registry)[0]


def nested_runtime(target: Any, supplied: Mapping[str, Any], same: bool) -> dict[str, Any]:
    """Return those of the supplied arguments that a nested part cannot be built without."""
    needed = required_names(target) if same else set()
    return {name: value for name, value in supplied.items() if name in needed}


def supply_where_taken(cfg: Any, registry: Registry, name: str, value: Any) -> Any:
    """Return `cfg` with the argument `name` in every part of it that takes one and has none.

    Parts are those that `build_tree` would build.
    """
    if isinstance(cfg, list | tuple):
        return [supply_where_taken(item, registry, name, value) for item in cfg]
    if not isinstance(cfg, Mapping) or cfg.get("_raw_") is True:
        return cfg
    if "type" not in cfg:
        return {key: supply_where_taken(one, registry, name, value) for key, one in cfg.items()}
    table = registry.at_scope(cfg.get("_scope_"))
    target = find_nested(cfg["type"], table)[0]
    plain = plain_names(target)
    filled = {
        key: one if key in plain else supply_where_taken(one, table, name, value)
        for key, one in cfg.items()
    }
    return {name: value, **filled} if name in parameters_of(target) else filled


def _call(
    target: Any, cfg: Mapping[str, Any], registry: Registry, defaults: Mapping[str, Any]
) -> Any:
    runtime = {key: value for key, value in defaults.items() if key != "type"}
    own = {key: value for key, value in cfg.items() if key not in ("type", "_scope_")}
    check_arguments(target, [*runtime, *own])
    plain, hints = plain_names(target), annotations_of(target)
    built = {}
    for key, value in own.items():
        with under_key(key):
            if key in plain:
                built[key] = _unmarked(value)
            elif are_numbers(value) and is_tensor(hints.get(key)):
                built[key] = _float_tensor(value)
            else:
                built[key] = _built(value, registry, runtime)
    with registry.switch_scope_and_registry(cfg.get("_scope_")), _blaming(target, own):
        return target(**{**runtime, **built})


@contextmanager
def _blaming(target: Any, given: Mapping[str, Any]) -> Iterator[None]:
    """Note on an error of `target` the argument that its text names."""
    try:
        yield
    except Exception as error:
        name, meant = blame(target, given.keys(), str(error))
        if meant:
            # As `add_note` does from Python 3.11 on.
            vars(error).setdefault("__notes__", []).append(f"did you mean {meant}?")
        with under_key(name):
            raise


def _float_tensor(values: list[Any]) -> Any:
    torch: Any = import_module("torch")
    return torch.tensor(values, dtype=torch.float32)


def _built(value: Any, registry: Registry, runtime: Mapping[str, Any]) -> Any:
    if isinstance(value, list | tuple):
        return [_built_at(str(at), item, registry, runtime) for at, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    if value.get("_raw_") is True:
        return _unmarked(value)
    if set(value) == {"_ref_"}:
        return find_reference(value["_ref_"], registry)
    if "type" not in value:
        return {key: _built_at(key, inner, registry, runtime) for key, inner in value.items()}
    table = registry.at_scope(value.get("_scope_"))
    target, same = find_nested(value["type"], table)
    return _call(target, value, table, nested_runtime(target, runtime, same))


def _built_at(key: object, value: Any, registry: Registry, runtime: Mapping[str, Any]) -> Any:
    with under_key(str(key)):
        return _built(value, registry, runtime)


def _unmarked(value: Any) -> Any:
    if isinstance(value, Mapping) and value.get("_raw_") is True:
        return {key: inner for key, inner in value.items() if key != "_raw_"}
    return value


def find_train_step(setting: Any) -> Callable[..., Any] | None:
    """Return the function that `train_step` of a config means; None where it is not set.

    Args:
        setting: an import path, or a mapping with it as `type`; the other keys are arguments
            beside (wrapper, data, optim_wrapper).

    Raises:
        ImportError: there is no such function.
        TypeError: it is not a function of these arguments.
    """
    if setting is None:
        return None
    given = setting if isinstance(setting, Mapping) else {"type": setting}
    options = {key: value for key, value in given.items() if key != "type"}
    path = given.get("type")
    if not isinstance(path, str):
        raise TypeError("must be the import path of a function, such as my_steps.step")
    found = import_path(path)
    if isinstance(found, type) or not callable(found):
        raise TypeError(
            f"{path} is no function; a class with a train_step of its own is named as the wrapper"
        )
    try:
        inspect.signature(found).bind(None, None, None, **options)
    except TypeError as error:
        raise TypeError(
            f"{path} is called with (wrapper, data, optim_wrapper) and the options beside: {error}"
        ) from error
    return partial(found, **options) if options else found
