"""Convert hooks and visualizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .draft import NOTHING, Row, Section, bare_name, drop_if, dropped, note_unless, walk

_OWN_HOOK = "{} has no counterpart: write a hook (docs/extending.md)"
_NO_DRAWING = "{} is dropped: it has no effect on the results. To draw, write a hook"
_LOG_ONLY = "is dropped: it only concerns the log"
_OWN_STOP = (
    "to have this, write a hook whose on_eval_end calls state.request_stop (docs/extending.md)"
)


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
        defaults |= {
            name: settings for name, settings in _DEFAULT_HOOKS.items() if name not in defaults
        }
    hooks: dict[str, Any] = {}
    for name, settings in list(defaults.items()):
        hook = defaults.below(name)
        if hook is not None:
            hooks |= _convert_by_type([hook], "HOOKS", _HOOKS)
        elif settings is None and name in _NEEDED:
            defaults.miss(name, f"cannot be switched off: {_NEEDED[name]}")
        elif settings is None and name in _SWITCHES:
            hooks[_SWITCHES[name]] = False
    return hooks or NOTHING


def custom_hooks(section: Section, key: str) -> Any:
    return _convert_by_type(section.each(key), "HOOKS", _HOOKS) or NOTHING


def _convert_by_type(
    sections: Iterable[Section], table: str, kinds: dict[str, tuple[Row, ...]]
) -> dict[str, Any]:
    """Convert hooks of mmengine by the rows of their types."""
    hooks: dict[str, Any] = {}
    for section in sections:
        original = section.get("type")
        kind = section.kind(table)
        base, overrides = _base(section, original, table) if kind not in kinds else (kind, [])
        if not kind:
            continue
        if bare_name(kind).endswith(_HARMLESS):
            section.drop(_NO_DRAWING.format(bare_name(kind)))
        elif base not in kinds:
            section.refuse(_OWN_HOOK.format(kind))
        else:
            hooks |= walk(section, (*dropped("_scope_", "priority"), *kinds[base]))
            section.close()
            if overrides:
                names = ", ".join(overrides)
                section.miss("type", f"{kind} is converted as {base}; {names} is not converted")
    return hooks


def _base(section: Section, original: Any, table: str) -> tuple[str, list[str]]:
    """Return mmengine's class that a hook is derived from, and the names that it overrides."""
    overrides: list[str] = []
    for ancestor in getattr(section.draft.look_up(original, table), "__mro__", ()):
        if ancestor.__module__.partition(".")[0] == "mmengine":
            return ancestor.__name__, overrides
        overrides += [name for name, value in vars(ancestor).items() if callable(value)]
    return "", overrides


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
        message = "the average is updated after each update here, not after each batch"
        section.miss(key, f"{message}: decay {keep:g}**{times}")
    settings = {"decay": keep**times, "start_step": -(-max(begin, 1) // draft.batches)}
    return settings | ({"every_steps": steps} if steps != 1 else {})


def _early_stop(section: Section, key: str) -> Any:
    draft, monitor, rule = section.draft, section.pop(key, None), section.pop("rule", None)
    name = draft.metric(monitor, section.at(key))
    patience, delta = section.pop("patience", 5), section.pop("min_delta", 0.1)
    finite = section.pop("check_finite", True)
    if name is None:
        return NOTHING
    if delta:
        message = f"mmengine also accepts a value that is better by exactly {delta}"
        remedy = "lower min_delta slightly to have this"
    else:
        message, remedy = "mmengine also accepts a value that equals the best one", _OWN_STOP
    section.miss("min_delta", f"{message} as an improvement, and early_stop does not; {remedy}")
    message = (
        "mmengine ends training when the metric is NaN or infinite, and early_stop does not"
        if finite
        else "mmengine accepts NaN as an improvement, and early_stop never does"
    )
    section.miss("check_finite", f"{message}; {_OWN_STOP}")
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
        # A missing metric is always an error here.
        *dropped("strict"),
        *drop_if(stopping_threshold=None),
    ),
    "LoggerHook": (
        Row("interval", "", _log_interval, default=10),
        # Each record has the epoch and the update.
        *dropped("log_metric_by_epoch"),
        *note_unless(_LOG_ONLY, ignore_last=True, interval_exp_name=1000),
        *note_unless(_LOG_ONLY, out_suffix=None, keep_local=True),
        *_DISK,
    ),
}
# Endings of the names of hooks that draw, measure or check, and change no result.
_HARMLESS = (
    "VisualizationHook",
    "ProfilerHook",
    "EmptyCacheHook",
    "NumClassCheckHook",
    "PrepareTTAHook",
)
_WRITING_HOOKS = {"WandbVisBackend": "wandb", "MLflowVisBackend": "mlflow"}
_WRITERS: dict[str, tuple[Row, ...]] = {
    "LocalVisBackend": (),
    "TensorboardVisBackend": (Row("", "tensorboard", lambda section, key: True, default=None),),
}


def window_size(section: Section, key: str) -> Any:
    # A record averages the values since the previous record.
    walk(section, note_unless(_LOG_ONLY, window_size=section.draft.log_interval))
    return NOTHING


def visualizer(section: Section) -> Any:
    kind = section.kind("VISUALIZERS", "Visualizer")
    writers = list(section.each("vis_backends"))
    hooks: dict[str, Any] = {}
    for writer in writers:
        name = bare_name(writer.get("type", ""))
        if name in ("", *_WRITERS):
            hooks |= _convert_by_type([writer], "VISBACKENDS", _WRITERS)
        else:
            hook = _WRITING_HOOKS.get(name, "")
            remedy = f"set the hook {hook}" if hook else "see docs/extending.md"
            writer.drop(f"{name} is dropped: it only writes records. To have them, {remedy}")
    if kind != "Visualizer":
        section.drop(_NO_DRAWING.format(kind))
    walk(section, (*dropped("name", "_scope_"), *note_unless(save_dir=None)))
    return hooks or NOTHING
