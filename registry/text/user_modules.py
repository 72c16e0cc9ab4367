"""Modules of the user that a config names in `imports`."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path

from ..errors import describe_at, shortened
from ..imports import IMPORT_FAILURES, FailedImportError


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
        raise ImportError(_no_module(entry))


def import_entry(entry: str) -> None:
    """Import a module by name, or a .py file under its name within its package.

    Raises:
        ImportError: it is not there, fails, or another module has its name.
    """
    name, path = entry, None
    if entry.endswith(".py"):
        find_entry(entry)
        path = Path(entry).resolve()
        root, name = _package_root(path)
        make_importable(root)
    try:
        module = importlib.import_module(name)
    except IMPORT_FAILURES as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            raise ImportError(_no_module(name)) from error
        raise FailedImportError(f"{entry} failed to import: {describe_at(error)}") from error
    if path is not None and Path(module.__file__ or "").resolve() != path:
        raise ImportError(f"{path} cannot be imported as {name}: that is {module.__file__}")


def _no_module(name: str) -> str:
    return f"there is no module {shortened(name)} in {Path.cwd()}"


def make_importable(folder: Path) -> None:
    """Let modules in `folder` be imported, before others of the same name, as Python does."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _package_root(path: Path) -> tuple[Path, str]:
    parts = [] if path.name == "__init__.py" else [path.stem]
    folder = path.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(parts)
