"""Run one function in several processes of this machine, or join the ones already started."""

from __future__ import annotations

import gc
import os
import pickle
import reprlib
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from ..collectives import (
    adopt_slurm,
    all_gather_object,
    end_group,
    get_rank,
    meet_at_master,
    synchronize,
)
from .failure import Failure, LaunchError, Terminated
from .guard import (
    Ranks,
    blocking_signals,
    environment,
    heed_signals,
    host_identity,
    is_running,
    receiving_signals,
)

T = TypeVar("T")
# Between the end of a process's connections and its own.
_DYING_S = 1.0


def launch(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    *,
    nproc: int = 1,
    backend: str = "auto",
    timeout_s: float = 1800.0,
) -> dict[int, T]:
    """Call `fn(*args)` on `nproc` ranks and return each rank's result by its number.

    Under torchrun or `srun` this process joins the environment's group as the one rank that it is,
    and only its own result is returned. One process alone needs no group. `fn`, `args` and the
    results are pickled when processes are started; these meet over files in a private folder, whose
    name they have in `STEPWRAP_LAUNCH_DIR`: no store listens on the network. gloo uses the loopback
    interface there unless `GLOO_SOCKET_IFNAME` says otherwise (docs/rpc.md: which stores listen).

    Args:
        fn: A module-level function. On every rank the default process group is there while it
            runs, and destroyed afterwards.
        args: Its arguments, as a tuple or a list.
        nproc: How many processes to start on this machine.
        backend: What `torch.distributed.init_process_group` takes; "auto" is NCCL for CUDA
            tensors plus gloo for CPU tensors when each rank has a GPU of its own, else gloo.
        timeout_s: How long a collective may wait for a rank, in seconds.

    Raises:
        LaunchError: A rank raised, died, or left with any exit code before `fn` returned; the
            others were stopped.
        TypeError: `args` is neither a tuple nor a list.
        KeyboardInterrupt: Ctrl-C ended the ranks before `fn` returned.
        Terminated: SIGTERM did so, or SIGHUP or SIGUSR1, which count as SIGTERM.
    """
    if nproc < 1:
        raise ValueError(f"nproc must be at least 1, got {nproc}")
    if not isinstance(args, tuple | list):
        # A string or a dict would be taken apart.
        given = reprlib.repr(args)
        raise TypeError(f"args must be a tuple of arguments, got {given}; one alone is ({given},)")
    if started_outside():
        with process_group(backend, timeout_s):
            return {dist.get_rank(): _call_beside_others(fn, args)}
    if nproc == 1:
        return {0: fn(*args)}
    return _start(fn, args, nproc=nproc, backend=backend, timeout_s=timeout_s)


def started_outside() -> bool:
    """Whether a launcher (torchrun, or srun with several tasks) started this process."""
    if os.environ.get("RANK") and os.environ.get("WORLD_SIZE"):
        return True
    tasks = os.environ.get("SLURM_NTASKS", "1")
    interactive = os.environ.get("SLURM_JOB_NAME") == "bash"
    return bool(os.environ.get("SLURM_PROCID")) and tasks != "1" and not interactive


def _call_beside_others(fn: Callable[..., T], args: Sequence[Any]) -> T:
    """Call `fn`; where it fails for want of ranks of this host that are gone, name them."""
    processes = all_gather_object((host_identity(), os.getpid()))
    try:
        return fn(*args)
    except Exception as error:
        own = Failure.of(error, get_rank())
        here = [
            (rank, pid) for rank, (host, pid) in enumerate(processes) if host == host_identity()
        ]
        deadline = time.monotonic() + (_DYING_S if _may_follow(own) else 0.0)
        gone: list[int] = []
        while not gone and time.monotonic() < deadline:
            time.sleep(0.02)
            gone = [rank for rank, pid in here if not is_running(pid)]
        if not gone:
            raise
        raise LaunchError([*(Failure.of_end(None, rank) for rank in gone), own]) from error


@contextmanager
def process_group(
    backend: str = "auto", timeout_s: float = 1800.0, *, store_file: Path | None = None
) -> Iterator[None]:
    """Have the default group of the environment's ranks; every rank must enter.

    A group that is there already is used and left alone. The ranks meet over `store_file`, else
    at MASTER_ADDR.
    """
    if dist.is_initialized():
        yield
        return
    adopt_slurm(os.environ)
    local_rank = int(os.environ.get("LOCAL_RANK") or 0)
    name = _backend_name(backend)
    device = None
    if "nccl" in name:
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    if store_file is None:
        meeting = meet_at_master(timeout=timeout)
    else:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(str(store_file), world_size)
        meeting = {"store": store, "rank": rank, "world_size": world_size}
    dist.init_process_group(name, timeout=timeout, device_id=device, **meeting)
    with _ending_group():
        # A rank that leaves while another still connects would break its connections.
        synchronize()
        yield


@contextmanager
def lonely_group(needed: bool = True) -> Iterator[None]:
    """Have a group of this process alone, where wrappers cannot do without any."""
    if not needed or dist.is_initialized():
        yield
        return
    store = dist.HashStore()
    dist.init_process_group(_backend_name("auto"), store=store, rank=0, world_size=1)
    with _ending_group():
        yield


@contextmanager
def _ending_group() -> Iterator[None]:
    """Destroy the group at the end, and free what else would keep it until the process exits.

    A process that exits with a live group, or with a wrapper that holds one, aborts now and then.
    """
    try:
        yield
    except BaseException as error:
        # The variables of the frames that failed hold the wrapper.
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        end_group()


def _backend_name(backend: str) -> str:
    if backend != "auto":
        return backend
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= ranks_here
    return "cpu:gloo,cuda:nccl" if enough and dist.is_nccl_available() else "gloo"


def _start(
    fn: Callable[..., T], args: Sequence[Any], *, nproc: int, backend: str, timeout_s: float
) -> dict[int, T]:
    # Ranks and their workers inherit the folder in which multiprocessing puts sockets: one of their
    # own would stay when a signal ends them.
    get_temp_dir()
    # For this user alone: it holds the store in which the ranks meet.
    folder = Path(tempfile.mkdtemp(prefix="stepwrap_launch_"))
    shared = _variables(folder, nproc)
    try:
        with Ranks(folder) as ranks, receiving_signals(ranks):
            with blocking_signals():
                for rank in range(nproc):
                    with environment({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}):
                        ranks.start(rank, _rank_main, fn, tuple(args), backend, timeout_s)
            ranks.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    # After a signal the ranks that lose a peer have lost it to the signal.
    if ranks.failures and not (ranks.received and all(map(_may_follow, ranks.failures))):
        raise LaunchError(sorted(ranks.failures, key=lambda one: (_may_follow(one), one.time)))
    if len(ranks.results) < nproc:
        if ranks.received[0] == signal.SIGINT:
            raise KeyboardInterrupt
        raise Terminated(ranks.received[0])
    return {rank: pickle.loads(result) for rank, result in sorted(ranks.results.items())}


def _variables(folder: Path, nproc: int) -> dict[str, str]:
    """Return what torchrun would set, where to meet, and defaults for what the user has not set."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    defaults = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if sys.platform == "linux":
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    return {
        **{name: value for name, value in defaults.items() if name not in os.environ},
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": "0",
        # Nothing listens there: it is for code that reads these variables and opens a store itself.
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "STEPWRAP_LAUNCH_DIR": str(folder),
    }


def _may_follow(failure: Failure) -> bool:
    """Whether another rank's failure may be the cause: a peer was lost, a collective cut short."""
    lost = ("by peer", "Broken pipe", "NCCL error", "SIGABRT")
    return failure.kind == "CollectiveError" or any(text in failure.trace for text in lost)


def _rank_main(
    words: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    backend: str,
    timeout_s: float,
) -> None:
    """What each started process runs; see `Ranks` for what it sends through the pipe."""
    words.send(None)
    rank, store = int(os.environ["RANK"]), Path(os.environ["STEPWRAP_LAUNCH_DIR"]) / "store"
    try:
        with process_group(backend, timeout_s, store_file=store):
            # Not earlier: a rank that ends while the group forms makes the others complain.
            heed_signals()
            try:
                result = pickle.dumps(fn(*args))
            except Exception as error:
                # Before the group goes: what the others then run into is later than this.
                _leave(error, rank, words)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        _leave(error, rank, words)
    words.send(result)


def _leave(error: Exception, rank: int, words: Connection) -> NoReturn:
    """Report an error to the launcher and end this process at once.

    Destroying a group that has lost a rank may block, and leaving with one may abort.
    """
    words.send(Failure.of(error, rank))
    # What ends with the frames that failed leaves nothing: the workers of data loaders do not wait
    # to be missed, and their semaphores go. Where that blocks, the launcher ends it.
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
