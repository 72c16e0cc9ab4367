"""Write and read the files of checkpoints, and raise the errors of one rank on all ranks."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import shutil
import stat
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from ...collectives import (
    CollectiveError,
    all_gather_object,
    distributed_available,
    get_rank,
    get_world_size,
    run_together,
)
from ...registry.local_paths import require_local

T = TypeVar("T")
_DRAFT = ".draft-"
_CHUNK = 1 << 20
# Held while this process writes a checkpoint, possibly in another thread.
save_lock = threading.Lock()


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; raised on every rank that takes part in the call."""


def run_on_all_ranks(
    what: str, action: Callable[[], T], gather: Callable[[Any], list[Any]] = all_gather_object
) -> list[T]:
    """Run ``action`` on every rank and return all results; raise a failure on every rank."""
    try:
        results, failures, cause = run_together(action, gather)
    except CollectiveError as error:
        if "timed out" not in str(error).lower():
            raise
        raise CollectiveError(
            f"{what}: {error}; a rank that has not arrived may still be reading, writing or "
            "syncing files. If that can take longer than the timeout, increase it: "
            "hooks.checkpoint.save_timeout_s for saves, launch.timeout_s otherwise"
        ) from error
    texts = []
    for failure in filter(None, failures):
        text = failure.text if issubclass(failure.kind, CheckpointError) else failure.full_text
        texts.append(f"rank {failure.rank}: {text}" if len(failures) > 1 else text)
    if texts:
        raise CheckpointError(f"{what} failed: {'; '.join(texts)}") from cause
    return results


@contextmanager
def reading(checkpoint: Path, file: str, entry: str) -> Iterator[None]:
    """Convert errors in the block to a CheckpointError that names the entry and its file."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {checkpoint}: {file}: {entry} cannot be restored: "
            f"{type(error).__name__}: {error}"
        ) from error


@contextmanager
def launcher_waits(activity: str = "checkpoint") -> Iterator[None]:
    """Keep the launcher from ending this rank because another rank failed."""
    folder = os.environ.get("STEPWRAP_LAUNCH_DIR")
    if not folder:
        yield
        return
    marker = Path(folder) / f"saving_{activity}_{own_rank()}"
    # Without the marker the launcher still waits for some seconds.
    with suppress(OSError):
        marker.touch()
    try:
        yield
    finally:
        with suppress(OSError):
            marker.unlink(missing_ok=True)


def own_rank() -> int:
    """Return this process's rank in the process group, 0 without one; ignore the environment."""
    return get_rank() if distributed_available() else 0


def world_size() -> int:
    """Return the size of the process group, 1 without one; ignore the environment."""
    return get_world_size() if distributed_available() else 1


def make_draft(parent: Path) -> Path:
    """Create and return a hidden folder in ``parent``; remove drafts left by killed runs."""
    require_local(parent, "the folder for checkpoints")
    parent.mkdir(parents=True, exist_ok=True)
    for stale in parent.glob(f"{_DRAFT}*"):
        shutil.rmtree(stale, ignore_errors=True)
    draft = _draft_name(parent)
    draft.mkdir()
    return draft


def write_bytes(path: Path, data: bytes) -> dict[str, Any]:
    """Write a file; return size and SHA-256. Raise OSError, with the file's name, if it fails."""
    with open_synced(path, "wb") as file:
        file.write(data)
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@contextmanager
def open_synced(
    path: Path, mode: str, opener: Callable[[str, int], int] | None = None
) -> Iterator[IO[bytes]]:
    """Open a file; at the end it is synced to disk. An OSError names the file."""
    try:
        with open(path, mode, opener=opener) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def explaining_full_disks(draft: Path, num_bytes: Callable[[], int]) -> Iterator[None]:
    """Convert an OSError about missing space to a CheckpointError that says how much is missing.

    Args:
        draft: the folder of the unfinished checkpoint.
        num_bytes: returns the size of the files that this process writes into it.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        root = next(path for path in (draft, *draft.absolute().parents) if os.path.ismount(path))
        needed = f"the files of the checkpoint need {num_bytes() / 1e6:.3g} MB"
        remedy = "make room there, or keep fewer checkpoints (hooks.checkpoint.keep_last)"
        if error.errno == errno.EFBIG:
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            text = f"{error.filename} would be larger than the {limit / 1e6:.3g} MB that a file of "
            text += f"this process may have: {needed}"
            remedy = "raise the limit (ulimit -f)"
        elif error.errno == errno.EDQUOT:
            text = f"the disk quota on the file system at {root} is used up: {needed}"
        else:
            written = sum(path.stat().st_size for path in draft.iterdir())
            free = (shutil.disk_usage(draft).free + written) / 1e6
            text = (
                f"no space is left on the file system at {root}: {needed}, {free:.3g} MB are free"
            )
        raise CheckpointError(f"{text}; {remedy}") from error


def publish(draft: Path, final: Path) -> None:
    _flush_folder(draft)
    draft.rename(final)
    _flush_folder(final.parent)


def remove_folders(folders: Iterable[Path]) -> None:
    """Remove folders such that readers never see a partly removed one."""
    for folder in folders:
        removed = _draft_name(folder.parent)
        folder.rename(removed)
        if removed.is_symlink():
            # The checkpoint at another place is kept.
            removed.unlink()
        else:
            shutil.rmtree(removed)


def read_text(path: Path) -> str:
    """Return the text of a file; raise OSError if it is not a regular one."""
    _get_size(path)
    # Not read_text, which converts line ends.
    return path.read_bytes().decode()


def fingerprint(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def find_damage(path: Path, files: Mapping[str, Any]) -> str:
    """Describe the first damaged file of a checkpoint; "" if all have the given fingerprints."""
    for name, written in files.items():
        try:
            if _get_size(path / name) != written["size"] or fingerprint(path / name) != written:
                return f"{name}: checksum mismatch"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return ""


def _get_size(path: Path) -> int:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        # Reading a pipe or a device might not end.
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return status.st_size


def _draft_name(parent: Path) -> Path:
    return parent / f"{_DRAFT}{uuid.uuid4().hex[:8]}"


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
