"""Convert the settings of mmengine by one table, from top to bottom."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from ...registry import (
    MODEL_WRAPPERS,
    ParamwiseSection,
    RunSections,
    check_component,
    format_config,
)
from .draft import (
    NO_COUNTERPART,
    NOTHING,
    Draft,
    Miss,
    Row,
    Section,
    Take,
    as_yaml,
    bare_name,
    convert_by_rows,
    drop_if,
    dropped,
    inside,
    kept,
    note_unless,
    walk,
)
from .hooks import custom_hooks, default_hooks, visualizer, window_size
from .schedules import schedulers
from .source import read_source

_OWN_LOOP = "{} is a custom loop: see docs/extending.md"
_NO_STRATEGIES = "has no counterpart: set wrapper, mesh and optim_wrapper instead"
_NO_TTA = (
    "is dropped: mmengine uses it with --tta only. For it, average the predictions in test_step"
)
_LAUNCHED = "ranks are started by launch.nproc, --nproc or torchrun"
_NOT_CONTINUED = "is loaded for its weights only: a run of mmengine cannot be resumed here"
_NOT_LOCAL = "must be a local file here: download it, and set load_from to its path"
_LAYER_DECAY = (
    "is not converted: set optimizer.paramwise.layer_decay and layers (docs/configs.md), which"
    " multiply the rates once for each layer above a parameter"
)
_SPEED = "is dropped: it only changes the speed"
_LOG_ONLY = "is dropped: it only concerns the log"
_UNKNOWN = "is dropped: mmengine's Runner ignores it as well"
_BUILDER = "mmengine.runner.Runner.build_dataloader"
_PASSES = "the last batch of each pass over the data may be smaller here: see --keep-order"
_BY_CHILDREN = "here each optimizer gets the parameters of the child module of the same name"


class Conversion(NamedTuple):
    """The converted settings, and the settings without a counterpart or with another meaning."""

    config: dict[str, Any]
    misses: list[Miss]

    def text(self) -> str:
        """Return the converted settings as YAML, with the misses as comments at the end."""
        lines = [format_config(self.config)]
        for title, misses in self.sorted_misses().items():
            lines.append(f"\n# {title}:\n")
            lines += [f"#   {miss}\n" for miss in misses]
        return "".join(lines)

    def sorted_misses(self) -> dict[str, list[Miss]]:
        """Return the misses by a title; first those that change the result."""
        changing = [miss for miss in self.misses if miss.changes_result]
        harmless = [miss for miss in self.misses if not miss.changes_result]
        titles = {
            "Changes the result, or has no counterpart": changing,
            "Without effect here": harmless,
        }
        return {title: misses for title, misses in titles.items() if misses}


def convert_config(
    path: str | os.PathLike[str], *, epoch_length: int | None = None, keep_order: bool = False
) -> Conversion:
    """Convert a config file of mmengine.

    Args:
        path: the .py file, which is executed.
        epoch_length: batches per epoch, for schedules with ``convert_to_iter_based``.
        keep_order: read the data with mmengine's loaders, in the same order.

    Raises:
        ConfigError: the file cannot be read.
    """
    settings, lines = read_source(Path(path))
    scope, name = settings.get("default_scope"), Path(path).stem
    draft = Draft(lines, scope, epoch_length, keep_order, {"name": name})
    top = Section(draft, settings)
    # Variables that expressions in the file use are parts of other settings: do not report them.
    walk(top, (*_MAPPING, *dropped(*lines.read, "_base_")), draft.sections)
    for key in top:
        top.note(key, _UNKNOWN)
    draft.list_absent_libraries()
    order = dict.fromkeys((*_FIRST, *(section.name for section in fields(RunSections))))
    config = {
        key: _yaml_value(draft, draft.sections[key], key) for key in order if key in draft.sections
    }
    return Conversion(config, draft.misses)


_FIRST = ("name", "imports", "seed", "deterministic", "run_dir")


def _yaml_value(draft: Draft, value: Any, path: str) -> Any:
    """Return a value that YAML can represent; list anything else as a miss."""
    if isinstance(value, Mapping):
        pairs = ((key, entry, f"{path}.{key}") for key, entry in value.items())
        return {_key(draft, key, at): _yaml_value(draft, entry, at) for key, entry, at in pairs}
    if isinstance(value, (list, tuple)):
        return [_yaml_value(draft, entry, f"{path}.{at}") for at, entry in enumerate(value)]
    if value is None or isinstance(value, (str, int, float)):
        return value
    return _text(draft, value, path, f"YAML cannot represent a {type(value).__name__}")


def _key(draft: Draft, name: Any, path: str) -> str | int:
    if isinstance(name, (str, int)) and not isinstance(name, bool):
        return name
    return _text(draft, name, path, f"a key must be a str or int, not {name!r}")


def _text(draft: Draft, value: Any, path: str, why: str) -> str:
    sources = {row.target: row.source for row in reversed(_MAPPING) if row.target}
    sources |= {"launch": "env_cfg.dist_cfg", "optimizer": "optim_wrapper.optimizer"}
    target = next((key for key in sources if f"{path}.".startswith(f"{key}.")), "")
    key = sources.get(target, "") + path.removeprefix(target)
    draft.miss(key, f"{why}: written as text")
    return str(value)


# Functions of rows: see `Row.convert`.


def _default_type(table: str, default: str, refusal: str, *rows: Row) -> Take:
    """Return a function for ``Row.convert`` that converts a dict by ``rows``.

    If the dict's type is not ``default``, it is listed as a miss with the text ``refusal``.
    """

    def make(section: Section) -> Any:
        kind = section.kind(table, default)
        if kind != default:
            section.miss("type", refusal.format(kind))
        return walk(section, rows)

    return inside(make)


def _imports(section: Section, key: str) -> Any:
    modules = section.pop(key, None) or []
    return [modules] if isinstance(modules, str) else list(modules)


def _resume(section: Section, key: str) -> Any:
    resumes = section.pop(key)
    if resumes and section.get("load_from") is not None:
        section.miss("load_from", _NOT_CONTINUED)
        return NOTHING
    return True if resumes else NOTHING


def _load_from(section: Section, key: str) -> Any:
    path = str(section.pop(key))
    if "://" in path:
        section.miss(key, _NOT_LOCAL)
        return NOTHING
    # mmengine loads what fits, and logs the rest.
    return {"path": path, "strict": False}


def _compile(section: Section, key: str) -> Any:
    settings = section[key]
    if not isinstance(settings, Mapping) or not settings.get("enable", True):
        return True if section.pop(key) is True else NOTHING
    options = Section(section.draft, section.pop(key), key)
    walk(options, (Row("enable"), Row("target", same=("forward",), refusal=NO_COUNTERPART)))
    return dict(options) or True


def _model(section: Section, key: str) -> Any:
    draft, preprocessor = section.draft, section.pop("data_preprocessor", None)
    model = section.below(key)
    if model is None:
        section.miss(key, "is missing: a run needs one")
        return NOTHING
    built = model.part("MODELS")
    if preprocessor is not None:
        built.setdefault("data_preprocessor", draft.plain(preprocessor))
    return built


_WRAPPERS = {
    "MMDistributedDataParallel": "ddp",
    "DistributedDataParallel": "ddp",
    "MMSeparateDistributedDataParallel": "separate",
    "MMFullyShardedDataParallel": "fsdp",
}


def _wrapper(section: Section, key: str) -> Any:
    unused, sync = section.pop("find_unused_parameters", False), section.pop("sync_bn", None)
    wrapper_section = section.below(key)
    options: dict[str, Any] = {"type": "ddp"}
    if wrapper_section is not None:
        kind = wrapper_section.kind("MODEL_WRAPPERS", "MMDistributedDataParallel")
        if kind not in _WRAPPERS:
            message = f"{kind} is an mmengine wrapper: write a subclass of one in stepwrap.wrappers"
            wrapper_section.miss("type", message)
            return NOTHING
        options = _wrapper_options(wrapper_section, _WRAPPERS[kind])
    elif unused:
        options["find_unused_parameters"] = True
    if sync is not None and options["type"] == "ddp":
        options["sync_batchnorm"] = True
    elif sync is not None:
        section.miss("sync_bn", f"is an option of ddp, not of {options['type']}")
    return options if wrapper_section is not None or unused or sync is not None else NOTHING


def _wrapper_options(section: Section, kind: str) -> dict[str, Any]:
    # Our wrapper sets these itself.
    walk(section, dropped("device_ids", "output_device", "use_orig_params", "module"))
    options = {"type": kind, **as_yaml(section)}
    # Wrong values are reported by `stepwrap check`.
    for problem in check_component(options, MODEL_WRAPPERS, "", ("module",)):
        if "no such argument" in problem.what:
            del options[problem.key.removeprefix(".")]
    for key in options.keys() & section.keys():
        del section[key]
    section.close(f"is not an option of {kind}")
    return options


_CONSTRUCTORS = ("", "DefaultOptimWrapperConstructor")
_PARAMWISE = tuple(setting.name for setting in fields(ParamwiseSection))


def _optimization(optim_section: Section) -> Any:
    """Return our sections for one or several optimizers and their wrappers."""
    constructor = bare_name(optim_section.pop("constructor", ""))
    names = [
        name
        for name, member in optim_section.items()
        if isinstance(member, Mapping) and "optimizer" in member
    ]
    if "optimizer" in optim_section or not names:
        if constructor not in _CONSTRUCTORS:
            optim_section.miss("constructor", "is not converted, only its paramwise options are")
        return _single(optim_section)
    if constructor not in (*_CONSTRUCTORS, "MultiOptimWrapperConstructor"):
        optim_section.miss("constructor", _BY_CHILDREN)
    sections: dict[str, Any] = {"optimizer": {}}
    for name in names:
        member = optim_section.below(name)
        for section, settings in _single(member).items() if member is not None else ():
            sections.setdefault(section, {})[name] = settings
    return sections


def _single(section: Section) -> dict[str, Any]:
    """Return our sections for one optimizer and, if there are settings for it, its wrapper."""
    converted = walk(section, _OPTIMIZER)
    if "type" not in converted.setdefault("optimizer", {}):
        section.miss("optimizer", "is missing: training needs one")
    # All other options are arguments of the wrapper's class.
    wrapper = walk(section, _OPTIM_WRAPPER) | section
    section.clear()
    return converted | ({"optim_wrapper": wrapper} if wrapper else {})


def _paramwise(given: Section) -> Any:
    for key in ("layer_decay_rate", "decay_rate"):
        if key in given:
            given.miss(key, _LAYER_DECAY)
            walk(given, dropped(key, "num_layers", "decay_type"))
    options = walk(given, kept(*_PARAMWISE))
    return {**options, "as_mmengine": True} if options else NOTHING


def _optim_wrapper_type(section: Section, key: str) -> Any:
    original = section.get(key)
    kind = section.kind("OPTIM_WRAPPERS", "OptimWrapper")
    if kind in ("", "OptimWrapper", "AmpOptimWrapper"):
        return kind if kind == "AmpOptimWrapper" else NOTHING
    # Custom optimizer wrappers of mmengine run unchanged.
    return section.draft.get_name(original, "OPTIM_WRAPPERS", section.at(key))


def _accumulated(section: Section, key: str) -> Any:
    batches = section.pop(key)
    section.draft.batches = max(section.draft.batches, batches)
    return batches if batches != 1 else NOTHING


_OPTIMIZER = (
    Row("optimizer", "optimizer", inside(lambda section: section.part("OPTIMIZERS"))),
    Row("paramwise_cfg", "optimizer.paramwise", inside(_paramwise)),
)
_OPTIM_WRAPPER = (
    Row("type", "type", _optim_wrapper_type, default=None),
    Row("accumulative_counts", "accumulative_counts", _accumulated),
    *dropped("use_fsdp"),
    *drop_if(clip_grad=None, loss_scale="dynamic"),
    Row(
        "dtype",
        "dtype",
        lambda section, key: str(section.pop(key)).removeprefix("torch."),
        same=(None,),
    ),
)


def _training(given: Section) -> Any:
    draft, by_epoch = given.draft, given.pop("by_epoch", None)
    by_iterations = by_epoch is False or (by_epoch is None and "max_iters" in given)
    kind = given.kind("LOOPS", "IterBasedTrainLoop" if by_iterations else "EpochBasedTrainLoop")
    draft.by_epoch = kind != "IterBasedTrainLoop"
    if kind not in ("EpochBasedTrainLoop", "IterBasedTrainLoop"):
        given.miss("type", _OWN_LOOP.format(kind))
        draft.by_epoch = given.get("max_iters") is None
    draft.loop_length = given.get("max_epochs" if draft.by_epoch else "max_iters")
    length = Row("max_epochs", "max_epochs", default=None)
    if not draft.by_epoch:
        given["val_interval"] = given.get("val_interval") or 1000
        length = Row("max_iters", "max_steps", _counted, default=None)
    loop = walk(given, (length, *_INTERVALS))
    if isinstance(loop.get("val_begin"), int):
        loop["val_begin"] = _first_validation(loop, draft.by_epoch)
    return {"type": "EpochTrainLoop" if draft.by_epoch else "IterTrainLoop", **loop}


def _first_validation(loop: Mapping[str, Any], by_epoch: bool) -> int:
    """Return the epoch or update of mmengine's first validation, by the converted settings.

    There ``val_begin`` only excludes earlier multiples of the interval.
    """
    begin = max(1, int(loop["val_begin"]))
    dynamic = [tuple(pair) for pair in loop.get("dynamic_intervals") or ()]
    intervals = [(0, loop.get("val_interval", 1 if by_epoch else 1000)), *dynamic]
    end = int(loop["max_epochs" if by_epoch else "max_steps"])
    for count in range(begin, end):
        active = [interval for milestone, interval in intervals if milestone <= count + 1]
        if count % active[-1] == 0:
            return count
    return max(begin, end)


def _counted(section: Section, key: str) -> Any:
    """Return a count or pairs of counts: epochs as they are, batches converted to updates."""
    value, draft = section.pop(key, None), section.draft
    if draft.by_epoch:
        return value
    if isinstance(value, (list, tuple)):
        return [[draft.updates(number, section.at(key)) for number in pair] for pair in value]
    return draft.updates(value, section.at(key))


_INTERVALS = (
    *(Row(key, key, _counted, same=(None,)) for key in ("val_begin", "val_interval")),
    Row("dynamic_intervals", "dynamic_intervals", _counted, same=(None, [], ())),
)


def _loader(section: Section) -> Any:
    draft, train = section.draft, section.path == "train_dataloader"
    if draft.keep_order or not _is_ours(section, train):
        # Let mmengine build the whole loader, with its samplers, order and batches.
        plain = draft.plain({"type": "", **section})
        del plain["type"]
        section.clear()
        return {"type": _BUILDER, "dataloader": plain, "seed": draft.sections.get("seed", 0)}
    loader = walk(section, _LOADER)
    endless = draft.known_as(section["sampler"].get("type"), "DATA_SAMPLERS") == "InfiniteSampler"
    if train and endless and not loader.get("drop_last"):
        section.miss("sampler.type", _PASSES)
    return walk(section, _ORDER, loader)


def _is_ours(section: Section, train: bool) -> bool:
    """Return whether our loader behaves the same with these settings."""
    sampler, collate = section.get("sampler"), section.get("collate_fn")
    unsupported = ("batch_sampler", "worker_init_fn", "num_batch_per_epoch", "timeout")
    return (
        isinstance(sampler, Mapping)
        and section.draft.known_as(sampler.get("type"), "DATA_SAMPLERS")
        in ("DefaultSampler", "InfiniteSampler")
        and (not train or bool(sampler.get("round_up", True)))
        and (collate is None or (isinstance(collate, Mapping) and len(collate) == 1))
        and not any(section.get(key) for key in unsupported)
    )


def _collate(section: Section, key: str) -> str:
    collate_section = section.below(key)
    name = "pseudo_collate" if collate_section is None else collate_section.pop("type", None)
    if collate_section is None or name in ("pseudo_collate", "default_collate"):
        return f"mmengine.dataset.{name}"
    return section.draft.get_name(name, "FUNCTIONS", collate_section.at("type"))


_LOADER = (
    Row("dataset", "dataset", inside(lambda section: section.part("DATASETS"))),
    *(Row(key, key, same=(None,)) for key in ("batch_size", "num_workers", "drop_last")),
    *(Row(key, key, same=(None,)) for key in ("pin_memory", "prefetch_factor")),
)
_ORDER = (
    # Our training loader uses the same order on all ranks, and gives each the same number of
    # samples by repeating some.
    Row("sampler", "", convert_by_rows(
        Row("shuffle", "shuffle", default=True),
        Row("seed", "seed", same=(None,)),
        *dropped("type", "round_up", "_scope_"),
    )),
    Row("collate_fn", "collate", _collate, default=None),
    # Workers are always persistent.
    *dropped("persistent_workers"),
    *drop_if(worker_init_fn=None, batch_sampler=None, timeout=0, num_batch_per_epoch=None),
    *drop_if(multiprocessing_context=None),
)  # fmt: skip


def _metrics(section: Section, key: str) -> Any:
    """Return the metrics of ``val_evaluator`` and ``test_evaluator``, which become one section."""
    draft, above, other = section.draft, section, section.get("test_evaluator")
    if section.get(key) is None:
        key = "test_evaluator"
    elif other is not None and other != section[key]:
        section.miss("test_evaluator", "is ignored: validation and test share val_evaluator")
    evaluator = section.get(key)
    if (
        isinstance(evaluator, Mapping)
        and bare_name(evaluator.get("type", "Evaluator")) == "Evaluator"
    ):
        above, key = Section(draft, evaluator, key), "metrics"
        walk(above, dropped("type"))
    metrics: dict[str, Any] = {}
    for metric in above.each(key):
        kind, prefix = metric.get("type"), metric.get("prefix")
        converted = metric.part("METRICS")
        metric_class = draft.look_up(kind, "METRICS")
        prefix = prefix or getattr(metric_class, "default_prefix", None) or ""
        label = prefix or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare_name(kind)).lower()
        while label in metrics:
            label += "_2"
        draft.prefixes[label] = prefix
        metrics[label] = {"type": "ProcessMetric", "metric": converted}
    if above is not section:
        above.close()
    walk(section, dropped("val_evaluator", "test_evaluator"))
    return metrics or NOTHING


# The result of a row may depend on the rows above it.
_MAPPING = (
    Row("default_scope"),
    Row("strategy", same=(None,), refusal=_NO_STRATEGIES),
    *note_unless(_NO_TTA, tta_model=None, tta_pipeline=None),
    *note_unless(_LAUNCHED, launcher="none"),
    *note_unless(_LOG_ONLY, log_level="INFO"),
    Row("runner_type", same=("Runner", None), refusal=NO_COUNTERPART),
    Row("custom_imports", "", convert_by_rows(
        Row("imports", "imports", _imports, default=None),
        Row("allow_failed_imports", same=(False,)),
        refusal="is not possible: every import must succeed",
    )),
    Row("experiment_name", "name", same=(None,)),
    Row("work_dir", "run_dir", same=(None,)),
    Row("randomness", "", convert_by_rows(
        Row("seed", "seed", same=(None,)),
        Row("deterministic", "deterministic", same=(False,)),
        # Ranks always draw different numbers after the model is built.
        Row("diff_rank_seed"),
    )),
    Row("env_cfg", "", convert_by_rows(
        Row("cudnn_benchmark", "cudnn_benchmark", same=(False,)),
        Row("mp_cfg", "", convert_by_rows(
            *note_unless(_SPEED, mp_start_method="fork", opencv_num_threads=0),
        )),
        Row("dist_cfg", "launch", convert_by_rows(
            # mmengine's default is nccl even without a GPU; our default depends on the device.
            Row("backend", "backend", same=("nccl", None)),
            Row("timeout", "timeout_s", same=(None,)),
        )),
    )),
    Row("resume", "resume", _resume),
    Row("load_from", "load_from", _load_from, same=(None,)),
    Row("compile", "compile", _compile),
    Row("model", "model", _model, default=None),
    Row("model_wrapper_cfg", "wrapper", _wrapper, default=None),
    Row("auto_scale_lr", "", convert_by_rows(
        Row("enable", same=(False,), refusal="learning rates are not scaled: set optimizer.lr"),
        *dropped("base_batch_size"),
    )),
    Row("optim_wrapper", "", inside(_optimization)),
    Row("train_cfg", "train", inside(_training)),
    Row("val_cfg", "", _default_type("LOOPS", "ValLoop", _OWN_LOOP, *drop_if(fp16=False))),
    Row("test_cfg", "", _default_type("LOOPS", "TestLoop", _OWN_LOOP, *drop_if(fp16=False))),
    Row("train_dataloader", "data.train", inside(_loader)),
    Row("val_dataloader", "data.val", inside(_loader)),
    Row("test_dataloader", "data.test", inside(_loader)),
    Row("val_evaluator", "metrics", _metrics, default=None),
    Row("param_scheduler", "schedulers", schedulers),
    Row("default_hooks", "hooks", default_hooks, default=None),
    Row("custom_hooks", "hooks", custom_hooks),
    Row("log_processor", "", _default_type(
        "LOG_PROCESSORS", "LogProcessor", "{} has no counterpart here",
        *dropped("by_epoch"),
        Row("window_size", "", window_size),
        *note_unless(_LOG_ONLY, num_digits=4, custom_cfg=None),
    )),
    Row("visualizer", "hooks", inside(visualizer)),
    # At the top level this is only a variable for the visualizer.
    Row("vis_backends"),
)  # fmt: skip
