"""Errors of collectives name the ranks that wait and where, with and without tracing."""

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import HERE, outcome_text, traced
from ranks import RanksError, run_ranks
from warm import run_script

from stepwrap.collectives import (
    all_gather_object,
    all_reduce,
    all_reduce_dict,
    broadcast,
    mean_scalars,
    recent_collectives,
    reduce_mean,
    synchronize,
    trace_collectives,
)

OWN_FILE = os.path.relpath(__file__)


def _strip_lines(text: str) -> str:
    return re.sub(rf"{HERE}:\d+", "HERE", text)


def _other_call_on_rank_2() -> str:
    if dist.get_rank() == 2:
        return outcome_text(broadcast, {"loss": 1.0})
    return outcome_text(all_reduce_dict, {"loss": 1.0, "loss_b": 2.0})


@pytest.mark.parametrize("on", [True, False])
def test_calls_with_a_first_message_detect_a_difference_at_once(on: bool) -> None:
    """Afterwards the ranks are in step again."""
    for text in run_ranks(traced, 4, on, _other_call_on_rank_2):
        text = _strip_lines(text)
        assert re.match(r"CollectiveError: .*\[0, 1, 2, 3\] must .*same call", text)
        assert "rank 2 is in broadcast (HERE)" in text
        assert "ranks 0, 1, 3 wait in all_reduce_dict (HERE)" in text
        assert text.endswith("missing on rank 2: loss_b")


def _reduce_against_broadcast() -> tuple[str, str, int]:
    if dist.get_rank() == 1:
        text = outcome_text(all_reduce, torch.ones(3))
    else:
        text = outcome_text(reduce_mean, torch.ones(3))
    # A call that still counts as running would be reported as this rank's place.
    return text, recent_collectives()[-1].state, all_gather_object(dist.get_rank())[1]


def test_tracing_reports_a_different_call_and_stays_in_step() -> None:
    for text, state, after in run_ranks(traced, 2, True, _reduce_against_broadcast):
        assert "rank 0 is in reduce_mean" in text
        assert "rank 1 waits in all_reduce" in text
        assert (state, after) == ("failed", 1)


def _reduce_other_shapes() -> list[str]:
    size = 3 + 1000 * dist.get_rank()
    return [
        outcome_text(all_reduce, torch.ones(size)),
        outcome_text(reduce_mean, torch.ones(size)),
        outcome_text(all_reduce, torch.ones(3), "max" if dist.get_rank() else "min"),
    ]


def test_tracing_finds_other_shapes_which_abort_the_process_without_it() -> None:
    for texts in run_ranks(traced, 2, True, _reduce_other_shapes):
        assert all(text.startswith("CollectiveError: the ranks [0, 1] must") for text in texts)
        assert "(3,)" in texts[0]
        assert "(1003,)" in texts[0]
        assert "(1003,)" in texts[1]
        assert "min" in texts[2]
        assert "max" in texts[2]


def _keys_differ_on_rank_1() -> str:
    scalars = {"loss": 1.0} if dist.get_rank() == 1 else {"loss": 1.0, "loss_b": 2.0}
    return outcome_text(all_reduce_dict, scalars)


@pytest.mark.parametrize("on", [True, False])
def test_other_keys_are_named_with_their_ranks(on: bool) -> None:
    texts = run_ranks(traced, 3, on, _keys_differ_on_rank_1)
    assert len(set(texts)) == 1
    assert re.match(r"ValueError: all_reduce_dict\(\) must .*same keys", texts[0])
    assert "keys missing on rank 1: loss_b" in texts[0]
    assert HERE in texts[0]


def _time_out_in_another_call() -> str:
    if dist.get_rank() == 2:
        return outcome_text(broadcast, {"loss": 1.0})
    return outcome_text(reduce_mean, torch.ones(3))


def test_without_tracing_the_timeout_names_the_waiting_ranks() -> None:
    for rank, text in enumerate(run_ranks(_time_out_in_another_call, 3, group_timeout_s=1)):
        name = "broadcast" if rank == 2 else "reduce_mean"
        text = _strip_lines(text)
        assert re.match(
            rf"CollectiveError: {name}\(\) must .* 3 ranks, .*not finish .*rank {rank}: ", text
        )
        assert "rank 2 is in broadcast (HERE)" in text
        assert "ranks 0, 1 wait in reduce_mean (HERE)" in text


def _never_come(folder: str) -> str:
    mean_scalars({"a": 1})
    if dist.get_rank() == 2:
        while len(os.listdir(folder)) < 2:
            time.sleep(0.01)
        return ""
    text = outcome_text(synchronize)
    Path(folder, str(dist.get_rank())).touch()
    return text


@pytest.mark.parametrize("on", [True, False])
def test_a_rank_that_never_comes_is_named(on: bool, tmp_path: Path) -> None:
    """With tracing the rank itself reports its location."""
    texts = run_ranks(traced, 3, on, _never_come, str(tmp_path), group_timeout_s=1)
    for text in texts[:2]:
        assert "did not finish" in text
        assert "ranks 0, 1 wait in synchronize" in text
        if on:
            assert re.search(r"rank 2 .*_trace\.py:\d+ in _never_come", text)
            last_call = r"last collective .*#\d+ mean_scalars \(\S+_trace\.py:\d+\)"
            assert re.search(last_call, text)
        else:
            assert "rank 2 has not arrived" in text


def _never_come_after_a_disagreement(folder: str) -> str:
    outcome_text(all_reduce if dist.get_rank() == 2 else reduce_mean, torch.ones(3))
    return _never_come(folder)


def test_a_call_that_disagreed_is_not_the_place_of_a_rank(tmp_path: Path) -> None:
    function = _never_come_after_a_disagreement
    texts = run_ranks(traced, 3, True, function, str(tmp_path), group_timeout_s=2)
    for text in texts[:2]:
        assert re.search(r"rank 2 .*_trace\.py:\d+ in _never_come;", text), text


def _lose_rank_1() -> None:
    mean_scalars({"a": 1})
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError(outcome_text(all_gather_object, "text"))


def test_a_killed_rank_is_named_while_tracing() -> None:
    with pytest.raises(RanksError) as error:
        run_ranks(traced, 3, True, _lose_rank_1, group_timeout_s=20)
    for rank in (0, 2):
        report = error.value.reports[rank]
        assert "ranks 0, 2 wait in all_gather_object" in report
        assert re.search("rank 1 .*not answer.* died", report)


def _record() -> list[Any]:
    all_reduce(torch.ones(2))
    broadcast({"a": 1}, src=1)
    trace_collectives(False)
    all_reduce(torch.ones(2))
    return [
        (record.name, record.structure, record.state, record.site.split(":")[0])
        for record in recent_collectives()[-2:]
    ]


def test_the_ring_of_recent_collectives() -> None:
    for records in run_ranks(traced, 2, True, _record):
        assert records == [
            ("all_reduce", "sum of torch.float32 of shape (2,) on cpu", "finished", OWN_FILE),
            ("broadcast", ["a"], "finished", OWN_FILE),
        ]


def _overflow_the_ring() -> tuple[int, list[int]]:
    for _ in range(300):
        all_gather_object(1)
    records = recent_collectives()
    return len(records), [records[-1].number - record.number for record in records[:2]]


def test_the_ring_keeps_the_last_256() -> None:
    assert run_ranks(traced, 2, True, _overflow_the_ring) == [(256, [255, 254])] * 2


def _watches() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "stepwrap" in thread.name]


def test_the_thread_that_answers_ends_with_the_group() -> None:
    """It starts when tracing is switched on, not with the first call."""
    assert run_ranks(traced, 2, True, _watches) == [["stepwrap-trace"]] * 2
    while any(run_ranks(traced, 2, False, _watches)):
        pass


def _synchronize_too_early(folder: str) -> str:
    # From here on both ranks answer.
    mean_scalars({"a": 1})
    if dist.get_rank() == 1:
        # Wait for the other rank's timeout, which must be shorter than the group's.
        while not os.listdir(folder):
            time.sleep(0.01)
        return ""
    text = outcome_text(synchronize, 2.0)
    Path(folder, "over").touch()
    return text


def test_the_timeout_of_synchronize_holds_while_tracing(tmp_path: Path) -> None:
    text, _ = run_ranks(
        traced, 2, True, _synchronize_too_early, str(tmp_path), timeout_s=40, group_timeout_s=120
    )
    assert "CollectiveError" in text
    assert re.search("rank 1 .* in _synchronize_too_early", text)


SWITCHES = """
import importlib
import os

from stepwrap.collectives.trace import tracing

for value in ("1", "true", "0", ""):
    os.environ["STEPWRAP_COLLECTIVE_TRACE"] = value
    print(value, importlib.reload(tracing).is_tracing())
"""


def test_the_environment_switches_tracing_on(tmp_path: Path) -> None:
    lines = run_script(SWITCHES, tmp_path).splitlines()
    assert lines == ["1 True", "true True", "0 False", " False"]
