"""Telling torch's DTensors from other tensors without importing them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether ``value`` is a ``DTensor``."""
    # Importing them costs as much as half of torch; before somebody has, there is none.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def forget_former_groups() -> None:
    """Let operations on DTensors find the groups of a new world in this process.

    What torch remembers of an operation holds the mesh that it first ran on. A mesh of a world
    made later counts as equal to it, though its groups have other names. Not collective.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()
