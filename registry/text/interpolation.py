"""`${...}` in settings, resolved by OmegaConf."""

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..errors import ConfigError, Problem, did_you_mean, shortened
from .values import MAX_REPEATED, TOO_DEEP, KeyPath, below, dotted, plain, walk

_OPEN = "${"
_MISSING = "???"
_REFERENCE = re.compile(r"\$\{([^${}:]+)\}")
_MAX_TEXT = 10_000


def resolve(values: dict[str, Any], origins: Mapping[str, str]) -> None:
    """Replace every `${...}` in the settings by its value.

    Raises:
        ConfigError: all interpolations that cannot be resolved and all values left as `???`.
    """
    texts = {path: one for path, one in walk(values) if isinstance(one, str)}
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
        for part in above:
            section = section[part]
        section[key] = value


def _raise(wrong: Mapping[KeyPath, str], origins: Mapping[str, str]) -> None:
    if wrong:
        named = [(dotted(path), what) for path, what in wrong.items()]
        raise ConfigError([Problem(path, what, origins.get(path, "")) for path, what in named])


def escaped(value: Any) -> Any:
    """Return settings that resolve to `value` itself."""
    if isinstance(value, dict):
        return {key: escaped(one) for key, one in value.items()}
    if isinstance(value, list):
        return [escaped(item) for item in value]
    if not isinstance(value, str) or _OPEN not in value:
        return value
    # Backslashes before a `${` would escape it, so they are doubled.
    *pieces, last = value.split(_OPEN)
    return "".join(re.sub(r"\\+$", lambda end: end[0] * 2, one) + "\\${" for one in pieces) + last


def _fault(text: str) -> str:
    """Return what is wrong with the syntax of an interpolation, "" when nothing is."""
    why = f"longer than {_MAX_TEXT:,} characters" if len(text) > _MAX_TEXT else ""
    try:
        OmegaConf.create([text] if not why else [])
    except RecursionError:
        why = TOO_DEEP
    except OmegaConfBaseException as error:
        why = "a } is missing" if text.count("{") > text.count("}") else _first_line(error)
    return f"{shortened(text)} is no valid interpolation: {why}" if why else ""


class _Expansion:
    """Values with their interpolations resolved, as many as may be repeated."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._conf = OmegaConf.create(values)
        self._places = {dotted(path): value for path, value in walk(values)}
        self._repeated = 0
        self._sizes: dict[int, int] = {}

    def value_at(self, path: KeyPath, text: str) -> Any:
        # Before OmegaConf is asked: it evaluates what a text repeats as often as it does.
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
        """Return how many values are evaluated for a value."""
        if id(value) not in self._sizes:
            # OmegaConf reports one that refers to itself.
            self._sizes[id(value)] = 0
            inner = [one for _, one in below(value)]
            if isinstance(value, str):
                named = _REFERENCE.findall(value)
                inner = [self._places[name] for name in named if name in self._places]
            self._sizes[id(value)] = 1 + sum(map(self._size, inner))
        return self._sizes[id(value)]

    def explain(self, error: BaseException, text: str) -> str:
        if isinstance(error, RecursionError) or "recursi" in str(error).lower():
            return f"{shortened(text)} refers to itself, or through too many others to a value"
        inner = text[text.find(_OPEN) + 2 :].partition("}")[0]
        is_name = ":" not in inner and _OPEN not in inner and not inner.startswith(".")
        is_absent = is_name and isinstance(error, OmegaConfBaseException)
        hint = did_you_mean(inner, self._places) if is_absent else ""
        return f"{shortened(text)} cannot be resolved: {_first_line(error)}{hint}"


def _first_line(error: BaseException) -> str:
    text = (str(error).splitlines() or [type(error).__name__])[0]
    text = re.sub(r"^\w+ raised while resolving interpolation: ", "", text).strip("'\"")
    return shortened(text, 200)
