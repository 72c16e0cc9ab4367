"""Gathering objects through files in a shared directory, and creating such directories."""

import os
import pickle
import re
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import outcome
from marks import slow
from ranks import RanksError, run_ranks

from stepwrap.collectives import (
    CollectiveError,
    all_gather_object_cpu,
    all_gather_object_gpu,
    create_tmpdir,
)


def _files(folder: str | Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


class _DuringPickling:
    """Call a function in the middle of the gather; unpickles to the integer 7."""

    def __init__(self, work: Callable[..., None], *args: Any) -> None:
        self.work = work
        self.args = args

    def __reduce__(self) -> tuple[Any, ...]:
        self.work(*self.args)
        return int, (7,)


def _gather_often(tmpdir: str) -> list[int]:
    rank = dist.get_rank()
    wrong = []
    for turn in range(200):
        # The sizes differ, so that a file of another turn would be noticed.
        sent = [(turn, member, b"x" * (turn * 10 + member)) for member in range(2)]
        received = all_gather_object_cpu(sent[rank], tmpdir)
        if received != (sent if rank == 0 else None):
            wrong.append(turn)
    return wrong


def test_back_to_back_gathers_in_one_directory(tmp_path: Path) -> None:
    (tmp_path / "part_0.pkl").write_text("foreign")
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "foreign").write_text("foreign")
    assert run_ranks(_gather_often, 2, str(tmp_path)) == [[], []]
    assert _files(tmp_path) == ["inside", "inside/foreign", "part_0.pkl"]
    assert (tmp_path / "part_0.pkl").read_text() == "foreign"


def _gather_every_way(tmpdir: str) -> tuple[list[Any], list[str]]:
    rank = dist.get_rank()
    Path(tmpdir, "cwd").mkdir(exist_ok=True)
    os.chdir(Path(tmpdir, "cwd"))
    # All ranks must use rank 0's directory for temporary files.
    tempfile.tempdir = str(Path(tmpdir, "cwd")) if rank == 0 else "/nowhere"
    sent = {"rank": rank, "none": None, "text": "x" * 10**rank, "t": torch.arange(rank * 9_000.0)}
    ways: list[dict[str, Any]] = [
        {},
        {"tmpdir": Path(tmpdir, "cwd", "new", "deep")},
        {"tmpdir": "relative"},
        {"use_system_tmp": True},
        {"use_system_tmp": False},
    ]
    results: list[Any] = []
    for everywhere in (False, True):
        results += [
            all_gather_object_cpu(sent, rank_zero_return_only=not everywhere, **way) for way in ways
        ]
        results.append(all_gather_object_gpu(sent, not everywhere))
    tempfile.tempdir = None
    shown = [
        None if result is None else [_summary(entry) for entry in result] for result in results
    ]
    return shown, _files(Path(tmpdir, "cwd"))


def _summary(received: dict[str, Any]) -> tuple[Any, ...]:
    tensor = received["t"] + 0
    # Received tensors may be changed in place.
    received["t"] += 1
    return received["rank"], received["none"], len(received["text"]), tensor.sum().item()


@pytest.mark.parametrize("world_size", [2, *slow(4)])
def test_every_way_gives_the_same(world_size: int, tmp_path: Path) -> None:
    expected = [(r, None, 10**r, torch.arange(r * 9_000.0).sum().item()) for r in range(world_size)]
    outcomes = run_ranks(_gather_every_way, world_size, str(tmp_path))
    for rank, (shown, _) in enumerate(outcomes):
        assert shown[:6] == [expected if rank == 0 else None] * 6
        assert shown[6:] == [expected] * 6
    # Only the named directories are left.
    assert outcomes[0][1] == ["new", "new/deep", "relative"]


def _gather_in_subgroups(tmpdir: str) -> tuple[Any, ...]:
    groups = [dist.new_group([1, 3]), dist.new_group([0, 2])]
    rank = dist.get_rank()
    group, other = groups if rank % 2 else groups[::-1]
    rounds = [all_gather_object_cpu((rank, turn), tmpdir, group=group) for turn in range(20)]
    expected = [[(rank, turn), (rank + 2, turn)] if rank < 2 else None for turn in range(20)]
    everywhere = all_gather_object_cpu(rank, tmpdir, False, group=group)
    through_group = all_gather_object_gpu(rank, True, group)
    refused = outcome(all_gather_object_cpu, 1, tmpdir, group=other)[0]
    return rounds == expected, everywhere, through_group, refused


def test_two_groups_at_once_in_one_directory(tmp_path: Path) -> None:
    even, odd = [0, 2], [1, 3]
    assert run_ranks(_gather_in_subgroups, 4, str(tmp_path)) == [
        (True, even, even, "ValueError"),
        (True, odd, odd, "ValueError"),
        (True, even, None, "ValueError"),
        (True, odd, None, "ValueError"),
    ]
    assert not _files(tmp_path)


def _gather_what_fails(tmpdir: str) -> tuple[list[tuple[str, str]], Any]:
    rank = dist.get_rank()
    blocked = Path(tmpdir, "blocked")
    blocked.touch()
    outcomes = [
        outcome(all_gather_object_cpu, threading.Lock() if rank == 1 else rank, tmpdir),
        outcome(all_gather_object_cpu, threading.Lock() if rank == 1 else rank, tmpdir, False),
        outcome(all_gather_object_cpu, _Unloadable() if rank == 1 else rank, tmpdir),
        outcome(all_gather_object_cpu, rank, blocked if rank == 1 else tmpdir),
        outcome(all_gather_object_cpu, rank, Path(tmpdir, f"own_{rank}")),
    ]
    return outcomes, all_gather_object_cpu(rank, tmpdir, False)


class _Unloadable:
    """An object that can be pickled, but not unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("text",)


def test_a_failure_on_one_rank_raises_on_all(tmp_path: Path) -> None:
    """The ranks stay in step."""
    outcomes = run_ranks(_gather_what_fails, 3, str(tmp_path))
    for errors, after in outcomes:
        names, texts = zip(*errors, strict=True)
        assert names == ("CollectiveError",) * 3 + ("FileExistsError", "CollectiveError")
        assert "cannot pickle the object: TypeError" in texts[0]
        assert "cannot pickle the object: TypeError" in texts[1]
        assert re.search("cannot unpickle .*rank 1: ValueError: ", texts[2])
        assert re.search(f"{tmp_path}/own_0 must .*shared .*rank 1", texts[4])
        assert after == [0, 1, 2]
    assert all("on rank 1 (" in text for text in (errors[0][1] for errors, _ in outcomes[::2]))
    assert _files(tmp_path) == ["blocked", "own_0", "own_1", "own_2"]


def _wait_for_part(tmpdir: str, rank: int) -> Path:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for path in Path(tmpdir).glob(f"*/part_{rank}.pkl"):
            return path
        time.sleep(0.002)
    raise TimeoutError(f"no part of rank {rank}")


def _forge(tmpdir: str, ruin: Path) -> None:
    _wait_for_part(tmpdir, 0).write_bytes(pickle.dumps(_Touch(ruin)))


class _Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def _flip_last_byte(tmpdir: str) -> None:
    path = _wait_for_part(tmpdir, 0)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _swap(tmpdir: str) -> None:
    rank_0_file, third = _wait_for_part(tmpdir, 0), _wait_for_part(tmpdir, 2)
    rank_0_file.rename(rank_0_file.with_name("other"))
    third.rename(rank_0_file)
    rank_0_file.with_name("other").rename(third)


def _remove_part(tmpdir: str) -> None:
    _wait_for_part(tmpdir, 2).unlink()


def _look_at_modes(tmpdir: str) -> None:
    mode = stat.S_IMODE(_wait_for_part(tmpdir, 0).parent.stat().st_mode)
    Path(tmpdir, f"mode_{mode:o}").touch()


def _gather_during(tmpdir: str, ruin: Path) -> list[Any]:
    rank = dist.get_rank()
    outcomes: list[Any] = []
    for work, args in (
        (_forge, (tmpdir, ruin)),
        (_flip_last_byte, (tmpdir,)),
        (_swap, (tmpdir,)),
        (_remove_part, (tmpdir,)),
    ):
        sent = _DuringPickling(work, *args) if rank == 1 else ("x" * 50, rank)
        outcomes.append(outcome(all_gather_object_cpu, sent, tmpdir))
    sent = _DuringPickling(_look_at_modes, tmpdir) if rank == 1 else rank
    return [*outcomes, all_gather_object_cpu(sent, tmpdir)]


def test_parts_that_their_ranks_have_not_written_are_refused(tmp_path: Path) -> None:
    ruin = tmp_path / "ruin"
    outcomes = run_ranks(_gather_during, 3, str(tmp_path), ruin)
    for rank, (forged, flipped, swapped, removed, undisturbed) in enumerate(outcomes):
        for name, text in (forged, flipped, swapped):
            assert name == "CollectiveError"
            assert re.search(r"part_0\.pkl .*changed .*rank 0", text)
        assert removed[0] == "CollectiveError"
        assert re.search(f"{tmp_path} must .*shared .*rank 2", removed[1])
        assert undisturbed == ([0, 7, 2] if rank == 0 else None)
    assert not ruin.exists()
    assert _files(tmp_path) == ["mode_700"]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_after_all_parts(tmpdir: str) -> None:
    _wait_for_part(tmpdir, 0)
    _wait_for_part(tmpdir, 2)
    _die()


class _DiesOnLoading:
    def __reduce__(self) -> tuple[Any, ...]:
        return _die, ()


def _lose_a_rank(tmpdir: str, when: str, everywhere: bool) -> None:
    rank = dist.get_rank()
    sent: Any = rank
    if rank == 1 and when == "writing":
        sent = _DuringPickling(_die_after_all_parts, tmpdir)
    if when == "entering":
        # Wait until the other rank has connected.
        connected = Path(f"{tmpdir}_connected")
        connected.mkdir(exist_ok=True)
        (connected / str(rank)).touch()
        while rank == 1:
            if len(_files(connected)) == 3:
                _die()
            time.sleep(0.002)
    if rank == 1 and when == "reading":
        sent = _DiesOnLoading()
    name, text = outcome(all_gather_object_cpu, sent, tmpdir, not everywhere)
    raise RuntimeError(f"{name}: {text}")


# Only the first rank reads, so there it is the first rank that dies.
@pytest.mark.parametrize(("when", "dead"), [("entering", 1), ("reading", 0), *slow(("writing", 1))])
@pytest.mark.slow
def test_a_killed_rank_leaves_no_file_behind(when: str, dead: int, tmp_path: Path) -> None:
    (tmp_path / "foreign").touch()
    with pytest.raises(RanksError) as caught:
        run_ranks(_lose_a_rank, 3, str(tmp_path), when, False, group_timeout_s=30)
    assert _files(tmp_path) == ["foreign"]
    reports = caught.value.reports
    assert "SIGKILL" in reports[dead]
    for rank in {0, 1, 2} - {dead}:
        assert "RuntimeError: CollectiveError" in reports[rank], reports[rank]


def test_one_process_keeps_its_own_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a launcher's variables set but no group."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    lock = threading.Lock()
    for gathered in (
        all_gather_object_cpu(lock),
        all_gather_object_cpu(lock, tmp_path / "none", use_system_tmp=True),
        all_gather_object_gpu(lock),
    ):
        assert gathered is not None
        assert gathered[0] is lock
        assert len(gathered) == 1
    assert not _files(tmp_path)


def test_directories_without_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("system", "current"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "system"))
    monkeypatch.chdir(tmp_path / "current")
    folders = [create_tmpdir(0), create_tmpdir(0), create_tmpdir(0, use_system_tmp=False)]
    assert len(set(folders)) == 3
    assert [Path(path).parent.name for path in folders] == ["system", "system", "current"]
    assert {stat.S_IMODE(os.stat(path).st_mode) for path in folders} == {0o700}
    for rank in (0, 3):
        assert create_tmpdir(rank, str(tmp_path / "a" / "b")) == str(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    with pytest.raises(RuntimeError, match=r"create_tmpdir\(\) .*rank 2 .*process group"):
        create_tmpdir(2)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError):
        create_tmpdir(0)


def _make_directories(base: str) -> tuple[list[str], tuple[str, str]]:
    rank = dist.get_rank()
    tempfile.tempdir = base if rank == 0 else "/nowhere"
    # The group's rank takes precedence over the given one.
    folders = [create_tmpdir(rank), create_tmpdir(7), create_tmpdir(rank, f"{base}/own_{rank}")]
    tempfile.tempdir = f"{base}/missing" if rank == 0 else base
    refused = outcome(create_tmpdir, rank)
    tempfile.tempdir = None
    return folders, refused


def test_directories_in_a_group(tmp_path: Path) -> None:
    rank_0, second = run_ranks(_make_directories, 2, str(tmp_path))
    assert rank_0[0][:2] == second[0][:2]
    assert len(set(rank_0[0])) == 3
    assert {Path(path).parent for path in rank_0[0]} == {tmp_path}
    assert (rank_0[0][2], second[0][2]) == (f"{tmp_path}/own_0", f"{tmp_path}/own_1")
    assert len(_files(tmp_path)) == 4
    assert rank_0[1][0] == second[1][0] == "FileNotFoundError"
    assert "on rank 0" in second[1][1]


def _make_directory_alone(base: str) -> None:
    tempfile.tempdir = base
    # Otherwise a rank could die while the other still connects, which breaks the group.
    dist.barrier()
    if dist.get_rank() == 1:
        _die()
    create_tmpdir(dist.get_rank())


def test_a_directory_that_no_rank_gets_is_removed(tmp_path: Path) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(_make_directory_alone, 2, str(tmp_path), group_timeout_s=30)
    assert "CollectiveError" in caught.value.reports[0]
    assert not _files(tmp_path)


def test_the_error_of_a_lost_directory_is_a_runtime_error() -> None:
    assert issubclass(CollectiveError, RuntimeError)
