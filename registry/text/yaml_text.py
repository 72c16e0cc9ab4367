"""YAML text to settings and their lines, and back."""

import re
from typing import Any

import yaml
from omegaconf import OmegaConf

from ..errors import ConfigError, Problem, shown_value
from .interpolation import escaped
from .values import MAX_DEPTH, MAX_REPEATED, TOO_DEEP

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


class _Loader(yaml.SafeLoader):
    """PyYAML's rules for plain scalars, but 1e-3 is a number (YAML 1.2) and a date is text."""

    yaml_implicit_resolvers = {
        first: [rule for rule in rules if rule[0] not in (_TAG + "float", _TAG + "timestamp")]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+.0123456789"))


def parse(
    text: str, source: str, *, numbered: bool = True, at: tuple[str, ...] = ()
) -> tuple[Any, dict[str, str]]:
    """Return the settings in a YAML text, and the origin of each by its dotted path.

    Args:
        source: the file; or, where `numbered` is False, the whole origin, without the line.
        at: the path that the settings will have.

    Raises:
        ConfigError: invalid YAML, a duplicate key, or a value that a config cannot hold.
    """
    reader = _Reader(text, source, numbered, len(at))
    return reader.read(".".join(at)), reader.origins


def to_yaml(values: dict[str, Any]) -> str:
    """Return settings as YAML text which, loaded, gives the same settings."""
    return OmegaConf.to_yaml(OmegaConf.create(escaped(values)))


class _Reader:
    """Reads one YAML document."""

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
            what = f"the character {chr(error.character)!r} is not allowed"
            raise self._error(line, what) from error
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            raise self._error(mark.line if mark else 0, _syntax_text(error)) from error
        except RecursionError as error:
            raise self._error(0, TOO_DEEP) from error

    def _origin(self, line: int) -> str:
        return f"{self._source}:{line + 1}" if self._numbered else self._source

    def _error(self, line: int, what: str, key: str = "") -> ConfigError:
        return ConfigError([Problem(key, what, self._origin(line))])

    def _value(self, node: Any, at: str, above: tuple[int, ...]) -> Any:
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
            return self._mapping(node, at, above)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [
                self._child(item, position, at, item.start_mark.line, above)
                for position, item in enumerate(node.value)
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
            line = key_node.start_mark.line
            if key_node.tag == _TAG + "merge":
                values |= self._merged(value, at, above)
                continue
            key = self._key(key_node)
            if str(key) in lines:
                first = lines[str(key)] + 1
                raise self._error(line, f"this key is already set in line {first}", str(key))
            lines[str(key)] = line
            keys.append((key, value))
        # After what is merged, whose origins these replace.
        for key, value in keys:
            values[key] = self._child(value, key, at, lines[str(key)], above)
        return values

    def _merged(self, node: Any, at: str, above: tuple[int, ...]) -> dict[str | int, Any]:
        """Return the settings of the sections that a `<<` names, of which the first one wins."""
        found: dict[str | int, Any] = {}
        for source in node.value[::-1] if isinstance(node, yaml.SequenceNode) else [node]:
            values = self._value(source, at, above)
            if not isinstance(values, dict):
                what = "`<<` takes a section, or a list of sections, by alias"
                raise self._error(source.start_mark.line, what)
            found |= values
        return found

    def _key(self, node: Any) -> str | int:
        key = self._scalar(node)
        line = node.start_mark.line
        if isinstance(key, bool) or not isinstance(key, str | int):
            what = f"a key must be text or a whole number, got {key!r}; put it in quotes"
            raise self._error(line, what)
        if len(node.value) > _MAX_KEY:
            what = f"a key of {len(node.value):,} characters, at most {_MAX_KEY:,}"
            raise self._error(line, what)
        return key

    def _scalar(self, node: Any) -> Any:
        line = node.start_mark.line
        if node.tag in _TEXT_TAGS:
            return node.value
        if not isinstance(node, yaml.ScalarNode) or node.tag not in _SCALAR_TAGS:
            kind = node.tag.replace(_TAG, "!!")
            raise self._error(line, f"a config cannot hold a value of the kind {kind}")
        try:
            # A text may have halves of surrogate pairs, by escapes: no file could hold it.
            node.value.encode()
            return self._loader.construct_object(node)
        except (ValueError, KeyError) as error:
            what = f"not valid YAML: {shown_value(node.value)} is no value"
            raise self._error(line, what) from error


def _syntax_text(error: yaml.MarkedYAMLError) -> str:
    problem = " ".join((error.problem or error.context or "").split())
    hint = next((hint for part, hint in _HINTS.items() if part in problem), "")
    return f"not valid YAML: {problem}" + (f" ({hint})" if hint else "")
