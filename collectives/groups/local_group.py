"""The live process group and that of one host, under mmengine's names."""

import os
import weakref

import torch.distributed as dist

from ..objects.objects import all_gather_object
from ..process import ranks as process
from ..process.ranks import (
    distributed_available,
    get_rank,
    get_world_size,
    live_world_size,
    members,
)
from ..process.slurm import tasks_here
from ..tensors.barrier import synchronize
from ..trace.calling import calling

# The default group and the local one made in it: after a new start the old one is nobody's.
# Weakly: a group that is kept beyond its destruction keeps threads, which abort the exit.
_local: tuple[weakref.ref[dist.ProcessGroup], weakref.ref[dist.ProcessGroup]] | None = None


def is_distributed() -> bool:
    """Return whether a default process group exists in this process."""
    return distributed_available()


def get_default_group() -> dist.ProcessGroup | None:
    """Return the default process group, None without one."""
    return dist.group.WORLD if distributed_available() else None


def get_backend(group: dist.ProcessGroup | None = None) -> str | None:
    """Return the name of the group's backend in lower case, None without a group.

    A group with several has torch's way to write them, such as "cpu:gloo,cuda:nccl".

    Raises:
        ValueError: this process is no member of the group.
    """
    if not distributed_available():
        return None
    live_world_size(group)
    config = dist.get_backend_config(group).lower()
    names = {pair.split(":")[1] for pair in config.split(",")}
    return names.pop() if len(names) == 1 else config


def get_dist_info(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Return rank and world size, (-1, -1) when this process is no member of the group."""
    return get_rank(group), get_world_size(group)


def is_main_process(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether this process is the first of the group; always True without one."""
    return get_rank(group) == 0


def barrier(group: dist.ProcessGroup | None = None, timeout_s: float | None = None) -> None:
    """Wait until every rank of the group has come here; every one of them must call this.

    Raises:
        CollectiveError: not all ranks came within `timeout_s` (default: the group's timeout).
    """
    synchronize(timeout_s, group)


def init_local_group(node_rank: int, num_gpus_per_node: int) -> None:
    """Make the group of this host's ranks; every rank must call this.

    Args:
        node_rank: which host this is: ranks `node_rank * num_gpus_per_node` and on are on it.
        num_gpus_per_node: how many ranks each host has; the last one may have fewer.

    Raises:
        ValueError: on every rank, when the numbers differ between ranks or do not fit a rank.
    """
    global _local
    if not distributed_available():
        return
    _check_places(all_gather_object((node_rank, num_gpus_per_node)))
    ranks, world = members(), get_default_group()
    assert world is not None
    # Every rank makes the groups of all hosts: torch names a group by counting the calls.
    with calling("init_local_group"):
        for start in range(0, len(ranks), num_gpus_per_node):
            own = ranks[start : start + num_gpus_per_node]
            group = dist.new_group(own)
            if dist.get_rank() in own:
                _local = weakref.ref(world), weakref.ref(group)


def get_local_group() -> dist.ProcessGroup | None:
    """Return the group of this host's ranks, None without a process group.

    Raises:
        RuntimeError: `init_local_group` has not been called.
    """
    if not distributed_available():
        return None
    group = _live_local_group()
    if group is None:
        raise RuntimeError("there is no local group yet: call init_local_group() on all ranks")
    return group


def get_local_size() -> int:
    """Return the number of ranks on this host, 1 without a process group.

    Asked in this order: the local group, LOCAL_WORLD_SIZE, SLURM and Open MPI.

    Raises:
        RuntimeError: nothing of this is there.
    """
    if not distributed_available():
        return 1
    group = _live_local_group()
    if group is not None:
        return dist.get_world_size(group)
    text = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    size = int(text) if text else tasks_here(os.environ)
    if size is None:
        raise RuntimeError(
            "the number of ranks on this host is not known: call init_local_group() on all ranks "
            "or set LOCAL_WORLD_SIZE"
        )
    return size


def get_local_rank() -> int:
    """Return this process's rank on its host.

    Asked in this order: the local group, then what `stepwrap.collectives.get_local_rank` asks,
    which every rank may have to call.
    """
    group = _live_local_group()
    return process.get_local_rank() if group is None else dist.get_rank(group)


def _live_local_group() -> dist.ProcessGroup | None:
    if _local is None or not distributed_available() or _local[0]() is not dist.group.WORLD:
        return None
    return _local[1]()


def _check_places(places: list[tuple[int, int]]) -> None:
    size = places[0][1]
    for rank, (node, own_size) in enumerate(places):
        if own_size < 1 or own_size != size:
            raise ValueError(
                "num_gpus_per_node must be the same positive number on all ranks, "
                f"got {size} on rank 0 and {own_size} on rank {rank}"
            )
        if node != rank // size:
            raise ValueError(
                f"node_rank must be {rank // size} on rank {rank} with {size} ranks per node, "
                f"got {node}"
            )
