"""From a dict with a `type` to the object that it describes."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from .arguments import argument_problems, signature_text
from .errors import RegistryKeyError


@runtime_checkable
class NameTable(Protocol):
    """What building needs of a registry."""

    name: str

    def resolve(self, key: str) -> Any:
        """Return what is registered as `key` or raise KeyError."""
        ...

    def at_scope(self, scope: str) -> "NameTable":
        """Return the registry of the family that has that scope."""
        ...

    def switch_scope_and_registry(self, scope: str | None) -> AbstractContextManager["NameTable"]:
        """Return a context in which names are looked up from the registry of that scope."""
        ...


def build_from_cfg(
    cfg: Mapping[str, Any], registry: NameTable, default_args: Mapping[str, Any] | None = None
) -> Any:
    """Build the object that `cfg` describes: its `type`, called with the other keys.

    Nested dicts are passed as they are. Neither `cfg` nor `default_args` is changed; where both
    have a key, `cfg` wins. Both may be any mapping, and mmengine's `Config` and `ConfigDict`.
    With `_scope_` in `cfg` the type, and everything that the constructor builds, is looked up from
    the registry of that scope.

    Raises:
        TypeError: `cfg` is not a mapping, `type` is neither a name nor callable, or the arguments
            are not those of the class (unknown names are reported first).
        KeyError: there is no `type`, or its name is not registered.
        Exception: whatever the constructor itself raises, unchanged.
    """
    args = _merged(cfg, default_args)
    if not isinstance(registry, NameTable):
        raise TypeError(f"registry must be a Registry, got {type(registry).__name__}")
    scope = args.pop("_scope_", None)
    start = registry if scope is None else registry.at_scope(scope)
    with start.switch_scope_and_registry(scope) as table:
        target = find_type(args.pop("type"), table)
        check_arguments(target, args)
        return target(**args)


def build_model_from_cfg(
    cfg: Mapping[str, Any] | list[Any],
    registry: NameTable,
    default_args: Mapping[str, Any] | None = None,
) -> Any:
    """Build a model like `build_from_cfg`, or a `torch.nn.Sequential` from a list of configs."""
    if not isinstance(cfg, list):
        return build_from_cfg(cfg, registry, default_args)
    parts = [build_from_cfg(part, registry, default_args) for part in cfg]
    # Only now: this folder is imported where torch would take too long.
    return import_module("torch.nn").Sequential(*parts)


def find_type(wanted: Any, table: NameTable) -> Any:
    """Return what a `type` names: a string is looked up, a class or function taken as it is."""
    if isinstance(wanted, str):
        wanted = table.resolve(wanted)
    if not callable(wanted):
        raise TypeError(
            f"type must be a name, a class or a function, got {wanted!r} "
            f"of type {type(wanted).__name__}"
        )
    return wanted


def check_arguments(target: Any, args: Mapping[str, Any]) -> None:
    """Raise TypeError when `target` cannot be called with the names in `args`."""
    problems = argument_problems(target, args)
    if problems:
        lines = [f"{problem.name}: {problem.what}" for problem in problems]
        raise TypeError(f"{'; '.join(lines)}; the signature is {signature_text(target)}")


def is_dict_like(cfg: Any) -> bool:
    """Whether `cfg` is a mapping or has what building needs of one, as mmengine's `Config`."""
    return isinstance(cfg, Mapping) or (
        hasattr(type(cfg), "__getitem__") and callable(getattr(cfg, "items", None))
    )


def _merged(cfg: Mapping[str, Any], default_args: Mapping[str, Any] | None) -> dict[str, Any]:
    if not is_dict_like(cfg):
        raise TypeError(f"cfg must be a dict with a type, got {type(cfg).__name__}")
    if default_args is not None and not is_dict_like(default_args):
        raise TypeError(f"default_args must be a dict or None, got {type(default_args).__name__}")
    # By items(): a config of mmengine that imports lazily imports its types there.
    args = {**dict((default_args or {}).items()), **dict(cfg.items())}
    if "type" not in args:
        given = ", ".join(str(key) for key in args) or "nothing"
        raise RegistryKeyError(f'cfg or default_args must contain the key "type", got {given}')
    return args
