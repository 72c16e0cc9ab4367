"""Reading a config file of mmengine: its settings, and the line of each."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from ..registry import ConfigError, Problem

_DELETE = "_delete_"


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
    try:
        lines = _Lines(path)
        settings = _by_mmengine(path) if find_spec("mmengine") else _by_python(path)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        text = f"it cannot be executed: {type(error).__name__}: {error}"
        raise ConfigError([Problem("", text, str(path))]) from error
    return Source(settings, lines.found, frozenset(lines.read))


def _by_mmengine(path: Path) -> dict[str, Any]:
    config = import_module("mmengine.config").Config.fromfile(str(path))
    settings: dict[str, Any] = config.to_dict()
    return settings


def _by_python(path: Path) -> dict[str, Any]:
    """Execute a file that holds plain values, and the files that it names in `_base_`."""
    if any(isinstance(node, ast.With) for node in ast.parse(path.read_text("utf-8")).body):
        what = "it uses read_base(): install mmengine to convert it"
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


class _Lines:
    """The lines of the values in a file and the files below it.

    Attributes:
        found: "file:line" by key path; what is nearer to the top goes before.
        read: names that are read in expressions.
    """

    def __init__(self, path: Path) -> None:
        self.found: dict[tuple[str, ...], str] = {}
        self.read: set[str] = set()
        self._seen: set[Path] = set()
        self._add(path)

    def _add(self, path: Path) -> None:
        self._seen.add(path.resolve())
        tree = ast.parse(path.read_text("utf-8"))
        for base in _bases(tree, path):
            if base.is_file() and base.resolve() not in self._seen:
                self._add(base)
        values: dict[str, ast.expr] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self.read.add(node.id)
        for statement in tree.body:
            if isinstance(statement, ast.Assign):
                for target in statement.targets:
                    if isinstance(target, ast.Name):
                        values[target.id] = statement.value
                    self._note(_path_of(target), statement.value, f"{path}", values)

    def _note(
        self, key: tuple[str, ...], node: ast.expr, file: str, values: Mapping[str, ast.expr]
    ) -> None:
        if not key:
            return
        self.found[key] = f"{file}:{node.lineno}"
        if isinstance(node, ast.Name) and node.id in values and (node.id,) != key:
            # What another variable holds is said where that is set.
            node = values[node.id]
        for name, child in _children(node):
            self._note((*key, name), child, file, values)


def _children(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Call):
        yield from ((word.arg, word.value) for word in node.keywords if word.arg)
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant):
                yield str(key.value), value
    elif isinstance(node, (ast.List, ast.Tuple)):
        yield from ((str(at), item) for at, item in enumerate(node.elts))


def _path_of(target: ast.expr) -> tuple[str, ...]:
    """Return the key path that an assignment sets: `a`, `a.b` or `a["b"]`."""
    if isinstance(target, ast.Name):
        return (target.id,)
    if isinstance(target, ast.Attribute):
        above = _path_of(target.value)
        return (*above, target.attr) if above else ()
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        above = _path_of(target.value)
        return (*above, str(target.slice.value)) if above else ()
    return ()


def _bases(tree: ast.Module, path: Path) -> Iterator[Path]:
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            if any(isinstance(one, ast.Name) and one.id == "_base_" for one in statement.targets):
                with suppress(ValueError):
                    names = _listed(ast.literal_eval(statement.value))
                    yield from (path.parent / name for name in names if isinstance(name, str))
        elif isinstance(statement, ast.With):
            for inner in statement.body:
                if isinstance(inner, ast.ImportFrom) and inner.level and inner.module:
                    folder = path.parents[inner.level - 1]
                    yield folder.joinpath(*inner.module.split(".")).with_suffix(".py")
