"""Run one function in several processes of this machine, or join the ones already started."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import sys
import tempfile
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
        Terminated: SIGTERM or SIGHUP did so.
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
def process_group(backend: str = "auto", timeout_s: float = 1800.0) -> Iterator[None]:
    """Have the default group of the environment's ranks; every rank must enter.

    A group that is there already is used and left alone.
    """
    if dist.is_initialized():
        yield
        return
    _adopt_slurm()
    local_rank = int(os.environ.get("LOCAL_RANK") or 0)
    name = _backend_name(backend)
    device = None
    if "nccl" in name:
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(name, timeout=timedelta(seconds=timeout_s), device_id=device)
    try:
        yield
    finally:
        # A process that exits with a live group aborts now and then.
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def lonely_group() -> Iterator[None]:
    """Have a group of this process alone, for wrappers that cannot do without any."""
    if dist.is_initialized():
        yield
        return
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group(_backend_name("auto"), store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _backend_name(backend: str) -> str:
    if backend != "auto":
        return backend
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= ranks_here
    return "cpu:gloo,cuda:nccl" if enough and dist.is_nccl_available() else "gloo"


def _adopt_slurm() -> None:
    """Give torch the variables it reads, from those that srun sets."""
    if os.environ.get("RANK"):
        return
    env = os.environ
    step = int(env.get("SLURM_JOB_ID", "0"))
    found = {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_NTASKS"],
        "LOCAL_RANK": env.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": env.get("SLURM_LAUNCH_NODE_IPADDR", "localhost"),
        # Two jobs on one node have different ids, hence different ports.
        "MASTER_PORT": str(20_000 + step % 20_000),
    }
    for name, value in found.items():
        env.setdefault(name, value)


def _start(
    fn: Callable[..., T], args: tuple[Any, ...], *, nproc: int, backend: str, timeout_s: float
) -> dict[int, T]:
    folder = Path(tempfile.mkdtemp(prefix="stepwrap_launch_"))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
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
    if failures and not causes:
        silent = set(range(_rank_count(folder))) - {failure.rank for failure in failures}
        causes = [_death(rank, error.failures) for rank in sorted(silent)]
    rest = [failure for failure in failures if failure not in causes]
    if causes or rest:
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
    rank = int(os.environ["RANK"])
    die_with_parent(parent)
    (Path(folder) / f"pid_{rank}").write_text(str(os.getpid()))
    failed = Path(folder) / f"failure_{rank}.json"
    try:
        with process_group(backend, timeout_s):
            # Not earlier: a rank that ends while the group forms makes the others complain.
            heed_signals()
            try:
                return pickle.dumps(fn(*args))
            except Exception as error:
                # Before the group goes: what the others then run into is later than this.
                Failure.of(error, rank).write(failed)
                raise
    except KeyboardInterrupt:
        # torch would take a rank that was interrupted for one that still works.
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if not failed.exists():
            Failure.of(error, rank).write(failed)
        sys.exit(1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's launcher, whose errors we tell ourselves, and set the ranks' defaults."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed", "torch.multiprocessing")]
    kept = [(one.handlers, one.propagate) for one in loggers]
    defaults = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
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
