"""Gather objects and results of all ranks, through the network or a shared directory."""

import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ...primitives.files import replacing
from ..errors import CollectiveError, Group, get_text
from ..process.ranks import distributed_available, live_world_size, members
from .agree import results_of_all
from .objects import all_gather_object, gather_object
from .serialize import pack, unpack

T = TypeVar("T")

_BY_FILES = "all_gather_object_cpu() "


def collect_results(
    results: Sequence[T],
    size: int,
    device: str = "cpu",
    tmpdir: str | os.PathLike[str] | None = None,
    group: Group = None,
    *,
    remove_tmpdir: bool = False,
) -> list[T] | None:
    """Return the results of all ranks on the group's first rank; every rank must call this.

    The order is the first result of each rank, then the second of each rank, and so on: the order
    of a data set that a distributed sampler divided. The other ranks get None.

    Args:
        results: this rank's results; the ranks may have different numbers of them.
        size: the number of results to return: padding of the sampler at the end is dropped.
        device: "cpu" as in ``collect_results_cpu``; "gpu" or "npu" as in ``collect_results_gpu``.
        tmpdir: a directory that all ranks see, for "cpu" only; default: use the process group.
        remove_tmpdir: whether to remove ``tmpdir`` and its content afterwards.

    Raises:
        NotImplementedError: the device is unknown.
        AssertionError: the device is not "cpu", and ``tmpdir`` or ``remove_tmpdir`` is given.
        TypeError, ValueError: on every rank, if some rank's results are not a sequence or its size
            is negative; only on this rank, if it passes ``remove_tmpdir`` without ``tmpdir``.
        CollectiveError: see ``all_gather_object_cpu``.
    """
    if device not in ("cpu", "gpu", "npu"):
        raise NotImplementedError(f"device must be 'cpu' , 'gpu' or 'npu', but got {device!r}")
    if device != "cpu" and (tmpdir is not None or remove_tmpdir):
        raise AssertionError(
            f"tmpdir should be None when device is {device}, and remove_tmpdir False; "
            f"got tmpdir={tmpdir!r} and remove_tmpdir={remove_tmpdir}"
        )
    return collect_results_cpu(results, size, tmpdir, group, remove_tmpdir=remove_tmpdir)


def collect_results_cpu(
    result_part: Sequence[T],
    size: int,
    tmpdir: str | os.PathLike[str] | None = None,
    group: Group = None,
    *,
    remove_tmpdir: bool = False,
) -> list[T] | None:
    """Collect results as ``collect_results`` does, through the group or files in ``tmpdir``.

    Every rank must call this.
    """
    if remove_tmpdir and tmpdir is None:
        raise ValueError("remove_tmpdir=True needs the tmpdir to remove, got None")
    results_of_all(lambda: _check_results(result_part, size), group, "collect_results() ")
    gathered = all_gather_object_cpu(result_part, tmpdir, group=group)

    def remove() -> None:
        if tmpdir is not None and _is_first(group) and os.path.exists(tmpdir):
            shutil.rmtree(tmpdir)

    if remove_tmpdir:
        # All ranks wait here until the directory is removed.
        results_of_all(remove, group, "collect_results() ")
    return None if gathered is None else interleaved(gathered)[:size]


def collect_results_gpu(result_part: Sequence[T], size: int, group: Group = None) -> list[T] | None:
    """Collect results as ``collect_results`` does, on the group's communication device.

    Every rank must call this.
    """
    return collect_results_cpu(result_part, size, group=group)


def create_tmpdir(
    rank: int, tmpdir: str | os.PathLike[str] | None = None, use_system_tmp: bool = True
) -> str:
    """Return a directory that all ranks use; the caller must remove it.

    With ``tmpdir``, each rank creates that directory if it is missing, without waiting for others.
    Otherwise rank 0 creates a new one that only this user can open; every rank must call this.

    Args:
        rank: this process's rank; a live process group overrides it.
        tmpdir: the directory; default: a new one.
        use_system_tmp: whether the new directory is in the system's temporary directory, which
            other hosts do not see, or in the current directory.

    Raises:
        RuntimeError: a rank other than 0 has neither ``tmpdir`` nor a process group.
        OSError: on every rank, if rank 0 cannot create it.
    """
    if tmpdir is not None:
        os.makedirs(tmpdir, exist_ok=True)
        return os.fspath(tmpdir)
    if rank != 0 and not distributed_available():
        raise RuntimeError(
            f"create_tmpdir() on rank {rank} needs a process group to receive rank 0's directory, "
            "got none: call init_process_group() first, or give tmpdir"
        )
    created: list[str] = []

    def make() -> str:
        created.append(tempfile.mkdtemp(prefix="stepwrap_", dir=_parent(use_system_tmp)))
        return created[0]

    try:
        return _from_first_rank(make, None, "create_tmpdir() ")
    except BaseException:
        for folder in created:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def all_gather_object_cpu(
    data: T,
    tmpdir: str | os.PathLike[str] | None = None,
    rank_zero_return_only: bool = True,
    use_system_tmp: bool | None = None,
    group: Group = None,
) -> list[T] | None:
    """Return the objects of all ranks, in rank order; every rank must call this.

    By default they are sent through the process group, and no shared directory is needed. With
    ``tmpdir`` or ``use_system_tmp`` they are written to files in a directory that all ranks must
    see; the directory and other files in it are kept. A single process gets the object itself in a
    list.

    Args:
        data: this rank's object.
        tmpdir: the directory, by its path on this rank; created if missing.
        rank_zero_return_only: whether to return None on all ranks except the group's first.
        use_system_tmp: used without ``tmpdir``. True means the first rank's directory for temporary
            files, False the first rank's current directory.

    Raises:
        CollectiveError: on every rank, if an object cannot be pickled or unpickled, the directory
            is not shared, or a file was changed by another process; or if a rank does not take
            part.
        OSError: on every rank, if one cannot write or read its files.
    """
    if tmpdir is None and use_system_tmp is None or live_world_size(group) == 1:
        return all_gather_object_gpu(data, rank_zero_return_only, group)

    def name() -> str:
        parent = "" if tmpdir is not None else _parent(bool(use_system_tmp))
        return os.path.join(parent, f"stepwrap_{secrets.token_hex(16)}")

    # Uses a new directory for each call, and removes it even if another rank has died.
    folder = Path(tmpdir or "", _from_first_rank(name, group, _BY_FILES))
    try:
        return _gather_through_files(data, folder, rank_zero_return_only, group)
    finally:
        # Every rank removes it, because hosts may not share it and its creator may have died.
        shutil.rmtree(folder, ignore_errors=True)


def all_gather_object_gpu(
    data: T, rank_zero_return_only: bool = True, group: Group = None
) -> list[T] | None:
    """Return the objects of all ranks as ``all_gather_object_cpu`` does without a directory.

    Every rank must call this. The objects are sent through the process group on its communication
    device, which may be the CPU.
    """
    if live_world_size(group) == 1:
        return [data]
    if rank_zero_return_only:
        return gather_object(data, members(group)[0], group)
    return all_gather_object(data, group)


def _gather_through_files(data: T, folder: Path, only_first: bool, group: Group) -> list[T] | None:
    digests = results_of_all(lambda: _write_part(data, folder), group, _BY_FILES)
    gathered: list[T] | None = None

    def read() -> None:
        nonlocal gathered
        if _is_first(group) or not only_first:
            digest_of = zip(members(group), digests, strict=True)
            gathered = [_read_part(folder, rank, digest) for rank, digest in digest_of]

    # This is also a barrier: the files are kept until all ranks have read them.
    results_of_all(read, group, _BY_FILES)
    return gathered


def _check_results(results: object, size: int) -> None:
    if not isinstance(results, Sequence) or isinstance(results, str | bytes):
        kind = type(results).__name__
        raise TypeError(f"results must be a list or another sequence, got {kind}")
    if size < 0:
        raise ValueError(f"size must not be negative, got {size}")


def interleaved(gathered: Iterable[Iterable[T]]) -> list[T]:
    """Return the first result of each rank, then the second ones; lengths may differ."""
    # Not None, which may be a result.
    missing: Any = object()
    turns = chain.from_iterable(zip_longest(*gathered, fillvalue=missing))
    return [result for result in turns if result is not missing]


def _parent(use_system_tmp: bool) -> str:
    return tempfile.gettempdir() if use_system_tmp else os.getcwd()


def _is_first(group: Group) -> bool:
    return live_world_size(group) == 1 or dist.get_rank(group) == 0


def _from_first_rank(make: Callable[[], str], group: Group, prefix: str) -> str:
    """Return the result of ``make`` on the group's first rank; raise its error on every rank."""
    if live_world_size(group) == 1:
        return make()
    return results_of_all(lambda: make() if _is_first(group) else "", group, prefix)[0]


def _part_path(folder: Path, rank: int) -> Path:
    return folder / f"part_{rank}.pkl"


def _write_part(data: object, folder: Path) -> bytes:
    """Write this rank's file atomically and return its digest."""
    os.makedirs(folder.parent, exist_ok=True)
    # Any rank may be first. Without a shared file system, each host creates and removes its own.
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        chunks = pack(data).pieces
    except Exception as error:
        raise CollectiveError(f"cannot pickle the object: {get_text(error)}") from error
    digest = hashlib.blake2b()
    file_path = _part_path(folder, dist.get_rank())
    with replacing(file_path) as draft, draft.open("xb") as file:
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
    return digest.digest()


def _read_part(folder: Path, rank: int, digest: bytes) -> Any:
    """Return the object of a rank; unpickle its file only if the digest matches."""
    try:
        with _part_path(folder, rank).open("rb") as file:
            # Not `bytes`, because the tensors inside use this memory and must be writable.
            content = bytearray(os.fstat(file.fileno()).st_size)
            file.readinto(content)
    except FileNotFoundError as error:
        raise CollectiveError(
            f"{folder.parent} must be a shared directory, but the file of rank {rank} is not "
            "there; give a tmpdir on a shared file system, or neither tmpdir nor use_system_tmp"
        ) from error
    if hashlib.blake2b(content).digest() != digest:
        raise CollectiveError(
            f"checksum mismatch: {_part_path(folder, rank)} was changed after rank {rank} wrote "
            f"it, so it is not unpickled"
        )
    try:
        return unpack(memoryview(content))
    except Exception as error:
        raise CollectiveError(
            f"cannot unpickle the object of rank {rank}: {get_text(error)}"
        ) from error
