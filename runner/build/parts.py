"""From checked settings to the parts of a run; the only file that knows every registry."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...collectives import get_rank, get_world_size
from ...loops import Hook, build_loader, seed_rng
from ...registry import DATALOADERS, DATASETS, HOOKS, LOOPS, METRICS, LoaderSection, Registry, RunSections, build_tree
from ..failure import Attempts, building
from ..failure import BuildError as BuildError
from ..launcher import lonely_group
from .optimizers import build_optimization, evaluation_precision
from .parallelism import build_model
from .parallelism import needs_group as needs_group

ALL = frozenset({"train", "val", "test"})
_LOADER_OPTIONS = ("batch_size", "shuffle", "num_workers", "drop_last", "pin_memory")
# What a trial sets to one in the training loop; the rest of its settings is left out.
_TRIAL_ONES = ("max_epochs", "max_steps", "log_every_steps", "val_interval")


def build_parts(
    run: RunSections,
    only: Collection[str] = ALL,
    *,
    one_batch: bool = False,
    ranks: int | None = None,
) -> dict[str, Any]:
    """Build what `Runner` takes, every rank its own; `only` names the loops that are wanted.

    With `one_batch` each loop sees a single batch, for a trial of everything. `ranks` is for one
    process that tries what so many are to run: see `rehearse`.

    Raises:
        BuildError: All that could not be built.
    """
    _make_deterministic(run)
    seed_rng(run.seed)
    attempts = Attempts()
    model, mesh = attempts.make("model", partial(build_model, run, ranks)) or (None, None)
    shard = (get_rank(), get_world_size()) if mesh is None else (mesh.data_rank, mesh.data_size)
    feed = _Feed(run, shard, one_batch)
    loops = {
        f"{name}_loop": attempts.make(name, partial(_build_evaluation, feed, name))
        for name in ("val", "test")
        if name in only
    }
    parts: dict[str, Any] = {
        "model": model,
        "val_loop": None,
        "test_loop": None,
        **loops,
        "run_dir": run.run_dir,
        "seed": run.seed,
    }
    hooks = attempts.make("hooks", partial(_build_all, "hooks", run.hooks, HOOKS))
    if "train" in only and run.train is not None:
        schedules: dict[str, Hook] = {}
        if model is not None:
            built = attempts.make("optimizer", partial(build_optimization, run, model))
            parts["optim_wrapper"], schedules = built or (None, {})
        train = partial(_build_training, feed, parts["val_loop"])
        parts["train_loop"] = attempts.make("train", train)
        hooks = {**schedules, **(hooks or {})}
    elif model is not None:
        precision = attempts.make("optim_wrapper", partial(evaluation_precision, run, model))
        parts["precision"] = precision or nullcontext
    attempts.finish()
    parts["hooks"] = hooks
    return parts


def rehearse(run: RunSections, only: Collection[str] = ALL) -> dict[str, Any]:
    """Build in this process, on the CPU, what `launch.nproc` ranks are to run; returns the parts.

    The wrapper is the one that the ranks will have, in a group of this process alone.

    Raises:
        BuildError: All that could not be built.
    """
    ranks = run.launch.nproc
    alone: AbstractContextManager[None] = nullcontext()
    if ranks > 1 or needs_group(run):
        alone = lonely_group()
    with alone:
        return build_parts(replace(run, device="cpu"), only, ranks=ranks)


def _make_deterministic(run: RunSections) -> None:
    if not run.deterministic:
        return
    # cuBLAS reads it when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def _build_all(section: str, named: Mapping[str, Any], registry: Registry) -> dict[str, Any]:
    attempts = Attempts()
    built = {
        name: attempts.make(f"{section}.{name}", partial(build_tree, settings, registry))
        for name, settings in named.items()
    }
    attempts.finish()
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
    attempts = Attempts()
    metrics = attempts.make("metrics", partial(_build_all, "metrics", run.metrics, METRICS))
    loader = attempts.make(f"data.{name}", partial(_build_loader, feed, name))
    attempts.finish()
    supplied = {"dataloader": loader, "metrics": metrics}
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
        self.dataset = getattr(loader, "dataset", None)

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield batch
            return
