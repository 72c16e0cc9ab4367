"""Ranks, barriers and rank-zero guards."""

import os
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from calls import group_of_one, messages_of_collectives, outcome
from ranks import run_ranks

from stepwrap.collectives import (
    CollectiveError,
    comm_device,
    distributed_available,
    get_local_rank,
    get_rank,
    get_world_size,
    rank_zero_only,
    synchronize,
)


def _identity() -> tuple[int, int, int, bool]:
    return get_rank(), get_world_size(), get_local_rank(), distributed_available()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, 0)),
        ({"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""}, (0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4, 0)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, (3, 4, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, (3, 4, 1)),
        ({"LOCAL_RANK": "2"}, (2, 1, 2)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8"}, (5, 8, 0)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}, (5, 8, 1)),
        (
            {
                "SLURM_PROCID": "5",
                "SLURM_NTASKS": "8",
                "SLURM_LOCALID": "1",
                "SLURM_JOB_NAME": "bash",
            },
            (5, 8, 1),
        ),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 0)),
    ],
)
def test_the_environment_answers_without_a_group(
    environment: dict[str, str], expected: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert _identity() == (*expected, False)


def test_a_variable_that_is_not_an_integer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match="RANK must .*integer, got 'first'"):
        get_rank()


def test_the_live_group_answers_without_any_environment() -> None:
    assert run_ranks(_identity, 2) == [(0, 2, 0, True), (1, 2, 1, True)]


def _local_rank_on(hosts: list[str]) -> tuple[int, int]:
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: hosts[rank])
        return get_local_rank(), get_local_rank()


@pytest.mark.slow
def test_the_hosts_of_the_live_group_give_the_local_rank() -> None:
    """Also if the environment has no variables, as under `mp.spawn`."""
    local_ranks = run_ranks(_local_rank_on, 4, ["a", "b", "a", "a"])
    assert local_ranks == [(0, 0), (0, 0), (1, 1), (2, 2)]


def _call_on_ranks(callers: list[int]) -> str:
    """Return the result of `get_local_rank`; the first rank never waits for the others."""
    text = ""
    assert dist.group.WORLD is not None
    dist.group.WORLD.get_group_store().set_timeout(timedelta(seconds=1))
    if dist.get_rank() in callers:
        try:
            text = str(get_local_rank())
        except CollectiveError as error:
            text = str(error)
    dist.barrier()
    return text


def test_ranks_that_do_not_ask_for_their_local_rank_are_named() -> None:
    assert run_ranks(_call_on_ranks, 3, [0]) == ["0", "", ""]
    text = run_ranks(_call_on_ranks, 3, [0, 2])[2]
    assert re.match(r"get_local_rank\(\) .*LOCAL_RANK must .*every rank", text)
    assert re.search("rank 2 timed out .*rank 1$", text)


def _disagree() -> tuple[int, int, list[str]]:
    os.environ |= {"RANK": "11", "WORLD_SIZE": "12"}
    with messages_of_collectives() as messages:
        for _ in range(2):
            rank, world_size = get_rank(), get_world_size()
    return rank, world_size, messages


def test_the_live_group_wins_over_the_environment_with_one_warning() -> None:
    rank, world_size, messages = run_ranks(_disagree, 2)[1]
    assert (rank, world_size) == (1, 2)
    assert len(messages) == 2
    assert re.match(r"RANK=11 .*environment.*group has 1\b", messages[0])
    assert messages[1].startswith("WORLD_SIZE=12 in the environment")


def _run_subgroup() -> tuple[int, int]:
    group = dist.new_group([1])
    return get_rank(group), get_world_size(group)


def test_ranks_in_a_subgroup() -> None:
    assert run_ranks(_run_subgroup, 2) == [(-1, -1), (0, 1)]


def _devices(backend: str | None) -> list[torch.device]:
    with group_of_one(backend):
        cpu = torch.device("cpu")
        return [comm_device(), comm_device(prefer=cpu), comm_device(prefer=torch.device("meta"))]


@pytest.mark.parametrize("backend", [None, "gloo", "cpu:gloo"])
def test_tensors_travel_on_the_cpu_however_gloo_was_asked_for(backend: str | None) -> None:
    assert run_ranks(_devices, 1, backend, init=False) == [[torch.device("cpu")] * 3]


def test_without_a_group_tensors_stay_on_the_cpu_and_nothing_waits() -> None:
    synchronize(timeout_s=1e-3)
    assert comm_device() == torch.device("cpu")


def _wait_for_late_rank() -> tuple[float, float]:
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.3)
    entered = time.monotonic()
    synchronize()
    return entered, time.monotonic()


def test_synchronize_waits_for_the_last_rank() -> None:
    (_, time_left), (late, _) = run_ranks(_wait_for_late_rank, 2)
    assert time_left >= late


def _miss_rank_1(path: str) -> str:
    if dist.get_rank() == 1:
        while not os.path.exists(path):
            time.sleep(0.01)
        return ""
    text = outcome(synchronize, 0.3)[1]
    open(path, "w").close()
    return text


def test_synchronize_names_the_rank_that_does_not_come(tmp_path: object) -> None:
    message = run_ranks(_miss_rank_1, 2, f"{tmp_path}/done")[0]
    assert re.search(r"synchronize\(\) must .*reached .* 2 ranks", message)
    assert "Ranks 1 failed" in message


def _miss_rank_1_without_plain_gloo(store: str, backend: str | None, path: str) -> str:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # A rank that leaves while another still connects breaks its connections.
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=20),
    )
    synchronize()
    synchronize(timeout_s=20)
    return _miss_rank_1(path)


@pytest.mark.parametrize("backend", ["cpu:gloo", None])
def test_synchronize_under_a_backend_with_device_types(
    backend: str | None, tmp_path: object
) -> None:
    files = f"{tmp_path}/store", backend, f"{tmp_path}/done"
    message = run_ranks(_miss_rank_1_without_plain_gloo, 2, *files)[0]
    assert re.search(r"synchronize\(\) must .*reached .* 2 ranks", message)
    assert "Ranks 1 failed" in message


def test_a_timeout_must_be_positive() -> None:
    with pytest.raises(ValueError, match="timeout_s must be positive, got 0"):
        synchronize(timeout_s=0)


_calls: list[str] = []


@rank_zero_only
def _write(text: str) -> str:
    """Write the file."""
    _calls.append(text)
    return text


def _write_once() -> tuple[str | None, int]:
    _calls.clear()
    return _write("text"), len(_calls)


def test_rank_zero_only_runs_on_rank_zero() -> None:
    assert run_ranks(_write_once, 2) == [("text", 1), (None, 0)]
    assert (_write.__name__, _write.__doc__) == ("_write", "Write the file.")


def test_rank_zero_only_asks_the_environment_before_there_is_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _write("text") == "text"
    monkeypatch.setenv("RANK", "3")
    assert _write("text") is None
