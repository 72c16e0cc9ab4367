"""The sections `optimizer`, `optim_wrapper` and `schedulers`, of one optimizer or several."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ..catalog import OPTIM_WRAPPERS, OPTIMIZERS, PARAM_SCHEDULERS
from ..errors import Problem, did_you_mean, one_of, shown_value
from ..registry import find_type
from .check_component import check_component, with_type
from .paramwise import check_paramwise
from .schema import SchedulerSection
from .typed import fits

_WRAPPER = "OptimWrapper"


def named_optimizers(optimizer: Any) -> dict[str, Any]:
    """Return the optimizers of the section by name; empty where it is a single one."""
    if not isinstance(optimizer, Mapping) or "type" in optimizer:
        return {}
    if not any(isinstance(one, Mapping) and "type" in one for one in optimizer.values()):
        return {}
    return dict(optimizer)


def stepping_class(settings: Mapping[str, Any]) -> Any:
    """Return the class whose options an optimizer's groups have; None where there is none.

    That is the `optimizer_class` of one that steps by another.
    """
    wanted = settings.get("optimizer_class", settings.get("type"))
    if isinstance(wanted, Mapping):
        wanted = wanted.get("_ref_")
    try:
        return find_type(wanted, OPTIMIZERS)
    except (KeyError, TypeError):
        return None


def with_wrapper_type(optim_wrapper: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """Return the settings of an optimizer wrapper with their type, or those by name as they are."""
    if _by_name(optim_wrapper, named_optimizers(optimizer)):
        return dict(optim_wrapper)
    return with_type(optim_wrapper, _WRAPPER)


def optim_wrapper_sections(optim_wrapper: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """Return the settings of each optimizer's wrapper by its name, "" where there is one.

    With several optimizers the section has the settings of all, or those of each by name.
    """
    names = named_optimizers(optimizer)
    if not _by_name(optim_wrapper, names):
        common = with_type(optim_wrapper, _WRAPPER)
        return dict.fromkeys(names, common) or {"": common}
    own = {name: optim_wrapper.get(name) or {} for name in (*names, *optim_wrapper)}
    return {
        name: with_type(one, _WRAPPER) if isinstance(one, Mapping) else one
        for name, one in own.items()
    }


def optimization_problems(
    values: Mapping[str, Any], schedulers: Mapping[str, SchedulerSection], *, imports: bool
) -> Iterator[Problem]:
    """Yield what is wrong with the three sections of a run config.

    Args:
        imports: False looks only at what needs no class.
    """
    optimizer = values.get("optimizer")
    names = named_optimizers(optimizer)
    for name, one in names.items():
        yield from _optimizer_problems(one, f"optimizer.{name}", several=True, imports=imports)
    if not names and isinstance(optimizer, Mapping):
        yield from _optimizer_problems(optimizer, "optimizer", several=False, imports=imports)
    optim_wrapper = values.get("optim_wrapper")
    if isinstance(optim_wrapper, Mapping):
        yield from _wrapper_problems(optim_wrapper, names, optimizer, imports)
    for where, section in schedulers.items():
        scheduler, supplied = section.scheduler, ("optimizer",)
        yield from check_component(scheduler, PARAM_SCHEDULERS, where, supplied, imports=imports)
        yield from _choice_problems(section, where, names)
        if section.until is not None and section.until <= section.after:
            what = f"must be greater than after ({section.after}), got {section.until}"
            yield Problem(f"{where}.until", what)


def _optimizer_problems(
    settings: Any, where: str, *, several: bool, imports: bool
) -> Iterator[Problem]:
    ours = ("paramwise", "params") if several else ("paramwise",)
    bare = settings
    if isinstance(settings, Mapping):
        bare = {name: value for name, value in settings.items() if name not in ours}
    yield from check_component(bare, OPTIMIZERS, where, ("params",), imports=imports)
    if not isinstance(settings, Mapping):
        return
    params = settings.get("params")
    if several and "params" in settings and not (fits(params, list[str]) and params):
        what = "must be a list of name patterns or paths of modules, got"
        yield Problem(f"{where}.params", f"{what} {shown_value(params)}")
    if settings.get("paramwise") is not None:
        found: list[Problem] = []
        stepping = stepping_class(settings) if imports else _any_class
        check_paramwise(settings["paramwise"], stepping, f"{where}.paramwise", found)
        yield from found


def _any_class(**options: Any) -> None:
    """Stand for an optimizer whose options are not known yet."""


def _by_name(optim_wrapper: Mapping[str, Any], names: Mapping[str, Any]) -> bool:
    if not names or "type" in optim_wrapper:
        return False
    sections = all(isinstance(one, Mapping) for one in optim_wrapper.values())
    # Of the settings of all, clipping alone is a section itself.
    each = sections and bool(optim_wrapper) and "clip_grad" not in optim_wrapper
    return each or any(name in names for name in optim_wrapper)


def _wrapper_problems(
    optim_wrapper: Mapping[str, Any], names: Mapping[str, Any], optimizer: Any, imports: bool
) -> Iterator[Problem]:
    check = partial(
        check_component, registry=OPTIM_WRAPPERS, runtime_args=("optimizer",), imports=imports
    )
    sections = optim_wrapper_sections(optim_wrapper, optimizer)
    if not _by_name(optim_wrapper, names):
        yield from check(next(iter(sections.values())), where="optim_wrapper")
        return
    for name, one in sections.items():
        if name in names:
            yield from check(one, where=f"optim_wrapper.{name}")
            continue
        hint = did_you_mean(name, names) or f"; there are {one_of(list(names))}"
        yield Problem(f"optim_wrapper.{name}", f"there is no such optimizer{hint}")


def _choice_problems(
    section: SchedulerSection, where: str, names: Mapping[str, Any]
) -> Iterator[Problem]:
    chosen = section.optimizer
    known = f"one of several: {one_of(list(names))}"
    if names and chosen is None:
        yield Problem(f"{where}.optimizer", f"is missing: a scheduler steps {known}")
    elif names and isinstance(chosen, str) and chosen not in names:
        yield Problem(
            f"{where}.optimizer",
            f"there is no optimizer {chosen!r}{did_you_mean(chosen, names)}; it is {known}",
        )
    elif chosen is not None and not names:
        yield Problem(f"{where}.optimizer", "there is one optimizer, without a name: leave it out")
