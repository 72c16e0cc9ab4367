"""Options of an optimizer by parameter, checked by name before there is a model."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from ..arguments import signature_of, title
from ..errors import Problem, did_you_mean, shown_value
from .schema import CustomKeySection, ParamwiseSection
from .typed import check_section
from .values import value_problems

_OURS = ("lr_mult", "decay_mult", "lr", "weight_decay")
_DECAYS = ("bias_decay_mult", "norm_decay_mult", "flat_decay_mult", "dwconv_decay_mult")


def check_paramwise(
    values: Any, optimizer: Callable[..., Any] | None, where: str, problems: list[Problem]
) -> ParamwiseSection | None:
    """Return `values` as options by parameter, None when something is wrong with them.

    Args:
        optimizer: whose arguments may be set by a custom key as well, beside the four options
            that all have.
        where: the key path of `values`, for the problems.
        problems: those found are added.
    """
    before = len(problems)
    section = check_section(ParamwiseSection, values, where, problems)
    keys = values.get("custom_keys") if isinstance(values, Mapping) else None
    for key, options in keys.items() if isinstance(keys, Mapping) else ():
        problems += _key_problems(options, optimizer, f"{where}.custom_keys.{key}")
    if isinstance(values, Mapping) and optimizer is not None:
        problems += _decay_problems(values, optimizer, where)
    return section if len(problems) == before else None


def default_of(optimizer: Callable[..., Any], name: str) -> Any:
    """Return the default of an optimizer's argument, None where it has none."""
    signature = signature_of(optimizer)
    parameter = signature.parameters.get(name) if signature is not None else None
    return None if parameter is None or parameter.default is parameter.empty else parameter.default


def _key_problems(
    options: Any, optimizer: Callable[..., Any] | None, where: str
) -> Iterator[Problem]:
    if not isinstance(options, Mapping):
        yield Problem(where, f"must be options such as lr_mult, got {shown_value(options)}")
        return
    found: list[Problem] = []
    ours = {name: value for name, value in options.items() if name in _OURS}
    check_section(CustomKeySection, ours, where, found)
    yield from found
    for absolute, multiple in (("lr", "lr_mult"), ("weight_decay", "decay_mult")):
        if absolute in ours and multiple in ours:
            yield Problem(f"{where}.{absolute}", f"stands beside {multiple}, give one of the two")
    others = {name: value for name, value in options.items() if name not in _OURS}
    known, takes_any = _group_options(optimizer)
    for name in [name for name in others if name not in known and not takes_any]:
        of = "" if optimizer is None else f" of {title(optimizer)}"
        hint = did_you_mean(name, [*_OURS, *known]) or f"; known are {', '.join([*_OURS, *known])}"
        yield Problem(f"{where}.{name}", f"there is no such option{of}{hint}")
        del others[name]
    if optimizer is not None:
        for problem in value_problems(optimizer, others):
            yield Problem(f"{where}.{problem.name}", problem.what)


def _decay_problems(
    values: Mapping[str, Any], optimizer: Callable[..., Any], where: str
) -> Iterator[Problem]:
    """Yield the weight decays of an optimizer that has none."""
    known, takes_any = _group_options(optimizer, without=())
    if takes_any or "weight_decay" in known:
        return
    keys = values.get("custom_keys")
    set_here = [name for name in _DECAYS if values.get(name) is not None]
    for key, options in keys.items() if isinstance(keys, Mapping) else ():
        names = options if isinstance(options, Mapping) else ()
        decays = [name for name in ("decay_mult", "weight_decay") if name in names]
        set_here += [f"custom_keys.{key}.{name}" for name in decays]
    for name in set_here:
        yield Problem(f"{where}.{name}", f"{title(optimizer)} has no weight_decay")


def _group_options(
    optimizer: Callable[..., Any] | None, without: Collection[str] = _OURS
) -> tuple[list[str], bool]:
    """Return the arguments that may differ by group, and whether any name is taken."""
    signature = None if optimizer is None else signature_of(optimizer)
    if signature is None:
        return [], optimizer is not None
    parameters = signature.parameters.values()
    by_name = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [name for name in by_name if name not in ("params", *without)]
    return names, any(p.kind is p.VAR_KEYWORD for p in parameters)
