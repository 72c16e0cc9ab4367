"""The functions of maps: the pool pickles each once if possible; each worker unpickles it once."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from ...transport.wire import Packed, pack
from . import worker as protocol


class MapFunctions:
    """Pickles the functions of a pool's maps for its workers.

    Args:
        calls: the unfinished calls by job.
        open_jobs: the jobs of unfinished iterators, which are in ``calls`` only if they have tasks.
        packing: ``copy_tensor`` and ``recurse``; see ``pack``.
    """

    def __init__(
        self, calls: Mapping[int, Any], open_jobs: Container[int], packing: tuple[bool, bool]
    ) -> None:
        self._calls, self._open_jobs = calls, open_jobs
        self._copy_tensor, self._recurse = packing
        self._packed: dict[int, Packed] = {}

    def is_open(self, job: int) -> bool:
        """Return whether a job may have further tasks."""
        return job in self._calls or job in self._open_jobs

    def packed(self, job: int, function: Any) -> Packed:
        """Return a pickled function; if possible, pickle it only once for all tasks of its job.

        A message that has descriptors, or that passes tensors by reference, can be received only
        once. A function that may need such a message is therefore pickled for each message.
        """
        packed = self._packed.get(job)
        if packed is None:
            packed = pack(function, copy_tensor=self._copy_tensor, recurse=self._recurse)
            if self._copy_tensor and not packed.fds:
                self._packed = {key: p for key, p in self._packed.items() if self.is_open(key)}
                self._packed[job] = packed
        return packed

    def clear(self) -> None:
        """Forget all functions."""
        self._packed.clear()


@dataclass
class SentFunction:
    """A map's function that was sent to a worker.

    Attributes:
        slot: the place for the function in the worker, below ``FUNCTION_SLOTS``.
        since: the number of the first task that included it.
        has_arrived: whether one of its tasks has succeeded; later tasks need not include it.
    """

    slot: int
    since: int
    has_arrived: bool = False


class SentFunctions:
    """The functions that were sent to one worker, by job, the least recently used first."""

    def __init__(self) -> None:
        self._by_job: dict[int, SentFunction] = {}

    @property
    def needed(self) -> int:
        """The slots that the worker must keep, one bit for each."""
        return sum(1 << function.slot for function in self._by_job.values())

    def drop_ended(self, functions: MapFunctions) -> None:
        """Forget the functions of jobs that have no further tasks."""
        if self._by_job:
            self._by_job = {
                job: sent for job, sent in self._by_job.items() if functions.is_open(job)
            }

    def use(self, job: int, number: int) -> SentFunction:
        """Return the function of a job for task ``number``.

        If all slots are taken, the least recently used function is dropped.
        """
        function = self._by_job.pop(job, None)
        if function is None:
            used_slots = {sent.slot for sent in self._by_job.values()}
            if len(used_slots) == protocol.FUNCTION_SLOTS:
                used_slots.remove(self._by_job.pop(next(iter(self._by_job))).slot)
            slot = next(
                free_slot
                for free_slot in range(protocol.FUNCTION_SLOTS)
                if free_slot not in used_slots
            )
            function = SentFunction(slot, since=number)
        self._by_job[job] = function
        return function

    def succeeded(self, job: int, number: int) -> None:
        """Record that task ``number`` of a job has succeeded, so the worker has its function."""
        function = self._by_job.get(job)
        if function is not None and number >= function.since:
            function.has_arrived = True
