"""A run whose folder is remote: it trains in a working folder, and this module uploads."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from ...collectives import all_gather_object, broadcast, get_rank
from ...loops import LoopState
from ...loops.checkpoints.files import launcher_waits
from ...registry.local_paths import local_path, remote_url
from ..rank_processes import host_identity
from .copies import run_copy
from .locks import RemoteLock, lock_problem
from .manifests import read_checkpoints
from .mirror import Mirror
from .stores import RemoteError, Store

logger = logging.getLogger(__name__)

# How often changed files are uploaded while the run trains.
_INTERVAL_S = 5.0


class RemoteRun:
    """The remote folder of a run.

    Args:
        url: the run folder.

    Attributes:
        folder: the working folder on this machine.
    """

    def __init__(self, url: str) -> None:
        self.url, self.folder = remote_url(url), local_path(url)
        self._store = Store(self.url)
        self._mirror = Mirror(self._store, self.folder)
        self._lock = RemoteLock(self._store)
        self._is_held = False
        self._stop = Event()

    def attach(self, state: LoopState) -> None:
        """Have the run's checkpoints uploaded when they are saved."""
        state.after_save.append(self._upload)

    def clear(self) -> None:
        """Remove results that the working folder no longer has; every rank must call this.

        The run must hold the folder.
        """
        _call_on_rank_zero(self._mirror.clear)

    def fetch(self, which: str) -> Path:
        """Return a folder of the run that has a checkpoint; every rank must call this.

        While the run holds the folder this is the working folder, otherwise a copy.

        Args:
            which: as for ``run_copy``.
        """
        if not self._is_held:
            return run_copy(self.url, which)
        _call_on_rank_zero(lambda: self._mirror.fetch(which))
        return self.folder

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep other runs out, and upload until the end; every rank must enter.

        Raises:
            BlockingIOError: another run uses the folder.
            RemoteError: the folder cannot be read and written, or the last upload failed.
            RuntimeError: the ranks do not share the working folder.
        """
        _call_on_rank_zero(self._start)
        thread = Thread(target=self._watch, name="stepwrap-upload", daemon=True)
        try:
            self._require_shared_folder()
            self._is_held = True
            if get_rank() == 0:
                self._stop.clear()
                thread.start()
            yield
        except BaseException:
            # The other ranks may be gone, and the error must not be replaced.
            if get_rank() == 0:
                with launcher_waits("upload"):
                    self._end(thread, log=True)
            raise
        else:
            _call_on_rank_zero(lambda: self._end(thread, log=False))
        finally:
            self._is_held = False

    def _start(self) -> None:
        self._store.require_writable()
        self._lock.acquire()
        try:
            self._mirror.pull()
        except BaseException:
            self._lock.release()
            raise

    def _require_shared_folder(self) -> None:
        """Raise on all ranks if one does not see the files of another."""
        token = self.folder / f".shared-{uuid.uuid4().hex[:8]}"
        if get_rank() == 0:
            token.touch()
        # The ranks may have different home folders.
        token = self.folder / broadcast(token.name)
        hosts = all_gather_object((host_identity().split()[0], get_rank() == 0 or token.exists()))
        if get_rank() == 0:
            token.unlink()
        lacking = sorted({host for host, sees in hosts if not sees})
        if lacking:
            raise RuntimeError(
                f"each rank writes its part of a checkpoint into {self.folder}, but the ranks on "
                f"{', '.join(lacking)} do not share this folder with rank 0: set STEPWRAP_CACHE to "
                "a folder on a file system that all hosts share"
            )

    def _watch(self) -> None:
        """Upload changed files and refresh the lock, until the run ends."""
        failing = False
        while not self._stop.wait(_INTERVAL_S):
            try:
                self._lock.refresh()
                self._mirror.push_files()
                failing = False
            except (OSError, RemoteError) as error:
                if not failing:
                    logger.warning("the records are not uploaded now, and later again: %s", error)
                failing = True

    def _upload(self, path: Path) -> None:
        """Upload a checkpoint and mirror removed and renamed ones; log a failure."""
        if not self._is_held:
            return
        try:
            self._lock.require_own()
            self._mirror.push_checkpoints()
        except Exception as error:
            logger.error(
                "checkpoint %s could not be uploaded to %s: %s; it is in %s; the next save tries "
                "again",
                *(path.name, self.url, error, path),
            )

    def _end(self, thread: Thread, *, log: bool) -> None:
        """Upload what is missing and remove the lock.

        Args:
            thread: the thread that uploads records.
            log: log an error instead of raising it.
        """
        self._stop.set()
        if thread.is_alive():
            thread.join()
        try:
            self._lock.require_own()
            self._mirror.push_checkpoints()
            self._mirror.push_files()
            self._lock.release()
        except Exception as error:
            with suppress(RemoteError):
                self._lock.release()
            text = (
                f"the run is not completely in {self.url}: {error}; all of it is in {self.folder}. "
                f"`stepwrap train {self.url} --resume` on this machine uploads the rest"
            )
            if not log:
                raise RemoteError(text) from error
            logger.error("%s", text)


def remote_problem(url: str, *, keeps: bool, is_locked: bool) -> str:
    """Return why a training cannot use a remote run folder, otherwise "".

    Args:
        url: the run folder.
        keeps: whether results of an earlier run must be kept, so that there may be none.
        is_locked: whether this run holds the folder, so that only results are checked.
    """
    try:
        store = Store(url)
        if not is_locked:
            store.require_writable()
            if problem := lock_problem(store):
                return problem
        if not keeps:
            return ""
        remote = read_checkpoints(store)
    except RemoteError as error:
        return str(error)
    if remote.texts:
        holds = f"{len(remote.texts)} checkpoint(s), such as {max(remote.texts)}"
    elif remote.sizes.get("metrics.jsonl"):
        holds = "the records of a run without checkpoints"
    else:
        return ""
    return (
        f"{url} already holds {holds}; continue that run with --resume, start another one with "
        f"--run-dir {url}-2, or delete its results with --fresh"
    )


def has_checkpoints(url: str) -> bool:
    """Return whether a remote run folder has a checkpoint."""
    return bool(read_checkpoints(Store(url)).texts)


def _call_on_rank_zero(action: Callable[[], object]) -> None:
    """Call a function on rank 0, and raise its error on every rank."""
    problem: Exception | None = None
    if get_rank() == 0:
        try:
            action()
        except Exception as error:
            problem = error
    failed = broadcast(problem)
    if failed is not None:
        raise problem if problem is not None else failed
