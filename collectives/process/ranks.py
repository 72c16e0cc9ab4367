"""Who this process is among the ranks, and where it talks to them."""

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

# Its functions keep the default group that there is when it is imported, for good: the group's
# threads would outlive its end. torch imports it with the first DistributedDataParallel.
import torch.distributed.nn.functional

from ..errors import CollectiveError, Group

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
    """Return this process's rank in the group, -1 when it is no member.

    Without a process group the launcher's environment answers (RANK, then SLURM), else 0. The live
    group wins over an environment that says otherwise, with one warning.
    """
    if not distributed_available():
        rank = _of_the_launcher("RANK", "SLURM_PROCID")
        return (_environment_local_rank() or 0) if rank is None else rank
    live = dist.get_rank(group)
    if group is None:
        _compare("RANK", live)
    return live


def get_world_size(group: Group = None) -> int:
    """Return the number of ranks in the group, -1 when this process is no member.

    Without a process group the launcher's environment answers (WORLD_SIZE, then SLURM), else 1.
    """
    if not distributed_available():
        size = _of_the_launcher("WORLD_SIZE", "SLURM_NTASKS")
        return 1 if size is None else size
    live = dist.get_world_size(group)
    if group is None:
        _compare("WORLD_SIZE", live)
    return live


def get_local_rank() -> int:
    """Return this process's rank among those on its host, 0 without a group and a launcher.

    Asked in this order: LOCAL_RANK, SLURM_LOCALID, the live rank modulo LOCAL_WORLD_SIZE, the hosts
    of the live group. Of these the ranks tell each other through the group's store, once: the
    first call then waits until the ranks before this one have called it too.

    Raises:
        CollectiveError: some of them have not, within the store's timeout; it names them.
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
    """Return the local rank that the launcher's environment tells, None where it does not."""
    local_rank = _environment_local_rank()
    per_host = _integer("LOCAL_WORLD_SIZE")
    if local_rank is None and per_host:
        return get_rank() % per_host
    return local_rank


def live_world_size(group: Group = None) -> int:
    """Return the size of the live group, 1 without one; a ValueError if not a member."""
    if not distributed_available():
        return 1
    world_size = dist.get_world_size(group)
    if world_size < 0:
        raise ValueError(f"rank {dist.get_rank()} is no member of the group and cannot use it")
    return world_size


def members(group: Group = None) -> list[int]:
    """Return the global ranks of the group's members, in group order; [0] without a group."""
    if not distributed_available():
        return [0]
    return dist.get_process_group_ranks(group)


def place_in_group(rank: int, group: Group = None, name: str = "src") -> int:
    """Return the group rank of a global rank; a ValueError on argument `name` if it has none."""
    ranks = members(group)
    if rank not in ranks:
        raise ValueError(f"{name} must be a rank of the group {ranks}, got {rank}")
    return ranks.index(rank)


def comm_device(group: Group = None, *, prefer: torch.device | None = None) -> torch.device:
    """Return the device on which tensors travel in the group; the CPU without a group.

    Args:
        prefer: the data's own device, returned when the group has a backend for its type.
            Otherwise it is the first device type of the group's backend configuration.

    Raises:
        ValueError: this process is no member of the group.
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
    """Make a function run on rank 0 only and return None on the others.

    The rank is looked up at each call. Nothing is sent: rank 0's value and its errors stay there.
    """

    @functools.wraps(func)
    def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return func(*args, **kwargs) if get_rank() == 0 else None

    return on_rank_zero


def _count_on_this_host(world: dist.ProcessGroup) -> int:
    """Return how many ranks before this one are on its host."""
    store = world.get_group_store()
    host = _host()
    store.set(f"{_HOST_KEY}/{world.rank()}", host)
    keys = [f"{_HOST_KEY}/{rank}" for rank in range(world.rank())]
    limit = time.monotonic() + store.timeout.total_seconds()  # type: ignore[attr-defined]
    # Not by the store's own waiting, which cannot be interrupted.
    while missing := [rank for rank, key in enumerate(keys) if not store.check([key])]:
        if time.monotonic() > limit:
            raise CollectiveError(
                "get_local_rank() without LOCAL_RANK must be called by every rank; rank "
                f"{world.rank()} has waited in vain for that of rank {', '.join(map(str, missing))}"
            )
        time.sleep(_POLL_S)
    return sum(store.get(key).decode() == host for key in keys)


def process_space() -> bytes:
    """Return 8 bytes that two processes share when each can see the other in /proc."""
    with contextlib.suppress(OSError):
        return _process_space()
    # No /proc, or no file can be opened now.
    return uuid.uuid4().bytes[:8]


@functools.cache
def _process_space() -> bytes:
    space = f"{_BOOT.read_text()} {os.readlink('/proc/self/ns/pid')}"
    return hashlib.blake2b(space.encode(), digest_size=8).digest()


def _host() -> str:
    """Return what is the same on two ranks of one host: containers have names of their own."""
    return f"{socket.gethostname()} {_BOOT.read_text().strip() if _BOOT.exists() else ''}"


def _integer(variable: str) -> int | None:
    """Return the variable's value; unset and empty are None."""
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
    return _integer("SLURM_LOCALID") if local_rank is None else local_rank


def _of_the_launcher(variable: str, slurm: str) -> int | None:
    value = _integer(variable)
    # In `srun --pty bash` the SLURM variables describe the shell, not the processes started in it.
    if value is None and os.environ.get("SLURM_JOB_NAME") != "bash":
        return _integer(slurm)
    return value


def _compare(variable: str, live: int) -> None:
    text = os.environ.get(variable)
    if text and text != str(live):
        _warn_once(f"{variable}={text} in the environment, but the process group says {live}")


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("%s; the process group is believed", text)
