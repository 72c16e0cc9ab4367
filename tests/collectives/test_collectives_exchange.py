"""Large objects are sent through shared memory or not; no data is lost and no memory is left."""

import gc
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RanksError, on_ranks, run_ranks

from stepwrap.collectives import (
    CollectiveError,
    all_gather_object,
    broadcast,
    gather_object,
    pad_to_largest_tensor,
)

LARGE = 3_000_000


def _traces_of_shared_memory() -> list[str]:
    """Return the shared memory of object collectives that this process has open or mapped."""
    opened = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            opened.append(os.readlink(entry))
        except FileNotFoundError:
            continue
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in (*opened, *mapped) if "memfd:stepwrap" in line]


def _exchange_sizes(sizes: list[int]) -> list[Any]:
    """Gather, gather to one rank and broadcast tensors; return the names of failed calls."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((sizes[rank],), float(rank))
    wrong: list[Any] = []
    for name, received in (
        ("all_gather", all_gather_object(tensor)),
        ("gather", gather_object(tensor, dst=world_size - 1)),
        ("broadcast", [broadcast(tensor, src) for src in range(world_size)]),
    ):
        if received is None:
            wrong += [name] if rank == world_size - 1 else []
            continue
        for number, rank_tensor in enumerate(received):
            if rank_tensor.shape != (sizes[number],) or not bool((rank_tensor == number).all()):
                wrong.append((name, number))
    return wrong


@pytest.mark.parametrize("shared", ["1", "0"])
@pytest.mark.parametrize(
    "sizes", [[10, 10], [LARGE, LARGE], [LARGE, 1], [0, LARGE], [300, LARGE, 70_000]]
)
def test_even_and_uneven_sizes(
    sizes: list[int], shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWRAP_SHARED_MEMORY", shared)
    assert run_ranks(_exchange_sizes, len(sizes), sizes) == [[]] * len(sizes)


def _exchange_with_few_descriptors(spare: int) -> list[Any]:
    """Exchange large tensors while rank 1 can open only `spare` more files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + spare, limits[1]))
    try:
        return _exchange_sizes([LARGE, LARGE])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("spare", [0, 1])
def test_a_rank_without_shared_memory_moves_all_to_the_transport(spare: int) -> None:
    """It cannot create its own (0), or cannot open the other rank's (1)."""
    assert run_ranks(_exchange_with_few_descriptors, 2, spare) == [[], []]


@on_ranks(2)
def test_shared_memory_is_freed_with_the_received_objects() -> None:
    gathered = all_gather_object(torch.ones(LARGE))
    while_held = len(_traces_of_shared_memory())
    del gathered
    gc.collect()
    assert (while_held, len(_traces_of_shared_memory())) == (2, 0)


class _EndsRank1:
    """Kill rank 1 while it unpickles; all ranks have created and mapped their memory by then."""

    def __init__(self) -> None:
        self.data = torch.ones(LARGE)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self.__dict__ = state


def _gather_until_killed() -> None:
    with pytest.raises(CollectiveError) as error:
        all_gather_object(_EndsRank1())
    assert "rank 1 has not arrived" in str(error.value)
    del error
    gc.collect()
    raise RuntimeError(f"left: {_traces_of_shared_memory()}")


def test_a_killed_rank_leaves_no_shared_memory() -> None:
    with pytest.raises(RanksError) as error:
        run_ranks(_gather_until_killed, 3, group_timeout_s=20)
    assert "ended by SIGKILL" in error.value.reports[1]
    assert all("RuntimeError: left: []" in error.value.reports[rank] for rank in (0, 2))


def _use_sub_groups() -> list[Any]:
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine, root = groups[rank % 2], (0, 3)[rank % 2]
    answers: list[Any] = [all_gather_object(rank, mine), broadcast(f"of {rank}", root, mine)]
    answers.append(gather_object(torch.full((LARGE,), float(rank)), root, mine))
    if answers[-1] is not None:
        answers[-1] = [received[-1].item() for received in answers[-1]]
    for call in (
        lambda: all_gather_object(1, groups[1 - rank % 2]),
        lambda: broadcast(1, root, groups[1 - rank % 2]),
        lambda: broadcast(1, 1 - rank % 2, mine),
    ):
        with pytest.raises(ValueError, match=r"not a member|must .*rank"):
            call()
    return answers


@pytest.mark.slow
def test_sub_groups_take_global_ranks() -> None:
    """Calls by other ranks raise an error."""
    in_first, in_second = [0, 2], [1, 3]
    assert run_ranks(_use_sub_groups, 4) == [
        [in_first, "of 0", [0.0, 2.0]],
        [in_second, "of 3", None],
        [in_first, "of 0", None],
        [in_second, "of 3", [1.0, 3.0]],
    ]


def _pad() -> tuple[Any, ...]:
    tensor = torch.arange(1.0, 6.0 if dist.get_rank() else 3.0)
    sizes, padded = pad_to_largest_tensor(tensor)
    same, unpadded = pad_to_largest_tensor(tensor[:2])
    return sizes, padded.tolist(), padded.dtype, padded is tensor, same, unpadded.tolist()


def test_padding_to_the_largest_keeps_dtype_and_fills_with_zeros() -> None:
    """A rank whose tensor is already that long gets it back."""
    float32, two = torch.float32, [2, 2]
    assert run_ranks(_pad, 2) == [
        ([2, 5], [1.0, 2.0, 0.0, 0.0, 0.0], float32, False, two, [1.0, 2.0]),
        ([2, 5], [1.0, 2.0, 3.0, 4.0, 5.0], float32, True, two, [1.0, 2.0]),
    ]


def test_padding_alone_changes_nothing() -> None:
    tensor = torch.ones(3, dtype=torch.int16)
    sizes, padded = pad_to_largest_tensor(tensor)
    assert sizes == [3]
    assert padded is tensor
    with pytest.raises(ValueError, match="one dimension"):
        pad_to_largest_tensor(torch.ones(2, 2))
