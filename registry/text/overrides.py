"""Settings given on the command line: `a.list.0.x=2`."""

from collections.abc import Iterable
from pathlib import Path

from ..errors import ConfigError, Problem, shown_value
from .nodes import MAX_DEPTH, TOO_DEEP, Node, Origin, dotted, replaced, without_flags
from .yaml_text import parse_value, scalar_text

_QUOTES = "'\"`"


def apply_overrides(root: Node, overrides: Iterable[str]) -> Node:
    """Return the tree with every `key.path=value` set, in order.

    The value is read as YAML. Sections that do not exist are made; a number picks from a list.

    Raises:
        ConfigError: all overrides that cannot be read or point nowhere.
    """
    problems: list[Problem] = []
    for text in overrides:
        try:
            root = _apply(root, text)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return root


def _apply(root: Node, text: str) -> Node:
    origin = Origin(f"override {text}", Path.cwd())
    path, value_text = _split(text, origin)
    try:
        value = parse_value(value_text, origin, len(path))
    except ConfigError as error:
        why = error.problems[0].what.removeprefix("not valid YAML: ").partition(" (")[0]
        what = (
            f"the value {value_text} is not valid YAML: {why}; "
            f"if it is text, put it in quotes: '{dotted(path)}=\"{value_text}\"'"
        )
        raise ConfigError([Problem(dotted(path), what, origin.text)]) from error
    _check_path(root, path, origin)
    return replaced(root, path, without_flags(value))


def _split(text: str, origin: Origin) -> tuple[list[str], str]:
    key, equals, value = text.partition("=")
    path = key.split(".")
    what = ""
    if not equals:
        what = "an override must read key.path=value, without spaces around ="
    elif any(quote in key for quote in _QUOTES):
        what = f"the key {key} must not be in quotes, only the value may be"
    elif not all(part and part == part.strip() for part in path):
        what = f"{shown_value(key)} is no key path such as optimizer.lr"
    elif len(path) > MAX_DEPTH:
        what = f"{shown_value(key)} is {TOO_DEEP}"
    if what:
        raise ConfigError([Problem("", what, origin.text)])
    return path, value


def _check_path(root: Node, path: list[str], origin: Origin) -> None:
    for at, key in enumerate(path):
        node, exists = root.find(path[:at])
        what = ""
        if not exists or node.value is None:
            return
        if isinstance(node.value, list) and node.child(key) is None:
            what = f"the list has {len(node.value)} items, counted from 0, got {key}"
        elif not isinstance(node.value, dict | list):
            shown = scalar_text(node.plain())
            what = f"{dotted(path[:at])} is {shown} ({node.origin}), it has no {key}"
        if what:
            raise ConfigError([Problem(dotted(path), what, origin.text)])
