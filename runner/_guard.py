"""Keep the started ranks in step with their launcher: signals go down, nothing outlives it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_RELAYED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE_S = 3.0
# How long a rank may go on saving after another one has failed.
_SAVING_S = 600.0
_POLL_S = 0.05


def die_with_parent(parent: int) -> None:
    """Make this process die when its launcher, process `parent`, does; also leave its group.

    A terminal sends Ctrl-C to a whole process group: in a group of its own a rank gets it once,
    from the launcher. Stop signals wait until `heed_signals`.
    """
    os.setpgid(0, 0)
    for number in _RELAYED:
        # Ignoring drops what came to the group while this process was starting.
        signal.signal(number, signal.SIG_IGN)
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux":
        # torch asks for SIGINT here, on which a rank would save and then wait for ever.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def heed_signals() -> None:
    """Let stop signals through, those that have come since `die_with_parent` at once."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _RELAYED)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def relay_signals(folder: Path) -> Iterator[list[int]]:
    """Pass this process's stop signals to the ranks; yields those received so far.

    The ranks have their process numbers in `folder`. The end of a terminal, SIGHUP, reaches them
    as SIGTERM. A second Ctrl-C kills them, and so does a rank's failure when the others have not
    ended a few seconds later; one that has a file `saving_*` in `folder` gets 10 minutes.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    # What nohup has this process ignore stays ignored.
    heeded = [n for n in _RELAYED if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda n, _: received.append(n)) for number in heeded}
    before[signal.SIGQUIT] = signal.getsignal(signal.SIGQUIT)
    over = threading.Event()
    relay = threading.Thread(target=_relay, args=(folder, received, over), daemon=True)
    relay.start()
    # Started later, by the first process, the tracker would lift the block again.
    resource_tracker.ensure_running()
    # The ranks inherit the block until they are ready; here the relay thread, which is older
    # than the block, takes the signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, _RELAYED)
    try:
        yield received
    finally:
        over.set()
        relay.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _RELAYED)
        for number, handler in before.items():
            signal.signal(number, handler)


def _relay(folder: Path, received: list[int], over: threading.Event) -> None:
    told: set[int] = set()
    failed_at = deadline = float("inf")
    while not over.wait(_POLL_S):
        ranks = {int(text) for path in folder.glob("pid_*") if (text := path.read_text())}
        if received:
            hung_up = received[0] == signal.SIGHUP
            _signal(ranks - told, signal.SIGTERM if hung_up else received[0])
            told |= ranks
        now = time.monotonic()
        if failed_at == float("inf") and any(folder.glob("failure_*.json")):
            failed_at, deadline = now, now + _GRACE_S
        if now < failed_at + _SAVING_S and any(folder.glob("saving_*")):
            deadline = max(deadline, now + _GRACE_S)
        if now > deadline or received.count(signal.SIGINT) > 1:
            _signal(ranks, signal.SIGKILL)


def _signal(processes: set[int], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
