"""Schedules of the learning rate: mmengine's as torch's, between two counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...registry import PARAM_SCHEDULERS
from .draft import RULES, Draft, Section, sections

_INF = 10**9
_PLATEAU = ("factor", "patience", "threshold", "threshold_rule", "cooldown", "min_value", "eps")
# Their arguments that count what the schedule counts.
_COUNTS = ("T_max", "step_size", "total_steps")


def convert_schedulers(draft: Draft, top: Section) -> None:
    """Translate `param_scheduler`: one, a list, or lists by the optimizer's name."""
    given = top.take("param_scheduler")
    if given is None:
        return
    found: list[dict[str, Any]] = []
    if isinstance(given, Mapping) and "type" not in given:
        for name, each in given.items():
            found += _all(draft, each, f"param_scheduler.{name}", name)
    else:
        names = [] if "type" in draft.sections.get("optimizer", {"type": ""}) else _names(draft)
        for name in names or [None]:
            found += _all(draft, given, "param_scheduler", name)
    if found:
        draft.sections["schedulers"] = found


def _names(draft: Draft) -> list[str | None]:
    return list(draft.sections["optimizer"])


def _all(draft: Draft, given: Any, path: str, optimizer: str | None) -> list[dict[str, Any]]:
    """Return the schedules of one optimizer: all of torch, or all of mmengine."""
    noted = len(draft.misses)
    made = _made(draft, given, path, optimizer, theirs=False)
    if any("." in one["type"] for one in made):
        # Both change the optimizer's step, and neither stands the other's change. Classes of one's
        # own are of mmengine's kind as well.
        del draft.misses[noted:]
        made = _made(draft, given, path, optimizer, theirs=True)
    return made


def _made(
    draft: Draft, given: Any, path: str, optimizer: str | None, *, theirs: bool
) -> list[dict[str, Any]]:
    found = []
    for section in sections(draft, given, path):
        made = _scheduler(draft, section, optimizer, theirs=theirs)
        if made is not None:
            choice = {} if optimizer is None else {"optimizer": optimizer}
            found.append({**made, **choice})
    return found


def _scheduler(
    draft: Draft, section: Section, optimizer: str | None, *, theirs: bool
) -> dict[str, Any] | None:
    original = section.peek("type")
    kind = section.kind("PARAM_SCHEDULERS")
    section.drop("_scope_")
    section.accept(verbose=False)
    translate = None if theirs else _KINDS.get(kind)
    if kind == "ReduceOnPlateauLR" and theirs:
        draft.miss(section.path, f"{kind} cannot stand beside a schedule that torch has not")
        return None
    by, scaled = _unit(draft, section)
    if not scaled:
        return None
    begin, end = section.take("begin", 0), section.take("end", _INF)
    base = draft.sections.get("optimizer", {})
    settings = base.get(optimizer, base) if optimizer else base
    made = None
    if translate is not None:
        section.accept(param_name="lr", last_step=-1)
        made = translate(section, begin, end, settings)
    if made is None:
        # What torch's cannot do mmengine's does, as it is.
        made = _theirs(draft, original, kind, begin, end, by, section)
    elif begin:
        end = made.pop("until", None)
        made |= {"after": begin} if end is None else {"after": begin, "until": end}
    if "metric" in made:
        made["metric"] = draft.metric(made["metric"], section.at("monitor")) or made["metric"]
        by = "epoch"
    elif by == "epoch" and not draft.by_epoch:
        what = "counts passes over the data here; in a loop by iterations mmengine counts none"
        draft.miss(section.at("by_epoch"), what)
    made["by"] = by
    section.close()
    return made


def _unit(draft: Draft, section: Section) -> tuple[str, bool]:
    """Return what a schedule counts, epochs made batches if need be, and whether that is known."""
    by_epoch = section.take("by_epoch", True)
    if not section.take("convert_to_iter_based", False):
        return ("epoch" if by_epoch else _by_batches(draft)), True
    length = draft.epoch_length
    if length is None:
        what = "needs the number of batches in an epoch: give --epoch-length"
        draft.miss(section.at("convert_to_iter_based"), what)
        section.drop(*section)
        return "", False
    for key in ("begin", "end", *_COUNTS):
        value = section.peek(key)
        if value is not None and value != _INF:
            section.put(key, int(value * length))
    for key in ("milestones", "periods"):
        value = section.peek(key)
        if value is not None:
            section.put(key, [each * length for each in value])
    return _by_batches(draft), True


def _by_batches(draft: Draft) -> str:
    return "step" if draft.batches == 1 else "batch"


def _theirs(
    draft: Draft, original: Any, kind: str, begin: int, end: int, by: str, section: Section
) -> dict[str, Any]:
    """Return mmengine's own class, which our hook steps as it steps torch's."""
    if kind in (*_KINDS, "CosineRestartLR") or kind.endswith("Momentum"):
        name = f"mmengine.optim.scheduler.{kind}"
    else:
        name = draft.name_of(original, "PARAM_SCHEDULERS", PARAM_SCHEDULERS, section.at("type"))
    own = {key: section.take(key) for key in section}
    window = {"begin": begin} if begin else {}
    window |= {"end": end} if end != _INF else {}
    return {"type": name, **own, **window, "by_epoch": by == "epoch"}


def _window(begin: int, end: int) -> dict[str, Any]:
    return {} if end >= _INF else {"until": end}


def _linear(section: Section, begin: int, end: int, optimizer: Any) -> dict[str, Any] | None:
    start = section.take("start_factor", 1.0 / 3)
    last = section.take("end_factor", 1.0)
    # One less: mmengine reaches the last factor in the last count of the window.
    return {
        "type": "LinearLR",
        "start_factor": start,
        "end_factor": last,
        "total_iters": end - begin - 1,
    }


def _constant(section: Section, begin: int, end: int, optimizer: Any) -> dict[str, Any] | None:
    factor = section.take("factor", 1.0 / 3)
    return {"type": "ConstantLR", "factor": factor, "total_iters": end - begin - 1}


def _step(section: Section, begin: int, end: int, optimizer: Any) -> dict[str, Any] | None:
    size, gamma = section.take("step_size"), section.take("gamma", 0.1)
    return {"type": "StepLR", "step_size": size, "gamma": gamma, **_window(begin, end)}


def _multi_step(section: Section, begin: int, end: int, optimizer: Any) -> dict[str, Any] | None:
    milestones, gamma = list(section.take("milestones")), section.take("gamma", 0.1)
    return {
        "type": "MultiStepLR",
        "milestones": milestones,
        "gamma": gamma,
        **_window(begin, end),
    }


def _exponential(section: Section, begin: int, end: int, optimizer: Any) -> dict[str, Any] | None:
    return {"type": "ExponentialLR", "gamma": section.take("gamma"), **_window(begin, end)}


def _cosine(section: Section, begin: int, end: int, optimizer: Any) -> dict[str, Any] | None:
    ratio = section.peek("eta_min_ratio")
    if ratio is not None and ("paramwise" in optimizer or "lr" not in optimizer):
        return None
    section.drop("eta_min_ratio")
    lowest = section.take("eta_min")
    if ratio is not None:
        lowest = optimizer["lr"] * ratio
    span = section.take("T_max") or end - begin
    return {
        "type": "CosineAnnealingLR",
        "T_max": span,
        **({"eta_min": lowest} if lowest else {}),
        **_window(begin, end),
    }


def _poly(section: Section, begin: int, end: int, optimizer: Any) -> dict[str, Any] | None:
    power, lowest = section.take("power", 1), section.take("eta_min", 0)
    made = {"type": "PolynomialLR", "power": power, "total_iters": end - begin - 1}
    # torch's ends at zero.
    return {**made, "type": "PolyLR", "eta_min": lowest} if lowest else made


def _one_cycle(section: Section, begin: int, end: int, optimizer: Any) -> dict[str, Any] | None:
    total = section.take("total_steps") or end - begin
    made = {"type": "OneCycleLR", "max_lr": section.take("eta_max"), "total_steps": total}
    for key in ("pct_start", "anneal_strategy", "div_factor", "final_div_factor", "three_phase"):
        if key in section:
            made[key] = section.take(key)
    # torch's moves the momentum as well unless it is told not to.
    return {**made, "cycle_momentum": False, "until": begin + total}


def _plateau(section: Section, begin: int, end: int, optimizer: Any) -> dict[str, Any] | None:
    if begin or end < _INF:
        return None
    made: dict[str, Any] = {"type": "ReduceLROnPlateau"}
    made["metric"] = section.take("monitor", "loss")
    made["mode"] = RULES.get(section.take("rule", "less"), "min")
    names = {"threshold_rule": "threshold_mode", "min_value": "min_lr"}
    for key in _PLATEAU:
        if key in section:
            made[names.get(key, key)] = section.take(key)
    return made


_KINDS: dict[str, Callable[[Section, int, int, Any], dict[str, Any] | None]] = {
    "ConstantLR": _constant,
    "CosineAnnealingLR": _cosine,
    "ExponentialLR": _exponential,
    "LinearLR": _linear,
    "MultiStepLR": _multi_step,
    "OneCycleLR": _one_cycle,
    "PolyLR": _poly,
    "ReduceOnPlateauLR": _plateau,
    "StepLR": _step,
}
