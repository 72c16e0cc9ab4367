"""Timeouts of process groups.

Uses names of torch without documentation; torch has no public way to read a group's timeout.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# NCCL ends the process at its timeout. Later than other transports, so that an error of theirs,
# which names the missing rank, comes first.
_NCCL_DELAY = timedelta(seconds=60)


def delay_nccl(group: dist.ProcessGroup | None = None) -> None:
    """Let NCCL time out a minute after the other transports of ``group`` (default: all ranks)."""
    for backend in _backends(group or dist.group.WORLD):
        if backend.name() == "nccl":
            backend._set_default_timeout(backend.options._timeout + _NCCL_DELAY)


def inherit_timeout(group: Any) -> None:
    """Give ``group`` the timeouts of the group of all ranks, which torch does not.

    Nothing is done on ranks outside of ``group``.
    """
    if not isinstance(group, dist.ProcessGroup):
        return
    timeouts = {backend.name(): backend.options._timeout for backend in _backends(dist.group.WORLD)}
    for backend in _backends(group):
        if backend.name() in timeouts:
            backend._set_default_timeout(timeouts[backend.name()])


def _backends(group: Any) -> Iterator[Any]:
    """Yield the backends of a group that have a timeout."""
    for kind in ("cpu", "cuda"):
        if torch.device(kind) in group._device_types:
            backend = group._get_backend(torch.device(kind))
            if hasattr(backend, "options") and hasattr(backend, "_set_default_timeout"):
                yield backend
