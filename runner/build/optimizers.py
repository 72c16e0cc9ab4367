"""From checked settings to the optimizers, their wrappers and their learning-rate schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import SGD, Optimizer

from ...loops import Hook, SchedulerHook, ScheduleWindow
from ...registry import OPTIM_WRAPPERS, OPTIMIZERS, PARAM_SCHEDULERS, RunSections, SchedulerSection, build_tree, named_optimizers, optim_wrapper_sections, stepping_class, supply_where_taken
from ...wrappers import NamedParameter, OptimWrapperDict, build_optimizer, named_parameters, param_groups, refuse_single_step, refuse_without_closure, share_parameters
from ..failure import building


def build_optimization(run: RunSections, model: nn.Module) -> tuple[Any, dict[str, Hook]]:
    """Return the optimizer wrapper over `model`, and the hook that steps its schedules, if any.

    With several optimizers it is an `OptimWrapperDict`.
    """
    assert run.optimizer is not None
    several = named_optimizers(run.optimizer)
    with building("optimizer"):
        given = _in_group(several or run.optimizer, getattr(model, "data_group", None))
    optimizers = _several(given, model) if several else {"": _single(given, model)}
    sections = optim_wrapper_sections(run.optim_wrapper, run.optimizer)
    wrappers = {}
    for name, optimizer in optimizers.items():
        own = name in run.optim_wrapper
        with building(f"optim_wrapper.{name}" if own else "optim_wrapper"):
            supplied = {"optimizer": optimizer}
            wrappers[name] = build_tree(sections[name], OPTIM_WRAPPERS, supplied)
            refuse_without_closure(wrappers[name], model)
    wrapper = OptimWrapperDict(**wrappers) if several else wrappers[""]
    return wrapper, _scheduler_hook(run, optimizers)


def evaluation_precision(
    run: RunSections, model: nn.Module
) -> Callable[[], AbstractContextManager[Any]]:
    """Return what the training evaluates `model` in, for a run that builds no optimizer.

    The optimizer wrappers know it, so they are built, around an optimizer that is never used.
    """
    sections = optim_wrapper_sections(run.optim_wrapper, run.optimizer)
    kinds = [OPTIM_WRAPPERS.resolve(one["type"]) for one in sections.values()]
    parameters = list(model.parameters())
    if not parameters or not any(hasattr(kind, "precision_context") for kind in kinds):
        return nullcontext
    supplied = {"optimizer": SGD(parameters, lr=0.0)}
    built = {name: build_tree(one, OPTIM_WRAPPERS, supplied) for name, one in sections.items()}
    wrapper = built[""] if "" in built else OptimWrapperDict(**built)
    context: Callable[[], AbstractContextManager[Any]] = wrapper.precision_context
    return context


def works_over_ranks(settings: Mapping[str, Any] | None) -> bool:
    """Say whether an optimizer that the settings name communicates, also in one process."""
    filled = supply_where_taken(settings or {}, OPTIMIZERS, "process_group", None)
    return bool(filled != (settings or {}))


def _in_group(settings: Any, group: ProcessGroup | None) -> Any:
    """Let optimizers that work over ranks take those that have the same parameters."""
    if group is None:
        return settings
    return supply_where_taken(settings, OPTIMIZERS, "process_group", group)


def _single(settings: Mapping[str, Any], model: nn.Module) -> Optimizer:
    if "paramwise" in settings:
        return _optimizer(settings, named_parameters(model), "optimizer")
    with building("optimizer"):
        return _built(settings, list(model.parameters()))


def _several(sections: Mapping[str, Any], model: nn.Module) -> dict[str, Optimizer]:
    with building("optimizer"):
        refuse_single_step(model)
        chosen = {name: one.get("params") for name, one in sections.items()}
        shares = share_parameters(model, chosen)
    return {
        name: _optimizer(one, shares[name], f"optimizer.{name}") for name, one in sections.items()
    }


def _optimizer(
    settings: Mapping[str, Any], named: Sequence[NamedParameter], where: str
) -> Optimizer:
    own = {key: value for key, value in settings.items() if key not in ("params", "paramwise")}
    paramwise = settings.get("paramwise")
    if paramwise is None:
        params: list[Any] = list(dict.fromkeys(one.parameter for one in named))
    else:
        with building(f"{where}.paramwise"):
            params = param_groups(
                named,
                lr=own.get("lr"),
                weight_decay=own.get("weight_decay"),
                paramwise=paramwise,
                optimizer=stepping_class(own),
            )
    with building(where):
        return _built(own, params)


def _built(settings: Mapping[str, Any], params: list[Any]) -> Optimizer:
    fastest = partial(build_optimizer, OPTIMIZERS.resolve(settings["type"]))
    built: Optimizer = build_tree({**settings, "type": fastest}, OPTIMIZERS, {"params": params})
    return built


def _scheduler(section: SchedulerSection, optimizer: Optimizer) -> Any:
    def make(optimizer: Optimizer) -> Any:
        return build_tree(section.scheduler, PARAM_SCHEDULERS, {"optimizer": optimizer})

    if not section.after and section.until is None:
        return make(optimizer)
    return ScheduleWindow(optimizer, make, after=section.after, until=section.until)


def _scheduler_hook(run: RunSections, optimizers: Mapping[str, Optimizer]) -> dict[str, Hook]:
    with building("schedulers"):
        pairs = [
            (_scheduler(one, optimizers[one.optimizer or ""]), one.by) for one in run.schedulers
        ]
    watched = next((one.metric for one in run.schedulers if one.metric), None)
    named = optimizers if "" not in optimizers else None
    hook = SchedulerHook(pairs, metric=watched, optimizers=named)
    return {"schedulers": hook} if pairs else {}
