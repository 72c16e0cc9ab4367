"""Build the parts of a run: model, evaluation, hooks, optimizer, training loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.data import IterableDataset, Subset

from ..collectives import get_rank, get_world_size
from ..loops import (
    CheckpointHook,
    EarlyStopHook,
    EpochTrainLoop,
    EvalSets,
    FreezeHook,
    Hook,
    IterTrainLoop,
    LoopState,
    MetricInputs,
    SchedulerHook,
    ScheduleWindow,
    Warmup,
    build_loader,
    seed_rng,
)
from ..loops.data.loaders import FirstBatches, get_length
from ..loops.data.tensors import can_pin_memory
from ..loops.hooks.named_schedules import UnknownLengthError
from ..loops.metrics.directions import find_directions
from ..loops.rng import preserved_rng
from ..registry import (
    DATALOADERS,
    DATASETS,
    DEFAULT_HOOKS,
    HOOK_TYPES,
    HOOKS,
    LOOPS,
    METRICS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    PARAM_SCHEDULERS,
    SAMPLERS,
    LoaderSection,
    MetricSection,
    Registry,
    RunSections,
    SchedulerSection,
    SetsSection,
    build_tree,
    find_transform,
    named_optimizers,
    optim_wrapper_sections,
    stepping_class,
    supply_where_taken,
)
from ..registry.checks.data_sections import taken_by_sampler
from ..registry.checks.schema import PER_RANK
from ..registry.registry import find_component
from ..wrappers import Mesh, OptimWrapperDict, param_groups
from ..wrappers.optimizers.gates import refuse_without_closure
from ..wrappers.optimizers.optimizer_fit import build_optimizer
from ..wrappers.optimizers.param_groups import (
    NamedParameter,
    check_step_for_several_optimizers,
    divide_parameters,
    named_parameters,
)
from .failure import BuildError, BuildErrors, building
from .launcher import single_process_group
from .rank_layout import build_model, data_ranks, device_of_rank, needs_group
from .sections import divide_scheduler, scheduler_key

ALL = frozenset({"train", "val", "test"})
_LOADER_OPTIONS = (
    *("batch_size", "shuffle", "num_workers", "drop_last", "pin_memory", "persistent_workers"),
)
PrecisionContext: TypeAlias = Callable[[], AbstractContextManager[Any]]
# A dry run sets these settings of the training loop to 1, and leaves out all others.
_DRY_RUN_ONES = ("max_epochs", "max_steps", "log_every_steps", "val_interval")


@dataclass(frozen=True)
class Parts:
    """The objects of a run on this rank; see ``Runner.from_parts``.

    Attributes:
        model: the wrapped model, on its device.
        run_dir: the folder for records and checkpoints; None writes nothing.
        seed: the seed of the random number generators.
        hooks: the hooks by name; None removes the default hook of that name.
        optim_wrapper: the optimizer wrapper; None if the run does not train.
        train_loop: the training loop; None if the run does not train.
        val_loop: the validation, of one set or several.
        test_loop: the test, of one set or several.
        precision: returns the context of evaluations, for a run that does not train.
        loss_weight: weight of the losses in evaluations, for a run that does not train.
    """

    model: nn.Module
    run_dir: str | None
    seed: int
    hooks: Mapping[str, Any] = field(default_factory=dict)
    optim_wrapper: Any = None
    train_loop: Any = None
    val_loop: Any = None
    test_loop: Any = None
    precision: PrecisionContext = nullcontext
    loss_weight: Any = None


@dataclass(frozen=True)
class _DataShare:
    """The share of the data that this rank reads: shard ``index`` of ``count``."""

    index: int
    count: int
    # A dry run reads a single batch in each pass.
    one_batch: bool = False


def build_parts(
    run: RunSections, only: Container[str] = ALL, *, dry_run: bool = False, ranks: int | None = None
) -> Parts:
    """Build the parts of a run on this rank; every rank must call this.

    Args:
        run: the checked settings.
        only: the loops to build: "train", "val", "test".
        dry_run: give each loop a single batch.
        ranks: if given, choose the wrapper of a run with this many ranks, and the batches of its
            first rank; see ``rehearse``.

    Raises:
        BuildError: some parts cannot be built; it lists all of them.
    """
    _set_up_torch(run)
    if "train" not in only:
        # An evaluation loads a checkpoint, which replaces the weights of `load_from`.
        run = run.without_loaded()
    # After an error the following parts are built too, so that all errors are found.
    errors = BuildErrors()
    model = mesh = val_loop = test_loop = optim_wrapper = train_loop = loss_weight = None
    precision: PrecisionContext = nullcontext
    with errors.collect("model"):
        model, mesh = build_model(run, ranks)
    share = _share_of_rank(run, mesh, ranks=ranks, dry_run=dry_run)
    with errors.collect("val"):
        val_loop = _build_evaluation(run, "val", share=share) if "val" in only else None
    with errors.collect("test"):
        test_loop = _build_evaluation(run, "test", share=share) if "test" in only else None
    hooks = _build_hooks(run, errors=errors)
    if "train" in only and run.train is not None:
        if model is not None:
            with errors.collect("optimizer"):
                optim_wrapper, optimizers = _build_optimizers(run, model)
                hooks = {**_freeze_hook(run), **scheduler_hook(run, optimizers), **hooks}
        _check_watched(hooks, val_loop, errors=errors)
        with errors.collect("train"):
            train_loop = _build_training(run, val_loop, share=share)
        with errors.collect("schedulers"):
            _set_lengths(run, hooks.get("schedulers"), train_loop, optim_wrapper)
    elif model is not None:
        with errors.collect("optim_wrapper"):
            precision, loss_weight = _evaluation_settings(run, model)
    errors.raise_all()
    assert model is not None
    return Parts(
        model=model,
        run_dir=run.run_dir,
        seed=run.seed,
        hooks=hooks,
        optim_wrapper=optim_wrapper,
        train_loop=train_loop,
        val_loop=val_loop,
        test_loop=test_loop,
        precision=precision,
        loss_weight=loss_weight,
    )


def build_default_hooks() -> dict[str, Any]:
    """Return the default hooks of a config by name."""
    return {name: build_tree({"type": HOOK_TYPES[name]}, HOOKS) for name in DEFAULT_HOOKS}


def rehearse(run: RunSections) -> Parts:
    """Build the parts of a run of ``launch.nproc`` ranks in this process, on the CPU.

    The wrapper is the one that the ranks will use, in a process group of this process alone.
    """
    ranks = run.launch.nproc
    with single_process_group(ranks > 1 or needs_group(run)):
        return build_parts(replace(run, device="cpu"), ranks=ranks)


def example_batch(run: RunSections, sets: Iterable[str] = ("test", "val", "train")) -> Any:
    """Return the first batch of the first data set in ``sets`` that the run has."""
    name = next(set_name for set_name in sets if getattr(run.data, set_name) is not None)
    section = run.data.loader(next(iter(run.data.get_sets(name).values())))
    if not isinstance(section, dict):
        section = replace(section, num_workers=0, prefetch_factor=None)
    run = replace(run, device="cpu", data=replace(run.data, **{name: section}))
    loader = _build_loader(run, name, share=_DataShare(0, 1))
    with building(f"data.{name}"):
        for batch in loader:
            return batch
    raise ValueError(f"data.{name} has no batches")


def _set_up_torch(run: RunSections) -> None:
    seed_rng(run.seed)
    if run.matmul_precision is not None:
        torch.set_float32_matmul_precision(run.matmul_precision)
    if run.cudnn_benchmark is not None:
        torch.backends.cudnn.benchmark = run.cudnn_benchmark
    if run.deterministic:
        # cuBLAS reads this variable when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def _share_of_rank(
    run: RunSections, mesh: Mesh | None, *, ranks: int | None, dry_run: bool
) -> _DataShare:
    """Return this rank's share of the data; with ``ranks``, the share of the first of them."""
    if ranks is not None:
        return _DataShare(0, data_ranks(run, ranks), dry_run)
    if mesh is not None:
        return _DataShare(mesh.data_rank, mesh.data_size, dry_run)
    return _DataShare(get_rank(), get_world_size(), dry_run)


def _build_loader(run: RunSections, name: str, *, share: _DataShare) -> Any:
    """Build the loader ``data.<name>``; each one draws the same random numbers, and leaves them."""
    with preserved_rng():
        seed_rng(run.seed)
        return _build_seeded_loader(run, name, share=share)


def _build_seeded_loader(run: RunSections, name: str, *, share: _DataShare) -> Any:
    run, limit = _limits(run, name)
    section: LoaderSection | dict[str, Any] = run.data.loader(name)
    with building(f"data.{name}"):
        if isinstance(section, dict):
            arguments = {key: value for key, value in section.items() if key != PER_RANK}
            loader = build_tree(arguments, DATALOADERS)
        else:
            options = {key: getattr(section, key) for key in _LOADER_OPTIONS}
            if section.collate is not None:
                with building(f"data.{name}.collate"):
                    options["collate"] = _build_collate(section.collate)
            if section.prefetch_factor is not None and section.num_workers:
                options["prefetch_factor"] = section.prefetch_factor
            with building(f"data.{name}.dataset"):
                dataset = build_tree(section.dataset, DATASETS)
            seed = run.seed if section.seed is None else section.seed
            selects = limit is not None and section.in_memory not in (True, "device")
            # A sampler may need the whole data set, such as one weight for each sample.
            selects = selects and section.sampler is None
            if limit is not None and selects and not isinstance(dataset, IterableDataset):
                num_samples = limit * section.batch_size * share.count
                dataset, limit = _selected(dataset, num_samples, seed, section.shuffle), None
            if section.sampler is not None:
                with building(f"data.{name}.sampler"):
                    options["sampler"] = _build_sampler(section, dataset, seed, share)
                    # Those that take it have got it.
                    options["shuffle"] = False
            on_device = section.in_memory == "device"
            options["in_memory"] = device_of_rank(run) if on_device else section.in_memory
            if section.pin_memory == "auto":
                # Pinned memory needs a CUDA context, and only copies to the device use it.
                copies = device_of_rank(run).type != "cpu" and not share.one_batch
                options["pin_memory"] = copies and can_pin_memory()
            loader = build_loader(
                dataset,
                # A loader for training repeats samples, so that all ranks have the same number;
                # with uneven inputs this is not necessary.
                train=name == "train" and not (run.wrapper or {}).get("uneven_inputs"),
                seed=seed,
                shard=(share.index, share.count),
                **options,
            )
    limit = 1 if share.one_batch else limit
    return loader if limit is None else FirstBatches(loader, limit)


def _limits(run: RunSections, name: str) -> tuple[RunSections, int | None]:
    """Return the settings of the loader ``data.<name>``, and its maximum number of batches or None.

    With ``overfit``, the settings make every loader read the training data in order.
    """
    if run.overfit is None:
        return run, run.limit_batches
    section: Any = run.data.train
    if isinstance(section, LoaderSection):
        section = replace(section, shuffle=False, sampler=None, drop_last=False)
    top, _, set_name = name.partition(".")
    if set_name:
        section = SetsSection(sets={set_name: section})
    return replace(run, data=replace(run.data, **{top: section})), run.overfit


def _selected(dataset: Any, count: int, seed: int, shuffled: bool) -> Any:
    """Return ``count`` samples: the first ones or, if the loader shuffles, a random selection."""
    if count >= len(dataset):
        return dataset
    chosen: Sequence[int] = range(count)
    if shuffled:
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
        chosen = order[:count].tolist()
    return Subset(dataset, chosen)


def _build_sampler(section: LoaderSection, dataset: Any, seed: int, share: _DataShare) -> Any:
    assert section.sampler is not None
    ranks = {"rank": share.index, "num_replicas": share.count, "world_size": share.count}
    values = {"dataset": dataset, "data_source": dataset, "seed": seed, **ranks}
    if section.shuffle:
        # Otherwise the sampler's own default applies.
        values["shuffle"] = True
    supplied = {n: values[n] for n in taken_by_sampler(section.sampler) if n in values}
    return build_tree(section.sampler, SAMPLERS, supplied)


def _build_collate(setting: Any) -> Any:
    if isinstance(setting, Mapping):
        return build_tree(setting, DATASETS)
    return DATASETS.resolve(setting)


def _rank_arguments(run: RunSections, name: str) -> dict[str, bool]:
    """Return the argument of a loop that says that the loader ``data.<name>`` knows the ranks."""
    section = run.data.loader(name)
    return {PER_RANK: True} if isinstance(section, dict) and section.get(PER_RANK) else {}


def _build_all(section: str, settings: Mapping[str, Any], registry: Registry) -> dict[str, Any]:
    built, errors = {}, BuildErrors()
    for name, component in settings.items():
        with errors.collect(f"{section}.{name}"):
            built[name] = build_tree(component, registry)
    errors.raise_all()
    return built


def _build_evaluation(run: RunSections, name: str, *, share: _DataShare) -> Any:
    """Build the loop "val" or "test"; one loop for each set if there are several sets."""
    loops, errors = {}, BuildErrors()
    for set_name, path in run.data.get_sets(name).items():
        metrics = loader = None
        with errors.collect("metrics"):
            metrics = _build_metrics(run.metrics, set_name)
        with errors.collect(f"data.{path}"):
            loader = _build_loader(run, path, share=share)
        if metrics is not None and loader is not None:
            supplied = {"dataloader": loader, "metrics": metrics, **_rank_arguments(run, path)}
            with errors.collect(name):
                loops[set_name] = build_tree(getattr(run, name), LOOPS, supplied)
    errors.raise_all()
    return EvalSets(loops) if isinstance(getattr(run.data, name), SetsSection) else loops.get("")


def _build_metrics(metrics: Mapping[str, MetricSection], set_name: str) -> dict[str, Any]:
    """Build the metrics that are computed on a set."""
    chosen = {
        n: section
        for n, section in metrics.items()
        if section.sets is None or set_name in section.sets
    }
    components = {name: section.metric for name, section in chosen.items()}
    built = _build_all("metrics", components, METRICS)
    for name, section in chosen.items():
        if section.head is not None or section.transform is not None:
            built[name] = MetricInputs(built[name], section.head, find_transform(section.transform))
    return built


def _build_hooks(run: RunSections, *, errors: BuildErrors) -> dict[str, Any]:
    with errors.collect("hooks"):
        built = _build_all("hooks", run.hooks, HOOKS)
        # `Runner` adds the default hooks, unless they are removed.
        removed = {name: None for name in DEFAULT_HOOKS if name not in built}
        return {**built, **removed}
    return {}


def _freeze_hook(run: RunSections) -> dict[str, Hook]:
    if not (run.frozen_until or run.frozen_in_eval):
        return {}
    hook = FreezeHook(until_step=run.frozen_until, in_eval=run.frozen_in_eval)
    return {"freeze.until_step": hook}


def _check_watched(hooks: Mapping[str, Any], val_loop: Any, *, errors: BuildErrors) -> None:
    """Collect hooks for which it is unknown whether higher values of their metric are better."""
    directions = find_directions(getattr(val_loop, "metrics", {}))
    for name, hook in hooks.items():
        if isinstance(hook, CheckpointHook | EarlyStopHook) and hook.watched.name:
            with errors.collect(f"hooks.{name}.{hook.watched.argument}"):
                hook.watched.mode_by(directions)


def _build_optimizers(run: RunSections, model: nn.Module) -> tuple[Any, dict[str, Optimizer]]:
    """Return the optimizer wrapper of ``model``, and its optimizers by name ("" for one)."""
    several = named_optimizers(run.optimizer or {})
    group = getattr(model, "data_group", None)
    with building("optimizer"):
        optimizer_sections: Any = several or {"": run.optimizer}
        if group is not None:
            # Optimizers that communicate must do so among ranks with the same parameters.
            optimizer_sections = supply_where_taken(
                optimizer_sections, OPTIMIZERS, "process_group", group
            )
        if several:
            check_step_for_several_optimizers(model)
            chosen = {name: section.get("params") for name, section in optimizer_sections.items()}
            shares = divide_parameters(model, chosen)
        else:
            shares = {"": named_parameters(model)}
    optimizers = {
        name: _build_optimizer(section, shares[name], f"optimizer.{name}" if name else "optimizer")
        for name, section in optimizer_sections.items()
    }
    sections = optim_wrapper_sections(run.optim_wrapper, run.optimizer)
    wrappers = {}
    for name, optimizer in optimizers.items():
        with building(f"optim_wrapper.{name}" if name in run.optim_wrapper else "optim_wrapper"):
            supplied = {"optimizer": optimizer}
            wrappers[name] = build_tree(sections[name], OPTIM_WRAPPERS, supplied)
            refuse_without_closure(wrappers[name], model)
            set_loss_weight: Any = getattr(model, "set_loss_weight", None)
            loss_weight = getattr(wrappers[name], "loss_weight", None)
            if set_loss_weight is not None and loss_weight is not None:
                set_loss_weight(loss_weight)
    wrapper = OptimWrapperDict(**wrappers) if several else wrappers[""]
    return wrapper, optimizers


def _build_optimizer(
    settings: Mapping[str, Any], named: Sequence[NamedParameter], where: str
) -> Optimizer:
    own = {key: value for key, value in settings.items() if key not in ("params", "paramwise")}
    params: list[Any] = list(dict.fromkeys(group.parameter for group in named))
    if settings.get("paramwise") is not None:
        with building(f"{where}.paramwise"):
            params = param_groups(
                named,
                lr=own.get("lr"),
                weight_decay=own.get("weight_decay"),
                paramwise=settings["paramwise"],
                optimizer=stepping_class(own),
            )
    with building(where):
        # `build_optimizer` selects the fastest implementation of the class.
        kind = partial(build_optimizer, find_component(own, OPTIMIZERS))
        built: Optimizer = build_tree({**own, "type": kind}, OPTIMIZERS, {"params": params})
    return built


def scheduler_hook(run: RunSections, optimizers: Mapping[str, Optimizer]) -> dict[str, Hook]:
    """Return the hook of a run's schedulers by its name; empty if there are none.

    Args:
        run: the checked settings.
        optimizers: the optimizers by name ("" for a single one).
    """

    def build(section: SchedulerSection, settings: Mapping[str, Any]) -> Any:
        def make(optimizer: Optimizer) -> Any:
            return build_tree(settings, PARAM_SCHEDULERS, {"optimizer": optimizer})

        optimizer = optimizers[section.optimizer or ""]
        if not section.after and section.until is None:
            return make(optimizer)
        return ScheduleWindow(optimizer, make, after=section.after, until=section.until)

    pairs, lengths = [], {}
    for at, section in enumerate(run.schedulers):
        with building(scheduler_key(run, at)):
            settings, by, warmup = divide_scheduler(section)
            pairs.append((build(section, settings), by))
            if warmup is not None:
                lengths[section.optimizer or ""] = warmup
    # After all schedulers, which read the rates when they are created.
    warmups = [Warmup(optimizers[name], length) for name, length in lengths.items()]
    watched = next((scheduler.metric for scheduler in run.schedulers if scheduler.metric), None)
    named = optimizers if "" not in optimizers else None
    hook = SchedulerHook(pairs, metric=watched, optimizers=named, warmups=warmups)
    return {"schedulers": hook} if pairs else {}


def plan_run(loop: EpochTrainLoop | IterTrainLoop, optim_wrapper: Any) -> LoopState:
    """Return a state that has the length of a training, as far as it is known before the start."""
    state = LoopState(nn.Module(), optim_wrapper, dataloader=loop.dataloader)
    loop.budget.plan(state, get_length(loop.dataloader))
    return state


def _set_lengths(run: RunSections, hook: Any, loop: Any, optim_wrapper: Any) -> None:
    """Tell the schedules the length of the training, or raise BuildError if it is needed."""
    if not isinstance(hook, SchedulerHook) or not isinstance(loop, EpochTrainLoop | IterTrainLoop):
        return
    try:
        hook.set_lengths(plan_run(loop, optim_wrapper))
    except UnknownLengthError as error:
        raise BuildError(scheduler_key(run, error.position), error) from error


def _build_training(run: RunSections, val_loop: Any, *, share: _DataShare) -> Any:
    settings = dict(run.train or {})
    if share.one_batch:
        kind: dict[str, Any] = {k: settings[k] for k in ("type", "_scope_") if k in settings}
        settings = {**kind, **{key: 1 for key in _DRY_RUN_ONES if key in settings}}
    loader = _build_loader(run, "train", share=share)
    supplied = {"dataloader": loader, "val_loop": val_loop, **_rank_arguments(run, "train")}
    return build_tree(settings, LOOPS, supplied)


def _evaluation_settings(run: RunSections, model: nn.Module) -> tuple[PrecisionContext, Any]:
    """Return the precision context and the loss weight of a run that only evaluates."""
    sections = optim_wrapper_sections(run.optim_wrapper, run.optimizer)
    weights = [section.get("loss_weight") for section in sections.values()]
    loss_weight = next((weight for weight in weights if weight is not None), None)
    kinds = [find_component(settings, OPTIM_WRAPPERS) for settings in sections.values()]
    parameters = list(model.parameters())
    if not parameters or all(getattr(kind, "precision_context", None) is None for kind in kinds):
        return nullcontext, loss_weight
    # Optimizer wrappers define the context. They are built around an optimizer that is never used.
    supplied = {"optimizer": SGD(parameters, lr=0.0)}
    built = {
        name: build_tree(section, OPTIM_WRAPPERS, supplied) for name, section in sections.items()
    }
    wrapper = built[""] if "" in built else OptimWrapperDict(**built)
    return wrapper.precision_context, loss_weight
