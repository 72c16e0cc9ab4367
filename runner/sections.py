"""Read the settings of a run and check each section as well as their combination."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.optim import SGD

from ..loops import IterTrainLoop, RunSchedule
from ..loops.hooks.named_schedules import Span, parse_span
from ..loops.hooks.scheduler import By
from ..registry import (
    LOOPS,
    PARAM_SCHEDULERS,
    Config,
    ConfigError,
    Examination,
    LoadFromSection,
    Problem,
    RunSections,
    SchedulerSection,
    build_tree,
    examine_config,
    load_config,
    optim_wrapper_sections,
)
from ..registry.local_paths import remote_url
from ..registry.registry import find_component
from ..wrappers import LossWeight
from .rank_layout import layout_problems, preparation_problems, tables_with, works_over_ranks

_LAYOUT = {"mesh", "tensor_parallel", "wrapper", "launch", "init_device"}


def read_sections(
    config: Mapping[str, Any] | str | os.PathLike[str] | Examination,
    world_size: int | None = None,
) -> RunSections:
    """Check all settings of a run and return them.

    Args:
        config: a ``Config``, a dict, a file, the name of a shipped config, or an ``Examination`` of
            a config whose classes have not been imported yet.
        world_size: the number of ranks. Default: ``launch.nproc`` of the config.

    Raises:
        ConfigError: the config has mistakes; the error lists all of them.
    """
    if isinstance(config, str | os.PathLike):
        config = load_config(config)
    examined = examine_config(config)
    run, config = examined.sections, examined.config
    problems = [_add_table_hint(problem, config) for problem in examined.problems]
    if run is not None:
        ranks = run.launch.nproc if world_size is None else world_size
        problems += [
            replace(problem, origin=config.origin(problem.key))
            for problem in _misfits(run, ranks, examined.faulty)
        ]
    if run is None or problems:
        raise ConfigError(problems)
    return run


def _misfits(run: RunSections, ranks: int, faulty: frozenset[str]) -> Iterator[Problem]:
    """Yield contradictions between sections that are valid on their own.

    Sections in ``faulty`` have mistakes already and are not checked again.
    """
    yield from _device_problems(run, ranks)
    if "nccl" in run.launch.backend and not torch.cuda.is_available():
        message = "is nccl, but torch finds no CUDA device on this machine; use gloo or auto"
        yield Problem("launch.backend", message)
    if run.deterministic and run.cudnn_benchmark:
        message = "cannot be combined with deterministic: algorithms are chosen by their speed"
        yield Problem("cudnn_benchmark", message)
    yield from _remote_paths(run)
    if not faulty & _LAYOUT:
        yield from layout_problems(run, ranks)
    yield from preparation_problems(run)
    if run.adapter is not None and run.tensor_parallel is not None:
        yield Problem("adapter", "cannot be combined with tensor_parallel; use fsdp")
    if run.adapter is not None and run.init_device == "meta" and run.load_from is None:
        yield Problem("init_device", "must be auto for an adapter without load_from")
    if not faulty & {"wrapper", "optimizer", "optim_wrapper", "train"}:
        yield from _uneven_problems(run)
    if not faulty & {"optimizer", "optim_wrapper"}:
        yield from _weight_problems(run)
    if "schedulers" not in faulty:
        yield from _schedule_problems(run)


def _device_problems(run: RunSections, ranks: int) -> Iterator[Problem]:
    if run.device in ("auto", "cpu"):
        return
    name, accelerator = run.device, torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != name:
        message = f"is {name}, but torch finds no {name.upper()} device on this machine"
        yield Problem("device", message)
    if name != "cuda" and ranks > 1:
        message = f"is {name}, on which a run has one process, but there are {ranks}: use --nproc 1"
        yield Problem("device", message)


def _remote_paths(run: RunSections) -> Iterator[Problem]:
    """Yield settings with URLs that cannot be opened on this machine; sends nothing."""
    paths = {"run_dir": run.run_dir, "load_from": run.load_from, "resume": run.resume}
    if isinstance(run.load_from, LoadFromSection):
        paths["load_from.path"] = run.load_from.path
    for key, path in paths.items():
        if isinstance(path, str) and (url := remote_url(path)):
            # Imported here, because most runs have no URL.
            from .remote.stores import store_problem

            if problem := store_problem(url):
                yield Problem(key, problem)


def _uneven_problems(run: RunSections) -> Iterator[Problem]:
    """Yield settings that cannot be combined with ``uneven_inputs``.

    That option allows ranks to have different numbers of batches.
    """
    options = run.wrapper or {}
    if not options.get("uneven_inputs") or run.train is None:
        return
    where = "wrapper.uneven_inputs"
    if options.get("sync_batchnorm"):
        message = "excludes sync_batchnorm: a rank without a batch has no statistics"
        yield Problem(where, message)
    sections = optim_wrapper_sections(run.optim_wrapper, run.optimizer).values()
    if any(section.get("loss_weight") is not None for section in sections):
        # A rank without batches continues with batches of weight zero.
        return
    if works_over_ranks(run.optimizer):
        message = "does not work with an optimizer that communicates at each update"
        yield Problem(where, message)
    if any(section.get("accumulative_counts", 1) != 1 for section in sections):
        message = "needs accumulative_counts=1: a rank that runs out of batches inside a window"
        yield Problem(where, f"{message} would lose its gradients")
    loop = find_component(run.train, LOOPS)
    if isinstance(loop, type) and issubclass(loop, IterTrainLoop):
        message = "needs an EpochTrainLoop: updates that only some ranks make cannot be counted"
        yield Problem(where, message)


def _weight_problems(run: RunSections) -> Iterator[Problem]:
    """Yield values of ``loss_weight`` that cannot be used."""
    for name, section in optim_wrapper_sections(run.optim_wrapper, run.optimizer).items():
        if section.get("loss_weight") is None:
            continue
        try:
            LossWeight(section["loss_weight"])
        except (ImportError, TypeError, ValueError) as error:
            where = f"optim_wrapper.{name}" if name in run.optim_wrapper else "optim_wrapper"
            yield Problem(f"{where}.loss_weight", str(error).removeprefix("loss_weight "))
            return


def scheduler_key(run: RunSections, at: int) -> str:
    """Return the key path of a scheduler's section."""
    return f"schedulers.{at}" if len(run.schedulers) > 1 else "schedulers"


def divide_scheduler(section: SchedulerSection) -> tuple[dict[str, Any], By, Span | None]:
    """Return the arguments of a scheduler with its type, its unit, and the warm-up before it.

    A schedule that takes its length from the run has the warm-up as an argument, if it counts
    updates, and there is none before it.
    """
    kind: Any = find_component(section.scheduler, PARAM_SCHEDULERS)
    follows_run = isinstance(kind, type) and issubclass(kind, RunSchedule)
    by: By = section.by or ("step" if follows_run else "epoch")
    if section.warmup is None or not follows_run or by != "step":
        return section.scheduler, by, section.warmup
    return {**section.scheduler, "warmup": section.warmup}, by, None


def _schedule_problems(run: RunSections) -> Iterator[Problem]:
    """Yield mistakes in schedules that take their length from the run, and in warm-ups."""
    warmed = set()
    for at, section in enumerate(run.schedulers):
        where = scheduler_key(run, at)
        settings, _, warmup = divide_scheduler(section)
        kind: Any = find_component(settings, PARAM_SCHEDULERS)
        try:
            if warmup is not None:
                parse_span("warmup", warmup)
            if isinstance(kind, type) and issubclass(kind, RunSchedule):
                optimizer = SGD([torch.zeros(1)], lr=1.0)
                build_tree(settings, PARAM_SCHEDULERS, {"optimizer": optimizer})
        except ValueError as error:
            name, _, message = str(error).partition(" ")
            is_setting = name in (*section.scheduler, "warmup")
            yield Problem(f"{where}.{name}", message) if is_setting else Problem(where, str(error))
            continue
        if warmup is None:
            continue
        if section.after:
            message = "begins with the run, and cannot be combined with after"
            yield Problem(f"{where}.warmup", f"{message}; set it on the first schedule")
        if section.optimizer in warmed:
            message = "an optimizer can have one warm-up; remove this one"
            yield Problem(f"{where}.warmup", message)
        warmed.add(section.optimizer)


def _add_table_hint(problem: Problem, config: Config) -> Problem:
    """Add a hint to an unknown option of ``auto``: the table where that option belongs."""
    section, _, name = problem.key.partition(".")
    if section != "wrapper" or config.select("wrapper.type") != "auto" or "." in name:
        return problem
    if "has no such argument" not in problem.what:
        return problem
    tables = tables_with(name)
    if not tables:
        return problem
    message = f"auto has no such argument; did you mean {' or '.join(tables)}?"
    return replace(problem, what=message)
