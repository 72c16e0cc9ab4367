"""Replace files as a whole, and lock them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a draft, which replaces ``path`` at the end of the block.

    Other processes see the old file or the whole new one, never a part. After an error in the block
    the draft is deleted, and ``path`` is unchanged.

    The draft has the name of ``path`` and is in a hidden folder ``.NAME.tmp-...`` next to it. It
    may be a folder, if ``path`` does not exist. Further files in the hidden folder are moved too,
    before the draft.
    """
    with TemporaryDirectory(prefix=f".{path.name}.tmp-", dir=path.parent) as folder:
        draft = Path(folder, path.name)
        yield draft
        for file in sorted(Path(folder).iterdir(), key=lambda file: file == draft):
            os.replace(file, path.with_name(file.name))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process has locked a file, and lock it; it is created if necessary."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file until it is closed; return False if another process has locked it.

    Raises:
        OSError: the file system does not support locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_NB | (fcntl.LOCK_SH if shared else fcntl.LOCK_EX))
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Return whether a process has locked a file; False if there are no locks or no such file."""
    try:
        with path.open() as file:
            return not try_lock(file.fileno(), shared=True)
    except OSError:
        return False
