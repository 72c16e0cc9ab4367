"""Reading config files: YAML or Python, with the files that they build on."""

import importlib.util
import os
import runpy
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import (
    ConfigError,
    Problem,
    describe,
    did_you_mean,
    nearest,
    one_of,
    shortened,
    shown,
    shown_value,
)
from ..imports import IMPORT_FAILURES
from .values import dotted, merge, plain, walk
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


def read_config(
    path: Path, including: tuple[Path, ...] = ()
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings of a file, merged over those of its `_base_` files, and their origins.

    The origins are texts such as "a.yaml:14" by dotted paths, "" for the file as a whole.

    Raises:
        ConfigError: one of the files cannot be read.
    """
    path = Path(os.path.abspath(path))
    own, own_origins = _read_python(path) if path.suffix == ".py" else _read_yaml(path)
    if not isinstance(own, dict):
        what = "the file is empty" if own is None else f"got a {type(own).__name__}"
        raise _error(path, f"a config must hold settings such as `seed: 0`, {what}")
    bases = own.pop(_BASE, [])
    inner = next((at for at, _ in walk(own) if at and at[-1] == _BASE), None)
    if inner is not None:
        what = "stands at the top of a file only, not inside a section"
        raise ConfigError([Problem(_BASE, what, own_origins[dotted(inner)])])
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for at, name in enumerate(bases if isinstance(bases, list) else [bases]):
        origin = own_origins.get(f"{_BASE}.{at}", own_origins[_BASE])
        parent = _parent(name, origin, (*including, path))
        more, more_origins = read_config(parent, (*including, path))
        values, origins = merge(values, more), {**origins, **more_origins}
    return merge(values, own), {**origins, **own_origins}


def _parent(name: Any, origin: str, chain: tuple[Path, ...]) -> Path:
    """Return the file that an entry of `_base_` in the last file of the chain names."""
    if not isinstance(name, str):
        what = f"must be a file or a list of files, got {shown_value(name)}"
        raise ConfigError([Problem(_BASE, what, origin)])
    parent = find_config(name, chain[-1].parent, origin)
    if Path(os.path.abspath(parent)) in chain:
        loop = " -> ".join(shown(one) for one in (*chain, parent))
        raise ConfigError([Problem(_BASE, f"the files include each other: {loop}", origin)])
    if len(chain) > _MAX_CHAIN:
        what = f"more than {_MAX_CHAIN} files that build on one another"
        raise ConfigError([Problem(_BASE, what, origin)])
    return parent


def _read_yaml(path: Path) -> tuple[Any, dict[str, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _error(path, f"the file cannot be read: {describe(error)}") from error
    return parse(text, shown(path))


def _read_python(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
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
        values = plain(config)
    except TypeError as error:
        raise _error(path, str(error)) from error
    return values, {dotted(at): shown(path) for at, _ in walk(values)}


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
