"""The order of an epoch's samples and a rank's part of it: pure functions of (seed, epoch)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from ..rng import mix_seed

# The number of batches whose indices are created at once.
_BATCHES_AT_ONCE = 64


class BatchIndices(list[int]):
    """The indices of a batch, with the key from which its random numbers are seeded."""

    key: tuple[int, ...] = ()


def find_sampler(loader: Any) -> ShardedBatchSampler | None:
    """Return the sampler of a loader of ``build_loader``; None for other loaders."""
    sampler = getattr(loader, "batch_sampler", None)
    return sampler if isinstance(sampler, ShardedBatchSampler) else None


class ShardedBatchSampler(Sampler[list[int]]):
    """One rank's batches, a pure function of (seed, epoch, batch).

    Update k takes the positions from k*G up to, but not including, (k+1)*G of the epoch's order,
    for G = ``global_batch``. They are divided into ``micro_batches`` contiguous chunks. From each
    chunk every rank takes one batch: rank r takes the positions r, r+W, r+2W, ... of the chunk,
    where W is ``world_size``. The samples of an update therefore do not depend on W; see ``cut``,
    which training loops call. At first G is ``batch_size`` times W, in one chunk.

    Args:
        num_samples: samples in the whole data set.
        batch_size: samples per batch and rank, at most.
        shuffle: use a new permutation for each epoch instead of the natural order.
        seed: seed of the permutations; the same on every rank.
        rank: the index of this shard.
        world_size: the number of shards, which together have all samples.
        drop_last: leave out an incomplete last chunk.
        even: give every rank the same number of batches and samples, by repeating the epoch's
            first samples at its end (training). If ``even`` is false, each sample is read exactly
            once, and a rank may have fewer batches than others, or none (evaluation).

    Raises:
        ValueError: ``batch_size`` or ``rank`` is out of range, or ``drop_last`` leaves no batch.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        even: bool = True,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {batch_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in 0..{world_size - 1}, got {rank}")
        if drop_last and 0 < num_samples < batch_size * world_size:
            raise ValueError(
                f"drop_last leaves no batch: {num_samples} samples are fewer than batch_size "
                f"{batch_size} times world size {world_size}"
            )
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.drop_last = drop_last
        self.even = even
        self._epoch = 0
        self._first = 0
        self.cut(batch_size * world_size)

    def cut(
        self,
        global_batch: int,
        micro_batches: int = 1,
        *,
        epoch_samples: int | None = None,
        same_batch_count: bool = False,
        weighted: bool = False,
    ) -> None:
        """Set the number of samples in an update, and the number of batches of each rank in it.

        Args:
            global_batch: samples per update, over all ranks.
            micro_batches: batches per update.
            epoch_samples: samples in an epoch; default: by ``num_samples`` and ``drop_last``.
            same_batch_count: give the last, possibly smaller, update of an epoch as many batches
                as the others.
            weighted: whether the optimizer wrapper has a ``loss_weight``. If so, no samples are
                repeated to give the ranks equally many: their parts of a chunk differ by at most
                one sample. A rank without samples gets the chunk's first one, which does not
                count (``counts`` is False).

        Raises:
            ValueError: ``micro_batches`` is less than 1, or so large that a batch would be empty.
        """
        chunk = -(-global_batch // max(1, micro_batches))
        if micro_batches < 1 or chunk * (micro_batches - 1) >= global_batch:
            raise ValueError(
                f"micro_batches must be >= 1, without empty ones, got {micro_batches} "
                f"for a global batch of {global_batch} samples"
            )
        self.global_batch, self.micro_batches = global_batch, micro_batches
        self._chunk = self._last_chunk = chunk
        self._weighted = weighted
        all_samples = self.num_samples // chunk * chunk if self.drop_last else self.num_samples
        self.padded_samples = all_samples if epoch_samples is None else epoch_samples
        remainder = self.padded_samples % global_batch
        if same_batch_count and remainder:
            num_parts = micro_batches * self.world_size
            self._last_chunk = -(-remainder // num_parts) * self.world_size
            self.padded_samples += self._last_chunk * micro_batches - remainder
        elif self.even and not weighted:
            self.padded_samples += -self.padded_samples % self.world_size
        self.epoch_samples = self.padded_samples if epoch_samples is None else epoch_samples
        # The last epoch whose order was computed, and that order.
        self._known: tuple[int, torch.Tensor] | None = None

    @property
    def batches(self) -> int:
        """Batches in an epoch, on the rank with the most batches."""
        full = self.epoch_samples // self.global_batch
        remainder = self.padded_samples - full * self.global_batch
        return full * self.micro_batches - (-remainder // self._last_chunk)

    def __len__(self) -> int:
        count = self.batches
        # A rank can be without samples only in the last chunk.
        if count and not (self._weighted or self.counts(count - 1)):
            count -= 1
        return count

    def counts(self, batch: int) -> bool:
        """Return whether a batch of this rank has samples that count, and not only padding."""
        start, end = self._span(batch)
        return start + self.rank < end

    def drop_padding(self) -> ShardedBatchSampler:
        """Return a sampler of the same order that repeats no samples."""
        return ShardedBatchSampler(
            self.num_samples,
            self.batch_size,
            shuffle=self.shuffle,
            seed=self.seed,
            rank=self.rank,
            world_size=self.world_size,
            drop_last=self.drop_last,
            even=False,
        )

    def set_position(self, epoch: int, batch: int = 0) -> None:
        """Start the next iteration at batch ``batch`` of epoch ``epoch``."""
        self._epoch = epoch
        self._first = batch

    def get_indices(self, epoch: int, batch: int) -> list[int]:
        """Return the sample indices of a batch of this rank."""
        indices: list[int] = self._samples(epoch)[self._rank_positions(batch)].tolist()
        return indices

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator function: the position is read now, not at the first next().
        return map(
            self._listed, itertools.repeat(self._epoch), itertools.count(self._first), self.rows()
        )

    def rows(self, device: torch.device | None = None) -> Iterator[torch.Tensor]:
        """Return the batches of an iteration as index tensors on ``device``, by default the CPU."""
        return itertools.chain.from_iterable(self._batch_groups(self._epoch, self._first, device))

    def _span(self, batch: int) -> tuple[int, int]:
        """Return the positions (start, end) of a batch's chunk, which all ranks share."""
        update, index = divmod(batch, self.micro_batches)
        begin = update * self.global_batch
        chunk = self._chunk if begin + self.global_batch <= self.epoch_samples else self._last_chunk
        start = begin + index * chunk
        return start, min(start + chunk, begin + self.global_batch, self.padded_samples)

    def _rank_positions(self, batch: int) -> slice:
        """Return the positions of this rank's part of a batch."""
        start, end = self._span(batch)
        begin = start + self.rank
        return slice(begin, end, self.world_size) if begin < end else slice(start, start + 1)

    def _listed(self, epoch: int, batch: int, rows: torch.Tensor) -> BatchIndices:
        indices = BatchIndices(rows.tolist())
        indices.key = (self.seed, epoch, batch, self.rank)
        return indices

    def _batch_groups(
        self, epoch: int, first_batch: int, device: torch.device | None
    ) -> Iterator[Sequence[torch.Tensor]]:
        """Yield the batches in groups, since one tensor operation can split a whole group."""
        samples, count = self._samples(epoch).to(device), len(self)
        size, remainder = divmod(self._chunk, self.world_size)
        alike = not remainder and self._chunk == self._last_chunk
        alike = alike and self._chunk * self.micro_batches == self.global_batch
        for begin in range(first_batch, count, _BATCHES_AT_ONCE):
            end = min(begin + _BATCHES_AT_ONCE, count)
            if alike and self.counts(end - 1):
                stop = self._span(end - 1)[1]
                rows = samples[begin * self._chunk + self.rank : stop : self.world_size]
                yield torch.split(rows, size)
            else:
                yield [samples[self._rank_positions(batch)] for batch in range(begin, end)]

    def _samples(self, epoch: int) -> torch.Tensor:
        """Return the sample indices in the epoch's order, with repeated ones at the end."""
        if self._known is None or self._known[0] != epoch:
            order = self._order(epoch)
            if self.padded_samples > self.num_samples:
                order = order[torch.arange(self.padded_samples) % self.num_samples]
            self._known = epoch, order
        return self._known[1]

    def _order(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch))
        return torch.randperm(self.num_samples, generator=generator)
