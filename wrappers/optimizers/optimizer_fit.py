"""Which optimizers can step which parameters, and in the fastest implementation that torch has.

Most step each element by itself, so that the parts of a tensor can be stepped apart. What is
said here of torch's others was found by comparing them with one process.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.optim import Optimizer

from ..sharding.layout import holders, is_dtensor, is_placed, layout_of, local_part
from ..torch_functions import option_names

# Who sets one of these has chosen an implementation, or asks for what fused ones cannot do.
IMPLEMENTATIONS = ("fused", "foreach", "capturable", "differentiable")
_INSTEAD = "use AdamW, SGD or another optimizer that steps each element by itself"


def build_optimizer(
    cls: Callable[..., Optimizer], params: Iterable[Any], **kwargs: Any
) -> Optimizer:
    """Build ``cls(params, **kwargs)``, fused where torch can.

    Args:
        params: parameters, ``(name, parameter)`` pairs or groups, as torch takes them.
        kwargs: further arguments; ``fused``, ``foreach``, ``capturable`` or ``differentiable``
            among them leave the choice to the caller. Sparse gradients need ``fused=False``.

    Raises:
        ValueError: parameters are spread over the ranks, and ``cls`` needs them whole.
    """
    items = walkable(params)
    tensors = tensors_of(items)
    check_fit(cls, tensors)
    if "fused" in option_names(cls) and not any(name in kwargs for name in IMPLEMENTATIONS):
        kinds = {}
        for one in tensors:
            place = (one.device_mesh, one.placements) if is_dtensor(one) else None
            kinds[one.device, one.dtype, place] = one
        if all(_can_fuse(cls, kwargs, tensor) for tensor in kinds.values()):
            kwargs["fused"] = True
    return cls(items, **kwargs)


def _can_fuse(cls: Callable[..., Optimizer], kwargs: dict[str, Any], like: Tensor) -> bool:
    """Try it: some classes say only at their first step that they cannot."""
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


def walkable(params: Iterable[Any]) -> list[Any]:
    """Return parameters, pairs or groups, as torch takes them, so that they can be walked twice."""
    items = list(params)
    for at, item in enumerate(items):
        if isinstance(item, dict):
            params = item["params"]
            items[at] = {**item, "params": params if isinstance(params, Tensor) else list(params)}
    return items


def tensors_of(items: Iterable[Any]) -> list[Tensor]:
    """Return the parameters in what `walkable` returned."""
    found: list[Tensor] = []
    for item in items:
        if isinstance(item, dict):
            params = item["params"]
            found += [params] if isinstance(params, Tensor) else tensors_of(params)
        else:
            found.append(item if isinstance(item, Tensor) else item[1])
    return found


def needs_closure(cls: Any) -> bool:
    """Whether a step of ``cls`` must be given a function that computes the loss again."""
    try:
        closure = inspect.signature(cls.step).parameters.get("closure")
    except (AttributeError, TypeError, ValueError):
        return False
    return closure is not None and closure.default is closure.empty


def check_fit(cls: Any, tensors: Sequence[Tensor]) -> None:
    """Raise ValueError where ``cls`` would step these parameters wrongly, or not at all."""
    for gathered in (holder.gathered(tensors) for holder in list(holders)):
        if gathered is not None:
            raise ValueError(
                f"a parameter of shape {tuple(gathered.shape)} is there for a forward of fsdp "
                "only, and no step would change its shards: make the optimizer of "
                "wrapper.parameters(), or after reshard(wrapper)"
            )
    placed = [one for one in tensors if is_placed(one)]
    if not placed:
        return
    for base in getattr(cls, "__mro__", ()):
        # By name: importing some of these takes half a second.
        if base.__module__.startswith(("torch.optim", "torch.distributed.optim")):
            why, misfits = _MISFITS.get(base.__name__, ("", ()))
            for told in filter(None, (misfit(placed) for misfit in misfits)):
                raise ValueError(f"{cls.__name__} {why}, but {told}; {_INSTEAD}")


def check_group(cls: Any, tensors: Iterable[Tensor], group: ProcessGroup | None) -> None:
    """Raise ValueError where ranks that work together by ``cls`` have different parameters.

    Args:
        group: the ranks; None for all.
    """
    known: dict[ProcessGroup, bool] = {}
    for tensor in tensors:
        for over in layout_of(tensor).sharded_over if is_placed(tensor) else ():
            if over not in known:
                ranks = set(get_process_group_ranks(group))
                known[over] = len(ranks & set(get_process_group_ranks(over))) > 1
            if known[over]:
                raise ValueError(
                    f"{cls.__name__} works together over ranks that hold different parts of a "
                    f"parameter of shape {layout_of(tensor).shape}: give "
                    "process_group=wrapper.data_group (build_mesh(...).data_group), the ranks "
                    "that hold the same part"
                )


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer that an optimizer wrapper cannot step."""
    inner: Any = getattr(optimizer, "optim", optimizer)
    tensors = tensors_of(optimizer.param_groups)
    for cls in dict.fromkeys((type(optimizer), type(inner))):
        if inner is not optimizer and needs_closure(cls):
            raise ValueError(
                f"{type(optimizer).__name__} cannot step by {cls.__name__}, which needs a closure "
                "and takes all parameters as one vector"
            )
        check_fit(cls, tensors)
    if inner is not optimizer:
        # Those of torch that work together over ranks say which, or their averager does.
        owner = getattr(optimizer, "averager", optimizer)
        check_group(type(optimizer), tensors, getattr(owner, "process_group", None))


def _split(tensors: Sequence[Tensor]) -> str | None:
    layouts = [layout_of(one) for one in tensors if not is_dtensor(one)]
    shapes = [one.shape for one in layouts if one.sharded_over]
    return f"a parameter of shape {shapes[0]} is split by tensor_parallel" if shapes else None


def _dtensor(tensors: Sequence[Tensor]) -> str | None:
    shapes = [tuple(one.shape) for one in tensors if is_dtensor(one)]
    return f"a parameter of shape {shapes[0]} is a DTensor (fsdp)" if shapes else None


def _uneven(tensors: Sequence[Tensor]) -> str | None:
    for one in filter(is_dtensor, tensors):
        pairs = zip(one.placements, one.device_mesh.shape, strict=True)
        count = math.prod(size for placement, size in pairs if not placement.is_replicate())
        if local_part(one).numel() * count != one.numel():
            shape = tuple(one.shape)
            return f"a parameter of shape {shape} cannot be shared out evenly over {count} ranks"
    return None


def _two_meshes(tensors: Sequence[Tensor]) -> str | None:
    meshes = {one.device_mesh for one in tensors if is_dtensor(one)}
    return "parameters are spread over different ranks" if len(meshes) > 1 else None


_Misfit: TypeAlias = Callable[[Sequence[Tensor]], str | None]
_MISFITS: dict[str, tuple[str, tuple[_Misfit, ...]]] = {
    "Adafactor": ("scales by norms of whole tensors and of their rows", (_split, _dtensor)),
    "LBFGS": ("takes all parameters as one vector", (_split, _uneven, _two_meshes)),
    "Muon": ("orthogonalises whole matrices", (_split, _uneven)),
    "PostLocalSGDOptimizer": ("averages copies of parameters, and fsdp keeps none", (_dtensor,)),
    "Rprop": ("picks elements by signs, which torch cannot do in DTensors", (_dtensor,)),
    "SparseAdam": ("needs sparse gradients, which no part has", (_split, _dtensor)),
    "ZeroRedundancyOptimizer": ("shares out the state, as fsdp does without it", (_dtensor,)),
}
