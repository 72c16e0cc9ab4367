"""Starts the processes of a pool's workers."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any

from . import _link as link
from . import _worker
from ._encoder import Encoder
from ._lane import Lane
from ._wire import release


@dataclass
class Plan:
    """How a pool's workers are to be, and what becomes of their tasks.

    Attributes:
        context: a multiprocessing context.
        start_method: its name.
        initializers: per worker, the function it begins with, and its arguments.
        work: the pool's `worker`.
        maxtasks: tasks until a worker is replaced.
        is_daemon: whether workers may not have children of their own.
        copy_tensor: whether tensors are copied, or passed by reference.
        recurse: see `pickling.Pickler`.
        retries: how often a task that was lost is run again.
        task_timeout: seconds after which a task's worker is killed.
    """

    context: BaseContext
    start_method: str
    initializers: Sequence[tuple[Callable[..., object] | None, Sequence[Any]]]
    work: Callable[..., None] = _worker.worker
    maxtasks: int | None = None
    is_daemon: bool = True
    copy_tensor: bool = True
    recurse: bool = False
    retries: int = 0
    task_timeout: float | None = None


class Counters:
    """The shared memory in which workers say what they have begun."""

    def __init__(self, workers: int) -> None:
        self.fd = os.memfd_create("stepwrap-pool", os.MFD_CLOEXEC)
        size = workers * link.COUNTER.size
        os.ftruncate(self.fd, size)
        self.memory = mmap.mmap(self.fd, size)

    def close(self) -> None:
        """Let go of the memory."""
        self.memory.close()
        os.close(self.fd)


def start_lane(
    plan: Plan, slot: int, counters: Counters, encoder: Encoder, *, forked_close: Sequence[int]
) -> Lane:
    """Start a worker. To be called in the pool's thread: workers end with the thread they are of.

    Args:
        forked_close: what is open in the pool besides the lane, for a forked worker to close.

    Raises:
        Exception: the process cannot be started, or its initializer not be pickled.
    """
    lane = Lane(slot, counters.memory, plan.maxtasks)
    try:
        settings = _worker.Settings(
            *lane.pipes.theirs, counters.fd, slot=slot, work=plan.work, maxtasks=plan.maxtasks
        )
        settings.start_method = plan.start_method
        settings.is_timed = plan.task_timeout is not None
        settings.copy_tensor, settings.recurse = plan.copy_tensor, plan.recurse
        if plan.start_method == "fork":
            settings.initializer = plan.initializers[slot]
            settings.to_close = [*forked_close, *lane.pipes.fds]
        else:
            packed = encoder.pack(plan.initializers[slot])
            try:
                lane.pipes.begin(packed)
            finally:
                release(packed)
        process = plan.context.Process(  # type: ignore[attr-defined]
            target=_worker.main,
            args=(settings,),
            name=f"PoolWorker-{slot}",
            daemon=plan.is_daemon,
        )
        process.start()
        lane.started(process, is_child=plan.start_method != "forkserver")
    except BaseException:
        lane.close()
        raise
    return lane
