"""Choose a wrapper, wrap a model, and check whether a model is wrapped."""

from __future__ import annotations

import collections
import inspect
import logging
import socket
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from ..collectives import all_gather_object, distributed_available, get_rank, get_world_size
from ..parallel import free_memory
from ..registry import MODEL_WRAPPERS, did_you_mean
from .blocks import read_compile
from .ddp.distributed import StepDistributedDataParallel
from .ddp.separate import SeparateDistributedDataParallel, check_children
from .layout import broadcast_from_first_rank
from .one_process import SingleDevice
from .prepare import Preparation, freeze_parameters, model_checks, prepare_model, split_parameters
from .sharding.mesh import Mesh, agree
from .steps.preprocess import get_device
from .steps.step import ModelWrapper, StepFunction, check_step_function, with_train_step
from .torch_functions import check_options, option_names
from .unwrap import is_model_wrapper

logger = logging.getLogger(__name__)

_Module = TypeVar("_Module", bound=nn.Module)

# Wrappers that average gradients over a process group. Without one, SingleDevice replaces them.
_IN_GROUPS = (StepDistributedDataParallel, SeparateDistributedDataParallel)
_GIB = 2**30
# Part of the free memory for weights, gradients and optimizer state. The rest is for activations,
# whose size is unknown before the first batch.
_USABLE = 0.7
_WRAPPERS = ("single", "ddp", "fsdp")
_NAMES = ("single", "dp", "ddp", "fsdp", "separate", "auto")


def wrap_model(
    wrapper: Callable[..., nn.Module] | str | None,
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    mesh: Mesh | None = None,
    prepare: Preparation | None = None,
    train_step: StepFunction | None = None,
    **options: Any,
) -> ModelWrapper:
    """Prepare and wrap ``model`` for this process, or for the process group if there is one.

    Every rank must call this. The function freezes parameters, moves the model to ``device``,
    splits layers by ``prepare.tensor_parallel`` (after it copied the first rank's weights to all
    ranks), sets up activation checkpointing, compiles blocks and wraps the model, in this order.
    A training step is compiled last.

    Args:
        wrapper: a wrapper class, ``auto``, or a registered name such as "ddp". Default:
            StepDistributedDataParallel if several ranks see different batches, otherwise
            SingleDevice, which then ignores the options of StepDistributedDataParallel. Without a
            process group, StepDistributedDataParallel and SeparateDistributedDataParallel are
            replaced by SingleDevice.
        model: the model; a wrapped one is returned unchanged.
        device: the device to move the model to; parameters on the meta device are materialised
            there. Default: the model is not moved.
        mesh: the layout of the ranks; default: every rank sees different batches.
        prepare: what to do with the model before it is wrapped.
        train_step: a function to use as training step; see ``with_train_step``.
        options: arguments of the wrapper.

    Raises:
        TypeError: a wrapped model is given together with arguments other than ``device``, or its
            wrapper has no ``train_step``; ``wrapper`` cannot be called; or an option is unknown.
        ValueError: no wrapper has the name; or wrapper, mesh and preparation contradict each other,
            or differ between ranks. An error on one rank is raised on every rank.
        RuntimeError: there is no process group, and the wrapper is a subclass of
            StepDistributedDataParallel or SeparateDistributedDataParallel with a custom
            ``train_step``.
    """
    if is_model_wrapper(model):
        return _wrapped_already(model, bool(wrapper or options or mesh or prepare or train_step))
    preparation, ranks = prepare or Preparation(), mesh or Mesh({"data": get_world_size()})
    wrapper, checked = _find_wrapper(wrapper, ranks.data_size)

    def check() -> dict[str, Any]:
        """Freeze parameters, check all settings, and return what must be equal on all ranks."""
        if train_step is not None:
            check_step_function(train_step)
        if not callable(wrapper):
            raise TypeError(
                "wrapper must be a class such as StepDistributedDataParallel, a name such as "
                f"'ddp', or the function auto, got {wrapper!r}; only configs accept a dict"
            )
        freeze_parameters(model, preparation.freeze)
        checks = model_checks(model, preparation, ranks.tensor_size)
        prepared = {key.partition(".")[0]: run() for key, run in checks.items()}
        if hasattr(checked, "check_options"):
            checked.check_options(options)
        name = getattr(wrapper, "__name__", str(wrapper))
        return {"wrapper": name, "mesh": ranks.axes, **prepared}

    agree(check, ranks.device_mesh)
    if checked is not wrapper:
        options = _options_of_single(options)
    wrapper, options = _chosen_wrapper(model, wrapper, ranks, preparation, options, device)
    if preparation.tensor_parallel is not None and ranks.device_mesh is not None:
        broadcast_from_first_rank([*model.parameters(), *model.buffers()], ranks.device_mesh)
    prepare_model(model, preparation, mesh, localise=not takes_mesh(wrapper))
    wrapped: ModelWrapper = _wrapped(wrapper, model, ranks, options, train_step)
    step = read_compile(preparation.compile) or {}
    if step.pop("step", False):
        compile_step(wrapped, **step)
    return wrapped


def _find_wrapper(
    wrapper: Callable[..., nn.Module] | str | None, data_size: int
) -> tuple[Callable[..., nn.Module], Any]:
    """Return the wrapper, and the class that checks its options."""
    if wrapper is None:
        # The same mistakes are errors on one process and on several.
        return _default(data_size), StepDistributedDataParallel
    if not isinstance(wrapper, str):
        return wrapper, wrapper
    registered: Callable[..., nn.Module] | None = MODEL_WRAPPERS.get(wrapper)
    if registered is None:
        raise ValueError(
            f"wrapper must be one of {', '.join(_NAMES)}, or another registered name, got "
            f"{wrapper!r}{did_you_mean(wrapper, [*MODEL_WRAPPERS])}"
        )
    return registered, registered


def _options_of_single(options: Mapping[str, Any]) -> dict[str, Any]:
    names = option_names(SingleDevice)
    return {name: value for name, value in options.items() if name in names}


def compile_step(
    wrapper: _Module,
    max_programs: int = 8,
    min_steps: int = 500,
    custom_optimizer: bool = False,
    backend: str = "inductor",
) -> _Module:
    """Compile the whole training step of ``wrapper``, from forward to update; return ``wrapper``.

    Every rank must call this, with the same arguments. Compilation starts at the fourth update.
    Steps that cannot be compiled (see docs/performance.md) run as usual, and a warning gives the
    reason.

    Args:
        wrapper: a SingleDevice or StepDistributedDataParallel; steps of other wrappers run as
            usual.
        max_programs: the maximum number of compiled variants of the step, for batches of other
            shapes and after changes of the model.
        min_steps: do not compile if the run is known to have fewer updates.
        custom_optimizer: also compile optimizers that are not from torch. The compiled step ignores
            changes of any state that they keep outside of ``param_groups`` and ``state``.
        backend: "inductor", or "eager" to run the traced step without a compiler, for debugging.

    Raises:
        TypeError: ``wrapper`` is not a model wrapper of this library.
    """
    if not isinstance(wrapper, ModelWrapper):
        raise TypeError(f"compile_step needs a model wrapper, got {type(wrapper).__name__}")
    # Imported lazily: it loads torch's compiler.
    from .compiled.compiled_step import CompiledStep

    CompiledStep(wrapper, max_programs, min_steps, custom_optimizer, backend).attach()
    return wrapper


def _chosen_wrapper(
    model: nn.Module,
    wrapper: Callable[..., nn.Module],
    mesh: Mesh,
    prepare: Preparation,
    options: dict[str, Any],
    device: torch.device | str | None,
) -> tuple[Callable[..., nn.Module], dict[str, Any]]:
    """Return the wrapper and its options, after moving the model to ``device``."""
    if wrapper is auto:
        split = split_parameters(model, prepare)
        wrapper, options = _choose(model, mesh, options, device=device, split=split)
    must_fill = device is not None and any(one.is_meta for one in model.parameters())
    problems = wrapper_problems(wrapper, mesh.data_size, mesh.axes, is_meta=must_fill)
    for problem in problems.values():
        raise ValueError(problem)
    if device is not None and must_fill:
        if options.get("device_id") is None:
            options["device_id"] = torch.device(device)
    elif device is not None:
        model.to(device)
    return wrapper, options


def takes_mesh(wrapper: Callable[..., nn.Module]) -> bool:
    """Return whether ``wrapper`` shards the model over the ranks of a mesh, as fsdp does."""
    return _takes(wrapper, "mesh")


def needs_process_group(wrapper: Callable[..., nn.Module]) -> bool:
    """Return whether ``wrapper`` needs a process group even if there is only one process."""
    if takes_mesh(wrapper):
        return True
    grouped = isinstance(wrapper, type) and issubclass(wrapper, _IN_GROUPS)
    return grouped and wrapper.train_step is not ModelWrapper.train_step  # type: ignore[attr-defined]


def wrapper_problems(
    wrapper: Callable[..., nn.Module] | None,
    data_size: int,
    axes: Collection[str] = (),
    *,
    is_meta: bool = False,
) -> dict[str, str]:
    """Return why ``wrapper`` cannot run: one reason for each setting that must change.

    Args:
        data_size: number of ranks that see different batches.
        axes: axes of the mesh.
        is_meta: whether parameters of the model are on the meta device.
    """
    if wrapper is auto:
        return {}
    wrapper = wrapper or _default(data_size)
    name, problems = getattr(wrapper, "__name__", repr(wrapper)), {}
    kinds = wrapper if isinstance(wrapper, type) else nn.Module
    if data_size > 1 and issubclass(kinds, (SingleDevice, DataParallel)):
        problems["wrapper.type"] = (
            f"{name} works in one process only, got {data_size} processes with different batches; "
            "use ddp, or launch.nproc=1"
        )
    elif "tensor" in axes and issubclass(kinds, DataParallel):
        problems["wrapper.type"] = f"{name} cannot copy a model that is split over ranks"
    if not takes_mesh(wrapper):
        if {"replicate", "shard"} & set(axes):
            problems["mesh"] = (
                f"{name} does not shard the model, so the mesh must have a data axis instead of "
                "replicate and shard; or use fsdp"
            )
        if is_meta:
            problems["init_device"] = (
                f"the model has parameters on the meta device, which {name} cannot fill; use fsdp"
            )
    return problems


def _default(data_size: int) -> type[nn.Module]:
    return StepDistributedDataParallel if data_size > 1 else SingleDevice


def _takes(wrapper: Any, name: str) -> bool:
    if hasattr(wrapper, "config_signature"):
        return name in wrapper.config_signature().parameters
    return name in inspect.signature(wrapper).parameters


def _wrapped_already(model: Any, has_options: bool) -> ModelWrapper:
    if has_options:
        raise TypeError(
            f"the model is already wrapped in {type(model).__name__}: give the bare model, "
            "or leave out the wrapper, its options and train_step"
        )
    if not hasattr(model, "train_step"):
        raise TypeError(
            f"{type(model).__name__} has no train_step: give the bare model to wrap_model"
        )
    wrapped: ModelWrapper = model
    return wrapped


def _wrapped(
    wrapper: Any,
    model: nn.Module,
    mesh: Mesh,
    options: dict[str, Any],
    train_step: StepFunction | None,
) -> Any:
    in_group = isinstance(wrapper, type) and issubclass(wrapper, _IN_GROUPS)
    if in_group and not distributed_available():
        if needs_process_group(wrapper):
            raise RuntimeError(
                f"{wrapper.__name__} defines train_step and needs a process group; start several "
                "processes, or write the step as a subclass of SingleDevice"
            )
        if issubclass(wrapper, SeparateDistributedDataParallel):
            check_children(model)
        wrapper, options = SingleDevice, _options_of_single(options)
    elif mesh.device_mesh is not None and takes_mesh(wrapper):
        options = {"mesh": mesh, **options}
    elif mesh.data_group is not None and _takes(wrapper, "process_group"):
        options = {"process_group": mesh.data_group, **options}
    wrapper = with_train_step(wrapper, train_step) if train_step else wrapper
    wrapped = wrapper(model, **options)
    if isinstance(wrapped, ModelWrapper) and wrapped.data_group is None:
        wrapped.data_group = mesh.data_group
    return wrapped


@MODEL_WRAPPERS.register_module(name="auto")
def auto(
    module: nn.Module,
    *,
    memory_gib: float | None = None,
    optimizer_states: int = 2,
    single: Mapping[str, Any] | None = None,
    ddp: Mapping[str, Any] | None = None,
    fsdp: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Wrap a model by ``single``, ``ddp`` or ``fsdp``, and log the reason for the choice.

    Every rank must call this. The choice is ``fsdp`` if parameters are on the meta device or the
    mesh has a shard axis, and ``single`` if all ranks see the same batches. Otherwise it is ``ddp``
    if a whole copy of the model fits into the memory of each rank, and ``fsdp`` if not. A copy
    under ddp needs this many bytes::

        w + 2 g + s g

        w      weights and buffers
        g      weights of trained parameters; their gradients and the buckets in which ddp sends the
               gradients have the same size
        s      number of optimizer states per parameter

    Under fsdp each of n ranks needs (w + g + s g) / n, and memory for the gathered blocks.

    Args:
        memory_gib: memory of each rank for weights, gradients and optimizer state, in 2**30 bytes.
            Default: 70% of the free memory of the rank that has the least. Ranks on the same CUDA
            device, or on the CPU of the same machine, share its free memory equally.
        optimizer_states: tensors that the optimizer keeps per parameter: 2 for Adam, 1 for SGD with
            momentum.
        single: options of ``SingleDevice``, used if it is chosen.
        ddp: options of ``StepDistributedDataParallel``.
        fsdp: options of ``StepFullyShardedDataParallel``.

    Raises:
        TypeError: an option of ``single``, ``ddp`` or ``fsdp`` is unknown.
    """
    options = {"memory_gib": memory_gib, "optimizer_states": optimizer_states}
    tables = {"single": single, "ddp": ddp, "fsdp": fsdp}
    wrapper, chosen = _choose(module, Mesh({"data": get_world_size()}), {**options, **tables})
    return wrapper(module, **chosen)


def _choose(
    model: nn.Module,
    mesh: Mesh,
    options: Mapping[str, Any],
    *,
    device: torch.device | str | None = None,
    split: Collection[nn.Parameter] = (),
) -> tuple[type[nn.Module], dict[str, Any]]:
    """Return a wrapper for ``model`` and its options; every rank must call this.

    Args:
        options: the options of ``auto``.
        device: the future device of the model.
        split: the parameters that will be split over the tensor group.
    """
    check_options("auto", options, [name for name in option_names(auto) if name != "module"])
    for name in _WRAPPERS:
        if options.get(name):
            _wrapper(name).check_options(options[name])
    if "shard" in mesh.axes:
        name, why = "fsdp", "the mesh has a shard axis"
    elif any(one.is_meta for one in model.parameters()):
        name, why = "fsdp", "the parameters are on the meta device"
    elif mesh.data_size == 1:
        name, why = "single", "there is one data rank"
    else:
        states = options.get("optimizer_states", 2)
        needed = _copy_bytes(model, split, mesh.tensor_size, states) / _GIB
        limit, source = options.get("memory_gib"), "memory_gib"
        if limit is None:
            device = get_device(model) if device is None else torch.device(device)
            limit = _least_available(device) * _USABLE / _GIB
            source = f"{_USABLE:.0%} of the free memory"
        name = "ddp" if needed <= limit else "fsdp"
        why = (
            f"a copy needs {needed:.3g} GiB (weights, gradients and their buckets, {states} "
            f"optimizer states) and each of {mesh.data_size} data ranks has {limit:.3g} GiB "
            f"({source})"
        )
    if get_rank() == 0:
        logger.info("wrapper: %s, because %s", name, why)
    return _wrapper(name), dict(options.get(name) or {})


def _wrapper(name: str) -> Any:
    if name == "fsdp":
        # Imported lazily, because it loads large parts of torch.
        from .fsdp.fully_sharded import StepFullyShardedDataParallel

        return StepFullyShardedDataParallel
    return SingleDevice if name == "single" else StepDistributedDataParallel


def _copy_bytes(
    model: nn.Module, split: Collection[nn.Parameter], tensor_size: int, states: int
) -> float:
    """Return the bytes of a whole copy under ddp, with gradients and optimizer state."""
    over_ranks = {id(one) for one in split}
    total = float(sum(buffer.nbytes for buffer in model.buffers()))
    for parameter in model.parameters():
        size = parameter.nbytes / (tensor_size if id(parameter) in over_ranks else 1)
        total += size * (1 + 2 + states if parameter.requires_grad else 1)
    return total


def _least_available(device: torch.device) -> float:
    """Return the smallest free memory of a rank in bytes; every rank must call this.

    Ranks on the same CUDA device or, on the CPU, on the same machine share its memory equally.
    """
    place = socket.gethostname()
    if device.type == "cuda":
        place = str(torch.cuda.get_device_properties(device).uuid)
    gathered = all_gather_object((place, free_memory(device)))
    ranks_at = collections.Counter(place for place, _ in gathered)
    return min(free / ranks_at[place] for place, free in gathered)
