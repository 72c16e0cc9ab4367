"""Settings as a tree in which every value remembers what set it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

Scalar: TypeAlias = str | int | float | bool | None
Key: TypeAlias = str | int
KeyPath: TypeAlias = tuple[Key | int, ...]

DELETE = "_delete_"
# Each level takes several frames of Python's stack in whatever walks through a config.
MAX_DEPTH = 50
TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"
# How many values aliases and interpolations may add by repeating others.
MAX_REPEATED = 10_000


@dataclass(frozen=True)
class Origin:
    """What set a value: the text shown ("a.yaml:14", "override a.b=1") and the file's folder."""

    text: str
    folder: Path

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Node:
    """A value with its origin; mappings and lists hold nodes."""

    value: "Scalar | dict[Key, Node] | list[Node]"
    origin: Origin

    def plain(self) -> Any:
        """Return the value without origins: dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def child(self, key: Key) -> "Node | None":
        """Return the node under a key or at a list position, None when there is none."""
        if isinstance(self.value, dict):
            return self.value.get(self.own_key(key))
        if isinstance(self.value, list) and str(key).isdecimal() and int(key) < len(self.value):
            return self.value[int(key)]
        return None

    def own_key(self, key: Key) -> Key:
        """Return a key of a mapping as the mapping has it: a path's "1" may be its 1."""
        assert isinstance(self.value, dict)
        if key in self.value:
            return key
        if isinstance(key, int):
            return str(key)
        number = int(key) if re.fullmatch(r"-?[0-9]{1,30}", key) else None
        return number if number in self.value and str(number) == key else key

    @cached_property
    def _dots(self) -> int:
        """How many dots the keys have at most."""
        keys = self.value if isinstance(self.value, dict) else ()
        return max((str(key).count(".") for key in keys), default=0)

    def find(self, path: Sequence[Key]) -> tuple["Node", bool]:
        """Return the node at `path`, or its nearest ancestor, and whether all of it exists."""
        node, rest = self, list(path)
        while rest:
            # A key may have dots itself: the longest that exists is taken.
            ends = range(min(len(rest), node._dots + 1), 0, -1)
            keys = ((rest[0] if end == 1 else dotted(rest[:end]), end) for end in ends)
            found = next(((c, end) for key, end in keys if (c := node.child(key))), None)
            if found is None:
                return node, False
            node, rest = found[0], rest[found[1] :]
        return node, True

    def leaves(self, path: KeyPath = ()) -> Iterator[tuple[KeyPath, "Node"]]:
        """Yield the path and node of every scalar."""
        if isinstance(self.value, dict | list):
            pairs: Any = (
                self.value.items() if isinstance(self.value, dict) else enumerate(self.value)
            )
            for key, child in pairs:
                yield from child.leaves((*path, key))
        else:
            yield path, self


def dotted(path: Sequence[Key]) -> str:
    """Return "a.list.0.x"."""
    return ".".join(str(part) for part in path)


def merge(base: Node, over: Node) -> Node:
    """Return `over` merged over `base`: mappings are merged, everything else is replaced.

    A mapping in `over` with `_delete_: true` replaces the one in `base` as a whole.
    """
    if not isinstance(over.value, dict) or not isinstance(base.value, dict):
        return without_flags(over)
    flag = over.value.get(DELETE)
    if flag is not None and flag.value is True:
        return without_flags(over)
    joined = dict(base.value)
    for key, child in over.value.items():
        if key == DELETE:
            continue
        joined[key] = merge(joined[key], child) if key in joined else without_flags(child)
    return Node(joined, over.origin)


def without_flags(node: Node) -> Node:
    """Return the tree without its `_delete_` keys."""
    if isinstance(node.value, dict):
        kept = {k: without_flags(child) for k, child in node.value.items() if k != DELETE}
        return Node(kept, node.origin)
    if isinstance(node.value, list):
        return Node([without_flags(child) for child in node.value], node.origin)
    return node


def replaced(root: Node, path: Sequence[Key], new: Node) -> Node:
    """Return the tree with `new` at `path`; missing mappings on the way are made."""
    if not path:
        return new
    key, rest = path[0], path[1:]
    if isinstance(root.value, list):
        items = list(root.value)
        items[int(key)] = replaced(items[int(key)], rest, new)
        return Node(items, root.origin)
    below = dict(root.value) if isinstance(root.value, dict) else {}
    name = root.own_key(key) if below else key
    below[name] = replaced(below.get(name, Node({}, new.origin)), rest, new)
    return Node(below, root.origin)


def from_plain(value: Any, origin: Origin, path: KeyPath = ()) -> Node:
    """Return the tree for dicts, lists and scalars, all with the same origin.

    A class or function becomes its import path.

    Raises:
        TypeError: a value or key that a config cannot hold; the text names its path.
    """
    if len(path) > MAX_DEPTH:
        raise TypeError(f"{dotted(path[:3])}: {TOO_DEEP}")
    if isinstance(value, Mapping):
        for key in value:
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise TypeError(f"{dotted((*path, key))}: a key must be a str or int, got {key!r}")
        return Node({k: from_plain(v, origin, (*path, k)) for k, v in value.items()}, origin)
    if isinstance(value, list | tuple):
        return Node([from_plain(v, origin, (*path, i)) for i, v in enumerate(value)], origin)
    if value is None or isinstance(value, str | int | float | bool):
        return Node(value, origin)
    if isinstance(value, Path):
        return Node(str(value), origin)
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    if not callable(value) or "<" in name or not name.strip("."):
        raise TypeError(
            f"{dotted(path)}: a config holds numbers, text, true/false, null, lists and dicts, "
            f"got {value!r} of type {type(value).__name__}"
        )
    return Node(name, origin)
