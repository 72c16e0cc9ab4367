"""`${...}` in settings, resolved by OmegaConf."""

import re
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .errors import ConfigError, Problem, did_you_mean
from .nodes import KeyPath, Node, dotted, from_plain, replaced

_OPEN = "${"
_MISSING = "???"


def resolve(root: Node) -> Node:
    """Return the tree with every `${...}` replaced by its value.

    Raises:
        ConfigError: all interpolations that cannot be resolved and all values left as `???`.
    """
    leaves = [(path, leaf) for path, leaf in root.leaves() if isinstance(leaf.value, str)]
    problems = [
        Problem(
            dotted(path),
            f"a value is required here: give one with {dotted(path)}=...",
            leaf.origin.text,
        )
        for path, leaf in leaves
        if leaf.value == _MISSING
    ]
    waiting = [(path, leaf) for path, leaf in leaves if _OPEN in str(leaf.value)]
    problems += [p for path, leaf in waiting if (p := _syntax_problem(path, leaf)) is not None]
    if problems:
        raise ConfigError(problems)
    if not waiting:
        return root
    conf = OmegaConf.create(root.plain())
    resolved = root
    for path, leaf in waiting:
        try:
            value = _value_at(conf, path)
            resolved = replaced(resolved, path, from_plain(value, leaf.origin, path))
        except (OmegaConfBaseException, RecursionError, TypeError) as error:
            problems.append(Problem(dotted(path), _why(error, leaf, root), leaf.origin.text))
    if problems:
        raise ConfigError(problems)
    return resolved


def escaped(text: str) -> str:
    """Return text that resolves to `text` itself."""
    if _OPEN not in text:
        return text
    pieces = text.split(_OPEN)
    return f"\\{_OPEN}".join([_doubled(piece) for piece in pieces[:-1]] + pieces[-1:])


def _doubled(piece: str) -> str:
    """Double the backslashes at the end: before a `${` they would escape it."""
    bare = piece.rstrip("\\")
    return piece + "\\" * (len(piece) - len(bare))


def _syntax_problem(path: KeyPath, leaf: Node) -> Problem | None:
    try:
        OmegaConf.create([leaf.value])
    except OmegaConfBaseException as error:
        text = str(leaf.value)
        why = "a } is missing" if text.count("{") > text.count("}") else _first_line(error)
        what = f"{text} is no valid interpolation: {why}"
        return Problem(dotted(path), what, leaf.origin.text)
    return None


def _value_at(conf: Any, path: KeyPath) -> Any:
    for key in path:
        conf = conf[key]
    if isinstance(conf, DictConfig | ListConfig):
        return OmegaConf.to_container(conf, resolve=True, throw_on_missing=True)
    return conf


def _why(error: BaseException, leaf: Node, root: Node) -> str:
    if isinstance(error, RecursionError) or "recursi" in str(error).lower():
        return f"{leaf.value} refers to itself"
    hint = ""
    text = str(leaf.value)
    inner = text[text.find(_OPEN) + 2 :].partition("}")[0]
    if ":" not in inner and "${" not in inner and not inner.startswith("."):
        hint = did_you_mean(inner, _paths(root))
    return f"{leaf.value} cannot be resolved: {_first_line(error)}{hint}"


def _paths(root: Node) -> list[str]:
    found: set[str] = set()
    for path, _ in root.leaves():
        found.update(dotted(path[:end]) for end in range(1, len(path) + 1))
    return sorted(found)


def _first_line(error: BaseException) -> str:
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", text).strip("'\"")
