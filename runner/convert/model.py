"""The model, its wrapper, the optimizer and the optimizer's wrapper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ...registry import (
    MODEL_WRAPPERS,
    MODELS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    ParamwiseSection,
    check_component,
)
from .draft import Draft, Section, as_yaml, bare_name

_WRAPPERS = {
    "MMDistributedDataParallel": "ddp",
    "DistributedDataParallel": "ddp",
    "MMSeparateDistributedDataParallel": "separate",
    "MMFullyShardedDataParallel": "fsdp",
}
_PARAMWISE = {one.name for one in fields(ParamwiseSection)}
_BY_CHILDREN = "here each optimizer has the parameters of the child of its name"
_CONSTRUCTORS = ("", "DefaultOptimWrapperConstructor")


def convert_model(draft: Draft, top: Section) -> None:
    """Translate `model` and `data_preprocessor`."""
    preprocessor = top.take("data_preprocessor")
    model = top.below("model")
    if model is None:
        draft.miss("model", "is missing: a run needs one")
        return
    draft.sections["model"] = draft.part(model, "MODELS", MODELS)
    if preprocessor is not None:
        draft.sections["model"].setdefault("data_preprocessor", draft.plain(preprocessor))


def convert_wrapper(draft: Draft, top: Section) -> None:
    """Translate `model_wrapper_cfg`, `find_unused_parameters` and `sync_bn`."""
    unused, sync = top.take("find_unused_parameters", False), top.take("sync_bn")
    given = top.below("model_wrapper_cfg")
    options: dict[str, Any] = {"type": "ddp"}
    if given is not None:
        kind = given.kind("MODEL_WRAPPERS", "MMDistributedDataParallel")
        if kind not in _WRAPPERS:
            what = f"{kind} is a class of mmengine's kind: subclass one of stepwrap.wrappers"
            draft.miss(given.at("type"), what)
            return
        options = {"type": _WRAPPERS[kind]}
        # They follow from the rank, and from our class.
        given.drop("device_ids", "output_device", "use_orig_params", "module")
        for key in given:
            option = {key: as_yaml(given.peek(key))}
            problems = check_component({**options, **option}, MODEL_WRAPPERS, "", ("module",))
            # Wrong values are told by `stepwrap check`.
            if not any("no such argument" in problem.what for problem in problems):
                options.update(option)
                given.drop(key)
        given.close(f"is no option of {options['type']}")
    elif unused:
        options["find_unused_parameters"] = True
    if sync is not None and options["type"] == "ddp":
        options["sync_batchnorm"] = True
    elif sync is not None:
        draft.miss("sync_bn", f"is an option of ddp, not of {options['type']}")
    if given is not None or unused or sync is not None:
        draft.sections["wrapper"] = options


def convert_optimization(draft: Draft, top: Section) -> None:
    """Translate `optim_wrapper`, of one optimizer or several, and `auto_scale_lr`."""
    scaling = top.take("auto_scale_lr")
    if isinstance(scaling, Mapping) and scaling.get("enable"):
        draft.miss("auto_scale_lr.enable", "there is no scaling of the rate: set optimizer.lr")
    section = top.below("optim_wrapper")
    if section is None:
        return
    constructor = section.take("constructor", "")
    names = [key for key in section if _is_wrapper(section, key)]
    if "optimizer" in section or not names:
        if bare_name(constructor) not in _CONSTRUCTORS:
            draft.miss("optim_wrapper.constructor", "paramwise options are all that is translated")
        optimizer, wrapper = _single(draft, section)
    else:
        if bare_name(constructor) not in (*_CONSTRUCTORS, "MultiOptimWrapperConstructor"):
            draft.miss("optim_wrapper.constructor", _BY_CHILDREN)
        optimizer, wrapper = {}, {}
        for name in names:
            below = section.below(name)
            assert below is not None
            optimizer[name], wrapper[name] = _single(draft, below)
        wrapper = {name: one for name, one in wrapper.items() if one}
        section.close()
    draft.sections["optimizer"] = optimizer
    if wrapper:
        draft.sections["optim_wrapper"] = wrapper


def _is_wrapper(section: Section, key: str) -> bool:
    value = section.peek(key)
    return isinstance(value, Mapping) and "optimizer" in value


def _single(draft: Draft, section: Section) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return our sections for one optimizer and its wrapper."""
    given = section.below("optimizer")
    if given is None:
        draft.miss(section.at("optimizer"), "is missing: training needs one")
        return {}, {}
    optimizer = draft.part(given, "OPTIMIZERS", OPTIMIZERS)
    paramwise = section.below("paramwise_cfg")
    if paramwise is not None:
        known = {key: paramwise.take(key) for key in paramwise if key in _PARAMWISE}
        paramwise.close()
        if known:
            optimizer["paramwise"] = {**known, "as_mmengine": True}
    return optimizer, _wrapper(draft, section)


def _wrapper(draft: Draft, section: Section) -> dict[str, Any]:
    original = section.peek("type")
    kind = section.kind("OPTIM_WRAPPERS", "OptimWrapper")
    options: dict[str, Any] = {} if kind == "OptimWrapper" else {"type": kind}
    if kind not in ("OptimWrapper", "AmpOptimWrapper"):
        # A class of mmengine's kind runs as it is.
        where = section.at("type")
        options["type"] = draft.name_of(original, "OPTIM_WRAPPERS", OPTIM_WRAPPERS, where)
    batches = section.take("accumulative_counts", 1)
    draft.batches = max(draft.batches, batches)
    if batches != 1:
        options["accumulative_counts"] = batches
    section.drop("use_fsdp")
    section.accept(clip_grad=None, dtype=None, loss_scale="dynamic")
    if section.peek("dtype") is not None:
        options["dtype"] = str(section.take("dtype")).removeprefix("torch.")
    for key in section:
        options[key] = section.take(key)
    return options
