"""Hooks, and what writes the records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .draft import Draft, Section, bare_name, sections

# What they do is done here anyway: times, the order of the data, the schedules, the records.
_BUILT_IN = (
    "DistSamplerSeedHook",
    "IterTimerHook",
    "ParamSchedulerHook",
    "RuntimeInfoHook",
)
# What mmengine has where the config does not say otherwise.
_DEFAULTS = {
    "logger": {"type": "LoggerHook"},
    "checkpoint": {"type": "CheckpointHook", "interval": 1},
}
_NEEDED = {"sampler_seed": "data are shuffled anew", "param_scheduler": "the schedules step"}


def convert_hooks(draft: Draft, top: Section) -> None:
    """Translate `default_hooks`, `custom_hooks` and the visualizer's back-ends."""
    hooks: dict[str, Any] = {}
    defaults = top.below("default_hooks") or Section(draft, {}, "default_hooks")
    for name, settings in _DEFAULTS.items():
        if "train" in draft.sections and name not in defaults:
            defaults.put(name, settings)
    for name in defaults:
        if defaults.peek(name) is None:
            defaults.drop(name)
            _switched_off(draft, defaults.at(name), name, hooks)
            continue
        section = defaults.below(name)
        if section is not None:
            _hook(draft, section, hooks)
    for section in sections(draft, top.take("custom_hooks"), "custom_hooks"):
        _hook(draft, section, hooks)
    _writers(draft, top, hooks)
    if hooks:
        draft.sections["hooks"] = hooks


def _hook(draft: Draft, section: Section, hooks: dict[str, Any]) -> None:
    kind = section.kind("HOOKS")
    section.drop("priority", "_scope_")
    if kind in _BUILT_IN:
        section.close()
        return
    translate = _KINDS.get(kind)
    if translate is None:
        draft.miss(section.path, f"{kind} has no counterpart: write a hook (docs/extending.md)")
        section.drop(*section)
        return
    translate(draft, section, hooks)
    section.close()


def _switched_off(draft: Draft, key: str, name: str, hooks: dict[str, Any]) -> None:
    if name in _NEEDED:
        draft.miss(key, f"cannot be switched off: {_NEEDED[name]}")
    elif name in ("checkpoint", "logger"):
        hooks["log" if name == "logger" else name] = False


def _logger(draft: Draft, section: Section, hooks: dict[str, Any]) -> None:
    batches = section.take("interval", 10)
    train = draft.sections.get("train")
    if train is not None:
        train["log_every_steps"] = -(-batches // draft.batches)
    # Each record says both, the epoch and the update.
    section.drop("log_metric_by_epoch")
    section.accept(ignore_last=True, interval_exp_name=1000, out_suffix=None)
    section.accept(out_dir=None, keep_local=True, backend_args=None, file_client_args=None)
    draft.log_interval = batches


def _checkpoint(draft: Draft, section: Section, hooks: dict[str, Any]) -> None:
    interval = section.take("interval", -1)
    by_epoch = section.take("by_epoch", True)
    settings: dict[str, Any] = {"every_epochs": None, "every_secs": None}
    if interval > 0 and by_epoch:
        # A loop by iterations is one epoch to mmengine: at its end there is a checkpoint anyway.
        settings["every_epochs"] = interval if draft.by_epoch else None
    elif interval > 0:
        settings["every_steps"] = draft.updates(interval, section.at("interval"))
    keep = section.take("max_keep_ckpts", -1)
    # Without an interval only the last one and the best are saved.
    settings["keep_last"] = keep if keep > 0 else None if interval > 0 else 1
    best, rule = section.take("save_best"), section.take("rule")
    if isinstance(best, (list, tuple)):
        if len(best) > 1:
            draft.miss(section.at("save_best"), "one metric is kept the best of: the first")
        best = best[0] if best else None
        rule = rule[0] if isinstance(rule, (list, tuple)) and rule else rule
    if best is not None:
        settings |= _best(draft, section, best, rule)
    section.accept(
        save_optimizer=True,
        save_param_scheduler=True,
        save_last=True,
        save_begin=0,
        out_dir=None,
        backend_args=None,
        file_client_args=None,
        published_keys=None,
        filename_tmpl=None,
        greater_keys=None,
        less_keys=None,
    )
    hooks["checkpoint"] = settings


def _best(draft: Draft, section: Section, best: str, rule: str | None) -> dict[str, Any]:
    name = draft.metric(best, section.at("save_best"))
    if name is None:
        return {}
    return {"keep_best": name, "mode": draft.mode(rule, best, section.at("rule"))}


def _ema(draft: Draft, section: Section, hooks: dict[str, Any]) -> None:
    average = bare_name(section.take("ema_type", "ExponentialMovingAverage"))
    if average != "ExponentialMovingAverage":
        draft.miss(section.at("ema_type"), f"{average} is none of ours: see the hook ema")
        section.drop(*section)
        return
    keep = 1 - section.take("momentum", 0.0002)
    begin = section.take("begin_iter", 0)
    epochs = section.take("begin_epoch", 0)
    if epochs and draft.epoch_length is None:
        draft.miss(section.at("begin_epoch"), "needs --epoch-length: it counts updates here")
    elif epochs:
        # In the first batch of that epoch, which mmengine counts from one.
        begin = (epochs - 1) * int(draft.epoch_length or 0) + 1
    interval = section.take("interval", 1)
    times, steps = max(draft.batches // interval, 1), max(interval // draft.batches, 1)
    if draft.batches > 1:
        told = f"counts updates here, not batches: decay {keep:g}**{times}"
        draft.miss(section.at("momentum"), told)
    settings = {"decay": keep**times, "start_step": -(-max(begin, 1) // draft.batches)}
    if steps != 1:
        settings["every_steps"] = steps
    section.accept(update_buffers=False, strict_load=False, device=None)
    hooks["ema"] = settings


def _early_stop(draft: Draft, section: Section, hooks: dict[str, Any]) -> None:
    monitor, rule = section.take("monitor"), section.take("rule")
    name = draft.metric(monitor, section.at("monitor"))
    patience, delta = section.take("patience", 5), section.take("min_delta", 0.1)
    # A metric that is missing is an error, and one that is NaN never an improvement.
    section.drop("strict")
    section.accept(stopping_threshold=None, check_finite=True)
    if name is not None:
        hooks["early_stop"] = {
            "metric": name,
            "patience": patience,
            "mode": draft.mode(rule, monitor, section.at("rule")),
            "min_delta": delta,
        }


def _writers(draft: Draft, top: Section, hooks: dict[str, Any]) -> None:
    """Translate `log_processor`, `visualizer` and `vis_backends`: what is written."""
    processor = top.below("log_processor")
    if processor is not None:
        kind = processor.kind("LOG_PROCESSORS", "LogProcessor")
        if kind != "LogProcessor":
            draft.miss(processor.at("type"), f"{kind} has no counterpart here")
        processor.drop("by_epoch")
        # A record holds the values since the last one.
        processor.accept(window_size=draft.log_interval, num_digits=4, custom_cfg=None)
        processor.close()
    visualizer = top.below("visualizer")
    # Alone they are a variable that the visualizer may be made of.
    top.drop("vis_backends")
    if visualizer is None:
        return
    kind = visualizer.kind("VISUALIZERS", "Visualizer")
    for one in sections(draft, visualizer.take("vis_backends"), visualizer.at("vis_backends")):
        _writer(draft, one, hooks)
    if kind != "Visualizer":
        draft.miss("visualizer", f"{kind} has no counterpart: draw in a hook of your own")
        return
    visualizer.drop("name", "_scope_")
    visualizer.accept(save_dir=None)
    visualizer.close()


def _writer(draft: Draft, section: Section, hooks: dict[str, Any]) -> None:
    kind = section.kind("VISBACKENDS")
    section.drop("_scope_")
    if kind == "TensorboardVisBackend":
        hooks["tensorboard"] = True
    elif kind != "LocalVisBackend":
        draft.miss(section.path, f"{kind} has no counterpart: write a hook (docs/extending.md)")
        return
    section.close()


_KINDS: dict[str, Callable[[Draft, Section, dict[str, Any]], None]] = {
    "CheckpointHook": _checkpoint,
    "EMAHook": _ema,
    "EarlyStoppingHook": _early_stop,
    "LoggerHook": _logger,
}
