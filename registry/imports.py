"""Import objects by their paths, the modules behind a registry, and the user's modules."""

import ast
import importlib
import inspect
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from ..primitives.suggestions import did_you_mean
from .errors import describe_at, is_users_file, shortened, shown_value

# An import runs other people's code, which may call sys.exit().
IMPORT_FAILURES = (Exception, SystemExit)
_SKIPPED = {"build", "dist", "node_modules", "site-packages", "venv", "env", "__pycache__"}
# Limits of the search for a definition, because a working directory may be large.
_MAX_SECONDS, _MAX_DEPTH, _MAX_FILES = 1.0, 4, 1_000
_MAX_PROPOSALS = 3
# Maps packages that configs name to the extra that installs them.
_EXTRAS = {
    "datasets": "transformers",
    "peft": "peft",
    "timm": "vision",
    "tokenizers": "transformers",
    "torchvision": "vision",
    "transformers": "transformers",
}
_OTHER_BUILD = (
    "; this torchvision was built for another release of PyTorch: install matching releases"
)


def import_path(path: str) -> Any:
    """Import "package.module.Name" and return the object, which may be of any type.

    Raises:
        ImportError: the object cannot be imported; the message names the part and the reason.
    """
    names = path.split(".")
    if not all(name.isidentifier() for name in names):
        raise ImportError(f"{shown_value(path)} is not an import path such as package.module.Name")
    module, remaining = _import_longest(names)
    value: Any = module
    for at, name in enumerate(remaining, start=len(names) - len(remaining)):
        try:
            value = getattr(value, name)
        except AttributeError as error:
            owner = shortened(".".join(names[:at]))
            hint = did_you_mean(name, [n for n in dir(value) if not n.startswith("_")])
            raise ImportError(f"{owner} has no {shortened(name)}{hint}") from error
    return value


def _import_longest(names: Sequence[str]) -> tuple[ModuleType, Sequence[str]]:
    try:
        module = _import(names[0], "cannot be imported")
    except _AbsentError as error:
        hint = f"if it is your code, {_where_to_run(names[:-1] or names)}"
        if names[0] in _EXTRAS:
            hint = f"pip install 'stepwrap[{_EXTRAS[names[0]]}]'"
        raise ImportError(f"package {shortened(names[0])} is not installed; {hint}") from error
    for at, name in enumerate(names[1:], start=1):
        present = getattr(module, name, None)
        if present is not None and not isinstance(present, ModuleType):
            return module, names[at:]
        try:
            module = _import(".".join(names[: at + 1]), "cannot be imported")
        except _AbsentError:
            return module, names[at:]
    return module, ()


class _AbsentError(ImportError):
    """The module does not exist."""


class FailedImportError(ImportError):
    """A module exists but fails to import; the error that it raised is the cause."""


def _import(name: str, how: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except IMPORT_FAILURES as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise _AbsentError(_absent(name)) from error
        remedy = _OTHER_BUILD if "operator torchvision::" in str(error) else ""
        raise FailedImportError(f"{name} {how}: {describe_at(error)}{remedy}") from error


class ModuleSources:
    """The modules behind a ``Registry``, imported when a name is not registered."""

    def __init__(
        self, locations: Iterable[str], namespaces: Iterable[str], kind: str | None
    ) -> None:
        self.locations = tuple(locations)
        self.namespaces = tuple(namespaces)
        self.kind = kind
        self.failures: dict[str, FailedImportError] = {}
        self._modules: dict[str, ModuleType | None] = {}

    def load_locations(self) -> None:
        """Import the locations that have not been imported; keep failures instead of raising."""
        for name in self.locations:
            self._load(name)

    def find(self, name: str) -> Callable[..., Any] | None:
        """Return the class with that name from the first namespace that has one."""
        for namespace in self.namespaces:
            member = getattr(self._load(namespace), name, None)
            if inspect.isclass(member) and self._offers(namespace, name, member):
                return member
        return None

    def names(self) -> list[str]:
        """Return the names of the public subclasses of ``kind`` in all namespaces."""
        base = object if self.kind is None else import_path(self.kind)
        return [
            name
            for namespace in self.namespaces
            for name, member in self._classes(namespace).items()
            if issubclass(member, base)
        ]

    def summaries(self, namespace: str) -> dict[str, str]:
        """Return the first docstring lines of a namespace's public classes by name."""
        classes = self._classes(namespace).items()
        return {name: (member.__doc__ or "").strip().partition("\n")[0] for name, member in classes}

    def _classes(self, namespace: str) -> dict[str, type]:
        members = inspect.getmembers(self._load(namespace), inspect.isclass)
        return {name: member for name, member in members if self._offers(namespace, name, member)}

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
            # Set before the import: the module may look up names while it is imported.
            self._modules[name] = None
            try:
                self._modules[name] = importlib.import_module(name)
            except IMPORT_FAILURES as error:
                failure = FailedImportError(f"{name} failed to import: {describe_at(error)}")
                failure.__cause__ = error
                self.failures[name] = failure
        return self._modules[name]


def anchored(entry: str, folder: Path) -> str:
    """Return an ``imports`` entry that means the same in every working directory.

    The path of a .py file is relative to ``folder``, which contains the config, and becomes
    absolute. The name of a module that is a file in ``folder``, and not in the working directory,
    becomes the absolute path of that file. Other names stay as they are.
    """
    if entry.endswith(".py"):
        return os.path.abspath(folder / entry)
    file = folder / f"{entry}.py"
    # os.path.isfile also accepts names that are not valid paths.
    if folder.resolve() != Path.cwd().resolve() and os.path.isfile(file):
        in_cwd = [Path.cwd() / f"{entry}.py", Path.cwd() / entry]
        if not any(os.path.exists(path) for path in in_cwd):
            return os.path.abspath(file)
    return entry


def find_entry(entry: str) -> None:
    """Raise ImportError if the file or the top-level module of an entry does not exist."""
    if entry.endswith(".py"):
        if not os.path.isfile(entry):
            raise ImportError(f"the file {shortened(entry)} does not exist")
        return
    if not _is_importable(entry.partition(".")[0]):
        raise ImportError(_absent(entry))


def _is_importable(top: str) -> bool:
    """Return whether a top-level module with that name exists; nothing is imported."""
    return top in sys.modules or (top.isidentifier() and find_spec(top) is not None)


def _absent(name: str) -> str:
    hint = _where_to_run(name.split("."))
    return f"the module {shortened(name)} was not found in {Path.cwd()}; {hint}"


def _where_to_run(names: Sequence[str]) -> str:
    top = f"{names[0]}/" if len(names) > 1 else f"{names[0]}.py"
    return f"run this from the folder that contains {shortened(top)}"


def import_entry(entry: str) -> None:
    """Import a module by name, or a .py file by its name within its package."""
    if not entry.endswith(".py"):
        _import(entry, "failed to import")
        return
    find_entry(entry)
    path = Path(entry).resolve()
    names = [] if path.name == "__init__.py" else [path.stem]
    folder = path.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    make_importable(folder)
    module = _import(".".join(names), "failed to import")
    if Path(module.__file__ or "").resolve() != path:
        message = f"{path} cannot be imported as {module.__name__}, which is {module.__file__}"
        raise ImportError(message)


def make_importable(folder: Path) -> None:
    """Put ``folder`` first on the import path, unless it is already there."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def make_found_in(folder: Path, modules: Iterable[str]) -> None:
    """Make ``folder`` importable if one of ``modules`` is there and is not found elsewhere."""
    for top in {name.partition(".")[0] for name in modules}:
        if not _is_importable(top) and PathFinder.find_spec(top, [str(folder)]) is not None:
            make_importable(folder)


def find_folders(modules: Iterable[str]) -> list[str]:
    """Return the folders from which the user's modules among ``modules`` were imported."""
    folders: dict[str, None] = {}
    for top in {name.partition(".")[0]: None for name in modules}:
        spec = getattr(sys.modules.get(top), "__spec__", None)
        if spec is None or top == __package__.partition(".")[0]:
            continue
        locations = spec.submodule_search_locations or [spec.origin or ""]
        # Built-in modules and packages found by an editable install's hook have no file.
        files = [
            os.path.abspath(location)
            for location in locations
            if location and os.path.exists(location)
        ]
        folders |= dict.fromkeys(os.path.dirname(file) for file in files if is_users_file(file))
    return [*folders]


def where_defined(name: str) -> list[str]:
    """Return sentences that say where ``name`` is defined in the working directory, with advice.

    There are at most three, for the modules that are the least nested. Only modules that can be
    imported from the working directory are searched, without importing them. Hidden folders,
    environments and build folders are skipped, and the search is limited in time, depth and number
    of files.
    """
    if not name.isidentifier():
        return []
    definition = re.compile(rf"^\s*(?:class|def)\s+{re.escape(name)}\b", re.MULTILINE)
    definitions: list[str] = []
    for path in islice(_source_files(Path.cwd()), _MAX_FILES):
        if len(definitions) >= _MAX_PROPOSALS:
            break
        try:
            text = path.read_text(encoding="utf-8")
            if name in text and definition.search(text):
                definitions += _definitions_in(ast.parse(text), name, path.relative_to(Path.cwd()))
        except (OSError, ValueError, SyntaxError, RecursionError):
            # A file that cannot be read or parsed cannot be imported either.
            continue
    return definitions[:_MAX_PROPOSALS]


def _source_files(root: Path) -> Iterator[Path]:
    """Yield the modules that can be imported from ``root``, least nested first."""
    stop = time.monotonic() + _MAX_SECONDS
    folders = [root]
    for _ in range(_MAX_DEPTH):
        below: list[Path] = []
        for entry in (entry_path for folder in folders for entry_path in _entries(folder)):
            if time.monotonic() > stop:
                return
            if entry.suffix not in ("", ".py") or not entry.stem.isidentifier():
                continue
            if entry.parent == root and not _is_top(entry):
                continue
            if entry.suffix:
                yield entry
            elif entry.name not in _SKIPPED and not entry.is_symlink() and entry.is_dir():
                below.append(entry)
        folders = below


def _entries(folder: Path) -> list[Path]:
    try:
        return [] if (folder / "pyvenv.cfg").exists() else sorted(folder.iterdir())
    except OSError:
        return []


def _is_top(path: Path) -> bool:
    """Return whether importing the name of this file or folder would load it.

    Another file or package on the import path may have the same name.
    """
    loaded = getattr(sys.modules.get(path.stem), "__spec__", None)
    spec = loaded or PathFinder.find_spec(path.stem, [str(path.parent), *sys.path])
    locations = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    return str(path) in locations


def _definitions_in(tree: ast.Module, name: str, path: Path) -> Iterator[str]:
    module = ".".join(path.with_suffix("").parts)
    # Read `__dict__`: getattr may make a lazy module import something.
    loaded = [
        getattr(loaded_module, "__dict__", {}).get("__file__")
        for loaded_module in list(sys.modules.values())
    ]
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            advice = f"but was never imported: write type: {module}.{name}"
            if str(path.absolute()) in loaded:
                advice = f"but is not registered here: write type: {module}.{name}"
            elif any("register_module" in ast.dump(decorator) for decorator in node.decorator_list):
                advice = f"but was never imported: add {module} to imports"
            yield f"{kind} {name} is defined in {path}:{node.lineno} {advice}"
