"""The order of an epoch's samples and a rank's part of it: pure functions of (seed, epoch)."""

from __future__ import annotations

import hashlib
import itertools
import logging
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from ...collectives import get_rank, get_world_size
from ...collectives.objects.agree import results_of_all
from ..error_notes import get_name
from ..rng import is_generator, mix_seed, preserved_rng, seed_rng

logger = logging.getLogger(__name__)

# The number of batches whose indices are created at once.
_BATCHES_AT_ONCE = 64
# The libraries whose samplers have no state but their generators.
_LIBRARIES = {"torch", __name__.partition(".")[0]}


class BatchIndices(list[int]):
    """The indices of a batch, with the key from which its random numbers are seeded."""

    key: tuple[int, ...] = ()


def find_sampler(loader: Any) -> ShardedBatchSampler | None:
    """Return the sampler of a loader of ``build_loader``; None for other loaders."""
    sampler = getattr(loader, "batch_sampler", None)
    return sampler if isinstance(sampler, ShardedBatchSampler) else None


class SampleOrder:
    """The order that a sampler draws for each epoch, as a function of (seed, epoch).

    Python, torch and NumPy are seeded before each draw. If nothing shows that the sampler depends
    only on their numbers or on ``set_epoch``, earlier epochs are drawn again after a resume, so
    that its own generators and counters continue.

    Args:
        sampler: an iterable with a length, of indices or (``batched``) of lists of indices.
        size: the number of samples in the data set.
        seed: the seed of the draws; the same on every rank.
        batched: whether the sampler yields batches, which ranks do not divide.

    Raises:
        TypeError: the sampler has no length, or cannot be iterated over.
        ValueError: it has no samples.
    """

    def __init__(self, sampler: Any, size: int, seed: int, *, batched: bool = False) -> None:
        self.sampler, self.batched = sampler, batched
        self._size, self._seed = size, seed
        if not hasattr(sampler, "__iter__") or not hasattr(sampler, "__len__"):
            raise TypeError(
                f"a sampler needs __iter__ and __len__, got {get_name(sampler)}; give a loop your "
                "own loader if the order has no end"
            )
        if not len(sampler):
            raise ValueError(f"{get_name(sampler)} yields no samples")
        self._listeners = [
            inner for inner in _nested_samplers(sampler) if hasattr(inner, "set_epoch")
        ]
        self.is_pure = bool(self._listeners) or all(map(_has_no_state, _nested_samplers(sampler)))
        # The epoch that was drawn last, its samples, and the sizes of its batches.
        self.epoch = -1
        self._indices = torch.empty(0, dtype=torch.int64)
        self._sizes: list[int] = []

    def __len__(self) -> int:
        return len(self.sampler)

    def draw(self, epoch: int) -> Tensor:
        """Return the indices of the samples, or the numbers of the batches, of an epoch.

        Raises:
            TypeError: an entry of the sampler is not an integer or a list of integers.
            ValueError: it yields another number of samples than its length says, or an index that
                the data set does not have.
        """
        if epoch != self.epoch:
            if not self.is_pure and epoch > self.epoch + 1:
                self._repeat(range(self.epoch + 1, epoch))
            drawn = self._list(epoch)
            self._sizes = list(map(len, drawn)) if self.batched else []
            indices = list(itertools.chain(*drawn)) if self.batched else drawn
            self._indices, self.epoch = torch.tensor(indices, dtype=torch.int64), epoch
            self._check()
        return torch.arange(len(self._sizes)) if self.batched else self._indices

    def find_samples(self, epoch: int, drawn: Tensor) -> Tensor:
        """Return the indices of the samples in some batches that ``draw`` has returned."""
        self.draw(epoch)
        batches = torch.split(self._indices, self._sizes)
        return torch.cat([batches[number] for number in drawn.tolist()]).to(drawn.device)

    def digest(self, epoch: int) -> int:
        """Return a number that is equal for equal orders of an epoch."""
        self.draw(epoch)
        hashed = hashlib.blake2b(self._indices.numpy().tobytes(), digest_size=8)
        if self.batched:
            hashed.update(repr(self._sizes).encode())
        return int.from_bytes(hashed.digest(), "big") >> 1

    def _repeat(self, epochs: range) -> None:
        if get_rank() == 0:
            logger.info(
                "%s has no set_epoch: its orders of %d earlier epochs are drawn again, so that it "
                "continues as in an uninterrupted run",
                *(get_name(self.sampler), len(epochs)),
            )
        for epoch in epochs:
            self._list(epoch)

    def _list(self, epoch: int) -> list[Any]:
        for listener in self._listeners:
            listener.set_epoch(epoch)
        expected = len(self.sampler)
        with preserved_rng():
            seed_rng(mix_seed(self._seed, epoch))
            # One more than there should be, because the order may have no end.
            drawn = list(itertools.islice(self.sampler, expected + 1))
        if len(drawn) != expected:
            amount = f"only {len(drawn)}" if len(drawn) < expected else "more"
            raise ValueError(
                f"{get_name(self.sampler)} must yield as many entries as its length says, "
                f"{expected}, but yields {amount}"
            )
        return [self._list_batch(entry) for entry in drawn] if self.batched else self._ints(drawn)

    def _list_batch(self, batch: Any) -> list[int]:
        if not isinstance(batch, Iterable) or isinstance(batch, (str, Mapping)):
            raise TypeError(
                f"{get_name(self.sampler)} must yield lists of indices, got {batch!r}; pass it as "
                "sampler if it yields single indices"
            )
        indices = self._ints(batch)
        if not indices:
            raise ValueError(f"{get_name(self.sampler)} yields an empty batch")
        return indices

    def _ints(self, entries: Iterable[Any]) -> list[int]:
        try:
            return [operator.index(entry) for entry in entries]
        except TypeError as error:
            raise TypeError(
                f"{get_name(self.sampler)} must yield indices, which are integers ({error}); pass "
                "it as batch_sampler if it yields lists"
            ) from error

    def _check(self) -> None:
        low, high = self._indices.min().item(), self._indices.max().item()
        if low < 0 or high >= self._size:
            raise ValueError(
                f"{get_name(self.sampler)} must yield indices from 0 to {self._size - 1}, the last "
                f"sample of the data set, got {low if low < 0 else high}"
            )


def _nested_samplers(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and, if it is a batch sampler, the sampler in it."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)


def _has_no_state(sampler: Any) -> bool:
    if isinstance(sampler, Sequence):
        return True
    module = getattr(type(sampler).__iter__, "__module__", "")
    has_generator = any(map(is_generator, getattr(sampler, "__dict__", {}).values()))
    return module.partition(".")[0] in _LIBRARIES and not has_generator


def knows_ranks(sampler: Any) -> bool:
    """Return whether a sampler yields one rank's part, as ``DistributedSampler`` does."""
    counts = (getattr(sampler, name, None) for name in ("num_replicas", "world_size"))
    return any(isinstance(count, int) for count in counts)


def compare_orders(loader: Any, epoch: int) -> int | None:
    """Return the digest of an epoch's order; None if no sampler draws it.

    Every rank must call this, because the ranks compare their orders.

    Raises:
        ValueError: the sampler of another rank draws another order.
    """
    order = find_order(loader)
    if order is None:
        return None
    if get_world_size() == 1:
        return order.digest(epoch)
    digests = results_of_all(lambda: order.digest(epoch))
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise ValueError(
            f"{get_name(order.sampler)} must draw the same order on every rank, since each rank "
            f"takes its part of it, but in epoch {epoch} rank {different[0]} has another one than "
            "rank 0: draw from random, torch or numpy.random, which are seeded alike, or from the "
            "seed and set_epoch(epoch), and read the same data set on every rank"
        )
    return digests[0]


def find_order(loader: Any) -> SampleOrder | None:
    """Return the order of a loader of ``build_loader`` that has a sampler; None for others."""
    # A loader of which only the first batches are read.
    batches = getattr(getattr(loader, "loader", loader), "batch_sampler", None)
    order = getattr(batches, "order", None)
    return order if isinstance(order, SampleOrder) else None


class ShardedBatchSampler(Sampler[list[int]]):
    """One rank's batches, a pure function of (seed, epoch, batch).

    Update k takes the positions from k*G up to, but not including, (k+1)*G of the epoch's order,
    for G = ``global_batch``. They are divided into ``micro_batches`` contiguous chunks. From each
    chunk every rank takes one batch: rank r takes the positions r, r+W, r+2W, ... of the chunk,
    where W is ``world_size``. The samples of an update therefore do not depend on W; see ``cut``,
    which training loops call. At first G is ``batch_size`` times W, in one chunk.

    Args:
        num_samples: samples in the whole data set, or draws in an epoch with ``order``.
        batch_size: samples per batch and rank, at most.
        shuffle: use a new permutation for each epoch instead of the natural order.
        seed: seed of the permutations; the same on every rank.
        rank: the index of this shard.
        world_size: the number of shards, which together have all samples.
        drop_last: leave out an incomplete last chunk.
        even: give every rank the same number of batches and samples, by repeating the epoch's
            first samples at its end (training). If ``even`` is false, each sample is read exactly
            once, and a rank may have fewer batches than others, or none (evaluation).
        order: the draws of a sampler. If it draws batches, each of them counts as one sample here.

    Raises:
        ValueError: ``batch_size`` or ``rank`` is out of range, or ``drop_last`` leaves no batch.
    """

    def __init__(  # noqa: PLR0913
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
        order: SampleOrder | None = None,
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
        self.order = order
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
        self._known: tuple[int, Tensor] | None = None

    @property
    def unit(self) -> str:
        """What is divided among the ranks, "samples" or "batches"."""
        return "batches" if self.order is not None and self.order.batched else "samples"

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
        unpadded = copy(self)
        unpadded.even = False
        unpadded.set_position(0)
        unpadded.cut(self.batch_size * self.world_size)
        return unpadded

    def set_position(self, epoch: int, batch: int = 0) -> None:
        """Start the next iteration at batch ``batch`` of epoch ``epoch``."""
        self._epoch = epoch
        self._first = batch

    def get_indices(self, epoch: int, batch: int) -> list[int]:
        """Return the sample indices of a batch of this rank."""
        drawn = self._samples(epoch)[self._rank_positions(batch)]
        if self.order is not None and self.order.batched:
            drawn = self.order.find_samples(epoch, drawn)
        indices: list[int] = drawn.tolist()
        return indices

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator function: the position is read now, not at the first next().
        return map(
            self._listed, itertools.repeat(self._epoch), itertools.count(self._first), self.rows()
        )

    def rows(self, device: torch.device | None = None) -> Iterator[Tensor]:
        """Return the batches of an iteration as index tensors on ``device``, by default the CPU."""
        drawn = itertools.chain.from_iterable(self._batch_groups(self._epoch, self._first, device))
        if self.order is None or not self.order.batched:
            return drawn
        return map(self.order.find_samples, itertools.repeat(self._epoch), drawn)

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

    def _listed(self, epoch: int, batch: int, rows: Tensor) -> BatchIndices:
        indices = BatchIndices(rows.tolist())
        indices.key = (self.seed, epoch, batch, self.rank)
        return indices

    def _batch_groups(
        self, epoch: int, first_batch: int, device: torch.device | None
    ) -> Iterator[Sequence[Tensor]]:
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

    def _samples(self, epoch: int) -> Tensor:
        """Return the sample indices in the epoch's order, with repeated ones at the end."""
        if self._known is None or self._known[0] != epoch:
            order = self._order(epoch)
            if self.padded_samples > self.num_samples:
                order = order[torch.arange(self.padded_samples) % self.num_samples]
            self._known = epoch, order
        return self._known[1]

    def _order(self, epoch: int) -> Tensor:
        if self.order is not None:
            return self.order.draw(epoch)
        if not self.shuffle:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch))
        return torch.randperm(self.num_samples, generator=generator)
