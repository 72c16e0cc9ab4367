"""`${...}` in settings, resolved by OmegaConf."""

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..errors import ConfigError, Problem, did_you_mean, shortened
from .nodes import MAX_DEPTH, MAX_REPEATED, TOO_DEEP, KeyPath, Node, dotted, from_plain

_OPEN = "${"
_MISSING = "???"
_REFERENCE = re.compile(r"\$\{([^${}:]+)\}")
_MAX_TEXT = 10_000


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
    wrong = {
        text: why for text in {str(leaf.value) for _, leaf in waiting} if (why := _fault(text))
    }
    problems += [
        Problem(dotted(path), wrong[str(leaf.value)], leaf.origin.text)
        for path, leaf in waiting
        if leaf.value in wrong
    ]
    if problems:
        raise ConfigError(problems)
    if not waiting:
        return root
    expansion = _Expansion(root)
    resolved: dict[KeyPath, Node] = {}
    for path, leaf in waiting:
        try:
            resolved[path] = from_plain(expansion.value_at(path, leaf), leaf.origin, path)
        except (OmegaConfBaseException, RecursionError, TypeError, ValueError) as error:
            problems.append(Problem(dotted(path), _why(error, leaf, root), leaf.origin.text))
    if problems:
        raise ConfigError(problems)
    return _substituted(root, resolved)


def _substituted(node: Node, resolved: Mapping[KeyPath, Node], path: KeyPath = ()) -> Node:
    """Return the tree with the nodes in `resolved` at their paths."""
    if path in resolved:
        return resolved[path]
    if isinstance(node.value, dict):
        below = {k: _substituted(one, resolved, (*path, k)) for k, one in node.value.items()}
        return Node(below, node.origin)
    if isinstance(node.value, list):
        items = [_substituted(one, resolved, (*path, at)) for at, one in enumerate(node.value)]
        return Node(items, node.origin)
    return node


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


def _fault(text: str) -> str:
    """Return what is wrong with the syntax of an interpolation, "" when nothing is."""
    if len(text) > _MAX_TEXT:
        return f"{shortened(text)} is no valid interpolation: longer than {_MAX_TEXT:,} characters"
    try:
        OmegaConf.create([text])
    except (OmegaConfBaseException, RecursionError) as error:
        why = "a } is missing" if text.count("{") > text.count("}") else _first_line(error)
        why = TOO_DEEP if isinstance(error, RecursionError) else why
        return f"{shortened(text)} is no valid interpolation: {why}"
    return ""


class _Expansion:
    """Values with their interpolations resolved, as many as may be repeated."""

    def __init__(self, root: Node) -> None:
        self._root = root
        self._conf = OmegaConf.create(root.plain())
        self._repeated = 0
        self._sizes: dict[int, int] = {}

    def value_at(self, path: KeyPath, leaf: Node) -> Any:
        """Return the value at a path as plain dicts, lists and scalars."""
        # Before OmegaConf is asked: it evaluates what a text repeats as often as it does.
        self._repeated += self._size(leaf)
        if self._repeated > MAX_REPEATED:
            raise ValueError(f"interpolations that repeat more than {MAX_REPEATED:,} values")
        value = self._conf
        for key in path:
            value = value[key]
        return self._plain(value, len(path))

    def _size(self, node: Node) -> int:
        """Return how many values are evaluated for a node."""
        if id(node) not in self._sizes:
            # Of one that refers to itself OmegaConf tells.
            self._sizes[id(node)] = 0
            self._sizes[id(node)] = 1 + sum(map(self._size, self._below(node)))
        return self._sizes[id(node)]

    def _below(self, node: Node) -> list[Node]:
        if isinstance(node.value, dict):
            return list(node.value.values())
        if isinstance(node.value, list):
            return node.value
        paths = [path.split(".") for path in _REFERENCE.findall(str(node.value))]
        return [found for found, exists in map(self._root.find, paths) if exists]

    def _plain(self, value: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(TOO_DEEP)
        if isinstance(value, DictConfig):
            return {key: self._plain(value[key], depth + 1) for key in value}
        if isinstance(value, ListConfig):
            return [self._plain(value[at], depth + 1) for at in range(len(value))]
        return value


def _why(error: BaseException, leaf: Node, root: Node) -> str:
    text = str(leaf.value)
    if isinstance(error, RecursionError) or "recursi" in str(error).lower():
        return f"{shortened(text)} refers to itself, or through too many others to a value"
    hint = ""
    inner = text[text.find(_OPEN) + 2 :].partition("}")[0]
    plain = ":" not in inner and "${" not in inner and not inner.startswith(".")
    if plain and isinstance(error, OmegaConfBaseException):
        hint = did_you_mean(inner, _paths(root))
    return f"{shortened(text)} cannot be resolved: {_first_line(error)}{hint}"


def _paths(root: Node) -> list[str]:
    found: set[str] = set()
    for path, _ in root.leaves():
        found.update(dotted(path[:end]) for end in range(1, len(path) + 1))
    return sorted(found)


def _first_line(error: BaseException) -> str:
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", text).strip("'\"")
