"""Configs: files and overrides in, settings that know their origins out."""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError, Problem, shown
from .config_files import find_config, read_config
from .interpolation import escaped, resolve
from .nodes import Key, Node, Origin, from_plain, replaced
from .overrides import apply_overrides
from .user_modules import anchored
from .yaml_text import scalar_text


class Config(Mapping[str, Any]):
    """Resolved settings, read as `cfg["a"]["b"]`, `cfg.a.b` or `cfg.select("a.b")`.

    Sections are configs themselves; a key that is also the name of a method is read by `[]`.

    Attributes:
        path: the file that was loaded.
    """

    def __init__(self, node: Node, path: Path) -> None:
        self._node = node
        self.path = path

    def __getitem__(self, key: str) -> Any:
        node = self._node.child(key)
        if node is None:
            raise KeyError(key)
        return self._wrapped(node)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self:
            raise AttributeError(f"the config has no {name}; its keys are {', '.join(self)}")
        return self[name]

    def __iter__(self) -> Iterator[str]:
        assert isinstance(self._node.value, dict)
        return iter(self._node.value)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"Config({self.to_dict()!r})"

    def select(self, path: str, default: Any = None) -> Any:
        """Return the value at a dotted path ("data.train.batch_size"), `default` if absent."""
        node, exists = self._node.find(path.split("."))
        return self._wrapped(node) if exists else default

    def has(self, path: str) -> bool:
        """Tell whether there is a value at a dotted path."""
        return self._node.find(path.split("."))[1]

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain dicts, lists and scalars."""
        plain = self._node.plain()
        assert isinstance(plain, dict)
        return plain

    def origin(self, path: str) -> str:
        """Return what set the value at a dotted path: "configs/a.yaml:14", "override a.b=1".

        For a path that does not exist, the origin of its nearest section.
        """
        node, _ = self._node.find(path.split(".") if path else [])
        return node.origin.text

    def _wrapped(self, node: Node) -> Any:
        if isinstance(node.value, dict):
            return Config(node, self.path)
        if isinstance(node.value, list):
            return [self._wrapped(item) for item in node.value]
        return node.value


def load_config(path_or_name: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Config:
    """Read a config file, or the shipped config of that name, and apply overrides.

    `name` is set to the file's stem where the config does not set it.

    Args:
        path_or_name: a YAML file, a .py file that defines `config` (a dict or a function that
            returns one), or the name of a shipped config such as "digits_ddp".
        overrides: `key.path=value` texts; the values are read as YAML.

    Raises:
        ConfigError: a file, an override or an interpolation is wrong; the text names file and
            line.
    """
    path = find_config(path_or_name, Path.cwd())
    root = apply_overrides(read_config(path), overrides)
    if root.child("name") is None:
        origin = Origin(f"the file name of {shown(path)}", path.parent)
        root = replaced(root, ["name"], Node(escaped(path.stem), origin))
    return Config(_with_anchored_imports(resolve(root)), path.absolute())


def config_from_dict(values: Mapping[str, Any], name: str = "run") -> Config:
    """Return the config for settings that were made in Python, `${...}` resolved.

    Raises:
        ConfigError: the type of a value is not allowed in a config, or a value cannot be resolved.
    """
    root = _without_origins({"name": name, **values})
    return Config(_with_anchored_imports(resolve(root)), Path.cwd() / f"{name}.yaml")


def dump_config(cfg: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a config as YAML; loading the file gives an equal config.

    Raises:
        ConfigError: a value is of a kind that a config cannot hold.
    """
    Path(path).write_text(format_config(cfg), encoding="utf-8")


def format_config(cfg: Mapping[str, Any], origins: bool = False) -> str:
    """Return a config as YAML text.

    Args:
        cfg: a Config, or dicts.
        origins: end each line that sets a value with a comment with its origin.
    """
    root = cfg._node if isinstance(cfg, Config) else _without_origins(cfg)
    lines = list(_lines(root))
    if not origins:
        return "".join(f"{text}\n" for text, _ in lines)
    width = min(max(len(text) for text, _ in lines), 60)
    return "".join(f"{text:<{width}}  # {origin}".rstrip(" #") + "\n" for text, origin in lines)


def _without_origins(values: Mapping[str, Any]) -> Node:
    try:
        return from_plain(values, Origin("", Path.cwd()))
    except TypeError as error:
        raise ConfigError([Problem("", str(error))]) from error


def _lines(node: Node) -> Iterator[tuple[str, str]]:
    """Yield the YAML lines of a node, each with the origin of the value that it sets."""
    flat = _flat_text(node)
    if flat is not None:
        yield flat, node.origin.text
    elif isinstance(node.value, dict):
        for key, child in node.value.items():
            yield from _entry(f"{_key_text(key)}:", child)
    else:
        assert isinstance(node.value, list)
        for item in node.value:
            for at, (text, origin) in enumerate(_lines(item)):
                yield ("  " if at else "- ") + text, origin


def _entry(label: str, child: Node) -> Iterator[tuple[str, str]]:
    flat = _flat_text(child)
    if flat is not None:
        yield f"{label} {flat}", child.origin.text
        return
    yield label, ""
    for text, origin in _lines(child):
        yield f"  {text}", origin


def _flat_text(node: Node) -> str | None:
    """Return what fits on one line: a scalar, an empty container, a short list of scalars."""
    value = node.value
    if isinstance(value, dict):
        return None if value else "{}"
    if isinstance(value, list):
        texts = [_flat_text(item) for item in value if not isinstance(item.value, dict | list)]
        same_origin = len({item.origin.text for item in value}) <= 1
        joined = ", ".join(str(text) for text in texts)
        fits = len(texts) == len(value) and same_origin and len(joined) <= 80
        return f"[{joined}]" if fits else None
    return scalar_text(escaped(value) if isinstance(value, str) else value)


def _key_text(key: Key) -> str:
    return scalar_text(key)


def _with_anchored_imports(root: Node) -> Node:
    entries = root.child("imports")
    if entries is None or not isinstance(entries.value, list):
        return root
    for at, entry in enumerate(entries.value):
        if isinstance(entry.value, str):
            new = Node(anchored(entry.value, entry.origin.folder), entry.origin)
            root = replaced(root, ["imports", at], new)
    return root
