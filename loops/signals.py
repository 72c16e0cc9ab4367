"""Stopping in order: signals, and the ranks' agreement on when to heed them."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ..collectives import comm_device, distributed_available, get_rank, get_world_size
from .state import LoopState, Phase

_HEEDED = (signal.SIGTERM, signal.SIGINT)
# About how often ranks agree; between two agreements no rank can act on a signal.
_PERIOD_S = 1.0
# How long one process alone may go on without a poll; a signal ends that at once.
_LOOK_S = 0.1
# Most polls between two agreements, so that a slower phase is not kept waiting for minutes.
_MAX_POLLS = 64


class StopSignals:
    """Turns SIGTERM and SIGINT into an orderly stop while it is entered.

    The first signal is noted; a second SIGINT raises KeyboardInterrupt. `poll` makes it known to
    the loop, and one that came too late for that is raised again at the exit, unless there is an
    error. A SIGTERM after the stop began is dropped, in a rank of a launcher until the process
    ends: the scheduler and the launcher may both send it. One process looks at every poll. Several
    ranks exchange, about once a second, at a poll that they fixed in the exchange before: a signal
    to any of them stops all of them at the same
    update. Every rank must therefore poll equally often in each phase.
    """

    def __init__(self, clock_s: float = 0.0) -> None:
        # Before this time polling would find nothing new; always past with several ranks.
        self.due_s = 0.0
        self._received = 0
        self._unheeded = 0
        self._is_stopping = False
        self._old: dict[signal.Signals, Any] = {}
        self._alone = not distributed_available() or get_world_size() == 1
        self._paces = {phase: _Pace() for phase in Phase}
        # `clock_s` goes on from where it is.
        self._start_s = time.monotonic() - clock_s

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._note) for number in _HEEDED}
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._is_stopping and os.environ.get("RANK") and self._old:
            # Not SIG_IGN, which programs started later would inherit.
            self._old[signal.SIGTERM] = _drop
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old = {}
        if self._unheeded and error is None:
            # It came after the last look: the caller, or the system, is to have it.
            signal.raise_signal(self._unheeded)

    def poll(self, state: LoopState) -> None:
        """Heed a signal if it is time to look; every rank must call this equally often."""
        if self._alone:
            now_s = time.monotonic()
            # Before the look: a signal that comes after it brings the next one forward.
            self.due_s = now_s + _LOOK_S
            state.clock_s = now_s - self._start_s
            self._stop(state, self._received)
        elif self._paces[state.phase].due():
            self._agree(state)
            self._paces[state.phase].plan(state.clock_s)

    def look(self, state: LoopState) -> None:
        """Heed a signal that came after the last poll; every rank must call this."""
        if self._alone:
            self._stop(state, self._received)
        else:
            self._agree(state)

    def _agree(self, state: LoopState) -> None:
        clock_s = time.monotonic() - self._start_s if get_rank() == 0 else -1.0
        shared = torch.tensor([self._received, clock_s], dtype=torch.float64, device=comm_device())
        # The greatest of both: any rank's signal, and the clock of rank 0.
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        number, state.clock_s = shared.tolist()
        self._stop(state, int(number))

    def _stop(self, state: LoopState, number: int) -> None:
        if number:
            state.signal, self._unheeded, self._is_stopping = number, 0, True
            state.request_stop(f"received {signal.Signals(number).name}")

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._received == signal.SIGINT:
            self._unheeded = 0
            raise KeyboardInterrupt
        if self._is_stopping and number == signal.SIGTERM:
            return
        if not self._received and (self._alone or get_rank() == 0):
            # At once, since a step may be long, and unbuffered, since this is a signal handler.
            again = "; Ctrl-C again stops at once" if number == signal.SIGINT else ""
            os.write(2, f"\nstopping after this step, to save{again}\n".encode())
        self._received = self._unheeded = number
        self.due_s = 0.0


def _drop(number: int, frame: FrameType | None) -> None:
    """Handle a signal that repeats another one."""


class _Pace:
    """Which of one phase's polls exchange; planned from numbers that all ranks share."""

    def __init__(self) -> None:
        self._polls = 0
        self._interval = 1
        self._due_at = 1
        self._planned_at_s: float | None = None

    def due(self) -> bool:
        self._polls += 1
        return self._polls >= self._due_at

    def plan(self, clock_s: float) -> None:
        """Fix the next exchange about one period from now, at most twice as far as the last."""
        if self._planned_at_s is not None:
            pace_s = (clock_s - self._planned_at_s) / self._interval
            wanted = int(_PERIOD_S / max(pace_s, 1e-6))
            self._interval = max(1, min(wanted, 2 * self._interval, _MAX_POLLS))
        self._planned_at_s = clock_s
        self._due_at = self._polls + self._interval
