"""The back-end over MPI, under a real mpirun."""

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from warm import run

SCRIPT = """
import threading
import torch
from stepwrap.collectives import BaseMetric, get_dist_backend, metric_sync
from torchmetrics.classification import MulticlassAccuracy

backend = get_dist_backend("mpi4py")
rank, size = backend.rank, backend.world_size
assert (backend.is_initialized, size) == (True, 2)

def outcome(call, *args):
    try:
        call(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""

for src in (0, 1):
    for payload in (b"1", list(range(300)), bytes(5_000_000), None, {"t": torch.ones(2, 3)}):
        # A rank that receives may hold what cannot be pickled.
        received = backend.broadcast_object(payload if rank == src else (lambda: 0), src)
        assert (received is payload) == (rank == src) or payload is None
        assert str(received) == str(payload)
assert outcome(backend.broadcast_object, 1, 2) == (
    "ValueError", "src must be a rank below 2, got 2"
)

mine = [rank] * 10**rank
gathered = backend.all_gather_object(mine)
assert gathered == [[0], [1] * 10]
assert gathered[rank] is not mine
assert backend.all_gather_object(None) == [None, None]
big = backend.all_gather_object(torch.full((1_000_000,), float(rank)))
assert [part.sum().item() for part in big] == [0, 1_000_000]
big[rank] += 1

bad = threading.Lock() if rank == 1 else "text"
for name, text in (
    outcome(backend.all_gather_object, bad), outcome(backend.broadcast_object, bad, 1)
):
    assert name == "CollectiveError", name
    assert "rank 1: TypeError: cannot pickle" in text, text

class Picky:
    def __setstate__(self, state):
        if backend.rank != state["home"]:
            raise LookupError("not installed here")

picky = Picky()
picky.home = 0
for name, text in (
    outcome(backend.all_gather_object, picky), outcome(backend.broadcast_object, picky)
):
    assert name == "CollectiveError", name
    assert "rank 1: LookupError: not installed here" in text, text
    assert "rank 0" not in text

class Items(BaseMetric):
    def add(self, items):
        self._results += items

    def compute_metric(self, results):
        if results == ["bad"]:
            raise ZeroDivisionError("no samples")
        return results

metric = Items(dist_backend="mpi4py")
metric.add([[0, 2, 4], [1, 3]][rank])
assert metric.compute() == [0, 1, 2, 3, 4]
metric.reset()
metric.add([["bad"], []][rank])
assert outcome(metric.compute)[0] == "ZeroDivisionError"

accuracy = MulticlassAccuracy(2, average="micro", **metric_sync("mpi4py"))
accuracy.update(*[(torch.tensor([0, 1, 1]), torch.ones(3).long()), (torch.tensor([0]),) * 2][rank])
assert accuracy.compute() == 0.75

from mpi4py import MPI
MPI.Finalize()
assert (backend.is_initialized, backend.rank, backend.world_size) == (False, 0, 1)
assert backend.broadcast_object(metric) is metric
assert backend.all_gather_object(metric)[0] is metric
print(f"rank {rank} is done")
"""


def _find_mpirun() -> str | None:
    beside_python = str(Path(sys.executable).parent)
    return shutil.which("mpirun", path=beside_python) or shutil.which("mpirun")


def _run(*command: str, timeout_s: float) -> tuple[int, str]:
    """Run a command in a separate process group, and end the group afterwards."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    ) as process:
        try:
            out, _ = process.communicate(timeout=timeout_s)
        except BaseException:
            # mpirun ends its ranks on SIGTERM, but not when it is killed.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    mpirun = _find_mpirun()
    if mpirun is None:
        pytest.skip("no mpirun on PATH or next to python: Open MPI is not installed")
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed: pip install 'stepwrap[mpi]'")
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    flags = ("-n", "2", "--allow-run-as-root", "--oversubscribe")
    # With mpi4py's runner a rank that raises ends all ranks.
    command = (mpirun, *flags, sys.executable, "-W", "error", "-m", "mpi4py", str(script))
    code, out = _run(*command, timeout_s=90)
    assert code == 0, out
    # The ranks' lines may be mixed.
    assert [out.count(f"rank {rank} is done") for rank in (0, 1)] == [1, 1], out


WITHOUT = """
import sys
sys.modules["mpi4py"] = None
from stepwrap.collectives import MPI4PyDist, get_dist_backend
for make in (MPI4PyDist, lambda: get_dist_backend("mpi4py")):
    try:
        make()
    except ImportError as error:
        assert "pip install 'stepwrap[mpi]'" in str(error)
    else:
        raise SystemExit("no error")
"""


def test_without_mpi4py_the_extra_is_named() -> None:
    run("-c", WITHOUT)
