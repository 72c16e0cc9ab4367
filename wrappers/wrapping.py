"""Put a wrapper around a model, and tell whether there is one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..collectives import get_world_size
from ..registry import MODEL_WRAPPERS, Registry
from .auto import Surroundings, auto, choose_wrapper
from .ddp.distributed import StepDistributedDataParallel
from .ddp.separate import SeparateDistributedDataParallel
from .prepare import (
    Preparation,
    chosen_blocks,
    freeze_parameters,
    model_checks,
    shape_blocks,
    split_layers,
    split_paths,
)
from .sharding.agreement import agree
from .sharding.first_rank import broadcast_first
from .sharding.mesh import Mesh
from .steps.step import (
    SingleDevice,
    StepFunction,
    Steps,
    check_step_function,
    with_train_step,
)
from .torch_functions import option_names

# They average gradients over a group; without one SingleDevice does the same.
_IN_GROUPS = (StepDistributedDataParallel, SeparateDistributedDataParallel)


def is_model_wrapper(model: nn.Module, registry: Registry = MODEL_WRAPPERS) -> bool:
    """Whether ``model`` itself is a wrapper that ``registry`` or a child of it knows.

    Modules inside ``model`` do not count. torch's own DataParallel and
    DistributedDataParallel count for the registry MODEL_WRAPPERS.
    """
    if registry is MODEL_WRAPPERS and isinstance(model, (DataParallel, DistributedDataParallel)):
        return True
    known = [registry.get(name) for name in registry]
    if isinstance(model, tuple(one for one in known if isinstance(one, type))):
        return True
    return any(is_model_wrapper(model, child) for child in registry.children.values())


def is_module_wrapper(module: nn.Module, extra: Iterable[type[nn.Module]] = ()) -> bool:
    """Whether ``module`` or any module inside it is a DataParallel or DistributedDataParallel.

    Subclasses count; FullyShardedDataParallel and other wrappers count only when they are given.
    ``is_model_wrapper`` considers only the module itself.

    Args:
        extra: further classes that count as wrappers.
    """
    wrappers = (DataParallel, DistributedDataParallel, *extra)
    return any(isinstance(one, wrappers) for one in module.modules())


def wrap_model(
    wrapper: Callable[..., nn.Module] | None,
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    mesh: Mesh | None = None,
    prepare: Preparation | None = None,
    train_step: StepFunction | None = None,
    **options: Any,
) -> nn.Module:
    """Prepare and wrap ``model`` for this process, or for the group when there is one.

    Every rank must call this. The options are checked in both cases. In this order: parameters
    are frozen, the model is moved, its layers are split, blocks are checkpointed, then compiled,
    and the whole is wrapped. Before layers are split, all ranks get the weights of the first.

    Args:
        wrapper: a wrapper class, or ``auto``. Default: StepDistributedDataParallel where several
            ranks see different batches, else SingleDevice. Without a group, SingleDevice stands
            in for StepDistributedDataParallel and SeparateDistributedDataParallel.
        model: the model, or a wrapped model, which is returned unchanged.
        device: where to move the model first; default: it stays. A model on the meta device is
            built there by the wrapper.
        mesh: how the ranks are laid out; default: all see different batches.
        prepare: what is done to the model before.
        train_step: a function that is the training step, as for ``with_train_step``.
        options: arguments of the wrapper.

    Raises:
        TypeError: the model is wrapped already and a wrapper or options are given, or the
            wrapper is no class or has no such argument.
        ValueError: wrapper, mesh and preparation do not go together, or as those say; or they are
            not the same on every rank. A mistake on one rank is raised on every rank.
        RuntimeError: a wrapper with a step of its own needs a process group, and there is none.
    """
    if is_model_wrapper(model):
        return _wrapped_already(model, wrapper, bool(options or mesh or prepare or train_step))
    prepare = prepare or Preparation()
    data_size = get_world_size() if mesh is None else mesh.data_size
    wrapper = wrapper or _default(data_size)
    everywhere = None if mesh is None else mesh.device_mesh
    if train_step is not None:
        check_step_function(train_step)
    agree(partial(_prepared, wrapper, model, mesh, prepare, options), everywhere)
    if wrapper is auto:
        chosen = choose_wrapper(model, _surroundings(model, device, mesh, prepare), **options)
        wrapper, options = chosen.wrapper, dict(chosen.options)
    is_meta = device is not None and any(one.is_meta for one in model.parameters())
    axes = () if mesh is None else tuple(mesh.axes)
    for problem in wrapper_misfits(wrapper, data_size, axes, is_meta=is_meta).values():
        raise ValueError(problem)
    shards = takes_mesh(wrapper)
    model = _moved(model, device, shards, options)
    if prepare.tensor_parallel is not None and mesh is not None and mesh.device_mesh is not None:
        everything = [*model.parameters(), *model.buffers()]
        broadcast_first([one for one in everything if not one.is_meta], mesh.device_mesh)
    split_layers(model, prepare, mesh, localise=not shards)
    shape_blocks(model, prepare)
    return _wrapped(wrapper, model, mesh, options, train_step)


def _prepared(
    wrapper: Callable[..., nn.Module],
    model: nn.Module,
    mesh: Mesh | None,
    prepare: Preparation,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Freeze parameters and check the rest; returns what must be the same on all ranks."""
    if not callable(wrapper):
        raise TypeError(
            "wrapper must be a class such as StepDistributedDataParallel, or the function auto, "
            f"got {wrapper!r}: names and settings of wrappers are for configs"
        )
    frozen = freeze_parameters(model, prepare.freeze)
    for check in model_checks(model, prepare, 1 if mesh is None else mesh.tensor_size).values():
        check()
    check_wrapper = getattr(wrapper, "check_options", None)
    if check_wrapper is not None:
        check_wrapper(options)
    return {
        "wrapper": getattr(wrapper, "__name__", str(wrapper)),
        "mesh": None if mesh is None else dict(mesh.axes),
        "freeze": frozen,
        **chosen_blocks(model, prepare),
    }


def takes_mesh(wrapper: Callable[..., nn.Module]) -> bool:
    """Whether ``wrapper`` spreads the model over the ranks of a mesh, as fsdp does."""
    return "mesh" in _signature(wrapper).parameters


def steps_in_group_only(wrapper: Callable[..., nn.Module]) -> bool:
    """Whether ``wrapper`` can only step inside a process group, even of one process."""
    if takes_mesh(wrapper):
        return True
    stands_in = issubclass(wrapper, _IN_GROUPS) if isinstance(wrapper, type) else False
    return stands_in and wrapper.train_step is not Steps.train_step  # type: ignore[attr-defined]


def wrapper_misfits(
    wrapper: Callable[..., nn.Module] | None,
    data_size: int,
    axes: Collection[str] = (),
    *,
    is_meta: bool = False,
) -> dict[str, str]:
    """Return what keeps ``wrapper`` from running, by the name of the setting that is to blame.

    Args:
        wrapper: as for ``wrap_model``.
        data_size: how many ranks see different batches.
        axes: those of the mesh.
        is_meta: the parameters of the model are on the meta device.
    """
    if wrapper is auto:
        return {}
    wrapper = wrapper or _default(data_size)
    name, problems = getattr(wrapper, "__name__", repr(wrapper)), {}
    kinds = wrapper if isinstance(wrapper, type) else nn.Module
    if data_size > 1 and issubclass(kinds, (SingleDevice, DataParallel)):
        problems["wrapper.type"] = (
            f"{name} steps in one process, but {data_size} are to run, each with its own batches; "
            "use ddp, or launch.nproc=1"
        )
    elif "tensor" in axes and issubclass(kinds, DataParallel):
        problems["wrapper.type"] = f"{name} copies a model, and cannot copy one split over ranks"
    if not takes_mesh(wrapper):
        if {"replicate", "shard"} & set(axes):
            problems["mesh"] = f"{name} shards nothing: name the axis data, or use fsdp"
        if is_meta:
            problems["init_device"] = (
                f"the model has parameters on the meta device, which {name} cannot fill; use fsdp"
            )
    return problems


def _default(data_size: int) -> type[nn.Module]:
    return StepDistributedDataParallel if data_size > 1 else SingleDevice


def _signature(wrapper: Any) -> inspect.Signature:
    made = getattr(wrapper, "config_signature", None)
    signature: inspect.Signature = inspect.signature(wrapper) if made is None else made()
    return signature


def _wrapped_already(model: nn.Module, wrapper: Any, has_options: bool) -> nn.Module:
    if wrapper is not None or has_options:
        raise TypeError(
            f"the model is already wrapped in {type(model).__name__}: give the bare model, "
            "or no wrapper, no wrapper options and no train_step"
        )
    if not isinstance(model, Steps) and not hasattr(model, "train_step"):
        raise TypeError(
            f"{type(model).__name__} has no train_step: give the bare model, it is wrapped here"
        )
    return model


def _surroundings(
    model: nn.Module, device: Any, mesh: Mesh | None, prepare: Preparation
) -> Surroundings:
    """What decides which wrapper is chosen."""
    why = ""
    if mesh is not None and "shard" in mesh.axes:
        why = "the mesh has a shard axis"
    elif any(one.is_meta for one in model.parameters()):
        why = "the parameters are on the meta device"
    paths = split_paths(model, prepare)
    return Surroundings(
        data_size=get_world_size() if mesh is None else mesh.data_size,
        device=None if device is None else torch.device(device),
        split=[one for path in paths for one in model.get_submodule(path).parameters()],
        tensor_size=1 if mesh is None else mesh.tensor_size,
        must_shard=why,
    )


def _moved(
    model: nn.Module, device: Any, shards: bool, options: MutableMapping[str, Any]
) -> nn.Module:
    if device is None:
        return model
    if shards and any(one.is_meta for one in model.parameters()):
        if options.get("device_id") is None:
            options["device_id"] = torch.device(device)
        return model
    return model.to(device)


def _wrapped(
    wrapper: Callable[..., Any],
    model: nn.Module,
    mesh: Mesh | None,
    options: dict[str, Any],
    train_step: StepFunction | None,
) -> nn.Module:
    grouped = distributed.is_available() and distributed.is_initialized()
    if not grouped and isinstance(wrapper, type) and issubclass(wrapper, _IN_GROUPS):
        return _without_group(wrapper, model, options, train_step)
    group = None if mesh is None else mesh.data_group
    if grouped and mesh is not None and takes_mesh(wrapper):
        options = {"mesh": mesh, **options}
    elif group is not None and "process_group" in _signature(wrapper).parameters:
        options = {"process_group": group, **options}
    kind: Any = wrapper
    wrapped: nn.Module = (with_train_step(kind, train_step) if train_step else kind)(
        model, **options
    )
    if isinstance(wrapped, Steps) and wrapped.data_group is None:
        wrapped.data_group = group
    return wrapped


def _without_group(
    wrapper: Any, model: nn.Module, options: dict[str, Any], train_step: StepFunction | None
) -> nn.Module:
    if steps_in_group_only(wrapper):
        raise RuntimeError(
            f"{wrapper.__name__} has a train_step of its own and needs a process group; start "
            "several processes, or write the step as a subclass of SingleDevice"
        )
    alone = with_train_step(SingleDevice, train_step) if train_step else SingleDevice
    if issubclass(wrapper, SeparateDistributedDataParallel):
        made: nn.Module = wrapper.without_group(model, options)
        return made if train_step is None else alone(model)
    wrapper.check_options(options)
    known = option_names(SingleDevice)
    return alone(model, **{name: options[name] for name in options if name in known})
