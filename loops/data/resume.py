"""Continue inside a pass, from the saved position of a loader or from the batch number."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ...collectives import get_rank
from ...wrappers.steps.preprocess import get_device
from ...wrappers.unwrap import num_data_ranks
from ..rng import DataGenerators, mix_seed, preserved_rng, seed_rng
from ..state import LoopState, Stateful
from .layout import IN_ROUNDS, ORDER
from .loaders import batches_from, is_stream, set_epoch, start_persistent_workers
from .prefetch import can_read_ahead, prefetch_to_device
from .sampler import compare_orders, find_sampler
from .workers import find_epoch_listeners, iterate, keep_workers

logger = logging.getLogger(__name__)

# DataLoader reads one batch from each worker in turn. If the saved position is inside such a round,
# workers whose batch was already read yield a batch of these placeholders.
_SKIPPED = object()
_OPTIONS = (
    *("batch_size", "drop_last", "num_workers", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator", "prefetch_factor", "persistent_workers", "in_order"),
)


def batches_of_pass(loader: Iterable[Any], state: LoopState, prefetch: bool) -> Iterator[Any]:
    """Return the remaining batches of the running pass; with ``prefetch``, on the model's device.

    Sets ``state.data.reader`` to the object that reports the position, or to None.
    """
    if keep_workers(loader) and state.iteration and not state.batch:
        start_persistent_workers(loader)
    place, state.data.reader_state = state.data.reader_state, None
    if place is None and state.batch and state.data.reader is not None:
        # Training continues in the process that has begun the pass.
        place = state.data.reader.state_dict()
    _check_order(loader, state)
    ranks = num_data_ranks(state.model) if state.data.layout.get(IN_ROUNDS) else 1
    done = state.batch * ranks
    generators = state.data.generators
    generators.start_pass(loader, done)
    batches, state.data.reader = _batches_and_source(loader, state.epoch, done, place, generators)
    if not prefetch:
        return batches
    return prefetch_to_device(batches, get_device(state.model), ahead=can_read_ahead(loader))


def _check_order(loader: Iterable[Any], state: LoopState) -> None:
    """Compare the order of a sampler among the ranks, and with a pass's order before a resume."""
    saved, order = state.data.layout.pop(ORDER, None), compare_orders(loader, state.epoch)
    if order is None:
        return
    state.data.layout[ORDER] = order
    if state.batch and saved not in (None, order) and get_rank() == 0:
        logger.warning(
            "the sampler draws another order for pass %d than before the resume, so that samples "
            "may be repeated or missing: its data, its settings or a state that is not in its "
            "set_epoch have changed",
            state.epoch,
        )


def _batches_and_source(
    loader: Iterable[Any], epoch: int, batch: int, position: Any, generators: DataGenerators
) -> tuple[Iterator[Any], Stateful | None]:
    """Return the batches and the object that reports their position, if there is one.

    ``position`` is the saved position to start from; None to start from ``epoch`` and ``batch``.
    """
    if position is None:
        batches = batches_from(loader, epoch, batch, generators)
        return batches, _position_source(loader, batches)
    set_epoch(loader, epoch)
    # The random streams were restored from the checkpoint and must not change here.
    with preserved_rng():
        if isinstance(loader, Stateful):
            _load(loader, position, loader)
        batches = iterate(loader)
        source = _position_source(loader, batches)
        if source is None:
            logger.warning(
                "%s cannot restore its position from the checkpoint", type(loader).__name__
            )
            return batches_from(loader, epoch, batch, generators), None
        if not isinstance(loader, Stateful):
            _load(source, position, loader)
    if batch:
        return batches, source
    if isinstance(loader, DataLoader) and not (loader.generator or loader.persistent_workers):
        # Draw the seed of the workers, like any DataLoader at the beginning of a pass.
        torch.empty((), dtype=torch.int64).random_()
    for first_batch in batches:
        return itertools.chain([first_batch], batches), source
    # The saved position was the end of the previous pass.
    batches = iterate(loader)
    return batches, _position_source(loader, batches)


def _position_source(loader: Iterable[Any], batches: Iterator[Any]) -> Stateful | None:
    """Return the object that reports the position of a loader, or None.

    A loader of ``build_loader`` needs no such object: its position is the number of the batch.
    """
    if find_sampler(loader) is not None:
        return None
    for source in (loader, batches):
        if isinstance(source, Stateful):
            return source
    batch_source: Any = batches
    is_grain = hasattr(batch_source, "get_state") and hasattr(batch_source, "set_state")
    return _Renamed(batch_source.get_state, batch_source.set_state) if is_grain else None


def _load(source: Stateful, position: Any, loader: Iterable[Any]) -> None:
    try:
        source.load_state_dict(position)
    except Exception as error:
        raise ValueError(
            f"{type(loader).__name__} cannot continue from its position in the checkpoint: "
            f"{type(error).__name__}: {error}"
        ) from error


@dataclass
class _Renamed:
    """Offer ``get_state`` and ``set_state`` of grain's iterators as the methods of ``Stateful``."""

    state_dict: Callable[[], Any]
    load_state_dict: Callable[[Any], Any]


class FixedPosition:
    """The position of a reader before it reached the end of its data.

    At the end, a reader may begin its next pass.
    """

    def __init__(self, reader: Stateful) -> None:
        # Copied, because a reader may change the state that it returned.
        self._place = deepcopy(reader.state_dict())

    def state_dict(self) -> Any:
        return self._place

    def load_state_dict(self, state: Any, /) -> None:
        self._place = state


def make_resumable(loader: Any) -> Any:
    """Return a loader that reports its position if its data set does, otherwise ``loader``."""
    is_stateful = is_stream(loader) and isinstance(loader.dataset, Stateful)
    return StreamLoader(loader) if is_stateful and type(loader) is DataLoader else loader


class StreamLoader(DataLoader[Any]):
    """A resumable copy of a plain DataLoader over a stateful iterable data set.

    Its state contains the state of each worker's copy of the data set after the last batch that
    was returned, no matter how many have been read ahead. The random streams of workers are a
    function of (seed, epoch, worker, batch), so that augmentations continue as well.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        stream = Stream(loader.dataset, loader.batch_size or 1)
        options: dict[str, Any] = {name: getattr(loader, name) for name in _OPTIONS}
        super().__init__(stream, collate_fn=_Collate(loader.collate_fn, stream), **options)
        # If workers end with the pass, the next pass begins with fresh copies of the data set.
        stream.keeps_workers = not self.num_workers or self.persistent_workers
        self._stream = stream
        self._places: list[dict[str, Any] | None] = [None] * max(1, self.num_workers)
        # The worker that read the last batch of this pass; -1 at its beginning.
        self._last = -1
        self._seed: int | None = None

    def __iter__(self) -> Any:
        stream, epoch = self._stream, self._stream.epoch
        if stream.restored is None:
            self._last = -1
            self._places = [
                position if position and position["epoch"] != epoch else None
                for position in self._places
            ]
        if self._seed is None:
            self._seed = (self.generator or torch.default_generator).initial_seed()
        stream.seed = self._seed
        # Not a generator function: workers start now, and draw their seed as in any DataLoader.
        batches = super().__iter__()
        # The workers have a copy of `restored` by now; workers of the next pass must not get it.
        stream.restored = None
        return self._record_positions(batches)

    def _record_positions(self, batches: Iterator[Any]) -> Iterator[Any]:
        for worker, position, batch in batches:
            if position is not None:
                self._places[worker], self._last = position, worker
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was returned."""
        position = {"epoch": self._stream.epoch, "last": self._last, "seed": self._seed}
        return {**position, "workers": list(self._places)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position of the next iteration.

        Raises:
            ValueError: the position is inside a pass that was begun with another number of
                workers.
        """
        saved, now = len(state["workers"]), len(self._places)
        inside = state["epoch"] == self._stream.epoch
        if saved != now and inside:
            raise ValueError(
                f"num_workers must be {saved} until the end of this pass, as at its beginning, got "
                f"{self.num_workers}: each worker has read a separate part of "
                f"{type(self._stream.samples).__name__}"
            )
        # Persistent workers of an earlier pass would keep their position.
        self._iterator = None
        self._seed = state["seed"]
        self._last = state["last"] if inside else -1
        self._places = list(state["workers"]) if saved == now else [None] * now
        self._stream.restored = (self._last, list(self._places))


class Stream(IterableDataset[Any]):
    """A wrapper of an iterable data set that saves and restores the position of each worker."""

    follows_epochs = True

    def __init__(self, samples: Any, batch_size: int) -> None:
        self.samples = samples
        self.batch_size = batch_size
        self.seed = 0
        self.keeps_workers = True
        # For the next iteration: the worker of the last batch, and the positions by worker.
        self.restored: tuple[int, list[dict[str, Any] | None]] | None = None
        # Shared with the workers, which may outlive a pass.
        self._epoch = torch.zeros((), dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]
        self.worker = 0
        self._batches = 0
        self._ended = False

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Begin a pass; called in the process of the loader."""
        self._epoch.fill_(epoch)
        getattr(self.samples, "set_epoch", lambda _: None)(epoch)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator function: `restored` is only for this iteration.
        restored, self.restored = self.restored, None
        info = get_worker_info()
        self.worker = 0 if info is None else info.id
        self._batches, self._ended = 0, False
        return self._read(*(restored or (-1, [])))

    def _read(self, last_worker: int, positions: list[dict[str, Any] | None]) -> Iterator[Any]:
        # The DataLoader starts each round with worker 0, but `last` may be inside a round.
        if self.worker <= last_worker < len(positions) - 1:
            yield from [_SKIPPED] * self.batch_size
        position = positions[self.worker] if positions else None
        if position is not None:
            with preserved_rng():
                self._restore(position)
        # The workers' copies may share the epoch in memory (Hugging Face's data sets do): write
        # it only if it differs.
        if getattr(self.samples, "epoch", None) != self.epoch:
            getattr(self.samples, "set_epoch", lambda _: None)(self.epoch)
        self._start_batch()
        if not self._ended:
            yield from self.samples if position is None else self._restored_samples()
            self._ended = True

    def _restored_samples(self) -> Iterator[Any]:
        samples = iter(self.samples)
        try:
            # The data sets of Hugging Face load their state here.
            head = list(itertools.islice(samples, 1))
        except LookupError as error:
            raise ValueError(
                f"{type(self.samples).__name__} cannot load its state from the checkpoint "
                f"({type(error).__name__}: {error}). To resume a shuffled stream of Hugging Face "
                "with several workers, start the run with shuffle(buffer_size=1, "
                "max_buffer_input_shards=1)"
            ) from error
        yield from head
        yield from samples

    def _restore(self, position: dict[str, Any]) -> None:
        inside = position["epoch"] == self.epoch
        if inside:
            self.samples.load_state_dict(position["samples"])
            self._batches, self._ended = position["batches"], position["ended"]
        elif self.keeps_workers and not hasattr(self.samples, "set_epoch"):
            # Restore what the data set keeps between passes, such as its generator.
            self.samples.load_state_dict(position["samples"])
            if not position["ended"]:
                for _ in self.samples:
                    pass

    def place(self) -> dict[str, Any]:
        """Return the position of this copy after a batch, and begin the next batch."""
        # Copied, since a worker continues to read while the state is being sent.
        state = deepcopy(self.samples.state_dict())
        self._batches += 1
        self._start_batch()
        return {
            "samples": state,
            "batches": self._batches,
            "ended": self._ended,
            "epoch": self.epoch,
        }

    def _start_batch(self) -> None:
        if get_worker_info() is not None:
            seed_rng(mix_seed(self.seed, self.epoch, self.worker, self._batches))


class _Collate:
    """Make a batch, and add its worker and the position after it."""

    def __init__(self, collate: Any, stream: Stream) -> None:
        self.collate = collate
        self.stream = stream
        self._listeners = find_epoch_listeners(collate)
        self._epoch = 0

    def __call__(self, samples: Any) -> tuple[int, dict[str, Any] | None, Any]:
        sample = samples[0] if type(samples) is list and samples else samples
        if sample is _SKIPPED:
            return self.stream.worker, None, None
        if self._listeners and self._epoch != self.stream.epoch:
            self._epoch = self.stream.epoch
            for listener in self._listeners:
                listener.set_epoch(self._epoch)
        batch = self.collate(samples)
        return self.stream.worker, self.stream.place(), batch
