"""Optimizers in the fastest implementation that torch has for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..sharding.layout import is_dtensor
from ..torch_functions import option_names
from .optimizer_fit import check_fit, tensors_of, walkable

# Who sets one of these has chosen an implementation, or asks for what fused ones cannot do.
_CHOICES = ("fused", "foreach", "capturable", "differentiable")


def build_optimizer(
    cls: Callable[..., Optimizer], params: Iterable[Any], **kwargs: Any
) -> Optimizer:
    """Build ``cls(params, **kwargs)``, fused where torch can.

    Args:
        cls: an optimizer class.
        params: parameters, ``(name, parameter)`` pairs or groups, as torch takes them.
        kwargs: further arguments; ``fused``, ``foreach``, ``capturable`` or
            ``differentiable`` among them leave the choice to the caller. Sparse gradients
            need ``fused=False``.

    Raises:
        ValueError: parameters are spread over the ranks, and ``cls`` needs them whole.
    """
    items = walkable(params)
    tensors = tensors_of(items)
    check_fit(cls, tensors)
    if "fused" in option_names(cls) and not any(name in kwargs for name in _CHOICES):
        kinds = {(tensor.device, tensor.dtype, _place(tensor)): tensor for tensor in tensors}
        if all(_can_fuse(cls, kwargs, tensor) for tensor in kinds.values()):
            kwargs["fused"] = True
    return cls(items, **kwargs)


def _place(tensor: Tensor) -> Any:
    """Where the parts of a sharded tensor are; None for an ordinary one."""
    return (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None


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
