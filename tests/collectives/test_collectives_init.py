"""The process group and its start, under mmengine's names."""

import gc
import multiprocessing
import os
import re
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import group_of_one, outcome
from ports import free_port
from programs import run_script
from ranks import run_ranks

from stepwrap.collectives.dist import (
    barrier,
    get_backend,
    get_default_group,
    get_dist_info,
    get_local_group,
    get_local_rank,
    get_local_size,
    get_rank,
    get_world_size,
    infer_launcher,
    init_dist,
    init_local_group,
    is_distributed,
    is_main_process,
    master_only,
)


@master_only
def _only_on_main(value: int, *, factor: int = 1) -> int:
    """Return the product."""
    return value * factor


def test_one_process() -> None:
    assert not is_distributed()
    assert get_backend() is None
    assert (get_rank(), get_world_size(), get_dist_info()) == (0, 1, (0, 1))
    assert (get_local_rank(), get_local_size()) == (0, 1)
    assert get_local_group() is None
    assert get_default_group() is None
    assert is_main_process()
    assert _only_on_main(3, factor=2) == 6
    assert _only_on_main.__doc__ == "Return the product."
    barrier()
    init_local_group(0, 1)


def _use_group() -> tuple[int | None, dict[str, tuple[str, str]]]:
    rank = dist.get_rank()
    assert is_distributed()
    assert get_backend() == "gloo"
    assert get_dist_info() == (rank, 4)
    assert get_default_group() is dist.group.WORLD
    assert is_main_process() == (rank == 0)
    barrier()
    errors = {
        "group": outcome(get_local_group),
        "size": outcome(get_local_size),
        "place": outcome(init_local_group, 0, 2),
        "number": outcome(init_local_group, rank // 2, 2 if rank < 3 else 3),
        "none": outcome(init_local_group, 0, 0),
        "timeout": outcome(barrier, None, -1),
    }
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    assert (get_local_size(), get_local_rank()) == (4, rank)
    init_local_group(rank // 3, 3)
    group = get_local_group()
    assert dist.get_process_group_ranks(group) == ([0, 1, 2] if rank < 3 else [3])
    assert (get_local_size(), get_local_rank()) == ((3, rank) if rank < 3 else (1, 0))
    assert get_dist_info(group) == (rank % 3, 3 if rank < 3 else 1)
    assert is_main_process(group) == (rank in (0, 3))
    subgroup = dist.new_group([0, 2], backend="cpu:gloo")
    if rank in (0, 2):
        barrier(subgroup, timeout_s=30)
        assert get_backend(subgroup) == "gloo"
    else:
        assert get_dist_info(subgroup) == (-1, -1)
        assert not is_main_process(subgroup)
        errors["backend"] = outcome(get_backend, subgroup)
    return _only_on_main(rank + 7), errors


def _has_old_local_group() -> tuple[str, str]:
    return outcome(get_local_group)


def test_a_group_of_four_on_two_hosts() -> None:
    results = run_ranks(_use_group, 4)
    assert [value for value, _ in results] == [7, None, None, None]
    for _, errors in results:
        assert errors["group"][0] == errors["size"][0] == "RuntimeError"
        assert "call init_local_group() on all ranks" in errors["group"][1]
        assert "or set LOCAL_WORLD_SIZE" in errors["size"][1]
        assert errors["place"][0] == "ValueError"
        assert re.search("node_rank must .* 1 on rank 2 .* 2 .*, got 0$", errors["place"][1])
        assert errors["number"][0] == "ValueError"
        assert re.search("got 2 on rank 0 .*3 on rank 3", errors["number"][1])
        assert errors["none"][0] == "ValueError"
        none = "num_gpus_per_node must .*positive, got 0 on rank 0$"
        assert re.search(none, errors["none"][1])
        assert errors["timeout"] == ("ValueError", "timeout_s must be positive, got -1")
    assert re.search("rank 3 .*not a member", results[3][1]["backend"][1])
    # The local group of an earlier default group does not belong to the next one.
    assert [name for name, _ in run_ranks(_has_old_local_group, 4)] == ["RuntimeError"] * 4


def _leave_groups(folder: str, rank: int) -> None:
    def num_threads() -> int:
        return len(os.listdir("/proc/self/task"))

    counts = []
    for index in range(3):
        store = dist.FileStore(f"{folder}/{index}", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        init_local_group(0, 2)
        groups = [weakref.ref(group) for group in (dist.group.WORLD, get_local_group()) if group]
        assert all(group() is not None for group in groups)
        assert get_local_size() == 2
        barrier()
        dist.destroy_process_group()
        del store
        gc.collect()
        assert [group() for group in groups] == [None, None]
        counts.append(num_threads())
    assert counts[0] == counts[1] == counts[2]


def _leave_groups_as_rank(folder: str) -> None:
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    _leave_groups(folder, rank)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system counts no threads")
def test_nothing_keeps_a_destroyed_group(tmp_path: Path) -> None:
    """The threads of a group that is still referenced abort the process at its end."""
    run_ranks(_leave_groups_as_rank, 2, str(tmp_path))


_ENDS_WITH_A_GROUP = """
import atexit, os
import torch
import torch.distributed as dist

def report():
    tasks = [open(f"/proc/self/task/{one}/comm").read() for one in os.listdir("/proc/self/task")]
    print(dist.is_initialized(), sum("gloo" in one for one in tasks) > 0)

# Runs after what stepwrap registers, since it is registered before.
atexit.register(report)
from stepwrap.collectives.dist import init_dist

init_dist("pytorch", "gloo")
kept = [dist.group.WORLD]
kept.append(kept)
del kept
dist.all_reduce(torch.ones(1))
report()
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system lists no threads")
@pytest.mark.slow
def test_a_group_and_its_threads_end_before_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that wants Python's lock while the interpreter is finalized aborts the process."""
    meeting = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**meeting, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    out = run_script(_ENDS_WITH_A_GROUP, tmp_path)
    assert out.splitlines() == ["True True", "False False"]


def _backends_without_a_name(backend: str | None) -> str | None:
    with group_of_one(backend):
        return get_backend()


def test_the_backend_is_named_however_it_was_given() -> None:
    for backend in ("gloo", "cpu:gloo", "cpu:gloo,cuda:gloo"):
        assert run_ranks(_backends_without_a_name, 1, backend, init=False) == ["gloo"]
    assert run_ranks(_backends_without_a_name, 1, None, init=False) != ["undefined"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "none"),
        ({"WORLD_SIZE": "2", "SLURM_NTASKS": "2"}, "pytorch"),
        (
            {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            "slurm",
        ),
        ({"SLURM_NTASKS": "2", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}, "none"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "mpi"),
        ({"WORLD_SIZE": "", "SLURM_NTASKS": ""}, "none"),
    ],
)
def test_the_launcher_is_inferred(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert infer_launcher() == expected


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "text"),
    [
        (
            ("torch",),
            {},
            ValueError,
            "^Invalid launcher type: torch; it must be one of pytorch, slurm",
        ),
        (("none", "gloo", "deepspeed"), {}, ValueError, "init_backend must be 'torch', got 'deep"),
        (("none",), {"timeout": "1h"}, TypeError, "timeout must be a number of seconds or a time"),
        (("none",), {"timeout": True}, TypeError, "timeout must be a number .*, got True"),
        (("none",), {"timeout": 0}, ValueError, "timeout must be positive, got 0"),
        (("pytorch", "gloo"), {}, KeyError, "MASTER_ADDR and MASTER_PORT and RANK and WORLD_SIZE"),
        (("slurm", "gloo"), {}, KeyError, "variable SLURM_PROCID and SLURM_NTASKS is not set"),
        (("mpi", "gloo"), {}, KeyError, "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE and OMPI"),
    ],
)
def test_wrong_arguments_and_missing_variables(
    args: tuple[str, ...], kwargs: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        init_dist(*args, **kwargs)
    assert not is_distributed()
    assert multiprocessing.get_start_method(allow_none=True) != "spawn"


def test_the_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "1", "MASTER_ADDR": "::1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(KeyError, match="variable RANK .*not set"):
        init_dist("pytorch", "gloo")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_nccl_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="'nccl' .*CUDA device.*'gloo'"):
        init_dist("none", "nccl")


def test_no_launcher_starts_nothing() -> None:
    init_dist("none", timeout=5)
    assert not is_distributed()


def _start(launcher: str, environments: list[dict[str, str]], kwargs: dict[str, Any]) -> None:
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    os.environ.update(environments[rank])
    assert infer_launcher() == launcher
    method = multiprocessing.get_start_method(allow_none=True)
    try:
        init_dist(launcher, **kwargs)
        assert multiprocessing.get_start_method() == (method or "spawn")
    finally:
        # The process is used by other tests afterwards.
        multiprocessing.set_start_method(method, force=True)
    if "port" in kwargs:
        assert os.environ["MASTER_PORT"] == str(kwargs["port"])
    data = torch.tensor([rank + 1.0])
    dist.all_reduce(data)
    assert data.item() == 3.0
    assert get_dist_info() == (rank, 2)
    assert get_local_rank() == rank
    assert get_backend() == "gloo"
    assert not torch.cuda.is_initialized()
    # All ranks must stay until the last one has used the store.
    barrier()


def _launcher_variables(launcher: str, rank: int) -> dict[str, str]:
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    rank_text = str(rank)
    if launcher == "pytorch":
        return {"RANK": rank_text, "WORLD_SIZE": "2", "LOCAL_RANK": rank_text, **port}
    if launcher == "mpi":
        names = ("RANK", "LOCAL_RANK"), ("SIZE", "LOCAL_SIZE")
        mpi = {f"OMPI_COMM_WORLD_{name}": rank_text for name in names[0]}
        return mpi | {f"OMPI_COMM_WORLD_{name}": "2" for name in names[1]}
    slurm = {"SLURM_PROCID": rank_text, "SLURM_LOCALID": rank_text, "SLURM_NTASKS": "2"}
    return slurm | {"SLURM_JOB_NODELIST": "127.0.0.[1-1],other[02-03]", "SLURM_NODEID": "0"}


@pytest.mark.parametrize("launcher", ["pytorch", "slurm", "mpi"])
def test_a_launcher_starts_a_group_on_the_cpu(launcher: str) -> None:
    kwargs: dict[str, Any] = {"backend": "gloo", "timeout": 30}
    environments = [_launcher_variables(launcher, rank) for rank in range(2)]
    port = str(free_port())
    if launcher == "slurm":
        kwargs["port"] = int(port)
    else:
        environments = [environment | {"MASTER_PORT": port} for environment in environments]
    run_ranks(_start, 2, launcher, environments, kwargs)


def test_a_store_of_the_caller_needs_no_address(tmp_path: Path) -> None:
    environments = [
        {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)} for rank in (0, 1)
    ]
    kwargs: dict[str, Any] = {"init_method": f"file://{tmp_path}/store", "backend": "gloo"}
    kwargs |= {"timeout": timedelta(seconds=30), "world_size": 2}
    run_ranks(_start_by_file, 2, environments, kwargs)


def _start_by_file(environments: list[dict[str, str]], kwargs: dict[str, Any]) -> None:
    _start("pytorch", environments, {**kwargs, "rank": dist.get_rank()})


def _start_on_a_gpu(backend: str | None, port: int) -> tuple[str | None, int]:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    method = multiprocessing.get_start_method(allow_none=True)
    try:
        init_dist("pytorch", backend, timeout=30)
    finally:
        multiprocessing.set_start_method(method, force=True)
    data = torch.ones(1, device="cuda")
    dist.all_reduce(data)
    barrier()
    return get_backend(), torch.cuda.current_device()


@pytest.mark.gpu
def test_a_launcher_starts_a_group_on_a_gpu() -> None:
    assert run_ranks(_start_on_a_gpu, 1, "nccl", free_port(), init=False) == [("nccl", 0)]
    assert run_ranks(_start_on_a_gpu, 1, None, free_port(), init=False) == [
        ("cpu:gloo,cuda:nccl", 0)
    ]
