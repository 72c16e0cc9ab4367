"""Objects of all ranks, gathered through the network or through files in a shared directory."""

import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import CollectiveError
from ..process.ranks import distributed_available, live_world_size, members
from ..transport.serialize import pack, unpack
from .agree import attempt, raise_together
from .objects import all_gather_object, broadcast, gather_object

T = TypeVar("T")


def create_tmpdir(
    rank: int, tmpdir: str | os.PathLike[str] | None = None, use_system_tmp: bool = True
) -> str:
    """Return a directory that all ranks know; who asks for it removes it.

    With `tmpdir`, each rank makes that directory where it is missing, and no rank waits. Without
    it, rank 0 makes a new one that only this user can open; every rank must call this.

    Args:
        rank: this process's rank; a live process group's own answer wins.
        use_system_tmp: where the new one is: in the system's directory for temporary files, which
            other hosts do not see, or in the current directory.

    Raises:
        RuntimeError: a rank other than 0 has neither `tmpdir` nor a process group.
        OSError: on every rank, when rank 0 cannot make it.
    """
    if tmpdir is not None:
        os.makedirs(tmpdir, exist_ok=True)
        return os.fspath(tmpdir)
    if rank != 0 and not distributed_available():
        raise RuntimeError(
            f"create_tmpdir() on rank {rank} needs a process group to learn which directory rank 0 "
            "has made, and there is none: call init_process_group() first, or give tmpdir"
        )
    made: list[str] = []

    def make() -> str:
        made.append(tempfile.mkdtemp(prefix="stepwrap_", dir=_parent(use_system_tmp)))
        return made[0]

    try:
        return _from_first_rank(make, None, "create_tmpdir() ")
    except BaseException:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def all_gather_object_cpu(
    data: T,
    tmpdir: str | os.PathLike[str] | None = None,
    rank_zero_return_only: bool = True,
    use_system_tmp: bool | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[T] | None:
    """Return the objects of all ranks, in rank order; every rank must call this.

    By default they travel through the process group, which needs no shared directory. Given
    `tmpdir` or `use_system_tmp`, they travel through files in a directory that all ranks see; the
    directory and what else is in it stay. One process gets the object itself in a list.

    Args:
        tmpdir: the directory, by the path that it has on this rank; made where it is missing.
        rank_zero_return_only: whether all but the group's first rank get None.
        use_system_tmp: without `tmpdir`: whether rank 0's directory for temporary files is the
            shared one, or else its current directory.

    Raises:
        CollectiveError: on every rank, when an object cannot be pickled or unpickled, the directory
            is not shared, or a file is not what its rank has written; or when a rank does not take
            part.
        OSError: on every rank, when one cannot write or read its files.
    """
    if live_world_size(group) == 1:
        return [data]
    if tmpdir is None and use_system_tmp is None:
        return _gather(data, rank_zero_return_only, group)
    if tmpdir is None:
        place = bool(use_system_tmp)
        tmpdir = _from_first_rank(lambda: _parent(place), group, "all_gather_object_cpu() ")
    return gather_through_files(data, tmpdir, everywhere=not rank_zero_return_only, group=group)


def all_gather_object_gpu(
    data: T, rank_zero_return_only: bool = True, group: dist.ProcessGroup | None = None
) -> list[T] | None:
    """Return the objects of all ranks, in rank order; every rank must call this.

    They travel through the process group, on its communication device: on the CPU as well.

    Args:
        rank_zero_return_only: whether all but the group's first rank get None.

    Raises:
        CollectiveError: on every rank, when an object cannot be pickled or unpickled; or when a
            rank does not take part.
    """
    return [data] if live_world_size(group) == 1 else _gather(data, rank_zero_return_only, group)


def gather_through_files(
    data: T,
    tmpdir: str | os.PathLike[str],
    *,
    everywhere: bool,
    group: dist.ProcessGroup | None = None,
) -> list[T] | None:
    """Return the objects of all ranks on the group's first rank or everywhere, else None.

    Each call has a directory of its own inside `tmpdir`. It is gone afterwards, also when another
    rank has died. Files are unpickled only when their digest is the one that the writing rank has
    sent through the process group.
    """
    call = "all_gather_object_cpu() "
    token = _from_first_rank(lambda: secrets.token_hex(16), group, call)
    folder = Path(tmpdir, f"stepwrap_{token}")
    gathered: list[T] | None = None
    try:
        digest, problem = attempt(lambda: _write(data, folder))
        raise_together(problem, group, call)
        digests = dict(zip(members(group), all_gather_object(digest, group), strict=True))
        if everywhere or dist.get_rank() == members(group)[0]:
            gathered, problem = attempt(lambda: _read_all(folder, digests))
        # Also the barrier before which no rank may remove what another still reads.
        raise_together(problem, group, call)
    finally:
        # On every rank: the directories of several hosts, or of a rank that is dead now.
        shutil.rmtree(folder, ignore_errors=True)
    return gathered


def _gather(data: T, only_first: bool, group: dist.ProcessGroup | None) -> list[T] | None:
    if only_first:
        return gather_object(data, members(group)[0], group)
    return all_gather_object(data, group)


def _parent(use_system_tmp: bool) -> str:
    return tempfile.gettempdir() if use_system_tmp else os.getcwd()


def _from_first_rank(make: Callable[[], str], group: dist.ProcessGroup | None, call: str) -> str:
    """Return what the group's first rank makes; its error is raised on every rank."""
    if live_world_size(group) == 1:
        return make()
    first = members(group)[0]
    made, problem = attempt(make) if dist.get_rank() == first else (None, None)
    raise_together(problem, group, call)
    shared = broadcast(made, first, group)
    assert shared is not None
    return shared


def _part(folder: Path, rank: int) -> Path:
    return folder / f"part_{rank}.pkl"


def _write(data: object, folder: Path) -> bytes:
    """Write this rank's part as a whole, and return its digest."""
    os.makedirs(folder.parent, exist_ok=True)
    # Whoever comes first makes it: on hosts without a shared directory each rank cleans up its own.
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        pieces: Sequence[memoryview] = pack(data).pieces()
    except Exception as error:
        raise CollectiveError(
            f"cannot pickle the object: {type(error).__name__}: {error}"
        ) from error
    digest = hashlib.blake2b()
    part = _part(folder, dist.get_rank())
    unfinished = part.with_suffix(".tmp")
    with unfinished.open("xb") as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
    os.replace(unfinished, part)
    return digest.digest()


def _read_all(folder: Path, digests: dict[int, bytes | None]) -> list[Any]:
    return [_read(folder, rank, digest) for rank, digest in digests.items()]


def _read(folder: Path, rank: int, digest: bytes | None) -> Any:
    try:
        with _part(folder, rank).open("rb") as file:
            # Not bytes: the tensors inside use this memory and must be able to change it.
            content = bytearray(os.fstat(file.fileno()).st_size)
            file.readinto(content)
    except FileNotFoundError as error:
        raise CollectiveError(
            f"{folder.parent} is not a shared directory (rank {rank}): the part that rank {rank} "
            "has written is not there; give a tmpdir on a shared file system, or neither tmpdir "
            "nor use_system_tmp"
        ) from error
    if hashlib.blake2b(content).digest() != digest:
        raise CollectiveError(
            f"{_part(folder, rank)} is not what rank {rank} has written; it is not unpickled"
        )
    try:
        return unpack(memoryview(content))
    except Exception as error:
        raise CollectiveError(
            f"cannot unpickle the object of rank {rank}: {type(error).__name__}: {error}"
        ) from error
