"""Build nested configs: dicts with a ``type`` are built before the objects that contain them."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any

from ..primitives.notes import add_note
from ..primitives.suggestions import did_you_mean
from .arguments import (
    are_numbers,
    blame,
    get_annotations,
    get_parameters,
    is_tensor,
    plain_names,
    required_names,
)
from .catalog import COMM_HOOKS, DATASETS, MODEL_WRAPPERS, MODELS
from .errors import RegistryKeyError, under_key
from .imports import import_path
from .registry import Registry, check_arguments, find_type, merged, missed


def build_tree(
    cfg: Mapping[str, Any], registry: Registry, default_args: Mapping[str, Any] | None = None
) -> Any:
    """Build ``cfg`` like ``build_from_cfg``, after its nested dicts with a ``type``.

    A nested type is looked up in the same registry and as an import path. If it is found there, it
    gets the arguments in ``default_args`` that it requires: schedulers in a SequentialLR, for
    example, get the optimizer. Otherwise it is looked up in MODELS and DATASETS (for a model
    wrapper, first in COMM_HOOKS).

    A list of numbers becomes a float32 tensor if the argument is annotated as Tensor, optional or
    not. ``{_ref_: torch.nn.ReLU}`` is the object itself, not called. A dict with ``_raw_: true`` is
    passed as a plain dict, and so are the dicts of arguments that the class lists in
    ``config_plain``.

    Raises:
        TypeError: see ``build_from_cfg``.
        KeyError: see ``build_from_cfg``.
        Exception: any error of a constructor, with notes.
    """
    kind = merged(cfg, default_args)["type"]
    settings = dict(cfg.items())
    table = registry.at_scope(settings.get("_scope_"))
    return _call(find_type(kind, table), settings, table, default_args or {})


def nested_table(cfg: Mapping[str, Any], registry: Registry) -> Registry:
    """Return the registry in which the ``type`` of a nested dict is looked up first.

    This is ``registry``, in the ``_scope_`` of the dict. If no registry of this kind has the scope,
    it is a registry of another kind.

    Raises:
        KeyError: the scope is unknown.
    """
    scope = cfg.get("_scope_")
    for table in (registry, *_looked_in_next(registry)):
        if scope in (None, *(member.scope for member in table.family())):
            return table.at_scope(scope)
    return registry.at_scope(scope)


def find_nested(kind: Any, registry: Registry) -> tuple[Any, bool]:
    """Return the object of a nested ``type`` and whether it is from the same registry.

    Raises:
        KeyError: the type is not found; the text lists the registries that were searched.
    """
    if not isinstance(kind, str):
        return find_type(kind, registry), False
    resolved = look_up_nested(kind, registry)
    if resolved is not None:
        return resolved
    missing = missed(registry, kind)
    text = str(missing)
    scope, _ = registry.split_scope_key(kind)
    for other in _looked_in_next(registry):
        if scope not in {None, *(member.scope for member in other.family())}:
            # An import path means the same in every registry.
            continue
        # Only suggest very similar names of another registry.
        near = "" if missing.__cause__ else did_you_mean(kind, other.names(), cutoff=0.8)
        text += f"; nor is it in {other.name}{near}"
    raise RegistryKeyError(text) from missing.__cause__


def look_up_nested(name: str, registry: Registry) -> tuple[Any, bool] | None:
    """Return the result of ``find_nested`` for a name, None if it is not found."""
    for table in (registry, *_looked_in_next(registry)):
        target = table.get(name)
        if target is not None:
            return target, table is registry
    return None


def _looked_in_next(registry: Registry) -> list[Registry]:
    """Return the registries of other kinds, in the scope of ``registry`` if they have it."""
    comm_hooks = (COMM_HOOKS,) if registry.root is MODEL_WRAPPERS else ()
    candidates = [other for other in (*comm_hooks, MODELS, DATASETS) if other is not registry.root]
    return [
        next((member for member in other.family() if member.scope == registry.scope), other)
        for other in candidates
    ]


def find_reference(name: Any, registry: Registry) -> Any:
    """Return the object that a ``_ref_`` names, by registered name or import path, or raise."""
    if isinstance(name, str) and "." in name:
        with suppress(ImportError):
            return import_path(name)
    return find_nested(name, registry)[0]


def nested_runtime(target: Any, supplied: Mapping[str, Any], same: bool) -> dict[str, Any]:
    """Return the supplied arguments that a nested ``target`` of the same registry requires."""
    needed = required_names(target) if same else set()
    return {name: value for name, value in supplied.items() if name in needed}


def supply_where_taken(cfg: Any, registry: Registry, name: str, value: Any) -> Any:
    """Return ``cfg`` with the argument ``name`` added wherever it is accepted and missing.

    It is added to the dicts that ``build_tree`` would build.
    """
    if isinstance(cfg, list | tuple):
        return [supply_where_taken(entry, registry, name, value) for entry in cfg]
    if not isinstance(cfg, Mapping) or cfg.get("_raw_") is True:
        return cfg
    if "type" not in cfg:
        return {key: supply_where_taken(entry, registry, name, value) for key, entry in cfg.items()}
    table = nested_table(cfg, registry)
    target = find_nested(cfg["type"], table)[0]
    plain = plain_names(target)
    filled = {
        key: entry if key in plain else supply_where_taken(entry, table, name, value)
        for key, entry in cfg.items()
    }
    return {name: value, **filled} if name in get_parameters(target) else filled


def _call(
    target: Any, cfg: Mapping[str, Any], registry: Registry, defaults: Mapping[str, Any]
) -> Any:
    runtime = {key: value for key, value in defaults.items() if key != "type"}
    settings = {key: value for key, value in cfg.items() if key not in ("type", "_scope_")}
    check_arguments(target, [*runtime, *settings])
    plain, hints = plain_names(target), get_annotations(target)
    built = {}
    for key, value in settings.items():
        with under_key(key):
            if key in plain:
                built[key] = _unmarked(value)
            elif are_numbers(value) and is_tensor(hints.get(key)):
                torch: Any = import_module("torch")
                built[key] = torch.tensor(value, dtype=torch.float32)
            else:
                built[key] = _built(value, registry, runtime)
    with registry.switch_scope_and_registry(cfg.get("_scope_")), _blaming(target, settings):
        return target(**{**runtime, **built})


@contextmanager
def _blaming(target: Any, arguments: Mapping[str, Any]) -> Iterator[None]:
    """If an error of ``target`` names an argument, store its key and add a suggestion as a note."""
    try:
        yield
    except Exception as error:
        name, meant = blame(target, arguments.keys(), str(error))
        if meant:
            add_note(error, f"did you mean {meant}?")
        with under_key(name):
            raise


def _built(value: Any, registry: Registry, runtime: Mapping[str, Any]) -> Any:
    if isinstance(value, list | tuple):
        return [_built_at(str(at), entry, registry, runtime) for at, entry in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    if value.get("_raw_") is True:
        return _unmarked(value)
    if set(value) == {"_ref_"}:
        return find_reference(value["_ref_"], registry)
    if "type" not in value:
        return {key: _built_at(key, inner, registry, runtime) for key, inner in value.items()}
    table = nested_table(value, registry)
    target, same = find_nested(value["type"], table)
    same = same and table.root is registry.root
    return _call(target, value, table, nested_runtime(target, runtime, same))


def _built_at(key: object, value: Any, registry: Registry, runtime: Mapping[str, Any]) -> Any:
    with under_key(str(key)):
        return _built(value, registry, runtime)


def _unmarked(value: Any) -> Any:
    if isinstance(value, Mapping) and value.get("_raw_") is True:
        return {key: inner for key, inner in value.items() if key != "_raw_"}
    return value


def find_train_step(setting: Any) -> Callable[..., Any] | None:
    """Return the function of the setting ``train_step``, None if it is not set.

    Args:
        setting: an import path, or a mapping with the path as ``type``; the other keys are further
            keyword arguments.

    Raises:
        ImportError: the function cannot be imported.
        TypeError: the object is not a function, or does not accept the arguments (wrapper, data,
            optim_wrapper) and the further ones.
    """
    if setting is None:
        return None
    return _find_function(
        setting,
        "my_steps.step",
        ("wrapper", "data", "optim_wrapper"),
        "; set a class that defines train_step as the wrapper's type",
    )


def find_transform(setting: Any) -> Callable[..., Any] | None:
    """Return the function of the setting ``transform`` of a metric; see ``find_train_step``.

    It is called with the predictions.
    """
    return None if setting is None else _find_function(setting, "torch.sigmoid", ("preds",))


def _find_function(
    setting: Any, example: str, arguments: Sequence[str], remedy: str = ""
) -> Callable[..., Any]:
    section = setting if isinstance(setting, Mapping) else {"type": setting}
    options = {key: value for key, value in section.items() if key != "type"}
    path = section.get("type")
    if not isinstance(path, str):
        raise TypeError(f"must be the import path of a function, such as {example}")
    function = import_path(path)
    if isinstance(function, type) or not callable(function):
        raise TypeError(f"{path} is not a function{remedy}")
    try:
        signature = inspect.signature(function)
    except ValueError:
        # Many functions of torch have none.
        return partial(function, **options) if options else function
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        raise TypeError(
            f"{path} is called with ({', '.join(arguments)}) and the further options: {error}"
        ) from error
    return partial(function, **options) if options else function
