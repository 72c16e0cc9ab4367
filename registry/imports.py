"""Finding objects by import path, and the modules that a registry looks into."""

import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from .errors import describe_at, did_you_mean

# An import runs foreign code, which may also call sys.exit().
IMPORT_FAILURES = (Exception, SystemExit)


def import_path(path: str) -> Any:
    """Import "package.module.Name" and return what it names (any object can be named).

    Raises:
        ImportError: it cannot be imported; the text says which part and why.
    """
    parts = path.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ImportError(f"{path!r} is no import path such as package.module.Name")
    module, rest = _import_longest(parts)
    found: Any = module
    for at, part in enumerate(rest, start=len(parts) - len(rest)):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            owner = ".".join(parts[:at])
            hint = did_you_mean(part, [n for n in dir(found) if not n.startswith("_")])
            raise ImportError(f"{owner} has no {part}{hint}") from error
    return found


def _import_longest(parts: Sequence[str]) -> tuple[ModuleType, Sequence[str]]:
    module = _import(parts[0], f"package {parts[0]} is not installed")
    for at, part in enumerate(parts[1:], start=1):
        present = getattr(module, part, None)
        if present is not None and not isinstance(present, ModuleType):
            return module, parts[at:]
        try:
            module = _import(".".join(parts[: at + 1]), "")
        except _AbsentError:
            return module, parts[at:]
    return module, ()


class _AbsentError(ImportError):
    """There is no module of that name."""


class FailedImportError(ImportError):
    """A module exists but fails to import; the error that it raised is the cause."""


def _import(name: str, text_if_absent: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except IMPORT_FAILURES as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            raise _AbsentError(text_if_absent) from error
        raise FailedImportError(f"{name} cannot be imported: {describe_at(error)}") from error


class ModuleSources:
    """The modules behind a registry, imported when a name is first missed.

    Args:
        locations: modules that register things when they are imported.
        namespaces: modules whose public classes are found by their bare names.
        kind: the import path of the base class of what `names` returns of the namespaces.
    """

    def __init__(
        self,
        locations: Iterable[str] = (),
        namespaces: Iterable[str] = (),
        kind: str | None = None,
    ) -> None:
        self.locations = tuple(locations)
        self.namespaces = tuple(namespaces)
        self.kind = kind
        self.failures: dict[str, FailedImportError] = {}
        self._modules: dict[str, ModuleType | None] = {}
        self._names: dict[str, list[str]] = {}

    def load_locations(self) -> None:
        """Import what has not been imported; failures are kept, not raised."""
        for name in self.locations:
            self._load(name)

    def find(self, name: str) -> Callable[..., Any] | None:
        """Return the class of that name from the first namespace that has it."""
        for namespace in self.namespaces:
            found = getattr(self._load(namespace), name, None)
            if inspect.isclass(found) and self._offers(namespace, name, found):
                return found
        return None

    def names(self) -> list[str]:
        """Return the names of the public classes of all namespaces that are of the kind."""
        for namespace in self.namespaces:
            if namespace not in self._names:
                members = inspect.getmembers(self._load(namespace), inspect.isclass)
                base = object if self.kind is None else import_path(self.kind)
                self._names[namespace] = [
                    name
                    for name, value in members
                    if self._offers(namespace, name, value) and issubclass(value, base)
                ]
        found = (name for namespace in self.namespaces for name in self._names[namespace])
        return list(dict.fromkeys(found))

    def _offers(self, namespace: str, name: str, value: object) -> bool:
        if not inspect.isclass(value) or name.startswith("_"):
            return False
        public = getattr(self._load(namespace), "__all__", None)
        if public is not None:
            return name in public
        package = namespace.partition(".")[0]
        return str(value.__module__).partition(".")[0] == package

    def _load(self, name: str) -> ModuleType | None:
        if name not in self._modules:
            # Entered before the import: the module may look something up while it is imported.
            self._modules[name] = None
            try:
                self._modules[name] = importlib.import_module(name)
            except IMPORT_FAILURES as error:
                failure = FailedImportError(f"{name} failed to import: {describe_at(error)}")
                failure.__cause__ = error
                self.failures[name] = failure
        return self._modules[name]
