"""Workers of a data loader that outlive the signals which stop the run."""

from __future__ import annotations

import mmap
import multiprocessing.util
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from .notes import add_note, describe_samples, name_of


class WorkerStart:
    """Prepares a worker process, then calls the user's own preparation.

    A forked worker ignores SIGINT, and SIGTERM until the process that started
    it exits: at its exit multiprocessing ends the workers by SIGTERM and waits
    for them. A spawned worker cannot see that moment and ignores SIGINT only.
    """

    def __init__(self, user_start: Callable[[int], None] | None) -> None:
        self.user_start = user_start
        _exit_of_this_process()

    def __call__(self, worker: int) -> None:
        # Handlers and no SIG_IGN, which programs started by the worker would inherit.
        signal.signal(signal.SIGINT, _ignore)
        leaving = _exits.get(os.getppid())
        if leaving is not None:

            def terminate(number: int, frame: FrameType | None) -> None:
                if leaving[0]:
                    os._exit(0)

            signal.signal(signal.SIGTERM, terminate)
        if self.user_start is not None:
            self.user_start(worker)


class WorkerCollate:
    """Makes batches in a worker; an error of that tells the samples, which no other process has.

    Args:
        collate: The function that makes a batch of a list of samples.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        try:
            return self.collate(samples)
        except Exception as error:
            add_note(error, f"{name_of(self.collate)} was given {describe_samples(samples)}")
            raise


# By process id: one byte, shared with the workers, that is set when the process exits.
_exits: dict[int, mmap.mmap] = {}


def _exit_of_this_process() -> None:
    if os.getpid() in _exits:
        return
    leaving = _exits[os.getpid()] = mmap.mmap(-1, 1)

    def leave() -> None:
        leaving[0] = 1

    # Of those, the ones with a priority come before the workers' end.
    multiprocessing.util.Finalize(None, leave, exitpriority=1000)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing."""
