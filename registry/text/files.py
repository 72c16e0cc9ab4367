"""Read config files, YAML or Python, with their base files and the line of each value."""

import os
import re
import runpy
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ...primitives.suggestions import did_you_mean, join_choices, nearest
from ..errors import ConfigError, Problem, describe, shortened, shown, shown_value
from ..imports import IMPORT_FAILURES
from .values import (
    BASE,
    MAX_DEPTH,
    MAX_REPEATED,
    TOO_DEEP,
    dotted,
    escaped,
    merge,
    plain,
    remaining_origins,
    walk,
)

_TAG = "tag:yaml.org,2002:"
_SCALAR_TAGS = {_TAG + name for name in ("str", "int", "float", "bool", "null")}
# A plain "=" or "<<" as a value is text.
_TEXT_TAGS = {_TAG + name for name in ("value", "merge")}
# YAML's limit for keys without a question mark.
_MAX_KEY = 1024
_FLOAT = re.compile(
    r"""[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
        |[0-9][0-9_]*[eE][-+]?[0-9]+
        |\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
        |\.(?:inf|Inf|INF))$
        |\.(?:nan|NaN|NAN)$""",
    re.VERBOSE,
)
_SHIPPED = Path(__file__).resolve().parents[2] / "configs"
_MAX_CHAIN = 50


def shipped_configs() -> dict[str, Path]:
    """Map the names of the shipped configs to their files."""
    return {source.stem: source for source in _sources_in(_SHIPPED) if source.suffix != ".py"}


def find_config(name: str | os.PathLike[str], folder: Path, origin: str = "") -> Path:
    """Return a config file: by its path, the path of a run's folder, or the name of a shipped one.

    Relative paths begin at ``folder``.
    """
    path = folder / os.path.expanduser(name)
    # os.path.isfile also accepts names that are not valid paths.
    if os.path.isfile(path):
        return path
    shipped = shipped_configs()
    if str(name) in shipped:
        return shipped[str(name)]
    if os.path.isfile(path / "config.yaml"):
        # The folder of a run has its settings.
        return path / "config.yaml"
    if os.path.isdir(path):
        message = f"{name} is a folder, not a config file"
    else:
        # Only stems are compared: equal suffixes would make all names similar.
        by_stem = {stem: stem for stem in shipped}
        by_stem |= {other.stem: other.name for other in _sources_in(path.parent)}
        runs = [run.parent.name for run in path.parent.glob("*/config.yaml")]
        by_stem |= {run: str(Path(name).with_name(run)) for run in sorted(runs)}
        near = [by_stem[stem] for stem in nearest(path.stem, by_stem)]
        hint = f"; did you mean {join_choices(near)}?" if near else ""
        if not hint and not path.suffix and shipped:
            hint = f"; shipped configs: {', '.join(shipped)}"
        message = f"the config file {shortened(str(name))} does not exist{hint}"
    raise ConfigError([Problem("", message, origin)])


class _File(NamedTuple):
    """The settings that one file sets itself, and the origin of each by dotted path."""

    values: dict[str, Any]
    origins: dict[str, str]


def read_config(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings of a file, merged over its ``_base_`` files, and their origins.

    Each file is merged once, after all files that it is based on. A file in several branches
    therefore undoes nothing that another file sets.

    The origins are texts such as "a.yaml:14" by dotted path, "" for the file as a whole.
    """
    files: dict[Path, _File] = {}
    order = _precedence(Path(os.path.abspath(path)), (), files, {})
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for file in map(files.__getitem__, reversed(order)):
        origins = {**remaining_origins(origins, file.values), **file.origins}
        values = merge(values, file.values)
    return values, origins


def _precedence(
    path: Path,
    including: tuple[Path, ...],
    files: dict[Path, _File],
    orders: dict[Path, list[Path]],
) -> list[Path]:
    """Return a file and those that it is based on; a setting comes from the first that has it.

    The order is the method resolution order of Python's classes (C3), except that later bases
    precede earlier ones. The files are read into ``files``, each once.
    """
    if path in orders:
        return orders[path]
    values, origins = _read_python(path) if path.suffix == ".py" else _read_yaml(path)
    if not isinstance(values, dict):
        message = "the file is empty" if values is None else f"got a {type(values).__name__}"
        raise _error(path, f"a config must hold settings such as `seed: 0`, {message}")
    names = values.pop(BASE, [])
    files[path] = _File(values, origins)
    branches: list[list[Path]] = []
    for at, name in enumerate(names if isinstance(names, list) else [names]):
        origin = origins.get(f"{BASE}.{at}", origins[BASE])
        parent = Path(os.path.abspath(_parent(name, origin, (*including, path))))
        if parent in [branch[0] for branch in branches]:
            raise ConfigError([Problem(BASE, f"{shown(parent)} is listed twice", origin)])
        branches.insert(0, _precedence(parent, (*including, path), files, orders))
    orders[path] = [path, *_linearized(branches, origins.get(BASE, ""))]
    return orders[path]


def _linearized(branches: list[list[Path]], origin: str) -> list[Path]:
    """Return the files of all branches in one order that agrees with each branch."""
    bases = [branch[0] for branch in branches]
    waiting = [branch for branch in [*branches, bases] if branch]
    order: list[Path] = []
    while waiting:
        behind = {path for branch in waiting for path in branch[1:]}
        head = next((branch[0] for branch in waiting if branch[0] not in behind), None)
        if head is None:
            raise ConfigError([Problem(BASE, _contradiction(waiting, bases), origin)])
        order.append(head)
        waiting = [[path for path in branch if path != head] for branch in waiting]
        waiting = [branch for branch in waiting if branch]
    return order


def _contradiction(waiting: list[list[Path]], bases: list[Path]) -> str:
    """Return why no file of the branches can come blocked."""
    for derived, *ancestors in waiting:
        for path in set(ancestors) & set(bases):
            if derived in bases and bases.index(path) < bases.index(derived):
                return f"{shown(path)} must be listed before {shown(derived)}, which is based on it"
    blocked = waiting[0][0]
    blocking = next(branch[0] for branch in waiting if blocked in branch[1:])
    names = f"{shown(blocked)} and {shown(blocking)}"
    return f"the files inherit {names} in contradictory orders; list them in the same order"


def _parent(name: Any, origin: str, chain: tuple[Path, ...]) -> Path:
    """Return the file that ``name`` refers to, an entry of ``_base_`` in the file ``chain[-1]``."""
    if isinstance(name, str):
        parent = find_config(name, chain[-1].parent, origin)
        if Path(os.path.abspath(parent)) in chain:
            loop = " -> ".join(shown(file) for file in (*chain, parent))
            message = f"the files include each other: {loop}"
        elif len(chain) > _MAX_CHAIN:
            message = f"more than {_MAX_CHAIN} files are nested"
        else:
            return parent
    else:
        message = f"must be a file or a list of files, got {shown_value(name)}"
    raise ConfigError([Problem(BASE, message, origin)])


def _read_yaml(path: Path) -> tuple[Any, dict[str, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _error(path, f"the file cannot be read: {describe(error)}") from error
    return parse(text, shown(path))


def _read_python(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        names = runpy.run_path(str(path))
        config: Any = names.get("config")
        config = config() if callable(config) else config
    except ConfigError:
        raise
    except IMPORT_FAILURES as error:
        raise _error(path, describe(error), _line_in(path, error)) from error
    if "config" not in names:
        hint = did_you_mean("config", [n for n in names if not n.startswith("_")])
        raise _error(path, f"the file must define `config`, a dict or a function{hint}")
    if not isinstance(config, Mapping):
        raise _error(path, f"`config` must be (or return) a dict, got {type(config).__name__}")
    try:
        values = plain(config)
    except TypeError as error:
        raise _error(path, str(error)) from error
    return values, {dotted(at): shown(path) for at, _ in walk(values)}


def _line_in(path: Path, error: BaseException) -> str:
    """Return ":3" for the line of the file in which an error was raised, "" if unknown."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines.append(error.lineno)
    return f":{lines[-1]}" if lines else ""


def _error(path: Path, message: str, line: str = "") -> ConfigError:
    return ConfigError([Problem("", message, shown(path) + line)])


def _sources_in(folder: Path) -> list[Path]:
    if not os.path.isdir(folder):
        return []
    return sorted(p for p in folder.iterdir() if p.suffix in (".yaml", ".yml", ".py"))


class _Loader(yaml.SafeLoader):
    """Reads plain scalars like PyYAML, but 1e-3 is a number (YAML 1.2) and a date is text."""

    yaml_implicit_resolvers = {
        character: [rule for rule in rules if rule[0] not in (_TAG + "float", _TAG + "timestamp")]
        for character, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes texts that PyYAML or ``_Loader`` would read as another type."""


for kind in (_Loader, _Dumper):
    kind.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+.0123456789"))


def parse(
    text: str, source: str, *, numbered: bool = True, at: tuple[str, ...] = ()
) -> tuple[Any, dict[str, str]]:
    """Return the settings in a YAML text, and the origin of each by dotted path.

    Args:
        source: the name of the file.
        numbered: whether origins have line numbers.
        at: the path of the settings in the config.
    """
    reader = _Reader(text, source, numbered, len(at))
    return reader.read(".".join(at)), reader.origins


def to_yaml(values: dict[str, Any]) -> str:
    """Return settings as YAML text that loads as equal settings."""
    return str(yaml.dump(escaped(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True))


class _Reader:
    def __init__(self, text: str, source: str, numbered: bool, depth: int) -> None:
        self.origins: dict[str, str] = {}
        self._text = text
        self._source = source
        self._numbered = numbered
        self._depth = depth
        self._seen: set[int] = set()
        self._repeated = 0

    def read(self, at: str) -> Any:
        try:
            self._loader = _Loader(self._text)
            top = self._loader.get_single_node()
            self.origins[at] = self._origin(0 if top is None else top.start_mark.line)
            return None if top is None else self._value(top, at, ())
        except yaml.reader.ReaderError as error:
            line = self._text.count("\n", 0, int(error.position))
            message = f"the character {chr(error.character)!r} is not allowed"
            raise self._error(line, message) from error
        except yaml.MarkedYAMLError as error:
            from .syntax import explain

            line, message = explain(error, self._text)
            raise self._error(line, f"not valid YAML: {message}") from error
        except RecursionError as error:
            raise self._error(0, TOO_DEEP) from error

    def _origin(self, line: int) -> str:
        return f"{self._source}:{line + 1}" if self._numbered else self._source

    def _error(self, line: int, message: str, key: str = "") -> ConfigError:
        return ConfigError([Problem(key, message, self._origin(line))])

    def _value(self, node: Any, at: str, above: tuple[int, ...]) -> Any:
        line = node.start_mark.line
        if id(node) in above:
            raise self._error(line, "an alias that contains itself")
        if self._depth + len(above) > MAX_DEPTH:
            raise self._error(line, TOO_DEEP)
        self._repeated += id(node) in self._seen
        self._seen.add(id(node))
        if self._repeated > MAX_REPEATED:
            message = f"aliases of aliases that repeat more than {MAX_REPEATED:,} values"
            raise self._error(line, message)
        above = (*above, id(node))
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, at, above)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            numbered = enumerate(node.value)
            return [
                self._child(child, i, at, child.start_mark.line, above) for i, child in numbered
            ]
        return self._scalar(node)

    def _child(self, node: Any, key: object, at: str, line: int, above: tuple[int, ...]) -> Any:
        path = f"{at}.{key}" if at else str(key)
        self.origins[path] = self._origin(line)
        return self._value(node, path, above)

    def _mapping(self, node: Any, at: str, above: tuple[int, ...]) -> dict[str | int, Any]:
        lines: dict[str, int] = {}
        keys: list[tuple[str | int, Any]] = []
        values: dict[str | int, Any] = {}
        for key_node, value in node.value:
            if key_node.tag == _TAG + "merge":
                values |= self._merged(value, at, above)
                continue
            key, line = self._key(key_node), key_node.start_mark.line
            if not at and key == "":
                raise self._error(line, "a setting needs a name")
            if str(key) in lines:
                first_line = lines[str(key)] + 1
                raise self._error(line, f"this key is already set in line {first_line}", str(key))
            lines[str(key)] = line
            keys.append((key, value))
        # Read these values after the merged sections, whose origins they replace.
        for key, value in keys:
            values[key] = self._child(value, key, at, lines[str(key)], above)
        return values

    def _merged(self, node: Any, at: str, above: tuple[int, ...]) -> dict[str | int, Any]:
        """Return the settings of the sections of a ``<<``; the first section takes precedence."""
        settings: dict[str | int, Any] = {}
        for source in node.value[::-1] if isinstance(node, yaml.SequenceNode) else [node]:
            values = self._value(source, at, above)
            if not isinstance(values, dict):
                message = "`<<` takes a section, or a list of sections, by alias"
                raise self._error(source.start_mark.line, message)
            settings |= values
        return settings

    def _key(self, node: Any) -> str | int:
        key = self._scalar(node)
        line = node.start_mark.line
        if isinstance(key, bool) or not isinstance(key, str | int):
            message = f"a key must be text or a whole number, got {key!r}; put it in quotes"
            raise self._error(line, message)
        if len(node.value) > _MAX_KEY:
            message = f"a key of {len(node.value):,} characters; at most {_MAX_KEY:,} are allowed"
            raise self._error(line, message)
        return key

    def _scalar(self, node: Any) -> Any:
        line = node.start_mark.line
        if node.tag in _TEXT_TAGS:
            return node.value
        if not isinstance(node, yaml.ScalarNode) or node.tag not in _SCALAR_TAGS:
            kind = node.tag.replace(_TAG, "!!")
            raise self._error(line, f"a config cannot hold a value of the kind {kind}")
        try:
            # Escapes in a text may produce lone surrogates, which cannot be written to a file.
            node.value.encode()
            return self._loader.construct_object(node)
        except (ValueError, KeyError) as error:
            message = f"not valid YAML: {shown_value(node.value)} is not a value"
            raise self._error(line, message) from error
