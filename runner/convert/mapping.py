"""What each setting of mmengine becomes here: one table, walked from top to bottom."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ...registry import (
    DATASETS,
    METRICS,
    MODEL_WRAPPERS,
    MODELS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    ParamwiseSection,
    check_component,
)
from .draft import (
    NO_COUNTERPART,
    NOTHING,
    Row,
    Section,
    as_yaml,
    bare_name,
    dropped,
    kept,
    only,
    sections,
    walk,
)
from .schedules import convert_schedulers

_OWN_LOOP = "{} is a loop of your own: see docs/extending.md"
_OWN_HOOK = "{} has no counterpart: write a hook (docs/extending.md)"
_NO_STRATEGIES = "has no counterpart: wrapper, mesh and optim_wrapper say how ranks work together"
_NO_TTA = "has no counterpart: average the predictions in the model's own test_step"
_LAUNCHED = "ranks are started by launch.nproc, --nproc or torchrun"
_NOT_LOADED = (
    "a checkpoint of mmengine is no run of ours; its weights can be loaded by"
    " init_cfg=dict(type='Pretrained', ...): docs/migrate.md"
)
_BUILDER = "mmengine.runner.Runner.build_dataloader"
_PASSES = "the last batch of each pass over the data may be smaller here: see --keep-order"
_BY_CHILDREN = "here each optimizer has the parameters of the child of its name"


# Functions of rows: see `Row.to`.


def _given(section: Section, key: str) -> Any:
    """Take what is not None; that is listed."""
    return NOTHING if section[key] is None else section.pop(key)


def _usual(theirs: str, table: str, usual: str, refusal: str, *rows: Row) -> Row:
    """Return the row of a section whose type must be mmengine's usual one."""

    def check(section: Section, key: str) -> Any:
        kind = section.kind(table, usual)
        if kind != usual:
            section.draft.miss(section.at(key), refusal.format(kind))
        return NOTHING

    return Row(theirs, "", (Row("type", "", check, default=None), *rows))


def _imports(section: Section, key: str) -> Any:
    given = section.pop(key, None) or []
    return [given] if isinstance(given, str) else list(given)


def _resume(section: Section, key: str) -> Any:
    resume = section.pop(key) and section.get("load_from") is None
    return True if resume else NOTHING


def _compile(section: Section, key: str) -> Any:
    given = section[key]
    if not isinstance(given, Mapping) or not given.get("enable", True):
        return True if section.pop(key) is True else NOTHING
    below = section.below(key)
    assert below is not None
    walk(below, (*dropped("enable"), *only(target="forward")))
    options = {name: one for name, one in below.items() if name != "target"}
    if "target" in below:
        section.draft.miss(below.at("target"))
    return options or True


def _model(section: Section, key: str) -> Any:
    draft, preprocessor = section.draft, section.pop("data_preprocessor", None)
    model = section.below(key)
    if model is None:
        draft.miss(key, "is missing: a run needs one")
        return NOTHING
    part = draft.part(model, "MODELS", MODELS)
    if preprocessor is not None:
        part.setdefault("data_preprocessor", draft.plain(preprocessor))
    return part


_WRAPPERS = {
    "MMDistributedDataParallel": "ddp",
    "DistributedDataParallel": "ddp",
    "MMSeparateDistributedDataParallel": "separate",
    "MMFullyShardedDataParallel": "fsdp",
}


def _wrapper(section: Section, key: str) -> Any:
    draft = section.draft
    unused, sync = section.pop("find_unused_parameters", False), section.pop("sync_bn", None)
    given = section.below(key)
    options: dict[str, Any] = {"type": "ddp"}
    if given is not None:
        kind = given.kind("MODEL_WRAPPERS", "MMDistributedDataParallel")
        if kind not in _WRAPPERS:
            what = f"{kind} is a class of mmengine's kind: subclass one of stepwrap.wrappers"
            draft.miss(given.at("type"), what)
            return NOTHING
        options = _wrapper_options(given, _WRAPPERS[kind])
    elif unused:
        options["find_unused_parameters"] = True
    if sync is not None and options["type"] == "ddp":
        options["sync_batchnorm"] = True
    elif sync is not None:
        draft.miss("sync_bn", f"is an option of ddp, not of {options['type']}")
    return options if given is not None or unused or sync is not None else NOTHING


def _wrapper_options(given: Section, kind: str) -> dict[str, Any]:
    options: dict[str, Any] = {"type": kind}
    # They follow from the rank, and from our class.
    walk(given, dropped("device_ids", "output_device", "use_orig_params", "module"))
    for key in list(given):
        option = {key: as_yaml(given[key])}
        problems = check_component({**options, **option}, MODEL_WRAPPERS, "", ("module",))
        # Wrong values are told by `stepwrap check`.
        if not any("no such argument" in problem.what for problem in problems):
            options |= option
            del given[key]
    given.close(f"is no option of {kind}")
    return options


def _scaling(section: Section, key: str) -> Any:
    given = section.pop(key)
    if isinstance(given, Mapping) and given.get("enable"):
        section.draft.miss(f"{key}.enable", "there is no scaling of the rate: set optimizer.lr")
    return NOTHING


_CONSTRUCTORS = ("", "DefaultOptimWrapperConstructor")
_PARAMWISE = tuple(one.name for one in fields(ParamwiseSection))


def _optimization(section: Section, key: str) -> Any:
    """Return our sections for one optimizer or several, and their wrappers."""
    given = section.below(key)
    if given is None:
        return NOTHING
    constructor = bare_name(given.pop("constructor", ""))
    names = [name for name, one in given.items() if isinstance(one, Mapping) and "optimizer" in one]
    if "optimizer" in given or not names:
        if constructor not in _CONSTRUCTORS:
            given.draft.miss(f"{key}.constructor", "paramwise options are all that is translated")
        optimizer, wrapper = _single(given)
    else:
        if constructor not in (*_CONSTRUCTORS, "MultiOptimWrapperConstructor"):
            given.draft.miss(f"{key}.constructor", _BY_CHILDREN)
        made = {
            name: _single(Section(given.draft, given.pop(name), given.at(name))) for name in names
        }
        given.close()
        optimizer = {name: one for name, (one, _) in made.items()}
        wrapper = {name: one for name, (_, one) in made.items() if one}
    return {"optimizer": optimizer} | ({"optim_wrapper": wrapper} if wrapper else {})


def _single(section: Section) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return our sections for one optimizer and its wrapper."""
    draft, given = section.draft, section.below("optimizer")
    if given is None:
        draft.miss(section.at("optimizer"), "is missing: training needs one")
        return {}, {}
    optimizer = draft.part(given, "OPTIMIZERS", OPTIMIZERS)
    paramwise = section.below("paramwise_cfg")
    if paramwise is not None:
        known = {key: paramwise.pop(key) for key in list(paramwise) if key in _PARAMWISE}
        paramwise.close()
        if known:
            optimizer["paramwise"] = {**known, "as_mmengine": True}
    wrapper = walk(section, _OPTIM_WRAPPER)
    # Its other options are those of the class.
    return optimizer, {**wrapper, **section}


def _optim_wrapper_type(section: Section, key: str) -> Any:
    original = section.get(key)
    kind = section.kind("OPTIM_WRAPPERS", "OptimWrapper")
    if kind in ("OptimWrapper", "AmpOptimWrapper"):
        return NOTHING if kind == "OptimWrapper" else kind
    # A class of mmengine's kind runs as it is.
    return section.draft.name_of(original, "OPTIM_WRAPPERS", OPTIM_WRAPPERS, section.at(key))


def _accumulated(section: Section, key: str) -> Any:
    batches = section.pop(key)
    section.draft.batches = max(section.draft.batches, batches)
    return batches if batches != 1 else NOTHING


_OPTIM_WRAPPER = (
    Row("type", "type", _optim_wrapper_type, default=None),
    Row("accumulative_counts", "accumulative_counts", _accumulated),
    Row("use_fsdp"),
    *only(clip_grad=None, loss_scale="dynamic"),
    Row("dtype", "dtype", lambda one, key: str(one.pop(key)).removeprefix("torch."), same=(None,)),
)


def _training(section: Section, key: str) -> Any:
    given, draft = section.below(key), section.draft
    if given is None:
        return NOTHING
    by_epoch = given.pop("by_epoch", None)
    by_iterations = by_epoch is False or (by_epoch is None and "max_iters" in given)
    kind = given.kind("LOOPS", "IterBasedTrainLoop" if by_iterations else "EpochBasedTrainLoop")
    draft.by_epoch = kind != "IterBasedTrainLoop"
    if kind not in ("EpochBasedTrainLoop", "IterBasedTrainLoop"):
        draft.miss(given.at("type"), _OWN_LOOP.format(kind))
        draft.by_epoch = given.get("max_iters") is None
    if not draft.by_epoch:
        given["val_interval"] = given.get("val_interval") or 1000
    length = Row("max_epochs", "max_epochs", default=None)
    if not draft.by_epoch:
        length = Row("max_iters", "max_steps", _counted, default=None)
    loop = walk(given, (length, *_INTERVALS))
    given.close()
    return {"type": "EpochTrainLoop" if draft.by_epoch else "IterTrainLoop", **loop}


def _counted(section: Section, key: str) -> Any:
    """Take a number of epochs, or one of batches as one of updates."""
    value = section.pop(key, None)
    return value if section.draft.by_epoch else section.draft.updates(value, section.at(key))


def _counted_pairs(section: Section, key: str) -> Any:
    pairs, draft = section.pop(key), section.draft
    if not pairs:
        return NOTHING
    if draft.by_epoch:
        return [list(pair) for pair in pairs]
    return [[draft.updates(one, section.at(key)) for one in pair] for pair in pairs]


_INTERVALS = (
    Row("val_begin", "val_begin", _counted, same=(None,)),
    Row("val_interval", "val_interval", _counted, same=(None,)),
    Row("dynamic_intervals", "dynamic_intervals", _counted_pairs),
)


def _loader(section: Section, key: str) -> Any:
    given, draft = section.below(key), section.draft
    if given is None:
        return NOTHING
    train = key == "train_dataloader"
    if draft.keep_order or not _is_ours(given, train):
        # All of it as mmengine builds it: its samplers, its order, its batches.
        plain = draft.plain({"type": "", **given})
        del plain["type"]
        return {"type": _BUILDER, "dataloader": plain, "seed": draft.sections.get("seed", 0)}
    loader = walk(given, _LOADER)
    endless = draft.known_as(given["sampler"].get("type"), "DATA_SAMPLERS") == "InfiniteSampler"
    if train and endless and not loader.get("drop_last"):
        draft.miss(f"{given.path}.sampler.type", _PASSES)
    walk(given, _ORDER, loader)
    given.close()
    return loader


def _is_ours(section: Section, train: bool) -> bool:
    """Whether our loader does the same with these settings."""
    sampler, collate = section.get("sampler"), section.get("collate_fn")
    others = ("batch_sampler", "worker_init_fn", "num_batch_per_epoch", "timeout")
    return (
        isinstance(sampler, Mapping)
        and section.draft.known_as(sampler.get("type"), "DATA_SAMPLERS")
        in ("DefaultSampler", "InfiniteSampler")
        and (not train or bool(sampler.get("round_up", True)))
        and (collate is None or (isinstance(collate, Mapping) and len(collate) == 1))
        and not any(section.get(key) for key in others)
    )


def _dataset(section: Section, key: str) -> Any:
    given = section.below(key)
    return NOTHING if given is None else section.draft.part(given, "DATASETS", DATASETS)


def _collate(section: Section, key: str) -> str:
    given = section.below(key)
    name = "pseudo_collate" if given is None else given.pop("type", None)
    if given is None or name in ("pseudo_collate", "default_collate"):
        return f"mmengine.dataset.{name}"
    return section.draft.name_of(name, "FUNCTIONS", DATASETS, given.at("type"))


_LOADER = (
    Row("dataset", "dataset", _dataset),
    *(Row(key, key, _given) for key in ("batch_size", "num_workers", "drop_last", "pin_memory")),
    Row("prefetch_factor", "prefetch_factor", same=(None,)),
)
_ORDER = (
    # The same on all ranks, and all samples come: nothing else to say.
    Row("sampler", "", (
        *kept(shuffle=True),
        Row("seed", "seed", same=(None,)),
        *dropped("type", "round_up", "_scope_"),
    )),
    Row("collate_fn", "collate", _collate, default=None),
    # Workers stay anyway.
    Row("persistent_workers"),
    *only(worker_init_fn=None, batch_sampler=None, timeout=0, num_batch_per_epoch=None),
    *only(multiprocessing_context=None),
)  # fmt: skip


def _metrics(section: Section, key: str) -> Any:
    """Return the metrics of `val_evaluator` and `test_evaluator`, which share one section here."""
    draft, given, path = section.draft, section.pop(key, None), key
    other = section.pop("test_evaluator", None)
    if given is None:
        given, path = other, "test_evaluator"
    elif other is not None and other != given:
        draft.miss("test_evaluator", "validation and test share their metrics: val_evaluator's")
    if isinstance(given, Mapping) and bare_name(given.get("type", "Evaluator")) == "Evaluator":
        evaluator = Section(draft, given, path)
        given, path = evaluator.pop("metrics", None), evaluator.at("metrics")
        walk(evaluator, (Row("type"),))
        evaluator.close()
    metrics: dict[str, Any] = {}
    for one in sections(draft, given, path):
        wanted, prefix = one.get("type"), one.get("prefix")
        made = draft.part(one, "METRICS", METRICS)
        prefix = prefix or draft.prefix_of(wanted)
        label = prefix or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare_name(wanted)).lower()
        while label in metrics:
            label += "_2"
        draft.metric_names[label] = prefix or ""
        metrics[label] = {"type": "ProcessMetric", "metric": made}
    return metrics or NOTHING


# What mmengine has where the config does not say otherwise.
_DEFAULT_HOOKS = {
    "logger": {"type": "LoggerHook"},
    "checkpoint": {"type": "CheckpointHook", "interval": 1},
}
_NEEDED = {"sampler_seed": "data are shuffled anew", "param_scheduler": "the schedules step"}
_SWITCHES = {"checkpoint": "checkpoint", "logger": "log"}


def _default_hooks(section: Section, key: str) -> Any:
    draft = section.draft
    defaults = section.below(key) or Section(draft, {}, key)
    if "train" in draft.sections:
        defaults |= {name: one for name, one in _DEFAULT_HOOKS.items() if name not in defaults}
    hooks: dict[str, Any] = {}
    for name, given in list(defaults.items()):
        one = defaults.below(name)
        if one is not None:
            hooks |= _by_type(one, "HOOKS", _HOOKS)
        elif given is None and name in _NEEDED:
            draft.miss(defaults.at(name), f"cannot be switched off: {_NEEDED[name]}")
        elif given is None and name in _SWITCHES:
            hooks[_SWITCHES[name]] = False
    return hooks or NOTHING


def _custom_hooks(section: Section, key: str) -> Any:
    hooks: dict[str, Any] = {}
    for one in sections(section.draft, section.pop(key), key):
        hooks |= _by_type(one, "HOOKS", _HOOKS)
    return hooks or NOTHING


def _by_type(section: Section, table: str, kinds: dict[str, tuple[Row, ...]]) -> dict[str, Any]:
    kind = section.kind(table)
    walk(section, dropped("_scope_", *(["priority"] if table == "HOOKS" else [])))
    if kind not in kinds:
        section.draft.miss(section.path, _OWN_HOOK.format(kind))
        return {}
    made = walk(section, kinds[kind])
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
        # A loop by iterations is one epoch to mmengine: at its end there is a checkpoint anyway.
        settings["every_epochs"] = interval if draft.by_epoch else None
    elif interval > 0:
        settings["every_steps"] = draft.updates(interval, section.at(key))
    keep = section.pop("max_keep_ckpts", -1)
    # Without an interval only the last one and the best are saved.
    settings["keep_last"] = keep if keep > 0 else None if interval > 0 else 1
    best, rule = section.pop("save_best", None), section.pop("rule", None)
    if isinstance(best, (list, tuple)):
        if len(best) > 1:
            draft.miss(section.at("save_best"), "one metric is kept the best of: the first")
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
        draft.miss(section.at("ema_type"), f"{average} is none of ours: see the hook ema")
        section.clear()
        return NOTHING
    keep, interval = 1 - section.pop(key, 0.0002), section.pop("interval", 1)
    begin, epochs = section.pop("begin_iter", 0), section.pop("begin_epoch", 0)
    if epochs and draft.epoch_length is None:
        draft.miss(section.at("begin_epoch"), "needs --epoch-length: it counts updates here")
    elif epochs:
        # In the first batch of that epoch, which mmengine counts from one.
        begin = (epochs - 1) * int(draft.epoch_length or 0) + 1
    times, steps = max(draft.batches // interval, 1), max(interval // draft.batches, 1)
    if draft.batches > 1:
        told = f"counts updates here, not batches: decay {keep:g}**{times}"
        draft.miss(section.at(key), told)
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


_DISK = only(out_dir=None, backend_args=None, file_client_args=None)
_HOOKS: dict[str, tuple[Row, ...]] = {
    # What they do is done here anyway: times, the order of the data, the schedules, the records.
    "DistSamplerSeedHook": (),
    "IterTimerHook": (),
    "ParamSchedulerHook": (),
    "RuntimeInfoHook": (),
    "CheckpointHook": (
        Row("interval", "checkpoint", _saving, default=-1),
        *only(save_optimizer=True, save_param_scheduler=True, save_last=True, save_begin=0),
        *only(published_keys=None, filename_tmpl=None, greater_keys=None, less_keys=None),
        *_DISK,
    ),
    "EMAHook": (
        Row("momentum", "ema", _ema, default=0.0002),
        *only(update_buffers=False, strict_load=False, device=None),
    ),
    "EarlyStoppingHook": (
        Row("monitor", "early_stop", _early_stop, default=None),
        # A metric that is missing is an error, and one that is NaN never an improvement.
        *dropped("strict"),
        *only(stopping_threshold=None, check_finite=True),
    ),
    "LoggerHook": (
        Row("interval", "", _log_interval, default=10),
        # Each record says both, the epoch and the update.
        *dropped("log_metric_by_epoch"),
        *only(ignore_last=True, interval_exp_name=1000, out_suffix=None, keep_local=True),
        *_DISK,
    ),
}
_WRITERS: dict[str, tuple[Row, ...]] = {
    "LocalVisBackend": (),
    "TensorboardVisBackend": (Row("", "tensorboard", lambda one, key: True, default=None),),
}


def _window_size(section: Section, key: str) -> Any:
    # A record holds the values since the last one.
    walk(section, only(window_size=section.draft.log_interval))
    return NOTHING


def _visualizer(section: Section, key: str) -> Any:
    given, draft = section.below(key), section.draft
    hooks: dict[str, Any] = {}
    if given is None:
        return NOTHING
    kind = given.kind("VISUALIZERS", "Visualizer")
    for one in sections(draft, given.pop("vis_backends", None), given.at("vis_backends")):
        hooks |= _by_type(one, "VISBACKENDS", _WRITERS)
    if kind != "Visualizer":
        draft.miss(key, f"{kind} has no counterpart: draw in a hook of your own")
    else:
        walk(given, (*dropped("name", "_scope_"), *only(save_dir=None)))
        given.close()
    return hooks or NOTHING


# What a row makes may depend on those above it.
MAPPING = (
    Row("default_scope"),
    Row("strategy", same=(None,), refusal=_NO_STRATEGIES),
    Row("tta_model", same=(None,), refusal=_NO_TTA),
    Row("launcher", same=("none",), refusal=_LAUNCHED),
    Row("log_level", same=("INFO", None), refusal=NO_COUNTERPART),
    Row("runner_type", same=("Runner", None), refusal=NO_COUNTERPART),
    Row("custom_imports", "", (
        Row("imports", "imports", _imports, default=None),
        Row("allow_failed_imports", same=(False,)),
    ), refusal="is not possible: every import must succeed"),
    Row("experiment_name", "name", same=(None,)),
    Row("work_dir", "run_dir", same=(None,)),
    Row("randomness", "", (
        Row("seed", "seed", same=(None,)),
        Row("deterministic", "deterministic", lambda one, key: True if one.pop(key) else NOTHING),
        # Ranks draw different numbers anyway, once the model is built.
        Row("diff_rank_seed"),
    )),
    Row("env_cfg", "", (
        *only(cudnn_benchmark=False),
        Row("mp_cfg", "", only(mp_start_method="fork", opencv_num_threads=0)),
        Row("dist_cfg", "launch", (
            # nccl is mmengine's default, also where there is no GPU; ours follows the device.
            Row("backend", "backend", _given, same=("nccl",)),
            Row("timeout", "timeout_s", _given),
        )),
    )),
    Row("resume", "resume", _resume),
    Row("load_from", same=(None,), refusal=_NOT_LOADED),
    Row("compile", "compile", _compile),
    Row("model", "model", _model, default=None),
    Row("model_wrapper_cfg", "wrapper", _wrapper, default=None),
    Row("auto_scale_lr", "", _scaling),
    Row("optim_wrapper", "", _optimization),
    Row("train_cfg", "train", _training),
    _usual("val_cfg", "LOOPS", "ValLoop", _OWN_LOOP, *only(fp16=False)),
    _usual("test_cfg", "LOOPS", "TestLoop", _OWN_LOOP, *only(fp16=False)),
    Row("train_dataloader", "data.train", _loader),
    Row("val_dataloader", "data.val", _loader),
    Row("test_dataloader", "data.test", _loader),
    Row("val_evaluator", "metrics", _metrics, default=None),
    Row("param_scheduler", "schedulers", convert_schedulers),
    Row("default_hooks", "hooks", _default_hooks, default=None),
    Row("custom_hooks", "hooks", _custom_hooks),
    _usual(
        "log_processor", "LOG_PROCESSORS", "LogProcessor", "{} has no counterpart here",
        *dropped("by_epoch"),
        Row("window_size", "", _window_size),
        *only(num_digits=4, custom_cfg=None),
    ),
    Row("visualizer", "hooks", _visualizer),
    # Alone they are a variable that the visualizer may be made of.
    Row("vis_backends"),
)  # fmt: skip
