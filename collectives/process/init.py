"""Start the process group from a launcher's environment variables, and end it."""

import atexit
import gc
import ipaddress
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from operator import attrgetter
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout

from .ranks import get_local_rank
from .slurm import adopt_slurm, slurm_tasks

_MPI_VARIABLES: Final = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
_DEFAULT_PORT: Final = "29500"
# NCCL ends the process at its timeout. Later than other transports, so that an error of theirs,
# which names the missing rank, comes first.
_NCCL_DELAY: Final = timedelta(seconds=60)
_STORE_OPTIONS: Final = ("rank", "world_size", "timeout")
# Private functions of torch that clear DTensor's caches. These caches hold meshes, which hold
# groups. Other versions of torch may lack some of the functions.
_CACHE_CLEARERS = (
    ("debug", "_clear_sharding_prop_cache"),
    ("_redistribute", "clear_redistribute_planner_cache"),
    ("_redistribute", "_gen_transform_infos.cache_clear"),
    ("_collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
)


def infer_launcher() -> str:
    """Return the launcher of this process for ``init_dist``, inferred from the environment.

    It is "pytorch" if WORLD_SIZE is set, "slurm" for a task that srun has started, "mpi" for Open
    MPI's local rank, and otherwise "none". STEPWRAP_LAUNCHER=slurm or none overrides Slurm's
    variables.
    """
    env = os.environ
    if env.get("WORLD_SIZE"):
        return "pytorch"
    if slurm_tasks(env):
        return "slurm"
    return "mpi" if env.get("OMPI_COMM_WORLD_LOCAL_RANK") else "none"


def init_dist(
    launcher: str, backend: str | None = None, init_backend: str = "torch", **kwargs: Any
) -> None:
    """Start the default process group; every rank must call this.

    It also sets multiprocessing's start method to "spawn" if it is unset. For "slurm" (unless RANK
    is set) and "mpi", it sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT if they are unset; "mpi" sets MASTER_ADDR only if all ranks are on one host. If the
    backend's name contains "nccl" or "cuda", the local rank's GPU becomes the current one. A group
    that still exists when the process exits is destroyed.

    Args:
        launcher: "pytorch" (torchrun), "slurm", "mpi" (Open MPI) or "none", which starts nothing.
        backend: as for ``torch.distributed.init_process_group``. Default: NCCL for CUDA tensors
            and gloo for CPU tensors if each rank of this host has a GPU, otherwise gloo.
        init_backend: must be "torch".
        kwargs: ``timeout`` in seconds or as a timedelta; ``port`` for "slurm"; the rest is passed
            to ``torch.distributed.init_process_group``.

    Raises:
        ValueError: the launcher or init_backend is unknown, the backend is NCCL but there is no
            GPU, or the timeout is not positive.
        TypeError: the timeout is not a number of seconds.
        KeyError: the launcher has not set a variable; the text names it.
    """
    _check_settings(launcher, backend, init_backend)
    if "timeout" in kwargs:
        kwargs["timeout"] = _make_timedelta(kwargs["timeout"])
    if launcher == "none":
        return
    port = kwargs.pop("port", None) if launcher == "slurm" else None
    if port is not None:
        os.environ["MASTER_PORT"] = str(port)
    needed, adopt = _LAUNCHERS[launcher]
    _require(launcher, needed)
    adopt(os.environ)
    uses_master = "store" not in kwargs and kwargs.get("init_method") in (None, "env://")
    names = ["MASTER_ADDR", "MASTER_PORT"] if uses_master else []
    _require(launcher, names + [n for n in ("RANK", "WORLD_SIZE") if n.lower() not in kwargs])
    if multiprocessing.get_start_method(allow_none=True) is None:
        multiprocessing.set_start_method("spawn")
    if uses_master:
        kwargs.pop("init_method", None)
        kwargs |= meet_at_master(**{n: kwargs[n] for n in _STORE_OPTIONS if n in kwargs})
        name = backend or choose_backend(kwargs["store"], kwargs["rank"], kwargs["world_size"])
    else:
        name = backend or _default_backend()
    if "nccl" in name or "cuda" in name:
        torch.cuda.set_device(device_of_local_rank())
    dist.init_process_group(name, **kwargs)
    delay_nccl()


def meet_at_master(
    rank: int | None = None, world_size: int | None = None, timeout: timedelta = default_pg_timeout
) -> dict[str, Any]:
    """Return store, rank and world size for ``init_process_group``; every rank must call this.

    The store is torchrun's if torchrun shares its store; otherwise rank 0 opens one at MASTER_ADDR
    and MASTER_PORT. If all ranks are on this host, rank 0's store listens on the loopback interface
    only, and so does gloo on Linux unless GLOO_SOCKET_IFNAME is set.

    Args:
        rank: default: RANK.
        world_size: default: WORLD_SIZE.
        timeout: how long to wait for the other ranks.

    Raises:
        KeyError: a variable is not set; the text names it.
    """
    names = ["MASTER_ADDR", "MASTER_PORT"]
    names += [n for n, value in (("RANK", rank), ("WORLD_SIZE", world_size)) if value is None]
    _require("pytorch", names)
    env = os.environ
    rank = int(env["RANK"]) if rank is None else rank
    size = int(env["WORLD_SIZE"]) if world_size is None else world_size
    host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    one_host = all_on_one_host()
    if one_host and sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store: Store | None = agent_store(timeout)
    if store is not None:
        # The prefix keeps this attempt from reading keys of the attempt before a restart.
        store = PrefixStore(f"attempt_{env.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    else:
        options: dict[str, Any] = {"world_size": size, "timeout": timeout, "multi_tenant": True}
        if one_host and not is_loopback(host):
            host = "127.0.0.1"
        if one_host and rank == 0:
            store = open_store(host, port, **options)
        else:
            store = TCPStore(host, port, is_master=rank == 0, **options)
    return {"store": store, "rank": rank, "world_size": size}


def device_of_local_rank() -> torch.device:
    """Return the CUDA device of this rank: its local rank's, or the only one that it sees."""
    return torch.device("cuda", get_local_rank() % torch.cuda.device_count())


def choose_backend(store: Store, rank: int, world_size: int) -> str:
    """Return NCCL for CUDA tensors if no two ranks share a device; otherwise gloo for all.

    Every rank must call this with the same store. The ranks compare the identifiers of their
    devices, because a rank may see only its own device (Slurm, MIG).
    """
    if not dist.is_nccl_available():
        return "gloo"
    identifier = ""
    if torch.cuda.is_available():
        identifier = str(torch.cuda.get_device_properties(device_of_local_rank()).uuid)
    devices = PrefixStore("devices", store)
    devices.set(str(rank), identifier)
    identifiers = devices.multi_get([str(other) for other in range(world_size)])
    are_distinct = len(set(identifiers)) == world_size and b"" not in identifiers
    return "cpu:gloo,cuda:nccl" if are_distinct else "gloo"


def agent_store(timeout: timedelta = default_pg_timeout) -> TCPStore | None:
    """Connect to torchrun's store, which outlives a restart of the ranks.

    Returns None without torchrun, or if torchrun does not share its store.
    """
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    # Do not wait for workers: a store from before a restart has counted them already.
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def all_on_one_host() -> bool:
    """Return whether all ranks are on this host, according to the environment."""
    env = os.environ
    if env.get("LOCAL_WORLD_SIZE"):
        return env["LOCAL_WORLD_SIZE"] == env.get("WORLD_SIZE")
    return "MASTER_ADDR" in env and is_loopback(env["MASTER_ADDR"])


def is_loopback(host: str) -> bool:
    """Return whether a host name or address refers to the loopback interface only."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in addresses)


def open_store(host: str, port: int, **options: Any) -> TCPStore:
    """Open a store that listens at this address only; torch's default is all interfaces.

    Args:
        host: a host name or address.
        port: 0 picks a free port.
        options: passed to ``torch.distributed.TCPStore``.

    Raises:
        OSError: the address cannot be used.
    """
    # Looks up the host as torch's client does, so that both choose the same of several addresses.
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, port), family=family, backlog=1024)
    port = listener.getsockname()[1]
    # The store takes over the socket and closes it.
    return TCPStore(host, port, is_master=True, master_listen_fd=listener.detach(), **options)


def forget_meshes() -> None:
    """Clear DTensor's caches of meshes; call it before the default group ends."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    for module, clear in _CACHE_CLEARERS:
        with suppress(ImportError, AttributeError):
            attrgetter(clear)(import_module(f"torch.distributed.tensor.{module}"))()


def end_group() -> None:
    """Destroy the default group, if any, and objects that would keep its threads running.

    It also runs when the process exits. Otherwise a gloo thread may free its last tensor while the
    interpreter is finalized, which aborts the process ("terminate called without an active
    exception").
    """
    forget_meshes()
    # Frees wrappers in reference cycles now. If such a wrapper were freed later and owned the
    # group, its destructor would wait for the group's thread, which waits for the GIL.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


@atexit.register
def _end_group_at_exit() -> None:
    if dist.is_available() and dist.is_initialized():
        end_group()


def _adopt_mpi(env: MutableMapping[str, str]) -> None:
    for name, source in _MPI_VARIABLES.items():
        if env.get(source):
            env.setdefault(name, env[source])
    if env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]:
        env.setdefault("MASTER_ADDR", "127.0.0.1")
    env.setdefault("MASTER_PORT", _DEFAULT_PORT)


# The variables that each launcher must set, and a function that adds torch's variables.
_LAUNCHERS: Final[Mapping[str, tuple[list[str], Callable[..., None]]]] = {
    "pytorch": ([], lambda env: None),
    "slurm": (["SLURM_PROCID", "SLURM_NTASKS"], adopt_slurm),
    "mpi": ([*_MPI_VARIABLES.values()][:3], _adopt_mpi),
    "none": ([], lambda env: None),
}


def _check_settings(launcher: str, backend: str | None, init_backend: str) -> None:
    if launcher not in _LAUNCHERS:
        launchers = ", ".join(_LAUNCHERS)
        raise ValueError(f"Invalid launcher type: {launcher}; it must be one of {launchers}")
    if init_backend != "torch":
        raise ValueError(f"init_backend must be 'torch', got {init_backend!r}")
    is_for_gpus = backend is not None and ("nccl" in backend or "cuda" in backend)
    if is_for_gpus and not torch.cuda.is_available():
        raise ValueError(f"backend {backend!r} needs a CUDA device, got none; use 'gloo'")


def _require(launcher: str, names: list[str]) -> None:
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise KeyError(
            f"the launcher {launcher!r} must set {', '.join(names)}, but the environment variable "
            f"{' and '.join(missing)} is not set"
        )


def _make_timedelta(timeout: object) -> timedelta:
    if isinstance(timeout, timedelta):
        return timeout
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be a number of seconds or a timedelta, got {timeout!r}")
    if timeout <= 0:
        raise ValueError(f"timeout must be positive, got {timeout}")
    return timedelta(seconds=timeout)


def _default_backend() -> str:
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return "gloo"
    # Uses only settings that are the same on all ranks of a host.
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return "cpu:gloo,cuda:nccl" if local_ranks <= torch.cuda.device_count() else "gloo"


# Timeouts, by names of torch without documentation: it has no public way to read one.


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
