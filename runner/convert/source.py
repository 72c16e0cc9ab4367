"""Read a config file of mmengine: its settings, and the line of each."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from ...registry import ConfigError, Problem

_DELETE = "_delete_"
# Syntax that only mmengine can execute, and references to values of another file.
_MMENGINE_SYNTAX = re.compile(r"read_base\(\)|\{\{|\b_base_\.")


def read_source(path: Path) -> tuple[dict[str, Any], Lines]:
    """Execute a config file, with mmengine if it is installed, and return settings and lines.

    Raises:
        ConfigError: the file cannot be read.
    """
    if not path.is_file():
        raise _error(f"{path} does not exist or is not a file")
    if path.suffix != ".py":
        raise _error(f"an mmengine config must be a .py file, got {path}")
    try:
        lines = Lines(path)
        return _load_by_mmengine(path) if find_spec("mmengine") else _load_by_python(path), lines
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        text = f"it cannot be executed: {type(error).__name__}: {error}"
        raise _error(text, path) from error


def _error(message: str, origin: Path | str = "") -> ConfigError:
    return ConfigError([Problem("", message, str(origin))])


def _load_by_mmengine(path: Path) -> dict[str, Any]:
    try:
        config_of = import_module("mmengine.config").Config.fromfile
        # Registers the names that configs use; it has further dependencies.
        import_module("mmengine.registry")
    except ImportError as error:
        text = f"reading it needs mmengine, which cannot be imported: {error}"
        raise _error(text, path) from error
    settings: dict[str, Any] = config_of(str(path)).to_dict()
    return settings


def _load_by_python(path: Path) -> dict[str, Any]:
    """Execute a plain Python config and its ``_base_`` files; reject mmengine's syntax."""
    used = _MMENGINE_SYNTAX.search(path.read_text("utf-8"))
    if used is not None:
        raise _error(f"it uses {used.group()}: install mmengine to convert it", path)
    variables = runpy.run_path(str(path))
    bases = variables.get("_base_", ())
    settings: dict[str, Any] = {}
    for base in bases if isinstance(bases, (list, tuple)) else [bases]:
        inherited = _load_by_python(path.parent / base)
        if repeated := ", ".join(settings.keys() & inherited.keys()):
            # An error in mmengine too.
            raise _error(f"several of its base files set {repeated}", path)
        settings |= inherited
    module_settings = {
        name: value
        for name, value in variables.items()
        if not name.startswith("_") and not isinstance(value, (ModuleType, FunctionType, type))
    }
    return _merged(settings, module_settings)


def _merged(base: Any, top: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``top`` over ``base``, dict by dict."""
    keeps = isinstance(base, Mapping) and not top.get(_DELETE)
    result = dict(base) if keeps else {}
    for key, value in top.items():
        if key != _DELETE:
            is_section = isinstance(value, Mapping)
            result[key] = _merged(result.get(key), value) if is_section else value
    return result


class Lines:
    """The line of each value in a file and its base files; the file itself takes precedence.

    Attributes:
        read: names of the variables that expressions in the files use.
    """

    def __init__(self, path: Path) -> None:
        self.read: set[str] = set()
        self._files: set[Path] = set()
        self._origins: dict[str, str] = {}  # "file:line" by key path
        self._add(path)

    def origin(self, key: str) -> str:
        """Return the line that sets a key path, or the nearest section above it."""
        while key and key not in self._origins:
            key = key.rpartition(".")[0]
        return self._origins.get(key, "")

    def _add(self, path: Path) -> None:
        self._files.add(path.resolve())
        tree = ast.parse(path.read_text("utf-8"), str(path))
        for base in _bases(tree, path):
            # Lines are known for Python files only, not for YAML and the like.
            if base.suffix == ".py" and base.is_file() and base.resolve() not in self._files:
                self._add(base)
        for node in ast.walk(tree):
            name = _variable(node)
            if name is not None and isinstance(getattr(node, "ctx", None), ast.Load):
                self.read.add(name)
        for statement in _statements(tree.body):
            self._add_statement(statement, path)

    def _add_statement(self, statement: ast.stmt, file: Path) -> None:
        """Record the lines set by ``a = b``, ``a.b["c"] += d`` or ``a.update(b=c)``."""
        match statement:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._set(_find_path(target), value, file)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._set(_find_path(target), value, file)
            case ast.AugAssign(target=target):
                # Existing items keep their lines.
                self._set(_find_path(target), target, file)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=target)) as call):
                self._set_items(_find_path(target), call, file)

    def _set(self, key: str, node: ast.expr, file: Path) -> None:
        if key:
            self._set_items(key, node, file)
            self._origins[key] = f"{file}:{node.lineno}"

    def _set_items(self, above: str, node: ast.expr, file: Path) -> None:
        variable = _variable(node)
        # If the node is a variable, its items keep the lines that set them.
        for key, origin in list(self._origins.items()) if variable else ():
            if key.startswith(f"{variable}."):
                self._origins[f"{above}{key.removeprefix(str(variable))}"] = origin
        for name, value in _items(node):
            if name is None:
                self._set_items(above, value, file)
            else:
                self._set(f"{above}.{name}", value, file)


def _items(node: ast.expr) -> Iterator[tuple[str | None, ast.expr]]:
    """Yield the items of a dict or list; the key None stands for a dict that is merged into it."""
    match node:
        case ast.List(elts=values) | ast.Tuple(elts=values):
            yield from ((str(at), value) for at, value in enumerate(values))
        case ast.Call(
            func=ast.Name(id="dict") | ast.Attribute(attr="update"), args=args, keywords=words
        ):
            yield from ((None, value) for value in args)
            yield from ((word.arg, word.value) for word in words)
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                if key is None:
                    yield None, value
                elif isinstance(key, ast.Constant):
                    yield str(key.value), value


def _variable(node: ast.AST) -> str | None:
    """Return the variable of ``a``, ``_base_.a`` or ``{{_base_.a}}``; None for other code."""
    match node:
        case ast.Set(elts=[inner]):
            return _variable(inner)
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=inner, attr=name) if _variable(inner) == "_base_":
            return name
    return None


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements and those nested in them, except inside functions and classes."""
    for statement in body:
        yield statement
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for block in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, block, ()))


def _find_path(target: ast.expr) -> str:
    """Return the key path of the assignment target ``a``, ``a.b`` or ``a["b"]``, otherwise ""."""
    match target:
        case ast.Name(id=name):
            return name
        case (
            ast.Attribute(value=above, attr=key)
            | ast.Subscript(value=above, slice=ast.Constant(value=key))
        ):
            path = _find_path(above)
            return path and f"{path}.{str(key)}"
    return ""


def _bases(tree: ast.Module, path: Path) -> Iterator[Path]:
    """Yield the base files of a config."""
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="_base_")], value=value):
                with suppress(ValueError):
                    named = ast.literal_eval(value)
                    names = named if isinstance(named, (list, tuple)) else [named]
                    yield from (path.parent / name for name in names if isinstance(name, str))
            case ast.With(body=body):
                for inner in body:
                    if isinstance(inner, ast.ImportFrom) and inner.module:
                        yield from _imported(inner.module.split("."), inner.level, path)


def _imported(names: list[str], level: int, path: Path) -> Iterator[Path]:
    """Yield the file of a module that is relative to ``path`` or installed."""
    locations = [str(path.parents[level - 1])] if level else None
    if not level:
        spec = find_spec(names[0])
        locations, names = spec.submodule_search_locations if spec is not None else None, names[1:]
    if locations:
        yield Path(locations[0]).joinpath(*names).with_suffix(".py")
