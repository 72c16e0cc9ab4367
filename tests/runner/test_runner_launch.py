"""Processes started, joined and ended."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from runner_parts import write_run

from stepwrap.collectives import get_rank, get_world_size
from stepwrap.runner import LaunchError, launch
from stepwrap.runner.failure import Failure
from stepwrap.runner.launcher import lonely_group, process_group, started_outside


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


def test_one_process_needs_no_launch() -> None:
    assert launch(get_world_size) == {0: 1}
    with pytest.raises(ValueError, match="nproc must be at least 1, got 0"):
        launch(get_world_size, nproc=0)


def test_the_environment_of_a_launcher_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert started_outside()
    # Not two: nproc counts for nothing where a launcher has decided.
    assert launch(dist.is_initialized, nproc=2) == {0: True}
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("variables", "outside"),
    [
        ({}, False),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, False),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NAME": "bash"}, False),
        ({"RANK": "", "WORLD_SIZE": ""}, False),
    ],
)
def test_who_has_started_this_process(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], outside: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert started_outside() is outside


def test_a_group_that_exists_is_left_alone() -> None:
    with lonely_group():
        with process_group():
            assert get_world_size() == 1
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_torchrun_starts_the_command(tmp_path: Path) -> None:
    write_run(tmp_path)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    words = (
        "-m",
        "stepwrap.runner",
        "train",
        "points.yaml",
        "train.max_epochs=1",
        "launch.nproc=5",
    )
    done = subprocess.run(
        [*torchrun, *words],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("points at step 6, epoch 1") == 1
    assert len(list(tmp_path.glob("runs/points/checkpoints/step_00000006*/rank_*.pt"))) == 2


def test_a_failure_survives_writing(tmp_path: Path) -> None:
    try:
        raise KeyError("gone") from ValueError("cause")
    except KeyError as error:
        failure = Failure.of(error, rank=3)
    failure.write(tmp_path / "failure.json")
    assert Failure.read(tmp_path / "failure.json") == failure
    assert failure.location.startswith(f"{__file__}:")
    assert list(failure.lines())[0] == "KeyError: 'gone' (rank 3)"
    assert "ValueError: cause" in failure.trace
