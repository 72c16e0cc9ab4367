"""Worker processes of loaders, which ignore stop signals and end with their parent process."""

from __future__ import annotations

import inspect
import itertools
import multiprocessing
import os
import signal
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from io import IOBase
from multiprocessing import Process, resource_tracker, util
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ...primitives.notes import add_note
from ...primitives.parent_watch import end_after
from ...primitives.stop_signals import STOP_SIGNALS, blocking_signals
from ..error_notes import describe_samples, get_name, unwrapped
from ..rng import mix_seed, seed_rng
from . import fork_server

# The attributes in which torch's and our wrappers keep a data set or a collator.
_WRAPPED = ("dataset", "samples", "collate")
_MAX_DEPTH = 8
_counter = itertools.count()


def iterate(loader: Iterable[Any]) -> Iterator[Any]:
    """Return ``iter(loader)`` with worker processes that ignore stop signals.

    A scheduler sends its signals to every process of a job. If a worker ended first, the training
    process would fail instead of saving a checkpoint. A ``WorkerStart`` prepares each worker. Stop
    signals are blocked until then, except in workers of a fork server.
    """
    if not getattr(loader, "num_workers", 0) or not hasattr(loader, "worker_init_fn"):
        return iter(loader)
    workers: Any = loader
    if getattr(workers, "persistent_workers", False) and workers._iterator is not None:
        # The workers are running already.
        return iter(loader)
    start = workers.worker_init_fn
    context: Any = getattr(workers, "multiprocessing_context", None) or multiprocessing
    method = context.get_start_method()
    if method == "spawn":
        # The tracker would otherwise start with the first worker and unblock the signals.
        resource_tracker.ensure_running()
    elif method == "forkserver":
        fork_server.preload_this_module()
    marker, remove_marker = _create_marker(f"reading_{os.getpid()}_{next(_counter)}")
    workers.worker_init_fn = WorkerStart(getattr(start, "user_start", start), marker)
    # Block nothing for a fork server: it would pass the mask on to every process it starts later.
    blocking = nullcontext() if method == "forkserver" else blocking_signals()
    try:
        with blocking:
            iterator = iter(loader)
    except Exception as error:
        remove_marker()
        if method != "fork" and (text := _explain_unpicklable(workers, method)):
            raise TypeError(text) from error
        raise
    finally:
        workers.worker_init_fn = start
    if hasattr(iterator, "_workers"):
        owner = os.getpid()
        freed = weakref.finalize(iterator, _end_workers, iterator._workers, remove_marker, owner)
        freed.atexit = False
    return iterator


def _create_marker(name: str) -> tuple[Path, util.Finalize]:
    """Create a file that exists until the returned finalizer is called or this process exits.

    It is in the temporary folder of multiprocessing, which this process removes at its exit.
    """
    marker = Path(util.get_temp_dir(), name)
    marker.touch()
    # Finalizers with a priority run before multiprocessing ends the workers.
    return marker, util.Finalize(None, marker.unlink, (True,), exitpriority=1000)


def _end_workers(processes: Iterable[Process], remove_marker: util.Finalize, owner: int) -> None:
    """End workers whose iterator is freed.

    If the iterator and its queues are freed as parts of a cycle, torch cannot ask the workers to
    end, and waits 10 seconds for them. A forked process frees its copy of the iterator, too.
    """
    if os.getpid() != owner:
        return
    remove_marker()
    for process in processes:
        if process.is_alive():
            process.terminate()


def _explain_unpicklable(loader: Any, method: str) -> str:
    """Explain which attribute cannot be sent to a worker, and the remedy; "" if all can."""
    roots = {
        "dataset": unwrapped(loader.dataset, "samples"),
        "collate": unwrapped(getattr(loader, "collate_fn", None), "collate"),
        "worker_init_fn": getattr(loader.worker_init_fn, "user_start", None),
    }
    paths = (_find_unpicklable(root, name) for name, root in roots.items())
    path, culprit = next(filter(None, paths), ("", None))
    if not path:
        return ""
    if isinstance(culprit, IOBase):
        kind, remedy = "an open file", "open it when the first sample is read"
    elif "<lambda>" in getattr(culprit, "__qualname__", ""):
        kind, remedy = f"a lambda ({get_name(culprit)})", "define a function at the top of a module"
    elif "<locals>" in getattr(culprit, "__qualname__", ""):
        kind = f"a local function or class ({get_name(culprit)})"
        remedy = "define it at the top of a module, with functools.partial for its arguments"
    else:
        kind, remedy = f"a {type(culprit).__name__}", "create it when the first sample is read"
    return (
        f"workers that are started by {method!r} get a pickled copy of the data set, but {path} is "
        f"{kind}, which cannot be pickled: {remedy}, or set num_workers to 0"
    )


def _find_unpicklable(value: Any, path: str, depth: int = _MAX_DEPTH) -> tuple[str, Any] | None:
    """Return the path to the innermost part that cannot be pickled, and the part; None if none."""
    try:
        ForkingPickler.dumps(value)
    except Exception:  # noqa: BLE001 - objects may refuse to be pickled in any way
        inner: dict[str, Any] = {}
        if isinstance(value, Mapping):
            inner = {f"{path}[{key!r}]": entry for key, entry in value.items()}
        elif isinstance(value, (list, tuple)):
            inner = {f"{path}[{index}]": entry for index, entry in enumerate(value)}
        elif isinstance(value, partial):
            inner = {f"{path}.func": value.func, f"{path}.args": value.args}
            inner[f"{path}.keywords"] = value.keywords
        elif not isinstance(value, type) and not inspect.isroutine(value):
            inner = {
                f"{path}.{name}": entry for name, entry in getattr(value, "__dict__", {}).items()
            }
        deeper = (_find_unpicklable(entry, name, depth - 1) for name, entry in inner.items())
        innermost = next(filter(None, deeper), None) if depth else None
        return innermost or (path, value)
    return None


class WorkerStart:
    """Prepare a worker process, then call the user's ``worker_init_fn``.

    A worker ignores stop signals, except for SIGTERM when ``marker`` no longer exists: when its
    iterator is freed, or when its parent process exits, in which multiprocessing ends the workers
    by SIGTERM and waits for them. A worker also ends when its parent process has died.

    Args:
        user_start: the user's function, or None.
        marker: a file of this process; by default one that exists until the process exits.
    """

    def __init__(
        self, user_start: Callable[[int], None] | None, marker: Path | None = None
    ) -> None:
        self.user_start = user_start
        self.parent = os.getpid()
        self.marker = marker or Path(util.get_temp_dir(), f"reading_{self.parent}")
        if not self.marker.exists():
            _create_marker(self.marker.name)

    def __call__(self, worker: int) -> None:
        # SIG_IGN would be inherited by programs that the worker starts.
        for number in STOP_SIGNALS:
            signal.signal(number, self._ignore)
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid is not None:
            end_after(parent.pid)
        if parent is None or parent.pid != self.parent:
            # The marker belongs to another process, so it does not show when the parent exits.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if self.user_start is not None:
            self.user_start(worker)

    def _ignore(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and not self.marker.exists():
            os._exit(0)


class RankSeed:
    """Seed a worker differently on each rank, then call the user's ``worker_init_fn``.

    Rank 0 keeps torch's seed.
    """

    def __init__(self, inner: Callable[[int], None] | None, rank: int) -> None:
        self.inner, self.rank = inner, rank

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        if self.rank and info is not None:
            seed = mix_seed(info.seed, self.rank)
            # Its own `__setattr__` refuses changes by users.
            object.__setattr__(info, "seed", seed)
            seed_rng(seed)
        if self.inner is not None:
            self.inner(worker)


class WorkerCollate:
    """Make batches in a worker; if that fails, add a note to the error that lists the samples."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        try:
            return self.collate(samples)
        except Exception as error:
            add_note(error, f"{get_name(self.collate)} was given {describe_samples(samples)}")
            raise


def find_epoch_listeners(*sources: Any, depth: int = _MAX_DEPTH) -> list[Any]:
    """Return the data sets and collators with a method ``set_epoch``, also inside wrappers."""
    listeners: list[Any] = []
    for source in sources:
        if hasattr(source, "set_epoch"):
            listeners.append(source)
        elif source is not None and depth:
            datasets = getattr(source, "datasets", ())
            datasets = datasets.values() if isinstance(datasets, Mapping) else datasets
            inner = [getattr(source, name, None) for name in _WRAPPED]
            inner += datasets if isinstance(datasets, Iterable) else ()
            listeners += find_epoch_listeners(*inner, depth=depth - 1)
    return listeners


class WorkerEpoch:
    """The number of the running pass, for workers that continue to run in the next pass.

    Each worker has copies of the data set and the collator. ``follow`` calls ``set_epoch`` of these
    copies when a new pass has begun.

    Args:
        listeners: the data sets and collators with a method ``set_epoch``.
    """

    def __init__(self, listeners: list[Any]) -> None:
        self.listeners = listeners
        self._shared = torch.zeros((), dtype=torch.int64)
        if listeners:
            self._shared.share_memory_()  # type: ignore[no-untyped-call]
        self._applied = 0

    def set(self, epoch: int) -> None:
        """Begin a pass; called in the process of the loader."""
        self._shared.fill_(epoch)
        self._apply(epoch)

    def follow(self) -> None:
        """Pass the running epoch on, unless that has been done; called in each worker."""
        epoch = int(self._shared)
        if epoch != self._applied:
            self._apply(epoch)

    def _apply(self, epoch: int) -> None:
        self._applied = epoch
        for listener in self.listeners:
            listener.set_epoch(epoch)


class EpochStream(IterableDataset[Any]):
    """An iterable data set whose copies in workers learn the number of each pass."""

    follows_epochs = True

    def __init__(self, samples: Any, epoch: WorkerEpoch) -> None:
        self.samples = samples
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self.samples)

    def set_epoch(self, epoch: int) -> None:
        self._epoch.set(epoch)

    def __iter__(self) -> Iterator[Any]:
        self._epoch.follow()
        return iter(self.samples)


def keep_workers(loader: Any) -> bool:
    """Return whether the workers of the last pass continue to run in the next one; end others.

    They end if their copies of the data set would not learn the number of the pass. The workers of
    ``build_loader`` learn it.
    """
    if not getattr(loader, "persistent_workers", False):
        return False
    listeners = find_epoch_listeners(loader.dataset, getattr(loader, "collate_fn", None))
    if listeners and not getattr(loader.dataset, "follows_epochs", False):
        loader._iterator = None
        return False
    return True
