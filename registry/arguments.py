"""Check the arguments of a class or function before it is called."""

import inspect
import re
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import is_dataclass
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from ..primitives.suggestions import did_you_mean, meant_by, nearest

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class ArgumentProblem(NamedTuple):
    """A wrong or missing argument, with a message."""

    name: str
    what: str


def title(target: object) -> str:
    """Return the name of a class or function for messages."""
    return str(getattr(target, "__name__", None) or repr(target))


def get_signature(target: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature against which a config is checked; None if Python has none.

    A class that passes its ``**kwargs`` on may define the class method
    ``config_signature() -> inspect.Signature``, so that these names are checked too.
    """
    declared = getattr(target, "config_signature", None)
    try:
        return declared() if declared is not None else inspect.signature(target)
    except (TypeError, ValueError):
        return None


def is_only_declared(target: Callable[..., Any]) -> bool:
    """Return whether the called function may accept arguments that are not in the signature.

    Strict dataclasses of huggingface_hub, pydantic's models and functions with ``functools.wraps``
    declare a signature, but call a function that accepts ``**kwargs``.
    """
    signature = get_signature(target)
    called = constructor(target)
    if signature is None or _takes_any(signature) or hasattr(target, "config_signature"):
        return False
    return inspect.isfunction(called) and _takes_any(
        inspect.signature(called, follow_wrapped=False)
    )


def _takes_any(signature: inspect.Signature) -> bool:
    return any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()
    )


def constructor(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return the ``__init__`` of a class, and any other object unchanged."""
    return getattr(target, "__init__") if isinstance(target, type) else target  # noqa: B009


def plain_names(target: Callable[..., Any]) -> Collection[str]:
    """Return ``config_plain``: the arguments whose nested dicts are passed without being built."""
    names: Collection[str] = getattr(target, "config_plain", ())
    return names


def signature_text(target: Callable[..., Any]) -> str:
    """Return the call with defaults and without types, "AdamW(params, lr=0.001, ...)"."""
    signature = get_signature(target)
    if signature is None:
        return f"{title(target)}(...)"
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return f"{title(target)}{inspect.Signature(plain)}"


def get_parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of ``target`` by name; empty if it has no known signature."""
    signature = get_signature(target)
    return signature.parameters if signature is not None else {}


def required_names(target: Callable[..., Any]) -> set[str]:
    """Return the names of the arguments without a default."""
    parameters = get_parameters(target).values()
    return {p.name for p in parameters if p.kind in _BY_NAME and p.default is p.empty}


def get_annotations(target: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations by argument, except those that cannot be evaluated."""
    parameters = get_parameters(target).values()
    hints = {p.name: p.annotation for p in parameters if not isinstance(p.annotation, str)}
    try:
        # A dataclass may inherit fields from other modules: resolve each in its own module.
        source = target if is_dataclass(target) else constructor(target)
        return {**hints, **get_type_hints(source)}
    except (NameError, TypeError, AttributeError):
        return hints


def get_options(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or a tuple with the hint itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def is_tensor(hint: Any) -> bool:
    """Return whether a hint is ``Tensor`` or ``Tensor | None``, by names: torch is not imported."""
    return {title(option) for option in get_options(hint)} - {"NoneType"} == {"Tensor"}


def are_numbers(value: Any) -> bool:
    """Return whether ``value`` is a nested or flat list of numbers."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(number) in (int, float) or are_numbers(number) for number in value)
    )


def blame(target: Callable[..., Any], names: Collection[str], text: str) -> tuple[str, str]:
    """Return the given argument that an error text is about and, if it is misspelt, its real name.

    The real name is "" if the argument exists. Both are "" if the text names no argument.
    """
    unknown = set(names) - get_parameters(target).keys()
    for word in re.findall(r"\w+", text):
        if word in names:
            return word, ""
        for near in nearest(word, unknown, limit=1, cutoff=0.8):
            return near, word
    return "", ""


def argument_problems(
    target: Callable[..., Any], names: Collection[str], runtime: Collection[str] = ()
) -> list[ArgumentProblem]:
    """Return the problems of calling ``target`` with arguments of these names, unknown ones first.

    A missing name is not reported if an unknown name may be a misspelling of it.

    Args:
        target: the class or function.
        names: the names of the arguments in the config.
        runtime: the names of arguments that are supplied when the config is built.
    """
    signature = get_signature(target)
    if signature is None or is_only_declared(target):
        return []
    parameters = signature.parameters
    by_name = [p.name for p in parameters.values() if p.kind in _BY_NAME]
    unknown = [name for name in names if name not in by_name]
    missing = required_names(target) - {*names, *runtime}
    problems: list[ArgumentProblem] = []
    if not _takes_any(signature):
        settable = [name for name in by_name if name not in runtime]
        free = [name for name in settable if name not in names]
        problems = [ArgumentProblem(n, _unknown_text(target, n, free, settable)) for n in unknown]
        missing -= meant_by(unknown, free)
    missing_in_order = sorted(missing, key=by_name.index)
    problems += [ArgumentProblem(n, _missing_text(target, n, unknown)) for n in missing_in_order]
    by_position = f"{title(target)} accepts it only by position, which a config cannot pass"
    return problems + [
        ArgumentProblem(p.name, by_position)
        for p in parameters.values()
        if p.kind is p.POSITIONAL_ONLY and p.default is p.empty
    ]


def _unknown_text(
    target: Callable[..., Any], name: str, free: list[str], settable: list[str]
) -> str:
    hint = did_you_mean(name, free) or did_you_mean(name, settable) or did_you_mean(name, ["type"])
    if not hint:
        hint = f"; it also takes {', '.join(free)}" if free else "; it takes no other arguments"
    return f"{title(target)} has no such argument{hint}"


def _missing_text(target: Callable[..., Any], name: str, unknown: list[str]) -> str:
    close = nearest(name, unknown, limit=1)
    hint = f"; is {close[0]} a misspelling of it?" if close else ""
    return f"is missing, {title(target)} needs it{hint}"
