"""Write checkpoints in another thread, while the training continues."""

from __future__ import annotations

import logging
import math
import mmap
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread

import torch
from torch import Tensor

from ...collectives import CollectiveError, CollectiveGroup, all_gather_object
from ...collectives.errors import get_text
from ...parallel import free_memory
from .checkpoint import list_checkpoints
from .files import CheckpointError, own_rank, run_on_all_ranks, save_lock, world_size
from .save import Snapshot
from .tensor_files import TensorFile

logger = logging.getLogger(__name__)

# The devices from which the host can copy without waiting, to pinned memory.
_ASYNC_DEVICES = ("cuda", "xpu")
_ALIGNMENT = 64


class CheckpointWriter:
    """Write checkpoints, one at a time, at once or in a thread; every rank must call it alike.

    The ranks exchange results in a separate group, because the calls of one group must have the
    same order on all ranks. This group has a longer timeout, because syncing files may take long.

    Args:
        after: called on rank 0 with the path of each checkpoint, by the thread that wrote it.
        timeout_s: a rank whose part of a save takes longer than this counts as missing.
    """

    def __init__(self, after: Callable[[Path], None], timeout_s: float) -> None:
        self._after = after
        self._group = None
        if world_size() > 1:
            self._group = CollectiveGroup.create(timeout_s=timeout_s, backend="gloo")
        group = None if self._group is None else self._group.group
        self._gather = partial(all_gather_object, group=group)
        # Bytes for the copies; later saves use them again.
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._thread: Thread | None = None
        self._path = Path()
        self._error: Exception | None = None
        # The checkpoint that a failed save leaves as the latest, on rank 0.
        self._last_good: Path | None = None

    def write(self, snapshot: Snapshot) -> Path:
        """Write a checkpoint and return its path.

        Raises:
            CheckpointError: on every rank, if writing failed.
        """
        with save_lock:
            return self._write(snapshot)

    def start(self, snapshot: Snapshot) -> str:
        """Copy the tensors of a snapshot, and write it in a thread.

        Returns:
            "", or why the save was not started: the memory for the copies is missing.
        """
        problem = self._memory_problem(snapshot)
        if problem:
            return problem
        copied = self._copy(snapshot.files())
        self._error = self._last_good = None
        self._thread = Thread(
            target=self._run, args=(snapshot, copied), name="stepwrap-save", daemon=True
        )
        save_lock.acquire()
        try:
            self._thread.start()
        except BaseException:
            save_lock.release()
            raise
        return ""

    def result(self, *, wait: bool) -> Path | None:
        """Return the path of the checkpoint if the save has ended on all ranks, otherwise None.

        Raises:
            CheckpointError: on every rank, if the save failed; it names the last good checkpoint.
            CollectiveError: a rank was missing in the save.
        """
        assert self._thread is not None
        if wait:
            self._thread.join()
        has_ended = not self._thread.is_alive()
        report = (has_ended, self._failure_text() if has_ended else "", self._last_good)
        # A rank that was missing in the save may not answer now either.
        is_alone = has_ended and isinstance(self._error, CollectiveError)
        reports = [report] if is_alone else all_gather_object(report)
        if not all(ended for ended, _, _ in reports):
            return None
        self._thread = None
        texts = dict.fromkeys(filter(None, (text for _, text, _ in reports)))
        if texts:
            last_good = reports[0][-1]
            text = f"the last good checkpoint is {last_good}" if last_good else "none is complete"
            kind = CollectiveError if is_alone else CheckpointError
            raise kind(f"{'; '.join(texts)}; {text}") from self._error
        return self._path

    def wait_alone(self, timeout_s: float | None = None) -> None:
        """Wait for the save in the thread and log its end, without communication."""
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("gave up a checkpoint that was not complete after %.0f s", timeout_s)
        elif isinstance(self._error, CollectiveError):
            # The error that ended the training says which rank is missing.
            logger.warning("a checkpoint was not completed, because another rank has ended")
        elif self._error is not None:
            logger.warning("%s", self._failure_text())
        elif own_rank() == 0:
            logger.info("saved checkpoint %s", self._path)

    def close(self) -> None:
        """Release the memory and the group, unless a thread still uses them."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._memory = self._memory[:0].clone()
        if self._group is not None:
            self._group.destroy()

    def _write(self, snapshot: Snapshot) -> Path:
        path = snapshot.write(self._gather)
        run_on_all_ranks(
            f"after saving {path}",
            lambda: self._after(path) if own_rank() == 0 else None,
            self._gather,
        )
        return path

    def _run(self, snapshot: Snapshot, copied: list[torch.Event]) -> None:
        try:
            for event in copied:
                event.synchronize()
            self._path = self._write(snapshot)
        except Exception as error:
            self._error = error
            if own_rank() == 0:
                self._last_good = next((p for p, _ in list_checkpoints(snapshot.folder)), None)
        finally:
            save_lock.release()

    def _failure_text(self) -> str:
        if self._error is None:
            return ""
        is_ours = isinstance(self._error, CheckpointError)
        return str(self._error) if is_ours else get_text(self._error)

    def _memory_problem(self, snapshot: Snapshot) -> str:
        """Return why the copies do not fit into the memory of a host, "" if they fit."""
        num_bytes = max(0, _padded_size(snapshot.files()) - len(self._memory))
        needs = run_on_all_ranks(
            "copying the state",
            lambda: (
                socket.gethostname(),
                num_bytes,
                free_memory("cpu") if num_bytes else math.inf,
            ),
            self._gather,
        )
        for host in dict.fromkeys(name for name, _, _ in needs):
            needed = sum(count for name, count, _ in needs if name == host)
            free = min(count for name, _, count in needs if name == host)
            if needed > free:
                return (
                    f"a copy of the state needs {needed / 1e6:.3g} MB of memory on {host}, and "
                    f"{free / 1e6:.3g} MB are free"
                )
        return ""

    @torch.no_grad()
    def _copy(self, files: list[TensorFile]) -> list[torch.Event]:
        """Replace the tensors by copies; return events that say when the copies are complete."""
        tensors = [tensor for file in files for tensor in file.tensors.values()]
        devices = {t.device for t in tensors if t.device.type in _ASYNC_DEVICES}
        num_bytes = _padded_size(files)
        if len(self._memory) < num_bytes:
            # Released first, so that there is never more than one copy.
            self._memory = self._memory[:0].clone()
            self._memory = _allocate(num_bytes, pinned=bool(devices))
        start = 0
        for file in files:
            for name, tensor in file.tensors.items():
                stop = start + tensor.numel() * tensor.element_size()
                copy = self._memory[start:stop].view(tensor.dtype).view(tensor.shape)
                # The next update waits for the copy in the device's stream, not in this thread.
                file.tensors[name] = copy.copy_(tensor, non_blocking=tensor.device in devices)
                start = stop + -stop % _ALIGNMENT
        return [torch.accelerator.current_stream(device).record_event() for device in devices]


def _padded_size(files: list[TensorFile]) -> int:
    sizes = [t.numel() * t.element_size() for file in files for t in file.tensors.values()]
    return sum(size + -size % _ALIGNMENT for size in sizes)


def _allocate(num_bytes: int, *, pinned: bool) -> Tensor:
    if pinned:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    memory = mmap.mmap(-1, num_bytes)
    # Large pages, because the first access to each page takes time. Workers of loaders, which are
    # forked, need no copy of the memory.
    for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with suppress(AttributeError, OSError):
            memory.madvise(getattr(mmap, name))
    return torch.frombuffer(memory, dtype=torch.uint8)
