"""Going on inside a pass: from the place that a loader tells, or one found again."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..checkpoints.weights import device_of
from ..rng import mix_seed, preserved_rng, seed_rng
from ..state import LoopState, Stateful
from .loaders import batches_from, is_stream, set_epoch
from .prefetch import prefetch_to_device, reads_ahead
from .sampler import sampler_of
from .workers import iterate

logger = logging.getLogger(__name__)

# What a worker yields, a batch of them, where its turn in the round has already been.
_PASSED = object()
_OPTIONS = (
    *("batch_size", "drop_last", "num_workers", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator", "prefetch_factor", "persistent_workers", "in_order"),
)


def batches_of_pass(loader: Iterable[Any], state: LoopState, prefetch: bool) -> Iterator[Any]:
    """Return the batches of the running pass that are left; `prefetch` them to the model's device.

    If the loader or its iterator can report its place, it becomes `state.data.reader`.
    """
    place, state.data.reader_state = state.data.reader_state, None
    if place is None and state.batch and state.data.reader is not None:
        # The run goes on in the process that has begun the pass.
        place = state.data.reader.state_dict()
    batches, state.data.reader = _with_place(loader, state.epoch, state.batch, place)
    if not prefetch:
        return batches
    return prefetch_to_device(batches, device_of(state.model), ahead=reads_ahead(loader))


def _with_place(
    loader: Iterable[Any], epoch: int, batch: int, place: Any
) -> tuple[Iterator[Any], Stateful | None]:
    """Return batches, from a place that was saved if there is one, and what tells theirs."""
    if place is None:
        batches = batches_from(loader, epoch, batch)
        return batches, _teller(loader, batches)
    set_epoch(loader, epoch)
    # The random streams come from the checkpoint: finding the place must not move them.
    with preserved_rng():
        if isinstance(loader, Stateful):
            _load(loader, place, loader)
        batches = iterate(loader)
        teller = _teller(loader, batches)
        if teller is None:
            logger.warning("%s cannot take its place in the checkpoint", type(loader).__name__)
            return batches_from(loader, epoch, batch), None
        if not isinstance(loader, Stateful):
            _load(teller, place, loader)
    if batch:
        return batches, teller
    if isinstance(loader, DataLoader) and not (loader.generator or loader.persistent_workers):
        # As any iterator of a DataLoader does that begins a pass, for the seed of its workers.
        torch.empty((), dtype=torch.int64).random_()
    for first in batches:
        return itertools.chain([first], batches), teller
    # The place was the end of the pass before.
    batches = iterate(loader)
    return batches, _teller(loader, batches)


def _teller(loader: Iterable[Any], batches: Iterator[Any]) -> Stateful | None:
    """Return what tells the place of the batches; None where their order is known by index."""
    if sampler_of(loader) is not None:
        return None
    for one in (loader, batches):
        if isinstance(one, Stateful):
            return one
    own: Any = batches
    is_grain = hasattr(own, "get_state") and hasattr(own, "set_state")
    return _Renamed(own.get_state, own.set_state) if is_grain else None


def _load(teller: Stateful, place: Any, loader: Iterable[Any]) -> None:
    try:
        teller.load_state_dict(place)
    except Exception as error:
        raise ValueError(
            f"{type(loader).__name__} cannot go on from its place in the checkpoint: "
            f"{type(error).__name__}: {error}"
        ) from error


@dataclass
class _Renamed:
    """An iterator's place under the names of a `Stateful`, where its own are those of grain."""

    state_dict: Callable[[], Any]
    load_state_dict: Callable[[Any], Any]


def telling(loader: Any) -> Any:
    """Return a loader like `loader` that tells its place, if its data set does; else itself."""
    tells = is_stream(loader) and isinstance(loader.dataset, Stateful)
    return StreamLoader(loader) if tells and type(loader) is DataLoader else loader


class StreamLoader(DataLoader[Any]):
    """Gives the batches of a plain `loader` over an iterable data set, and tells its place.

    Its state is that of each worker's copy of the data set after the last batch that was given
    out, however many have been read ahead. The random streams of workers are a function of
    (seed, epoch, worker, batch), so that augmentations go on as well.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        stream = Stream(loader.dataset, loader.batch_size or 1)
        options: dict[str, Any] = {name: getattr(loader, name) for name in _OPTIONS}
        super().__init__(stream, collate_fn=_Collate(loader.collate_fn, stream), **options)
        # Where workers end with the pass, the next one begins with fresh copies of the data set.
        stream.stays = not self.num_workers or self.persistent_workers
        self._stream = stream
        self._places: list[dict[str, Any] | None] = [None] * max(1, self.num_workers)
        # The worker that gave the last batch of this pass.
        self._last = -1
        self._seed: int | None = None

    def __iter__(self) -> Any:
        stream, epoch = self._stream, self._stream.epoch
        if stream.restored is None:
            self._last = -1
            self._places = [one if one and one["epoch"] != epoch else None for one in self._places]
        if self._seed is None:
            self._seed = (self.generator or torch.default_generator).initial_seed()
        stream.seed = self._seed
        # No generator itself: workers start now, and draw their seed as in any DataLoader.
        batches = super().__iter__()
        # Workers have it by now; those of the next pass must not.
        stream.restored = None
        return self._noting_places(batches)

    def _noting_places(self, batches: Iterator[Any]) -> Iterator[Any]:
        for worker, place, batch in batches:
            if place is not None:
                self._places[worker], self._last = place, worker
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last batch that was given out."""
        place = {"epoch": self._stream.epoch, "last": self._last, "seed": self._seed}
        return {**place, "workers": list(self._places)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on from there; ValueError inside a pass of other workers."""
        saved, now = len(state["workers"]), len(self._places)
        inside = state["epoch"] == self._stream.epoch
        if saved != now and inside:
            raise ValueError(
                f"num_workers must be {saved} to the end of this pass, as when it began, got "
                f"{self.num_workers}: each worker has read a part of its own of "
                f"{type(self._stream.samples).__name__}"
            )
        # Those that live on from an earlier pass would not hear of it.
        self._iterator = None
        self._seed = state["seed"]
        self._last = state["last"] if inside else -1
        self._places = list(state["workers"]) if saved == now else [None] * now
        self._stream.restored = (self._last, list(self._places))


class Stream(IterableDataset[Any]):
    """An iterable data set that goes on from where it, or a worker's copy of it, was."""

    def __init__(self, samples: Any, batch_size: int) -> None:
        self.samples = samples
        self.batch_size = batch_size
        self.seed = 0
        self.stays = True
        # For the next iteration: the worker that gave the last batch, and the places by worker.
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
        """Begin a pass; called in the process that has the loader."""
        self._epoch.fill_(epoch)
        getattr(self.samples, "set_epoch", lambda _: None)(epoch)

    def __iter__(self) -> Iterator[Any]:
        # No generator itself: what was restored is for this iteration alone.
        restored, self.restored = self.restored, None
        info = get_worker_info()
        self.worker = 0 if info is None else info.id
        self._batches, self._ended = 0, False
        return self._read(*(restored or (-1, [])))

    def _read(self, last: int, places: list[dict[str, Any] | None]) -> Iterator[Any]:
        # A round of batches begins with worker 0, and `last` need not be the last of its round.
        if self.worker <= last < len(places) - 1:
            yield from [_PASSED] * self.batch_size
        place = places[self.worker] if places else None
        if place is not None:
            with preserved_rng():
                self._go_on_from(place)
        # Not where it knows already: copies may share the number, as those of Hugging Face do.
        if getattr(self.samples, "epoch", None) != self.epoch:
            getattr(self.samples, "set_epoch", lambda _: None)(self.epoch)
        self._start_batch()
        if not self._ended:
            yield from self.samples if place is None else self._restored_samples()
            self._ended = True

    def _restored_samples(self) -> Iterator[Any]:
        samples = iter(self.samples)
        try:
            # Hugging Face's loads its state here.
            first = list(itertools.islice(samples, 1))
        except LookupError as error:
            raise ValueError(
                f"{type(self.samples).__name__} cannot load its state in the checkpoint "
                f"({type(error).__name__}: {error}). A shuffled stream of Hugging Face can be "
                "resumed with several workers if the run was started with shuffle(buffer_size=1, "
                "max_buffer_input_shards=1)"
            ) from error
        yield from first
        yield from samples

    def _go_on_from(self, place: dict[str, Any]) -> None:
        inside = place["epoch"] == self.epoch
        if inside:
            self.samples.load_state_dict(place["samples"])
            self._batches, self._ended = place["batches"], place["ended"]
        elif self.stays and not hasattr(self.samples, "set_epoch"):
            # What it remembers from pass to pass, such as a generator of its own.
            self.samples.load_state_dict(place["samples"])
            if not place["ended"]:
                for _ in self.samples:
                    pass

    def place(self) -> dict[str, Any]:
        """Return where this copy is after a batch; the next one begins."""
        # Copied, since a worker sends it while it reads on.
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
    """Makes a batch, and adds the worker that has read it and the place after it."""

    def __init__(self, collate: Any, stream: Stream) -> None:
        self.collate = collate
        self.stream = stream

    def __call__(self, samples: Any) -> tuple[int, dict[str, Any] | None, Any]:
        first = samples[0] if type(samples) is list and samples else samples
        if first is _PASSED:
            return self.stream.worker, None, None
        batch = self.collate(samples)
        return self.stream.worker, self.stream.place(), batch
