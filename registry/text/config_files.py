"""Reading config files: YAML or Python, with the files that they build on."""

import importlib.util
import os
import runpy
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError, Problem, describe, did_you_mean, nearest, one_of, shortened, shown
from ..imports import IMPORT_FAILURES
from .nodes import Node, Origin, from_plain, merge
from .yaml_text import parse

_BASE = "_base_"
_SHIPPED = "stepwrap.configs"
_MAX_CHAIN = 50


def find_config(name: str | os.PathLike[str], folder: Path, origin: str = "") -> Path:
    """Return the file that a path (relative to `folder`) or the name of a shipped config means.

    Raises:
        ConfigError: there is no such file.
    """
    path = folder / os.path.expanduser(name)
    # os.path's: a name that no path can have is that of no file.
    if os.path.isfile(path):
        return path
    shipped = _shipped_configs()
    if str(name) in shipped:
        return shipped[str(name)]
    if os.path.isdir(path):
        what = f"{name} is a folder, not a config file"
    else:
        # The suffix is the same for all, so only the stems are compared.
        by_stem = {other.stem: other.name for other in _sources_in(path.parent)}
        by_stem = {stem: stem for stem in shipped} | by_stem
        near = [by_stem[stem] for stem in nearest(path.stem, by_stem)]
        hint = f"; did you mean {one_of(near)}?" if near else ""
        if not hint and not path.suffix and shipped:
            hint = f"; shipped configs: {', '.join(shipped)}"
        what = f"there is no config file {shortened(str(name))}{hint}"
    raise ConfigError([Problem("", what, origin)])


def read_config(path: Path, including: tuple[Path, ...] = ()) -> Node:
    """Return the settings of a file, merged over those of its `_base_` files.

    Raises:
        ConfigError: one of the files cannot be read.
    """
    path = Path(os.path.abspath(path))
    top = _read_python(path) if path.suffix == ".py" else _read_yaml(path)
    if not isinstance(top.value, dict):
        what = "the file is empty" if top.value is None else f"got a {type(top.value).__name__}"
        raise _error(path, f"a config must hold settings such as `seed: 0`, {what}")
    own = Node({key: child for key, child in top.value.items() if key != _BASE}, top.origin)
    _reject_inner_bases(own)
    if _BASE not in top.value:
        return merge(Node({}, top.origin), own)
    base = Node({}, top.origin)
    for name, origin in _base_names(top.value[_BASE]):
        parent = find_config(name, path.parent, origin)
        chain = (*including, path)
        if Path(os.path.abspath(parent)) in chain:
            loop = " -> ".join(shown(one) for one in (*chain, parent))
            raise ConfigError([Problem(_BASE, f"the files include each other: {loop}", origin)])
        if len(chain) > _MAX_CHAIN:
            what = f"more than {_MAX_CHAIN} files that build on one another"
            raise ConfigError([Problem(_BASE, what, origin)])
        base = merge(base, read_config(parent, chain))
    return merge(base, own)


def _base_names(node: Node) -> list[tuple[str, str]]:
    entries = node.value if isinstance(node.value, list) else [node]
    for entry in entries:
        if not isinstance(entry.value, str):
            what = f"must be a file or a list of files, got {entry.plain()!r}"
            raise ConfigError([Problem(_BASE, what, entry.origin.text)])
    return [(str(entry.value), entry.origin.text) for entry in entries]


def _reject_inner_bases(node: Node) -> None:
    children = list(node.value.items()) if isinstance(node.value, dict) else []
    if isinstance(node.value, list):
        children = list(enumerate(node.value))
    for key, child in children:
        if key == _BASE:
            what = "stands at the top of a file only, not inside a section"
            raise ConfigError([Problem(_BASE, what, child.origin.text)])
        _reject_inner_bases(child)


def _read_yaml(path: Path) -> Node:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _error(path, f"the file cannot be read: {describe(error)}") from error
    return parse(text, shown(path), path.parent)


def _read_python(path: Path) -> Node:
    try:
        names = runpy.run_path(str(path))
        if "config" not in names:
            hint = did_you_mean("config", [n for n in names if not n.startswith("_")])
            raise _error(path, f"the file must define `config`, a dict or a function{hint}")
        config: Any = names["config"]
        config = config() if callable(config) else config
    except ConfigError:
        raise
    except IMPORT_FAILURES as error:
        raise _error(path, describe(error), _line_in(path, error)) from error
    if not isinstance(config, Mapping):
        raise _error(path, f"`config` must be (or return) a dict, got {type(config).__name__}")
    try:
        return from_plain(config, Origin(shown(path), path.parent))
    except TypeError as error:
        raise _error(path, str(error)) from error


def _line_in(path: Path, error: BaseException) -> int | None:
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno for f in reversed(frames) if f.filename == str(path)), None)


def _error(path: Path, what: str, line: int | None = None) -> ConfigError:
    where = shown(path) if line is None else f"{shown(path)}:{line}"
    return ConfigError([Problem("", what, where)])


def _sources_in(folder: Path) -> list[Path]:
    if not os.path.isdir(folder):
        return []
    return sorted(p for p in folder.iterdir() if p.suffix in (".yaml", ".yml", ".py"))


def _shipped_configs() -> dict[str, Path]:
    spec = importlib.util.find_spec(_SHIPPED)
    folders = (spec.submodule_search_locations or []) if spec else []
    return {
        path.stem: path
        for folder in folders
        for path in _sources_in(Path(folder))
        if path.suffix != ".py"
    }
