"""Run a function on ranks with a CUDA device each, over NCCL.

    def _sum_of_ranks() -> float:
        value = torch.full((1,), float(dist.get_rank()), device="cuda")
        dist.all_reduce(value)
        return value.item()

    def test_sum() -> None:
        assert run_on_gpus(_sum_of_ranks, 2) == [1.0, 1.0]

Every call starts new processes with the variables of torchrun. They join their group by `launch`,
which chooses `cpu:gloo,cuda:nccl`. No process outlives the call, whatever happens to the others.

Functions, arguments and results travel by plain pickle, so functions live at module level, and
results hold no tensor of a device.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import warm
from ports import free_port
from rank_process import remove_launcher

T = TypeVar("T")

# How long the other ranks may run after one has failed.
GRACE_S = 10.0
# NCCL ends a process 60 s after the timeout of the group, which is a few seconds in tests of
# failures. An error that takes longer than this is not ours.
BEFORE_NCCL_S = 50.0
_START = "import sys; sys.path.insert(0, sys.argv[1]); import gpu_ranks; gpu_ranks.main()"


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended.

    Attributes:
        value: what the function returned; None after an error.
        error: "type: text" of the error that left `launch`; "" if there was none.
        exit_code: None if the process had to be killed because it did not end.
        output: what it printed.
    """

    value: Any
    error: str
    exit_code: int | None
    output: str


@dataclass(frozen=True)
class _Request:
    payload: bytes
    path: list[str]
    timeout_s: float
    limit_s: float


def run_on_gpus(
    fn: Callable[..., T],
    count: int,
    *args: Any,
    timeout_s: float = 120.0,
    limit_s: float = 300.0,
    environments: Sequence[Mapping[str, str]] = (),
) -> list[T]:
    """Call `fn(*args)` on `count` ranks and return the results by rank.

    Args:
        fn: a module-level function.
        timeout_s: the timeout of the group.
        limit_s: a process that runs longer is killed. After a failure the others have `GRACE_S`.
        environments: further variables of each rank.
    """
    request = _Request(pickle.dumps((fn, args)), list(sys.path), timeout_s, limit_s)
    ends = _run(request, count, environments, grace_s=GRACE_S)
    texts = [
        f"rank {rank} ended with {end.exit_code}: {end.error}\n{end.output}"
        for rank, end in enumerate(ends)
        if end.exit_code != 0
    ]
    assert not texts, "\n".join(texts)
    return [end.value for end in ends]


def fail_on_gpus(
    fn: Callable[..., Any],
    count: int,
    *args: Any,
    absent: int,
    timeout_s: float = 8.0,
    limit_s: float = BEFORE_NCCL_S,
) -> list[RankEnd]:
    """Call `fn(*args)` on ranks of which one never comes, and return how each of them ended.

    Args:
        absent: the rank that `fn` stops. It is killed after the others have ended.
        timeout_s: the timeout of the group.
        limit_s: a process that runs longer is killed.
    """
    request = _Request(pickle.dumps((fn, args)), list(sys.path), timeout_s, limit_s)
    return _run(request, count, (), grace_s=limit_s, absent={absent})


def _run(
    request: _Request,
    count: int,
    environments: Sequence[Mapping[str, str]],
    *,
    grace_s: float,
    absent: Collection[int] = (),
) -> list[RankEnd]:
    with tempfile.TemporaryDirectory(prefix="gpu_ranks_") as name:
        folder = Path(name)
        (folder / "request").write_bytes(pickle.dumps(request))
        shared = remove_launcher(os.environ.items())
        shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        processes: list[subprocess.Popen[str]] = []
        try:
            for rank in range(count):
                variables = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                further = environments[rank] if environments else {}
                processes.append(_start(folder, rank, {**variables, **further}, bool(further)))
            _wait(processes, request.limit_s, grace_s, absent)
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                _kill(process)
        return [_read_end(folder, rank, code) for rank, code in enumerate(codes)]


def _start(
    folder: Path, rank: int, environment: Mapping[str, str], is_fresh: bool
) -> subprocess.Popen[str]:
    words = ["-c", _START, str(Path(__file__).parent), str(folder)]
    with (folder / f"output_{rank}").open("w") as output:
        options: dict[str, Any] = {
            "env": environment,
            "stdin": subprocess.DEVNULL,
            "stdout": output,
            "stderr": subprocess.STDOUT,
            "text": True,
            "start_new_session": True,
        }
        # A fork of a process that has imported torch may already know which devices there are.
        if is_fresh:
            return subprocess.Popen([sys.executable, *words], **options)
        return warm.popen(*words, **options)


def _wait(
    processes: list[subprocess.Popen[str]],
    limit_s: float,
    grace_s: float,
    absent: Collection[int],
) -> None:
    """Wait until all processes have ended, except the absent ones, or until their time is over."""
    deadline, has_failed = time.monotonic() + limit_s, False
    awaited = [process for rank, process in enumerate(processes) if rank not in absent]
    while any(process.poll() is None for process in awaited) and time.monotonic() < deadline:
        if not has_failed and any(process.returncode for process in awaited):
            has_failed, deadline = True, min(deadline, time.monotonic() + grace_s)
        time.sleep(0.02)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process with everything that it started, and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_end(folder: Path, rank: int, exit_code: int | None) -> RankEnd:
    path = folder / f"result_{rank}"
    value, error = pickle.loads(path.read_bytes()) if path.exists() else (None, "")
    output = (folder / f"output_{rank}").read_text(errors="replace")
    return RankEnd(value, error, exit_code, output)


# In the ranks.


def main() -> None:
    """Run the request in the folder that the command line names, and write the result there."""
    folder, rank = Path(sys.argv[2]), int(os.environ["RANK"])
    request: _Request = pickle.loads((folder / "request").read_bytes())
    sys.path[:] = request.path
    faulthandler.dump_traceback_later(max(request.limit_s - 5, 1))
    fn, args = pickle.loads(request.payload)
    _meet(folder, rank)
    from stepwrap.runner import launch

    value, error = None, ""
    try:
        (value,) = launch(_call, (fn, args), timeout_s=request.timeout_s).values()
    except Exception as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    draft = folder / f"draft_{rank}"
    draft.write_bytes(pickle.dumps((value, error)))
    draft.rename(folder / f"result_{rank}")
    faulthandler.cancel_dump_traceback_later()
    if error:
        sys.exit(1)


def _call(fn: Callable[..., T], args: tuple[Any, ...]) -> T:
    import torch
    import torch.distributed as dist

    assert dist.get_backend_config() == "cpu:gloo,cuda:nccl"
    torch.manual_seed(0)
    return fn(*args)


def _meet(folder: Path, rank: int) -> None:
    """Wait until all ranks have imported their modules: a short timeout is meant for the test."""
    (folder / f"ready_{rank}").touch()
    for other in range(int(os.environ["WORLD_SIZE"])):
        while not (folder / f"ready_{other}").exists():
            time.sleep(0.01)


def stay_away(how: str) -> None:
    """Kill or stop this process, or let it sleep until it is killed."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        time.sleep(0.05)
