"""The bits of tensors: as bytes, for digests, and compared, for results that must be identical."""

from __future__ import annotations

import torch
from torch import Tensor

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


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg()
