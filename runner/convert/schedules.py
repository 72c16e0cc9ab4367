"""Convert learning-rate schedules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .draft import NOTHING, RULES, Draft, Row, Section, drop_if, dropped, kept, walk

_INF = 10**9
_NEEDS_LENGTH = (
    "needs the number of batches in an epoch of each process: give --epoch-length. It depends on"
    " the number of processes"
)
_NO_LOOP = "is needed, because the config has no train_cfg whose length is its default"
_NEVER_STEPS = (
    "mmengine never steps it in an iteration-based loop, so that its first values stay: set"
    " by_epoch=False, or convert_to_iter_based, if it should act"
)


def schedulers(section: Section, key: str) -> Any:
    """Convert one schedule, a list of schedules, or lists by the optimizer's name."""
    schedules, optimizer = section[key], section.draft.sections.get("optimizer", {"type": ""})
    above, pairs = section, [(key, None)]
    if isinstance(schedules, Mapping) and "type" not in schedules:
        above, pairs = Section(section.draft, schedules, key), [(name, name) for name in schedules]
    elif schedules is not None and "type" not in optimizer:
        pairs = [(key, name) for name in list(optimizer) or [None]]
    settings = [schedule for pair in pairs for schedule in _schedules(above, *pair)]
    del section[key]
    return settings or NOTHING


def _schedules(above: Section, key: str, optimizer: str | None) -> list[dict[str, Any]]:
    """Convert the schedules of one optimizer, either all to torch's or all to mmengine's."""
    draft, before = above.draft, len(above.draft.misses)
    for use_mmengine in (False, True):
        del draft.misses[before:]
        sections = Section(draft, above, above.path).each(key)
        schedules = [_schedule(section, optimizer, use_mmengine) for section in sections]
        # Both libraries patch the optimizer's step, and neither works with the other's patch.
        # Custom schedules are subclasses of mmengine's.
        if not any("." in schedule.get("type", "") for schedule in schedules):
            break
    choice = {} if optimizer is None else {"optimizer": optimizer}
    return [schedule | choice for schedule in schedules if schedule]


def _schedule(section: Section, optimizer: str | None, use_mmengine: bool) -> dict[str, Any]:
    """Convert a schedule to torch's or, if that is not possible, keep mmengine's class."""
    original = section.get("type")
    kind = section.kind("PARAM_SCHEDULERS")
    if not kind:
        return {}
    walk(section, (Row("_scope_"), *drop_if(verbose=False)))
    if kind == "ReduceOnPlateauLR":
        return _plateau(section, use_mmengine)
    counts_epochs = section.get("by_epoch", True)
    # By default a schedule ends with the run, also if the run is made longer. An iteration-based
    # loop is one epoch for mmengine.
    ends_with_run = "end" not in section and (section.draft.by_epoch or not counts_epochs)
    by = _window(section, kind)
    if not by:
        section.clear()
        return {}
    if kind in _SCHEDULES and not use_mmengine:
        walk(section, drop_if(param_name="lr", last_step=-1))
        if kind in _FIRST_IS_BASE and section["end"] - section["begin"] == 1:
            # It ends before it changes a value.
            section.clear()
            return {}
    if use_mmengine or kind not in _SCHEDULES or not _is_in_torch(section, optimizer):
        settings = _mmengine_schedule(section, original, kind, by)
    else:
        # torch's PolynomialLR always ends at zero; ours has `eta_min`.
        is_ours = kind == "PolyLR" and section.get("eta_min")
        name = kind if is_ours else _TORCH_NAMES.get(kind, kind)
        settings = walk(section, (*_SCHEDULES[kind], *_WINDOW), {"type": name})
        if ends_with_run and kind != "OneCycleLR":
            settings.pop("until", None)
    section.close()
    if kind == "PolyLR" and settings.get("total_iters") == 0:
        # It ends before it changes a value.
        return {}
    return settings | {"by": by}


def _plateau(section: Section, use_mmengine: bool) -> dict[str, Any]:
    draft, begin, end = section.draft, section.pop("begin", 0), section.pop("end", _INF)
    if use_mmengine:
        section.refuse("cannot be combined with a schedule that torch does not have")
        return {}
    if begin or end < (_loop_length(draft, by_epoch=True) or _INF):
        section.refuse("begin and end have no counterpart: here it acts after every validation")
        return {}
    walk(section, (*drop_if(param_name="lr", last_step=-1), *dropped("by_epoch")))
    settings = walk(section, _PLATEAU, {"type": "ReduceLROnPlateau"})
    metric = draft.metric(settings["metric"], section.at("monitor"))
    section.close()
    return settings | {"metric": metric or settings["metric"], "by": "epoch"}


def _loop_length(draft: Draft, by_epoch: bool) -> int | None:
    """Return the length of mmengine's loop in epochs or batches, None if unknown."""
    if not draft.by_epoch:
        # mmengine regards an iteration-based loop as one epoch.
        return 1 if by_epoch else draft.loop_length
    if by_epoch or draft.loop_length is None:
        return draft.loop_length
    return None if draft.epoch_length is None else draft.loop_length * draft.epoch_length


def _window(section: Section, kind: str) -> str:
    """Set ``begin`` and ``end``, and return the unit; "" if the schedule is not converted.

    The default of ``end`` is the length of the loop.
    """
    draft, by_epoch = section.draft, section.pop("by_epoch", True)
    is_converted = section.pop("convert_to_iter_based", False)
    section.setdefault("begin", 0)
    length = _loop_length(draft, by_epoch)
    if length is None and "end" not in section and _depends_on_end(section, kind):
        section.miss("end", _NO_LOOP if draft.loop_length is None else _NEEDS_LENGTH)
        return ""
    section.setdefault("end", length or _INF)
    if is_converted:
        return _to_batches(section)
    if not by_epoch:
        return "step" if draft.batches == 1 else "batch"
    return "epoch" if draft.by_epoch else _first_values(section, kind)


def _depends_on_end(section: Section, kind: str) -> bool:
    for suffix in ("ParamScheduler", "Momentum", "LR"):
        kind = kind.removesuffix(suffix)
    span = {"CosineAnnealing": "T_max", "OneCycle": "total_steps"}.get(kind, "")
    return kind not in _WITHOUT_END and not section.get(span)


def _to_batches(section: Section) -> str:
    """Apply ``convert_to_iter_based``, and return the unit."""
    draft, length = section.draft, section.draft.epoch_length
    if length is None:
        section.miss("convert_to_iter_based", _NEEDS_LENGTH)
        return ""
    for key in ("begin", "end", "T_max", "step_size", "total_steps"):
        if section.get(key) not in (None, _INF):
            section[key] = int(section[key] * length)
    for key in ("milestones", "periods"):
        if section.get(key) is not None:
            section[key] = [count * length for count in section[key]]
    return "step" if draft.batches == 1 else "batch"


def _first_values(section: Section, kind: str) -> str:
    """Let a schedule by epochs set its first values only: an iteration-based loop has no epochs."""
    section.note("by_epoch", _NEVER_STEPS)
    if section["begin"] or kind in _FIRST_IS_BASE:
        return ""
    section["end"] = 1
    return "step"


def _is_in_torch(section: Section, optimizer: str | None) -> bool:
    """Return whether torch's schedule behaves the same with these settings."""
    if section.get("eta_min_ratio") is None:
        return True
    base = section.draft.sections.get("optimizer", {})
    settings = base.get(optimizer, base) if optimizer else base
    if "paramwise" in settings or "lr" not in settings:
        return False
    section["eta_min"] = settings["lr"] * section["eta_min_ratio"]
    return True


def _mmengine_schedule(section: Section, original: Any, kind: str, by: str) -> dict[str, Any]:
    if kind in (*_SCHEDULES, "CosineRestartLR") or kind.endswith("Momentum"):
        name = f"mmengine.optim.scheduler.{kind}"
    else:
        name = section.draft.get_name(original, "PARAM_SCHEDULERS", section.at("type"))
    window = walk(section, (Row("begin", "begin", same=(0,)), Row("end", "end", same=(_INF,))))
    arguments = dict(section)
    section.clear()
    return {"type": name, **arguments, **window, "by_epoch": by == "epoch"}


def _span(section: Section, key: str) -> Any:
    return section.pop(key, None) or section["end"] - section["begin"]


def _cycle(section: Section, key: str) -> Any:
    total = _span(section, key)
    section["end"] = min(section["end"], section["begin"] + total)
    return total


def _total(section: Section, key: str) -> int:
    # One less, because mmengine reaches the last factor at the last step of the window.
    return int(section["end"] - section["begin"] - 1)


# mmengine's name -> torch's name, if they differ.
_TORCH_NAMES = {"PolyLR": "PolynomialLR"}
# Schedules for which `end` means nothing but the step at which they stop.
_WITHOUT_END = ("Step", "MultiStep", "Exponential", "CosineRestart")
# Schedules that do not change the values before the first step.
_FIRST_IS_BASE = ("CosineAnnealingLR", "ExponentialLR", "MultiStepLR", "PolyLR", "StepLR")
# mmengine does not step a schedule at its `end`; a ScheduleWindow takes its last step at `until`.
_UNTIL = Row(
    "end",
    "until",
    lambda section, key: max(section.pop(key), section["begin"] + 2) - 1,
    same=(_INF,),
)
_WINDOW = (_UNTIL, Row("begin", "after", same=(0,)))
_ETA_MIN = Row("eta_min", "eta_min", same=(None, 0))
_TOTAL = Row("", "total_iters", _total, default=None)
_SCHEDULES: dict[str, tuple[Row, ...]] = {
    "ConstantLR": (*kept(factor=1.0 / 3), _TOTAL, Row("end")),
    "CosineAnnealingLR": (
        *dropped("eta_min_ratio"),
        Row("T_max", "T_max", _span, default=None),
        _ETA_MIN,
    ),
    "ExponentialLR": kept(gamma=None),
    "LinearLR": (*kept(start_factor=1.0 / 3, end_factor=1.0), _TOTAL, Row("end")),
    "MultiStepLR": (
        Row("milestones", "milestones", lambda section, key: list(section.pop(key))),
        *kept(gamma=0.1),
    ),
    "OneCycleLR": (
        Row("eta_max", "max_lr", default=None),
        Row("total_steps", "total_steps", _cycle, default=None),
        *kept("pct_start", "anneal_strategy", "div_factor", "final_div_factor", "three_phase"),
        # By default torch changes the momentum as well.
        Row("", "cycle_momentum", lambda section, key: False, default=None),
    ),
    "PolyLR": (*kept(power=1), _TOTAL, Row("end"), _ETA_MIN),
    "StepLR": kept(step_size=None, gamma=0.1),
}
_PLATEAU = (
    Row("monitor", "metric", default="loss"),
    Row("rule", "mode", lambda section, key: RULES.get(section.pop(key, "less"), "min"),
        default=None),
    *kept("factor", "patience", "threshold"),
    Row("threshold_rule", "threshold_mode"),
    *kept("cooldown"),
    Row("min_value", "min_lr"),
    *kept("eps"),
)  # fmt: skip
