"""Starting the process group from what a launcher has put into the environment; and its end."""

import atexit
import gc
import ipaddress
import multiprocessing
import os
import re
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

_MPI_VARIABLES: Final = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
_DEFAULT_PORT: Final = "29500"
_OF_MEETING: Final = ("rank", "world_size", "timeout")
_FIRST_PORT, _PORTS = 12_000, 20_000
_HOST = re.compile(r"((?:\[[^\]]+\]|[^,\[\]])+)(?:,|$)")
_RANGES = re.compile(r"\[([^\]]*)\]")
_TIMES = re.compile(r"(\d+)(?:\(x(\d+)\))?")
# What clears the memories of DTensor, which hold meshes and so groups. Of no public use: other
# versions of torch may have others.
_CLEARING = (
    ("debug", "_clear_sharding_prop_cache"),
    ("_redistribute", "clear_redistribute_planner_cache"),
    ("_redistribute", "_gen_transform_infos.cache_clear"),
    ("_collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
)


def infer_launcher() -> str:
    """Return which launcher has started this process, by the environment, for `init_dist`.

    "pytorch" when WORLD_SIZE is set, "slurm" for SLURM_NTASKS (but not in the shell of an
    interactive job), "mpi" for Open MPI's local rank, else "none".
    """
    env = os.environ
    if env.get("WORLD_SIZE"):
        return "pytorch"
    if env.get("SLURM_NTASKS") and env.get("SLURM_JOB_NAME") != "bash":
        return "slurm"
    return "mpi" if env.get("OMPI_COMM_WORLD_LOCAL_RANK") else "none"


def init_dist(
    launcher: str, backend: str | None = None, init_backend: str = "torch", **kwargs: Any
) -> None:
    """Start the default process group; every rank must call this.

    Sets multiprocessing's start method to "spawn" where none is set, and RANK, WORLD_SIZE,
    LOCAL_RANK, MASTER_ADDR and MASTER_PORT for "slurm" and "mpi" where they are not set. Makes the
    local rank's GPU the current one, unless the backend is for CPUs only. A group that nothing has
    destroyed before ends when the process exits.

    Args:
        launcher: "pytorch" (torchrun), "slurm", "mpi" (Open MPI) or "none", which starts nothing.
        backend: what `torch.distributed.init_process_group` takes. None is NCCL for CUDA tensors
            plus gloo for CPU tensors where each rank of this host has a GPU, else gloo.
        init_backend: "torch" is the only one.
        kwargs: `timeout` in seconds or as a timedelta; `port` for "slurm"; the rest goes to
            `torch.distributed.init_process_group`.

    Raises:
        ValueError: another launcher or init_backend, NCCL without a GPU, no positive timeout.
        TypeError: a timeout that is no number of seconds.
        KeyError: the launcher has not set a variable, which is named.
    """
    _check_settings(launcher, backend, init_backend)
    if "timeout" in kwargs:
        kwargs["timeout"] = _to_timedelta(kwargs["timeout"])
    if launcher == "none":
        return
    port = kwargs.pop("port", None) if launcher == "slurm" else None
    if port is not None:
        os.environ["MASTER_PORT"] = str(port)
    needed, adopt = _LAUNCHERS[launcher]
    _require(launcher, needed)
    adopt(os.environ)
    meets = "store" not in kwargs and kwargs.get("init_method") in (None, "env://")
    names = ["MASTER_ADDR", "MASTER_PORT"] if meets else []
    _require(launcher, names + [n for n in ("RANK", "WORLD_SIZE") if n.lower() not in kwargs])
    if multiprocessing.get_start_method(allow_none=True) is None:
        multiprocessing.set_start_method("spawn")
    name = backend or _default_backend()
    if "nccl" in name or "cuda" in name:
        torch.cuda.set_device(get_local_rank() % torch.cuda.device_count())
    if meets:
        kwargs.pop("init_method", None)
        kwargs |= meet_at_master(**{n: kwargs[n] for n in _OF_MEETING if n in kwargs})
    dist.init_process_group(name, **kwargs)


def meet_at_master(
    rank: int | None = None, world_size: int | None = None, timeout: timedelta = default_pg_timeout
) -> dict[str, Any]:
    """Return store, rank and world size for `init_process_group`; every rank must call this.

    The store is torchrun's, where that has one to share, else rank 0 keeps it at MASTER_ADDR and
    MASTER_PORT. When all ranks are on this host, it listens on the loopback interface alone, and
    so does gloo unless GLOO_SOCKET_IFNAME says otherwise.

    Raises:
        KeyError: a variable is not set, which is named.
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
        # What ranks of an attempt before a restart have written leads nowhere.
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


def agent_store(timeout: timedelta = default_pg_timeout) -> TCPStore | None:
    """Connect to the store that torchrun keeps for the ranks and that outlives a restart of them.

    None where there is no such store: without torchrun, or where it does not share its own.
    """
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    # It may be older than this attempt: there are no workers to wait for.
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def all_on_one_host() -> bool:
    """Whether the environment says that all ranks are on this host."""
    env = os.environ
    if env.get("LOCAL_WORLD_SIZE"):
        return env["LOCAL_WORLD_SIZE"] == env.get("WORLD_SIZE")
    return "MASTER_ADDR" in env and is_loopback(env["MASTER_ADDR"])


def is_loopback(host: str) -> bool:
    """Whether a name or address stands for the loopback interface and nothing else."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(one.split("%")[0]).is_loopback for one in addresses)


def open_store(host: str, port: int, **options: Any) -> TCPStore:
    """Open a store that listens at this address alone; torch's own would on all interfaces.

    Raises:
        OSError: nothing can listen there.
    """
    # As torch's client looks it up, so that both take the same address of several.
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, port), family=family, backlog=1024)
    port = listener.getsockname()[1]
    # The store closes it in the end.
    return TCPStore(host, port, is_master=True, master_listen_fd=listener.detach(), **options)


def forget_meshes() -> None:
    """Have DTensor forget its meshes; for before the default group ends."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    for module, clear in _CLEARING:
        with suppress(ImportError, AttributeError):
            attrgetter(clear)(import_module(f"torch.distributed.tensor.{module}"))()


def end_group() -> None:
    """Destroy the default group, if there is one, after what would keep its threads running.

    Also runs when the process exits: a thread of gloo that lets go of its last tensor while the
    interpreter is finalized aborts the process ("terminate called without an active exception").
    """
    forget_meshes()
    # Wrappers in cycles. One that is a group's last owner would wait for the group's thread while
    # that waits for Python's lock.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


@atexit.register
def _end_group_at_exit() -> None:
    if dist.is_available() and dist.is_initialized():
        end_group()


def adopt_slurm(env: MutableMapping[str, str]) -> None:
    """Add torch's variables to `env`, from those that srun sets, where there is no RANK yet."""
    if env.get("RANK") or not env.get("SLURM_PROCID"):
        return
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    found = {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_NTASKS"],
        "LOCAL_RANK": env.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": first_host(nodes) if nodes else "localhost",
        "MASTER_PORT": str(_port(env)),
    }
    here = tasks_here(env)
    if here is not None:
        found["LOCAL_WORLD_SIZE"] = str(here)
    for name, value in found.items():
        env.setdefault(name, value)


def first_host(nodes: str) -> str:
    """Return the first host of a list such as "gpu[01-04,07],other": gpu01."""
    # A comma inside brackets does not end the host.
    match = _HOST.match(nodes.strip())
    if match is None:
        raise ValueError(f"not a list of hosts as Slurm writes it: {nodes!r}")
    return _RANGES.sub(lambda match: re.split("[,-]", match.group(1))[0], match.group(1))


def tasks_per_node(text: str) -> Iterator[int]:
    """Yield the tasks of each node from a list such as "8(x2),4": 8, 8, 4."""
    for part in text.split(","):
        match = _TIMES.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"not a list of tasks per node as Slurm writes it: {text!r}")
        yield from [int(match.group(1))] * int(match.group(2) or 1)


def tasks_here(env: Mapping[str, str]) -> int | None:
    """Return how many tasks this node has, None when nothing tells."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_NTASKS_PER_NODE")
    if not text:
        return None
    tasks = list(tasks_per_node(text))
    node = int(env.get("SLURM_NODEID") or 0)
    # A single number holds for every node.
    return tasks[node] if node < len(tasks) else tasks[-1]


def _port(env: MutableMapping[str, str]) -> int:
    """Return a port that two jobs on one node, or two steps of one job, do not share."""
    job, step = (int(env.get(name) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _FIRST_PORT + (job * 61 + step) % _PORTS


def _adopt_mpi(env: MutableMapping[str, str]) -> None:
    for name, source in _MPI_VARIABLES.items():
        if env.get(source):
            env.setdefault(name, env[source])
    if env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]:
        env.setdefault("MASTER_ADDR", "127.0.0.1")
    env.setdefault("MASTER_PORT", _DEFAULT_PORT)


# What each launcher must have set, and what adds torch's variables to that.
_LAUNCHERS: Final[Mapping[str, tuple[list[str], Callable[..., None]]]] = {
    "pytorch": ([], lambda env: None),
    "slurm": (["SLURM_PROCID", "SLURM_NTASKS"], adopt_slurm),
    "mpi": ([*_MPI_VARIABLES.values()][:3], _adopt_mpi),
    "none": ([], lambda env: None),
}


def _check_settings(launcher: str, backend: str | None, init_backend: str) -> None:
    if launcher not in _LAUNCHERS:
        known = ", ".join(_LAUNCHERS)
        raise ValueError(f"Invalid launcher type: {launcher}; it must be one of {known}")
    if init_backend != "torch":
        raise ValueError(f"init_backend must be 'torch', got {init_backend!r}")
    if backend is not None and "nccl" in backend and not torch.cuda.is_available():
        raise ValueError(f"backend {backend!r} needs a CUDA device, and there is none; use 'gloo'")


def _require(launcher: str, names: list[str]) -> None:
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise KeyError(
            f"the launcher {launcher!r} must set {', '.join(names)}, but the environment variable "
            f"{' and '.join(missing)} is not set"
        )


def _to_timedelta(timeout: object) -> timedelta:
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
    # Nothing that differs between ranks may decide this.
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return "cpu:gloo,cuda:nccl" if here <= torch.cuda.device_count() else "gloo"
