"""From checked settings to the parts of a run; the only file that knows every registry."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..collectives import get_rank, get_world_size
from ..loops import build_loader, seed_rng
from ..registry import (
    DATALOADERS,
    DATASETS,
    HOOKS,
    LOOPS,
    METRICS,
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
from ._building import BuildError as BuildError
from ._building import building
from .optimizers import build_optimization
from .parallel import build_model, parallel_problems
from .parallel import needs_group as needs_group

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
    model, mesh = build_model(run)
    shard = (get_rank(), get_world_size()) if mesh is None else (mesh.data_rank, mesh.data_size)
    feed = _Feed(run, shard, one_batch)
    val_loop = _build_evaluation(feed, "val") if "val" in only else None
    test_loop = _build_evaluation(feed, "test") if "test" in only else None
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
        parts["train_loop"] = _build_training(feed, val_loop)
        hooks = {**schedules, **hooks}
    parts["hooks"] = hooks
    return parts


def _misfits(run: RunSections, ranks: int) -> Iterator[Problem]:
    """Yield what does not fit together although each section is right in itself."""
    if run.device == "cuda" and not torch.cuda.is_available():
        yield Problem("device", "is cuda, but torch finds no CUDA device on this machine")
    yield from parallel_problems(run, ranks)
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


def _build_all(section: str, named: Mapping[str, Any], registry: Registry) -> dict[str, Any]:
    built = {}
    for name, settings in named.items():
        with building(f"{section}.{name}"):
            built[name] = build_tree(settings, registry)
    return built


@dataclass(frozen=True)
class _Feed:
    """How the loops of a run get their batches.

    Attributes:
        shard: which part of the data this rank sees, of how many.
        one_batch: each loop sees a single batch.
    """

    run: RunSections
    shard: tuple[int, int]
    one_batch: bool


def _build_training(feed: _Feed, val_loop: Any) -> Any:
    assert feed.run.train is not None
    settings = dict(feed.run.train)
    if feed.one_batch:
        ones = {key: 1 for key in _TRIAL_ONES if key in settings}
        settings = {"type": settings["type"], **ones}
    supplied = {"dataloader": _build_loader(feed, "train"), "val_loop": val_loop}
    with building("train"):
        return build_tree(settings, LOOPS, supplied)


def _build_evaluation(feed: _Feed, name: str) -> Any:
    run = feed.run
    if getattr(run.data, name) is None:
        return None
    metrics = _build_all("metrics", run.metrics, METRICS)
    supplied = {"dataloader": _build_loader(feed, name), "metrics": metrics}
    with building(name):
        return build_tree(getattr(run, name), LOOPS, supplied)


def _build_loader(feed: _Feed, name: str) -> Any:
    run = feed.run
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
                shard=feed.shard,
                **_loader_options(section),
            )
    return FirstBatch(loader) if feed.one_batch else loader


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
