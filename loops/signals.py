"""Stop a run after a signal, at the same update on every rank."""

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
from ..primitives.stop_signals import ignore
from ..primitives.tensor_bits import widest_float
from .state import LoopState, Phase

_HANDLED = (signal.SIGTERM, signal.SIGINT)
# Approximate time between two exchanges; several ranks act on a signal only in an exchange.
_PERIOD_S = 1.0
# A single process polls at this interval, and at once after a signal.
_POLL_S = 0.1
# The maximum number of polls between two exchanges: polls may become slower than expected.
_MAX_POLLS = 64


class StopSignals:
    """A context that turns SIGTERM and SIGINT into an orderly stop, from the first ``start`` on.

    The first signal is recorded, and ``poll`` passes it to the loop; a second SIGINT raises
    KeyboardInterrupt. A signal after the last poll is raised again at the exit, unless there is an
    error. Once the stop has begun, further SIGTERMs are ignored until the context exits, since both
    the scheduler and the launcher may send one. If a launcher started the process (``RANK`` is
    set), they are ignored until the process ends.

    A single process acts on a signal at the next poll. Several ranks exchange their signals about
    once a second, at a poll that they chose in the previous exchange, so a signal to any of them
    stops all at the same update. Every rank must therefore poll equally often in each phase.
    """

    def __init__(self) -> None:
        # The time of the next poll; 0 with several ranks, which must poll equally often.
        self.due_s = 0.0
        self._received = 0
        self._pending = 0
        self._is_stopping = False
        self._old: dict[signal.Signals, Any] = {}
        self._alone = not distributed_available() or get_world_size() == 1

    def __enter__(self) -> StopSignals:
        return self

    def start(self, clock_s: float = 0.0) -> None:
        """Start or restart the polls, and the clock at ``clock_s``; keep signals not yet handled.

        Every rank must call this.
        """
        self._plans = {phase: _ExchangePlan() for phase in Phase}
        self._start_s = time.monotonic() - clock_s
        if not self._old and threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._receive) for number in _HANDLED}

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._is_stopping and os.environ.get("RANK") and self._old:
            self._old[signal.SIGTERM] = ignore
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old = {}
        if self._pending and error is None:
            # It arrived after the last poll, so the previous handler gets it.
            signal.raise_signal(self._pending)

    def poll(self, state: LoopState) -> None:
        """Stop the loop if a signal has arrived; every rank must call this equally often."""
        if self._alone:
            now_s = time.monotonic()
            # Set first, so that a signal during this call makes the next poll due at once.
            self.due_s = now_s + _POLL_S
            state.clock_s = now_s - self._start_s
            self._stop(state, self._received)
        elif self._plans[state.phase].due():
            self._agree(state)
            self._plans[state.phase].plan(state.clock_s)

    def poll_now(self, state: LoopState) -> None:
        """Stop the loop if a signal has arrived since the last poll; every rank must call this."""
        if self._alone:
            self._stop(state, self._received)
        else:
            self._agree(state)

    def _agree(self, state: LoopState) -> None:
        clock_s = time.monotonic() - self._start_s if get_rank() == 0 else -1.0
        device = comm_device()
        shared = torch.tensor([self._received, clock_s], dtype=widest_float(device), device=device)
        # The maxima are the signal of any rank, and the clock of rank 0 (the others send -1).
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        number, state.clock_s = shared.tolist()
        self._stop(state, int(number))

    def _stop(self, state: LoopState, number: int) -> None:
        if number:
            self._pending, self._is_stopping = 0, True
            state.request_stop(f"received {signal.Signals(number).name}", signal=number)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._received == signal.SIGINT:
            self._pending = 0
            raise KeyboardInterrupt
        if self._is_stopping and number == signal.SIGTERM:
            return
        if not self._received and (self._alone or get_rank() == 0):
            # Written now, since the step may take long, and by `os.write`, since buffered output is
            # not safe in a signal handler.
            again = "; press Ctrl-C again to stop at once" if number == signal.SIGINT else ""
            # On a terminal, erase a panel below the cursor.
            erase = "\x1b[J" if os.isatty(2) else ""
            os.write(2, f"\n{erase}stopping after this step, to save{again}\n".encode())
        self._received = self._pending = number
        self.due_s = 0.0


class _ExchangePlan:
    """Choose at which polls of a phase the ranks exchange signals.

    It uses only numbers that are equal on all ranks, so all of them choose the same polls.
    """

    def __init__(self) -> None:
        self._polls = 0
        self._interval = 1
        self._due_at = 1
        self._planned_at_s: float | None = None

    def due(self) -> bool:
        self._polls += 1
        return self._polls >= self._due_at

    def plan(self, clock_s: float) -> None:
        """Choose the poll of the next exchange, about ``_PERIOD_S`` later.

        The number of polls until then at most doubles each time.
        """
        if self._planned_at_s is not None:
            pace_s = (clock_s - self._planned_at_s) / self._interval
            polls = int(_PERIOD_S / max(pace_s, 1e-6))
            self._interval = max(1, min(polls, 2 * self._interval, _MAX_POLLS))
        self._planned_at_s = clock_s
        self._due_at = self._polls + self._interval
