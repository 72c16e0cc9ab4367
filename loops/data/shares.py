"""Divide the batches of loaders that would give every rank the same data."""

from __future__ import annotations

import hashlib
import itertools
import logging
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, Sampler

from ...collectives import TorchDist, get_rank, get_world_size
from ...primitives.tensor_bits import tensor_bytes
from ...wrappers.steps.preprocess import get_fields
from ..error_notes import get_name
from ..rng import mix_seed, preserved_rng, seed_rng
from .loaders import (
    FirstBatches,
    batch_sampler_copy,
    copy_with_batches,
    get_length,
    has_exact_length,
    has_indices,
    warn_of_repetitions,
)
from .sampler import find_sampler
from .workers import RankSeed, iterate

logger = logging.getLogger(__name__)

_REMEDY = "set per_rank: true if the loader gives each rank its own data"
# The maximum number of rows in a batch that the ranks compare.
_ROWS = 256
_END = object()


class _Facts(NamedTuple):
    """What the ranks compare: digests of some data and of the order, None if they are unknown."""

    data: bytes | None = None
    order: bytes | None = None
    seed: int = 0
    # Whether only its batches show which rank they belong to.
    is_opaque: bool = False


class Share:
    """This rank's share of the batches that a loop reads.

    A loader of ``build_loader``, or one whose sampler knows the ranks, has only this rank's data.
    Any other loader may give every rank the same batches. If it does, rank r takes batch r of each
    round of as many batches as there are ranks.

    Args:
        per_rank: whether the loader gives each rank its own data, so that nothing is compared.

    Attributes:
        in_rounds: whether every rank reads the same batches one after another, and takes its own
            from each round; None before the ranks have compared their first batches.
        resumes_rounds: whether a resumed run did so.
    """

    def __init__(self, per_rank: bool) -> None:
        self.in_rounds: bool | None = False if per_rank else None
        self.resumes_rounds = self._is_divided = False
        self._group: dist.ProcessGroup | None = None
        self._repeats = False
        self._name = ""

    def divide(self, loader: Any, group: dist.ProcessGroup | None, *, repeats: bool) -> Any:
        """Return a loader with this rank's batches, if they are known by index.

        Other loaders are returned unchanged; ``take`` divides their batches. Every rank of the
        group must call this before each training or evaluation. Only the first call compares data.

        Args:
            loader: the loader.
            group: the ranks that need different data; None for all.
            repeats: whether ranks without a batch in the last round repeat one of this round, since
                all of them need the same number.

        Raises:
            ValueError: the batches cannot be divided, because their order has no end.
        """
        self._group, self._repeats, self._name = group, repeats, get_name(loader)
        ranks = get_world_size(group) if dist.is_initialized() else 1
        if self.in_rounds is not None or ranks == 1:
            self.in_rounds = bool(self.in_rounds)
            return loader
        inner = loader.loader if isinstance(loader, FirstBatches) else loader
        facts: list[_Facts] = TorchDist(group).all_gather_object(_collect_facts(inner))
        if not all(fact.is_opaque for fact in facts):
            self.in_rounds = False
        elif self.resumes_rounds:
            self.in_rounds = True
        if not self._is_same_data(facts):
            return loader
        share = self._build_share(inner, facts[0].seed)
        return FirstBatches(share, loader.count) if isinstance(loader, FirstBatches) else share

    @property
    def is_by_batch(self) -> bool:
        """Whether the ranks take whole batches in turn."""
        return self._is_divided or bool(self.in_rounds)

    def has_exact_length(self, loader: Any) -> bool:
        """Return whether ``len(loader)`` is certain to be this rank's number of batches."""
        return self.in_rounds is False and has_exact_length(loader)

    def take(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Return this rank's batches of a pass; every rank of the group must call this."""
        iterator = iter(batches)
        if self.in_rounds is None:
            batch, failure = _END, None
            try:
                batch = next(iterator, _END)
            except Exception as error:
                # The other ranks wait for this one.
                failure = error
            self._compare(batch)
            if failure is not None:
                raise failure
            iterator = itertools.chain(() if batch is _END else [batch], iterator)
        return self._rounds(iterator) if self.in_rounds else iterator

    def _is_same_data(self, facts: list[_Facts]) -> bool:
        data, orders = {fact.data for fact in facts}, {fact.order for fact in facts}
        if None in data or len(data) > 1:
            return False
        if len(orders) > 1:
            self._say(
                logging.WARNING,
                "every rank reads the same data set, but in another order, so that samples are "
                f"repeated: give the sampler the same seed on all ranks, or {_REMEDY}",
            )
        return len(orders) == 1

    def _build_share(self, loader: Any, seed: int) -> Any:
        ranks = get_world_size(self._group)
        count = get_length(loader)
        if count is None:
            raise ValueError(
                f"the batches of {self._name} cannot be divided among the ranks, because their "
                f"order has no end: give each rank its own part of the order, and {_REMEDY}"
            )
        self._is_divided = True
        self._say_divided(ranks)
        if self._repeats and count < ranks:
            warn_of_repetitions(self._name, f"{count} batches", ranks, get_rank(self._group))
        options: dict[str, Any] = {"rank": get_rank(self._group), "ranks": ranks}
        options["repeats"] = self._repeats
        if isinstance(loader, Sequence):
            return SharedBatches(loader, **options)
        sampler = SharedBatchSampler(loader.batch_sampler, seed=seed, **options)
        share = copy_with_batches(loader, sampler)
        if loader.generator is not None:
            # torch draws the seed of the workers from it, which would be the same on all ranks.
            share.worker_init_fn = RankSeed(loader.worker_init_fn, get_rank(self._group))
        return share

    def _rounds(self, iterator: Iterator[Any]) -> Iterator[Any]:
        # A round is read as a whole, so that all ranks have the same position in the data.
        rank, ranks = get_rank(self._group), get_world_size(self._group)
        while batches := [*itertools.islice(iterator, ranks)]:
            if rank < len(batches) or self._repeats:
                yield batches[rank % len(batches)]

    def _compare(self, batch: Any) -> None:
        """Compare the first batches of the ranks, and decide whether to divide them."""
        rows = [] if batch is _END else _row_digests(batch)
        # A benchmark may have identical rows, which do not show the rank that they belong to.
        is_telling = batch is not _END and (len(rows) < 2 or len(set(rows)) > 1)
        everyone: list[tuple[bytes | None, list[bytes]]] = TorchDist(self._group).all_gather_object(
            (digest(batch) if is_telling else None, rows)
        )
        digests = {batch for batch, _ in everyone}
        self.in_rounds = len(everyone) > 1 and None not in digests and len(digests) == 1
        if self.in_rounds:
            self._say_divided(len(everyone))
            return
        distinct = [set(rows) for _, rows in everyone if len(set(rows)) == len(rows)]
        if len(set().union(*distinct)) < sum(map(len, distinct)):
            self._say(
                logging.WARNING,
                f"the first batches of the ranks have samples in common: divide them, or {_REMEDY}",
            )

    def _say_divided(self, ranks: int) -> None:
        self._say(
            logging.INFO,
            f"every rank would read the same batches, so each of the {ranks} ranks takes its share "
            f"of them; {_REMEDY}",
        )

    def _say(self, level: int, text: str) -> None:
        if get_rank() == 0:
            logger.log(level, "%s: %s", self._name, text)


class SharedBatches(Sequence[Any]):
    """One rank's batches of a sequence that every rank has."""

    def __init__(self, batches: Sequence[Any], *, rank: int, ranks: int, repeats: bool) -> None:
        self._batches = batches
        self._indices = _indices_of_rank(len(batches), rank, ranks, repeats)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        return self._batches[self._indices[index]]


class SharedBatchSampler(Sampler[list[int]]):
    """One rank's batches of a batch sampler that every rank has.

    The samplers of all ranks get the same random numbers: a function of the seed and the pass.

    Args:
        undivided: the batch sampler.
        rank: the index of this share.
        ranks: the number of shares.
        repeats: whether every share has the same number of batches.
        seed: the seed; the same on every rank.
    """

    def __init__(
        self, undivided: Any, *, rank: int, ranks: int, repeats: bool, seed: int = 0
    ) -> None:
        self.undivided = undivided
        self.rank, self.ranks, self.repeats, self.seed = rank, ranks, repeats, seed
        # As in torch's batch samplers.
        self.sampler = getattr(undivided, "sampler", None)
        self.drop_last = getattr(undivided, "drop_last", False)
        self._epoch = 0
        self._listed: list[list[int]] = []

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass."""
        self._epoch = epoch
        if hasattr(self.undivided, "set_epoch"):
            self.undivided.set_epoch(epoch)

    def get_indices(self, epoch: int, batch: int) -> list[int]:
        """Return the sample indices of a batch of the running pass."""
        return self._listed[batch]

    def __len__(self) -> int:
        return len(_indices_of_rank(len(self.undivided), self.rank, self.ranks, self.repeats))

    def __iter__(self) -> Iterator[list[int]]:
        with preserved_rng():
            seed_rng(mix_seed(self.seed, self._epoch))
            everyones = list(self.undivided)
        indices = _indices_of_rank(len(everyones), self.rank, self.ranks, self.repeats)
        self._listed = [everyones[index] for index in indices]
        yield from self._listed


class UnpaddedSampler(Sampler[int]):
    """A rank's samples of a distributed sampler, without those that it repeats.

    Args:
        sampler: a sampler whose order has ``total_size`` positions, of which the last ones repeat
            samples. Rank r of n takes the positions r, r + n, r + 2n, ...
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.num_replicas = _num_replicas(sampler)
        self._count = len(range(sampler.rank, len(sampler.dataset), self.num_replicas))

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(self.sampler, self._count)


def drop_padding(loader: Any) -> Any:
    """Return a loader that repeats no samples, if a sampler repeats some to make ranks even."""
    if isinstance(loader, FirstBatches):
        inner = drop_padding(loader.loader)
        return loader if inner is loader.loader else FirstBatches(inner, loader.count)
    own_sampler = find_sampler(loader)
    if own_sampler is not None and own_sampler.padded_samples > own_sampler.num_samples:
        return copy_with_batches(loader, own_sampler.drop_padding())
    if not has_indices(loader) or type(loader.batch_sampler) is not BatchSampler:
        return loader
    sampler: Any = loader.sampler
    module = getattr(type(sampler).__iter__, "__module__", "")
    is_known = module.partition(".")[0] in ("torch", "mmengine")
    size = len(getattr(sampler, "dataset", ()))
    if not is_known or not 0 < size < getattr(sampler, "total_size", 0):
        return loader
    batches = loader.batch_sampler
    unpadded = UnpaddedSampler(sampler)
    return copy_with_batches(loader, BatchSampler(unpadded, batches.batch_size, batches.drop_last))


def _num_replicas(sampler: Any) -> int:
    """Return the number of ranks of a sampler of torch or mmengine; 1 for others."""
    counts = (getattr(sampler, name, 1) for name in ("num_replicas", "world_size"))
    return max((count for count in counts if isinstance(count, int)), default=1)


def find_shared_sampler(loader: Any) -> SharedBatchSampler | None:
    """Return the sampler of a loader that was divided by index; None for other loaders."""
    sampler = getattr(loader, "batch_sampler", None)
    return sampler if isinstance(sampler, SharedBatchSampler) else None


def _indices_of_rank(count: int, rank: int, ranks: int, repeats: bool) -> list[int]:
    """Return the indices of a rank's batches among ``count`` batches of all ranks."""
    indices = list(range(rank, count, ranks))
    size = count % ranks
    if repeats and 0 < size <= rank:
        # The last round has fewer batches than ranks.
        indices.append(count - size + rank % size)
    return indices


def _reads_by_index(loader: Any) -> bool:
    """Return whether a loader is a sequence, or a plain DataLoader over samples with an index."""
    return isinstance(loader, Sequence) or has_indices(loader)


def _knows_ranks(loader: Any) -> bool:
    """Return whether the order of a loader is one rank's part."""
    batches = getattr(loader, "batch_sampler", None)
    samplers = batches, getattr(batches, "sampler", None), getattr(loader, "sampler", None)
    is_divided = any(_num_replicas(sampler) > 1 for sampler in samplers)
    is_ours = isinstance(loader, SharedBatches) or isinstance(batches, SharedBatchSampler)
    return is_divided or is_ours or find_sampler(loader) is not None


def _collect_facts(loader: Any) -> _Facts:
    """Return what is known of a loader without reading a batch from it; it is not changed."""
    if _knows_ranks(loader):
        return _Facts()
    if not _reads_by_index(loader):
        return _Facts(is_opaque=True)
    try:
        if isinstance(loader, Sequence):
            # A benchmark may have identical batches, which do not show the rank of the loader.
            ends = [digest(loader[index]) for index in (0, 1, -1)[: len(loader)]]
            is_telling = None not in ends and (len(ends) == 1 or len(set(ends)) > 1)
            return _Facts(digest([len(loader), *ends]) if is_telling else None)
        size = len(loader.dataset)
        with preserved_rng(), batch_sampler_copy(loader) as sampler:
            seed_rng(0)
            order = digest(next(iter(sampler), None))
        # Read twice: samples that differ each time cannot be compared.
        ends = [_read_some(loader, sorted({0, size // 2, size - 1})) for _ in range(2)]
        samples = ends[0] if ends[0] == ends[1] else b""
    except Exception:  # noqa: BLE001 - the error will come again, with notes, when training reads
        return _Facts()
    if samples is None:
        return _Facts()
    return _Facts(digest([size, samples]), order, torch.initial_seed())


def _read_some(loader: Any, indices: list[int]) -> bytes | None:
    """Return a digest of samples, read with the same random numbers on every rank."""
    with preserved_rng():
        seed_rng(0)
        batches = [[index] for index in indices]
        workers = min(1, loader.num_workers)
        reader = copy_with_batches(loader, batches, workers=workers, is_short=True, seed=0)
        return digest([digest(batch) for batch in iterate(reader)])


def digest(data: Any) -> bytes | None:
    """Return a hash of nested data that is equal for equal values; None if it cannot be known."""
    hashed = hashlib.blake2b(digest_size=16)
    try:
        _add(hashed, data)
    except Exception:  # noqa: BLE001 - objects may refuse to be pickled in any way
        return None
    return hashed.digest()


def _add(hashed: Any, data: Any) -> None:
    data = get_fields(data)
    hashed.update(type(data).__name__.encode())
    if isinstance(data, Tensor):
        hashed.update(repr((data.dtype, tuple(data.shape))).encode())
        hashed.update(tensor_bytes(data.cpu()).numpy())
    elif isinstance(data, Mapping):
        for key, value in data.items():
            hashed.update(repr(key).encode())
            _add(hashed, value)
    elif isinstance(data, (list, tuple)):
        for value in data:
            _add(hashed, value)
    else:
        hashed.update(pickle.dumps(data))


def _row_digests(batch: Any) -> list[bytes]:
    """Return hashes of the rows of a batch's largest tensor."""
    tensors = [tensor for tensor in _tensors_in(batch) if tensor.dim()]
    rows = max(tensors, key=Tensor.numel)[:_ROWS] if tensors else ()
    return [digest(row) or b"" for row in rows]


def _tensors_in(data: Any) -> Iterator[Tensor]:
    data = get_fields(data)
    if isinstance(data, Tensor):
        yield data
    fields = data.values() if isinstance(data, Mapping) else data
    if isinstance(data, (Mapping, list, tuple)):
        for field in fields:
            yield from _tensors_in(field)
