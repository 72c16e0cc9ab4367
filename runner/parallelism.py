"""The model of a run: built, prepared and wrapped for the ranks as the config lays them out."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ..collectives import get_local_rank, get_world_size
from ..registry import (
    MODEL_WRAPPERS,
    MODELS,
    OPTIMIZERS,
    Problem,
    RunSections,
    build_tree,
    check_component,
    find_train_step,
    supply_where_taken,
)
from ..wrappers import (
    BaseModule,
    Mesh,
    Preparation,
    StepDistributedDataParallel,
    auto,
    build_mesh,
    meta_parameters,
    wrap_model,
)
from ..wrappers.blocks import find_blocks
from ..wrappers.prepare import check_preparation, freeze_parameters, model_checks
from ..wrappers.sharding.mesh import check_axes
from ..wrappers.wrapping import steps_in_group_only, wrapper_misfits
from .failure import Attempts, building

AUTO_TABLES = ("single", "ddp", "fsdp")


def device_of_rank(run: RunSections) -> torch.device:
    """Return where this rank trains."""
    if run.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", get_local_rank() % torch.cuda.device_count())


def build_model(run: RunSections, ranks: int | None = None) -> tuple[nn.Module, Mesh | None]:
    """Return the wrapped model on this rank's device, and how the ranks are laid out."""
    device = device_of_rank(run)
    if device.type == "cuda":
        # Tensors that a model or a loss puts on "cuda" must go to this rank's device.
        torch.cuda.set_device(device)
    mesh = None
    if run.mesh:
        # `stepwrap check` builds in one process what several are to run.
        axes = dict.fromkeys(run.mesh, 1) if get_world_size() == 1 else run.mesh
        with building("mesh"):
            mesh = build_mesh(axes, device.type)
    preparation = _preparation(run)
    is_meta = run.init_device == "meta"
    place: AbstractContextManager[None] = meta_parameters() if is_meta else nullcontext()
    with building("model"), place:
        model = build_tree(run.model, MODELS)
        if not is_meta:
            with _without_lists():
                _initialise(model)
    tensor_size = run.mesh.get("tensor", 1)
    if tensor_size < 1:
        tensor_size = 1 if mesh is None else mesh.tensor_size
    _check_model(run, model, preparation, tensor_size)
    options = {k: v for k, v in (run.wrapper or {}).items() if k not in ("type", "_scope_")}
    with building("wrapper", options):
        wrapped = wrap_model(
            _wrapper_for(run, ranks),
            model,
            device=device,
            mesh=mesh,
            prepare=preparation,
            train_step=find_train_step(run.train_step),
            **options,
        )
    return wrapped, mesh


def _initialise(model: nn.Module) -> None:
    """Call `init_weights` of modules with an `init_cfg`: they do not call it themselves."""
    initialise: Any = getattr(model, "init_weights", None)
    if (
        isinstance(model, BaseModule)
        and model.init_cfg is None
        and type(model).init_weights is BaseModule.init_weights
    ):
        # Ours has no settings: a method `init_weights` inside may be for other things. Models of
        # other libraries reinitialise their weights in it, even pretrained ones.
        initialise = None
    if hasattr(model, "init_cfg") and initialise is not None:
        # It reaches those inside by itself.
        initialise()
        return
    for child in model.children():
        _initialise(child)


@contextmanager
def _without_lists() -> Iterator[None]:
    """Keep mmengine's modules from printing lines about each of their parameters."""
    module = sys.modules.get("mmengine.logging")
    if module is None:
        yield
        return
    # Its own runner has a file for them.
    logger = module.MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel("WARNING")
    try:
        yield
    finally:
        logger.setLevel(level)


def needs_group(run: RunSections) -> bool:
    """Whether wrapper or optimizer can only work inside a process group, even of one process."""
    if works_over_ranks(run.optimizer):
        return True
    wrapper = wrapper_class(run)
    if wrapper is auto:
        return run.init_device == "meta" or "shard" in run.mesh
    return wrapper is not None and steps_in_group_only(wrapper)


def works_over_ranks(settings: Mapping[str, Any] | None) -> bool:
    """Whether an optimizer in the settings communicates, even in one process."""
    filled = supply_where_taken(settings or {}, OPTIMIZERS, "process_group", None)
    return bool(filled != (settings or {}))


def layout_problems(run: RunSections, ranks: int) -> Iterator[Problem]:
    """Yield what does not fit together in how the ranks work together."""
    wrapper = wrapper_class(run)
    axes = run.mesh
    if run.mesh:
        try:
            axes = check_axes(run.mesh, ranks)
        except ValueError as error:
            told = str(error)
            if ranks == run.launch.nproc:
                told = told.replace(f"there are {ranks}", f"launch.nproc is {ranks}")
            yield Problem("mesh", told)
    is_meta = run.init_device == "meta"
    data_size = _data_size(axes, ranks)
    for key, told in wrapper_misfits(wrapper, data_size, axes, is_meta=is_meta).items():
        yield Problem(key, told)
    if run.tensor_parallel is not None and "tensor" not in axes:
        what = "needs a tensor axis in mesh, such as {data: -1, tensor: 2}"
        yield Problem("tensor_parallel", what)
    if run.tensor_parallel is None and axes.get("tensor", 1) != 1:
        what = "is more than one rank, but no tensor_parallel.plan says what is split over it"
        yield Problem("mesh.tensor", what)
    for name in AUTO_TABLES if wrapper is auto else ():
        # A table of arguments for each wrapper that may be chosen.
        table, where = (run.wrapper or {}).get(name), f"wrapper.{name}"
        if isinstance(table, Mapping):
            yield from check_component({"type": name, **table}, MODEL_WRAPPERS, where, ("module",))
        elif table is not None:
            yield Problem(where, f"must be options of {name}, got {table!r}")


def preparation_problems(run: RunSections) -> Iterator[Problem]:
    """Yield what is wrong with what is to be done to the model, whatever the model."""
    for key, told in check_preparation(_preparation(run)):
        name = key.removeprefix("tensor_parallel.plan.")
        yield Problem(key, told.removeprefix(f"{name}: "))


def tables_with(name: str) -> list[str]:
    """Return the key paths at which `auto` takes an option of the wrappers it chooses from."""
    return [
        f"wrapper.{table}.{name}"
        for table in AUTO_TABLES
        if not check_component({"type": table, name: None}, MODEL_WRAPPERS, "", ("module",))
    ]


def wrapper_class(run: RunSections) -> Any:
    """The class, or function, that the wrapper's type names; None for the default."""
    return None if run.wrapper is None else MODEL_WRAPPERS.resolve(run.wrapper["type"])


def _check_model(
    run: RunSections, model: nn.Module, preparation: Preparation, tensor_size: int
) -> None:
    """Raise all that does not fit the model at once."""
    attempts = Attempts()
    checks = model_checks(model, preparation, tensor_size)
    where, options = "wrapper", run.wrapper or {}
    if wrapper_class(run) is auto:
        where, options = "wrapper.fsdp", options.get("fsdp") or {}
    if "shard" in options:
        checks[f"{where}.shard"] = lambda: find_blocks(model, options.get("shard"))
    for key, check in checks.items():
        attempts.make(key, check)
    attempts.finish()
    if run.train is not None and run.freeze:
        with building("freeze"):
            freeze_parameters(model, run.freeze)
            if not any(one.requires_grad for one in model.parameters()):
                raise ValueError("every parameter is frozen, nothing is left to train")


def _preparation(run: RunSections) -> Preparation:
    return Preparation(
        freeze=run.freeze,
        tensor_parallel=None if run.tensor_parallel is None else run.tensor_parallel.plan,
        activation_checkpointing=run.activation_checkpointing,
        compile=run.compile,
    )


def _wrapper_for(run: RunSections, ranks: int | None) -> Any:
    """Return the wrapper; in a trial of several ranks by one process, the wrapper of the ranks."""
    wrapper = wrapper_class(run)
    if wrapper is not None or ranks is None:
        return wrapper
    axes = check_axes(run.mesh, ranks) if run.mesh else {}
    return StepDistributedDataParallel if _data_size(axes, ranks) > 1 else None


def _data_size(axes: Mapping[str, int], ranks: int) -> int:
    sizes = [size for name, size in axes.items() if name != "tensor"]
    return abs(math.prod(sizes)) if axes else ranks
