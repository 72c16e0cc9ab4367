"""Lay out the model of a run over its ranks: choose device, mesh and wrapper, and build it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ..collectives import get_world_size
from ..collectives.process.init import device_of_local_rank
from ..registry import (
    MODEL_WRAPPERS,
    OPTIMIZERS,
    Problem,
    RunSections,
    check_component,
    find_train_step,
    supply_where_taken,
)
from ..registry.registry import find_component
from ..wrappers import (
    Mesh,
    Preparation,
    StepDistributedDataParallel,
    auto,
    build_mesh,
    meta_parameters,
    wrap_model,
)
from ..wrappers.blocks import find_blocks, find_modules, find_parameters
from ..wrappers.prepare import check_preparation, freeze_parameters, model_checks
from ..wrappers.sharding.mesh import check_axes
from ..wrappers.wrapping import needs_process_group, wrapper_problems
from .failure import BuildErrors, building
from .pretrained.build import build_user_model
from .pretrained.load import add_configured, load_pretrained

AUTO_TABLES = ("single", "ddp", "fsdp")


def device_of_rank(run: RunSections) -> torch.device:
    """Return the device on which this rank trains."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    name = "cuda" if run.device == "auto" else run.device
    if accelerator is None or accelerator.type != name:
        return torch.device("cpu")
    # A run on devices of other types has one process.
    return device_of_local_rank() if name == "cuda" else torch.device(name, 0)


def build_model(run: RunSections, ranks: int | None = None) -> tuple[nn.Module, Mesh | None]:
    """Return the wrapped model on this rank's device, and the mesh of ranks, if any.

    Every rank must call this. The weights of ``run.load_from`` are loaded before the adapter is
    added or, with ``init_device: meta``, after the model is wrapped.
    """
    device = device_of_rank(run)
    if device.type != "cpu":
        # A model or a loss may create tensors on "cuda", which must mean this rank's device.
        torch.accelerator.set_device_index(device)
    mesh = None
    if run.mesh:
        # `stepwrap check` builds a run of several ranks in one process.
        axes = dict.fromkeys(run.mesh, 1) if get_world_size() == 1 else run.mesh
        with building("mesh"):
            mesh = build_mesh(axes, device.type)
    preparation = _preparation(run)
    is_meta = run.init_device == "meta"
    device_context: AbstractContextManager[None] = meta_parameters() if is_meta else nullcontext()
    with device_context:
        model = build_user_model(run.model, is_meta=is_meta)
    tensor_size = run.mesh.get("tensor", 1)
    if tensor_size < 1:
        tensor_size = 1 if mesh is None else mesh.tensor_size
    if run.load_from is not None and not is_meta:
        load_pretrained(model, run.load_from, adapted=run.adapter is not None)
    adapter = add_configured(model, run.adapter, run.load_from, run.seed)
    _check_model(run, model, preparation, tensor_size)
    options = dict(run.wrapper or {})
    options.pop("type", None)
    scope = options.pop("_scope_", None)
    with building("wrapper", options), MODEL_WRAPPERS.switch_scope_and_registry(scope):
        wrapped = wrap_model(
            _wrapper_for(run, ranks),
            model,
            device=device,
            mesh=mesh,
            prepare=preparation,
            train_step=find_train_step(run.train_step),
            **options,
        )
    if run.load_from is not None and is_meta:
        # Only now each rank has memory for its parts of the parameters.
        with nullcontext() if adapter is None else adapter.base_weights():
            load_pretrained(wrapped, run.load_from, adapted=adapter is not None)
    return wrapped, mesh


def needs_group(run: RunSections) -> bool:
    """Return whether the wrapper or an optimizer needs a process group, even with one rank."""
    if works_over_ranks(run.optimizer):
        return True
    wrapper = wrapper_class(run)
    if wrapper is auto:
        return run.init_device == "meta" or "shard" in run.mesh
    return wrapper is not None and needs_process_group(wrapper)


def works_over_ranks(settings: Mapping[str, Any] | None) -> bool:
    """Return whether an optimizer in the settings takes a process group."""
    settings = settings or {}
    return bool(supply_where_taken(settings, OPTIMIZERS, "process_group", None) != settings)


def layout_problems(run: RunSections, ranks: int) -> Iterator[Problem]:
    """Yield contradictions between mesh, wrapper, tensor_parallel and the number of ranks."""
    wrapper = wrapper_class(run)
    axes = run.mesh
    if run.mesh:
        try:
            axes = check_axes(run.mesh, ranks)
        except ValueError as error:
            message = str(error)
            if ranks == run.launch.nproc:
                message = message.replace(f"there are {ranks}", f"launch.nproc is {ranks}")
            yield Problem("mesh", message)
    is_meta = run.init_device == "meta"
    data_size = _data_size(axes, ranks)
    for key, message in wrapper_problems(wrapper, data_size, axes, is_meta=is_meta).items():
        yield Problem(key, message)
    if run.tensor_parallel is not None and "tensor" not in axes:
        message = "needs a tensor axis in mesh, such as {data: -1, tensor: 2}"
        yield Problem("tensor_parallel", message)
    if run.tensor_parallel is None and axes.get("tensor", 1) != 1:
        message = (
            "has several ranks, but there is no tensor_parallel.plan to split modules over them"
        )
        yield Problem("mesh.tensor", message)
    for name in AUTO_TABLES if wrapper is auto else ():
        # `auto` takes a table of arguments for each wrapper that it may choose.
        table, where = (run.wrapper or {}).get(name), f"wrapper.{name}"
        if isinstance(table, Mapping):
            yield from check_component({"type": name, **table}, MODEL_WRAPPERS, where, ("module",))
        elif table is not None:
            yield Problem(where, f"must be options of {name}, got {table!r}")


def preparation_problems(run: RunSections) -> Iterator[Problem]:
    """Yield mistakes in the preparation settings that can be found without the model."""
    for key, message in check_preparation(_preparation(run)):
        name = key.removeprefix("tensor_parallel.plan.")
        yield Problem(key, message.removeprefix(f"{name}: "))


def tables_with(name: str) -> list[str]:
    """Return the key paths of the option ``name`` in those tables of ``auto`` that allow it."""
    return [
        f"wrapper.{table}.{name}"
        for table in AUTO_TABLES
        if not check_component({"type": table, name: None}, MODEL_WRAPPERS, "", ("module",))
    ]


def wrapper_class(run: RunSections) -> Any:
    """Return the class or function of the wrapper's ``type``; None for the default wrapper."""
    return None if run.wrapper is None else find_component(run.wrapper, MODEL_WRAPPERS)


def _check_model(
    run: RunSections, model: nn.Module, preparation: Preparation, tensor_size: int
) -> None:
    """Raise one error with every setting that does not fit the model."""
    errors = BuildErrors()
    checks = model_checks(model, preparation, tensor_size)
    where, options = "wrapper", run.wrapper or {}
    if wrapper_class(run) is auto:
        where, options = "wrapper.fsdp", options.get("fsdp") or {}
    if "shard" in options:
        checks[f"{where}.shard"] = lambda: find_blocks(model, options.get("shard"))
    for key, check in checks.items():
        with errors.collect(key):
            check()
    errors.raise_all()
    if run.train is not None and run.freeze:
        with building("freeze"):
            freeze_parameters(model, run.frozen)
            later = find_parameters(model, run.frozen_until, "freeze").values()
            find_modules(model, run.frozen_in_eval, "freeze with eval: true")
            trained = {id(param) for param in model.parameters() if param.requires_grad}
            if not trained:
                raise ValueError("every parameter is frozen, nothing is left to train")
            if trained <= {id(param) for param in later}:
                step = min(run.frozen_until.values())
                raise ValueError(
                    f"every parameter is frozen until step {step}: leave a part of the model out, "
                    "such as its head"
                )


def _preparation(run: RunSections) -> Preparation:
    return Preparation(
        freeze=run.frozen,
        tensor_parallel=None if run.tensor_parallel is None else run.tensor_parallel.plan,
        activation_checkpointing=run.activation_checkpointing,
        compile=run.compile,
    )


def _wrapper_for(run: RunSections, ranks: int | None) -> Any:
    """Return the configured wrapper or, if ``ranks`` is given, the default for that many ranks."""
    wrapper = wrapper_class(run)
    if wrapper is not None or ranks is None:
        return wrapper
    return StepDistributedDataParallel if data_ranks(run, ranks) > 1 else None


def data_ranks(run: RunSections, ranks: int) -> int:
    """Return the number of ranks with different batches in a run of ``ranks`` processes."""
    return _data_size(check_axes(run.mesh, ranks) if run.mesh else {}, ranks)


def _data_size(axes: Mapping[str, int], ranks: int) -> int:
    sizes = [size for name, size in axes.items() if name != "tensor"]
    return abs(math.prod(sizes)) if axes else ranks
