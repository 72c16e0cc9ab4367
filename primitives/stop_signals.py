"""The signals that ask a process to stop, and how to block, ignore and handle them.

Imports only the standard library: new processes run this file by its path, before their first
other import.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

# SIGHUP: the terminal was closed. SIGUSR1: some schedulers send it before they end a job.
COUNT_AS_SIGTERM = (signal.SIGHUP, signal.SIGUSR1)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, *COUNT_AS_SIGTERM)


def signal_name(number: int) -> str:
    """Return the name of a signal for messages, such as "SIGTERM"; "Ctrl-C" for SIGINT."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def ignore(number: int, frame: FrameType | None) -> None:
    """Handle a signal by doing nothing; programs started later would inherit SIG_IGN."""


def pass_on_as_sigterm(number: int, frame: FrameType | None) -> None:
    """Handle a signal like SIGTERM: a running training saves a checkpoint and stops."""
    signal.raise_signal(signal.SIGTERM)


def heeded_signals() -> list[signal.Signals]:
    """Return those of SIGTERM and SIGINT that this process does not ignore."""
    # nohup and a script's `&` make a process ignore signals.
    return [n for n in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(n) != signal.SIG_IGN]


@contextmanager
def handling(handlers: Mapping[int, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    """Install signal handlers if this is the main thread, and restore the old ones at the end."""
    if threading.current_thread() is not threading.main_thread():
        handlers = {}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def blocking_signals() -> Iterator[None]:
    """Block stop signals in this thread and in the processes that it starts in this context."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_signals() -> None:
    """Unblock stop signals, which delivers pending ones.

    SIGHUP and SIGUSR1 are handled like SIGTERM, unless they are ignored or have a handler.
    """
    for number in COUNT_AS_SIGTERM:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, pass_on_as_sigterm)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def leave_process_group() -> None:
    """Move this new process, which blocks stop signals, to a process group without others.

    A terminal sends Ctrl-C to the whole process group. Outside the group a rank gets it once, from
    the launcher. Stop signals stay blocked until ``unblock_signals``.
    """
    os.setpgid(0, 0)
    for number in STOP_SIGNALS:
        # A signal to the old group may be pending, because signals are blocked while this process
        # starts: SIG_IGN discards it.
        signal.signal(number, signal.SIG_IGN)
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
