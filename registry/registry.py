"""Map names to classes and build objects from them; registries form families with scopes."""

import inspect
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib import import_module
from typing import Any, TypeVar, overload

from ..primitives.suggestions import did_you_mean
from .arguments import argument_problems, signature_text
from .errors import RegistryKeyError, shortened
from .imports import FailedImportError, ModuleSources, import_path, where_defined

T = TypeVar("T", bound=Callable[..., Any])
_log = logging.getLogger(__name__)
# Messages list all names of a registry that has at most this many.
_FEW = 30
# The scope of the innermost `switch_scope_and_registry`.
_switched_to: ContextVar[str | None] = ContextVar("stepwrap_registry_scope", default=None)


def _calling_package() -> str:
    """Return the top-level package of the calling module, the default scope of a registry."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    module = frame.f_globals.get("__name__", "__main__") if frame else "__main__"
    return str(module).partition(".")[0]


@contextmanager
def _mmengine_scope(scope: str | None) -> Iterator[str | None]:
    """Switch mmengine's default scope if mmengine is imported, and yield the current one."""
    module: Any = sys.modules.get("mmengine.registry.default_scope")
    if module is None:
        yield None
        return
    with module.DefaultScope.overwrite_default_scope(scope):
        current = module.DefaultScope.get_current_instance()
        yield None if current is None else current.scope_name


class Registry:
    """A table of classes and functions that a config names by ``type``.

    Names are looked up in the table itself, then in its ``locations`` and ``namespaces``, then in
    its ancestors. If this registry has the scope of "scope.Name", only it is searched. Otherwise
    the look-up starts in the first registry with that scope: a child, the root, or a child of the
    root. A name that is not registered is tried as an import path ("torch.optim.SGD").

    Args:
        name: the name of the registry in messages.
        build_func: called as ``build_func(cfg, registry=self)`` (default: the parent's, or
            ``build_from_cfg``).
        parent: the registry for names that are not found in this one.
        scope: prefix of the names of this registry, without dots (default: the package that
            creates the registry).
        locations: modules that register classes; imported when a name is first not found.
        namespaces: modules whose public classes are found by bare name, such as "torch.optim".
        aliases: other names, mapped to the registered ones.
        kind: import path of a base class; only its subclasses in the namespaces are suggested if a
            name is not found.

    Attributes:
        children: the registries whose parent this is, by scope.
        module_dict: the registered classes and functions by name.

    Raises:
        AssertionError: ``scope`` is not a str, ``parent`` is not a registry, or the parent has
            another child with that scope.
        ValueError: ``scope`` is empty or contains a dot.
    """

    infer_scope = staticmethod(_calling_package)

    def __init__(
        self,
        name: str,
        build_func: Callable[..., Any] | None = None,
        parent: "Registry | None" = None,
        scope: str | None = None,
        locations: Sequence[str] = (),
        *,
        namespaces: Sequence[str] = (),
        aliases: Mapping[str, str] | None = None,
        kind: str | None = None,
    ) -> None:
        self.name = name
        self.scope = self.infer_scope() if scope is None else scope
        # AssertionErrors as documented for mmengine's Registry.
        assert isinstance(self.scope, str), f"scope must be a str, but got {_kind(scope)}"
        assert isinstance(parent, Registry | None), (
            f"parent must be a Registry or None, but got {_kind(parent)}"
        )
        if not self.scope or "." in self.scope:
            raise ValueError(f"scope must be a name without dots, got {scope!r}")
        self.parent = parent
        self.children: dict[str, Registry] = {}
        self.module_dict: dict[str, Any] = {}
        self.sources = ModuleSources(locations, namespaces, kind)
        self.aliases = dict(aliases or {})
        inherited = build_from_cfg if parent is None else parent.build_func
        self.build_func: Callable[..., Any] = build_func or inherited
        if parent is not None:
            assert self.scope not in parent.children, (
                f"{parent.name} already has a child registry with the scope {self.scope!r}"
            )
            parent.children[self.scope] = self

    @property
    def root(self) -> "Registry":
        """The registry at the top of the family."""
        return self if self.parent is None else self.parent.root

    @staticmethod
    def split_scope_key(key: str) -> tuple[str | None, str]:
        """Return the scope before the first dot (None without a dot) and the rest of the key."""
        scope, dot, name = key.partition(".")
        return (scope, name) if dot else (None, key)

    @overload
    def register_module(
        self, name: str | Sequence[str] | None = None, force: bool = False, module: None = None
    ) -> Callable[[T], T]: ...

    @overload
    def register_module(
        self, name: str | Sequence[str] | None = None, force: bool = False, *, module: T
    ) -> T: ...

    def register_module(
        self,
        name: str | Sequence[str] | None = None,
        force: bool = False,
        module: Any = None,
    ) -> Any:
        """Register a class or function, as a decorator or directly by ``module=``.

        Args:
            name: a name or several names (default: the ``__name__`` of the class or function).
            force: replace a class that already has the name instead of raising KeyError.
            module: the class or function; without it a decorator is returned.

        Returns:
            The class or function, unchanged, or the decorator.

        Raises:
            KeyError: a name is already registered; then none of the names is registered.
            TypeError: an argument has the wrong type.
        """
        if not isinstance(force, bool):
            raise TypeError(f"force must be a boolean, but got {_kind(force)}")
        names = [name] if isinstance(name, str) else name
        if not isinstance(names, Sequence | None) or not all(
            isinstance(alias, str) for alias in names or ()
        ):
            raise TypeError(
                "name must be None, an instance of str, or a sequence of str, "
                f"but got {_kind(name)}"
            )
        if module is not None:
            return _add(self, module, names, force)
        return lambda target: _add(self, target, names, force)

    def get(self, key: str) -> Any:
        """Return the class or function that ``key`` names, None if there is none.

        Args:
            key: "Name", "scope.Name" or an import path.

        Raises:
            TypeError: ``key`` is not a str.
        """
        if not isinstance(key, str):
            raise TypeError(f"The key argument of `Registry.get` must be a str, got {_kind(key)}")
        target = _find(self, key)
        if target is None and "." in key:
            with suppress(ImportError):
                target = import_path(key)
        return target if callable(target) else None

    def resolve(self, key: str) -> Any:
        """Return the class or function that ``key`` names, or raise a KeyError with the reason."""
        target = self.get(key)
        if target is None:
            raise missed(self, key)
        return target

    def build(self, cfg: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Build an object from ``cfg`` by ``build_func(cfg, *args, **kwargs, registry=self)``."""
        return self.build_func(cfg, *args, **kwargs, registry=self)

    def at_scope(self, scope: str | None) -> "Registry":
        """Return the family's registry with that scope (this one for None), or raise KeyError."""
        family = list(self.family())
        scoped = next((member for member in family if scope in (None, member.scope)), None)
        if scoped is None:
            scopes = ", ".join(member.scope for member in family)
            raise RegistryKeyError(f"{self.name} has no scope {scope!r}; its scopes are {scopes}")
        return scoped

    @contextmanager
    def switch_scope_and_registry(self, scope: str | None) -> Iterator["Registry"]:
        """Make a scope the default in a ``with`` block, and yield the family's registry with it.

        In the block every registry of every family builds with this scope, and so does mmengine.
        With None the default stays: the scope of the enclosing block, or mmengine's
        ``DefaultScope`` if it is in use. If the family has no such scope, this registry is yielded.
        """
        with _mmengine_scope(scope) as theirs:
            chosen_scope = scope or _switched_to.get() or theirs
            registry = next(
                (member for member in self.family() if member.scope == chosen_scope), None
            )
            if registry is None and scope is not None:
                _log.warning("%s has no scope %r: %s is used", self.name, scope, self.scope)
            token = _switched_to.set(scope or _switched_to.get())
            try:
                # An empty registry is falsy.
                yield self if registry is None else registry
            finally:
                _switched_to.reset(token)

    def family(self) -> Iterator["Registry"]:
        """Yield this registry, its ancestors, then all others below the root."""
        above = _lineage(self)
        yield from above
        yield from (member for member in _tree(above[-1]) if member not in above)

    def names(self) -> list[str]:
        """Return the sorted names that can be looked up here, with aliases.

        From the namespaces only subclasses of the registry's kind are listed.
        """
        return sorted({*self, *self.aliases, *self.sources.names()})

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None

    def __len__(self) -> int:
        self.sources.load_locations()
        return len(self.module_dict)

    def __iter__(self) -> Iterator[str]:
        self.sources.load_locations()
        return iter(list(self.module_dict))

    def __repr__(self) -> str:
        # Imported here: `stepwrap --help` imports this module and must answer at once.
        from rich.console import Console
        from rich.table import Table

        table = Table("Names", "Objects", title=f"Registry of {self.name}")
        for name in sorted(self.module_dict):
            table.add_row(name, str(self.module_dict[name]))
        console = Console(markup=False, color_system=None)
        with console.capture() as capture:
            console.print(table, end="")
        return capture.get()


def _kind(value: object) -> str:
    """Return a value's class and the value for messages."""
    return f"{type(value)}: {shortened(repr(value))}"


def _lineage(registry: Registry) -> list[Registry]:
    """Return a registry, its parent, and so on up to the root."""
    return [registry, *(_lineage(registry.parent) if registry.parent is not None else ())]


def _tree(registry: Registry) -> Iterator[Registry]:
    """Yield a registry, then those below it, parents before their children."""
    yield registry
    for child in registry.children.values():
        yield from _tree(child)


def _find(registry: Registry, key: str) -> Any:
    scope, name = registry.split_scope_key(key)
    if scope is None:
        targets = (_find_own(member, key) for member in _lineage(registry))
        return next((target for target in targets if target is not None), None)
    if scope == registry.scope:
        return _find_own(registry, name)
    if scope in registry.children:
        return _find(registry.children[scope], name)
    root = registry.root
    if root is registry or scope not in {root.scope, *root.children}:
        return None
    return _find(root, key)


def _find_own(registry: Registry, name: str) -> Any:
    if name not in registry.module_dict:
        registry.sources.load_locations()
    name = name if name in registry.module_dict else registry.aliases.get(name, name)
    target = registry.module_dict.get(name)
    return registry.sources.find(name) if target is None else target


def _add(registry: Registry, target: T, names: Sequence[str] | None, force: bool) -> T:
    if not callable(target):
        raise TypeError(f"module must be Callable, but got {_kind(target)}")
    names = names or [getattr(target, "__name__", type(target).__name__)]
    for name in names if not force else ():
        present = registry.module_dict.get(name)
        if present is not None and not _is_stale(present, target):
            where = getattr(present, "__module__", "unknown")
            raise RegistryKeyError(f"{name} is already registered in {registry.name} at {where}")
    registry.module_dict.update(dict.fromkeys(names, target))
    return target


def _is_stale(present: object, target: object) -> bool:
    """Return whether ``present`` is from an earlier, failed import of the module of ``target``."""
    (module, name), identity = (
        (getattr(definition, "__module__", ""), getattr(definition, "__qualname__", ""))
        for definition in (present, target)
    )
    is_gone = "<" not in name and getattr(sys.modules.get(module), name, None) is None
    return is_gone and (module, name) == identity


def missed(registry: Registry, key: str) -> RegistryKeyError:
    """Return an error with a one-line message that names the key and the searched registry.

    If modules failed to import, the message begins with them: they may be the only reason. It also
    contains similar names, and the files that define the name.
    """
    import_failures: list[ImportError] = []
    remarks: list[str] = []
    is_other_kind = False
    package, dot, _ = key.partition(".")
    scopes = [member.scope for member in registry.family()]
    if dot and (package not in scopes or package in sys.modules):
        try:
            import_path(key)
        except FailedImportError as error:
            import_failures = [error]
        except ImportError as error:
            remarks = [shortened(str(error), 200)]
        else:
            is_other_kind = True
            remarks = [f"{shortened(key)} can be imported but is neither a class nor a function"]
    related = f" (scopes {', '.join(scopes)})" if len(scopes) > 1 else ""
    message = f"{shortened(key)} is not in the {registry.scope}::{registry.name} registry{related}"
    if not import_failures and not is_other_kind:
        message += _near_names(registry, key)
    for member in _lineage(registry):
        for name, failure in member.sources.failures.items():
            # Locations must be importable; the packages of namespaces may not be installed.
            if name in member.sources.locations:
                import_failures.append(failure)
            else:
                remarks.append(str(failure))
    definitions = where_defined(key.rpartition(".")[2])
    missing = RegistryKeyError(
        "; ".join([*map(str, import_failures), message, *remarks, *definitions])
    )
    missing.__cause__ = import_failures[0] if import_failures else None
    return missing


def _near_names(registry: Registry, key: str) -> str:
    """Return "; did you mean A or B?", otherwise all names if there are few, otherwise ""."""
    lineage = _lineage(registry)
    candidates = [name for member in lineage for name in member.names()]
    for member in registry.family():
        if member not in lineage:
            candidates += [f"{member.scope}.{name}" for name in member.names()]
    hint = did_you_mean(key, candidates) or did_you_mean(key.rpartition(".")[2], candidates)
    if not hint and 0 < len(candidates) <= _FEW:
        hint = f"; it has {', '.join(candidates)}"
    return hint


def build_from_cfg(
    cfg: Mapping[str, Any], registry: Registry, default_args: Mapping[str, Any] | None = None
) -> Any:
    """Call the ``type`` of ``cfg`` with the other keys as arguments.

    Nested dicts are passed unchanged. If both ``cfg`` and ``default_args`` have a key, ``cfg``
    takes precedence; neither is modified. Both may be any mapping, or mmengine's ``Config`` or
    ``ConfigDict``. If ``cfg`` has ``_scope_``, the type and everything that the constructor builds
    are looked up from the registry of that scope; for an unknown scope, a warning is logged and
    ``registry`` is used.

    Raises:
        TypeError: ``cfg`` is not a mapping, ``type`` is neither a name nor callable, or ``type``
            does not accept the arguments (unknown names are reported first).
        KeyError: ``type`` is missing, or its name is not registered.
        Exception: any error of the constructor, unchanged.
    """
    args = merged(cfg, default_args)
    if not isinstance(registry, Registry):
        raise TypeError(f"registry must be a Registry object, but got {_kind(registry)}")
    scope = args.pop("_scope_", None)
    with registry.switch_scope_and_registry(scope) as table:
        target = find_type(args.pop("type"), table)
        check_arguments(target, [*args])
        # mmengine's global objects are created once and then looked up by name.
        managed = getattr(sys.modules.get("mmengine.utils"), "ManagerMixin", ())
        is_managed = isinstance(target, type) and issubclass(target, managed)
        return (target.get_instance if is_managed else target)(**args)


def build_model_from_cfg(
    cfg: Mapping[str, Any] | list[Any],
    registry: Registry,
    default_args: Mapping[str, Any] | None = None,
) -> Any:
    """Build a model like ``build_from_cfg``, or an ``nn.Sequential`` from a list of configs."""
    if not isinstance(cfg, list):
        return build_from_cfg(cfg, registry, default_args)
    layers = [build_from_cfg(layer_cfg, registry, default_args) for layer_cfg in cfg]
    # Imported late: this module must be fast to import.
    return import_module("torch.nn").Sequential(*layers)


def find_type(kind: Any, table: Registry) -> Any:
    """Return the class or function of a ``type``; look it up if it is a string."""
    if isinstance(kind, str):
        kind = table.resolve(kind)
    if not callable(kind):
        raise TypeError(f"type must be a str or valid type, but got {_kind(kind)}")
    return kind


def find_component(cfg: Mapping[str, Any], registry: Registry) -> Any:
    """Return the class or function that the ``type`` of ``cfg`` names in its ``_scope_``.

    Raises:
        KeyError: the name or the scope is unknown.
        TypeError: ``type`` is neither a name nor callable.
    """
    return find_type(cfg["type"], registry.at_scope(cfg.get("_scope_")))


def check_arguments(target: Any, args: Collection[str]) -> None:
    """Raise TypeError if ``target`` cannot be called with the names in ``args``."""
    problems = argument_problems(target, args)
    if problems:
        lines = [f"{problem.name}: {problem.what}" for problem in problems]
        raise TypeError(f"{'; '.join(lines)}; the signature is {signature_text(target)}")


def _is_dict_like(cfg: Any) -> bool:
    """Return whether ``cfg`` is a mapping, or similar enough, such as mmengine's ``Config``."""
    return hasattr(type(cfg), "__getitem__") and callable(getattr(cfg, "items", None))


def merged(cfg: Mapping[str, Any], default_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return ``cfg`` merged over ``default_args``, or raise TypeError or KeyError."""
    if not _is_dict_like(cfg):
        raise TypeError(f"cfg should be a dict, ConfigDict or Config, but got {_kind(cfg)}")
    if default_args is not None and not _is_dict_like(default_args):
        raise TypeError(
            "default_args should be a dict, ConfigDict, Config or None, "
            f"but got {_kind(default_args)}"
        )
    # items() makes mmengine's lazy configs import their types.
    args = {**dict((default_args or {}).items()), **dict(cfg.items())}
    if "type" not in args:
        keys = ", ".join(str(key) for key in args) or "nothing"
        message = '`cfg` or `default_args` must contain the key "type", but got'
        raise RegistryKeyError(f"{message} {keys}")
    return args
