"""Check and merge settings, which are dicts, lists and scalars, and resolve ``${...}``."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ...primitives.suggestions import did_you_mean
from ..errors import ConfigError, Problem, shortened

KeyPath: TypeAlias = tuple[str | int, ...]

BASE = "_base_"
DELETE = "_delete_"
# Keys that are only allowed in files.
_IN_FILES = {
    BASE: "is only allowed at the top of a file",
    DELETE: "is only allowed in a section of a file; an override or a dict replaces the section",
}
# Recursive functions use several frames of Python's stack per level.
MAX_DEPTH = 50
TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"
# The maximum number of values that aliases and interpolations may repeat.
MAX_REPEATED = 10_000
_OPEN = "${"
_MISSING = "???"
_REFERENCE = re.compile(r"\$\{([^${}:]+)\}")
# The start of an interpolation, unless escaped, and its possible end.
_BRACKETS = re.compile(r"(?<!\\)\$\{|\}")
_MAX_TEXT = 10_000
# The maximum number of unknown names with suggestions, which are slow: each name is compared with
# every name of the config.
_MAX_HINTS = 20


def dotted(path: Sequence[str | int]) -> str:
    """Return "a.list.0.x"."""
    return ".".join(str(key) for key in path)


def below(value: Any) -> Collection[tuple[Any, Any]]:
    """Return the keys and values of a section, or the indices and values of a list."""
    if isinstance(value, dict):
        return value.items()
    return list(enumerate(value)) if isinstance(value, list) else ()


def walk(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every value with its path, sections before their contents."""
    yield path, value
    for key, child in below(value):
        yield from walk(child, (*path, key))


def leaves(
    value: Any,
    path: KeyPath = (),
    *,
    contents: Callable[[Any], Iterable[tuple[Any, Any]] | None] = lambda value: (
        below(value) or None
    ),
) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the innermost values with their paths, by default also empty sections and lists.

    Args:
        contents: returns the keys and values in a container, None for an innermost value.
    """
    entries = contents(value)
    if entries is None:
        yield path, value
        return
    for key, entry in entries:
        yield from leaves(entry, (*path, key), contents=contents)


def own_key(section: dict[Any, Any], key: str) -> str | int:
    """Return the section's key for a part of a path: "1" may mean 1."""
    number = int(key) if re.fullmatch(r"-?[0-9]{1,30}", key) else key
    return number if key not in section and number in section and str(number) == key else key


def merge(base: Any, over: Any) -> Any:
    """Return ``over`` merged over ``base``: sections are merged, everything else is replaced.

    A section in ``over`` with ``_delete_: true`` replaces the one in ``base`` as a whole.
    """
    # Not OmegaConf.merge, which evaluates interpolations, however long they become.
    if isinstance(over, list):
        return [merge(None, entry) for entry in over]
    if not isinstance(over, dict):
        return over
    inherited = base if isinstance(base, dict) and over.get(DELETE) is not True else {}
    changed = {
        key: merge(inherited.get(key), value) for key, value in over.items() if key != DELETE
    }
    return {**inherited, **changed}


def remaining_origins(origins: Mapping[str, str], over: Mapping[Any, Any]) -> dict[str, str]:
    """Return the origins of the settings that remain when ``over`` is merged over them."""
    replaced = {
        dotted(path)
        for path, value in walk(over)
        if path and (not isinstance(value, dict) or value.get(DELETE) is True)
    }
    return {
        path: origin
        for path, origin in origins.items()
        if replaced.isdisjoint(accumulate(path.split("."), "{}.{}".format))
    }


def plain(value: Any, path: KeyPath = ()) -> Any:
    """Return a copy as dicts, lists and scalars; a class or function becomes its import path.

    Raises:
        TypeError: the type of a value is not allowed in a config; the message names its path.
    """
    if len(path) > MAX_DEPTH:
        raise TypeError(f"{dotted(path[:3])}: {TOO_DEEP}")
    if isinstance(value, Mapping):
        for key in value:
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise TypeError(f"{dotted((*path, key))}: a key must be a str or int, got {key!r}")
            if not path and key == "":
                raise TypeError("a setting needs a name, got one with an empty key")
        return {key: plain(entry, (*path, key)) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, (*path, at)) for at, entry in enumerate(value)]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Path):
        return str(value)
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    if not callable(value) or "<" in name or not name.strip("."):
        raise TypeError(
            f"{dotted(path)}: a config holds numbers, text, true/false, null, lists and dicts, "
            f"got {value!r} of type {type(value).__name__}"
        )
    return name


def refuse_file_keys(values: dict[str, Any], origins: Mapping[str, str]) -> None:
    """Raise ConfigError for keys that are only allowed in files."""
    paths = (path for path, _ in walk(values) if path)
    _raise({path: _IN_FILES[path[-1]] for path in paths if path[-1] in _IN_FILES}, origins)


def resolve(values: dict[str, Any], origins: Mapping[str, str]) -> None:
    """Replace every ``${...}`` in the settings with its value.

    Raises:
        ConfigError: a value cannot be resolved, or is ``???``.
    """
    texts = {path: text for path, text in walk(values) if isinstance(text, str)}
    waiting = {path: text for path, text in texts.items() if _OPEN in text}
    faults = {text: _fault(text) for text in set(waiting.values())}
    wrong = {
        path: f"a value is required here: give one with {shortened(dotted(path))}=..."
        for path, text in texts.items()
        if text == _MISSING
    }
    wrong |= {path: faults[text] for path, text in waiting.items() if faults[text]}
    _raise(wrong, origins)
    if not waiting:
        return
    expansion = _Expansion(values)
    resolved: dict[KeyPath, Any] = {}
    for path, text in waiting.items():
        try:
            resolved[path] = expansion.value_at(path, text)
        except (OmegaConfBaseException, RecursionError, TypeError, ValueError) as error:
            wrong[path] = expansion.explain(error, text)
    _raise(wrong, origins)
    for (*above, key), value in resolved.items():
        section: Any = values
        for key_above in above:
            section = section[key_above]
        section[key] = value


def _raise(wrong: Mapping[KeyPath, str], origins: Mapping[str, str]) -> None:
    if wrong:
        named = [(dotted(path), message) for path, message in wrong.items()]
        raise ConfigError(
            [Problem(path, message, origins.get(path, "")) for path, message in named]
        )


def escaped(value: Any) -> Any:
    """Return settings that resolve to ``value`` itself."""
    if isinstance(value, dict):
        return {key: escaped(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [escaped(entry) for entry in value]
    if not isinstance(value, str) or _OPEN not in value:
        return value
    # Backslashes before a `${` would escape it, so they are doubled.
    *heads, tail = value.split(_OPEN)
    return "".join(re.sub(r"\\+$", lambda end: end[0] * 2, head) + "\\${" for head in heads) + tail


def _fault(text: str) -> str:
    """Return a message about the syntax of an invalid interpolation; "" if it is valid."""
    why = f"longer than {_MAX_TEXT:,} characters" if len(text) > _MAX_TEXT else ""
    steps = (1 if bracket == _OPEN else -1 for bracket in _BRACKETS.findall(text))
    # Checked before parsing: how deep the parser can recurse depends on the stack of the caller.
    if max(accumulate(steps, lambda depth, step: max(depth + step, 0), initial=0)) > MAX_DEPTH:
        why = why or TOO_DEEP
    try:
        OmegaConf.create([text] if not why else [])
    except RecursionError:
        why = TOO_DEEP
    except OmegaConfBaseException as error:
        why = "a } is missing" if text.count("{") > text.count("}") else _first_line(error)
    return f"{shortened(text)} is not a valid interpolation: {why}" if why else ""


class _Expansion:
    """Resolves interpolations, up to a limit of repeated values."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._conf = OmegaConf.create(values)
        self._places = {dotted(path): value for path, value in walk(values)}
        self._repeated = 0
        self._sizes: dict[int, int] = {}
        self._hints: dict[str, str] = {}

    def value_at(self, path: KeyPath, text: str) -> Any:
        # Checked before the evaluation: OmegaConf evaluates repeated values every time.
        self._repeated += self._size(text)
        if self._repeated > MAX_REPEATED:
            raise ValueError(f"interpolations that repeat more than {MAX_REPEATED:,} values")
        value: Any = self._conf
        for key in path:
            value = value[key]
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
        return plain(value, path)

    def _size(self, value: Any) -> int:
        """Return how many values OmegaConf evaluates in order to resolve a value."""
        if id(value) not in self._sizes:
            # Ends the recursion if a value refers to itself, which OmegaConf reports.
            self._sizes[id(value)] = 0
            inner = [child for _, child in below(value)]
            if isinstance(value, str):
                named = _REFERENCE.findall(value)
                inner = [self._places[name] for name in named if name in self._places]
            self._sizes[id(value)] = 1 + sum(map(self._size, inner))
        return self._sizes[id(value)]

    def explain(self, error: BaseException, text: str) -> str:
        if isinstance(error, RecursionError) or "recursi" in str(error).lower():
            return f"{shortened(text)} refers to itself, or is a chain of too many interpolations"
        inner = text[text.find(_OPEN) + 2 :].partition("}")[0]
        is_name = ":" not in inner and _OPEN not in inner and not inner.startswith(".")
        is_absent = is_name and isinstance(error, OmegaConfBaseException)
        if is_absent and inner not in self._hints and len(self._hints) < _MAX_HINTS:
            self._hints[inner] = did_you_mean(inner, self._places)
        why = _first_line(error) + self._hints.get(inner, "")
        return f"{shortened(text)} cannot be resolved: {why}"


def _first_line(error: BaseException) -> str:
    text = (str(error).splitlines() or [type(error).__name__])[0]
    text = re.sub(r"^\w+ raised while resolving interpolation: ", "", text).strip("'\"")
    return shortened(" ".join(map(shortened, text.split())), 200)
