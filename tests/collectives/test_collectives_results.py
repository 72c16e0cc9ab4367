"""The results of all ranks in the dataset's order, and a seed for all."""

import os
import random
import re
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from calls import outcome
from ranks import RanksError, run_ranks

from stepwrap.collectives import all_gather_object, collect_results, sync_random_seed
from stepwrap.collectives.objects.results import collect_results_cpu, collect_results_gpu


def _collect_every_way(by_rank: list[list[Any]], size: int, tmpdir: str) -> list[Any]:
    results = by_rank[dist.get_rank()]
    return [
        collect_results(results, size),
        collect_results(results, size, "cpu", tmpdir),
        collect_results(results, size, "gpu"),
        collect_results(results, size, "npu"),
        collect_results_cpu(results, size),
        collect_results_cpu(tuple(results), size, tmpdir),
        collect_results_gpu(results, size),
    ]


@pytest.mark.parametrize(
    ("by_rank", "size", "expected"),
    [
        ([[None, "b"], ["c", "d"]], 4, [None, "c", "b", "d"]),
        ([[0, 2, 4], [1, 3]], 5, [0, 1, 2, 3, 4]),
        ([[0, 2, 4], [1, 3, 0]], 5, [0, 1, 2, 3, 4]),
        ([[None], [None, None, None]], 9, [None, None, None, None]),
        ([[0, 3], [1], [2]], 10, [0, 1, 2, 3]),
        ([[], [1, 2]], 2, [1, 2]),
        ([[], []], 3, []),
        ([[1], [2]], 0, []),
    ],
)
def test_results_come_back_in_turns(
    by_rank: list[list[Any]], size: int, expected: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "foreign").touch()
    outcomes = run_ranks(_collect_every_way, len(by_rank), by_rank, size, str(tmp_path))
    assert outcomes[0] == [expected] * 7
    assert all(outcome == [None] * 7 for outcome in outcomes[1:])
    assert [path.name for path in tmp_path.iterdir()] == ["foreign"]


def _collect_in_subgroup(tmpdir: str) -> list[Any]:
    groups = [dist.new_group([0]), dist.new_group([2, 1])]
    rank = dist.get_rank()
    group, results = groups[rank > 0], [f"{rank}a", f"{rank}b"]
    return [
        collect_results(results, 3, "cpu", None, group),
        collect_results(results, 3, "cpu", tmpdir, group),
        collect_results(results, 3, "gpu", group=group),
    ]


def test_results_of_a_subgroup(tmp_path: Path) -> None:
    alone, rank_1, second = run_ranks(_collect_in_subgroup, 3, str(tmp_path))
    assert alone == [["0a", "0b"]] * 3
    assert rank_1 == [["1a", "2a", "1b"]] * 3
    assert second == [None] * 3


def _collect_and_remove(tmpdir: str) -> list[Any]:
    results = [dist.get_rank()]
    remaining = collect_results(results, 2, tmpdir=tmpdir), os.path.exists(f"{tmpdir}/foreign")
    removed = collect_results(results, 2, tmpdir=tmpdir, remove_tmpdir=True), os.path.exists(tmpdir)
    return [*remaining, *removed]


def test_the_directory_is_removed_only_on_request(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "foreign").touch()
    outcomes = run_ranks(_collect_and_remove, 2, str(tmp_path / "given"))
    assert outcomes == [[[0, 1], True, [0, 1], False], [None, True, None, False]]
    assert not list(tmp_path.iterdir())


def _collect_what_fails(tmpdir: str) -> list[Any]:
    rank = dist.get_rank()
    link = Path(tmpdir, "link")
    link.symlink_to(tmpdir) if rank == 0 else None
    dist.barrier()
    return [
        outcome(collect_results, 5 if rank == 1 else [5], 2),
        outcome(collect_results, [5], -1 if rank == 1 else 2, "gpu"),
        outcome(collect_results, [threading.Lock() if rank == 1 else 1], 2, "cpu", tmpdir),
        outcome(collect_results, [5], 2, tmpdir=link, remove_tmpdir=True),
        all_gather_object(rank),
    ]


def test_a_failure_on_one_rank_raises_on_all(tmp_path: Path) -> None:
    for *errors, after in run_ranks(_collect_what_fails, 2, str(tmp_path)):
        names, texts = zip(*errors, strict=True)
        assert names == ("TypeError", "ValueError", "CollectiveError", "OSError")
        assert re.search("results must .*sequence, got int", texts[0])
        assert re.search("size must .*negative, got -1", texts[1])
        assert "symbolic link" in texts[3]
        assert after == [0, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def _check_arguments() -> None:
    with pytest.raises(
        NotImplementedError, match="^device must be 'cpu' , 'gpu' or 'npu', but got 'cuda'"
    ):
        collect_results([1], 1, "cuda")
    for device in ("gpu", "npu"):
        with pytest.raises(
            AssertionError, match=f"^tmpdir should be None when device is {device}.*'x'"
        ):
            collect_results([1], 1, device, "x")
        with pytest.raises(AssertionError, match="remove_tmpdir False; .* remove_tmpdir=True"):
            collect_results([1], 1, device, remove_tmpdir=True)
    with pytest.raises(ValueError, match="remove_tmpdir=True needs the tmpdir"):
        collect_results([1], 1, remove_tmpdir=True)
    for device in ("cpu", "gpu"):
        with pytest.raises(TypeError, match="results must .*sequence, got str"):
            collect_results("text", 1, device)
        with pytest.raises(ValueError, match="size must .*negative, got -1"):
            collect_results([1], -1, device)


def test_arguments_are_checked_with_and_without_a_group() -> None:
    _check_arguments()
    run_ranks(_check_arguments, 2)


def test_one_process_gets_its_own_results(tmp_path: Path) -> None:
    """The same with and without a group."""
    lock = threading.Lock()
    results = [None, lock, 3]
    for device in ("cpu", "gpu", "npu"):
        collected = collect_results(results, 2, device)
        assert collected is not None
        assert collected[0] is None
        assert collected[1] is lock
        assert len(collected) == 2
        assert collect_results(results, 5, device) == results
    folder = tmp_path / "given"
    folder.mkdir()
    assert collect_results(results, 5, "cpu", folder) == results
    assert folder.exists()
    for _ in range(2):
        assert collect_results(results, 5, "cpu", folder, remove_tmpdir=True) == results
        assert not folder.exists()


def _states() -> list[Any]:
    words = np.random.get_state()
    return [random.getstate(), words[1].tolist(), words[2:], torch.get_rng_state().tolist()]


def _draw_seeds() -> list[int]:
    before = _states()
    seeds = [sync_random_seed() for _ in range(20)]
    group = dist.new_group([1, 2])
    if dist.get_rank() > 0:
        seeds += [sync_random_seed(group), sync_random_seed(group)]
    assert _states() == before
    return seeds


def test_seeds_agree_and_advance_no_generator() -> None:
    rank_0, second, third = run_ranks(_draw_seeds, 3)
    assert second == third
    assert second[:20] == rank_0
    assert len(set(second)) == 22
    assert all(type(seed) is int and 0 <= seed < 2**31 for seed in second)
    # All of 22 draws are in the lower half once in four million runs.
    assert max(second) >= 2**30


def test_a_seed_without_a_group() -> None:
    before = _states()
    random.seed(0)
    seed = sync_random_seed()
    random.seed(0)
    assert sync_random_seed() != seed
    random.setstate(before[0])
    assert _states() == before


def _lose_rank_1(tmpdir: str) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    collect_results([1], 2, tmpdir=tmpdir, remove_tmpdir=True)


def test_a_lost_rank_removes_no_directory(tmp_path: Path) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(_lose_rank_1, 2, str(tmp_path), group_timeout_s=30)
    assert "CollectiveError" in caught.value.reports[0]
    assert tmp_path.exists()
    assert not list(tmp_path.iterdir())
