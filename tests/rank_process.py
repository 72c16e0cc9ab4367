"""The rank processes of `ranks.py`: they serve calls until asked to exit."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import queue
import random
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
LAUNCHER_PREFIXES = ("MASTER_", "SLURM_", "TORCHELASTIC_", "OMPI_")
# On a busy machine ranks may begin a call that many seconds apart.
SHORT_S = 30.0
# Whether this process is a rank.
is_rank = False


def remove_launcher(environment: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the environment without the variables that torchrun, SLURM and MPI set."""
    return {
        name: value
        for name, value in environment
        if name not in LAUNCHER_VARIABLES and not name.startswith(LAUNCHER_PREFIXES)
    }


@dataclass
class RankCall:
    """A call for a rank; the surroundings are set before the payload is unpickled."""

    payload: bytes
    world_size: int
    group_timeout_s: float
    store: str | None = None
    path: list[str] = field(default_factory=lambda: list(sys.path))
    cwd: str = field(default_factory=os.getcwd)
    filters: list[Any] = field(default_factory=lambda: list(warnings.filters))
    environment: dict[str, str] = field(
        default_factory=lambda: remove_launcher(os.environ.items()) | {"OMP_NUM_THREADS": "1"}
    )


@dataclass
class RankStart:
    """A request to the template to fork a rank; the connection's descriptor follows it."""

    rank: int
    stack: str
    output: str
    environment: dict[str, str]


def fork_ranks() -> None:
    """Import the modules of ranks, fork a rank at each request, and report each rank's end.

    Ends at the end of the connection. Nothing here may start a thread or initialize CUDA.
    """
    control = socket.socket(fileno=int(sys.argv[2]))
    control.set_inheritable(False)
    sys.argv[1:] = []
    import torch.distributed.fsdp

    import stepwrap.wrappers  # noqa: F401
    from stepwrap.collectives import forget_meshes

    # Imports more of torch, which otherwise every rank does at the end of its first call.
    forget_meshes()
    torch.set_num_threads(1)
    # Otherwise a collection in a rank visits, and so copies, all modules imported here.
    gc.collect()
    gc.freeze()
    # Maps the descriptor that becomes readable when a process ends to its process id.
    children: dict[int, int] = {}
    while True:
        for ready in wait([control, *children]):
            if isinstance(ready, int):
                pid = children.pop(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                control.send(pickle.dumps(("ended", pid, code)))
                continue
            message, fds, _, _ = socket.recv_fds(control, 1 << 20, 1)
            if not message:
                return
            pid = os.fork()
            if pid == 0:
                control.close()
                for child in children:
                    os.close(child)
                _become_rank(pickle.loads(message), fds[0])
                return
            os.close(fds[0])
            children[os.pidfd_open(pid)] = pid
            control.send(pickle.dumps(("started", pid, 0)))


def _become_rank(start: RankStart, fd: int) -> None:
    # In a separate process group a kill also reaches grandchildren.
    os.setsid()
    output = os.open(start.output, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(start.environment)
    _serve(start.rank, Connection(fd), start.stack)


def _serve(rank: int, connection: Connection, stack: str) -> None:
    """Serve calls in a rank process until one asks it to exit."""
    global is_rank
    is_rank = True
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, inbox), daemon=True).start()
    with open(stack, "a") as stack_file:
        faulthandler.enable()
        import torch.distributed

        from stepwrap.collectives import forget_meshes

        torch.set_num_threads(1)
        _call_by_sockets()
        connection.send_bytes(_answer("ready", None))
        while (message := inbox.get()) != b"exit":
            # Register again: Lightning resets all signals to the handlers that Python knows.
            faulthandler.unregister(signal.SIGUSR1)
            faulthandler.register(signal.SIGUSR1, file=stack_file)
            connection.send_bytes(_answer_call(rank, message))
            # The group ends only when all ranks are done with it, or when this one has failed.
            inbox.get()
            # Collect cycles first: if a wrapper in one is a group's last owner, freeing it later
            # waits for the group's thread, which waits for Python's lock.
            gc.collect()
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            forget_meshes()
            gc.collect()
            # Exclude the remaining objects, mostly of modules, from later collections.
            gc.freeze()
            connection.send_bytes(_answer("released", None))


def _listen(connection: Connection, inbox: queue.SimpleQueue[bytes]) -> None:
    try:
        while True:
            inbox.put(connection.recv_bytes())
    except (EOFError, OSError):
        # pytest is gone, perhaps by SIGKILL: end at once, with everything started from here.
        os.killpg(0, signal.SIGKILL)


def _answer(kind: str, value: Any) -> bytes:
    return pickle.dumps((kind, value, time.monotonic()))


def _call_by_sockets() -> None:
    """Make torch's RPC use sockets also between processes of one machine.

    A thread that never sleeps serves its transport by shared memory: three ranks would take all of
    a machine with two cores. Worlds in processes that tests start afresh have torch's own choice.
    """
    from torch.distributed.rpc import TensorPipeRpcBackendOptions

    TensorPipeRpcBackendOptions.__init__.__kwdefaults__["_transports"] = ["uv"]


def _answer_call(rank: int, message: bytes) -> bytes:
    try:
        call: RankCall = pickle.loads(message)
        _set_surroundings(call)
        fn, args, kwargs = pickle.loads(call.payload)
        _reset_torch()
        if call.store is not None:
            _open_group(rank, call)
        return _answer("result", fn(*args, **kwargs))
    except BaseException:
        return _answer("error", traceback.format_exc())


def _set_surroundings(call: RankCall) -> None:
    sys.path[:] = call.path
    os.chdir(call.cwd)
    if os.environ != call.environment:
        os.environ.clear()
        os.environ.update(call.environment)
    warnings.resetwarnings()
    warnings.filters[:] = call.filters


def _reset_torch() -> None:
    import torch

    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    # Only if needed: the first of these two calls imports the compiler, which takes a second.
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    if torch.get_default_device() != torch.device("cpu"):
        torch.set_default_device(None)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def _open_group(rank: int, call: RankCall) -> None:
    import torch.distributed as dist

    store = dist.FileStore(call.store, call.world_size)
    # A short timeout is meant for the test's collectives: meet before it applies.
    if call.group_timeout_s < SHORT_S:
        _meet(store, "here", rank, call.world_size)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=call.world_size,
        timeout=timedelta(seconds=call.group_timeout_s),
    )
    # Otherwise a rank whose test ends it at once could do so while another still connects.
    _meet(store, "connected", rank, call.world_size)


def _meet(store: Any, name: str, rank: int, world_size: int) -> None:
    store.set(f"{name}_{rank}", "")
    store.wait([f"{name}_{other}" for other in range(world_size)], timedelta(seconds=60))
