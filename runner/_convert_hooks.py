"""Hooks, and what writes the records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ._convert_draft import Draft, Section

# What they do is done here anyway: times, the order of the data, the schedules, the records.
_BUILT_IN = (
    "DistSamplerSeedHook",
    "IterTimerHook",
    "NaiveVisualizationHook",
    "ParamSchedulerHook",
    "RuntimeInfoHook",
)
_RULES = {"greater": "max", "less": "min"}
_NEEDED = {"sampler_seed": "data are shuffled anew", "param_scheduler": "the schedules step"}


def convert_hooks(draft: Draft, top: Section) -> None:
    """Translate `default_hooks`, `custom_hooks` and the visualizer's back-ends."""
    hooks: dict[str, Any] = {}
    defaults = top.below("default_hooks")
    for name in defaults or ():
        assert defaults is not None
        if defaults.peek(name) is not None:
            section = defaults.below(name)
            assert section is not None
            _hook(draft, section, hooks)
        else:
            defaults.drop(name)
            _switched_off(draft, defaults.at(name), name, hooks)
    for at, one in enumerate(top.take("custom_hooks") or ()):
        if isinstance(one, Mapping):
            _hook(draft, Section(draft, one, f"custom_hooks.{at}"), hooks)
        else:
            draft.miss(f"custom_hooks.{at}", "is no dict, and only dicts are translated")
    _writers(draft, top, hooks)
    if hooks:
        draft.sections["hooks"] = hooks


def _hook(draft: Draft, section: Section, hooks: dict[str, Any]) -> None:
    kind = section.kind()
    section.drop("priority", "_scope_")
    if kind in _BUILT_IN:
        section.drop(*section)
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
    # The record of an epoch's last batches comes with the next one's.
    section.drop("ignore_last", "log_metric_by_epoch", "interval_exp_name")
    section.accept(out_dir=None, keep_local=True, backend_args=None, file_client_args=None)


def _checkpoint(draft: Draft, section: Section, hooks: dict[str, Any]) -> None:
    interval = section.take("interval", -1)
    by_epoch = section.take("by_epoch", True)
    settings: dict[str, Any] = {"every_epochs": None}
    if interval > 0 and by_epoch:
        settings["every_epochs"] = interval
    elif interval > 0:
        settings["every_steps"] = draft.updates(interval, section.at("interval"))
    keep = section.take("max_keep_ckpts", -1)
    settings["keep_last"] = keep if keep > 0 else None
    best, rule = section.take("save_best"), section.take("rule")
    if isinstance(best, (list, tuple)):
        if len(best) > 1:
            draft.miss(section.at("save_best"), "one metric is kept the best of: the first")
        best = best[0]
        rule = rule[0] if isinstance(rule, (list, tuple)) else rule
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
    return {"keep_best": name, "mode": _RULES[rule] if rule else _usual_mode(best)}


def _usual_mode(metric: str) -> str:
    return "min" if "loss" in metric.lower() else "max"


def _ema(draft: Draft, section: Section, hooks: dict[str, Any]) -> None:
    average = str(section.take("ema_type", "ExponentialMovingAverage"))
    if average.rpartition(".")[2] != "ExponentialMovingAverage":
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
    if draft.batches > 1:
        told = f"counts updates here, not batches: decay {keep:g}**{draft.batches}"
        draft.miss(section.at("momentum"), told)
    interval = section.take("interval", 1)
    settings = {"decay": keep**draft.batches, "start_step": -(-max(begin, 1) // draft.batches)}
    if interval != 1:
        settings["every_steps"] = interval
    section.drop("strict_load", "device")
    section.accept(update_buffers=False)
    hooks["ema"] = settings


def _early_stop(draft: Draft, section: Section, hooks: dict[str, Any]) -> None:
    monitor, rule = section.take("monitor"), section.take("rule")
    name = draft.metric(monitor, section.at("monitor"))
    patience, delta = section.take("patience", 5), section.take("min_delta", 0.1)
    section.drop("strict", "check_finite")
    section.accept(stopping_threshold=None)
    if name is not None:
        mode = _RULES[rule] if rule else _usual_mode(monitor)
        hooks["early_stop"] = {
            "metric": name,
            "patience": patience,
            "mode": mode,
            "min_delta": delta,
        }


def _writers(draft: Draft, top: Section, hooks: dict[str, Any]) -> None:
    """Translate `visualizer` and `vis_backends`: what is written besides the records."""
    visualizer = top.below("visualizer")
    found: list[tuple[str, Any]] = []
    if visualizer is not None:
        for at, one in enumerate(visualizer.take("vis_backends") or ()):
            found.append((f"visualizer.vis_backends.{at}", one))
        kind = visualizer.kind("Visualizer")
        if kind != "Visualizer":
            draft.miss("visualizer", f"{kind} has no counterpart: draw in a hook of your own")
        visualizer.drop(*visualizer)
    top.drop("vis_backends")
    for key, one in found:
        kind = Section(draft, one, key).kind()
        if kind == "TensorboardVisBackend":
            hooks["tensorboard"] = True
        elif kind != "LocalVisBackend":
            draft.miss(key, f"{kind} has no counterpart: write a hook (docs/extending.md)")


_KINDS: dict[str, Callable[[Draft, Section, dict[str, Any]], None]] = {
    "CheckpointHook": _checkpoint,
    "EMAHook": _ema,
    "EarlyStoppingHook": _early_stop,
    "LoggerHook": _logger,
}
