"""srun's variables, translated into torch's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwrap.collectives.process.init import adopt_slurm, first_host, tasks_per_node


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
    first=st.integers(0, 999),
    width=st.integers(1, 4),
    more=st.sampled_from(["", "-{}", ",{}", "-{0},{0}"]),
    rest=st.sampled_from(["", ",other", ",more[1-2]"]),
)
def test_a_range_starts_with_its_first_number(
    prefix: str, first: int, width: int, more: str, rest: str
) -> None:
    number = f"{first:0{width}}"
    nodes = f"{prefix}[{number}{more.format(first + 3)}]{rest}"
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
