"""Run one function in several processes of this machine, or join the ones already started."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import shutil
import signal
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..collectives import synchronize
from ..collectives._forget import forget_meshes
from ..collectives.slurm import adopt_slurm
from ._guard import die_with_parent, heed_signals, relay_signals
from .failure import Failure, LaunchError, Terminated

__all__ = ["LaunchError", "launch", "process_group", "started_outside"]

T = TypeVar("T")
logger = logging.getLogger(__name__)


def launch(
    fn: Callable[..., T],
    args: tuple[Any, ...] = (),
    *,
    nproc: int = 1,
    backend: str = "auto",
    timeout_s: float = 1800.0,
) -> dict[int, T]:
    """Call `fn(*args)` on `nproc` ranks and return each rank's result by its number.

    Under torchrun or `srun` the environment decides: this process joins that group as the one
    rank that it is, and only its own result is returned. One process alone needs no group.
    `fn`, `args` and the results are pickled when processes are started.

    Processes started here meet over files in a private folder, whose name they have in
    `STEPWRAP_LAUNCH_DIR`, so no store listens on the network. gloo's own connections use the
    loopback interface unless `GLOO_SOCKET_IFNAME` says otherwise. Under torchrun and `srun` the
    TCP store listens on all interfaces: torch offers no way to bind it to one.

    Args:
        fn: A module-level function. On every rank the default process group is there while it
            runs, and destroyed afterwards.
        args: Its arguments.
        nproc: How many processes to start on this machine.
        backend: What `torch.distributed.init_process_group` takes; "auto" is NCCL for CUDA
            tensors plus gloo for CPU tensors when each rank has a GPU of its own, else gloo.
        timeout_s: How long a collective may wait for a rank, in seconds.

    Raises:
        LaunchError: A rank raised or died; the others were stopped.
        KeyboardInterrupt: Ctrl-C ended the ranks before `fn` returned.
        Terminated: SIGTERM did so, or SIGHUP, which reaches the ranks as SIGTERM.
    """
    if nproc < 1:
        raise ValueError(f"nproc must be at least 1, got {nproc}")
    if started_outside():
        with process_group(backend, timeout_s):
            return {dist.get_rank(): fn(*args)}
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
    meeting = {} if store_file is None else _meet_over(store_file)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(name, timeout=timeout, device_id=device, **meeting)
    with _ending_group():
        # A rank that leaves while another still connects would break its connections.
        synchronize()
        yield


@contextmanager
def lonely_group() -> Iterator[None]:
    """Have a group of this process alone, for wrappers that cannot do without any."""
    if dist.is_initialized():
        yield
        return
    store = torch._C._distributed_c10d.HashStore()
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
        forget_meshes()
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()


def _backend_name(backend: str) -> str:
    if backend != "auto":
        return backend
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= ranks_here
    return "cpu:gloo,cuda:nccl" if enough and dist.is_nccl_available() else "gloo"


def _meet_over(store_file: Path) -> dict[str, Any]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = torch._C._distributed_c10d.FileStore(str(store_file), world_size)
    return {"store": store, "rank": rank, "world_size": world_size}


def _start(
    fn: Callable[..., T], args: tuple[Any, ...], *, nproc: int, backend: str, timeout_s: float
) -> dict[int, T]:
    # For this user alone: torch unpickles what it finds in the rendezvous.
    folder = Path(tempfile.mkdtemp(prefix="stepwrap_launch_"))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=str(folder / "rendezvous"),
        rdzv_configs={"store_type": "file"},
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "elastic")),
        # Ctrl-C and SIGTERM are ours: torch would give the ranks 30 s to save, then kill them.
        signals_to_handle="SIGQUIT",
    )
    work = (str(folder), os.getpid(), fn, args, backend, timeout_s)
    try:
        with _quiet(), relay_signals(folder) as received:
            try:
                results = elastic_launch(config, _rank_main)(*work)
            except ChildFailedError as error:
                _raise_failure(folder, error, received)
        return {rank: pickle.loads(result) for rank, result in sorted(results.items())}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _raise_failure(folder: Path, error: ChildFailedError, received: list[int]) -> NoReturn:
    failures = [Failure.read(path) for path in folder.glob("failure_*.json")]
    causes = [failure for failure in failures if not _lost_a_peer(failure)]
    # After a signal the ranks that lose a peer have lost it to the signal.
    if failures and not causes and not received:
        spoken = {failure.rank for failure in failures}
        silent = set(range(_rank_count(folder))) - _ended(folder) - spoken
        causes = [_death(rank, error.failures) for rank in sorted(silent)]
    rest = [failure for failure in failures if failure not in causes]
    if causes or (rest and not received):
        in_time = [sorted(some, key=lambda failure: failure.time) for some in (causes, rest)]
        raise LaunchError(in_time[0] + in_time[1]) from error
    if received:
        if received[0] == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise Terminated(received[0]) from None
    raise LaunchError([_death(rank, error.failures) for rank in error.failures]) from error


def _lost_a_peer(failure: Failure) -> bool:
    """Whether this rank only noticed that another one had gone."""
    return any(text in failure.message for text in ("by peer", "Broken pipe", "NCCL error"))


def _rank_count(folder: Path) -> int:
    return len(list(folder.glob("pid_*")))


def _ended(folder: Path) -> set[int]:
    """Return the ranks that have come to their end by themselves."""
    return {int(path.name.removeprefix("ended_")) for path in folder.glob("ended_*")}


def _death(rank: int, deaths: Mapping[int, ProcessFailure]) -> Failure:
    exitcode = deaths[rank].exitcode if rank in deaths else -signal.SIGKILL
    if exitcode >= 0:
        text = f"the process ended with exit code {exitcode} and left no error"
        return Failure("ProcessEnded", text, "", text, rank)
    name = signal.Signals(-exitcode).name
    hint = ": is the machine out of memory?" if exitcode == -signal.SIGKILL else ""
    text = f"the process was killed by {name}{hint}"
    return Failure("ProcessKilled", text, "", text, rank)


def _rank_main(
    folder: str,
    parent: int,
    fn: Callable[..., T],
    args: tuple[Any, ...],
    backend: str,
    timeout_s: float,
) -> bytes:
    """What each started process runs; its error goes into a file, for the launcher to tell."""
    rank, home = int(os.environ["RANK"]), Path(folder)
    os.environ["STEPWRAP_LAUNCH_DIR"] = folder
    die_with_parent(parent)
    (home / f"pid_{rank}").write_text(str(os.getpid()))
    failed = home / f"failure_{rank}.json"
    try:
        with process_group(backend, timeout_s, store_file=home / "store"):
            # Not earlier: a rank that ends while the group forms makes the others complain.
            heed_signals()
            try:
                result = pickle.dumps(fn(*args))
            except Exception as error:
                # Before the group goes: what the others then run into is later than this.
                Failure.of(error, rank).write(failed)
                _leave(home, rank)
    except KeyboardInterrupt:
        # torch would take a rank that was interrupted for one that still works.
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        Failure.of(error, rank).write(failed)
        _leave(home, rank)
    if _is_last(home, rank) and any(home.glob("failure_*.json")):
        sys.exit(1)
    return result


def _leave(folder: Path, rank: int) -> NoReturn:
    """End this process at once after an error.

    Destroying a group that has lost a rank may block, and leaving with one may abort.
    """
    code = 1 if _is_last(folder, rank) else 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _is_last(folder: Path, rank: int) -> bool:
    """Note that `rank` has ended, and whether all have.

    At the first exit code other than 0 torch gives the ranks 30 s, which is too short to finish
    saving a large model. So only the last rank to end may have one.
    """
    (folder / f"ended_{rank}").touch()
    return len(_ended(folder)) == int(os.environ["WORLD_SIZE"])


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's launcher, whose errors we tell ourselves, and set the ranks' defaults."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed", "torch.multiprocessing")]
    kept = [(one.handlers, one.propagate) for one in loggers]
    defaults = {
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # The store that torch would share with the ranks listens on all interfaces.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    if sys.platform == "linux":
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    added = [name for name in defaults if name not in os.environ]
    for one in loggers:
        one.handlers, one.propagate = [logging.NullHandler()], False
    os.environ.update({name: defaults[name] for name in added})
    try:
        yield
    finally:
        for one, (handlers, propagate) in zip(loggers, kept, strict=True):
            one.handlers, one.propagate = handlers, propagate
        for name in added:
            os.environ.pop(name, None)
