"""Modules and what is in them: by import path, behind a registry, named or written by the user."""

import ast
import importlib
import importlib.util
import inspect
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import describe_at, did_you_mean, shortened, shown_value

# An import runs foreign code, which may also call sys.exit().
IMPORT_FAILURES = (Exception, SystemExit)
_SKIPPED = {"build", "dist", "node_modules", "site-packages", "venv", "env", "__pycache__"}
_MAX_SECONDS = 2.0


def import_path(path: str) -> Any:
    """Import "package.module.Name" and return what it names (any object can be named).

    Raises:
        ImportError: it cannot be imported; the text says which part and why.
    """
    parts = path.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ImportError(f"{shown_value(path)} is no import path such as package.module.Name")
    module, rest = _import_longest(parts)
    found: Any = module
    for at, part in enumerate(rest, start=len(parts) - len(rest)):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            owner = shortened(".".join(parts[:at]))
            hint = did_you_mean(part, [n for n in dir(found) if not n.startswith("_")])
            raise ImportError(f"{owner} has no {shortened(part)}{hint}") from error
    return found


def _import_longest(parts: Sequence[str]) -> tuple[ModuleType, Sequence[str]]:
    try:
        module = _import(parts[0], "cannot be imported")
    except _AbsentError as error:
        raise ImportError(f"package {shortened(parts[0])} is not installed") from error
    for at, part in enumerate(parts[1:], start=1):
        present = getattr(module, part, None)
        if present is not None and not isinstance(present, ModuleType):
            return module, parts[at:]
        try:
            module = _import(".".join(parts[: at + 1]), "cannot be imported")
        except _AbsentError:
            return module, parts[at:]
    return module, ()


class _AbsentError(ImportError):
    """There is no module of that name."""


class FailedImportError(ImportError):
    """A module exists but fails to import; the error that it raised is the cause."""


def _import(name: str, how: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except IMPORT_FAILURES as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise _AbsentError(f"there is no module {shortened(name)} in {Path.cwd()}") from error
        raise FailedImportError(f"{name} {how}: {describe_at(error)}") from error


class ModuleSources:
    """The modules behind a registry, imported when a name is first missed: see `Registry`."""

    def __init__(
        self, locations: Iterable[str], namespaces: Iterable[str], kind: str | None
    ) -> None:
        self.locations = tuple(locations)
        self.namespaces = tuple(namespaces)
        self.kind = kind
        self.failures: dict[str, FailedImportError] = {}
        self._modules: dict[str, ModuleType | None] = {}

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
        base = object if self.kind is None else import_path(self.kind)
        return [
            name
            for namespace in self.namespaces
            for name, one in self._classes(namespace).items()
            if issubclass(one, base)
        ]

    def summaries(self, namespace: str) -> dict[str, str]:
        """Return the public classes of a namespace with the first lines of their docstrings."""
        classes = self._classes(namespace).items()
        return {name: (one.__doc__ or "").strip().partition("\n")[0] for name, one in classes}

    def _classes(self, namespace: str) -> dict[str, type]:
        members = inspect.getmembers(self._load(namespace), inspect.isclass)
        return {name: one for name, one in members if self._offers(namespace, name, one)}

    def _offers(self, namespace: str, name: str, value: object) -> bool:
        if name.startswith("_"):
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


def anchored(entry: str, folder: Path) -> str:
    """Return an `imports` entry that means the same from anywhere.

    A file is relative to the folder of the config that names it, and becomes absolute; so does a
    module that lies in that folder. Other modules keep their names.
    """
    if entry.endswith(".py"):
        return os.path.abspath(folder / entry)
    beside = folder / f"{entry}.py"
    # os.path's: a name that no path can have is that of no file.
    if folder.resolve() != Path.cwd().resolve() and os.path.isfile(beside):
        in_cwd = [Path.cwd() / f"{entry}.py", Path.cwd() / entry]
        if not any(os.path.exists(path) for path in in_cwd):
            return os.path.abspath(beside)
    return entry


def find_entry(entry: str) -> None:
    """Raise ImportError where the file of an entry, or its top module, is not there."""
    if entry.endswith(".py"):
        if not os.path.isfile(entry):
            raise ImportError(f"there is no file {shortened(entry)}")
        return
    top = entry.partition(".")[0]
    # Of a module above all others nothing is imported for that.
    if top not in sys.modules and not (top and importlib.util.find_spec(top)):
        raise ImportError(f"there is no module {shortened(entry)} in {Path.cwd()}")


def import_entry(entry: str) -> None:
    """Import a module by name, or a .py file under its name within its package."""
    if not entry.endswith(".py"):
        _import(entry, "failed to import")
        return
    find_entry(entry)
    path = Path(entry).resolve()
    parts = [] if path.name == "__init__.py" else [path.stem]
    folder = path.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    make_importable(folder)
    module = _import(".".join(parts), "failed to import")
    if Path(module.__file__ or "").resolve() != path:
        what = f"{path} cannot be imported as {module.__name__}: that is {module.__file__}"
        raise ImportError(what)


def make_importable(folder: Path) -> None:
    """Let modules in `folder` be imported, before others of the same name, as Python does."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def where_defined(name: str) -> list[str]:
    """Return sentences on the definitions of `name` under the working directory, with the remedy.

    Nothing is imported. Hidden folders, environments and build folders are left out; the search
    ends after two seconds.
    """
    if not name.isidentifier():
        return []
    wanted = re.compile(rf"^\s*(?:class|def)\s+{re.escape(name)}\b", re.MULTILINE)
    found: list[str] = []
    for path in _source_files(Path.cwd()):
        try:
            text = path.read_text(encoding="utf-8")
            if name in text and wanted.search(text):
                found += _definitions_in(ast.parse(text), name, path.relative_to(Path.cwd()))
        except (OSError, ValueError, SyntaxError, RecursionError):
            # An unreadable file holds nothing that could be imported.
            continue
    return found


def _source_files(root: Path) -> Iterator[Path]:
    stop = time.monotonic() + _MAX_SECONDS
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(
            sub
            for sub in subfolders
            if not sub.startswith(".")
            and sub not in _SKIPPED
            and not os.path.exists(os.path.join(folder, sub, "pyvenv.cfg"))
        )
        for file in sorted(files):
            if file.endswith(".py"):
                if time.monotonic() > stop:
                    return
                yield Path(folder, file)


def _definitions_in(tree: ast.Module, name: str, path: Path) -> Iterator[str]:
    module = ".".join(path.with_suffix("").parts)
    # Not getattr: a lazy module may import something when it is asked for an attribute.
    loaded = [getattr(one, "__dict__", {}).get("__file__") for one in list(sys.modules.values())]
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            advice = f"but was never imported: write type: {module}.{name}"
            if str(path.absolute()) in loaded:
                advice = f"but is not registered here: write type: {module}.{name}"
            elif any("register_module" in ast.dump(one) for one in node.decorator_list):
                advice = f"but was never imported: add {module} to imports"
            yield f"{kind} {name} is defined in {path}:{node.lineno} {advice}"
