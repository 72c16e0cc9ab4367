"""Convert hooks and learning-rate schedules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .draft import NOTHING, RULES, Row, Section, bare_name, drop_if, dropped, kept, walk

_INF = 10**9
_OWN_HOOK = "{} has no counterpart: write a hook (docs/extending.md)"
_PASSES = "epochs are passes over the data here; mmengine counts none in an iteration-based loop"


def schedulers(section: Section, key: str) -> Any:
    """Convert one schedule, a list of schedules, or lists by the optimizer's name."""
    given, optimizer = section[key], section.draft.sections.get("optimizer", {"type": ""})
    above, pairs = section, [(key, None)]
    if isinstance(given, Mapping) and "type" not in given:
        above, pairs = Section(section.draft, given, key), [(name, name) for name in given]
    elif given is not None and "type" not in optimizer:
        pairs = [(key, name) for name in list(optimizer) or [None]]
    made = [one for pair in pairs for one in _schedules(above, *pair)]
    del section[key]
    return made or NOTHING


def _schedules(above: Section, key: str, optimizer: str | None) -> list[dict[str, Any]]:
    """Convert the schedules of one optimizer, either all to torch's or all to mmengine's."""
    draft, before = above.draft, len(above.draft.misses)
    for use_mmengine in (False, True):
        del draft.misses[before:]
        given = Section(draft, above, above.path)
        made = [_schedule(one, optimizer, use_mmengine) for one in given.each(key)]
        # Both libraries patch the optimizer's step, and neither works with the other's patch.
        # Custom schedules are subclasses of mmengine's.
        if not any("." in one.get("type", "") for one in made):
            break
    choice = {} if optimizer is None else {"optimizer": optimizer}
    return [one | choice for one in made if one]


def _schedule(section: Section, optimizer: str | None, use_mmengine: bool) -> dict[str, Any]:
    """Convert a schedule to torch's or, if that is not possible, keep mmengine's class."""
    draft, original = section.draft, section.get("type")
    kind = section.kind("PARAM_SCHEDULERS")
    if not kind:
        return {}
    walk(section, (Row("_scope_"), *drop_if(verbose=False)))
    if kind == "ReduceOnPlateauLR" and use_mmengine:
        section.refuse(f"{kind} cannot be combined with a schedule that torch does not have")
        return {}
    by = _unit(section)
    if not by:
        return {}
    section |= {"begin": section.get("begin", 0), "end": section.get("end", _INF)}
    if kind in _SCHEDULES and not use_mmengine:
        walk(section, drop_if(param_name="lr", last_step=-1))
    if use_mmengine or kind not in _SCHEDULES or not _is_in_torch(section, kind, optimizer):
        made = _mmengine_schedule(section, original, kind, by)
    else:
        # torch's PolynomialLR always ends at zero; ours has `eta_min`.
        is_torchs = kind != "PolyLR" or not section.get("eta_min")
        name = _TORCH_NAMES.get(kind, kind) if is_torchs else kind
        made = walk(section, (*_SCHEDULES[kind], *_WINDOW), {"type": name})
    if "metric" in made:
        made["metric"] = draft.metric(made["metric"], section.at("monitor")) or made["metric"]
        by = "epoch"
    elif by == "epoch" and not draft.by_epoch:
        section.miss("by_epoch", _PASSES)
    section.close()
    return made | {"by": by}


def _unit(section: Section) -> str:
    """Return the unit of a schedule, "" if unknown; apply ``convert_to_iter_based``."""
    draft, by_epoch = section.draft, section.pop("by_epoch", True)
    by_batches = "step" if draft.batches == 1 else "batch"
    if not section.pop("convert_to_iter_based", False):
        return "epoch" if by_epoch else by_batches
    length = draft.epoch_length
    if length is None:
        what = "needs the number of batches in an epoch: give --epoch-length"
        section.miss("convert_to_iter_based", what)
        return ""
    for key in ("begin", "end", "T_max", "step_size", "total_steps"):
        if section.get(key) not in (None, _INF):
            section[key] = int(section[key] * length)
    for key in ("milestones", "periods"):
        if section.get(key) is not None:
            section[key] = [each * length for each in section[key]]
    return by_batches


def _is_in_torch(section: Section, kind: str, optimizer: str | None) -> bool:
    """Return whether torch's schedule behaves the same with these settings."""
    if kind == "ReduceOnPlateauLR":
        return not section["begin"] and section["end"] >= _INF
    if kind != "CosineAnnealingLR" or section.get("eta_min_ratio") is None:
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
        name = section.draft.name_of(original, "PARAM_SCHEDULERS", section.at("type"))
    window = walk(section, (Row("begin", "begin", same=(0,)), Row("end", "end", same=(_INF,))))
    own = dict(section)
    section.clear()
    return {"type": name, **own, **window, "by_epoch": by == "epoch"}


def _span(section: Section, key: str) -> Any:
    return section.pop(key, None) or section["end"] - section["begin"]


def _cycle(section: Section, key: str) -> Any:
    total = _span(section, key)
    section["end"] = section["begin"] + total
    return total


# mmengine's name -> torch's name, if they differ.
_TORCH_NAMES = {"PolyLR": "PolynomialLR", "ReduceOnPlateauLR": "ReduceLROnPlateau"}
# mmengine does not step a schedule at its `end`; a ScheduleWindow takes its last step at `until`.
_UNTIL = Row(
    "end",
    "until",
    lambda section, key: max(section.pop(key), section["begin"] + 2) - 1,
    same=(_INF,),
)
_WINDOW = (_UNTIL, Row("begin", "after", same=(0,)))
_ETA_MIN = Row("eta_min", "eta_min", same=(None, 0))
# One less, because mmengine reaches the last factor at the last step of the window.
_TOTAL = Row("", "total_iters", lambda one, key: one.pop("end") - one["begin"] - 1, default=None)
_SCHEDULES: dict[str, tuple[Row, ...]] = {
    "ConstantLR": (*kept(factor=1.0 / 3), _TOTAL),
    "CosineAnnealingLR": (
        *dropped("eta_min_ratio"),
        Row("T_max", "T_max", _span, default=None),
        _ETA_MIN,
    ),
    "ExponentialLR": kept(gamma=None),
    "LinearLR": (*kept(start_factor=1.0 / 3, end_factor=1.0), _TOTAL),
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
        Row("begin", "after", same=(0,)),
        Row("end", "until"),
    ),
    "PolyLR": (*kept(power=1), _TOTAL, _ETA_MIN),
    "ReduceOnPlateauLR": (
        Row("monitor", "metric", default="loss"),
        Row("rule", "mode", lambda one, key: RULES.get(one.pop(key, "less"), "min"), default=None),
        *kept("factor", "patience", "threshold"),
        Row("threshold_rule", "threshold_mode"),
        *kept("cooldown"),
        Row("min_value", "min_lr"),
        *kept("eps"),
    ),
    "StepLR": kept(step_size=None, gamma=0.1),
}


# mmengine's defaults.
_DEFAULT_HOOKS = {
    "logger": {"type": "LoggerHook"},
    "checkpoint": {"type": "CheckpointHook", "interval": 1},
}
_NEEDED = {
    "sampler_seed": "data are always reshuffled",
    "param_scheduler": "schedules always step",
}
_SWITCHES = {"checkpoint": "checkpoint", "logger": "log"}


def default_hooks(section: Section, key: str) -> Any:
    draft = section.draft
    defaults = section.below(key) or Section(draft, {}, key)
    if "train" in draft.sections:
        defaults |= {name: one for name, one in _DEFAULT_HOOKS.items() if name not in defaults}
    hooks: dict[str, Any] = {}
    for name, given in list(defaults.items()):
        one = defaults.below(name)
        if one is not None:
            hooks |= _by_type([one], "HOOKS", _HOOKS)
        elif given is None and name in _NEEDED:
            defaults.miss(name, f"cannot be switched off: {_NEEDED[name]}")
        elif given is None and name in _SWITCHES:
            hooks[_SWITCHES[name]] = False
    return hooks or NOTHING


def custom_hooks(section: Section, key: str) -> Any:
    return _by_type(section.each(key), "HOOKS", _HOOKS) or NOTHING


def _by_type(
    sections: Iterable[Section], table: str, kinds: dict[str, tuple[Row, ...]]
) -> dict[str, Any]:
    """Convert hooks of mmengine by the rows of their types."""
    made: dict[str, Any] = {}
    for section in sections:
        kind = section.kind(table)
        if kind and kind not in kinds:
            section.refuse(_OWN_HOOK.format(kind))
        elif kind:
            made |= walk(section, (*dropped("_scope_", "priority"), *kinds[kind]))
            section.close()
    return made


def _log_interval(section: Section, key: str) -> Any:
    draft, batches = section.draft, section.pop(key, 10)
    if "train" in draft.sections:
        draft.sections["train"]["log_every_steps"] = -(-batches // draft.batches)
    draft.log_interval = batches
    return NOTHING


def _saving(section: Section, key: str) -> Any:
    draft, interval = section.draft, section.pop(key, -1)
    by_epoch = section.pop("by_epoch", True)
    settings: dict[str, Any] = {"every_epochs": None, "every_secs": None}
    if interval > 0 and by_epoch:
        # mmengine's iteration-based loop has a single epoch, and our hook saves at its end anyway.
        settings["every_epochs"] = interval if draft.by_epoch else None
    elif interval > 0:
        settings["every_steps"] = draft.updates(interval, section.at(key))
    keep = section.pop("max_keep_ckpts", -1)
    # Without an interval only the last and the best checkpoint are kept.
    settings["keep_last"] = keep if keep > 0 else None if interval > 0 else 1
    best, rule = section.pop("save_best", None), section.pop("rule", None)
    if isinstance(best, (list, tuple)):
        if len(best) > 1:
            section.miss("save_best", "only the first metric selects the best checkpoint")
        best = best[0] if best else None
        rule = rule[0] if isinstance(rule, (list, tuple)) and rule else rule
    name = None if best is None else draft.metric(best, section.at("save_best"))
    if name is not None:
        settings |= {"keep_best": name, "mode": draft.mode(rule, best, section.at("rule"))}
    return settings


def _ema(section: Section, key: str) -> Any:
    draft = section.draft
    average = bare_name(section.pop("ema_type", "ExponentialMovingAverage"))
    if average != "ExponentialMovingAverage":
        section.miss("ema_type", f"{average} has no counterpart: see the hook ema")
        section.clear()
        return NOTHING
    keep, interval = 1 - section.pop(key, 0.0002), section.pop("interval", 1)
    begin, epochs = section.pop("begin_iter", 0), section.pop("begin_epoch", 0)
    if epochs and draft.epoch_length is None:
        section.miss(
            "begin_epoch", "needs --epoch-length, because averaging begins at an update here"
        )
    elif epochs:
        # The first batch of that epoch; mmengine counts epochs from one.
        begin = (epochs - 1) * int(draft.epoch_length or 0) + 1
    times, steps = max(draft.batches // interval, 1), max(interval // draft.batches, 1)
    if draft.batches > 1:
        what = "the average is updated after each update here, not after each batch"
        section.miss(key, f"{what}: decay {keep:g}**{times}")
    settings = {"decay": keep**times, "start_step": -(-max(begin, 1) // draft.batches)}
    return settings | ({"every_steps": steps} if steps != 1 else {})


def _early_stop(section: Section, key: str) -> Any:
    draft, monitor, rule = section.draft, section.pop(key, None), section.pop("rule", None)
    name = draft.metric(monitor, section.at(key))
    patience, delta = section.pop("patience", 5), section.pop("min_delta", 0.1)
    if name is None:
        return NOTHING
    mode = draft.mode(rule, monitor, section.at("rule"))
    return {"metric": name, "patience": patience, "mode": mode, "min_delta": delta}


_DISK = drop_if(out_dir=None, backend_args=None, file_client_args=None)
_HOOKS: dict[str, tuple[Row, ...]] = {
    # Our loop does the work of these hooks.
    "DistSamplerSeedHook": (),
    "IterTimerHook": (),
    "ParamSchedulerHook": (),
    "RuntimeInfoHook": (),
    "CheckpointHook": (
        Row("interval", "checkpoint", _saving, default=-1),
        *drop_if(save_optimizer=True, save_param_scheduler=True, save_last=True, save_begin=0),
        *drop_if(published_keys=None, filename_tmpl=None, greater_keys=None, less_keys=None),
        *_DISK,
    ),
    "EMAHook": (
        Row("momentum", "ema", _ema, default=0.0002),
        *drop_if(update_buffers=False, strict_load=False, device=None),
    ),
    "EarlyStoppingHook": (
        Row("monitor", "early_stop", _early_stop, default=None),
        # A missing metric is always an error here, and NaN is never an improvement.
        *dropped("strict"),
        *drop_if(stopping_threshold=None, check_finite=True),
    ),
    "LoggerHook": (
        Row("interval", "", _log_interval, default=10),
        # Each record has the epoch and the update.
        *dropped("log_metric_by_epoch"),
        *drop_if(ignore_last=True, interval_exp_name=1000, out_suffix=None, keep_local=True),
        *_DISK,
    ),
}
_WRITERS: dict[str, tuple[Row, ...]] = {
    "LocalVisBackend": (),
    "TensorboardVisBackend": (Row("", "tensorboard", lambda one, key: True, default=None),),
}


def window_size(section: Section, key: str) -> Any:
    # A record averages the values since the previous record.
    walk(section, drop_if(window_size=section.draft.log_interval))
    return NOTHING


def visualizer(given: Section) -> Any:
    kind = given.kind("VISUALIZERS", "Visualizer")
    hooks = _by_type(given.each("vis_backends"), "VISBACKENDS", _WRITERS)
    if kind != "Visualizer":
        given.refuse(f"{kind} has no counterpart: draw in a custom hook")
    walk(given, (*dropped("name", "_scope_"), *drop_if(save_dir=None)))
    return hooks or NOTHING
