"""The rank of a process, independent of the backend's name and of the environment."""

import json
import os
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import outcome
from ranks import run_ranks

from stepwrap.collectives import (
    all_gather_object,
    all_gather_object_cpu,
    all_gather_object_gpu,
    all_reduce_dict,
    broadcast,
    collect_results,
    comm_device,
    create_tmpdir,
    distributed_available,
    get_local_rank,
    get_rank,
    get_world_size,
    rank_zero_only,
    reduce_mean,
    sync_random_seed,
    synchronize,
)
from stepwrap.collectives.process.ranks import live_world_size, members, place_in_group

BACKENDS = (None, "gloo", "cpu:gloo")


def _run_group(backend: str | None, store: str, rank: int, work: Callable[..., Any]) -> Any:
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    try:
        result = work()
        # A rank that leaves while another still connects breaks its connections.
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return result


def _facts() -> list[Any]:
    """Return ranks, sizes and results of collectives on a rank of two, in JSON's types."""
    rank = dist.get_rank()
    synchronize()
    directory = create_tmpdir(rank)
    gathered = [
        all_gather_object(rank),
        all_gather_object_cpu(rank, None, False),
        all_gather_object_cpu(rank, directory, False),
        all_gather_object_gpu(rank, False),
    ]
    if rank == 0:
        os.rmdir(directory)
    return [
        [get_rank(), get_world_size(), distributed_available(), live_world_size(), members()],
        gathered,
        broadcast(rank, src=1),
        reduce_mean(torch.tensor([1.0, 2.0]) * (rank + 1)).tolist(),
        all_reduce_dict({"a": torch.ones(2) * (rank + 1)})["a"].tolist(),
        collect_results([rank, None], 4),
        rank_zero_only(get_world_size)(),
        str(comm_device()),
        len(set(all_gather_object(sync_random_seed()))),
    ]


def _spawned(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    before = [get_rank(), get_world_size(), get_local_rank(), distributed_available()]
    facts = [before]
    for turn, backend in enumerate(BACKENDS):
        facts.append(_run_group(backend, f"{folder}/store_{turn}", rank, _facts))
    Path(folder, f"facts_{rank}").write_text(json.dumps(facts))


@pytest.mark.slow
def test_spawned_processes_without_any_environment(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_spawned, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        before, *facts = json.loads((tmp_path / f"facts_{rank}").read_text())
        assert before == [0, 1, 0, False]
        expected = [
            [rank, 2, True, 2, [0, 1]],
            [[0, 1]] * 4,
            1,
            [1.5, 3.0],
            [3.0, 3.0],
            [0, 1, None, None] if rank == 0 else None,
            2 if rank == 0 else None,
            "cpu",
            1,
        ]
        assert facts == [expected] * 3


def _against_the_environment(folder: str) -> list[Any]:
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    # As set by a launcher of four processes on another host.
    os.environ |= {"RANK": "3", "WORLD_SIZE": "4", "SLURM_PROCID": "2", "SLURM_NTASKS": "8"}
    facts = [get_rank(), get_world_size(), all_gather_object_cpu("own"), reduce_mean_exactly(rank)]
    for turn, backend in enumerate(BACKENDS):
        facts.append(_run_group(backend, f"{folder}/store_{turn}", rank, _facts))
    return [*facts, get_rank(), get_world_size()]


def reduce_mean_exactly(rank: int) -> float:
    return reduce_mean(torch.tensor(float(rank))).item()


def test_the_group_wins_while_it_lives(tmp_path: Path) -> None:
    """Before and after it the environment sets the rank, and collectives have one rank."""
    for rank, facts in enumerate(run_ranks(_against_the_environment, 2, str(tmp_path))):
        assert facts[:4] == [3, 4, ["own"], float(rank)]
        assert [fact[0] for fact in facts[4:7]] == [[rank, 2, True, 2, [0, 1]]] * 3
        assert [fact[1:5] for fact in facts[4:7]] == [[[[0, 1]] * 4, 1, [1.5, 3.0], [3.0, 3.0]]] * 3
        assert facts[7:] == [3, 4]


def _run_subgroup() -> list[Any]:
    group = dist.new_group([3, 1])
    rank = dist.get_rank()
    if rank not in (1, 3):
        calls: list[Callable[..., Any]] = [
            lambda: live_world_size(group),
            lambda: all_gather_object(1, group),
            lambda: all_gather_object_cpu(1, group=group),
            lambda: all_gather_object_cpu(1, "never", group=group),
            lambda: all_gather_object_gpu(1, group=group),
            lambda: collect_results([1], 1, group=group),
            lambda: sync_random_seed(group),
            lambda: broadcast(1, 1, group),
        ]
        return [get_rank(group), get_world_size(group), {outcome(call) for call in calls}]
    return [
        [get_rank(group), get_world_size(group), live_world_size(group), members(group)],
        str(comm_device(group)),
        [place_in_group(member, group) for member in members(group)],
        outcome(place_in_group, 0, group, "dst"),
        broadcast(rank, 3, group),
        all_gather_object_cpu(rank, None, False, group=group),
        collect_results([rank], 2, group=group),
        [get_rank(), get_world_size()],
    ]


def test_a_subgroup_counts_global_ranks() -> None:
    """A process outside it gets an error at once."""
    outside, rank_1, outside_too, second = run_ranks(_run_subgroup, 4)
    order = rank_1[0][3]
    assert sorted(order) == [1, 3]
    for rank, facts in ((1, rank_1), (3, second)):
        position = order.index(rank)
        kind, text = facts.pop(3)
        assert kind == "ValueError"
        assert re.search(rf"dst must .*{re.escape(str(order))}, got 0$", text)
        assert facts == [
            [position, 2, 2, order],
            "cpu",
            [0, 1],
            3,
            order,
            order if position == 0 else None,
            [rank, 4],
        ]
    for rank, facts in ((0, outside), (2, outside_too)):
        assert facts[:2] == [-1, -1]
        text = f"rank {rank} is not a member of the group and cannot use it"
        assert facts[2] == {("ValueError", text)}


def _local_ranks() -> list[int]:
    facts = []
    for variables in (
        {},
        {"LOCAL_WORLD_SIZE": "2"},
        {
            "LOCAL_WORLD_SIZE": "2",
            "SLURM_LOCALID": "6",
            "SLURM_PROCID": "6",
            "SLURM_NTASKS": "8",
        },
        {"LOCAL_WORLD_SIZE": "2", "SLURM_LOCALID": "6", "LOCAL_RANK": "5"},
        {"LOCAL_RANK": "", "SLURM_LOCALID": "", "LOCAL_WORLD_SIZE": ""},
        # A batch script that srun has not started.
        {"SLURM_LOCALID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"},
    ):
        os.environ |= variables
        facts.append(get_local_rank())
        for name in variables:
            del os.environ[name]
    return facts


def test_local_ranks_of_a_live_group() -> None:
    """The launcher's value, otherwise the place among the processes of the host."""
    facts = run_ranks(_local_ranks, 4)
    assert facts == [[rank, rank % 2, 6, 5, rank, rank] for rank in range(4)]


@rank_zero_only
def _fail(text: str) -> None:
    raise KeyError(text)


def test_rank_zero_only_lets_errors_through(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError, match="text"):
        _fail("text")
    monkeypatch.setenv("SLURM_PROCID", "1")
    _fail("text")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(KeyError, match="text"):
        _fail(text="text")
