"""Folders that are there whole or not at all: written aside, flushed, renamed."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

_DRAFT = ".draft-"
_CHUNK = 1 << 20


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
