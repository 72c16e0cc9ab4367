"""List the checkpoints in a folder, with their state and damage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ...loops import CheckpointError
from ...loops.checkpoints.checkpoint import read_meta
from ...loops.checkpoints.files import find_damage, remove_folders
from ..run_folder import is_in_use, locked_run_dir

if TYPE_CHECKING:
    from ..remote.examination import RemoteFiles

_KINDS = ("abandoned", "incomplete")


class LocalFiles:
    """The files of checkpoints on this machine, with the interface of ``RemoteFiles``."""

    name = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._run_dir = folder.parent if folder.name == "checkpoints" else folder

    def size(self, file: Path) -> int:
        return file.stat().st_size

    def damage(self, checkpoint: Path, files: Mapping[str, Any]) -> str:
        return find_damage(checkpoint, files)

    def num_bytes(self, checkpoint: Path) -> int:
        total = 0
        for file in (checkpoint, *checkpoint.glob("*")):
            # A run may be removing it.
            with suppress(OSError):
                total += file.stat().st_size if file.is_file() else 0
        return total

    def lock_problem(self) -> str:
        return is_in_use(self._run_dir)

    def locked(self) -> AbstractContextManager[None]:
        return locked_run_dir(self._run_dir)

    def fetch(self, which: str) -> None:
        """Do nothing: the files are on this machine."""

    def remove(self, checkpoints: Iterable[Path]) -> None:
        remove_folders(checkpoints)


Files: TypeAlias = "LocalFiles | RemoteFiles"


@dataclass(frozen=True)
class Entry:
    """A checkpoint, a draft or a link in a folder of checkpoints.

    Attributes:
        path: the checkpoint.
        meta: its description; {} if it has no readable one.
        problem: the damage that was found; "" if there is none.
        num_bytes: the size of its files; 0 for a link.
    """

    path: Path
    meta: Mapping[str, Any]
    problem: str
    num_bytes: int

    @property
    def kind(self) -> str:
        """Return "abandoned", "incomplete", "draft", "link" or "complete"."""
        if self.path.name.startswith(".draft-"):
            return "draft"
        if is_inner_link(self.path):
            return "link"
        prefix = self.path.name.partition("_")[0]
        return prefix if prefix in _KINDS else "complete"

    @property
    def state(self) -> str:
        """Return the kind and the damage."""
        if self.kind == "link":
            return f"link to {self.path.resolve().name}"
        if self.kind == "draft":
            return "draft: being saved, or left by a killed run"
        if not self.problem:
            return self.kind
        return f"{'' if self.kind == 'complete' else self.kind + ', '}damaged: {self.problem}"

    @property
    def is_regular(self) -> bool:
        """Return whether the run continues from it: it is complete and has a description."""
        return self.kind == "complete" and not self.problem


def is_inner_link(path: Path) -> bool:
    """Return whether a path is a link to another checkpoint of its folder."""
    return path.is_symlink() and path.resolve().parent == path.parent.resolve()


def read_entry(files: Files, path: Path, *, hashes: bool = False) -> Entry:
    """Return a checkpoint with its damage; without ``hashes``, only the sizes are compared."""
    num_bytes = 0 if path.is_symlink() else files.num_bytes(path)
    if path.name.startswith(".") or is_inner_link(path):
        return Entry(path, {}, "", num_bytes)
    try:
        meta = read_meta(path)
    except CheckpointError as error:
        text = str(error).partition(f"{path} ")[2].removeprefix("is damaged: ")
        return Entry(path, {}, text or str(error), num_bytes)
    return Entry(path, meta, "; ".join(_damage(files, path, meta, hashes=hashes)), num_bytes)


def _damage(files: Files, path: Path, meta: Mapping[str, Any], *, hashes: bool) -> Iterator[str]:
    """Yield the damage of each file; without ``hashes``, compare only the sizes."""
    for name, written in meta["files"].items():
        try:
            size = files.size(path / name)
        except OSError as error:
            yield f"{name}: {error.strerror}"
            continue
        if size != written["size"]:
            yield f"{name}: {size} bytes instead of {written['size']}"
        elif hashes and (problem := files.damage(path, {name: written})):
            yield problem


def list_entries(files: Files, *, hashes: bool = False) -> list[Entry]:
    """Return the entries in the order in which they were saved; those without one come last."""
    folder = files.folder
    paths = {*folder.glob("step_*"), *folder.glob(".draft-*")}
    paths |= {path for kind in _KINDS for path in folder.glob(f"{kind}_step_*")}
    entries = [read_entry(files, path, hashes=hashes) for path in sorted(paths)]
    return sorted(entries, key=lambda entry: entry.meta.get("serial", math.inf))


def mark_entries(entries: Sequence[Entry]) -> dict[Path, str]:
    """Return "best" and "latest" for the checkpoints that are, "" for the others."""
    regular = [entry for entry in entries if entry.is_regular]
    marks: dict[Path, list[str]] = {entry.path: [] for entry in entries}
    best = [entry for entry in regular if entry.meta["best"]]
    for name, candidates in (("best", best), ("latest", regular)):
        if candidates:
            marks[candidates[-1].path].append(name)
    return {path: ", ".join(names) for path, names in marks.items()}
