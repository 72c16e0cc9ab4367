"""Build optimizers with fused kernels, and check whether an optimizer can update given parameters.

Most optimizers update each element independently, so they can update a part of a tensor. For
torch's other optimizers, ``_UNSUPPORTED`` lists the layouts of parameters that they cannot update,
and why. The list comes from comparing sharded updates with updates in one process.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.optim import Optimizer

from ..layout import (
    fsdp_roots,
    get_layout,
    is_dtensor,
    is_dtensor_or_localised,
    local_part,
)
from ..torch_functions import option_names

# Arguments of torch's optimizers that select an implementation.
IMPLEMENTATIONS = ("fused", "foreach", "capturable", "differentiable")
_INSTEAD = "use AdamW, SGD or another optimizer that updates each element independently"


def build_optimizer(
    cls: Callable[..., Optimizer], params: Iterable[Any], **kwargs: Any
) -> Optimizer:
    """Build ``cls(params, **kwargs)``, with ``fused=True`` if torch supports it.

    Parameters that are slices of larger tensors get no fused kernels, because these would write
    between their elements.

    Args:
        cls: an optimizer class.
        params: parameters, ``(name, parameter)`` pairs or groups, as torch accepts them.
        kwargs: further arguments. If they contain ``fused``, ``foreach``, ``capturable`` or
            ``differentiable``, nothing is added. Sparse gradients need ``fused=False``.

    Raises:
        ValueError: parameters are sharded over the ranks, and ``cls`` needs whole tensors.
    """
    listed = listed_params(params)
    tensors = get_tensors(listed)
    check_fit(cls, tensors)
    if "fused" in option_names(cls) and not any(name in kwargs for name in IMPLEMENTATIONS):
        kinds = {}
        for tensor in tensors:
            sharding = (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None
            kinds[tensor.device, tensor.dtype, sharding] = tensor
        can_fuse = (_can_fuse(cls, kwargs, tensor) for tensor in kinds.values())
        if all(map(_is_dense, tensors)) and all(can_fuse):
            kwargs["fused"] = True
    return cls(listed, **kwargs)


def _can_fuse(cls: Callable[..., Optimizer], kwargs: dict[str, Any], like: Tensor) -> bool:
    """Return whether a step with ``fused=True`` works; some classes raise only in a step."""
    probe = torch.zeros((1,) * like.ndim, device=like.device, dtype=like.dtype)
    if is_dtensor(like):
        from torch.distributed.tensor import DTensor

        probe = DTensor.from_local(probe, like.device_mesh, like.placements, run_check=False)
    probe.requires_grad_()
    probe.grad = torch.zeros_like(probe)
    try:
        cls([probe], **kwargs, fused=True).step()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor fill its memory without gaps or overlaps."""
    local = local_part(tensor)
    # Only then does torch give a new tensor the same strides.
    return torch.empty_like(local, device="meta").stride() == local.stride()


def _fused_on_cpu(optimizer: Any) -> Iterator[Tensor]:
    """Yield the parameters that torch's fused kernels for CPUs update.

    These kernels pair the elements of parameters, gradients and state by their position in memory,
    and do not compare strides. The kernels for GPUs raise an error instead.
    """
    for group in optimizer.param_groups:
        if group.get("fused"):
            yield from (param for param in group["params"] if param.device.type == "cpu")


@torch.no_grad()
def align_fused_state(optimizer: Any) -> None:
    """Give the state of parameters with fused updates the memory layout of the parameters."""
    for parameter in _fused_on_cpu(optimizer):
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            is_like = isinstance(value, Tensor) and value.shape == parameter.shape
            if is_like and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def check_fused_gradients(optimizer: Any) -> None:
    """Raise ValueError if gradients of fused updates have another layout than their parameters.

    With a custom step, gradients may have any layout.
    """
    for parameter in _fused_on_cpu(optimizer):
        gradient = parameter.grad
        if gradient is not None and gradient.stride() != parameter.stride():
            raise ValueError(
                f"fused=True of {type(optimizer).__name__} needs gradients with the memory layout "
                f"of their parameters, but a parameter of shape {tuple(parameter.shape)} has the "
                f"strides {parameter.stride()} and its gradient {gradient.stride()}; torch would "
                "update the wrong elements. Set fused=False, or make the parameter contiguous"
            )


def listed_params(params: Iterable[Any]) -> list[Any]:
    """Return parameters, pairs or groups as lists, because iterators can be read only once."""
    listed = list(params)
    for at, entry in enumerate(listed):
        if isinstance(entry, dict):
            params = entry["params"]
            listed[at] = {**entry, "params": params if isinstance(params, Tensor) else list(params)}
    return listed


def get_tensors(entries: Iterable[Any]) -> list[Tensor]:
    """Return all parameters in a list of parameters, ``(name, parameter)`` pairs or groups."""
    tensors: list[Tensor] = []
    for entry in entries:
        if isinstance(entry, dict):
            params = entry["params"]
            tensors += [params] if isinstance(params, Tensor) else get_tensors(params)
        else:
            tensors.append(entry if isinstance(entry, Tensor) else entry[1])
    return tensors


def needs_closure(cls: Any) -> bool:
    """Return whether ``step`` of ``cls`` requires a closure that computes the loss again."""
    try:
        closure = inspect.signature(cls.step).parameters.get("closure")
    except (AttributeError, TypeError, ValueError):
        return False
    return closure is not None and closure.default is closure.empty


def check_fit(cls: Any, tensors: Sequence[Tensor]) -> None:
    """Raise ValueError if ``cls`` cannot update these parameters, or would update them wrongly."""
    for gathered in (root.gathered(tensors) for root in list(fsdp_roots)):
        if gathered is not None:
            raise ValueError(
                f"a parameter of shape {tuple(gathered.shape)} is a temporary unsharded view of "
                "fsdp, and an update would not change its shards: create the optimizer with "
                "wrapper.parameters(), or after reshard(wrapper)"
            )
    placed = [tensor for tensor in tensors if is_dtensor_or_localised(tensor)]
    if not placed:
        return
    for base in getattr(cls, "__mro__", ()):
        # Compared by name, because importing some of these classes takes half a second.
        if base.__module__.startswith(("torch.optim", "torch.distributed.optim")):
            why, finders = _UNSUPPORTED.get(base.__name__, ("", ()))
            for problem in filter(None, (find(placed) for find in finders)):
                raise ValueError(f"{cls.__name__} {why}, but {problem}; {_INSTEAD}")


def check_group(cls: Any, tensors: Iterable[Tensor], group: ProcessGroup | None) -> None:
    """Raise ValueError if the ranks of ``group`` hold different parts of a parameter.

    Args:
        cls: an optimizer that communicates between these ranks.
        group: the ranks; None for all.
    """
    for tensor in filter(is_dtensor_or_localised, tensors):
        for over in get_layout(tensor).sharded_over:
            ranks = set(get_process_group_ranks(group))
            if len(ranks & set(get_process_group_ranks(over))) > 1:
                raise ValueError(
                    f"{cls.__name__} needs ranks that hold the same parameters, but they hold "
                    f"different parts of a parameter of shape {get_layout(tensor).shape}: give "
                    "process_group=wrapper.data_group (build_mesh(...).data_group), the ranks "
                    "that hold the same part"
                )


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer that an optimizer wrapper cannot use."""
    inner: Any = getattr(optimizer, "optim", optimizer)
    tensors = get_tensors(optimizer.param_groups)
    for cls in dict.fromkeys((type(optimizer), type(inner))):
        if inner is not optimizer and needs_closure(cls):
            raise ValueError(
                f"{type(optimizer).__name__} cannot use {cls.__name__}, which needs a closure "
                "and takes all parameters as one vector"
            )
        check_fit(cls, tensors)
    if inner is not optimizer:
        # ZeroRedundancyOptimizer has the process group itself, PostLocalSGD in its averager.
        owner = getattr(optimizer, "averager", optimizer)
        check_group(type(optimizer), tensors, getattr(owner, "process_group", None))


def _split(tensors: Sequence[Tensor]) -> str | None:
    layouts = [get_layout(tensor) for tensor in tensors if not is_dtensor(tensor)]
    shapes = [layout.shape for layout in layouts if layout.sharded_over]
    return f"a parameter of shape {shapes[0]} is split by tensor_parallel" if shapes else None


def _dtensor(tensors: Sequence[Tensor]) -> str | None:
    shapes = [tuple(tensor.shape) for tensor in tensors if is_dtensor(tensor)]
    return f"a parameter of shape {shapes[0]} is a DTensor (fsdp)" if shapes else None


def _uneven(tensors: Sequence[Tensor]) -> str | None:
    for tensor in filter(is_dtensor, tensors):
        pairs = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        count = math.prod(size for placement, size in pairs if not placement.is_replicate())
        if local_part(tensor).numel() * count != tensor.numel():
            shape = tuple(tensor.shape)
            return f"a parameter of shape {shape} cannot be sharded evenly over {count} ranks"
    return None


def _two_meshes(tensors: Sequence[Tensor]) -> str | None:
    meshes = {tensor.device_mesh for tensor in tensors if is_dtensor(tensor)}
    return "parameters are sharded over different ranks" if len(meshes) > 1 else None


_FindProblem: TypeAlias = Callable[[Sequence[Tensor]], str | None]
_UNSUPPORTED: dict[str, tuple[str, tuple[_FindProblem, ...]]] = {
    "Adafactor": ("scales by norms of whole tensors and of their rows", (_split, _dtensor)),
    "LBFGS": ("takes all parameters as one vector", (_split, _uneven, _two_meshes)),
    "Muon": ("orthogonalises whole matrices", (_split, _uneven)),
    "PostLocalSGDOptimizer": ("averages whole copies of the parameters", (_dtensor,)),
    "Rprop": ("selects elements by sign, which torch cannot do in DTensors", (_dtensor,)),
    "SparseAdam": ("needs sparse gradients, which parts do not have", (_split, _dtensor)),
    "ZeroRedundancyOptimizer": ("shards the state, as fsdp does already", (_dtensor,)),
}
