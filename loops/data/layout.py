"""A run's updates on the ranks of now: the samples that they would have had on those of before."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...collectives import get_rank
from ...wrappers.features import model_features, optim_features
from ..checkpoints import weights
from ..schedule import holds_gradients, is_weighted, members_of, window_of
from ..state import LoopState
from .sampler import ShardedBatchSampler, sampler_of

logger = logging.getLogger(__name__)

_SHOWN = 16


@dataclass(frozen=True)
class _Update:
    """What an update of the run consists of, and what may be done to share it out.

    Attributes:
        size: Samples, over all ranks.
        equal: All ranks' parts must be equal, since each rank's mean loss weighs the same.
        only: The one possible number of batches; None for any.
    """

    size: int
    equal: bool
    only: int | None

    def batches(self, ranks: int, batch_size: int) -> int | None:
        """Return the least number of batches that does; None if there is none."""
        if self.equal and self.size % ranks:
            return None
        least = -(-self.size // (ranks * batch_size))
        most = self.size // ranks if self.equal else least
        for count in range(least, most + 1) if self.only is None else [self.only]:
            if count >= least and not (self.equal and self.size % (count * ranks)):
                return count
        return None

    def refusal(self, ranks: int, batch_size: int) -> str:
        """Say why these ranks cannot make the update, and what works."""
        works = [str(n) for n in range(1, self.size + 1) if self.batches(n, batch_size)]
        more = ", ..." if len(works) > _SHOWN else ""
        remedies = [f"{', '.join(works[:_SHOWN])}{more} as the number of ranks"] if works else []
        sizes = (n for n in range(batch_size + 1, self.size + 1) if self.batches(ranks, n))
        if (larger := next(sizes, None)) is not None:
            remedies.append(f"batch_size >= {larger} on {ranks}")
        if self.equal:
            remedies.append("optim_wrapper.loss_weight: samples, with any number of ranks")
        pieces = "" if self.only is None else f" in {self.only} batches of each rank"
        return (
            f"an update of this run has {self.size} samples, which {ranks} ranks with batch_size "
            f"{batch_size} cannot share{' equally' if self.equal else ''}{pieces}. What works: "
            f"{'; '.join(remedies)}"
        )


def lay_out(state: LoopState, loader: Iterable[Any]) -> None:
    """Cut the training data into updates; every rank must call this, before it counts batches.

    After a resume an update has as many samples as before, whatever the number of ranks, and the
    next one begins with the next sample of the epoch's order. `state.batch`, `state.iteration` and
    the accumulation are brought to the batches of now. Loaders that are not of `build_loader` go
    on at the same share of their batches.

    Raises:
        ValueError: These ranks cannot share such an update; says which can.
    """
    sampler = sampler_of(loader)
    if sampler is None:
        _keep_share(state)
        return
    weighted, window = is_weighted(state.optim_wrapper), window_of(state.optim_wrapper) or 1
    saved = _saved(state, sampler, window)
    known = saved["samples"] == sampler.num_samples
    # What a run without weights has repeated to be even is not repeated with them.
    most = saved["samples"] if weighted else saved["length"]
    length = min(saved["length"], most) if known else None
    only = _fixed_count(state, saved, weighted)
    update = _Update(saved["global_batch"], equal=not weighted, only=only)
    count = update.batches(sampler.world_size, sampler.batch_size)
    if count is None:
        raise ValueError(update.refusal(sampler.world_size, sampler.batch_size))
    whole = not weighted and count != update.size // saved["run"]
    sampler.cut(update.size, count, length=length, whole=whole, weighted=weighted)
    if count != window:
        members_of(state.optim_wrapper)[0].accumulate(count)
    _tell(sampler, saved, window)
    if weighted or count != saved["micro_batches"]:
        _move(state, saved, sampler)
    state.data.layout = {
        **saved,
        "samples": sampler.num_samples,
        "length": sampler.length,
        "micro_batches": count,
        "batches": sampler.batches,
        "ranks": sampler.world_size,
    }


def _saved(state: LoopState, sampler: ShardedBatchSampler, window: int) -> dict[str, int]:
    """Return how the data was cut before; of a run that begins, how its settings cut it."""
    before: Mapping[str, int] = state.data.layout
    same = before.get("global_batch") == sampler.global_batch
    if state.restored_from is None and not same:
        # Another loader than in an earlier training of this process.
        before = {}
    ranks = before.get("ranks", sampler.world_size)
    run = before.get("run", sampler.batch_size * ranks)
    sampler.cut(run * window, window, weighted=is_weighted(state.optim_wrapper))
    own = {"global_batch": run * window, "micro_batches": window, "run": run, "ranks": ranks}
    own |= {"samples": sampler.num_samples, "length": sampler.length, "batches": sampler.batches}
    return {**own, **before}


def _fixed_count(state: LoopState, saved: Mapping[str, int], weighted: bool) -> int | None:
    """Return the batches per update where they must stay as before, None where any will do."""
    members = members_of(state.optim_wrapper)
    uneven = model_features(state.model).uneven_inputs is not None and not weighted
    closure = optim_features(members[0]).needs_closure
    able = len(members) == 1 and hasattr(members[0], "accumulate") and not (uneven or closure)
    # Without weights a window may go on over the end of an epoch.
    runs = -(-saved["length"] // saved["run"])
    ends_with_epoch = weighted or runs % (saved["global_batch"] // saved["run"]) == 0
    return None if able and ends_with_epoch else saved["micro_batches"]


def _move(state: LoopState, saved: Mapping[str, int], sampler: ShardedBatchSampler) -> None:
    """Bring the counters of batches from those of before to those of now."""
    before, window = state.batch, saved["micro_batches"]
    if before >= saved["batches"]:
        state.batch = sampler.batches
    else:
        if before % window:
            _begin_update_again(state)
        state.batch = before // window * sampler.micro_batches
    if sampler.micro_batches == window:
        state.iteration += state.batch - before
    else:
        state.iteration = state.epoch * sampler.batches + state.batch


def _begin_update_again(state: LoopState) -> None:
    """Drop gradients that are of other ranks or batches, or of which nobody knows the weight."""
    state.optim_wrapper.zero_grad()
    logger.warning("the update that had begun begins again, with the same samples")


def _tell(sampler: ShardedBatchSampler, saved: Mapping[str, int], window: int) -> None:
    if get_rank() != 0:
        return
    if sampler.global_batch != sampler.batch_size * sampler.world_size * window:
        count, ranks = sampler.micro_batches, sampler.world_size
        size = -(-sampler.global_batch // (count * ranks))
        logger.warning(
            "an update has %d samples, as when the run began: accumulative_counts is %d and a "
            "batch has up to %d samples on each rank (%d, data.train.batch_size %d)",
            *(sampler.global_batch, count, size, ranks, sampler.batch_size),
        )
    if sampler.positions > sampler.length:
        logger.warning(
            "the last update of an epoch has %d samples, which the ranks cannot share equally: "
            "some come twice in it; optim_wrapper.loss_weight=samples needs no equal shares",
            saved["length"] % sampler.global_batch,
        )


def _keep_share(state: LoopState) -> None:
    """Go on at the same share of the batches, on another number of ranks."""
    now = weights.data_size(state.model)
    before = state.data.layout.get("ranks", now)
    if before != now and state.batch:
        logger.warning(
            "the running epoch goes on at the same share of its batches (%d of %d ranks, now %d): "
            "some samples may come twice or not at all; build_loader has an exact order",
            *(state.batch, before, now),
        )
        state.batch = state.batch * before // now
    if is_weighted(state.optim_wrapper) and holds_gradients(state.model):
        begun = state.batch % (window_of(state.optim_wrapper) or 1)
        state.batch, state.iteration = state.batch - begun, state.iteration - begun
        _begin_update_again(state)
    state.data.layout = {"ranks": now}
