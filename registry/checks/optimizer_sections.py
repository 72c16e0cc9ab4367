"""Check the sections ``optimizer``, ``optim_wrapper`` and ``schedulers``."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from ...primitives.suggestions import did_you_mean, join_choices, nearest
from ..arguments import get_parameters, get_signature, title
from ..catalog import OPTIM_WRAPPERS, OPTIMIZERS, PARAM_SCHEDULERS
from ..errors import Problem, shown_value
from ..registry import find_component
from .check_component import Later, add_type, component_check
from .schema import SCHEDULER_KEYS, CustomKeySection, ParamwiseSection, SchedulerSection
from .typed import check_section, fits, value_problems

_WRAPPER = "OptimWrapper"
_OURS = ("lr_mult", "decay_mult", "lr", "weight_decay")
_DECAYS = ("bias_decay_mult", "norm_decay_mult", "flat_decay_mult", "dwconv_decay_mult")


def named_optimizers(optimizer: Any) -> dict[str, Any]:
    """Return the optimizers of the section by name; empty if it is a single optimizer."""
    if not isinstance(optimizer, Mapping) or "type" in optimizer:
        return {}
    if not any(
        isinstance(section, Mapping) and "type" in section for section in optimizer.values()
    ):
        return {}
    return dict(optimizer)


def stepping_class(settings: Mapping[str, Any]) -> Any:
    """Return the class that makes the updates; None if unknown.

    Parameter groups may set its arguments. For an optimizer that wraps another one, this is its
    ``optimizer_class``.
    """
    wanted = settings.get("optimizer_class", settings.get("type"))
    if isinstance(wanted, Mapping):
        wanted = wanted.get("_ref_")
    try:
        return find_component({**settings, "type": wanted}, OPTIMIZERS)
    except (KeyError, TypeError):
        return None


def add_wrapper_type(optim_wrapper: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """Add the default type to one optimizer wrapper's settings, but not to settings by name."""
    if _is_by_name(optim_wrapper, named_optimizers(optimizer)):
        return dict(optim_wrapper)
    return add_type(optim_wrapper, _WRAPPER)


def optim_wrapper_sections(optim_wrapper: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """Return the settings of the optimizer wrappers by the names of their optimizers.

    A single optimizer has the name "". With several optimizers, the section either applies to all
    of them, or has separate settings by name.
    """
    names = named_optimizers(optimizer)
    if not _is_by_name(optim_wrapper, names):
        common = add_type(optim_wrapper, _WRAPPER)
        return dict.fromkeys(names, common) or {"": common}
    by_name = {name: optim_wrapper.get(name) for name in (*names, *optim_wrapper)}
    return {
        name: add_type(one or {}, _WRAPPER) if isinstance(one, Mapping | None) else one
        for name, one in by_name.items()
    }


def optimization_checks(
    values: Mapping[str, Any], schedulers: Mapping[str, SchedulerSection]
) -> Iterator[Problem | Later]:
    """Yield problems that can be found without classes, and the checks that need classes."""
    optimizer = values.get("optimizer")
    names = named_optimizers(optimizer)
    for name, settings in names.items():
        yield from _optimizer_checks(settings, f"optimizer.{name}", several=True)
    if not names and isinstance(optimizer, Mapping):
        yield from _optimizer_checks(optimizer, "optimizer", several=False)
    optim_wrapper = values.get("optim_wrapper")
    if isinstance(optim_wrapper, Mapping):
        yield from _wrapper_checks(optim_wrapper, names, optimizer)
    for where, section in schedulers.items():
        yield component_check(section.scheduler, PARAM_SCHEDULERS, where, ("optimizer",))
        yield from _choice_problems(section, where, names)
        if section.until is not None and section.until <= section.after:
            message = f"must be greater than after ({section.after}), got {section.until}"
            yield Problem(f"{where}.until", message)


def missing_setting(section: SchedulerSection, where: str, name: str, message: str) -> Problem:
    """Return the problem that a scheduler's setting is missing or misspelt."""
    for key in section.scheduler:
        if name in nearest(key, SCHEDULER_KEYS):
            return Problem(f"{where}.{key}", f"there is no such setting; did you mean {name}?")
    return Problem(f"{where}.{name}", message)


def _optimizer_checks(settings: Any, where: str, *, several: bool) -> Iterator[Problem | Later]:
    ours = ("paramwise", "params") if several else ("paramwise",)
    bare = settings
    if isinstance(settings, Mapping):
        bare = {name: value for name, value in settings.items() if name not in ours}
    yield component_check(bare, OPTIMIZERS, where, ("params",))
    if not isinstance(settings, Mapping):
        return
    params = settings.get("params")
    if several and "params" in settings and not (fits(params, list[str]) and params):
        message = "must be a list of name patterns or paths of modules, got"
        yield Problem(f"{where}.params", f"{message} {shown_value(params)}")
    if settings.get("paramwise") is not None:
        at = f"{where}.paramwise"
        option_problems: list[Problem] = []
        _check_options(settings["paramwise"], at, option_problems)
        yield from option_problems
        yield partial(_group_problems, settings, at)


def _group_problems(settings: Mapping[str, Any], where: str) -> Iterator[Problem]:
    optimizer = stepping_class(settings)
    # An unknown class is reported by another check.
    if optimizer is not None:
        yield from _class_problems(settings["paramwise"], optimizer, where)


def _is_by_name(optim_wrapper: Mapping[str, Any], names: Mapping[str, Any]) -> bool:
    if not names or "type" in optim_wrapper:
        return False
    sections = all(isinstance(section, Mapping) for section in optim_wrapper.values())
    # Only these settings of a wrapper may be sections.
    is_one_wrapper = not sections or {"clip_grad", "loss_weight"} & set(optim_wrapper)
    return bool(optim_wrapper and not is_one_wrapper) or any(key in names for key in optim_wrapper)


def _wrapper_checks(
    optim_wrapper: Mapping[str, Any], names: Mapping[str, Any], optimizer: Any
) -> Iterator[Problem | Later]:
    by_name = _is_by_name(optim_wrapper, names)
    for name, one in optim_wrapper_sections(optim_wrapper, optimizer).items():
        where = f"optim_wrapper.{name}" if by_name else "optim_wrapper"
        if by_name and name not in names:
            hint = did_you_mean(name, names) or f"; it must be {join_choices(list(names))}"
            yield Problem(where, f"there is no such optimizer{hint}")
            continue
        clip = one.get("clip_grad") if isinstance(one, Mapping) else None
        if isinstance(clip, int | float | str):
            largest = 1.0 if isinstance(clip, bool | str) else clip
            message = f"must be a section of settings, got {shown_value(clip)}"
            yield Problem(f"{where}.clip_grad", f"{message}; write {{max_norm: {largest}}}")
        yield component_check(one, OPTIM_WRAPPERS, where, ("optimizer",))
        if not by_name:
            return


def _choice_problems(
    section: SchedulerSection, where: str, names: Mapping[str, Any]
) -> Iterator[Problem]:
    chosen = section.optimizer
    choices = f"one of the optimizers: {join_choices(list(names))}"
    if names and chosen is None:
        message = f"is missing: a scheduler steps {choices}"
        yield missing_setting(section, where, "optimizer", message)
    elif names and isinstance(chosen, str) and chosen not in names:
        message = f"there is no optimizer {shown_value(chosen)}{did_you_mean(chosen, names)}"
        yield Problem(f"{where}.optimizer", f"{message}; it must be {choices}")
    elif chosen is not None and not names:
        yield Problem(f"{where}.optimizer", "remove this setting: the only optimizer has no name")


def check_paramwise(
    values: Any, optimizer: Callable[..., Any] | None, where: str, problems: list[Problem]
) -> ParamwiseSection | None:
    """Check a ``paramwise`` section and return it, or None if it has problems.

    Args:
        optimizer: a class whose arguments custom keys may set, in addition to the four general
            options.
        where: the key path of ``values``, for the problems.
        problems: a list to which the problems are appended.
    """
    before = len(problems)
    section = _check_options(values, where, problems)
    problems += _class_problems(values, optimizer, where)
    return section if len(problems) == before else None


def get_default(optimizer: Callable[..., Any], name: str) -> Any:
    """Return the default of an optimizer's argument, None if it has no default."""
    parameter = get_parameters(optimizer).get(name)
    return None if parameter is None or parameter.default is parameter.empty else parameter.default


def _custom_keys(values: Any) -> dict[str, Any]:
    keys = values.get("custom_keys") if isinstance(values, Mapping) else None
    return dict(keys) if isinstance(keys, Mapping) else {}


def _check_options(values: Any, where: str, problems: list[Problem]) -> ParamwiseSection | None:
    """Check the options of a ``paramwise`` section that do not depend on the optimizer."""
    section = check_section(ParamwiseSection, values, where, problems)
    if section is not None and (section.layer_decay is None) != (not section.layers):
        name, other, form = "layer_decay", "layers", "[net.blocks.*], from the input to the output"
        if section.layer_decay is None:
            name, other, form = "layers", "layer_decay", "0.75"
        problems.append(Problem(f"{where}.{name}", f"needs {other} too, such as {other}: {form}"))
    for key, options in _custom_keys(values).items():
        at = f"{where}.custom_keys.{key}"
        if not isinstance(options, Mapping):
            message = f"must be options such as lr_mult, got {shown_value(options)}"
            problems.append(Problem(at, message))
            continue
        ours = {name: value for name, value in options.items() if name in _OURS}
        check_section(CustomKeySection, ours, at, problems)
        for absolute, multiple in (("lr", "lr_mult"), ("weight_decay", "decay_mult")):
            if absolute in ours and multiple in ours:
                message = f"cannot be combined with {multiple}; set only one of them"
                problems.append(Problem(f"{at}.{absolute}", message))
    return section


def _class_problems(
    values: Any, optimizer: Callable[..., Any] | None, where: str
) -> Iterator[Problem]:
    """Yield the options of a ``paramwise`` section that the optimizer's groups do not support."""
    parameters = get_parameters(optimizer).values() if optimizer is not None else ()
    takes_any = optimizer is not None and get_signature(optimizer) is None
    takes_any = takes_any or any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    allowed = [*_OURS, *(name for name in named if name not in ("params", *_OURS))]
    sections = values if isinstance(values, Mapping) else {}
    decays = [name for name in _DECAYS if sections.get(name) is not None]
    for key, options in _custom_keys(values).items():
        names = options if isinstance(options, Mapping) else {}
        at = f"{where}.custom_keys.{key}"
        decay_options = [option for option in ("decay_mult", "weight_decay") if option in names]
        decays += [f"custom_keys.{key}.{option}" for option in decay_options]
        optimizer_options = {name: value for name, value in names.items() if name not in _OURS}
        for name in [name for name in optimizer_options if name not in allowed and not takes_any]:
            of = "" if optimizer is None else f" of {title(optimizer)}"
            hint = did_you_mean(name, allowed) or f"; the options are {', '.join(allowed)}"
            yield Problem(f"{at}.{name}", f"there is no such option{of}{hint}")
            del optimizer_options[name]
        if optimizer is not None:
            for problem in value_problems(optimizer, optimizer_options):
                yield Problem(f"{at}.{problem.name}", problem.what)
    if optimizer is not None and not takes_any and "weight_decay" not in named:
        for name in decays:
            yield Problem(f"{where}.{name}", f"{title(optimizer)} has no weight_decay")
