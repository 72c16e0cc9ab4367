"""Signals stop a run cleanly, on all ranks at the same update."""

from __future__ import annotations

import os
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import spiky_runs
import torch.distributed as dist
from listeners import Records, on, slow
from loop_parts import make_data, make_loader, make_state
from ranks import run_ranks

from stepwrap.collectives import get_world_size
from stepwrap.loops import (
    CheckpointHook,
    EpochTrainLoop,
    Hook,
    HookList,
    LoopState,
    MeanLoss,
    SpikeGuardHook,
    ValLoop,
    build_loader,
)
from stepwrap.loops.signals import StopSignals, _ExchangePlan
from stepwrap.wrappers import StepDistributedDataParallel


def send(number: int, rank: int = 0) -> None:
    if not dist.is_initialized() or dist.get_rank() == rank:
        os.kill(os.getpid(), number)


def sending(number: int, step: int, rank: int = 0) -> Any:
    """Return a hook that sends a signal at an update, on one rank."""
    return on(on_update=lambda state: send(number, rank) if state.step == step else None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_at_once_and_the_handlers_come_back(number: signal.Signals) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    loop = EpochTrainLoop(make_loader(20), max_epochs=2)
    state = loop.run(make_state(), HookList([sending(number, step=3)]))
    assert (state.step, state.signal) == (3, number)
    assert state.stop_reason == f"received {number.name}"
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_the_same_signal_from_scheduler_and_launcher_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    heard: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        loop = EpochTrainLoop(make_loader(20), max_epochs=2)
        # The launcher forwards a signal that each rank has received already.
        again = on(on_train_end=lambda state: os.kill(os.getpid(), signal.SIGTERM))
        state = loop.run(make_state(), HookList([sending(signal.SIGTERM, step=3), again]))
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert (state.step, state.signal, heard) == (3, signal.SIGTERM, [])


def test_a_second_interrupt_raises() -> None:
    handler = signal.getsignal(signal.SIGINT)
    with StopSignals() as signals:
        signals.start()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is handler


def test_the_clock_continues_after_a_resume() -> None:
    state = make_state()
    state.clock_s = 100.0
    EpochTrainLoop(make_loader(4), max_epochs=1).run(state, HookList())
    assert 100.0 < state.clock_s < 130.0


def _stopped_at() -> tuple[int, int, float]:
    val_loop = ValLoop(build_loader(make_data(42), batch_size=2), {"loss": MeanLoss()})
    loop = EpochTrainLoop(make_loader(2000, batch_size=1), max_epochs=50, val_loop=val_loop)
    hooks = HookList([sending(signal.SIGTERM, step=5, rank=1), slow(0.002, "on_batch_end")])
    state = loop.run(make_state(accumulate=3), hooks)
    return state.step, state.signal, state.clock_s


def test_a_signal_to_one_rank_stops_all_at_the_same_update() -> None:
    ends = run_ranks(_stopped_at, 2)
    assert ends[0] == ends[1]
    step, number, clock_s = ends[0]
    assert 5 <= step < 1000
    assert number == signal.SIGTERM
    assert clock_s > 0


class RaiseInEvaluation(Hook):
    """Send rank 1 a signal in the first evaluation, which takes a while."""

    def on_eval_batch_end(self, state: LoopState, batch: Any, outputs: Any) -> None:
        time.sleep(0.05)
        send(signal.SIGTERM, rank=1)

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        assert metrics == {}


def _stopped_in_evaluation() -> tuple[int, int, int]:
    # 21 evaluation samples: 11 batches on rank 0, 10 on rank 1.
    val_loop = ValLoop(build_loader(make_data(21), batch_size=1), {"loss": MeanLoss()})
    loop = EpochTrainLoop(make_loader(4), max_epochs=3, val_loop=val_loop)
    state = loop.run(make_state(), HookList([RaiseInEvaluation()]))
    return state.epoch, state.signal, state.evaluated_at


def test_a_signal_in_an_evaluation_with_uneven_batches_stops_all() -> None:
    assert run_ranks(_stopped_in_evaluation, 2) == [(1, signal.SIGTERM, -1)] * 2


def _uneven() -> str:
    loop = EpochTrainLoop([1] * (2 + dist.get_rank()), max_epochs=1)
    with pytest.raises(ValueError, match=r"got \[2, 3\] \(by rank\)") as caught:
        loop.run(make_state(), HookList())
    return str(caught.value)


def test_unequal_training_loaders_are_refused_on_every_rank() -> None:
    texts = run_ranks(_uneven, 2)
    assert texts[0] == texts[1]


def _signalled_at_the_end(event: str, rank: int) -> tuple[int, list[int]]:
    heard: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    hook = on(**{event: lambda state: send(signal.SIGTERM, rank) if state.epoch == 1 else None})
    try:
        loop = EpochTrainLoop(make_loader(8), max_epochs=1)
        state = loop.run(make_state(), HookList([hook]))
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert state.epoch == 1
    return state.signal, heard


def test_a_signal_after_the_last_update_is_not_lost() -> None:
    """The hooks at the end of training see it, or the previous handler gets it."""
    assert _signalled_at_the_end("on_save_point", 0) == (signal.SIGTERM, [])
    assert _signalled_at_the_end("on_train_end", 0) == (0, [signal.SIGTERM])
    assert run_ranks(_signalled_at_the_end, 2, "on_save_point", 1) == [(signal.SIGTERM, [])] * 2
    ends = run_ranks(_signalled_at_the_end, 2, "on_train_end", 1)
    assert ends == [(0, []), (0, [signal.SIGTERM])]


class SendsWhileGoingBack(Hook):
    """Sends one rank a signal before a rollback, during its restore or when training restarts."""

    def __init__(self, when: str) -> None:
        self.when, self.restored = when, False

    def on_batch_start(self, state: LoopState, batch: Any) -> None:
        if (self.when, state.step, self.restored) == ("before", 11, False):
            send(signal.SIGTERM, get_world_size() - 1)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.restored = True
        if self.when == "restore":
            send(signal.SIGTERM, get_world_size() - 1)


class SendsWhenRead(spiky_runs.Spiky):
    """Validation data that send a signal when they are tried after a rollback."""

    def __init__(self, sender: SendsWhileGoingBack) -> None:
        super().__init__(8)
        self.sender = sender

    def __getitem__(self, index: int) -> Any:
        if self.sender.restored and self.sender.when == "restart":
            self.sender.restored = False
            send(signal.SIGTERM, get_world_size() - 1)
        return super().__getitem__(index)


def _signalled_while_going_back(when: str, folder: Path) -> tuple[int, int, list[int]]:
    heard: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    sender, ranks = SendsWhileGoingBack(when), get_world_size()
    data = spiky_runs.Spiky(80 * ranks, {spiky_runs.sample_at(12, 0, ranks): float("nan")})
    saver = CheckpointHook(every_steps=5, every_epochs=None)
    val_loop = ValLoop(build_loader(SendsWhenRead(sender), batch_size=4), {"loss": MeanLoss()})
    try:
        state = spiky_runs.make_state(run_dir=folder)
        hooks = [SpikeGuardHook(before=4), saver, sender]
        spiky_runs.train(state, data, hooks, val_loop=val_loop)
    finally:
        signal.signal(signal.SIGTERM, previous)
    return state.step, state.signal, heard


@pytest.mark.parametrize("when", ["before", "restore", "restart"])
def test_a_signal_during_a_rollback_stops_after_it(when: str, tmp_path: Path) -> None:
    assert _signalled_while_going_back(when, tmp_path) == (6, signal.SIGTERM, [])


def test_a_signal_to_one_rank_during_a_rollback_stops_all(tmp_path: Path) -> None:
    ends = run_ranks(_signalled_while_going_back, 3, "restore", tmp_path)
    assert ends == [(6, signal.SIGTERM, [])] * 3


def _most_polls_between_agreements() -> int:
    state, gaps, previous = make_state(), [], 0
    with StopSignals() as signals:
        signals.start()
        for poll in range(1000):
            before = state.clock_s
            signals.poll(state)
            if state.clock_s != before:
                gaps.append(poll - previous)
                previous = poll
    return max(gaps)


def test_agreements_are_never_many_polls_apart() -> None:
    """Otherwise a phase that becomes slower would notice a signal too late."""
    assert run_ranks(_most_polls_between_agreements, 2) == [64, 64]


def test_agreements_are_about_a_second_apart() -> None:
    plan, due = _ExchangePlan(), []
    for poll in range(64):
        if plan.due():
            plan.plan(clock_s=poll / 8)
            due.append(poll)
    assert [after - before for before, after in pairwise(due)] == [1, 2, 4, *[8] * 7]


def _all_ranks_record() -> int:
    # Rank 1 logs nothing; at the last update the logs are also reduced.
    state = make_state()
    state.model.__class__ = Silent
    heard = Records()
    loop = EpochTrainLoop(make_loader(512, batch_size=1), max_epochs=1, log_every_steps=1000)
    loop.run(state, HookList([heard]))
    return len(heard.records)


class Silent(StepDistributedDataParallel):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Any]:
        logs = super().train_step(data, optim_wrapper)
        return {} if dist.get_rank() else logs


def test_all_ranks_have_the_last_record() -> None:
    assert run_ranks(_all_ranks_record, 2) == [1, 1]
