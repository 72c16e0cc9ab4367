"""The bits of tensors: as bytes, for digests, compared, and as many as a device has."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

# Types of devices that always have float64. The others are asked, which a compiler cannot trace.
WITH_FLOAT64 = ["cpu", "cuda", "meta"]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_bytes(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor as flat uint8; if it is contiguous, in its memory."""
    # Not view(-1): with a single element it may keep a stride other than 1.
    return _plain(tensor).contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def same_bits(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two dense tensors have the same dtype, shape and bits, so NaN equals itself.

    Both must be on the same device.
    """
    if tensor.dtype != other.dtype or tensor.shape != other.shape:
        return False
    integers = _INTEGERS.get(tensor.element_size())
    if integers is None:
        return torch.equal(tensor_bytes(tensor), tensor_bytes(other))
    # Integers of the same size are compared without a copy, whatever the strides.
    return torch.equal(_plain(tensor).view(integers), _plain(other).view(integers))


def widest_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 if the device has no float64 (MPS, some XPUs)."""
    return torch.float64 if device.type in WITH_FLOAT64 else _widest_float(device)


@functools.cache
def _widest_float(device: torch.device) -> torch.dtype:
    try:
        torch.zeros((), dtype=torch.float64, device=device).add_(1.0)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def widened(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in the widest float of its device."""
    return tensor.to(widest_float(tensor.device))


def as_float(tensor: Tensor) -> Tensor:
    """Return integers and booleans in the widest float of the device, other tensors as they are."""
    return tensor if tensor.is_floating_point() or tensor.is_complex() else widened(tensor)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg()
