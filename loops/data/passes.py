"""What is left of a pass over the training data, from a place that was saved or found again."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..rng import preserved_rng
from ..state import LoopState, Stateful
from .loaders import batches_from, set_epoch
from .sampler import ShardedBatchSampler

logger = logging.getLogger(__name__)


def batches_of_pass(loader: Iterable[Any], state: LoopState) -> Iterator[Any]:
    """Return the batches of the running pass that are left.

    From then on `state.reader` tells where they are, if the loader or its iterator can.
    """
    place, state.reader_state = state.reader_state, None
    if place is None and state.batch and state.reader is not None:
        # The run goes on in the process that has begun the pass.
        place = state.reader.state_dict()
    batches, state.reader = _with_place(loader, state.epoch, state.batch, place)
    return batches


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
        batches = iter(loader)
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
    batches = iter(loader)
    return batches, _teller(loader, batches)


def _teller(loader: Iterable[Any], batches: Iterator[Any]) -> Stateful | None:
    """Return what tells the place of the batches; None where their order is known by index."""
    if isinstance(getattr(loader, "batch_sampler", None), ShardedBatchSampler):
        return None
    return loader if isinstance(loader, Stateful) else _StatefulIterator.of(batches)


def _load(teller: Stateful, place: Any, loader: Iterable[Any]) -> None:
    try:
        teller.load_state_dict(place)
    except Exception as error:
        raise ValueError(
            f"{type(loader).__name__} cannot go on from its place in the checkpoint: "
            f"{type(error).__name__}: {error}"
        ) from error


class _StatefulIterator:
    """An iterator's place as a state, also where it names it as those of grain do."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self.state_dict = get
        self.load_state_dict = put

    @classmethod
    def of(cls, batches: Iterator[Any]) -> _StatefulIterator | None:
        for get, put in (("state_dict", "load_state_dict"), ("get_state", "set_state")):
            if hasattr(batches, get) and hasattr(batches, put):
                return cls(getattr(batches, get), getattr(batches, put))
        return None
