"""From checked settings to the parts of a run; the only file that knows every registry."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..collectives import get_local_rank, get_rank, get_world_size
from ..loops import build_loader, seed_rng
from ..registry import (
    DATALOADERS,
    DATASETS,
    HOOKS,
    LOOPS,
    METRICS,
    MODEL_WRAPPERS,
    MODELS,
    Config,
    ConfigError,
    LoaderSection,
    Problem,
    Registry,
    RunSections,
    build_tree,
    check_config,
    config_from_dict,
    did_you_mean,
    load_config,
)
from ..wrappers import SingleDevice, StepDistributedDataParallel, wrap_model
from ._building import BuildError as BuildError
from ._building import building
from .optimizers import build_optimization

ALL = frozenset({"train", "val", "test"})
_LOADER_OPTIONS = ("batch_size", "shuffle", "num_workers", "drop_last", "pin_memory")
_WATCHING = ("metric", "keep_best")
# What a trial sets to one in the training loop; the rest of its settings is left out.
_TRIAL_ONES = ("max_epochs", "max_steps", "log_every_steps", "val_interval")


def read_sections(
    config: Config | Mapping[str, Any] | str | os.PathLike[str], world_size: int | None = None
) -> RunSections:
    """Check the settings of a run whole and return them.

    Args:
        config: A `Config`, a dict, a file or the name of a shipped config.
        world_size: How many ranks will run; default: `launch.nproc` of the config.

    Raises:
        ConfigError: Everything that is wrong with them.
    """
    if isinstance(config, str | os.PathLike):
        config = load_config(config)
    elif not isinstance(config, Config):
        config = config_from_dict(config)
    run = check_config(config)
    ranks = run.launch.nproc if world_size is None else world_size
    problems = [
        replace(problem, origin=config.origin(problem.key)) for problem in _misfits(run, ranks)
    ]
    if problems:
        raise ConfigError(problems)
    return run


def build_parts(
    run: RunSections, only: Collection[str] = ALL, *, one_batch: bool = False
) -> dict[str, Any]:
    """Build what `Runner` takes, every rank its own; `only` names the loops that are wanted.

    With `one_batch` each loop sees a single batch, for a trial of everything.
    """
    _make_deterministic(run)
    seed_rng(run.seed)
    model = _build_model(run)
    val_loop = _build_evaluation(run, "val", one_batch) if "val" in only else None
    test_loop = _build_evaluation(run, "test", one_batch) if "test" in only else None
    parts: dict[str, Any] = {
        "model": model,
        "val_loop": val_loop,
        "test_loop": test_loop,
        "run_dir": run.run_dir,
        "seed": run.seed,
    }
    hooks = _build_all("hooks", run.hooks, HOOKS)
    if "train" in only and run.train is not None:
        parts["optim_wrapper"], schedules = build_optimization(run, model)
        parts["train_loop"] = _build_training(run, val_loop, one_batch)
        hooks = {**schedules, **hooks}
    parts["hooks"] = hooks
    return parts


def needs_group(run: RunSections) -> bool:
    """Whether the wrapper can only step inside a process group, even of one process."""
    wrapper = _wrapper_class(run)
    if wrapper is None or not issubclass(wrapper, StepDistributedDataParallel):
        return False
    return wrapper.train_step is not StepDistributedDataParallel.train_step


def _misfits(run: RunSections, ranks: int) -> Iterator[Problem]:
    """Yield what does not fit together although each section is right in itself."""
    if run.device == "cuda" and not torch.cuda.is_available():
        yield Problem("device", "is cuda, but torch finds no CUDA device on this machine")
    wrapper = _wrapper_class(run)
    if ranks > 1 and wrapper is not None and issubclass(wrapper, SingleDevice):
        what = f"{wrapper.__name__} steps in one process, but {ranks} are to run"
        yield Problem("wrapper.type", f"{what}; use ddp, or launch.nproc=1")
    yield from _unknown_metrics(run)


def _unknown_metrics(run: RunSections) -> Iterator[Problem]:
    """Yield the metrics that hooks and schedulers watch and the run does not have."""
    watched = {
        f"hooks.{name}.{key}": settings.get(key)
        for name, settings in run.hooks.items()
        for key in _WATCHING
    }
    several = len(run.schedulers) > 1
    for at, one in enumerate(run.schedulers):
        where = f"schedulers.{at}" if several else "schedulers"
        watched[f"{where}.metric"] = one.metric
        if one.metric is None and one.scheduler["type"] == "ReduceLROnPlateau":
            yield Problem(f"{where}.metric", "is missing: ReduceLROnPlateau watches a metric")
    if len({one.metric for one in run.schedulers} - {None}) > 1:
        yield Problem("schedulers", "all that watch a metric must watch the same one")
    for where, metric in watched.items():
        # A metric with several results is "name/part" in the records.
        if isinstance(metric, str) and metric.split("/")[0] not in run.metrics:
            known = ", ".join(run.metrics) or "none"
            what = f"there is no metric {metric!r}{did_you_mean(metric, run.metrics)}"
            yield Problem(where, f"{what}; the run's metrics are: {known}")


def _make_deterministic(run: RunSections) -> None:
    if not run.deterministic:
        return
    # cuBLAS reads it when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def _build_model(run: RunSections) -> nn.Module:
    options = {k: v for k, v in (run.wrapper or {}).items() if k not in ("type", "_scope_")}
    device = _device(run.device)
    if device.type == "cuda":
        # What a model or a loss puts on "cuda" must come to this rank's own device.
        torch.cuda.set_device(device)
    with building("model"):
        model = build_tree(run.model, MODELS)
    with building("wrapper"):
        return wrap_model(_wrapper_class(run), model, device=device, **options)


def _device(wanted: str) -> torch.device:
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", get_local_rank() % torch.cuda.device_count())


def _build_all(section: str, named: Mapping[str, Any], registry: Registry) -> dict[str, Any]:
    built = {}
    for name, settings in named.items():
        with building(f"{section}.{name}"):
            built[name] = build_tree(settings, registry)
    return built


def _wrapper_class(run: RunSections) -> Any:
    return None if run.wrapper is None else MODEL_WRAPPERS.resolve(run.wrapper["type"])


def _build_training(run: RunSections, val_loop: Any, one_batch: bool) -> Any:
    assert run.train is not None
    settings = dict(run.train)
    if one_batch:
        ones = {key: 1 for key in _TRIAL_ONES if key in settings}
        settings = {"type": settings["type"], **ones}
    supplied = {"dataloader": _build_loader(run, "train", one_batch), "val_loop": val_loop}
    with building("train"):
        return build_tree(settings, LOOPS, supplied)


def _build_evaluation(run: RunSections, name: str, one_batch: bool) -> Any:
    if getattr(run.data, name) is None:
        return None
    metrics = _build_all("metrics", run.metrics, METRICS)
    supplied = {"dataloader": _build_loader(run, name, one_batch), "metrics": metrics}
    with building(name):
        return build_tree(getattr(run, name), LOOPS, supplied)


def _build_loader(run: RunSections, name: str, one_batch: bool) -> Any:
    section: LoaderSection | dict[str, Any] = getattr(run.data, name)
    with building(f"data.{name}"):
        if isinstance(section, dict):
            loader = build_tree(section, DATALOADERS)
        else:
            loader = build_loader(
                build_tree(section.dataset, DATASETS),
                # Where ranks may end apart no sample needs to come twice.
                train=name == "train" and not (run.wrapper or {}).get("uneven_inputs"),
                seed=run.seed if section.seed is None else section.seed,
                shard=(get_rank(), get_world_size()),
                **_loader_options(section),
            )
    return FirstBatch(loader) if one_batch else loader


def _loader_options(section: LoaderSection) -> dict[str, Any]:
    options = {key: getattr(section, key) for key in _LOADER_OPTIONS}
    if section.collate is not None:
        options["collate"] = DATASETS.resolve(section.collate)
    if section.prefetch_factor is not None and section.num_workers:
        options["prefetch_factor"] = section.prefetch_factor
    return options


class FirstBatch:
    """The first batch of a loader, as a loader."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield batch
            return
