"""List, describe and remove checkpoints: folders that are either complete or absent."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import files as disk
from .files import CheckpointError, own_rank

logger = logging.getLogger(__name__)

# Formats 1 and 2 have files of torch.save (format_1.py).
FORMAT = 3
META = "checkpoint.json"


def prune_checkpoints(folder: Path, keep_last: int | None, keep: Iterable[Path] = ()) -> list[Path]:
    """Remove checkpoints, except for the latest ``keep_last`` ones and those in ``keep``.

    Only rank 0 removes checkpoints, without communication. ``keep_last=None`` keeps all. Returns
    the removed folders.
    """
    if keep_last is None or own_rank() != 0:
        return []
    kept_paths = {path.resolve() for path in keep}
    olds = [path for path, _ in list_checkpoints(folder)][keep_last:]
    removed = [path for path in olds if path.resolve() not in kept_paths]
    disk.remove_folders(removed)
    return removed


def list_checkpoints(
    folder: Path, problems: dict[Path, str] | None = None
) -> list[tuple[Path, dict[str, Any]]]:
    """Return the checkpoints in ``folder`` with their descriptions, the latest first.

    Checkpoints without a readable description are skipped with a warning, and the error is added to
    ``problems``. Links to other checkpoints in ``folder`` are left out. Does not communicate.
    """
    links = set(links_in(folder))
    return read_metas((path for path in folder.glob("step_*") if path not in links), problems)


def links_in(folder: Path) -> list[Path]:
    """Return the symbolic links in ``folder`` to checkpoints in the same folder."""
    return [
        path
        for path in folder.glob("step_*")
        if path.is_symlink() and path.exists() and path.resolve().parent == folder.resolve()
    ]


def read_metas(
    paths: Iterable[Path], problems: dict[Path, str] | None = None
) -> list[tuple[Path, dict[str, Any]]]:
    readable = []
    for path in paths:
        try:
            readable.append((path, read_meta(path)))
        except CheckpointError as error:
            logger.warning("%s; skipped", error)
            if problems is not None:
                problems[path] = str(error)
    return sorted(readable, key=lambda entry: entry[1]["serial"], reverse=True)


def read_meta(path: Path) -> dict[str, Any]:
    """Return a checkpoint's description, the content of its checkpoint.json.

    Raises:
        CheckpointError: the description is missing, damaged, or of a later format.
    """
    try:
        text = disk.read_text(path / META)
        meta = json.loads(text)
        _check(meta, text)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{path} is not a checkpoint: it has no {META}") from error
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {META}: {error}") from error
    if meta["format"] > FORMAT:
        raise CheckpointError(
            f"checkpoint {path} has format {meta['format']}; this version reads up to {FORMAT}"
        )
    return dict(meta)


def _check(meta: Any, text: str) -> None:
    """Raise ValueError if ``text`` does not describe a checkpoint or was changed.

    Descriptions of later formats are not checked.
    """
    if not isinstance(meta, dict):
        raise ValueError(f"must be a table, got {reprlib.repr(meta)}")
    format_number = meta.get("format")
    if type(format_number) is int and format_number > FORMAT:
        return
    if meta.get("sha256") != _digest(meta) or text != _meta_text(meta):
        raise ValueError("checksum mismatch")
    for name in meta["files"]:
        # A path could lead outside of the folder.
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(f"files: {name!r} is not the name of a file of a checkpoint")


def _digest(meta: Mapping[str, Any]) -> str:
    text = json.dumps({k: v for k, v in meta.items() if k != "sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _meta_text(meta: Mapping[str, Any]) -> str:
    return json.dumps(meta, indent=2)


def sealed_text(meta: dict[str, Any]) -> str:
    """Add the checksum to a description, and return the text of its file."""
    meta["sha256"] = _digest(meta)
    return _meta_text(meta)


def rank_stem(rank: int) -> str:
    return f"rank_{rank:05d}"
