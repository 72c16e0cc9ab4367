"""A missing rank is named in training and validation, with and without tracing."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ports import free_port
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from stepwrap.collectives import all_gather_object, trace_collectives
from stepwrap.loops import EpochTrainLoop, Hook, LoopState, ValLoop
from stepwrap.runner import Runner
from stepwrap.wrappers import (
    OptimWrapper,
    SeparateDistributedDataParallel,
    StepDistributedDataParallel,
    SupervisedModel,
)

ABSENT = 1
# Public since torch 2.14, which deprecates the private name.
set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout


class SharedLogs(SupervisedModel):
    """Adds up its losses over the ranks before the update."""

    def parse_losses(self, losses: Any) -> tuple[Tensor, dict[str, Tensor]]:
        total, logs = super().parse_losses(losses)
        summed = logs["loss"].clone()
        dist.all_reduce(summed)
        return total, {"loss": summed}


def wrapped(wrapper: str = "ddp") -> tuple[Any, OptimWrapper]:
    kind = SharedLogs if wrapper == "separate" else SupervisedModel
    model = kind(nn.Linear(4, 3), nn.CrossEntropyLoss())
    optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    if wrapper == "separate":
        return SeparateDistributedDataParallel(model), optim
    return StepDistributedDataParallel(model), optim


def batches(count: int) -> list[list[Tensor]]:
    return [[torch.ones(2, 4), torch.tensor([0, 2])] for _ in range(count)]


def part(how: str, folder: Path) -> None:
    """Make the absent rank stop; the others continue once it has."""
    # Set only now, because the first steps may take longer on a busy machine.
    set_timeout(timedelta(seconds=2), dist.group.WORLD)
    away = folder.with_name(f"{folder.name}_away")
    if dist.get_rank() == ABSENT:
        away.touch()
        stay_away(how, folder)
    while not away.exists():
        time.sleep(0.01)


def stay_away(how: str, folder: Path) -> None:
    """Stop this process, or sleep, until both other ranks have timed out."""
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    # Do not call `given_up` here, because errors name the function that the rank is in.
    while len(os.listdir(folder)) < 2:
        time.sleep(0.01)


def given_up(folder: Path) -> bool:
    return len(os.listdir(folder)) >= 2


class StayAway(Hook):
    """Stop one rank once, at one place."""

    def __init__(self, how: str, folder: Path, event: str) -> None:
        self.how, self.folder, self.place = how, folder, event

    def on_batch_start(self, state: LoopState, batch: Any) -> None:
        self.reach("on_batch_start", state)

    def on_update(self, state: LoopState) -> None:
        self.reach("on_update", state)

    def on_eval_batch_start(self, state: LoopState, batch: Any) -> None:
        self.reach("on_eval_batch_start", state)

    def reach(self, event: str, state: LoopState) -> None:
        if (event, state.step) == (self.place, 2):
            part(self.how, self.folder)


def train(traced: bool, how: str, event: str, folder: Path) -> str:
    model, optim = wrapped()
    loop = EpochTrainLoop(batches(2), max_epochs=2, val_loop=ValLoop(batches(2)))
    hooks = [StayAway(how, folder, event)]
    return error_of_run(traced, folder, Runner(model, loop, optim_wrapper=optim, hooks=hooks).train)


def train_by_hand(folder: Path, wrapper: str) -> str:
    model, optim = wrapped(wrapper)

    def loop() -> None:
        for step, batch in enumerate(batches(4)):
            if step == 2:
                part("sleep", folder)
            model.train_step(batch, optim)

    return error_of_run(True, folder, loop)


def error_of_run(traced: bool, folder: Path, run: Any) -> str:
    """Return the error that `run` raises on this rank, and wake the absent rank."""
    trace_collectives(traced)
    processes = all_gather_object(os.getpid())
    try:
        run()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        trace_collectives(False)
        (folder / str(dist.get_rank())).touch()
        if given_up(folder):
            os.kill(processes[ABSENT], signal.SIGCONT)
    return "no error"


SLEEPS = r"rank 1 is at \S*test_loops_missing_ranks.py:\d+ in stay_away, in "


@pytest.mark.parametrize(
    ("traced", "how", "event", "waits", "absent"),
    [
        (
            *(False, "stop", "on_update", r"training \(step 2, epoch 1\)"),
            "rank 1 does not answer: ",
        ),
        pytest.param(
            *(False, "sleep", "on_eval_batch_start", r"validation \(step 2, epoch 1\)"),
            SLEEPS + r"validation \(step 2, epoch 1\)\. ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(True, "sleep", "on_batch_start", r"training \(step 2, epoch 2\)"),
            SLEEPS + r"training \(step 2, epoch 2\); its last collective was #\d+ \w+ \(",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_loop_names_the_rank_that_does_not_come(
    traced: bool, how: str, event: str, waits: str, absent: str, tmp_path: Path
) -> None:
    texts = run_ranks(train, 3, traced, how, event, tmp_path)
    for rank in (0, 2):
        expected = (
            rf"^CollectiveError: \w+ .*all 3 ranks, .*rank {rank}: "
            rf"ranks 0, 2 wait in {waits}, {absent}"
        )
        assert re.search(expected, texts[rank]), "\n".join(texts)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "separate"])
def test_a_step_by_hand_names_the_rank_that_does_not_come(wrapper: str, tmp_path: Path) -> None:
    texts = run_ranks(train_by_hand, 3, tmp_path, wrapper)
    for rank in (0, 2):
        assert re.search(
            rf"^CollectiveError: train_step\(\) .*all 3 ranks, .*rank {rank}: "
            r"ranks 0, 2 .*train_step \(\S*test_loops_missing_ranks.py:\d+ in loop\), "
            r"rank 1 .*test_loops_missing_ranks.py:\d+ in stay_away",
            texts[rank],
        ), "\n".join(texts)


def stop_the_store(port: int) -> str:
    """Train by hand on two ranks; the first serves the store and is then stopped."""
    rank = dist.get_rank()
    processes = all_gather_object(os.getpid())
    dist.destroy_process_group()
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    model, optim = wrapped()
    set_timeout(timedelta(seconds=2), dist.group.WORLD)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        model.train_step(batches(1)[0], optim)
    except RuntimeError as error:
        return str(error)
    finally:
        os.kill(processes[0], signal.SIGCONT)
    return "no error"


@pytest.mark.slow
def test_a_stopped_rank_that_serves_the_store_is_named() -> None:
    text = run_ranks(stop_the_store, 2, free_port())[1]
    assert re.search("rank 0 does not answer, .*store", text)


class Threads(Hook):
    def __init__(self) -> None:
        self.seen: set[str] = set()

    def on_update(self, state: LoopState) -> None:
        self.seen |= threads_of_ours()


def threads_of_ours() -> set[str]:
    return {thread.name for thread in threading.enumerate() if "stepwrap" in thread.name}


def threads_in_and_after_training() -> tuple[set[str], set[str]]:
    model, optim = wrapped()
    hook = Threads()
    loop = EpochTrainLoop(batches(2), max_epochs=1, val_loop=ValLoop(batches(1)))
    Runner(model, loop, optim_wrapper=optim, hooks=[hook]).train()
    return hook.seen, threads_of_ours()


def test_the_thread_that_answers_ends_with_the_loop() -> None:
    assert run_ranks(threads_in_and_after_training, 2) == [({"stepwrap-trace"}, set())] * 2
