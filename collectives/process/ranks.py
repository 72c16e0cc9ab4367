"""Rank and world size of this process, and the device on which it communicates."""

import contextlib
import functools
import hashlib
import logging
import os
import socket
import time
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

# Import this module before any group exists, because DistributedDataParallel imports it later. Its
# default arguments keep alive the default group that exists during the import, with its threads.
import torch.distributed.nn.functional

from ..errors import CollectiveError, Group
from .slurm import slurm_tasks

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_HOST_KEY = "stepwrap/host"
_POLL_S = 0.02
_local_ranks: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def distributed_available() -> bool:
    """Return whether a default process group exists in this process."""
    return dist.is_available() and dist.is_initialized()


def get_rank(group: Group = None) -> int:
    """Return this process's rank in the group, -1 if it is not a member.

    Without a process group it is the launcher's RANK or, in a task of srun, SLURM_PROCID; otherwise
    the local rank, or 0. If the process group and the environment disagree, the group's rank is
    returned and a warning is logged once.
    """
    if not distributed_available():
        rank = _integer("RANK")
        if rank is None and slurm_tasks(os.environ):
            rank = _integer("SLURM_PROCID")
        return (_environment_local_rank() or 0) if rank is None else rank
    live = dist.get_rank(group)
    if group is None:
        _warn_if_different("RANK", live)
    return live


def get_world_size(group: Group = None) -> int:
    """Return the number of ranks in the group, -1 if this process is not a member.

    Without a process group it is the launcher's WORLD_SIZE or, in a task of srun, the number of its
    tasks; otherwise 1.
    """
    if not distributed_available():
        size = _integer("WORLD_SIZE")
        return slurm_tasks(os.environ) or 1 if size is None else size
    live = dist.get_world_size(group)
    if group is None:
        _warn_if_different("WORLD_SIZE", live)
    return live


def get_local_rank() -> int:
    """Return this process's rank on its host; 0 without a process group and a launcher.

    The first of these that exists is used: LOCAL_RANK, SLURM_LOCALID (if srun has started several
    tasks), the rank modulo LOCAL_WORLD_SIZE, the host names of the group's ranks. If host names are
    used, every rank must call this: the first call exchanges them through the group's store and
    waits until all lower ranks have called it.

    Raises:
        CollectiveError: lower ranks have not called it within the store's timeout; it names them.
    """
    local_rank = launched_local_rank()
    if local_rank is not None:
        return local_rank
    world = dist.group.WORLD if distributed_available() else None
    if world is None:
        return 0
    if world not in _local_ranks:
        _local_ranks[world] = _count_on_this_host(world)
    return _local_ranks[world]


def launched_local_rank() -> int | None:
    """Return the local rank from the launcher's environment, None if it is not set."""
    local_rank = _environment_local_rank()
    per_host = _integer("LOCAL_WORLD_SIZE")
    if local_rank is None and per_host:
        return get_rank() % per_host
    return local_rank


def live_world_size(group: Group = None) -> int:
    """Return the size of the group, 1 without a process group; raise ValueError on non-members."""
    if not distributed_available():
        return 1
    world_size = dist.get_world_size(group)
    if world_size < 0:
        raise ValueError(f"rank {dist.get_rank()} is not a member of the group and cannot use it")
    return world_size


def members(group: Group = None) -> list[int]:
    """Return the global ranks of the group's members, in group order; [0] without a group."""
    if not distributed_available():
        return [0]
    return dist.get_process_group_ranks(group)


def place_in_group(rank: int, group: Group = None, name: str = "src") -> int:
    """Return the group rank of a global rank; raise ValueError if it is not in the group."""
    ranks = members(group)
    if rank not in ranks:
        raise ValueError(f"{name} must be a rank of the group {ranks}, got {rank}")
    return ranks.index(rank)


def comm_device(group: Group = None, *, prefer: torch.device | None = None) -> torch.device:
    """Return the device on which the group communicates; the CPU without a process group.

    Args:
        prefer: this device is returned if the group has a backend for its type. By default, or if
            it has none, the result is the first device type of the group's backend configuration.

    Raises:
        ValueError: this process is not a member of the group.
    """
    if not distributed_available():
        return torch.device("cpu")
    live_world_size(group)
    pairs = dist.get_backend_config(group).split(",")
    device_types = [pair.split(":")[0] for pair in pairs]
    if prefer is not None and prefer.type in device_types:
        return prefer
    if device_types[0] == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device_types[0])


def rank_zero_only(func: Callable[P, T]) -> Callable[P, T | None]:
    """Decorate a function to run on rank 0 only and return None on the other ranks.

    The rank is looked up at each call. Rank 0's result and errors are not sent to other ranks.
    """

    @functools.wraps(func)
    def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return func(*args, **kwargs) if get_rank() == 0 else None

    return on_rank_zero


def _count_on_this_host(world: dist.ProcessGroup) -> int:
    """Return the number of lower ranks on this host."""
    store = world.get_group_store()
    # Containers on one machine share its boot id, but not its name.
    host = f"{socket.gethostname()} {_BOOT.read_text().strip() if _BOOT.exists() else ''}"
    store.set(f"{_HOST_KEY}/{world.rank()}", host)
    keys = [f"{_HOST_KEY}/{rank}" for rank in range(world.rank())]
    limit = time.monotonic() + store.timeout.total_seconds()  # type: ignore[attr-defined]
    # Polls, because the store's own wait cannot be interrupted.
    while missing := [rank for rank, key in enumerate(keys) if not store.check([key])]:
        if time.monotonic() > limit:
            raise CollectiveError(
                "get_local_rank() without LOCAL_RANK must be called by every rank, but rank "
                f"{world.rank()} timed out waiting for rank {', '.join(map(str, missing))}"
            )
        time.sleep(_POLL_S)
    return sum(store.get(key).decode() == host for key in keys)


def process_space() -> bytes:
    """Return 8 bytes that are the same in two processes if each can see the other in /proc."""
    with contextlib.suppress(OSError):
        return _process_space()
    # Random bytes, because there is no /proc, or no file can be opened now.
    return uuid.uuid4().bytes[:8]


@functools.cache
def _process_space() -> bytes:
    space = f"{_BOOT.read_text()} {os.readlink('/proc/self/ns/pid')}"
    return hashlib.blake2b(space.encode(), digest_size=8).digest()


def _integer(variable: str) -> int | None:
    """Return the variable as an integer, None if it is unset or empty."""
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(
            f"the environment variable {variable} must be an integer, got {text!r}"
        ) from error


def _environment_local_rank() -> int | None:
    local_rank = _integer("LOCAL_RANK")
    # The only task of a step may have started the ranks of a group itself.
    if local_rank is None and slurm_tasks(os.environ) > 1:
        return _integer("SLURM_LOCALID")
    return local_rank


def _warn_if_different(variable: str, live: int) -> None:
    text = os.environ.get(variable)
    if text and text != str(live):
        _warn_once(f"{variable}={text} in the environment, but the process group has {live}")


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("%s; the value of the process group is used", text)
