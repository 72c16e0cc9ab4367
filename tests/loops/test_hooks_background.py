"""Checkpoints that are written in another thread while the training continues."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hook_runs import new_state, train
from listeners import on, slow
from ranks import run_ranks
from sharded_runs import CASES, batch, make_run
from torch import nn

from stepwrap.collectives import CollectiveError, get_rank
from stepwrap.loops import (
    CheckpointError,
    CheckpointHook,
    EMAHook,
    LoopState,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from stepwrap.loops.checkpoints.checkpoint import list_checkpoints

EACH_STEP: dict[str, Any] = {"every_steps": 1, "every_epochs": None, "keep_last": None}


@contextmanager
def syncs(action: Callable[[str], object]) -> Iterator[None]:
    """Call a function with the path of each file or folder before it is synced."""
    sync = os.fsync

    def call_and_sync(file: int) -> None:
        action(os.readlink(f"/proc/self/fd/{file}"))
        sync(file)

    os.fsync = call_and_sync
    try:
        yield
    finally:
        os.fsync = sync


def fail_to_write() -> None:
    raise OSError(errno.EIO, "the disk is broken")


def at_step(step: int, action: Callable[[], object]) -> Any:
    """Return a hook that calls a function after an update, before all other hooks."""
    return on(order=1, on_update=lambda state: action() if state.step == step else None)


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the checkpoints, the latest first."""
    return [meta["step"] for _, meta in list_checkpoints(folder / "checkpoints")]


class SlowDisk:
    """A run with a checkpoint of step 2 that is complete only after step 5.

    The same checkpoint is written at once into the folder ``reference``.
    """

    def __init__(self, run_dir: Path, **settings: Any) -> None:
        self._reference = run_dir / "reference"
        self._released = threading.Event()
        settings = {"every_steps": 2, "every_epochs": None, "keep_last": None, **settings}
        self.checkpoint_hook = CheckpointHook(**settings)
        self._hooks = [
            self.checkpoint_hook,
            on(order=70, on_save_point=self._save_reference),
            at_step(5, self._released.set),
        ]

    def train(self, state: LoopState, *hooks: Any, **settings: Any) -> LoopState:
        with syncs(lambda _: None if self._is_reference else self._wait()):
            return train(state, [*self._hooks, *hooks], val_loop=None, **settings)

    def _wait(self) -> None:
        assert self._released.wait(60)

    _is_reference = False

    def _save_reference(self, state: LoopState) -> None:
        if state.step == 2:
            self._is_reference = True
            save_checkpoint(self._reference, state)
            self._is_reference = False


def net_with_buffers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def test_the_checkpoint_has_the_state_of_its_save_point(tmp_path: Path) -> None:
    state, ema = new_state(run_dir=tmp_path, net=net_with_buffers()), EMAHook()
    state.stateful["hooks.ema"] = ema
    SlowDisk(tmp_path, while_saving="skip").train(state, ema)
    assert_same_files(tmp_path)


@pytest.mark.gpu
def test_the_copy_from_a_device_is_complete_before_the_next_update(tmp_path: Path) -> None:
    """The weights are large, so that copying them takes longer than an update."""
    net = nn.Sequential(nn.Linear(3, 2**20), nn.Linear(2**20, 1)).cuda()
    SlowDisk(tmp_path, while_saving="skip").train(new_state(run_dir=tmp_path, net=net, lr=1e-9))
    assert_same_files(tmp_path)


def assert_same_files(run: Path) -> None:
    steps = steps_in(run)
    assert (steps[0], steps[-1], 4 in steps) == (8, 2, False)
    name = "step_00000002"
    saved, expected = (
        load_checkpoint(run / folder / name).meta["files"]
        for folder in ("checkpoints", "reference")
    )
    assert saved == expected


def _sharded_run(kind: str, folder: Path) -> None:
    state = make_run(kind, run_dir=folder)
    batches = [batch(state, index) for index in range(4)]
    ema: Any = state.stateful["hooks.ema"]
    SlowDisk(folder, while_saving="skip").train(state, ema, dataloader=batches, per_rank=True)


@pytest.mark.parametrize(("kind", "ranks"), [("ddp", 3), *CASES[1:]])
def test_the_same_files_on_ranks(tmp_path: Path, kind: str, ranks: int) -> None:
    run_ranks(_sharded_run, ranks, kind, tmp_path)
    assert_same_files(tmp_path)


def test_a_run_resumed_from_it_ends_like_the_one_that_wrote_it(tmp_path: Path) -> None:
    ended = new_state(run_dir=tmp_path, net=net_with_buffers())
    SlowDisk(tmp_path, while_saving="skip").train(ended)
    resumed = new_state(net=net_with_buffers())
    load_checkpoint(tmp_path / "checkpoints" / "step_00000002").restore(resumed)
    train(resumed, [], val_loop=None)
    for name, weight in ended.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], weight), name


def test_a_checkpoint_that_is_due_meanwhile_waits(tmp_path: Path) -> None:
    with syncs(lambda _: time.sleep(0.005)):
        train(new_state(run_dir=tmp_path), [CheckpointHook(**EACH_STEP)], val_loop=None)
    assert steps_in(tmp_path) == [8, 7, 6, 5, 4, 3, 2, 1]


def test_the_end_waits_for_the_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with syncs(lambda _: time.sleep(0.02)):
        train(new_state(run_dir=tmp_path), [CheckpointHook()], epochs=1)
    path = tmp_path / "checkpoints" / "step_00000004"
    assert f"saved checkpoint {path}" in caplog.messages
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == [path.name]


@pytest.mark.parametrize("error", [OSError("network"), KeyboardInterrupt()])
def test_an_error_in_the_training_meanwhile(tmp_path: Path, error: BaseException) -> None:
    """The save is completed after an error, but not after a second Ctrl-C."""
    released, hook = threading.Event(), CheckpointHook(**EACH_STEP)
    is_interrupt = isinstance(error, KeyboardInterrupt)

    def fail(state: LoopState) -> None:
        if not is_interrupt:
            threading.Timer(0.1, released.set).start()
        raise error

    hooks = [hook, on(order=90, on_save_point=fail)]
    with syncs(lambda _: None if released.wait(60) else fail_to_write()):
        with pytest.raises(type(error)):
            train(new_state(run_dir=tmp_path), hooks, val_loop=None)
        assert steps_in(tmp_path) == ([] if is_interrupt else [1])
        # Another training in this process waits for the save, and removes nothing of it.
        threading.Timer(0.1, released.set).start()
        hook = CheckpointHook(keep_last=None)
        train(new_state(run_dir=tmp_path), [hook], val_loop=None, epochs=1)
    assert steps_in(tmp_path) == [4, 1]


def _failing_run(folder: Path, failing_rank: int) -> tuple[str, int]:
    """Return the error of a run whose second checkpoint cannot be written, and its step."""
    state, hook = new_state(run_dir=folder), CheckpointHook(**EACH_STEP | {"every_steps": 2})

    def write(path: str) -> None:
        if "rank_" in path and steps_in(folder) and get_rank() == failing_rank:
            fail_to_write()

    with syncs(write):
        try:
            train(state, [hook, slow(0.05)], val_loop=None, epochs=20)
        except CheckpointError as error:
            return str(error), state.step
    return "", state.step


@pytest.mark.parametrize(("ranks", "failing_rank"), [(1, 0), (3, 2)])
def test_a_failed_save_ends_the_run_on_all_ranks_at_the_same_update(
    tmp_path: Path, ranks: int, failing_rank: int
) -> None:
    ended = run_ranks(_failing_run, ranks, tmp_path, failing_rank, init=ranks > 1)
    assert len(set(ended)) == 1
    text, step = ended[0]
    assert "step 4" in text
    assert "the disk is broken" in text
    assert f"last good checkpoint is {tmp_path / 'checkpoints' / 'step_00000002'}" in text
    assert ranks == 1 or f"rank {failing_rank}" in text
    # The checkpoint of step 6 waits for that of step 4.
    assert 4 <= step <= 6
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]


def _slow_run(folder: Path, background: bool) -> int:
    """Train with a disk that needs more time than the timeout of the run."""
    state, waits_s = new_state(run_dir=folder), iter([2.5])
    with syncs(lambda _: time.sleep(next(waits_s, 0) if get_rank() == 0 else 0)):
        hook = CheckpointHook(background=background, keep_last=None)
        train(state, [hook], epochs=1)
    return state.step


@pytest.mark.parametrize("background", [True, False])
def test_a_slow_disk_is_not_a_missing_rank(tmp_path: Path, background: bool) -> None:
    assert run_ranks(_slow_run, 2, tmp_path, background, group_timeout_s=1.0) == [2, 2]
    assert steps_in(tmp_path) == [2]


def _stuck_run(folder: Path) -> str:
    """Return the error of a run in which rank 1 does not finish its part of a save."""
    ended = folder / "ended"

    def wait(_: str) -> None:
        while get_rank() == 1 and not ended.exists():
            time.sleep(0.02)

    hook = CheckpointHook(save_timeout_s=1.0)
    with syncs(wait):
        try:
            train(new_state(run_dir=folder), [hook], epochs=1)
        except (CheckpointError, CollectiveError) as error:
            return str(error)
        finally:
            ended.touch()
    return ""


def test_a_rank_that_does_not_finish_is_named(tmp_path: Path) -> None:
    texts = run_ranks(_stuck_run, 2, tmp_path)
    assert "rank 1" in texts[0]
    assert "save_timeout_s" in texts[0]


def test_without_memory_for_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("stepwrap.loops.checkpoints.background.free_memory", lambda _: 10.0)
    train(new_state(run_dir=tmp_path), [CheckpointHook()], epochs=2)
    assert steps_in(tmp_path) == [8, 4]
    warning = next(text for text in caplog.messages if "copy" in text)
    assert "background: false" in warning
    assert "1e-05 MB are free" in warning


def test_other_saves_and_searches_meanwhile(tmp_path: Path) -> None:
    """A program may save into the same folder, or look for the latest checkpoint, at any time."""
    paths: list[Path | None] = []

    def use_folder(state: LoopState) -> None:
        paths.append(find_checkpoint(tmp_path))
        paths.append(save_checkpoint(tmp_path / "checkpoints", state))

    hooks = [
        CheckpointHook(every_steps=2, every_epochs=None),
        on(order=90, on_save_point=use_folder),
    ]
    with syncs(lambda _: time.sleep(0.01)):
        train(new_state(run_dir=tmp_path), hooks, val_loop=None, epochs=1)
    names = [path and path.name.partition("-")[0] for path in paths]
    # At step 2 the search finds the checkpoint that is still being written.
    assert names[:4] == [None, "step_00000001", "step_00000002", "step_00000002"]
    assert steps_in(tmp_path) == [4, 3, 2]


def test_listeners_hear_of_each_checkpoint(tmp_path: Path) -> None:
    state, events = new_state(run_dir=tmp_path), []
    state.after_save.append(lambda path: events.append((path.name, len(steps_in(tmp_path)))))
    train(state, [CheckpointHook(keep_last=1)], epochs=3)
    assert events == [(f"step_{step:08d}", 1) for step in (4, 8, 12)]


@pytest.mark.parametrize(
    ("setting", "value"), [("while_saving", "stop"), ("save_timeout_s", 0), ("save_timeout_s", -1)]
)
def test_wrong_settings(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=setting):
        CheckpointHook(**{setting: value})
