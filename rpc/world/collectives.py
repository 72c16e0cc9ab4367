"""The default process group that a world makes where there is none."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ...collectives import forget_meshes


def start_collectives(
    store: Store, rank: int, world_size: int, backend: str, timeout_s: float
) -> None:
    """Make the default process group; every member must call this."""
    dist.init_process_group(
        backend,
        store=PrefixStore("dist", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def end_collectives(group: dist.ProcessGroup | None) -> None:
    """End the default group, unless its user has ended it already or made another one since."""
    if dist.is_initialized() and dist.group.WORLD is group:
        forget_meshes()
        dist.destroy_process_group(group)
