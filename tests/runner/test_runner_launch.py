"""Starting, joining and ending processes."""

import contextlib
import io
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import warm
from marks import nightly, slow
from ports import free_port
from programs import ended, run, run_script
from ranks import run_ranks
from runner_parts import assert_identical, final_weights, points_config, run_command, write_run

from stepwrap.collectives import all_gather_object, broadcast, get_rank, get_world_size, synchronize
from stepwrap.runner import LaunchError, Runner, launch
from stepwrap.runner import launcher as _launcher
from stepwrap.runner import rank_processes as _rank_processes
from stepwrap.runner.command.cli import main
from stepwrap.runner.jobs import _console_log
from stepwrap.runner.launcher import process_group, single_process_group, started_outside


def rank_and_sum(start: float) -> tuple[int, float, str]:
    value = torch.tensor([start + get_rank()])
    dist.all_reduce(value)
    return get_rank(), value.item(), os.environ["OMP_NUM_THREADS"]


def fail_on_the_last_rank() -> None:
    if get_rank() == get_world_size() - 1:
        raise ValueError("no luck")
    dist.barrier()


def test_launch_returns_every_ranks_result() -> None:
    assert launch(rank_and_sum, (1.0,), nproc=2) == {0: (0, 3.0, "1"), 1: (1, 3.0, "1")}
    assert not dist.is_initialized()


def test_launch_raises_the_first_error_and_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match=r"ValueError: no luck \(rank 1\)") as caught:
        launch(fail_on_the_last_rank, nproc=2)
    assert caught.value.failures[0].location.endswith("in fail_on_the_last_rank")
    assert capfd.readouterr() == ("", "")


def break_a_pipe(error: Exception) -> None:
    """Fail on the last rank; the others fail later with an error of their own."""
    if get_rank() == get_world_size() - 1:
        raise error
    try:
        dist.barrier()
    except Exception:
        raise ValueError("stopped") from None


@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(32, "Broken pipe"),
        *slow(ConnectionResetError("reset by peer"), RuntimeError("Broken pipe to the encoder")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_the_users_pipes_are_causes(error: Exception) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(break_a_pipe, (error,), nproc=2)
    assert (caught.value.failures[0].kind, caught.value.failures[0].rank) == (
        type(error).__name__,
        1,
    )


BROKEN = """
from stepwrap.loops import Hook

class Encoder(Hook):
    def on_epoch_start(self, state):
        raise BrokenPipeError(32, "Broken pipe")
"""


def test_errors_of_the_users_pipes_are_reported_in_one_process(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (run / "encoder.py").write_text(BROKEN)
    assert main(["train", "points.yaml", "hooks.encoder={type: encoder.Encoder}"]) == 1
    err = capfd.readouterr().err
    assert "BrokenPipeError: [Errno 32] Broken pipe" in err
    assert "encoder.py:6 in on_epoch_start" in err


# A main program without a file, like a notebook or a prompt.
CELLS = """
import torch
import torch.distributed as dist
from stepwrap.runner import launch

class Answer:
    def __init__(self, value):
        self.value = value

factor = 3.0

def work(start):
    value = torch.tensor([start.value * factor + dist.get_rank()])
    dist.all_reduce(value)
    return Answer(value.item())

answers = launch(work, (Answer(2.0),), nproc=2)
assert all(type(one) is Answer and one.value == 13.0 for one in answers.values()), answers
assert launch(lambda: dist.get_rank(), nproc=2) == {0: 0, 1: 1}

import threading
lock = threading.Lock()
try:
    launch(lambda: lock.locked(), nproc=2)
except TypeError as error:
    assert str(error).endswith("one of them cannot be pickled: cannot pickle '_thread.lock' object")
else:
    raise AssertionError
"""


@pytest.mark.slow
def test_functions_of_a_notebook_run_on_ranks(tmp_path: Path) -> None:
    run("-c", CELLS, cwd=tmp_path)


@pytest.mark.slow
def test_a_program_without_a_file_is_refused(tmp_path: Path) -> None:
    program = "from stepwrap.runner import launch\nlaunch(print, nproc=2)\n"
    done = ended(cwd=tmp_path, input=program)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("RuntimeError: launch starts processes that")
    assert re.search("<stdin> .*not a file: save ", done.stderr)


def save_slowly(out: Path) -> None:
    """Act like rank 0's checkpoint hook after another rank has failed."""
    if get_rank() == 1:
        raise ValueError("no luck")
    folder = Path(os.environ["STEPWRAP_LAUNCH_DIR"])
    # Before the failure, so that the launcher sees the marker in time on a busy machine.
    (folder / "saving_0").touch()
    try:
        dist.barrier()
    except RuntimeError:
        time.sleep(2.0)
        (out / "saved").touch()
        (folder / "saving_0").unlink()
        raise


@pytest.mark.slow
def test_a_rank_that_saves_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rank_processes, "_GRACE_S", 1.0)
    with pytest.raises(LaunchError, match=r"ValueError: no luck \(rank 1\)") as caught:
        launch(save_slowly, (tmp_path,), nproc=2)
    assert (tmp_path / "saved").exists()
    assert {failure.rank for failure in caught.value.failures} == {0, 1}


def leave(in_what: str) -> None:
    """Exit rank 1 with code 0 while rank 0 waits for it or works."""
    synchronize()
    if get_rank() == 1:
        os._exit(0)
    if in_what == "a gather":
        all_gather_object(get_rank())
    elif in_what == "a barrier":
        synchronize()
    time.sleep(600)


@pytest.mark.parametrize("in_what", ["its own work", *slow("a gather", "a barrier")])
def test_a_rank_that_leaves_before_its_work_is_done_is_an_error(
    in_what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_rank_processes, "_GRACE_S", 1.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    message = r"the process exited with code 0 before its work was done \(rank 1\)"
    # Create multiprocessing's folder for sockets now, because it is kept until this process ends.
    get_temp_dir()
    before = list(tmp_path.iterdir())
    with pytest.raises(LaunchError, match=message):
        launch(leave, (in_what,), nproc=2)
    assert list(tmp_path.iterdir()) == before


def cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def test_more_than_four_processes_for_a_core_are_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = 4 * cores() + 1
    message = f"{many} processes are too many for the {cores()} cores of this machine"
    with pytest.raises(ValueError, match=f"{message}.*--oversubscribe"):
        launch(get_world_size, nproc=many)
    # Refused before anything is imported.
    words = ["train", "points.yaml", "--nproc", str(many), "wrapper.type=single"]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert f"launch.nproc: {message}" in err
    assert "SingleDevice" not in err
    assert not (run / "runs").exists()


@pytest.mark.slow
def test_processes_that_do_not_fit_into_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launcher, "free_memory", lambda device: 2.0**20)
    message = (
        r"2 processes do not fit into memory: each takes 0\.[1-9]. GiB .* 0\.00 GiB are free for 1"
    )
    with pytest.raises(ValueError, match=message):
        launch(get_world_size, nproc=2)
    assert launch(get_world_size, nproc=2, oversubscribe=True) == {0: 2, 1: 2}


IMPORTING = """
import os
import time
from pathlib import Path

from stepwrap.runner import launch

def main():
    pass

if __name__ == "__main__":
    launch(main, nproc=2)
else:
    Path(f"importing_{os.getpid()}").touch()
    time.sleep(600)
"""


@pytest.mark.slow
def test_ranks_that_still_import_end_with_their_launcher(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(IMPORTING)
    with subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path) as launcher:
        limit = time.monotonic() + 60
        while len(ranks := list(tmp_path.glob("importing_*"))) < 2:
            assert launcher.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.01)
        launcher.kill()
    limit = time.monotonic() + 60
    while any(_rank_processes.is_running(int(rank.name.partition("_")[2])) for rank in ranks):
        assert time.monotonic() < limit
        time.sleep(0.01)


LEAKING = """
import time
from torch.utils.data import DataLoader
from stepwrap.collectives import get_rank, synchronize
from stepwrap.runner import launch

def main():
    batches = iter(DataLoader(range(9), num_workers=1, multiprocessing_context="spawn"))
    next(batches)
    synchronize()
    if get_rank() == 0:
        raise ValueError("no luck")
    time.sleep(600)

if __name__ == "__main__":
    launch(main, nproc=2)
"""


@pytest.mark.slow
def test_semaphores_of_failed_ranks_cause_no_warning(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LEAKING)
    done = ended("script.py", cwd=tmp_path)
    assert "ValueError: no luck (rank 0)" in done.stderr
    assert "resource_tracker" not in done.stderr


@pytest.mark.parametrize("args", ["text", {"key": 1}, 3])
def test_arguments_that_are_not_a_tuple_are_refused(args: Any) -> None:
    message = re.escape(f"args must be a tuple or list, got {args!r}; write ({args!r},)")
    for nproc in (1, 2):
        with pytest.raises(TypeError, match=message):
            launch(get_world_size, args, nproc=nproc)


def fail_alone() -> None:
    if get_rank() == 0:
        raise ValueError("no luck")


@pytest.mark.slow
def test_ranks_that_succeed_do_not_hide_the_one_that_fails() -> None:
    with pytest.raises(LaunchError, match=r"ValueError: no luck \(rank 0\)"):
        launch(fail_alone, nproc=2)


def sockets(process: int) -> set[str]:
    targets = [
        str(entry.readlink())
        for entry in Path(f"/proc/{process}/fd").iterdir()
        if entry.is_symlink()
    ]
    return {name.removeprefix("socket:[").removesuffix("]") for name in targets}


def listening(before: set[str]) -> list[str]:
    """Return the addresses at which this rank and its launcher listen."""
    mine = (sockets(os.getpid()) | sockets(os.getppid())) - before
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    synchronize()
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in mine]


def folder_mode() -> int:
    return Path(os.environ["STEPWRAP_LAUNCH_DIR"]).stat().st_mode & 0o777


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
reads_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@reads_proc
@pytest.mark.slow
def test_nothing_listens_beyond_this_machine() -> None:
    # The launcher is the pytest process, in which an earlier test may have left a store.
    before = sockets(os.getpid())
    for addresses, mode in launch(both, (before,), nproc=2).values():
        assert mode == 0o700
        assert set(addresses) <= LOOPBACK


def both(before: set[str]) -> tuple[list[str], int]:
    return listening(before), folder_mode()


@reads_proc
def test_the_ranks_of_one_host_meet_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "0"}
    # Set like srun, which names the first host.
    for name, value in {**variables, "MASTER_ADDR": "192.0.2.1"}.items():
        monkeypatch.setenv(name, value)
    addresses = launch(listening, (sockets(os.getpid()) | sockets(os.getppid()),))[0]
    assert addresses
    assert set(addresses) <= LOOPBACK


def test_one_process_needs_no_launch() -> None:
    assert launch(get_world_size) == {0: 1}
    with pytest.raises(ValueError, match="nproc must .*at least 1, got 0"):
        launch(get_world_size, nproc=0)


def test_the_environment_of_a_launcher_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert started_outside()
    # A launcher has decided on one process, so nproc is ignored.
    assert launch(dist.is_initialized, nproc=2) == {0: True}
    assert not dist.is_initialized()


PAIR = """
import time
from datetime import timedelta

import torch.distributed as dist

from stepwrap.collectives import all_gather_object
from stepwrap.runner import launch


def main():
    pair = dist.new_group([0, 1], timedelta(seconds=3))
    if dist.get_rank() == 0:
        time.sleep(60)
    if dist.get_rank() == 1:
        all_gather_object(1, pair)


launch(main, timeout_s=3)
"""


@pytest.mark.slow
def test_a_rank_that_has_finished_is_not_blamed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PAIR)
    shared = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        warm.popen(
            tmp_path / "program.py",
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            text=True,
            stderr=subprocess.PIPE,
        )
        for rank in range(3)
    ]
    try:
        _, output = processes[1].communicate(timeout=60)
    finally:
        processes[0].kill()
        for rank in (0, 2):
            processes[rank].communicate()
    assert processes[2].returncode == 0
    error = output.splitlines()[-1]
    assert "CollectiveError" in error
    assert "rank 0" in error
    assert "rank 2" not in output


@pytest.mark.parametrize(
    ("variables", "outside"),
    [
        ({}, False),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, False),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "1"}, False),
        ({"RANK": "", "WORLD_SIZE": ""}, False),
    ],
)
def test_launchers_are_recognised(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], outside: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert started_outside() is outside


def test_a_group_that_exists_is_left_alone() -> None:
    with single_process_group():
        with process_group():
            assert get_world_size() == 1
        assert dist.is_initialized()
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_group_over_nccl_needs_a_device() -> None:
    with pytest.raises(ValueError, match="'nccl' needs a CUDA device"), process_group("nccl"):
        pass


# The plainest must be first, because imports of the others hide its failure.
KINDS = [
    "StepDistributedDataParallel",
    "SeparateDistributedDataParallel",
    "StepFullyShardedDataParallel",
]
JOINING = """
import os
from pathlib import Path

import torch
from ports import free_port

from stepwrap.runner import launch
from stepwrap import wrappers
from stepwrap.wrappers import OptimWrapper, SupervisedModel, wrap_model


def train(kind):
    model = SupervisedModel(torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss())
    wrapped = wrap_model(getattr(wrappers, kind), model)
    optim = OptimWrapper(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    wrapped.train_step([torch.ones(4, 3), torch.tensor([0, 1, 1, 0])], optim)
    return len(os.listdir("/proc/self/task")) > 1


os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
for kind in {kinds}:
    os.environ["MASTER_PORT"] = str(free_port())
    had_threads = launch(train, (kind,))[0]
    left = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    print(kind, had_threads, len(left), *sorted(left))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system counts no threads")
@pytest.mark.slow
def test_no_thread_of_a_group_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that exits with such a thread sometimes aborts."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    lines = run_script(JOINING.replace("{kinds}", str(KINDS)), tmp_path).splitlines()
    assert [line.split()[:3] for line in lines] == [[kind, "True", "1"] for kind in KINDS], lines


def torchrun(
    folder: Path, *words: str, restarts: int = 0, nproc: int = 2
) -> subprocess.CompletedProcess[str]:
    starter = "-m torch.distributed.run --standalone --monitor-interval=0.1"
    return ended(
        *(*starter.split(), f"--nproc-per-node={nproc}", f"--max-restarts={restarts}"),
        *("-m", "stepwrap.runner", "train", "points.yaml", "--run-dir", "run", *words),
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
    )


# Sample 47 is rank 1's last one in the first epoch; a checkpoint of an earlier update exists.
LAST = (
    "data.train.shuffle=false",
    "data.train.dataset.bad=47",
    "data.train.dataset.bad_rank=1",
    "train.max_epochs=2",
)


@pytest.mark.slow
def test_torchrun_starts_the_command_and_a_rank_that_is_gone_is_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    done = torchrun(tmp_path, "train.max_epochs=1", "launch.nproc=5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("points at step 6, epoch 1") == 1
    assert len(list(tmp_path.glob("run/checkpoints/step_00000006*/rank_*"))) == 2
    done = torchrun(tmp_path, *LAST, "data.train.dataset.deadly=exit", "--fresh")
    assert done.returncode == 1
    assert re.search(r"ProcessEnded: .*\(rank 1\)", done.stderr)


def train_to_the_end(folder: Path) -> None:
    os.chdir(folder)
    settings = ("run_dir=whole", "train.max_epochs=2", "data.train.shuffle=false")
    Runner.from_config(points_config(folder, *settings)).train()


@pytest.mark.parametrize(
    ("start", "ranks", "saved"),
    [("--fresh", 2, 3), ("--resume", 3, 3), *nightly(("--resume", 2, 3), ("--resume", 4, 2))],
)
@pytest.mark.slow
def test_a_run_restarted_by_torchrun_continues_from_its_last_checkpoint(
    start: str, ranks: int, saved: int, tmp_path: Path
) -> None:
    """The resume is exact; the last rank dies."""
    write_run(tmp_path)
    words = [f"data.train.dataset.bad_rank={ranks - 1}", f"hooks.checkpoint.every_steps={saved}"]
    # The checkpoint is complete before the rank dies.
    words += ["data.train.dataset.deadly=true", "hooks.checkpoint.background=false", start]
    done = torchrun(tmp_path, *LAST, *words, restarts=2, nproc=ranks)
    assert done.returncode == 0, done.stderr
    assert f"continuing from run/checkpoints/step_0000000{saved}, step {saved}" in done.stderr
    run_ranks(train_to_the_end, ranks, tmp_path)
    assert_identical(final_weights(tmp_path / "run"), final_weights(tmp_path / "whole"))


@pytest.mark.slow
def test_a_run_restarted_by_torchrun_does_not_take_over_another_run(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "run/checkpoints/step_00000003").mkdir(parents=True)
    done = torchrun(tmp_path, restarts=1)
    assert done.returncode == 1
    assert len(re.findall("already holds 1 checkpoint.* step_00000003", done.stderr)) == 2


def test_ranks_overwrite_no_results(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    results = tmp_path / "runs/points"
    (results / "checkpoints/step_00000003").mkdir(parents=True)
    assert run_ranks(run_command, 2, tmp_path, "train", "points.yaml") == [2, 2]
    message = "".join(capfd.readouterr())
    assert len(re.findall("already holds 1 checkpoint.* step_00000003", message)) == 1
    assert [path.name for path in results.iterdir()] == ["checkpoints"]


def end_alike(folder: Path) -> tuple[int, int]:
    """Run the command twice on ranks that were started otherwise."""
    os.chdir(folder)
    sys.modules.pop("points", None)
    # Destroy the group, because the command creates one; the environment sets the ranks.
    os.environ |= {"RANK": str(get_rank()), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    ports = broadcast([free_port(), free_port()])
    dist.destroy_process_group()
    words = ["train", "points.yaml", "hooks.progress=false"]
    stop = "hooks.stop={type: runner_parts.SignalHook, at_step: 4}"
    codes = []
    for port, more in zip(ports, ([stop], []), strict=True):
        os.environ["MASTER_PORT"] = str(port)
        codes.append(main([*words, *more]))
    return codes[0], codes[1]


def test_all_ranks_end_with_the_same_code(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert run_ranks(end_alike, 2, tmp_path) == [(143, 2), (143, 2)]


def warn() -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with _console_log(debug=False):
            warnings.warn("careful", UserWarning, stacklevel=1)
        return len(caught)


def test_only_rank_0_shows_warnings() -> None:
    assert run_ranks(warn, 2) == [1, 0]


def warn_by_log() -> str:
    with contextlib.redirect_stderr(io.StringIO()) as message, _console_log(debug=False):
        logging.getLogger("stepwrap.loops").warning("careful")
    return message.getvalue()


def test_only_rank_0_shows_logged_warnings() -> None:
    assert run_ranks(warn_by_log, 2) == ["careful\n", ""]


def test_the_levels_of_loggers_are_restored() -> None:
    def levels() -> dict[str, int]:
        loggers = logging.root.manager.loggerDict
        return {
            name: logger.level
            for name, logger in loggers.items()
            if isinstance(logger, logging.Logger)
        }

    logging.getLogger("stepwrap.runner.runner").setLevel(logging.ERROR)
    before = levels()
    with _console_log(debug=False):
        assert logging.getLogger("stepwrap.runner.runner").level == logging.INFO
    assert {name: levels()[name] for name in before} == before
