"""YAML text to nodes with their lines, and back."""

import re
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError, Problem, shown_value
from .nodes import MAX_DEPTH, MAX_REPEATED, TOO_DEEP, Key, Node, Origin

_TAG = "tag:yaml.org,2002:"
_SCALAR_TAGS = {_TAG + name for name in ("str", "int", "float", "bool", "null")}
# A plain "=" or "<<" that is a value is text.
_TEXT_TAGS = {_TAG + name for name in ("value", "merge")}
# As long as YAML lets a key be that is written without a question mark.
_MAX_KEY = 1024
_HINTS = {
    "mapping values are not allowed": "is it indented too far, or text that needs quotes?",
    "'\\t' that cannot start": "indent with spaces, not with tabs",
    "that cannot start any token": "text that starts with it needs quotes",
    "undefined alias": "text that starts with * needs quotes",
    "expected ',' or": "is a bracket or a comma missing?",
    "unexpected end of stream": "is a closing quote missing?",
}
_FLOAT = re.compile(
    r"""[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
        |[0-9][0-9_]*[eE][-+]?[0-9]+
        |\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
        |\.(?:inf|Inf|INF))$
        |\.(?:nan|NaN|NAN)$""",
    re.VERBOSE,
)


def _resolvers(keep_timestamps: bool) -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Return PyYAML's rules for plain scalars, but with 1e-3 a number (YAML 1.2)."""
    dropped = {_TAG + "float"} | (set() if keep_timestamps else {_TAG + "timestamp"})
    table = {
        first: [rule for rule in rules if rule[0] not in dropped]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for first in "-+.0123456789":
        table.setdefault(first, []).insert(0, (_TAG + "float", _FLOAT))
    return table


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _resolvers(keep_timestamps=False)


class _Dumper(yaml.SafeDumper):
    # Text that any loader takes for a time stamp is quoted.
    yaml_implicit_resolvers = _resolvers(keep_timestamps=True)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def parse(text: str, shown: str, folder: Path) -> Node:
    """Return the nodes of a YAML text, each with the origin "shown:line".

    Raises:
        ConfigError: invalid YAML, a duplicate key, or a value that a config cannot hold.
    """
    return _Reader(text, Origin(shown, folder), numbered=True).read()


def parse_value(text: str, origin: Origin, depth: int) -> Node:
    """Return the nodes of a value given outside a file, all with the same origin.

    Args:
        depth: how many levels above it the value will have.
    """
    return _Reader(text, origin, numbered=False, depth=depth).read()


def scalar_text(value: Any) -> str:
    """Return a scalar or a list of scalars as YAML on one line."""
    breaks = isinstance(value, str) and value != "" and value.splitlines() != [value]
    style = '"' if breaks else None
    flow = yaml.dump(
        [value],
        Dumper=_Dumper,
        default_flow_style=True,
        default_style=style,
        width=float("inf"),
        allow_unicode=True,
    )
    return str(flow).strip()[1:-1]


class _Reader:
    """Reads one YAML document."""

    def __init__(self, text: str, origin: Origin, *, numbered: bool, depth: int = 0) -> None:
        self._text = text
        self._origin = origin
        self._numbered = numbered
        self._depth = depth
        self._seen: set[int] = set()
        self._repeated = 0

    def read(self) -> Node:
        try:
            loader = _Loader(self._text)
            top = loader.get_single_node()
            if top is None:
                return Node(None, self._at(0))
            return self._node(loader, top, self._at(top.start_mark.line), ())
        except yaml.reader.ReaderError as error:
            line = self._text.count("\n", 0, int(error.position))
            what = f"the character {chr(error.character)!r} is not allowed"
            raise self._error(line, what) from error
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            raise self._error(mark.line if mark else 0, _syntax_text(error)) from error
        except RecursionError as error:
            raise self._error(0, TOO_DEEP) from error

    def _at(self, line: int) -> Origin:
        if not self._numbered:
            return self._origin
        return Origin(f"{self._origin.text}:{line + 1}", self._origin.folder)

    def _error(self, line: int, what: str, key: str = "") -> ConfigError:
        return ConfigError([Problem(key, what, self._at(line).text)])

    def _node(self, loader: _Loader, node: Any, origin: Origin, above: tuple[int, ...]) -> Node:
        line = node.start_mark.line
        if id(node) in above:
            raise self._error(line, "an alias that contains itself")
        if self._depth + len(above) > MAX_DEPTH:
            raise self._error(line, TOO_DEEP)
        self._repeated += id(node) in self._seen
        self._seen.add(id(node))
        if self._repeated > MAX_REPEATED:
            what = f"aliases of aliases that repeat more than {MAX_REPEATED:,} values"
            raise self._error(line, what)
        above = (*above, id(node))
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return Node(self._mapping(loader, node, above), origin)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            items = [
                self._node(loader, item, self._at(item.start_mark.line), above)
                for item in node.value
            ]
            return Node(items, origin)
        return Node(self._scalar(loader, node), origin)

    def _mapping(
        self, loader: _Loader, node: yaml.MappingNode, above: tuple[int, ...]
    ) -> dict[Key, Node]:
        lines: dict[str, int] = {}
        merged: dict[Key, Node] = {}
        own: dict[Key, Node] = {}
        for key_node, value in node.value:
            line = key_node.start_mark.line
            if key_node.tag == _TAG + "merge":
                for source in self._merge_sources(value):
                    merged |= self._merge_source(loader, source, above)
                continue
            key = self._key(loader, key_node)
            if str(key) in lines:
                first = lines[str(key)] + 1
                raise self._error(line, f"this key is already set in line {first}", str(key))
            lines[str(key)] = line
            own[key] = self._node(loader, value, self._at(line), above)
        return merged | own

    def _merge_sources(self, node: Any) -> list[Any]:
        """Return the mappings that a `<<` names, the one that wins last."""
        return node.value[::-1] if isinstance(node, yaml.SequenceNode) else [node]

    def _merge_source(self, loader: _Loader, node: Any, above: tuple[int, ...]) -> dict[Key, Node]:
        line = node.start_mark.line
        found = self._node(loader, node, self._at(line), above).value
        if not isinstance(found, dict):
            raise self._error(line, "`<<` takes a section, or a list of sections, by alias")
        return found

    def _key(self, loader: _Loader, node: Any) -> Key:
        key = self._scalar(loader, node)
        line = node.start_mark.line
        if isinstance(key, bool) or not isinstance(key, str | int):
            what = f"a key must be text or a whole number, got {key!r}; put it in quotes"
            raise self._error(line, what)
        if len(node.value) > _MAX_KEY:
            raise self._error(
                line, f"a key of {len(node.value):,} characters, at most {_MAX_KEY:,}"
            )
        return key

    def _scalar(self, loader: _Loader, node: Any) -> Any:
        line = node.start_mark.line
        if node.tag in _TEXT_TAGS:
            return node.value
        if not isinstance(node, yaml.ScalarNode) or node.tag not in _SCALAR_TAGS:
            kind = node.tag.replace(_TAG, "!!")
            raise self._error(line, f"a config cannot hold a value of the kind {kind}")
        try:
            # A text may have halves of surrogate pairs, by escapes: no file could hold it.
            node.value.encode()
            return loader.construct_object(node)
        except (ValueError, KeyError) as error:
            what = f"not valid YAML: {shown_value(node.value)} is no value"
            raise self._error(line, what) from error


def _syntax_text(error: yaml.MarkedYAMLError) -> str:
    problem = " ".join((error.problem or error.context or "").split())
    hint = next((hint for part, hint in _HINTS.items() if part in problem), "")
    return f"not valid YAML: {problem}" + (f" ({hint})" if hint else "")
