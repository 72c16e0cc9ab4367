"""The hook that writes the outputs of an evaluation to a file."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from ...collectives import all_gather_object, broadcast, get_rank, get_world_size
from ..data.sampler import find_sampler
from ..data.shares import find_shared_sampler
from ..hook import Hook
from ..state import LoopState
from .files import (
    INDEX,
    Field,
    Fields,
    PartWriter,
    add_field,
    check_path,
    get_part,
    merge_parts,
    require_arrays,
)
from .rows import make_rows

logger = logging.getLogger(__name__)


class PredictionHook(Hook):
    """Write the outputs of ``test_step`` to a file: one row per sample, in the data set's order.

    Each rank writes its rows to a part next to ``path``. At the end of the evaluation rank 0 merges
    the parts, and the file appears. On several machines its folder must be shared.

    Use a new hook for each evaluation. An evaluation that is stopped writes no file.

    Args:
        path: the file; its suffix ``.jsonl``, ``.parquet`` or ``.npz`` determines the format.
        loader: the loader of the evaluation. With several ranks it must be a loader of
            ``build_loader`` over a map-style data set, in its natural order, or a plain
            ``DataLoader`` that has been divided among the ranks.

    Attributes:
        count: the number of rows in the file, on rank 0.

    Raises:
        ValueError: the format is unknown, or the loader shuffles, repeats or drops samples, or its
            order is unknown and there are several ranks.
        FileExistsError: ``path`` exists.
        ImportError: ``.parquet`` needs pyarrow, which is not installed.
    """

    def __init__(self, path: str | os.PathLike[str], loader: Iterable[Any]) -> None:
        self.path, self.count = Path(path), 0
        sampler = find_sampler(loader)
        self._sampler = find_shared_sampler(loader) if sampler is None else sampler
        check_path(self.path)
        if self._sampler is None and get_world_size() > 1:
            raise ValueError(
                "predictions of several ranks need a loader of build_loader or a plain DataLoader, "
                "over a map-style data set, which knows the place of each sample, got "
                f"{type(loader).__name__}; run it on one process"
            )
        if (setting := _reordered_by(loader)) is not None:
            raise ValueError(
                f"predictions need every sample once and in order, but the loader has {setting}"
            )
        self._shards: list[int] = []
        self._part: PartWriter | None = None
        self._batches = self._samples = 0
        self._was_stopped = False

    def on_eval_start(self, state: LoopState) -> None:
        """Open this rank's part."""
        # An earlier training of this process may have been stopped.
        self._was_stopped = bool(state.stop_reason)
        # Of ranks that see the same samples (tensor parallelism), the first one writes.
        shard = get_rank() if self._sampler is None else self._sampler.rank
        self._shards = all_gather_object(shard)
        self._batches = self._samples = self.count = 0
        if self._shards.index(shard) == get_rank():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._part = PartWriter(get_part(self.path, shard))

    def on_eval_batch_end(self, state: LoopState, batch: Any, outputs: Any) -> None:
        """Write the rows of a batch."""
        if self._part is None:
            return
        sampler = self._sampler
        indices = None if sampler is None else sampler.get_indices(0, self._batches)
        rows = make_rows(outputs, batch, None if indices is None else len(indices))
        begin = self._samples
        for index, row in zip(indices or range(begin, begin + len(rows)), rows, strict=True):
            self._part.write(index, row)
        if self.path.suffix == ".npz":
            require_arrays(self._part.fields)
        self._batches += 1
        self._samples += len(rows)

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        """Merge the parts on rank 0, unless the evaluation was stopped."""
        writer = self._part
        if writer is not None:
            writer.close()
        about = (
            (writer.fields, writer.others, writer.count) if writer is not None else ({}, set(), 0)
        )
        # This exchange also waits until all parts are complete.
        by_rank = all_gather_object(about)
        problem: Exception | None = None
        if get_rank() == 0 and (self._was_stopped or not state.stop_reason):
            try:
                self.count = self._merge(by_rank)
            except Exception as error:
                problem = error
        # Every rank waits here, since the parts are needed until rank 0 has merged them.
        problem = broadcast(problem)
        self._remove_part()
        if problem is not None:
            raise problem

    def on_exception(self, state: LoopState, error: BaseException) -> None:
        """Remove this rank's part."""
        self._remove_part()

    def _merge(self, by_rank: list[tuple[Fields, set[str], int]]) -> int:
        paths = [get_part(self.path, shard) for shard in sorted(set(self._shards))]
        if missing := [str(path) for path in paths if not path.exists()]:
            raise FileNotFoundError(
                f"the predictions of other ranks are not in {missing[0]}: the folder of "
                f"{self.path} must be shared by all machines"
            )
        total = sum(count for _, _, count in by_rank)
        fields: Fields = {INDEX: Field(np.dtype("int64"), {()}, total)}
        for rank_fields, _, _ in by_rank:
            for name, field in rank_fields.items():
                add_field(fields, name, field)
        other_names = set().union(*(names for _, names, _ in by_rank))
        if other_names and self.path.suffix == ".npz":
            names = ", ".join(sorted(other_names))
            logger.warning("%s leaves out fields that are not numeric: %s", self.path, names)
        for name in other_names:
            fields.pop(name, None)
        return merge_parts(paths, self.path, fields)

    def _remove_part(self) -> None:
        if self._part is not None:
            self._part.close()
            with suppress(OSError):
                self._part.path.unlink()
            self._part = None


def _reordered_by(loader: Iterable[Any]) -> str | None:
    """Return the setting that makes a loader repeat, drop or reorder samples, or None."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    sampler = find_sampler(loader)
    shared = find_shared_sampler(loader)
    if sampler is not None:
        settings = {"train=True": sampler.even, "shuffle": sampler.shuffle}
        settings |= {"drop_last": sampler.drop_last, "a sampler": sampler.order is not None}
    else:
        batches: Any = loader.batch_sampler if shared is None else shared.undivided
        order = getattr(batches, "sampler", loader.sampler)
        settings = {"shuffle or a sampler": not isinstance(order, SequentialSampler)}
        settings["a batch_sampler"] = batches is not None and type(batches) is not BatchSampler
        settings["drop_last"] = loader.drop_last if shared is None else shared.drop_last
    return next((name for name, is_set in settings.items() if is_set), None)
