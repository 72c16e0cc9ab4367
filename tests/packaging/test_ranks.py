"""The helper of all multi-process tests."""

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from marks import slow
from ranks import RanksError, run_ranks


def _pid() -> int:
    return os.getpid()


def _sum_of_ranks(factor: float) -> float:
    value = torch.tensor(factor * dist.get_rank())
    dist.all_reduce(value)
    return value.item()


def _fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise KeyError("only here")
    dist.barrier()


def _dawdle_on_rank_1() -> None:
    while dist.get_rank() == 1:
        time.sleep(0.05)


def _die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        print("last words")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _unpicklable_result() -> object:
    return lambda: None


def _warn() -> None:
    warnings.warn("a warning", UserWarning, stacklevel=1)


def _soil() -> None:
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.rand(3)
    os.environ["RANK"] = "7"
    os.environ["SOILED"] = "yes"
    os.chdir("/")


def _state() -> tuple[float, torch.dtype, bool, list[str], str, bool]:
    names = [name for name in ("RANK", "WORLD_SIZE", "SOILED") if name in os.environ]
    deterministic = torch.are_deterministic_algorithms_enabled()
    dtype = torch.get_default_dtype()
    return torch.rand(1).item(), dtype, deterministic, names, os.getcwd(), dist.is_initialized()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(map(_is_alive, pids)):
        assert time.monotonic() < deadline, f"still alive: {[p for p in pids if _is_alive(p)]}"
        time.sleep(0.02)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_in_rank_order(world_size: int) -> None:
    expected = 2.0 * sum(range(world_size))
    assert run_ranks(_sum_of_ranks, world_size, 2.0) == [expected] * world_size
    assert len(set(run_ranks(_pid, world_size))) == world_size


def test_processes_are_kept_between_calls() -> None:
    assert run_ranks(_pid) == run_ranks(_pid, init=False)


def test_an_error_names_the_rank_and_the_peers_come_after_it() -> None:
    pids = run_ranks(_pid)
    with pytest.raises(RanksError) as error:
        run_ranks(_fail_on_rank_1)
    assert list(error.value.reports) == [1, 0]
    assert "in _fail_on_rank_1" in error.value.reports[1]
    assert "KeyError: 'only here'" in str(error.value)
    assert run_ranks(_pid) == pids


def test_an_unpicklable_result_is_an_error_of_its_rank() -> None:
    with pytest.raises(RanksError, match="rank 0: Traceback(.|\n)*pickle"):
        run_ranks(_unpicklable_result, init=False)


def test_warnings_are_errors_in_the_ranks_too() -> None:
    with pytest.raises(RanksError, match="UserWarning: a warning"):
        run_ranks(_warn, 1)


@pytest.mark.slow
def test_a_silent_rank_is_named_with_its_stack_and_no_process_stays() -> None:
    pids = run_ranks(_pid)
    with pytest.raises(RanksError, match=r"rank 1: silent for(.|\n)*in _dawdle_on_rank_1") as error:
        run_ranks(_dawdle_on_rank_1, timeout_s=3.0)
    assert list(error.value.reports) == [1]
    assert not any(map(_is_alive, pids))
    assert set(run_ranks(_pid)).isdisjoint(pids)


def test_a_dead_rank_is_named_first_with_its_output() -> None:
    with pytest.raises(RanksError, match="rank 1: .*SIGKILL") as error:
        run_ranks(_die_on_rank_1)
    assert list(error.value.reports) == [1, 0]
    assert "last words" in error.value.reports[1]


@pytest.mark.slow
def test_every_call_starts_from_the_same_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "5")
    before = run_ranks(_state)
    run_ranks(_soil)
    assert run_ranks(_state) == before
    assert before[0] == before[1]
    assert before[0][1:] == (torch.float32, False, [], os.getcwd(), True)
    assert not run_ranks(_state, init=False)[0][-1]


def test_a_world_of_no_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size must .* 1, got 0"):
        run_ranks(_pid, 0)


@pytest.mark.parametrize("how", [signal.SIGKILL, *slow(signal.SIGTERM)])
def test_the_processes_die_with_their_parent(how: signal.Signals, tmp_path: Path) -> None:
    """The ranks and their template end even if the parent is killed in the middle of a call."""
    Path(tmp_path, "sleepers.py").write_text(
        "import os, pathlib, time\n"
        "def sleep(folder):\n"
        "    for pid in (os.getpid(), os.getppid()):\n"
        "        pathlib.Path(folder, f'pid_{pid}').touch()\n"
        "    time.sleep(600)\n"
    )
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; import ranks, sleepers\n"
        "ranks.run_ranks(sleepers.sleep, 2, sys.argv[1], init=False)"
    )
    folders = [str(tmp_path), str(Path(ranks.__file__).parent)]
    parent = subprocess.Popen(
        [sys.executable, "-c", code, *folders],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("pid_*"))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.send_signal(how)
    parent.wait()
    _wait_until_gone([int(path.name[4:]) for path in tmp_path.glob("pid_*")])
