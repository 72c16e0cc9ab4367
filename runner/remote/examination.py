"""Examine and remove the checkpoints of a remote run without downloading them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...loops.checkpoints.checkpoint import META
from ...registry.local_paths import remote_url
from .copies import fetch, manifest_copy
from .locks import RemoteLock, lock_problem
from .manifests import CHECKPOINTS, remove_checkpoints
from .stores import RemoteError, Store


class RemoteFiles:
    """The files of the checkpoints of a remote run.

    Args:
        url: the run folder, its folder of checkpoints, or a checkpoint in it.

    Attributes:
        folder: a folder on this machine with the checkpoint.json of each checkpoint.
        name: the checkpoint that the URL names; "" if it names the run.

    Raises:
        RemoteError: the URL cannot be read, or has no checkpoints.
    """

    def __init__(self, url: str) -> None:
        url = remote_url(url)
        head, _, self.name = url.rpartition("/")
        is_checkpoint = head.endswith(f"/{CHECKPOINTS}") and Store(url).read(META) is not None
        if not is_checkpoint:
            head, self.name = url, ""
        self._store = Store(head.removesuffix(f"/{CHECKPOINTS}"))
        run_folder, self._remote = manifest_copy(self._store.url)
        self.folder = run_folder / CHECKPOINTS
        if not self._remote.texts:
            raise RemoteError(f"{url} has no checkpoints")

    def size(self, file: Path) -> int:
        """Return the size of a file; raise OSError if it does not exist."""
        name = self._name(file)
        size = self._remote.sizes.get(name)
        if size is None:
            # The listing may be out of date.
            size = self._store.fingerprint(name).get("size")
        if size is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return int(size)

    def damage(self, checkpoint: Path, files: Mapping[str, Any]) -> str:
        """Read files, and describe the first damaged one; "" if all have the given hashes."""
        for name, expected in files.items():
            actual = self._store.fingerprint(self._name(checkpoint / name))
            if actual != expected:
                return f"{name}: {'checksum mismatch' if actual else os.strerror(errno.ENOENT)}"
        return ""

    def num_bytes(self, checkpoint: Path) -> int:
        """Return the size of all files of a checkpoint."""
        prefix = f"{self._name(checkpoint)}/"
        return sum(size for name, size in self._remote.sizes.items() if name.startswith(prefix))

    def lock_problem(self) -> str:
        """Return a message if a run uses the folder, otherwise ""."""
        return lock_problem(self._store)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep runs out of the folder.

        Raises:
            BlockingIOError: a run uses it.
        """
        lock = RemoteLock(self._store)
        lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def fetch(self, which: str) -> None:
        """Download a checkpoint into the folder and check its hashes; see ``copies.fetch``."""
        fetch(self._store, self.folder.parent, which)

    def remove(self, checkpoints: Iterable[Path]) -> None:
        """Delete checkpoints; readers never see a partly removed one."""
        remove_checkpoints(self._store, [path.name for path in checkpoints], self._remote)

    def _name(self, path: Path) -> str:
        return f"{CHECKPOINTS}/{path.relative_to(self.folder).as_posix()}"
