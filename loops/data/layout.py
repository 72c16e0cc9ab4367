"""Split the data into updates that keep their samples when the number of ranks changes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...collectives import get_rank
from ...wrappers.features import model_features, optim_features
from ...wrappers.unwrap import num_data_ranks
from ..schedule import get_members, get_window, has_gradients, is_weighted
from ..state import LoopState
from .sampler import ShardedBatchSampler, find_sampler

logger = logging.getLogger(__name__)

_SHOWN = 16
# The key, in a layout, of a length that a loader states and that was wrong.
WRONG_LENGTH = "wrong_length"
# The key of whether the ranks read the same batches, and each takes its own from each round.
IN_ROUNDS = "in_rounds"
# The key of a digest of the running pass's order, if a sampler draws it.
ORDER = "order"


@dataclass(frozen=True)
class _Update:
    """The size of an update, and the restrictions on how to split it.

    Attributes:
        size: samples, over all ranks.
        equal: whether all ranks must have equally many samples, since their mean losses have equal
            weights.
        only: the only allowed number of batches on each rank; None for any.
        unit: "samples", or "batches" that are not divided.
    """

    size: int
    equal: bool
    only: int | None
    unit: str = "samples"

    def batches(self, ranks: int, batch_size: int) -> int | None:
        """Return the smallest possible number of batches on each rank; None if there is none."""
        if self.equal and self.size % ranks:
            return None
        least = -(-self.size // (ranks * batch_size))
        most = self.size // ranks if self.equal else least
        for count in range(least, most + 1) if self.only is None else [self.only]:
            if count >= least and not (self.equal and self.size % (count * ranks)):
                return count
        return None

    def error_message(self, ranks: int, batch_size: int) -> str:
        """Explain why these ranks cannot split the update, and which numbers of ranks can."""
        counts = [str(n) for n in range(1, self.size + 1) if self.batches(n, batch_size)]
        more = ", ..." if len(counts) > _SHOWN else ""
        remedies = [f"{', '.join(counts[:_SHOWN])}{more} as the number of ranks"] if counts else []
        is_divided = self.unit == "samples"
        sizes = (n for n in range(batch_size + 1, self.size + 1) if self.batches(ranks, n))
        if is_divided and (larger := next(sizes, None)) is not None:
            remedies.append(f"batch_size >= {larger} with {ranks}")
        if self.equal:
            remedies.append("optim_wrapper.loss_weight: samples, with any number of ranks")
        suffix = "" if self.only is None else f" in {self.only} batches of each rank"
        batch = f" with batch_size {batch_size}" if is_divided else ""
        return (
            f"an update of this run has {self.size} {self.unit}, which {ranks} ranks{batch} cannot "
            f"share{' equally' if self.equal else ''}{suffix}. Use {'; or '.join(remedies)}"
        )


def split_into_updates(state: LoopState, loader: Iterable[Any]) -> None:
    """Split the training data into updates; every rank must call this before it counts batches.

    After a resume an update has the same number of samples on any number of ranks, and the next
    update begins with the next sample of the epoch's order. ``state.batch``, ``state.iteration``
    and the accumulation are converted to the new batches. A loader that ``build_loader`` did not
    create continues at the same fraction of the pass, for example after half as many batches if
    there are twice as many ranks. Some samples may then be repeated or missing.

    Raises:
        ValueError: these ranks cannot split an update; the message says which numbers can.
    """
    sampler = find_sampler(loader)
    if sampler is None:
        _skip_same_fraction(state)
        return
    weighted, window = is_weighted(state.optim_wrapper), get_window(state.optim_wrapper) or 1
    saved = _saved(state, sampler, window)
    is_same_data = saved["samples"] == sampler.num_samples
    # The saved length may include samples that were repeated to make the ranks even. With a
    # `loss_weight` nothing is repeated, so cap the length at the number of samples.
    most = saved["samples"] if weighted else saved["length"]
    epoch_samples = min(saved["length"], most) if is_same_data else None
    only = _fixed_count(state, saved, weighted)
    update = _Update(saved["global_batch"], equal=not weighted, only=only, unit=sampler.unit)
    count = update.batches(sampler.world_size, sampler.batch_size)
    if count is None:
        raise ValueError(update.error_message(sampler.world_size, sampler.batch_size))
    sampler.cut(
        update.size,
        count,
        epoch_samples=epoch_samples,
        same_batch_count=not weighted and count != update.size // saved["run"],
        weighted=weighted,
    )
    if count != window:
        get_members(state.optim_wrapper)[0].accumulate(count, since=0)
    _warn_of_changes(sampler, saved, window)
    if weighted or count != saved["micro_batches"]:
        _convert_counters(state, saved, sampler)
    state.data.layout = {
        **saved,
        "samples": sampler.num_samples,
        "length": sampler.epoch_samples,
        "micro_batches": count,
        "batches": sampler.batches,
        "ranks": sampler.world_size,
    }


def _saved(state: LoopState, sampler: ShardedBatchSampler, window: int) -> dict[str, int]:
    """Return how the data was split before the resume; in a new run, how the settings split it."""
    before: Mapping[str, int] = state.data.layout
    same = before.get("global_batch") == sampler.global_batch
    if state.restored_from is None and not same:
        # An earlier training of this process had another loader.
        before = {}
    ranks = before.get("ranks", sampler.world_size)
    # A chunk has the samples of one batch on every rank. Layouts store its size as "run", and the
    # number of samples in an epoch as "length".
    chunk = before.get("run", sampler.batch_size * ranks)
    sampler.cut(chunk * window, window, weighted=is_weighted(state.optim_wrapper))
    present = {
        "global_batch": chunk * window,
        "micro_batches": window,
        "run": chunk,
        "ranks": ranks,
        "samples": sampler.num_samples,
        "length": sampler.epoch_samples,
        "batches": sampler.batches,
    }
    return {**present, **before}


def _fixed_count(state: LoopState, saved: Mapping[str, int], weighted: bool) -> int | None:
    """Return the batches per update if their number must not change, otherwise None."""
    members = get_members(state.optim_wrapper)
    uneven = model_features(state.model).uneven_inputs is not None and not weighted
    closure = optim_features(members[0]).needs_closure
    able = len(members) == 1 and hasattr(members[0], "accumulate") and not (uneven or closure)
    # Without a `loss_weight`, an accumulation window may continue in the next epoch.
    chunks = -(-saved["length"] // saved["run"])
    ends_with_epoch = weighted or chunks % (saved["global_batch"] // saved["run"]) == 0
    return None if able and ends_with_epoch else saved["micro_batches"]


def _convert_counters(
    state: LoopState, saved: Mapping[str, int], sampler: ShardedBatchSampler
) -> None:
    """Convert ``batch`` and ``iteration`` to the new batches."""
    before, window = state.batch, saved["micro_batches"]
    if before >= saved["batches"]:
        state.batch = sampler.batches
    else:
        if before % window:
            _restart_update(state)
        state.batch = before // window * sampler.micro_batches
    if sampler.micro_batches == window:
        state.iteration += state.batch - before
    else:
        state.iteration = state.epoch * sampler.batches + state.batch


def _restart_update(state: LoopState) -> None:
    """Drop the gradients of an incomplete update, whose batches may be split differently now."""
    state.optim_wrapper.zero_grad()
    logger.warning("the incomplete update starts again, with the same samples")


def _warn_of_changes(sampler: ShardedBatchSampler, saved: Mapping[str, int], window: int) -> None:
    if get_rank() != 0:
        return
    if sampler.global_batch != sampler.batch_size * sampler.world_size * window:
        count, ranks = sampler.micro_batches, sampler.world_size
        size = -(-sampler.global_batch // (count * ranks))
        sizes = (
            f", and a batch has up to {size} samples on each of {ranks} ranks "
            f"(data.train.batch_size is {sampler.batch_size})"
        )
        logger.warning(
            "an update keeps its %d %s: accumulative_counts is now %d%s",
            *(sampler.global_batch, sampler.unit, count),
            sizes if sampler.unit == "samples" else "",
        )
    if sampler.padded_samples > sampler.epoch_samples:
        logger.warning(
            "the last update of an epoch has %d %s, which the ranks cannot share equally, so "
            "that some are repeated; set optim_wrapper.loss_weight=samples to avoid this",
            *(saved["length"] % sampler.global_batch, sampler.unit),
        )


def _skip_same_fraction(state: LoopState) -> None:
    """Continue at the same fraction of the pass if the number of ranks has changed."""
    now = num_data_ranks(state.model)
    before = state.data.layout.get("ranks", now)
    if before != now and state.batch:
        logger.warning(
            "the epoch stopped after %d batches on %d ranks and continues at the same fraction on "
            "%d: samples may be repeated or missing; use build_loader for an exact order",
            *(state.batch, before, now),
        )
        state.batch = state.batch * before // now
    if is_weighted(state.optim_wrapper) and has_gradients(state.model):
        begun = state.batch % (get_window(state.optim_wrapper) or 1)
        state.batch, state.iteration = state.batch - begun, state.iteration - begun
        _restart_update(state)
    names = WRONG_LENGTH, IN_ROUNDS
    layout = {name: n for name, n in state.data.layout.items() if name in names}
    state.data.layout = {**layout, "ranks": now}
