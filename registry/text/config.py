"""Configs made of files and overrides, with the origin of each setting."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..errors import ConfigError, Problem, shortened, shown, shown_value
from ..imports import anchored
from .files import find_config, parse, read_config, to_yaml
from .values import (
    MAX_DEPTH,
    TOO_DEEP,
    dotted,
    escaped,
    merge,
    own_key,
    plain,
    refuse_file_keys,
    resolve,
    walk,
)

_OVERRIDE = "override "


class Config(Mapping[str, Any]):
    """Resolved settings, read as ``cfg["a"]["b"]``, ``cfg.a.b`` or ``cfg.select("a.b")``.

    Sections are configs too. Use ``[]`` for keys that are also names of methods.

    Attributes:
        path: the file that was loaded.
    """

    def __init__(
        self,
        values: dict[str, Any],
        path: Path,
        entries: Mapping[str, tuple[Any, str]],
        at: str = "",
    ) -> None:
        self._values = values
        self.path = path
        # Values and origins by dotted path in the whole config; `at` is this section's path.
        self._places = entries
        self._at = at

    def __getitem__(self, key: str) -> Any:
        return self._wrapped(self._values[key], self._full(str(key)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self:
            raise AttributeError(f"the config has no {name}; its keys are {', '.join(self)}")
        return self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Config({self._values!r})"

    def select(self, path: str, default: Any = None) -> Any:
        """Return the value at a dotted path ("data.train.batch_size"), ``default`` if absent."""
        full = self._full(path)
        return self._wrapped(self._places[full][0], full) if full in self._places else default

    def has(self, path: str) -> bool:
        """Return whether there is a value at a dotted path."""
        return self._full(path) in self._places

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain dicts, lists and scalars."""
        copied: dict[str, Any] = plain(self._values)
        return copied

    def origin(self, path: str) -> str:
        """Return the origin of the value at a dotted path: "configs/a.yaml:14", "override a.b=1".

        If the path does not exist, return the origin of the closest section.
        """
        full = self._full(path)
        while full and full not in self._places:
            full = full.rpartition(".")[0]
        return self._places[full][1]

    def _full(self, path: str) -> str:
        return f"{self._at}.{path}" if self._at and path else self._at or path

    def _wrapped(self, value: Any, at: str) -> Any:
        if isinstance(value, dict):
            return Config(value, self.path, self._places, at)
        if isinstance(value, list):
            return [
                self._wrapped(entry, f"{at}.{position}") for position, entry in enumerate(value)
            ]
        return value


def load_config(path_or_name: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Config:
    """Read a config file, or the shipped config of that name, and apply overrides.

    If the config does not set ``name``, it is the file's stem. The ``config.yaml`` in a run's
    folder gets that folder as its ``run_dir``, even if the folder has been moved.

    Args:
        path_or_name: a YAML file, a .py file that defines ``config`` (a dict or a function that
            returns one), or the name of a shipped config such as "digits_ddp".
        overrides: ``key.path=value`` texts, applied in order, with values in YAML. Missing sections
            are created; a number is an index into a list.

    Raises:
        ConfigError: a file, an override or an interpolation is not valid; the message names file
            and line.
    """
    path = find_config(path_or_name, Path.cwd())
    values, origins = read_config(path)
    if path.name == "config.yaml" and any(path.parent.glob("checkpoints/step_*")):
        values["run_dir"] = escaped(shown(path.parent))
        origins["run_dir"] = f"the folder of {shown(path)}"
    problems: list[Problem] = []
    for text in overrides:
        try:
            _apply(values, origins, text)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    if "name" not in values:
        values["name"] = escaped(path.stem)
        origins["name"] = f"the file name of {shown(path)}"
    return _resolve_config(values, origins, path.absolute())


def config_from_dict(values: Mapping[str, Any], name: str = "run") -> Config:
    """Return a config with the settings in a dict, with ``${...}`` resolved.

    Raises:
        ConfigError: the type of a value is not allowed in a config, or a value cannot be resolved.
    """
    return _resolve_config(_plain({"name": name, **values}), {}, Path.cwd() / f"{name}.yaml")


def dump_config(cfg: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a config as YAML; loading the file gives an equal config.

    Raises:
        ConfigError: the type of a value is not allowed in a config.
    """
    Path(path).write_text(format_config(cfg), encoding="utf-8")


def format_config(cfg: Mapping[str, Any], origins: bool = False) -> str:
    """Return a config as YAML text.

    Args:
        cfg: a ``Config``, or nested dicts.
        origins: add a comment with the origin to each line that sets a value.
    """
    text = to_yaml(_plain(cfg))
    if not origins or not isinstance(cfg, Config):
        return text
    _, lines = parse(text, "")
    # YAML ends lines at these characters, splitlines() at others too.
    rows = re.split(r"(?<=[\n\x85\u2028\u2029])", text)[:-1]
    width = min(max(map(len, rows)) - 1, 60)
    starts = {path: int(line[1:]) for path, line in lines.items()}
    following = dict(pairwise(sorted({*starts.values(), len(rows) + 1})))
    for path, start in starts.items():
        value, origin = cfg._places[path]
        if value in ({}, []) or not isinstance(value, dict | list):
            # A text may have several lines.
            row_number = following[start] - 2
            row = f"{rows[row_number][:-1]:<{width}}  # {' '.join(origin.split())}"
            rows[row_number] = row.rstrip(" #") + "\n"
    return "".join(rows)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    try:
        copied: dict[str, Any] = plain(values)
    except TypeError as error:
        raise ConfigError([Problem("", str(error))]) from error
    return copied


def _resolve_config(values: dict[str, Any], origins: dict[str, str], path: Path) -> Config:
    resolve(values, origins)
    refuse_file_keys(values, origins)
    entries = values.get("imports")
    for at, entry in enumerate(entries if isinstance(entries, list) else []):
        if isinstance(entry, str):
            values["imports"][at] = anchored(entry, _folder(origins.get(f"imports.{at}", "")))
    folders = values.get("import_from")
    for at, folder in enumerate(folders if isinstance(folders, list) else []):
        if isinstance(folder, str):
            base = _folder(origins.get(f"import_from.{at}", ""))
            values["import_from"][at] = os.path.abspath(base / folder)
    return Config(values, path, _find_origins(values, origins))


def _find_origins(values: Any, origins: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Map paths to (value, origin); if ``origins`` has no entry, a value inherits one."""
    entries: dict[str, tuple[Any, str]] = {}
    for path, value in walk(values):
        inherited = entries[dotted(path[:-1])][1] if path else ""
        entries[dotted(path)] = value, origins.get(dotted(path), inherited)
    return entries


def _folder(origin: str) -> Path:
    """Return the folder of the file that set a value, or the working directory."""
    if not origin or origin.startswith(_OVERRIDE):
        return Path.cwd()
    return Path(os.path.abspath(re.sub(r":\d+$", "", origin))).parent


def _apply(values: dict[str, Any], origins: dict[str, str], text: str) -> None:
    """Set the value of one override."""
    origin = shortened(_OVERRIDE + text, 300)
    path, value_text = _split(text)
    dotted = ".".join(path)
    try:
        value, own_origins = parse(value_text, origin, numbered=False, at=path)
    except ConfigError as error:
        why = error.problems[0].what.removeprefix("not valid YAML: ").partition(" (")[0]
        message = (
            f"the value {shortened(value_text)} is not valid YAML: {why}; "
            f"if it is text, put it in quotes: '{shortened(dotted)}=\"{shortened(value_text)}\"'"
        )
        raise ConfigError([Problem(dotted, message, origin)]) from error
    origins.update(own_origins)
    section: Any = values
    for at in range(len(path) - 1):
        name = _resolve_key(section, path, at, origins)
        present = section.get(name) if isinstance(section, dict) else section[name]
        if present is None:
            section[name] = {}
            origins[".".join(path[: at + 1])] = origin
        section = section[name]
    key = _resolve_key(section, path, len(path) - 1, origins)
    replaced = section.get(key) if isinstance(section, dict) else section[key]
    for below, _ in walk(replaced):
        stale = ".".join((*path, *map(str, below)))
        if stale not in own_origins:
            origins.pop(stale, None)
    section[key] = merge(None, value)


def _resolve_key(
    section: Any, path: tuple[str, ...], at: int, origins: Mapping[str, str]
) -> str | int:
    """Return the key or index for one part of an override's path, or raise ConfigError."""
    key, dotted = path[at], ".".join(path)
    if isinstance(section, dict):
        return own_key(section, key)
    if not isinstance(section, list):
        above = ".".join(path[:at])
        value = shortened(section) if isinstance(section, str) else shown_value(section)
        message = f"{shortened(above)} is {value} ({origins[above]}), it has no {shortened(key)}"
    elif key.isdecimal() and int(key) < len(section):
        return int(key)
    else:
        message = f"the list has {len(section)} items, counted from 0, got {shortened(key)}"
    raise ConfigError([Problem(dotted, message, origins[dotted])])


def _split(text: str) -> tuple[tuple[str, ...], str]:
    key, equals, value = text.partition("=")
    path = tuple(key.split("."))
    message = ""
    if not equals:
        message = "an override must read key.path=value, without spaces around ="
    elif any(quote in key for quote in "'\"`"):
        message = f"the key {shortened(key)} must not be in quotes, only the value may be"
    elif not all(name and name == name.strip() for name in path):
        message = f"{shown_value(key)} is not a key path such as optimizer.lr"
    elif len(path) > MAX_DEPTH:
        message = f"{shown_value(key)} is {TOO_DEEP}"
    if message:
        raise ConfigError([Problem("", message, _OVERRIDE + text)])
    return path, value
