"""Objects across ranks."""

import os
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import HERE, outcome, outcome_text
from ranks import RanksError, on_ranks, run_ranks

from stepwrap.collectives import (
    all_gather_object,
    all_reduce_dict,
    broadcast,
    mean_scalars,
    reduce_mean,
    synchronize,
)


class _OnlyUnpicklesOn:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __setstate__(self, state: dict[str, int]) -> None:
        if dist.get_rank() != state["rank"]:
            raise ImportError("not installed here")
        self.__dict__ = state


@pytest.mark.parametrize("src", [0, 1, 2])
@pytest.mark.parametrize("num_bytes", [1, 5_000_000])
@on_ranks(3)
def test_broadcast(src: int, num_bytes: int) -> None:
    rank = dist.get_rank()
    sent: Any = {"rank": rank, "data": bytes(num_bytes), "t": torch.full((2,), float(rank))}
    # The other ranks' argument is ignored, so it need not be picklable.
    payload = sent if rank == src else threading.Lock()
    received: dict[str, Any] = broadcast(payload, src)
    assert (received is sent) == (rank == src)
    assert (received["rank"], len(received["data"])) == (src, num_bytes)
    assert received["t"].tolist() == [src, src]


@on_ranks(2)
def test_an_unpicklable_object_raises_the_same_on_every_rank() -> None:
    name, text = outcome(broadcast, threading.Lock(), 1)
    assert name == "CollectiveError"
    assert re.match(r"broadcast\(\): rank 1 cannot pickle .*: TypeError: ", text)
    assert f"ranks 0, 1 wait in broadcast ({HERE}:" in text
    # The ranks are still in step.
    assert broadcast(dist.get_rank(), 1) == 1


def _broadcast_what_rank_1_cannot_load() -> tuple[tuple[str, str], int]:
    return outcome(broadcast, _OnlyUnpicklesOn(0)), broadcast(dist.get_rank())


def test_an_object_that_one_rank_cannot_load_raises_on_every_rank() -> None:
    outcomes = run_ranks(_broadcast_what_rank_1_cannot_load, 3)
    assert [after for _, after in outcomes] == [0, 0, 0]
    assert {name for (name, _), _ in outcomes} == {"CollectiveError"}
    for (_, text), _ in outcomes:
        for rank in (1, 2):
            assert re.search(f"rank {rank} cannot unpickle .*ImportError: not installed", text)


@on_ranks(2)
def test_a_source_outside_the_group_is_refused() -> None:
    for src in (-1, 2):
        kind, text = outcome(broadcast, 1, src)
        assert kind == "ValueError"
        assert re.search(rf"src must .*\[0, 1\], got {src}$", text)


def test_one_process_keeps_its_own_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a launcher's variables set but no group."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    lock = threading.Lock()
    assert broadcast(lock) is lock
    assert all_gather_object(lock)[0] is lock
    with pytest.raises(ValueError, match=r"src must .*\[0\], got 1"):
        broadcast(lock, 1)


def _gather_different_sizes() -> list[Any]:
    rank = dist.get_rank()
    return all_gather_object({"rank": rank, "data": [rank] * 10**rank, "none": None})


def test_all_gather_object_is_in_rank_order_whatever_the_sizes() -> None:
    expected = [{"rank": r, "data": [r] * 10**r, "none": None} for r in range(4)]
    assert run_ranks(_gather_different_sizes, 4) == [expected] * 4


@on_ranks(2)
def test_gathering_an_unpicklable_object_raises_on_every_rank() -> None:
    rank = dist.get_rank()
    payload: object = threading.Lock() if rank == 1 else rank
    name, text = outcome(all_gather_object, payload)
    assert name == "CollectiveError"
    assert re.match(r"all_gather_object\(\): rank 1 cannot pickle .*: TypeError", text)
    assert all_gather_object(rank) == [0, 1]


def _lose_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    outcomes = [
        outcome(broadcast, "text"),
        outcome(all_gather_object, "text"),
        outcome(reduce_mean, torch.ones(2)),
        outcome(all_reduce_dict, {"a": 1}),
        outcome(mean_scalars, {"a": 1}),
        outcome(synchronize),
    ]
    raise RuntimeError("\n".join(f"{name}: {text}" for name, text in outcomes))


def test_a_killed_rank_ends_the_others_with_an_error() -> None:
    with pytest.raises(RanksError) as error:
        run_ranks(_lose_rank_1, 2, group_timeout_s=20)
    report = error.value.reports[0]
    assert report.count("CollectiveError: ") == 6
    assert re.search(r"mean_scalars\(\) must .* 2 ranks.*not finish .*rank 0", report)


def _leave_rank_0_alone(path: str) -> str:
    if dist.get_rank() == 1:
        while not os.path.exists(path):
            time.sleep(0.01)
        return ""
    text = outcome_text(broadcast, "text", 1)
    open(path, "w").close()
    return text


def test_a_rank_that_never_comes_ends_in_an_error_at_the_timeout(tmp_path: object) -> None:
    message = run_ranks(_leave_rank_0_alone, 2, f"{tmp_path}/done", group_timeout_s=0.5)[0]
    assert re.match(r"CollectiveError: broadcast\(\) must .*reached .* 2 ranks", message)
