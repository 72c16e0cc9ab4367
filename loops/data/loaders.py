"""Build loaders, start them at any batch, and read batches without changing a loader."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from copy import copy
from typing import Any, TypeGuard

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    default_collate,
)

from ...collectives import get_rank, get_world_size
from ..error_notes import get_name
from ..rng import DataGenerators, mix_seed, preserved_generators, preserved_rng, seed_rng
from ..state import Stateful
from .collate import prepare_dataset
from .sampler import (
    BatchIndices,
    SampleOrder,
    ShardedBatchSampler,
    find_sampler,
    knows_ranks,
)
from .tensors import TensorLoader, can_pin_memory, selects_rows
from .workers import (
    EpochStream,
    WorkerCollate,
    WorkerEpoch,
    WorkerStart,
    find_epoch_listeners,
    iterate,
    keep_workers,
)

logger = logging.getLogger(__name__)

# The libraries whose samplers and loaders have the length that they state.
_LIBRARIES = {"torch", "torchdata", __name__.partition(".")[0]}
# Arguments of torch's DataLoader that build_loader sets itself, and what to pass instead.
_REPLACED = {
    "generator": "pass seed, not generator, since it creates its generator from seed",
    "collate_fn": "pass collate",
}


class SeededSamples(Dataset[Any]):
    """A map-style data set whose random numbers in a worker depend only on the batch's key.

    Augmentations are therefore the same for any number of workers and after a resume.
    ``build_loader`` uses this class only with workers: without them, augmentations use the random
    streams of the training process, which checkpoints contain.

    Args:
        samples: the data set.
        epoch: passes the number of each pass on to workers that outlive a pass.
    """

    follows_epochs = True

    def __init__(self, samples: Dataset[Any], epoch: WorkerEpoch) -> None:
        self.samples = samples
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]

    def set_epoch(self, epoch: int) -> None:
        self._epoch.set(epoch)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self._epoch.follow()
        if isinstance(indices, BatchIndices):
            seed_rng(mix_seed(*indices.key))
        get_many = getattr(self.samples, "__getitems__", None)
        return list(
            map(self.samples.__getitem__, indices) if get_many is None else get_many(indices)
        )


def build_loader(
    dataset: Dataset[Any],
    *,
    batch_size: int | None = None,
    train: bool = False,
    shuffle: bool = False,
    num_workers: int = 0,
    collate: Callable[[list[Any]], Any] | None = None,
    seed: int = 0,
    in_memory: bool | torch.device | str = "auto",
    **options: Any,
) -> DataLoader[Any]:
    """Return this rank's loader; does not communicate.

    Args:
        dataset: a map-style data set that is not empty, or an iterable one that shards itself. If
            an iterable one has ``state_dict`` and ``load_state_dict``, a resumed run continues
            from its position. Hugging Face streams are divided among the ranks here. Without
            ``collate``, Hugging Face data sets return tensors.
        batch_size: samples per batch and rank. Required without ``batch_sampler``.
        train: give every rank the same number of batches, if necessary by repeating samples. By
            default each sample is read exactly once.
        shuffle: use a new order in each epoch, the same for any number of workers.
        num_workers: worker processes; 0 reads in this process. Workers end when this process ends.
            They ignore stop signals, because these often reach every process of a job.
        collate: makes a batch of a list of samples; None for torch's default.
        seed: the seed of the order and of the workers' random numbers; the same on every rank.
        in_memory: make each batch by selecting rows of the data set's attribute ``tensors`` (a
            tensor, or a sequence or mapping of tensors) instead of reading single samples. With a
            device, the rows are copied there once. "auto" does this only if nothing but the speed
            changes, for example with a ``TensorDataset`` on the CPU.
        **options: ``drop_last`` (leave out an incomplete last global batch), ``shard`` (rank and
            number of ranks; default: the process group's), ``pin_memory`` (default "auto": pinned
            if CUDA is available), ``persistent_workers`` (default true: workers continue to run
            between passes) and other arguments of ``torch.utils.data.DataLoader``. Among these is
            ``sampler``, whose order is divided among the ranks: a ``WeightedSampler``, a
            ``SubsetSampler``, or any iterable of indices with a length. Of the batches of a
            ``batch_sampler`` each rank takes whole ones in turn. An order that is random must come
            from ``random``, ``torch`` or ``numpy.random``, which are seeded by ``seed`` and the
            pass, or from ``set_epoch``. Samplers with ``num_replicas`` or ``world_size`` are not
            divided.

    Raises:
        ValueError: the data set is empty, or an option does not fit it or another option.
        TypeError: ``in_memory`` needs an attribute ``tensors`` that the data set lacks, or there is
            an option that other arguments replace, such as ``generator``.
    """
    rank, world_size = options.pop("shard", None) or (get_rank(), get_world_size())
    drop_last = options.pop("drop_last", False)
    sampler, is_batched = _pop_sampler(options, batch_size, shuffle=shuffle, drop_last=drop_last)
    options["num_workers"] = num_workers
    _complete(options, collate, mix_seed(seed, rank))
    dataset = prepare_dataset(dataset, (rank, world_size), formatted=collate is None)
    kind = type(dataset).__name__
    epoch = WorkerEpoch(find_epoch_listeners(dataset, collate))
    if isinstance(dataset, IterableDataset):
        if shuffle or sampler is not None or in_memory not in (False, "auto"):
            setting = "shuffle must be false" if shuffle else "in_memory must be false"
            setting = setting if sampler is None else "sampler must be None"
            raise ValueError(f"{setting} for {kind}: an iterable data set is read in its own order")
        # A stream with a state gets the number of the pass from its `StreamLoader`.
        if num_workers and not isinstance(dataset, Stateful) and epoch.listeners:
            dataset = EpochStream(dataset, epoch)
        return DataLoader(dataset, batch_size=batch_size, drop_last=drop_last, **options)
    if not len(dataset):  # type: ignore[arg-type]
        raise ValueError(f"the data set {kind} is empty")
    samples = SeededSamples(dataset, epoch) if num_workers else dataset
    if knows_ranks(sampler):
        if not is_batched:
            sampler = BatchSampler(sampler, batch_size or 1, drop_last)
        return DataLoader(samples, batch_sampler=sampler, **options)
    size: int = len(dataset)  # type: ignore[arg-type]
    order = None
    if sampler is not None:
        order = SampleOrder(sampler, size, seed, batched=is_batched)
    shard: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "rank": rank, "order": order}
    shard |= {"world_size": world_size, "drop_last": drop_last, "even": train}
    batches = ShardedBatchSampler(size if order is None else len(order), batch_size or 1, **shard)
    if train and batches.num_samples < world_size:
        unit = "batches" if is_batched else "samples"
        warn_of_repetitions(kind, f"{batches.num_samples} {unit}", world_size, rank)
    if selects_rows(dataset, in_memory, num_workers, collate):
        device = None if isinstance(in_memory, bool) or in_memory == "auto" else in_memory
        return TensorLoader(dataset, batches, device, **options)
    return DataLoader(samples, batch_sampler=batches, **options)


def _pop_sampler(
    options: dict[str, Any], batch_size: int | None, *, shuffle: bool, drop_last: bool
) -> tuple[Any, bool]:
    """Remove the sampler of samples or batches from ``options``; return it and whether of batches.

    Raises:
        ValueError: other options determine the same.
    """
    sampler, batch_sampler = options.pop("sampler", None), options.pop("batch_sampler", None)
    if batch_sampler is None and batch_size is None:
        raise ValueError("build_loader needs batch_size or batch_sampler")
    excluded = {"shuffle": shuffle}
    if batch_sampler is not None:
        excluded |= {"sampler": sampler is not None, "batch_size": batch_size is not None}
        excluded |= {"drop_last": drop_last}
    elif sampler is None:
        return None, False
    for name in (name for name, is_set in excluded.items() if is_set):
        setting = "sampler" if batch_sampler is None else "batch_sampler"
        raise ValueError(f"{name} and {setting} exclude each other: the order is the {setting}'s")
    return (sampler, False) if batch_sampler is None else (batch_sampler, True)


def _complete(
    options: dict[str, Any], collate: Callable[[list[Any]], Any] | None, seed: int
) -> None:
    for name in _REPLACED.keys() & options.keys():
        raise TypeError(f"build_loader takes no {name}: {_REPLACED[name]}")
    options["collate_fn"] = collate
    # A separate generator, since creating an iterator must not change the global stream.
    options["generator"] = torch.Generator().manual_seed(seed)
    persistent = options.pop("persistent_workers", True)
    if options.setdefault("pin_memory", "auto") == "auto":
        options["pin_memory"] = can_pin_memory()
    if options["num_workers"]:
        options["persistent_workers"] = persistent
        options["worker_init_fn"] = WorkerStart(options.get("worker_init_fn"))
        chosen = options["collate_fn"]
        options["collate_fn"] = WorkerCollate(default_collate if chosen is None else chosen)


def warn_of_repetitions(name: str, amount: str, ranks: int, rank: int) -> None:
    """Warn, on the first rank, that some ranks train only on repetitions."""
    if rank == 0:
        logger.warning(
            "%s has only %s for %d ranks, so some ranks train on repetitions of what others train "
            "on: use fewer processes",
            *(name, amount, ranks),
        )


def get_length(loader: Iterable[Any]) -> int | None:
    """Return the number of batches; None if unknown."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:
        return None


def is_stream(loader: Any) -> bool:
    """Return whether a loader reads an iterable data set, whose length is only an estimate."""
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def has_exact_length(loader: Any) -> bool:
    """Return whether ``len(loader)`` is certain; a length stated by the user's code is an estimate.

    It is certain for sequences, and for DataLoaders of map-style data sets whose samplers are
    torch's or stepwrap's.
    """
    if isinstance(loader, FirstBatches):
        return has_exact_length(loader.loader)
    if isinstance(loader, Sequence):
        return True
    if not isinstance(loader, DataLoader) or is_stream(loader) or get_length(loader) is None:
        return False
    return uses_library_samplers(loader)


def uses_library_samplers(loader: DataLoader[Any]) -> bool:
    """Return whether the loader and its samplers have torch's or stepwrap's iteration."""
    batches = loader.batch_sampler
    # A loader that was divided among ranks.
    inner = getattr(batches, "undivided", batches)
    sources: list[Any] = [loader, batches, inner, loader.sampler, getattr(inner, "sampler", None)]
    kinds = {type(source) for source in sources if not isinstance(source, Sequence | None)}
    methods = [getattr(kind, name, None) for kind in kinds for name in ("__iter__", "__len__")]
    modules = {getattr(method, "__module__", "").partition(".")[0] for method in methods}
    return modules <= _LIBRARIES


class FirstBatches:
    """A loader that yields only the first batches of another loader.

    Args:
        loader: the other loader.
        count: the number of batches in a pass, at most.
    """

    def __init__(self, loader: Iterable[Any], count: int) -> None:
        self.loader = loader
        length = get_length(loader)
        self.count = count if length is None else min(count, length)
        self.dataset = getattr(loader, "dataset", None)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.loader, self.count)

    def set_epoch(self, epoch: int) -> None:
        set_epoch(self.loader, epoch)


def batches_from(
    loader: Iterable[Any], epoch: int, batch: int = 0, generators: DataGenerators | None = None
) -> Iterator[Any]:
    """Return the batches of pass ``epoch`` from batch ``batch`` on.

    Earlier batches are skipped by index if the loader is a sequence, if the order of its sampler is
    a function of the epoch, or if one of torch's samplers can draw it again. Otherwise they are
    read and discarded, with a warning.

    Args:
        loader: the loader.
        epoch: the number of the pass.
        batch: the first batch to return.
        generators: the generators of the loader, with their states when the pass began.
    """
    has_epochs = set_epoch(loader, epoch)
    generators = generators or DataGenerators()
    own_sampler = find_sampler(loader)
    if own_sampler is not None:
        own_sampler.set_position(epoch, batch)
        if batch:
            generators.rewind(loader, samples=False)
    if own_sampler is not None or (is_stream(loader) and not batch):
        # An uninterrupted run has drawn the seed of persistent workers in its first pass.
        is_drawn = epoch > 0 and keep_workers(loader)
        with preserved_generators([loader] if is_drawn else []):
            return iterate(loader)
    if not batch:
        return iterate(loader)
    if isinstance(loader, Sequence):
        return map(loader.__getitem__, range(batch, len(loader)))
    # The random streams were restored from the checkpoint and must not change here.
    with preserved_rng():
        if has_indices(loader):
            order = getattr(loader.batch_sampler, "sampler", None)
            is_drawn_at_once = uses_library_samplers(loader) and generators.know_order(loader)
            if has_epochs or isinstance(order, SequentialSampler) or is_drawn_at_once:
                generators.rewind(loader, samples=False)
                return _skip_by_index(loader, batch, is_first_pass=epoch == 0)
        generators.rewind(loader, samples=True)
        return _read_past(loader, batch)


def _skip_by_index(loader: DataLoader[Any], batch: int, *, is_first_pass: bool) -> Iterator[Any]:
    if is_first_pass or not keep_workers(loader):
        # Before the order, a DataLoader draws the seed of the workers that it starts.
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    sampler: Any = loader.batch_sampler
    indices = list(sampler)[batch:]
    with preserved_generators([loader]):
        return iterate(copy_with_batches(loader, indices, is_short=True))


def _read_past(loader: Iterable[Any], batch: int) -> Iterator[Any]:
    remedy = "a data set with state_dict() and load_state_dict()"
    if not is_stream(loader):
        remedy = "build_loader, or a loader with state_dict() and load_state_dict(),"
    logger.warning(
        "resuming at batch %d of %s by reading and discarding %d batches, which takes as long as "
        "the first time; if the order is random, the next batches differ from an uninterrupted "
        "run's; use %s to resume at once and exactly",
        *(batch, get_name(loader), batch, remedy),
    )
    begin = time.monotonic()
    batches = iterate(loader)
    next(itertools.islice(batches, batch, batch), None)
    logger.info("reading and discarding %d batches took %.1f s", batch, time.monotonic() - begin)
    return batches


def set_epoch(loader: Iterable[Any], epoch: int) -> bool:
    """Call ``set_epoch`` of the loader, its samplers, its data sets and its collator.

    Returns whether the loader or a sampler has the method, so that it determines the order.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)
    order: list[Any] = [loader, batch_sampler, *samplers]
    ordered = [sampler for sampler in order if hasattr(sampler, "set_epoch")]
    dataset, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    listeners: list[Any] = [*ordered, *find_epoch_listeners(dataset, collate)]
    for listener in {id(listener): listener for listener in listeners}.values():
        listener.set_epoch(epoch)
    return bool(ordered)


def peek_first_batch(loader: Iterable[Any]) -> Iterator[Any] | None:
    """Return an iterator over the first batch alone; None if reading would change ``loader``."""
    if isinstance(loader, Sequence):
        return itertools.islice(loader, 1)
    return _aside(loader, 1) if has_indices(loader) else None


def read_aside(loader: Iterable[Any]) -> Iterator[Any]:
    """Return the batches of one pass, even while another pass is being read.

    It is pass 0 for a loader of ``build_loader``, or the running pass if it has a sampler. A
    DataLoader of a map-style data set is not changed. Any other loader is iterated once more, so
    its next pass must not depend on earlier ones.

    Raises:
        ValueError: ``loader`` reads a stream or has a ``state_dict``. Reading would change its
            position.
    """
    if has_indices(loader):
        return _aside(loader, None)
    if is_stream(loader) or hasattr(loader, "state_dict"):
        raise ValueError(
            f"the training data must be readable a second time, but {get_name(loader)} reads a "
            "stream or has a position; use a map-style data set, or set update_bn: false"
        )
    return iter(loader)


def has_indices(loader: Iterable[Any]) -> TypeGuard[DataLoader[Any]]:
    """Return whether an iteration reads the batches of indices that a batch sampler yields."""
    plain = DataLoader.__iter__, TensorLoader.__iter__
    if not isinstance(loader, DataLoader) or type(loader).__iter__ not in plain:
        return False
    return not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None


def _aside(loader: DataLoader[Any], most: int | None) -> Iterator[Any]:
    """Yield the first ``most`` batches of a pass, or all, and leave ``loader`` unchanged."""
    with batch_sampler_copy(loader) as sampler:
        indices = list(itertools.islice(sampler, most))
        yield from copy_with_batches(
            loader, indices, workers=min(len(indices), loader.num_workers), is_short=True
        )


@contextmanager
def batch_sampler_copy(loader: DataLoader[Any]) -> Iterator[Any]:
    """Give a copy of the batch sampler, and restore the generators of the loader after the block.

    A sampler of ``build_loader`` begins with pass 0, or with the running pass if drawing another
    order might change it.
    """
    sampler = copy(loader.batch_sampler)
    order = getattr(sampler, "sampler", None)
    if order is not None:
        vars(sampler)["sampler"] = copy(order)
    if isinstance(sampler, ShardedBatchSampler):
        sampler.set_position(0 if sampler.order is None else max(0, sampler.order.epoch))
    with _preserved_generators(loader):
        yield () if sampler is None else sampler


@contextmanager
def _preserved_generators(loader: DataLoader[Any]) -> Iterator[None]:
    dataset: Any = loader.dataset
    datasets = [dataset]
    while (dataset := getattr(dataset, "dataset", None)) is not None and len(datasets) < 9:
        datasets.append(dataset)
    order = getattr(loader.batch_sampler, "sampler", None)
    with preserved_generators([loader, loader.batch_sampler, order, *datasets]):
        yield


def start_persistent_workers(loader: Iterable[Any]) -> None:
    """Start the workers that an uninterrupted run would have started in an earlier pass.

    A DataLoader draws the seed of its workers from the same generator as the order. If it has
    persistent workers, it does so only in its first pass.
    """
    if has_indices(loader) and find_sampler(loader) is None and loader._iterator is None:
        with preserved_rng(), _preserved_generators(loader):
            iterate(loader)


def copy_with_batches(
    loader: DataLoader[Any],
    batches: Any,
    *,
    workers: int | None = None,
    is_short: bool = False,
    seed: int | None = None,
) -> DataLoader[Any]:
    """Return a copy of ``loader`` that reads the batches with the given indices.

    Args:
        loader: a loader of a map-style data set.
        batches: lists of indices, or a batch sampler.
        workers: the number of workers; default: the loader's.
        is_short: whether workers end with the pass even if the loader's do not.
        seed: the seed of the workers; default: from the loader's generator.
    """
    names = ["collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator"]
    count = loader.num_workers if workers is None else workers
    if count:
        names += ["prefetch_factor", "multiprocessing_context"]
        names += [] if is_short else ["persistent_workers"]
    options: dict[str, Any] = {name: getattr(loader, name) for name in names}
    if seed is not None:
        options["generator"] = torch.Generator().manual_seed(seed)
    return DataLoader(loader.dataset, batch_sampler=batches, num_workers=count, **options)
