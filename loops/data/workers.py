"""Worker processes of loaders, which ignore stop signals and end with their parent process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker, util
from pathlib import Path
from types import FrameType
from typing import Any

from ..error_notes import add_note, describe_samples, name_of
from . import fork_server

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def iterate(loader: Iterable[Any]) -> Iterator[Any]:
    """Return ``iter(loader)`` with worker processes that ignore stop signals.

    A scheduler sends its signals to every process of a job. If a worker ended first, the training
    process would fail instead of saving a checkpoint. A ``WorkerStart`` prepares each worker. Stop
    signals are blocked until then, except in workers of a fork server.
    """
    if not getattr(loader, "num_workers", 0) or not hasattr(loader, "worker_init_fn"):
        return iter(loader)
    workers: Any = loader
    start = workers.worker_init_fn
    context: Any = getattr(workers, "multiprocessing_context", None) or multiprocessing
    method = context.get_start_method()
    if method == "spawn":
        # The tracker would otherwise start with the first worker and unblock the signals.
        resource_tracker.ensure_running()
    elif method == "forkserver":
        fork_server.preload_this_module()
    if not (isinstance(start, WorkerStart) and start.parent == os.getpid()):
        workers.worker_init_fn = WorkerStart(getattr(start, "user_start", start))
    # Block nothing for a fork server: it would pass the mask on to every process it starts later.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, () if method == "forkserver" else _IGNORED)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        workers.worker_init_fn = start


class WorkerStart:
    """Prepare a worker process, then call the user's ``worker_init_fn``.

    A worker ignores stop signals, except for SIGTERM when its parent process exits:
    multiprocessing then ends the workers by SIGTERM and waits for them. A worker also ends when
    its parent process has died.
    """

    def __init__(self, user_start: Callable[[int], None] | None) -> None:
        self.user_start = user_start
        self.parent = os.getpid()
        # A marker file that exists while the parent runs. It is in the temporary folder of
        # multiprocessing, which this process removes at its exit.
        self.running_marker = Path(util.get_temp_dir(), f"reading_{self.parent}")
        if not self.running_marker.exists():
            self.running_marker.touch()
            # Finalizers with a priority run before multiprocessing ends the workers.
            util.Finalize(None, self.running_marker.unlink, (True,), exitpriority=1000)

    def __call__(self, worker: int) -> None:
        # SIG_IGN would be inherited by programs that the worker starts.
        for number in _IGNORED:
            signal.signal(number, self._ignore)
        parent = multiprocessing.parent_process()
        if parent is not None:
            threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        if parent is None or parent.pid != self.parent:
            # The marker belongs to another process, so it does not show when the parent exits.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
        if self.user_start is not None:
            self.user_start(worker)

    def _ignore(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and not self.running_marker.exists():
            os._exit(0)


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


class WorkerCollate:
    """Make batches in a worker; if that fails, add a note to the error that lists the samples."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        try:
            return self.collate(samples)
        except Exception as error:
            add_note(error, f"{name_of(self.collate)} was given {describe_samples(samples)}")
            raise
