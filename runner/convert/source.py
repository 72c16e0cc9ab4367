"""Reading a config file of mmengine: its settings, and the line of each."""

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
from typing import Any, NamedTuple

from ...registry import ConfigError, Problem

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
        raise _error(f"there is no file {path}")
    if path.suffix != ".py":
        raise _error(f"{path} must be a .py file, as mmengine's configs are")
    try:
        lines = Lines(path)
        settings = _by_mmengine(path) if find_spec("mmengine") else _by_python(path)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        text = f"it cannot be executed: {type(error).__name__}: {error}"
        raise _error(text, path) from error
    return Source(settings, lines.found, frozenset(lines.read))


def _error(what: str, origin: Path | str = "") -> ConfigError:
    return ConfigError([Problem("", what, str(origin))])


def _by_mmengine(path: Path) -> dict[str, Any]:
    try:
        config_of = import_module("mmengine.config").Config.fromfile
        # For the names that configs use; it needs more than the above.
        import_module("mmengine.registry")
    except ImportError as error:
        text = f"mmengine, which is to read it, cannot be imported: {error}"
        raise _error(text, path) from error
    settings: dict[str, Any] = config_of(str(path)).to_dict()
    return settings


def _by_python(path: Path) -> dict[str, Any]:
    """Execute a file that holds plain values, and the files that it names in `_base_`."""
    used = _THEIRS.search(path.read_text("utf-8"))
    if used is not None:
        raise _error(f"it uses {used.group()}: install mmengine to convert it", path)
    variables = runpy.run_path(str(path))
    own = {
        name: value
        for name, value in variables.items()
        if not name.startswith("_") and not isinstance(value, (ModuleType, FunctionType, type))
    }
    bases = variables.get("_base_", ())
    settings: dict[str, Any] = {}
    for base in bases if isinstance(bases, (list, tuple)) else [bases]:
        settings = _merged(settings, _by_python(path.parent / base))
    return _merged(settings, own)


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


class _Value(NamedTuple):
    """An expression and the file that it stands in."""

    node: ast.expr
    file: str


class Lines:
    """The lines of the values in a file and the files below it.

    Attributes:
        found: "file:line" by key path; what is nearer to the top goes before.
        read: names that are read in expressions.
    """

    def __init__(self, path: Path) -> None:
        self.found: dict[tuple[str, ...], str] = {}
        self.read: set[str] = set()
        self._seen: set[Path] = set()
        self._variables: dict[str, _Value] = {}
        self._add(path)

    def _add(self, path: Path) -> None:
        self._seen.add(path.resolve())
        tree = ast.parse(path.read_text("utf-8"), str(path))
        for base in _bases(tree, path):
            # Others, such as YAML, have no lines here.
            if base.suffix == ".py" and base.is_file() and base.resolve() not in self._seen:
                self._add(base)
        for node in ast.walk(tree):
            name = _variable(node)
            if name is not None and isinstance(getattr(node, "ctx", None), ast.Load):
                self.read.add(name)
        for statement in _statements(tree.body):
            for key, value in _settings_of(statement):
                given = _Value(value, str(path))
                self._note(key, given)
                if len(key) == 1:
                    self._variables[key[0]] = self._meant(given)

    def _note(self, key: tuple[str, ...], value: _Value) -> None:
        self.found[key] = f"{value.file}:{value.node.lineno}"
        for name, child in self._children(self._meant(value)):
            self._note((*key, name), child)

    def _meant(self, value: _Value) -> _Value:
        """Return what a variable holds: that is said where it is set."""
        name = _variable(value.node)
        return value if name is None else self._variables.get(name, value)

    def _children(self, value: _Value) -> Iterator[tuple[str, _Value]]:
        node = value.node
        if isinstance(node, (ast.List, ast.Tuple)):
            yield from ((str(at), _Value(one, value.file)) for at, one in enumerate(node.elts))
            return
        for key, child in _items(node):
            inner = _Value(child, value.file)
            if key is None:
                # dict(other, ...) and {**other}: what comes later goes before.
                yield from self._children(self._meant(inner))
            else:
                yield key, inner


def _items(node: ast.expr) -> Iterator[tuple[str | None, ast.expr]]:
    """Yield what a dict is made of by key; another dict that goes into it whole by None."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        yield from ((None, one) for one in node.args)
        yield from ((word.arg, word.value) for word in node.keywords)
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                yield None, value
            elif isinstance(key, ast.Constant):
                yield str(key.value), value


def _variable(node: ast.AST) -> str | None:
    """Return the variable that an expression names: `a`, `_base_.a` or `{{_base_.a}}`."""
    while isinstance(node, ast.Set) and len(node.elts) == 1:
        node = node.elts[0]
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and _variable(node.value) == "_base_":
        return node.attr
    return None


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements and those inside of them, but of no function or class."""
    for statement in body:
        yield statement
        for part in ("body", "orelse", "finalbody"):
            if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from _statements(getattr(statement, part, ()))


def _settings_of(statement: ast.stmt) -> Iterator[tuple[tuple[str, ...], ast.expr]]:
    """Yield what a statement sets by key path: `a = b`, `a.b["c"] += d`, `a.update(b=c)`."""
    pairs: list[tuple[ast.expr, ast.expr | None]] = []
    if isinstance(statement, ast.Assign):
        pairs = [(target, statement.value) for target in statement.targets]
    elif isinstance(statement, ast.AnnAssign):
        pairs = [(statement.target, statement.value)]
    elif isinstance(statement, ast.AugAssign):
        # What it has so far keeps its lines.
        pairs = [(statement.target, statement.target)]
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        yield from _changed(statement.value)
    for target, value in pairs:
        key = _path_of(target)
        if key and value is not None:
            yield key, value


def _changed(call: ast.Call) -> Iterator[tuple[tuple[str, ...], ast.expr]]:
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "update":
        return
    key = _path_of(call.func.value)
    given = [item for one in call.args for item in _items(one)]
    given += [(word.arg, word.value) for word in call.keywords]
    yield from (((*key, name), value) for name, value in given if key and name is not None)


def _path_of(target: ast.expr) -> tuple[str, ...]:
    """Return the key path that an assignment sets: `a`, `a.b` or `a["b"]`."""
    if isinstance(target, ast.Name):
        return (target.id,)
    key = getattr(target, "attr", None)
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        key = str(target.slice.value)
    above = _path_of(target.value) if isinstance(target, (ast.Attribute, ast.Subscript)) else ()
    return (*above, key) if above and key is not None else ()


def _bases(tree: ast.Module, path: Path) -> Iterator[Path]:
    """Yield the files that a config is laid over."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            if any(isinstance(one, ast.Name) and one.id == "_base_" for one in statement.targets):
                with suppress(ValueError):
                    named = ast.literal_eval(statement.value)
                    names = named if isinstance(named, (list, tuple)) else [named]
                    yield from (path.parent / name for name in names if isinstance(name, str))
        elif isinstance(statement, ast.With):
            for inner in statement.body:
                if isinstance(inner, ast.ImportFrom) and inner.module:
                    yield from _imported(inner.module.split("."), inner.level, path)


def _imported(names: list[str], level: int, path: Path) -> Iterator[Path]:
    """Yield the file of a module, relative to that in `path` or installed."""
    folder = None
    if level:
        folder = path.parents[level - 1]
    else:
        spec = find_spec(names[0])
        places = spec.submodule_search_locations if spec is not None else None
        folder, names = Path(places[0]) if places else None, names[1:]
    if folder is not None:
        yield folder.joinpath(*names).with_suffix(".py")
