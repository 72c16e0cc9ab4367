"""srun's variables, translated into torch's."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwrap.collectives import get_local_rank, get_rank, get_world_size
from stepwrap.collectives.dist import infer_launcher
from stepwrap.collectives.process.slurm import (
    adopt_slurm,
    describe_slurm,
    first_host,
    slurm_tasks,
    tasks_per_node,
)
from stepwrap.runner.command.cli import main
from stepwrap.runner.launcher import launched_ranks, started_outside


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("alone", "alone"),
        ("a,b", "a"),
        ("node[01-04,07],other", "node01"),
        ("node[7,1-3]", "node7"),
        ("rack[2-3]node[08-10].site,x[1-2]", "rack2node08.site"),
        ("gpu-a-3,gpu-a-4", "gpu-a-3"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@given(
    prefix=st.from_regex(r"[a-z][a-z-]{0,8}", fullmatch=True),
    start=st.integers(0, 999),
    width=st.integers(1, 4),
    more=st.sampled_from(["", "-{}", ",{}", "-{0},{0}"]),
    suffix=st.sampled_from(["", ",other", ",more[1-2]"]),
)
def test_a_range_starts_with_its_first_number(
    prefix: str, start: int, width: int, more: str, suffix: str
) -> None:
    number = f"{start:0{width}}"
    nodes = f"{prefix}[{number}{more.format(start + 3)}]{suffix}"
    assert first_host(nodes) == prefix + number


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 5)), min_size=1))
def test_tasks_per_node_are_unfolded(groups: list[tuple[int, int]]) -> None:
    text = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else str(tasks) for tasks, nodes in groups)
    assert list(tasks_per_node(text)) == [tasks for tasks, nodes in groups for _ in range(nodes)]


@pytest.mark.parametrize("text", ["", "8(y2)", "8x2", "-1"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be in Slurm's format"):
        list(tasks_per_node(text))


@pytest.mark.parametrize("nodes", ["", ",a", "node[1-2"])
def test_other_lists_of_hosts_are_refused(nodes: str) -> None:
    with pytest.raises(ValueError, match="must be in Slurm's format"):
        first_host(nodes)


def srun(**more: str) -> dict[str, str]:
    env = {"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "4711"}
    env |= {"SLURM_STEP_NODELIST": "n[03-04]", "SLURM_JOB_NODELIST": "n[01-04]"} | more
    adopt_slurm(env)
    return env


def test_srun_sets_rank_and_sizes() -> None:
    env = srun(SLURM_STEP_TASKS_PER_NODE="4,2", SLURM_NODEID="1")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert [env[name] for name in names] == ["5", "6", "1", "2", "n03"]
    assert srun(SLURM_NTASKS_PER_NODE="3", SLURM_NODEID="1")["LOCAL_WORLD_SIZE"] == "3"
    assert "LOCAL_WORLD_SIZE" not in srun()
    assert srun(MASTER_ADDR="mine")["MASTER_ADDR"] == "mine"


def test_jobs_and_steps_have_different_ports() -> None:
    ports = {
        srun(SLURM_JOB_ID=job, SLURM_STEP_ID=step)["MASTER_PORT"]
        for job in ("4711", "4712")
        for step in ("0", "1", "2")
    }
    assert len(ports) == 6
    assert all(12_000 <= int(port) < 32_000 for port in ports)


def test_variables_set_by_torchrun_stay() -> None:
    env = {"RANK": "0", "SLURM_PROCID": "5"}
    adopt_slurm(env)
    assert env == {"RANK": "0", "SLURM_PROCID": "5"}


# What Slurm sets in the steps that srun starts, in a job of four tasks.
JOB = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "train"}
BATCH = {**JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
STEP = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_TASK_PID": "1"}
# The shell that salloc starts on a node (use_interactive_step), with a terminal.
SALLOC = STEP | {
    "SLURM_STEP_ID": str(0xFFFFFFFA),
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_JOB_NAME": "interactive",
    "SLURM_PTY_PORT": "44263",
}
ENVIRONMENTS: dict[str, tuple[dict[str, str], bool, int]] = {
    # Name: the variables, whether a shell of srun started the process, the tasks.
    "no Slurm": ({}, False, 0),
    "salloc, shell on the login node": (JOB, False, 0),
    "salloc, shell on the login node named bash": (JOB | {"SLURM_JOB_NAME": "bash"}, False, 0),
    "salloc, shell on a compute node": (SALLOC, True, 0),
    "batch script": (BATCH, False, 0),
    "batch script, --ntasks-per-node": (BATCH | {"SLURM_NTASKS_PER_NODE": "4"}, False, 0),
    "batch script with the batch step": (BATCH | {"SLURM_STEP_ID": str(0xFFFFFFFB)}, False, 0),
    "srun in a batch script": (STEP, False, 4),
    "srun, last task": (STEP | {"SLURM_PROCID": "3", "SLURM_LOCALID": "3"}, False, 4),
    "srun, old names": (
        {**BATCH, "SLURM_STEPID": "2", "SLURM_STEP_NUM_TASKS": "4"}, False, 4
    ),
    "srun with fewer tasks than the job": (
        STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "1"}, False, 2
    ),
    "srun with one task": (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, False, 1),
    "srun in a job named bash": (STEP | {"SLURM_JOB_NAME": "bash"}, False, 4),
    "srun in the shell of salloc": (SALLOC | STEP, False, 4),
    "srun --pty python": (STEP | {"SLURM_PTY_PORT": "1"}, False, 4),
    "in the shell of srun --pty bash": (
        STEP | {"SLURM_PTY_PORT": "1", "SLURM_JOB_NAME": "bash"}, True, 0
    ),
    "step manager": (STEP | {"SLURM_STEPMGR": "node1"}, False, 4),
    "overridden to none": (STEP | {"STEPWRAP_LAUNCHER": "none"}, False, 0),
    "overridden to slurm": (BATCH | {"STEPWRAP_LAUNCHER": "slurm"}, False, 4),
    "another program": ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8"}, False, 8),
}  # fmt: skip


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_tasks_of_a_step_are_recognised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables, is_in_shell, tasks = ENVIRONMENTS[name]
    assert slurm_tasks(variables, is_in_shell=is_in_shell) == tasks
    if is_in_shell:
        # Tests have no terminal, so that a shell's cannot be recognised by itself.
        return
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    rank = int(variables.get("SLURM_PROCID", 0)) if tasks else 0
    assert (get_rank(), get_world_size()) == (rank, tasks or 1)
    assert get_local_rank() == (int(variables.get("SLURM_LOCALID", 0)) if tasks > 1 else 0)
    assert infer_launcher() == ("slurm" if tasks else "none")
    assert started_outside() == (tasks > 1)
    assert launched_ranks() == (tasks if tasks > 1 else None)
    if tasks > 1:
        env = dict(variables)
        adopt_slurm(env)
        assert env["WORLD_SIZE"] == str(tasks)


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("no Slurm", []),
        ("srun, last task", []),
        ("srun in a batch script", ["4 tasks of step 0", "job 4711", "STEPWRAP_LAUNCHER=none"]),
        ("batch script", ["not started by srun", "--nproc", "STEPWRAP_LAUNCHER=slurm"]),
        ("srun with one task", ["a single task", "--nproc", "STEPWRAP_LAUNCHER=slurm"]),
    ],
)
def test_what_is_recognised_is_described(name: str, facts: list[str]) -> None:
    line = describe_slurm(ENVIRONMENTS[name][0])
    assert bool(line) == bool(facts)
    assert "\n" not in line
    for fact in facts:
        assert fact in line


def test_the_command_says_first_what_it_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable, value in BATCH.items():
        monkeypatch.setenv(variable, value)
    run = f"run_dir={tmp_path / 'run'}"
    assert (
        main(["train", "digits_single", "device=cpu", "train.max_epochs=1", run, "--dry-run"]) == 0
    )
    err = capsys.readouterr().err
    assert re.match("Slurm: .*job 4711 .*not started .*srun", err)


def test_another_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWRAP_LAUNCHER", "torchrun")
    with pytest.raises(ValueError, match="slurm or none, got 'torchrun'"):
        started_outside()
