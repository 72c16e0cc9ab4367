"""Run a function in new processes of this machine, or as a rank that torchrun or srun started."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.spawn import get_preparation_data
from multiprocessing.util import get_temp_dir
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ..collectives import (
    PicklableWrapper,
    adopt_slurm,
    all_gather_object,
    end_group,
    get_rank,
    meet_at_master,
    synchronize,
)
from ..collectives.process.init import choose_backend, delay_nccl, device_of_local_rank
from ..collectives.process.slurm import slurm_tasks
from ..loops.display.notebook import DISPLAY_DIR, is_in_notebook, show_displays
from ..parallel import free_memory
from ..primitives.stop_signals import blocking_signals, unblock_signals
from .failure import LaunchError, OversubscribedError, RankFailure, require_cores
from .rank_processes import (
    Ranks,
    host_identity,
    is_running,
    own_memory,
    receiving_signals,
    set_variables,
    stop_error,
)

T = TypeVar("T")
# How long to wait for the end of processes whose connections were lost, in seconds.
_DYING_S = 1.0
# The start of the keys in the store under which ranks note that their work is done.
_FINISHED = "stepwrap/finished/"
# If more bytes than this are free per process, the memory of a process is not measured.
_AMPLE = 2**30


def launch(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    *,
    nproc: int = 1,
    backend: str = "auto",
    timeout_s: float = 1800.0,
    oversubscribe: bool = False,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> dict[int, T]:
    """Call ``fn(*args)`` on ``nproc`` ranks and return the results by rank.

    Under torchrun or ``srun`` (docs/processes.md), this process is one of the ranks that they
    started: it joins their process group, ``nproc`` is ignored, and only its own result is
    returned. A single rank without an ``environment`` runs in this process, without a process
    group.

    Otherwise processes are started, and ``fn``, ``args`` and the results are pickled. The ranks
    meet through files in a private folder, which ``STEPWRAP_LAUNCH_DIR`` names, so no store listens
    on the network (docs/rpc.md explains which stores listen). gloo uses the loopback interface
    unless ``GLOO_SOCKET_IFNAME`` is set. In a notebook, the progress of rank 0 is displayed below
    the cell.

    Args:
        fn: a module-level function, or any function defined in a notebook or at a prompt. While
            ``fn`` runs, the default process group exists, except on a single rank in this process.
            Afterwards the group is destroyed, unless it existed before.
        args: the arguments of ``fn``, as a tuple or a list.
        nproc: number of processes to start on this machine.
        backend: an argument of ``torch.distributed.init_process_group``. "auto" means NCCL for CUDA
            tensors and gloo for CPU tensors if there is a GPU for each rank; otherwise gloo for
            all tensors.
        timeout_s: how long a collective may wait for a rank, in seconds.
        oversubscribe: allow more than 4 processes per core, and more than fit into free memory. If
            false and less than 1 GiB per process is free, the first process is started alone, to
            measure its memory before ``fn`` is called.
        environment: additional environment variables of the started processes.

    Raises:
        OversubscribedError: ``nproc`` is too large for this machine (a ValueError).
        ValueError: ``nproc`` is below 1.
        LaunchError: a rank raised, died, or exited before ``fn`` returned; the others were stopped.
        TypeError: ``args`` is not a tuple or list, or a notebook's ``fn`` cannot be pickled.
        RuntimeError: the main program was read from standard input.
        KeyboardInterrupt: Ctrl-C ended the ranks before ``fn`` returned.
        Terminated: SIGTERM, SIGHUP or SIGUSR1 ended the ranks before ``fn`` returned.
    """
    if nproc < 1:
        raise ValueError(f"nproc must be at least 1, got {nproc}")
    if not isinstance(args, tuple | list):
        # A string or a dict would be unpacked into its elements.
        shown = reprlib.repr(args)
        raise TypeError(f"args must be a tuple or list, got {shown}; write ({shown},)")
    if started_outside():
        with process_group(backend, timeout_s):
            return {dist.get_rank(): _call_as_rank(fn, args)}
    if nproc == 1 and not environment:
        return {0: fn(*args)}
    if not oversubscribe:
        require_cores(nproc)
    fn, args = _portable(fn, args)
    shared = {**_variables(nproc), **environment}
    main_args = (fn, tuple(args), backend, timeout_s)
    return _start(main_args, shared, nproc=nproc, oversubscribe=oversubscribe)


def _require_memory(nproc: int, per_process: int) -> None:
    """Raise if the other processes do not fit into memory next to the first one."""
    free = free_memory("cpu")
    if (nproc - 1) * per_process > free:
        raise OversubscribedError(
            f"{nproc} processes do not fit into memory: each takes {per_process / 2**30:.2f} GiB "
            f"before its model is built, and {free / 2**30:.2f} GiB are free for {nproc - 1} more"
        )


def _portable(fn: Callable[..., T], args: Sequence[Any]) -> tuple[Callable[..., T], Sequence[Any]]:
    """Return a call of ``fn(*args)`` that started processes can load."""
    main = get_preparation_data("")
    path = main.get("init_main_from_path")
    if path is not None and not os.path.isfile(path):
        raise RuntimeError(
            f"launch starts processes that import the main program again, but {path} is not a "
            "file: save the program as a file and run that"
        )
    if path is not None or "init_main_from_name" in main:
        return fn, args
    # A notebook or prompt has no file to import: pickle the function by value.
    try:
        call = pickle.dumps(PicklableWrapper(partial(fn, *args)))
    except Exception as error:
        message = "launch pickles fn, its arguments and the variables that it uses"
        raise TypeError(f"{message}, but one of them cannot be pickled: {error}") from error
    return _call_pickled, (call,)


def _call_pickled(call: bytes) -> Any:
    return PicklableWrapper(pickle.loads(call)())


def started_outside() -> bool:
    """Return whether a launcher (torchrun, or srun with several tasks) started this process."""
    if os.environ.get("RANK") and os.environ.get("WORLD_SIZE"):
        return True
    return slurm_tasks(os.environ) > 1


def launched_ranks() -> int | None:
    """Return the number of ranks that torchrun or srun started; None if they are started here."""
    if not started_outside():
        return None
    return int(os.environ.get("WORLD_SIZE") or slurm_tasks(os.environ))


def _call_as_rank(fn: Callable[..., T], args: Sequence[Any]) -> T:
    """Call ``fn``; if it fails because other ranks of this host died, report those ranks."""
    processes = all_gather_object((host_identity(), os.getpid()))
    store = _get_default_store()
    try:
        result = fn(*args)
    except Exception as error:
        own = RankFailure.of(error, get_rank())
        local_pids = [
            (rank, pid) for rank, (host, pid) in enumerate(processes) if host == host_identity()
        ]
        deadline = time.monotonic() + (_DYING_S if own.may_follow else 0.0)
        gone: list[int] = []
        while not gone and time.monotonic() < deadline:
            time.sleep(0.02)
            gone = [
                rank
                for rank, pid in local_pids
                if not is_running(pid) and not _has_finished(store, rank)
            ]
        if not gone:
            raise
        raise LaunchError([*(RankFailure.of_end(None, rank) for rank in gone), own]) from error
    # The store may have ended with the rank that serves it.
    with suppress(RuntimeError):
        store.set(f"{_FINISHED}{get_rank()}", "")
    return result


def _has_finished(store: dist.Store, rank: int) -> bool:
    with suppress(RuntimeError):
        return bool(store.check([f"{_FINISHED}{rank}"]))
    return False


@contextmanager
def process_group(
    backend: str = "auto", timeout_s: float = 1800.0, *, store_file: Path | None = None
) -> Iterator[None]:
    """Create the default process group from RANK and WORLD_SIZE or Slurm's variables.

    Every rank must enter. An existing group is used and not destroyed. The ranks meet through
    ``store_file`` if it is given, otherwise at MASTER_ADDR.

    Raises:
        ValueError: the backend is NCCL, which needs a CUDA device.
    """
    if dist.is_initialized():
        yield
        return
    if "nccl" in backend and not torch.cuda.is_available():
        raise ValueError(f"backend {backend!r} needs a CUDA device, got none; use 'gloo'")
    adopt_slurm(os.environ)
    timeout = timedelta(seconds=timeout_s)
    if store_file is None:
        meeting = meet_at_master(timeout=timeout)
    else:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(str(store_file), world_size)
        meeting = {"store": store, "rank": rank, "world_size": world_size}
    name = choose_backend(**meeting) if backend == "auto" else backend
    device = None
    if "nccl" in name:
        device = device_of_local_rank()
        torch.cuda.set_device(device)
    dist.init_process_group(name, timeout=timeout, device_id=device, **meeting)
    delay_nccl()
    with _ending_group():
        # A rank must not leave while another one is still connecting to it.
        synchronize()
        yield


@contextmanager
def single_process_group(needed: bool = True) -> Iterator[None]:
    """Create a process group with one rank, this process, if ``needed`` and if none exists."""
    if not needed or dist.is_initialized():
        yield
        return
    store = dist.HashStore()
    name = choose_backend(store, 0, 1)
    dist.init_process_group(name, store=store, rank=0, world_size=1)
    with _ending_group():
        yield


@contextmanager
def _ending_group() -> Iterator[None]:
    """Destroy the process group at the end, even if a failed frame still refers to a wrapper.

    A process that exits with a live group, or with a wrapper that refers to one, may abort.
    """
    try:
        yield
    except BaseException as error:
        # The local variables of the failed frames refer to the wrapper.
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        end_group()


def _start(
    main_args: Sequence[Any], shared: Mapping[str, str], *, nproc: int, oversubscribe: bool
) -> dict[int, Any]:
    # Create multiprocessing's folder for sockets here: ranks and their workers inherit it. If a
    # rank made its own, the folder would remain when a signal ends the rank.
    get_temp_dir()
    # Only this user can read the folder: it holds the store in which the ranks meet.
    folder = Path(tempfile.mkdtemp(prefix="stepwrap_launch_"))
    shared = {**shared, "STEPWRAP_LAUNCH_DIR": str(folder)}
    display = _nothing
    if is_in_notebook():
        shared[DISPLAY_DIR], display = str(folder), partial(show_displays, folder)
    # With ample memory, skip the wait for the imports of the first rank, which takes seconds.
    is_ample = oversubscribe or nproc * _AMPLE < free_memory("cpu")
    try:
        with Ranks(folder, display) as ranks, receiving_signals(ranks):
            for rank in range(nproc):
                rank_variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                with blocking_signals(), set_variables({**shared, **rank_variables}):
                    ranks.start(rank, _rank_main, *main_args)
                if rank == 0 and not is_ample:
                    _require_memory(nproc, ranks.get_memory(0))
            ranks.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    # After a signal, ranks fail because the signal ended their peers: that is not an error.
    if ranks.failures and not (
        ranks.received and all(failure.may_follow for failure in ranks.failures)
    ):
        causes_first = sorted(
            ranks.failures, key=lambda failure: (failure.may_follow, failure.time)
        )
        raise LaunchError(causes_first, signal=next(iter(ranks.received), 0))
    if len(ranks.results) < nproc:
        raise stop_error(ranks.received[0])
    return {rank: pickle.loads(result) for rank, result in sorted(ranks.results.items())}


def _nothing() -> None:
    """Do nothing: outside a notebook, rank 0 prints its progress."""


def _variables(nproc: int) -> dict[str, str]:
    """Return the variables that torchrun would set, and defaults for others that are not set."""
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
        # Nothing listens here. User code may read these variables to open its own store.
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _rank_main(
    pipe: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    backend: str,
    timeout_s: float,
) -> None:
    """Run ``fn`` on a started rank and send the messages that ``Ranks`` describes."""
    pipe.send(own_memory())
    rank, store = int(os.environ["RANK"]), Path(os.environ["STEPWRAP_LAUNCH_DIR"]) / "store"
    try:
        with process_group(backend, timeout_s, store_file=store):
            # Signals were blocked until now: a rank that ends while the group forms causes errors
            # on the others.
            unblock_signals()
            try:
                result = pickle.dumps(fn(*args))
            except Exception as error:
                # Report before the group ends, so that this error is older than its consequences.
                _report_and_exit(error, rank, pipe)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        _report_and_exit(error, rank, pipe)
    pipe.send(result)


def _report_and_exit(error: Exception, rank: int, pipe: Connection) -> NoReturn:
    """Report an error to the launcher and end this process at once.

    Destroying a group that lost a rank may block, and a normal exit with a live group may abort.
    """
    pipe.send(RankFailure.of(error, rank))
    # Free the local variables of the failed frames, so that the workers of data loaders end and
    # their semaphores are removed. If that blocks, the launcher kills this process.
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
