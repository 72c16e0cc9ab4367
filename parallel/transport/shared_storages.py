"""CPU storages in shared memory, as torch keeps it: by descriptor or by the name of a file.

A storage that is shared stays where it is, since others may see the same memory. What comes back
to a process that has it already is found in torch's cache.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Iterator
from typing import Any

from torch import UntypedStorage
from torch.multiprocessing import get_sharing_strategy, reductions

from .buffers import MARK
from .descriptors import Received, explaining

Content = tuple[Any, ...]


def by_name(storage: UntypedStorage) -> Content:
    """Return the shared memory of a storage by the name of a file: good also without the sender.

    Only of a storage that is shared by descriptor already, the sender must keep it until then.
    """
    if not storage.nbytes():
        return (_empty,)
    if storage.is_shared() and not _has_name(storage):
        descriptor, size = _shared(storage)
        inode, device = reductions.fd_id(descriptor)  # type: ignore[no-untyped-call]
        return _of_process, os.getpid(), descriptor, inode, device, size
    manager, name, size = storage._share_filename_cpu_()
    # The file stays for the receiver, who takes this back.
    storage._shared_incref()  # type: ignore[no-untyped-call]
    _remember(name, storage)
    return _of_file, manager, name, size


def by_descriptor(storage: UntypedStorage, descriptors: list[int]) -> Content:
    """Return the shared memory of a storage; a descriptor of it, to be closed, joins the list.

    By name where it has one, or where the user has chosen torch's strategy "file_system".
    """
    if not storage.nbytes():
        return (_empty,)
    has_name = get_sharing_strategy() == "file_system"  # type: ignore[no-untyped-call]
    if _has_name(storage) if storage.is_shared() else has_name:
        return by_name(storage)
    descriptor, size = _shared(storage)
    _remember(reductions.fd_id(descriptor), storage)  # type: ignore[no-untyped-call]
    descriptors.append(os.dup(descriptor))
    return _of_descriptor, MARK, size


def _has_name(storage: UntypedStorage) -> bool:
    # torch counts the users of a file with a name at its beginning, before the numbers.
    return storage.data_ptr() % mmap.PAGESIZE != 0


def _shared(storage: UntypedStorage) -> tuple[int, int]:
    with explaining():
        descriptor, size = storage._share_fd_cpu_()
    if descriptor < 0:
        raise ValueError(
            "a tensor in a file that is mapped (torch.from_file, torch.load(mmap=True)) cannot be "
            "passed by reference; clone() it, or pass it by copy"
        )
    return descriptor, size


def _remember(key: Any, storage: UntypedStorage) -> None:
    reductions.shared_cache[key] = reductions.StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _empty() -> UntypedStorage:
    return UntypedStorage(0)  # type: ignore[no-untyped-call]


def _of_descriptor(descriptor: Received, size: int) -> UntypedStorage:
    with explaining():
        storage: UntypedStorage = reductions.rebuild_storage_fd(  # type: ignore[no-untyped-call]
            UntypedStorage, descriptor, size
        )
    return storage


def _of_file(manager: bytes, name: bytes, size: int) -> UntypedStorage:
    try:
        storage: UntypedStorage = reductions.rebuild_storage_filename(  # type: ignore[no-untyped-call]
            UntypedStorage, manager, name, size
        )
    except RuntimeError as error:
        raise _gone(f"the file {os.fsdecode(name)}") from error
    return storage


def _of_process(process: int, number: int, inode: int, device: int, size: int) -> UntypedStorage:
    key = inode, device
    known: UntypedStorage | None = reductions.storage_from_cache(UntypedStorage, key)  # type: ignore[no-untyped-call]
    if known is not None:
        return known
    # The sender may have ended, and this process may be the one that it had the memory from.
    for path in (f"/proc/{process}/fd/{number}", *_own_descriptors()):
        with contextlib.suppress(FileNotFoundError), explaining():
            if _key(os.stat(path)) == key:
                return _of_descriptor(Received(os.open(path, os.O_RDWR | os.O_CLOEXEC)), size)
    raise _gone(f"a descriptor of process {process}")


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_dev


def _own_descriptors() -> Iterator[str]:
    yield from (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))


def _gone(place: str) -> OSError:
    return OSError(
        errno.ESTALE,
        f"the memory of a tensor passed by reference is gone: it was shared by {place}, and the "
        "processes that had it have ended or dropped the tensor",
    )
