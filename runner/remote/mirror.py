"""Upload the files of a run from its working folder."""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

from ...loops import CheckpointError
from ...loops.checkpoints.checkpoint import META
from ...primitives.files import replacing
from .copies import fetch, write_manifests
from .locks import LOCK
from .manifests import (
    CHECKPOINTS,
    data_files,
    local_manifests,
    read_checkpoints,
    remove_checkpoint,
    write_index,
)
from .stores import RemoteError, Store

logger = logging.getLogger(__name__)

_ABANDONED = "abandoned_"
# Files in a run folder that a run continues, by their endings.
_CONTINUED = (".csv", ".json", ".jsonl", ".txt", ".yaml")
# Smaller files are read before they are sent, because they may grow meanwhile.
_LARGE = 1 << 26


class Mirror:
    """The working folder of a run, and what the remote folder has of it.

    A hidden file in the working folder says what this folder has uploaded. If another folder has
    uploaded since, the remote folder decides when they are compared; otherwise this one does.

    Args:
        store: the remote run folder.
        folder: the working folder.
    """

    def __init__(self, store: Store, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._mutex = Lock()
        self._record = _Record(folder / ".remote.json")
        # Checkpoints in the store: the hash of each description, by name.
        self._published: dict[str, str] = {}
        # Uploaded parts of checkpoints that are not complete: the hash of each file, by its name.
        self._parts: dict[str, str] = {}

    def pull(self) -> None:
        """Bring the working folder up to date, except for the large files of checkpoints.

        Raises:
            RemoteError: the remote folder cannot be read.
        """
        self._record.load()
        remote = read_checkpoints(self._store)
        is_own = remote.writer == self._record.writer
        for name, text in local_manifests(self._folder).items():
            if remote.texts.get(name) != text:
                self._settle(name, text, is_own=is_own)
        write_manifests(self._folder, remote)
        self._published = {name: _digest(text) for name, text in remote.texts.items()}
        self._record.checkpoints = dict(self._published)
        if not is_own:
            self._pull_files(remote.sizes)
        write_index(self._store, self._published, self._record.writer)
        self._record.save()

    def _settle(self, name: str, text: bytes, *, is_own: bool) -> None:
        """Keep, remove or rename a local checkpoint that the remote folder does not have."""
        path = self._folder / CHECKPOINTS / name
        if self._record.checkpoints.get(name) == _digest(text) or not _is_complete(path):
            # It was removed or replaced there.
            shutil.rmtree(path)
        elif not is_own and not name.startswith(_ABANDONED):
            target = path.with_name(f"{_ABANDONED}{name}-{uuid.uuid4().int % 10**6}")
            path.rename(target)
            logger.warning(
                "%s was never uploaded, and %s has been continued elsewhere; renamed to %s",
                *(path, self._store.url, target.name),
            )

    def _pull_files(self, names: Iterable[str]) -> None:
        """Replace all other files by the remote ones that a run continues."""
        for file in _other_files(self._folder):
            file.unlink()
        self._record.files = {}
        continued = [name for name in names if "/" not in name and name.endswith(_CONTINUED)]
        for name in [*continued, *self._store.sizes("ledger")]:
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._store.download(name, path)
            self._record.files[name] = _stamp(path)

    def fetch(self, which: str) -> None:
        """Complete a checkpoint in the working folder; see ``copies.fetch``."""
        fetch(self._store, self._folder, which)

    def clear(self) -> None:
        """Remove remote checkpoints and records that were removed from the working folder.

        Raises:
            RemoteError: the store cannot be reached.
        """
        with self._mutex:
            self._remove(self._published.keys() - local_manifests(self._folder).keys())
            self._push_files()

    def push_checkpoints(self) -> None:
        """Make the remote checkpoints equal those in the working folder.

        New ones are uploaded, their checkpoint.json last. Then those that the working folder does
        not have any more are removed.

        Raises:
            CheckpointError, OSError, RemoteError: an upload failed, or the working folder has lost
                its checkpoints; remote ones are kept then.
        """
        with self._mutex:
            local = local_manifests(self._folder)
            if self._published and not local:
                raise RemoteError(
                    f"{self._folder} has lost its checkpoints, and nothing is removed"
                )
            pending = {
                name: text
                for name, text in local.items()
                if self._published.get(name) != _digest(text)
            }
            # Copies of renamed ones first: their old names may be taken by new checkpoints. Then
            # the newest ones, with which a run continues.
            order = sorted(
                pending, key=lambda n: (not self._source(pending[n]), -_serial(pending[n]))
            )
            for name in order:
                text = pending[name]
                if self._source(text) or _is_complete(self._folder / CHECKPOINTS / name):
                    self._publish(name, text)
            self._remove(self._published.keys() - local.keys())

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            remove_checkpoint(self._store, name)
            self._note(name, "")

    def _source(self, text: bytes) -> str:
        """Return the name of an equal checkpoint in the store; "" if there is none."""
        digest = _digest(text)
        return next((name for name, other in self._published.items() if other == digest), "")

    def _publish(self, name: str, text: bytes) -> None:
        path, target = self._folder / CHECKPOINTS / name, f"{CHECKPOINTS}/{name}"
        source = self._source(text)
        if name in self._published:
            # The old one must not be found with new files.
            self._store.delete(f"{target}/{META}")
            self._note(name, "")
        for file, expected in data_files(path).items():
            if source:
                # A file that is missing stays missing: nothing continues from this checkpoint.
                if self._store.identity(f"{CHECKPOINTS}/{source}/{file}"):
                    self._store.copy(f"{CHECKPOINTS}/{source}/{file}", f"{target}/{file}")
            elif self._parts.get(f"{target}/{file}") != expected["sha256"]:
                self._store.upload(path / file, f"{target}/{file}")
                self._parts[f"{target}/{file}"] = expected["sha256"]
        # A run that continues from here needs the records until here.
        self._push_files()
        self._store.write(f"{target}/{META}", text)
        self._note(name, _digest(text))

    def _note(self, name: str, digest: str) -> None:
        """Record that a checkpoint is published or, without a hash, removed."""
        if digest:
            self._published[name] = digest
        else:
            self._published.pop(name, None)
        self._parts = {f: h for f, h in self._parts.items() if f.split("/")[1] != name}
        write_index(self._store, self._published, self._record.writer)
        self._record.checkpoints = dict(self._published)
        self._record.save()

    def push_files(self) -> None:
        """Upload the files that have changed, except checkpoints, and remove those that are gone.

        Does nothing while another thread uploads.

        Raises:
            OSError, RemoteError: an upload failed.
        """
        if self._mutex.acquire(blocking=False):
            try:
                self._push_files()
            finally:
                self._mutex.release()

    def _push_files(self) -> None:
        if not self._record.exists():
            raise RemoteError(f"{self._folder} was removed, and nothing is removed remotely")
        names = set()
        for path in _other_files(self._folder):
            name = path.relative_to(self._folder).as_posix()
            names.add(name)
            # A file may vanish meanwhile. If it grows, it is uploaded again later.
            with suppress(FileNotFoundError):
                stamp = _stamp(path)
                if self._record.files.get(name) == stamp:
                    continue
                if stamp[0] > _LARGE:
                    self._store.upload(path, name)
                else:
                    self._store.write(name, path.read_bytes())
                self._record.files[name] = stamp
        for name in self._record.files.keys() - names:
            self._store.delete(name)
            del self._record.files[name]
        self._record.save()


class _Record:
    """What a working folder has uploaded, in a file.

    Attributes:
        writer: the identity of the working folder.
        checkpoints: the hashes of the descriptions of its checkpoints, by name.
        files: size and time of change of other files, by name.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._saved = path, ""
        self.writer = uuid.uuid4().hex
        self.checkpoints: dict[str, str] = {}
        self.files: dict[str, list[int]] = {}

    def load(self) -> None:
        """Read the file, if it exists."""
        with suppress(OSError, ValueError, KeyError):
            saved: Any = json.loads(self._path.read_text())
            self.writer = saved["writer"]
            self.checkpoints, self.files = saved["checkpoints"], saved["files"]

    def exists(self) -> bool:
        """Return whether the working folder still has the file."""
        return self._path.is_file()

    def save(self) -> None:
        """Write the file if something has changed."""
        names = ("writer", "checkpoints", "files")
        text = json.dumps({name: getattr(self, name) for name in names})
        if text != self._saved:
            with replacing(self._path) as draft:
                draft.write_text(text)
            self._saved = text


def _serial(text: bytes) -> int:
    with suppress(ValueError, KeyError, TypeError):
        return int(json.loads(text)["serial"])
    return 0


def _digest(text: bytes) -> str:
    return sha256(text).hexdigest()


def _is_complete(checkpoint: Path) -> bool:
    try:
        return all((checkpoint / file).is_file() for file in data_files(checkpoint))
    except CheckpointError:
        return False


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _other_files(folder: Path) -> Iterator[Path]:
    """Yield the files that do not belong to checkpoints, except hidden ones and the lock."""
    for root, folders, files in os.walk(folder):
        top = Path(root) == folder
        folders[:] = [f for f in folders if f[0] != "." and not (top and f == CHECKPOINTS)]
        for file in files:
            if file[0] != "." and not (top and file == LOCK):
                yield Path(root, file)
