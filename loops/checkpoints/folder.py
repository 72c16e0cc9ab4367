"""Folders that are there whole or not at all: written aside, flushed, renamed."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import torch

_DRAFT = ".draft-"
_CHUNK = 1 << 20
_LONGEST_TEXT = 1 << 28


def make_draft(parent: Path) -> Path:
    """Return a new hidden folder in `parent`; drafts left by killed runs are removed."""
    parent.mkdir(parents=True, exist_ok=True)
    for stale in parent.glob(f"{_DRAFT}*"):
        shutil.rmtree(stale, ignore_errors=True)
    draft = parent / f"{_DRAFT}{uuid.uuid4().hex[:8]}"
    draft.mkdir()
    return draft


def write_tensors(path: Path, content: Any) -> None:
    """Write `content` with torch.save and flush it to the disk."""
    with path.open("wb") as file:
        torch.save(content, file)
        _flush(file.fileno())


def write_text(path: Path, text: str) -> None:
    """Write `text` and flush it to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        _flush(file.fileno())


def publish(draft: Path, final: Path) -> None:
    """Give a written draft its name; from now on it exists."""
    _flush_folder(draft)
    draft.rename(final)
    _flush_folder(final.parent)


def size_of(path: Path) -> int:
    """Return the size of a file in bytes.

    Raises:
        OSError: It is missing, or a pipe, a device or the like, of which reading might not end.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return status.st_size


def read_text(path: Path) -> str:
    """Return the content of a regular file that is text.

    Raises:
        OSError: As of `size_of`, or it is too large for what is written as text here.
    """
    if size_of(path) > _LONGEST_TEXT:
        raise OSError(errno.EFBIG, f"it is larger than {_LONGEST_TEXT} bytes", str(path))
    return path.read_text(encoding="utf-8")


def read_tensors(source: Path | IO[bytes], *, mmap: bool = False) -> Any:
    """Return what `write_tensors` wrote, on the CPU; nothing else is unpickled.

    Raises:
        ValueError: It was written by something else.
    """
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:
        # Torch's own words advise to load it with weights_only=False.
        raise ValueError(
            "it is not a file of torch.save with tensors, numbers, strings, and lists, tuples, "
            f"sets and dicts of them only ({type(error).__name__})"
        ) from error


def fingerprint(path: Path) -> dict[str, Any]:
    """Return the size in bytes and the sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def remove_folders(folders: Iterable[Path]) -> None:
    """Remove folders so that none is ever seen half removed."""
    for folder in folders:
        doomed = folder.with_name(f"{_DRAFT}{uuid.uuid4().hex[:8]}")
        folder.rename(doomed)
        shutil.rmtree(doomed)


def _flush(descriptor: int) -> None:
    os.fsync(descriptor)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _flush(descriptor)
    finally:
        os.close(descriptor)
