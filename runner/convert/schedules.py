"""Schedules of the learning rate: mmengine's as torch's, between two counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...registry import PARAM_SCHEDULERS
from .draft import NOTHING, RULES, Draft, Row, Section, dropped, kept, only, sections, walk

_INF = 10**9
_PAGES = "counts passes over the data here; in a loop by iterations mmengine counts none"


def convert_schedulers(section: Section, key: str) -> Any:
    """Return the schedules of one, a list, or lists by the optimizer's name."""
    given, draft = section.pop(key), section.draft
    optimizer = draft.sections.get("optimizer", {"type": ""})
    if isinstance(given, Mapping) and "type" not in given:
        lists = [(one, f"{key}.{name}", name) for name, one in given.items()]
    elif given is not None and "type" not in optimizer:
        lists = [(given, key, name) for name in list(optimizer) or [None]]
    else:
        lists = [(given, key, None)]
    return [made for one in lists for made in _schedules(draft, *one)] or NOTHING


def _schedules(draft: Draft, given: Any, path: str, optimizer: str | None) -> list[dict[str, Any]]:
    """Return the schedules of one optimizer: all of torch, or all of mmengine."""
    noted = len(draft.misses)
    for theirs in (False, True):
        del draft.misses[noted:]
        made = [_schedule(one, optimizer, theirs) for one in sections(draft, given, path)]
        # Both change the optimizer's step, and neither stands the other's change. Classes of one's
        # own are of mmengine's kind as well.
        if not any("." in one.get("type", "") for one in made):
            break
    choice = {} if optimizer is None else {"optimizer": optimizer}
    return [one | choice for one in made if one]


def _schedule(section: Section, optimizer: str | None, theirs: bool) -> dict[str, Any]:
    """Return a schedule of torch's, or mmengine's own, which our hook steps as it steps torch's."""
    draft, original = section.draft, section.get("type")
    kind = section.kind("PARAM_SCHEDULERS")
    walk(section, (Row("_scope_"), *only(verbose=False)))
    if kind == "ReduceOnPlateauLR" and theirs:
        draft.miss(section.path, f"{kind} cannot stand beside a schedule that torch has not")
        return {}
    by = _unit(section)
    if not by:
        return {}
    section |= {"begin": section.get("begin", 0), "end": section.get("end", _INF)}
    if kind in _SCHEDULES and not theirs:
        walk(section, only(param_name="lr", last_step=-1))
    if theirs or kind not in _SCHEDULES or not _is_torchs(section, kind, optimizer):
        made = _mmengines(section, original, kind, by)
    else:
        made = walk(section, (*_SCHEDULES[kind], *_WINDOW))
    if "metric" in made:
        made["metric"] = draft.metric(made["metric"], section.at("monitor")) or made["metric"]
        by = "epoch"
    elif by == "epoch" and not draft.by_epoch:
        draft.miss(section.at("by_epoch"), _PAGES)
    section.close()
    return made | {"by": by}


def _unit(section: Section) -> str:
    """Return what a schedule counts, epochs made batches if need be; "" if that is not known."""
    draft, by_epoch = section.draft, section.pop("by_epoch", True)
    by_batches = "step" if draft.batches == 1 else "batch"
    if not section.pop("convert_to_iter_based", False):
        return "epoch" if by_epoch else by_batches
    length = draft.epoch_length
    if length is None:
        what = "needs the number of batches in an epoch: give --epoch-length"
        draft.miss(section.at("convert_to_iter_based"), what)
        return ""
    for key in ("begin", "end", "T_max", "step_size", "total_steps"):
        if section.get(key) not in (None, _INF):
            section[key] = int(section[key] * length)
    for key in ("milestones", "periods"):
        if section.get(key) is not None:
            section[key] = [each * length for each in section[key]]
    return by_batches


def _is_torchs(section: Section, kind: str, optimizer: str | None) -> bool:
    """Whether torch's schedule does the same with these settings."""
    if kind == "ReduceOnPlateauLR":
        return not section["begin"] and section["end"] >= _INF
    base = section.draft.sections.get("optimizer", {})
    settings = base.get(optimizer, base) if optimizer else base
    if kind != "CosineAnnealingLR" or section.get("eta_min_ratio") is None:
        return True
    if "paramwise" in settings or "lr" not in settings:
        return False
    section["eta_min"] = settings["lr"] * section["eta_min_ratio"]
    return True


def _mmengines(section: Section, original: Any, kind: str, by: str) -> dict[str, Any]:
    if kind in (*_SCHEDULES, "CosineRestartLR") or kind.endswith("Momentum"):
        name = f"mmengine.optim.scheduler.{kind}"
    else:
        where = section.at("type")
        name = section.draft.name_of(original, "PARAM_SCHEDULERS", PARAM_SCHEDULERS, where)
    window = walk(section, (Row("begin", "begin", same=(0,)), Row("end", "end", same=(_INF,))))
    own = dict(section)
    section.clear()
    return {"type": name, **own, **window, "by_epoch": by == "epoch"}


def _named(name: str) -> Row:
    return Row("", "type", lambda section, key: name, default=None)


_POLY = ("PolynomialLR", "PolyLR")


def _span(section: Section, key: str) -> Any:
    return section.pop(key, None) or section["end"] - section["begin"]


def _cycle(section: Section, key: str) -> Any:
    total = _span(section, key)
    section["end"] = section["begin"] + total
    return total


def _until(section: Section, key: str) -> Any:
    end = section.pop(key)
    return end if end < _INF else NOTHING


_WINDOW = (Row("begin", "after", same=(0,)), Row("end", "until", _until))
# One less: mmengine reaches the last factor in the last count of the window.
_TOTAL = Row("", "total_iters", lambda one, key: one.pop("end") - one["begin"] - 1, default=None)
_SCHEDULES: dict[str, tuple[Row, ...]] = {
    "ConstantLR": (_named("ConstantLR"), *kept(factor=1.0 / 3), _TOTAL),
    "CosineAnnealingLR": (
        _named("CosineAnnealingLR"),
        *dropped("eta_min_ratio"),
        Row("T_max", "T_max", _span, default=None),
        Row("eta_min", "eta_min", same=(None, 0)),
    ),
    "ExponentialLR": (_named("ExponentialLR"), *kept(gamma=None)),
    "LinearLR": (_named("LinearLR"), *kept(start_factor=1.0 / 3, end_factor=1.0), _TOTAL),
    "MultiStepLR": (
        _named("MultiStepLR"),
        Row("milestones", "milestones", lambda section, key: list(section.pop(key))),
        *kept(gamma=0.1),
    ),
    "OneCycleLR": (
        _named("OneCycleLR"),
        Row("eta_max", "max_lr", default=None),
        Row("total_steps", "total_steps", _cycle, default=None),
        *kept("pct_start", "anneal_strategy", "div_factor", "final_div_factor", "three_phase"),
        # torch's moves the momentum as well unless it is told not to.
        Row("", "cycle_momentum", lambda section, key: False, default=None),
        Row("begin", "after", same=(0,)),
        Row("end", "until"),
    ),
    "PolyLR": (
        # torch's ends at zero.
        Row("", "type", lambda one, key: _POLY[bool(one.get("eta_min"))], default=None),
        *kept(power=1),
        _TOTAL,
        Row("eta_min", "eta_min", same=(None, 0)),
    ),
    "ReduceOnPlateauLR": (
        _named("ReduceLROnPlateau"),
        Row("monitor", "metric", default="loss"),
        Row("rule", "mode", lambda one, key: RULES.get(one.pop(key, "less"), "min"), default=None),
        *kept("factor", "patience", "threshold"),
        Row("threshold_rule", "threshold_mode"),
        *kept("cooldown"),
        Row("min_value", "min_lr"),
        *kept("eps"),
    ),
    "StepLR": (_named("StepLR"), *kept(step_size=None, gamma=0.1)),
}
