"""The checkpoints in a remote run folder: each is published by its checkpoint.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...loops import CheckpointError
from ...loops.checkpoints.checkpoint import META, links_in, read_meta
from .stores import Store

CHECKPOINTS = "checkpoints"
# The names of all checkpoints, because a listing of objects may be out of date.
_INDEX = f"{CHECKPOINTS}/index.json"
_NAME = re.compile(r"(\w+_)?step_[\w.-]+")


@dataclass(frozen=True)
class RemoteCheckpoints:
    """The published checkpoints of a run.

    Attributes:
        texts: their checkpoint.json, by the names of their folders.
        writer: the identity of the working folder that has uploaded last; "" if there is none.
        sizes: the sizes of the files in the run folder and of all files of checkpoints, by name,
            as the listing has them.
    """

    texts: Mapping[str, bytes]
    writer: str
    sizes: Mapping[str, int]


def read_checkpoints(store: Store) -> RemoteCheckpoints:
    """Return the published checkpoints; folders without a checkpoint.json do not count.

    The listing and the index only propose names; each description is read.
    """
    sizes = {**store.sizes(depth=1), **store.sizes(CHECKPOINTS)}
    index = _read_index(store)
    listed = {name.split("/")[1] for name in sizes if name.startswith(f"{CHECKPOINTS}/")}
    proposed = listed | set(map(str, index.get("checkpoints", ())))
    texts = {
        name: text
        for name in sorted(filter(_NAME.fullmatch, proposed))
        if (text := store.read(f"{CHECKPOINTS}/{name}/{META}")) is not None
    }
    return RemoteCheckpoints(texts, str(index.get("writer", "")), sizes)


def _read_index(store: Store) -> dict[str, Any]:
    try:
        index = json.loads(store.read(_INDEX) or b"{}")
    except ValueError:
        # It was changed by another program, and is only a help.
        return {}
    return index if isinstance(index, dict) else {}


def write_index(store: Store, names: Iterable[str], writer: str) -> None:
    """Write the names of the published checkpoints."""
    content = {"writer": writer, "checkpoints": sorted(names)}
    store.write(_INDEX, json.dumps(content).encode())


def remove_checkpoints(store: Store, names: Iterable[str], remote: RemoteCheckpoints) -> None:
    """Delete checkpoints of a run that no other process changes."""
    removed = set(names)
    for name in removed:
        remove_checkpoint(store, name)
    write_index(store, remote.texts.keys() - removed, remote.writer)


def remove_checkpoint(store: Store, name: str) -> None:
    """Delete a checkpoint, its checkpoint.json first."""
    folder = f"{CHECKPOINTS}/{name}"
    store.delete(f"{folder}/{META}")
    for file in store.sizes(folder):
        store.delete(file)


def local_manifests(folder: Path) -> dict[str, bytes]:
    """Return the checkpoint.json of each checkpoint in a run folder on this machine, by name.

    Links to other checkpoints of the folder are left out.
    """
    links = set(links_in(folder / CHECKPOINTS))
    return {
        path.name: (path / META).read_bytes()
        for path in (folder / CHECKPOINTS).glob("*step_*")
        if _NAME.fullmatch(path.name) and path not in links and (path / META).is_file()
    }


def data_files(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Return the size and SHA-256 of each file of a checkpoint, from its checkpoint.json.

    Raises:
        CheckpointError: the checkpoint.json is damaged.
    """
    meta = read_meta(checkpoint)
    if not isinstance(meta.get("files"), dict):
        raise CheckpointError(f"checkpoint {checkpoint} is damaged: {META} has no files")
    return dict(meta["files"])
