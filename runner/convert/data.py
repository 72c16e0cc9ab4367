"""Loaders, loops and metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...registry import DATASETS, METRICS
from .draft import Draft, Section, bare_name, sections

_LOADER = "mmengine.runner.Runner.build_dataloader"
_SAMPLERS = ("DefaultSampler", "InfiniteSampler")
_PASSES = "the last batch of each pass over the data may be smaller here: see --keep-order"
_COLLATES = ("pseudo_collate", "default_collate")
_SAME = ("batch_size", "num_workers", "drop_last", "pin_memory", "prefetch_factor")


def convert_data(draft: Draft, top: Section) -> None:
    """Translate the three dataloaders."""
    data = {}
    for name in ("train", "val", "test"):
        section = top.below(f"{name}_dataloader")
        if section is not None:
            data[name] = _loader(draft, section, train=name == "train")
    if data:
        draft.sections["data"] = data


def _loader(draft: Draft, section: Section, *, train: bool) -> dict[str, Any]:
    if draft.keep_order or not _is_ours(draft, section, train):
        # All of it as mmengine builds it: its samplers, its order, its batches.
        settings = {key: section.take(key) for key in section}
        plain = draft.plain({"type": "", **settings})
        del plain["type"]
        return {"type": _LOADER, "dataloader": plain, "seed": draft.sections.get("seed", 0)}
    loader: dict[str, Any] = {}
    given = section.below("dataset")
    if given is not None:
        loader["dataset"] = draft.part(given, "DATASETS", DATASETS)
    for key in _SAME:
        if section.peek(key) is not None:
            loader[key] = section.take(key)
    sampler = section.below("sampler")
    if sampler is not None:
        if (
            train
            and draft.known_as(sampler.peek("type"), "DATA_SAMPLERS") == "InfiniteSampler"
            and not loader.get("drop_last")
        ):
            draft.miss(sampler.at("type"), _PASSES)
        # The order is the same on all ranks and all samples come: nothing else to say.
        loader["shuffle"] = sampler.take("shuffle", True)
        if sampler.peek("seed") is not None:
            loader["seed"] = sampler.take("seed")
        sampler.drop("type", "round_up", "seed", "_scope_")
        sampler.close()
    loader["collate"] = _collate(draft, section.below("collate_fn"))
    # Workers stay anyway.
    section.drop("persistent_workers", "prefetch_factor")
    section.accept(worker_init_fn=None, batch_sampler=None, timeout=0)
    section.accept(multiprocessing_context=None, num_batch_per_epoch=None)
    section.close()
    return loader


def _is_ours(draft: Draft, section: Section, train: bool) -> bool:
    """Whether our loader does the same with these settings."""
    sampler = section.peek("sampler")
    if not isinstance(sampler, Mapping):
        return False
    if draft.known_as(sampler.get("type"), "DATA_SAMPLERS") not in _SAMPLERS:
        return False
    if train and not sampler.get("round_up", True):
        return False
    collate = section.peek("collate_fn")
    if collate is not None and (not isinstance(collate, Mapping) or len(collate) != 1):
        return False
    others = ("batch_sampler", "worker_init_fn", "num_batch_per_epoch", "timeout")
    return not any(section.peek(key) for key in others)


def _collate(draft: Draft, section: Section | None) -> str:
    name = "pseudo_collate" if section is None else section.take("type")
    if name in _COLLATES or section is None:
        return f"mmengine.dataset.{name}"
    return draft.name_of(name, "FUNCTIONS", DATASETS, section.at("type"))


def convert_loops(draft: Draft, top: Section) -> None:
    """Translate `train_cfg`, `val_cfg` and `test_cfg`."""
    train = top.below("train_cfg")
    if train is not None:
        draft.sections["train"] = _training(draft, train)
    for name in ("val", "test"):
        section = top.below(f"{name}_cfg")
        if section is None:
            continue
        kind = section.kind("LOOPS", f"{name.capitalize()}Loop")
        if kind != f"{name.capitalize()}Loop":
            draft.miss(section.at("type"), f"{kind} is a loop of your own: see docs/extending.md")
        section.accept(fp16=False)
        section.close()


def _training(draft: Draft, section: Section) -> dict[str, Any]:
    by_epoch = section.take("by_epoch")
    by_iterations = by_epoch is False or (by_epoch is None and "max_iters" in section)
    usual = "IterBasedTrainLoop" if by_iterations else "EpochBasedTrainLoop"
    kind = section.kind("LOOPS", usual)
    draft.by_epoch = kind != "IterBasedTrainLoop"
    if kind not in ("EpochBasedTrainLoop", "IterBasedTrainLoop"):
        draft.miss(section.at("type"), f"{kind} is a loop of your own: see docs/extending.md")
        draft.by_epoch = section.peek("max_iters") is None
    loop: dict[str, Any] = {"type": "EpochTrainLoop" if draft.by_epoch else "IterTrainLoop"}
    if draft.by_epoch:
        loop["max_epochs"] = section.take("max_epochs")
    else:
        loop["max_steps"] = draft.updates(section.take("max_iters"), section.at("max_iters"))
        section.put("val_interval", section.peek("val_interval") or 1000)
    for key in ("val_begin", "val_interval"):
        value = section.take(key)
        if value is not None:
            loop[key] = value if draft.by_epoch else draft.updates(value, section.at(key))
    pairs = section.take("dynamic_intervals")
    if pairs:
        loop["dynamic_intervals"] = [
            [
                one if draft.by_epoch else draft.updates(one, section.at("dynamic_intervals"))
                for one in pair
            ]
            for pair in pairs
        ]
    section.close()
    return loop


def convert_metrics(draft: Draft, top: Section) -> None:
    """Translate `val_evaluator` and `test_evaluator`, which share one section here."""
    given, other = top.take("val_evaluator"), top.take("test_evaluator")
    path = "val_evaluator"
    if given is None:
        given, path = other, "test_evaluator"
    elif other is not None and other != given:
        draft.miss("test_evaluator", "validation and test share their metrics: val_evaluator's")
    metrics: dict[str, Any] = {}
    if isinstance(given, Mapping) and bare_name(given.get("type", "Evaluator")) == "Evaluator":
        evaluator = Section(draft, given, path)
        evaluator.drop("type")
        given, path = evaluator.take("metrics"), evaluator.at("metrics")
        evaluator.close()
    for section in sections(draft, given, path):
        wanted = section.peek("type")
        prefix, name = section.peek("prefix"), bare_name(wanted)
        made = draft.part(section, "METRICS", METRICS)
        prefix = prefix or draft.prefix_of(wanted)
        label = prefix or _snake(name)
        while label in metrics:
            label += "_2"
        draft.metric_names[label] = prefix or ""
        metrics[label] = {"type": "ProcessMetric", "metric": made}
    if metrics:
        draft.sections["metrics"] = metrics


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
