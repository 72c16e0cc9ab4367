"""Check values against the annotations of a section's dataclass or a function's arguments."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ...primitives.suggestions import did_you_mean, join_choices, meant_by, nearest
from ..arguments import (
    ArgumentProblem,
    are_numbers,
    get_annotations,
    get_options,
    is_only_declared,
    is_tensor,
    title,
)
from ..errors import MOST_SHOWN, Problem, shown_value

T = TypeVar("T")
_OURS = __name__.partition(".")[0]
# Messages list the settings of a section only if it has at most this many.
_MANY = 12

_NUMBER = r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?"
# Words of other programs for values of ours.
_OTHER_WORDS = {"gpu": "cuda", "cuda:0": "cuda", "nvidia": "cuda"}

_KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a section of settings",
    type(None): "null",
}


def check_section(
    section: type[T],
    values: Any,
    where: str,
    problems: list[Problem],
    also: Collection[str] = (),
) -> T | None:
    """Return ``values`` as a ``section`` dataclass, None if they have problems.

    Unknown keys, wrong types, values that are not allowed and missing keys are appended to
    ``problems``. A field's metadata may have a ``minimum`` for numbers.

    Args:
        also: keys that are not allowed here but select another kind of section, such as "type".
    """
    if not isinstance(values, Mapping):
        problems.append(Problem(where, f"must be a section of settings, got {shown_value(values)}"))
        return None
    before = len(problems)
    known = {field.name: field for field in fields(section)}  # type: ignore[arg-type]
    unknown = [str(key) for key in values if key not in known]
    free = [name for name in known if name not in values]
    all_of = "; docs/configs.md describes the settings"
    if len(known) <= _MANY:
        all_of = f"; allowed are {', '.join(known)}"
    for key in unknown:
        # Propose settings that are not given yet. One that is given is proposed only if its name
        # begins with the key.
        likely = [name for name in known if name in free or name.startswith(key)]
        hint = did_you_mean(key, likely) or did_you_mean(key, [*known, *also]) or all_of
        problems.append(Problem(joined(where, key), f"there is no such setting{hint}"))
    if not any(near in also for key in unknown for near in nearest(key, [*known, *also], 1)):
        meant = meant_by(unknown, [*known])
        problems += [
            Problem(joined(where, field.name), "this setting is required and missing")
            for field in known.values()
            if field.default is MISSING
            and field.default_factory is MISSING
            and field.name not in {*values, *meant}
        ]
    hints = get_type_hints(section)
    checked = {
        name: _check_value(values[name], hints[name], field, joined(where, name), problems)
        for name, field in known.items()
        if name in values
    }
    return section(**checked) if len(problems) == before else None


def joined(where: str, key: str) -> str:
    """Return the key path of ``key`` in the section at ``where``."""
    return f"{where}.{key}" if where else key


def _check_value(
    value: Any, hint: Any, field: Field[Any], where: str, problems: list[Problem]
) -> Any:
    options = get_options(hint)
    section = next((option for option in options if is_dataclass(option)), None)
    if section is not None and not _is_alternative(value, options):
        assert isinstance(section, type)
        also = ("type",) if any(get_origin(option) is dict for option in options) else ()
        return check_section(section, value, where, problems, also)
    if not any(fits(value, option) for option in options):
        message = f"must be {_allowed_text(options)}, got {shown_value(value)}"
        problems.append(Problem(where, f"{message}{_near(value, options)}"))
    minimum = field.metadata.get("minimum")
    if isinstance(value, int | float) and minimum is not None and value < minimum:
        problems.append(Problem(where, f"must be at least {minimum}, got {shown_value(value)}"))
    return value


def _is_alternative(value: Any, options: tuple[Any, ...]) -> bool:
    """Return whether ``value`` fits an option other than a section, such as null or a component."""
    if isinstance(value, Mapping):
        return "type" in value and any(get_origin(option) is dict for option in options)
    return any(fits(value, option) for option in options)


def fits(value: Any, hint: Any) -> bool:
    """Return whether ``value`` has the type ``hint``; whole numbers are numbers too."""
    if hint is Any:
        return True
    if get_origin(hint) is Literal:
        return any(value == allowed and type(value) is type(allowed) for allowed in get_args(hint))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if is_dataclass(hint):
        return False
    if get_origin(hint) is list:
        return isinstance(value, list) and all(fits(entry, get_args(hint)[0]) for entry in value)
    if get_origin(hint) is dict:
        return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    return isinstance(value, hint)


def _allowed_text(options: tuple[Any, ...]) -> str:
    """Return the allowed types in words, such as "a number or null"."""
    words: list[str] = []
    for option in options:
        if get_origin(option) is Literal:
            words += [str(value) for value in get_args(option)]
        elif get_origin(option) is list:
            words.append(f"a list of {_KINDS[get_args(option)[0]]}")
        elif option is not type(None) or len(options) == 1:
            words.append(_KINDS[get_origin(option) or option])
    return join_choices(words)


def _near(value: Any, options: tuple[Any, ...]) -> str:
    if not isinstance(value, str):
        return ""
    if remedy := _quotes_hint(value, options):
        return remedy
    if dict[str, Any] in options:
        return f"; write {{type: {value}}}" if len(value) < MOST_SHOWN else ""
    allowed = [str(a) for o in options if get_origin(o) is Literal for a in get_args(o)]
    meant = _OTHER_WORDS.get(value.lower(), "")
    return f"; did you mean {meant}?" if meant in allowed else did_you_mean(value, allowed)


def _quotes_hint(value: str, options: tuple[Any, ...]) -> str:
    """Return the remedy for a number, truth value or null in quotes, "" for other text."""
    kinds = {int: r"[-+]?\d+", float: _NUMBER, bool: "true|false", type(None): "null|none"}
    named = [pattern for kind, pattern in kinds.items() if kind in options]
    quoted = re.fullmatch("|".join(named) or "(?!)", value.strip(), re.IGNORECASE)
    return f"; write {value.strip()} without quotes" if quoted else ""


def value_problems(
    target: Callable[..., Any], arguments: Mapping[str, Any]
) -> Iterator[ArgumentProblem]:
    """Yield arguments whose values do not fit the annotations of ``target``.

    Only arguments annotated with scalar types or ``Tensor`` are checked: others may accept more
    than their annotation says.
    """
    hints = {} if is_only_declared(target) else get_annotations(target)
    for name, value in arguments.items():
        if name not in hints:
            continue
        allowed, remedy = _allowed_instead(value, hints[name]), ""
        if allowed and isinstance(value, str):
            remedy = _quotes_hint(value, get_options(hints[name]))
        elif not allowed and str(target.__module__).startswith(f"{_OURS}."):
            allowed, remedy = _section_instead(value, hints[name])
        if not allowed and isinstance(value, list) and not _admits_text(hints[name]):
            quoted = [
                text for text in value if isinstance(text, str) and re.fullmatch(_NUMBER, text)
            ]
            allowed, remedy = ("numbers", "; write them without quotes") if quoted else ("", "")
        if allowed:
            message = f"must be {allowed}, got {shown_value(value)} ({title(target)}){remedy}"
            yield ArgumentProblem(name, message)


def _section_instead(value: Any, hint: Any) -> tuple[str, str]:
    """Return what an argument of ours must be instead of a text or number, and the remedy.

    Both are "" if the value is allowed, or if its type cannot be judged.
    """
    options = [option for option in get_options(hint) if option is not type(None)]
    kinds = {title(get_origin(option) or option) for option in options}
    if not isinstance(value, str | int | float) or not kinds <= {"Module", "Callable", "Mapping"}:
        return "", ""
    if kinds == {"Mapping"}:
        return "a section of settings", ""
    shows = isinstance(value, str) and len(value) < MOST_SHOWN
    return "a section with a type", f"; write {{type: {value}}}" if shows else ""


def _admits_text(hint: Any) -> bool:
    """Return whether text may occur anywhere in a value of the type ``hint``."""
    is_leaf = hint in (int, float, bool, type(None), Ellipsis) or title(hint) == "Tensor"
    return not is_leaf and (not get_args(hint) or any(map(_admits_text, get_args(hint))))


def _allowed_instead(value: Any, hint: Any) -> str:
    """Return the values that ``hint`` allows, in words, "" if ``value`` is allowed."""
    options = tuple(option for option in get_options(hint) if title(option) != "Tensor")
    is_scalar = value is None or isinstance(value, str | int | float)
    if is_tensor(hint):
        has_parts = isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value)
        is_list = isinstance(value, list) and not has_parts and not are_numbers(value)
        # Reject scalars only for "Tensor or None": an argument annotated "Tensor" may accept them.
        is_wrong = is_list or (options and is_scalar and value is not None)
        return join_choices(["a list of numbers", *["null" for _ in options]]) if is_wrong else ""
    if not is_scalar or not options or not all(map(_is_plain, options)):
        return ""
    if isinstance(value, float) and value.is_integer() and int in options:
        # YAML reads 1e3 as a float.
        return ""
    return "" if any(fits(value, option) for option in options) else _allowed_text(options)


def _is_plain(hint: Any) -> bool:
    """Return whether ``hint`` is a number, text, truth value, null or literal."""
    return hint in (bool, int, float, str, type(None)) or get_origin(hint) is Literal
