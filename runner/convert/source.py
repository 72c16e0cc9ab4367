"""Reading a config file of mmengine: its settings, and the line of each."""

from __future__ import annotations

import re
import runpy
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from ...registry import ConfigError, Problem
from .lines import Lines

_DELETE = "_delete_"
# What is no plain Python, or names another file's values.
_THEIRS = re.compile(r"read_base\(\)|\{\{|\b_base_\.")


class Source(NamedTuple):
    """A config file that was executed.

    Attributes:
        settings: its variables, those of its base files among them.
        lines: "file:line" by key path, such as ("model", "type").
        read: names that the files themselves make use of.
    """

    settings: dict[str, Any]
    lines: dict[tuple[str, ...], str]
    read: frozenset[str]

    def origin(self, key: str) -> str:
        """Return the line that sets a key path, or the nearest section above it."""
        parts = tuple(key.split("."))
        while parts and parts not in self.lines:
            parts = parts[:-1]
        return self.lines.get(parts, "")


def read_source(path: Path) -> Source:
    """Execute a config file and return its settings; by mmengine where that is installed.

    Raises:
        ConfigError: it cannot be read.
    """
    if not path.is_file():
        raise ConfigError([Problem("", f"there is no file {path}")])
    if path.suffix != ".py":
        what = f"{path} must be a .py file, as mmengine's configs are"
        raise ConfigError([Problem("", what)])
    try:
        lines = Lines(path)
        settings = _by_mmengine(path) if find_spec("mmengine") else _by_python(path)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        text = f"it cannot be executed: {type(error).__name__}: {error}"
        raise ConfigError([Problem("", text, str(path))]) from error
    return Source(settings, lines.found, frozenset(lines.read))


def _by_mmengine(path: Path) -> dict[str, Any]:
    try:
        config_of = import_module("mmengine.config").Config.fromfile
        # For the names that configs use; it needs more than the above.
        import_module("mmengine.registry")
    except ImportError as error:
        text = f"mmengine, which is to read it, cannot be imported: {error}"
        raise ConfigError([Problem("", text, str(path))]) from error
    settings: dict[str, Any] = config_of(str(path)).to_dict()
    return settings


def _by_python(path: Path) -> dict[str, Any]:
    """Execute a file that holds plain values, and the files that it names in `_base_`."""
    used = _THEIRS.search(path.read_text("utf-8"))
    if used is not None:
        what = f"it uses {used.group()}: install mmengine to convert it"
        raise ConfigError([Problem("", what, str(path))])
    variables = runpy.run_path(str(path))
    own = {
        name: value
        for name, value in variables.items()
        if not name.startswith("_") and not isinstance(value, (ModuleType, FunctionType, type))
    }
    settings: dict[str, Any] = {}
    for base in _listed(variables.get("_base_", ())):
        settings = _merged(settings, _by_python(path.parent / base))
    return _merged(settings, own)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _merged(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Lay the settings of `top` over those of `base`, dict by dict."""
    result = dict(base)
    for key, value in top.items():
        if not isinstance(value, Mapping):
            result[key] = value
            continue
        below = result.get(key)
        keeps = isinstance(below, Mapping) and not value.get(_DELETE)
        own = {name: one for name, one in value.items() if name != _DELETE}
        result[key] = _merged(below if keeps and isinstance(below, Mapping) else {}, own)
    return result
