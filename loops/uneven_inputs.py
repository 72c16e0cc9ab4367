"""Passes over the data in which ranks may have different numbers of batches."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import SyncBatchNorm

from ..collectives import (
    all_gather_object,
    broadcast,
    comm_device,
    get_rank,
    name_ranks,
)
from ..wrappers.features import has_collective_update, model_features, optim_features
from .data.layout import IN_ROUNDS, WRONG_LENGTH
from .data.loaders import get_length
from .data.resume import FixedPosition
from .data.sampler import find_sampler
from .data.shares import Share
from .error_notes import get_name
from .schedule import Budget, EpochBudget, StepBudget, get_members, get_window, is_weighted
from .state import LoopState

logger = logging.getLogger(__name__)

_END = object()
_UNREAD = object()
_PROGRESS = ("batch", "iteration", "step", "updated_at")


class PassInputs:
    """The batches of a pass; ranks must have the same number of them, with two exceptions.

    If the model wrapper has ``uneven_inputs``, its ``join`` continues to average gradients after
    a rank has run out of batches. From then on the loop does nothing else that needs all ranks,
    and ``state.together`` is False. At the end of the pass every rank copies the counters,
    optimizers and ``state.stateful`` of the rank with the most batches.

    If the optimizer wrapper has a ``loss_weight``, a rank that has run out repeats its last batch
    with a weight of 0, under every model wrapper.

    If a rank's number of batches is unknown or an estimate, the ranks check before each batch that
    all of them have one, and no accumulation window is planned by it. An estimate serves only to
    show the progress, until a pass has another number of batches.

    Args:
        state: the state.
        loader: this rank's batches.
        budget: the length of the run.
        share: this rank's share of the batches, if the ranks read the same ones.

    Attributes:
        length: the largest number of batches on any rank; None if a rank does not know its number.
        has_exact_length: whether ``length`` is certain.
    """

    def __init__(
        self, state: LoopState, loader: Iterable[Any], budget: Budget, share: Share
    ) -> None:
        self._name, self._budget, self._share = get_name(loader), budget, share
        self._stated = get_length(loader)
        if self._stated == state.data.layout.get(WRONG_LENGTH):
            self._stated = None
        answers = all_gather_object((self._stated, share.has_exact_length(loader)))
        lengths = [length for length, _ in answers]
        counted = [length for length in lengths if length is not None]
        self.length = max(counted) if len(counted) == len(lengths) else None
        self.has_exact_length = all(is_exact for _, is_exact in answers)
        self._compares = not self.has_exact_length and len(answers) > 1
        # The arguments of `join`.
        self._options: dict[str, Any] | None = None
        features = model_features(state.model)
        self._group = features.data_group
        self._weighted = is_weighted(state.optim_wrapper)
        self._closes = self._closes_window(state)
        if self._weighted:
            self._compares = self._compares or len(set(lengths)) > 1
            self._sampler = find_sampler(loader)
            _refuse_torchs_norms(state.model, lengths, self._sampler)
            return
        self._options = features.uneven_inputs
        if self._options is not None:
            _check(state, by_epoch=isinstance(budget, EpochBudget))
        elif len(set(lengths)) > 1:
            raise ValueError(
                f"every rank needs the same number of training batches, got {lengths} (by rank); "
                "use build_loader(..., train=True), or allow different numbers with "
                "StepDistributedDataParallel(uneven_inputs=True) or a loss_weight of the "
                "optimizer wrapper"
            )

    def _closes_window(self, state: LoopState) -> bool:
        """Return whether the last window of the run may be short without being planned so."""
        optim = state.optim_wrapper
        is_planned = self.has_exact_length or isinstance(self._budget, StepBudget)
        if is_planned or self._weighted or get_window(optim) == 1:
            return False
        can_close = optim_features(optim).can_close_window
        if not can_close and get_rank() == 0:
            logger.warning(
                "the number of batches of %s is not certain, so the end of the run is unknown: "
                "the gradients of an incomplete last accumulation window will be lost",
                self._name,
            )
        return can_close

    @contextmanager
    def joined(self, state: LoopState) -> Iterator[None]:
        """Enter the model's ``join`` for a pass, if it is needed; every rank must enter."""
        if self._options is None:
            yield
            return
        model: Any = state.model
        try:
            with model.join(**self._options):
                yield
            self._copy_from_longest_rank(state)
        finally:
            state.together = True

    def synchronized(self, batches: Iterable[Any], state: LoopState) -> Iterable[Any]:
        """Return ``batches`` with the communication that this kind of pass needs.

        Every rank must iterate over the result to its end.
        """
        if not self.has_exact_length:
            batches = self._share.take(self._counted(batches, state))
            if self._share.in_rounds:
                # The stated length is not this rank's.
                self._budget.forget_length(state)
                state.data.layout[IN_ROUNDS] = 1
        if self._weighted:
            return self._padded(batches, state)
        if self._options is not None:
            return self._uneven(batches, state)
        batches = self._compared(batches, state) if self._compares else batches
        is_last = state.epoch + 1 == self._budget.last
        return self._closing(batches, state) if self._closes and is_last else batches

    def _counted(self, batches: Iterable[Any], state: LoopState) -> Iterator[Any]:
        """Yield ``batches``; do not use the stated length again if a pass has another number."""
        # An earlier part of the pass was read before this process resumed it.
        begins_later, count = bool(state.batch), 0
        for batch in batches:
            count += 1
            yield batch
        if begins_later or self._stated in (count, None):
            return
        if get_rank() == 0:
            logger.warning(
                "%s has had %d batches in this pass, but states %d: this length is not used "
                "again, so the end of the run is unknown",
                *(self._name, count, self._stated),
            )
        state.data.layout[WRONG_LENGTH] = self._stated or 0
        self._stated = None
        self._budget.forget_length(state)

    def _closing(self, batches: Iterable[Any], state: LoopState) -> Iterator[Any]:
        """Yield the batches of the last pass; its last batch ends its accumulation window.

        Inside a window this reads one batch ahead, but not at its end, where checkpoints are saved.
        """
        optim, window = state.optim_wrapper, get_window(state.optim_wrapper) or 1
        start = state.iteration // window * window
        begun = state.iteration - (start if state.updated_at is None else state.updated_at[2])
        iterator = iter(batches)
        batch = next(iterator, _END)
        while batch is not _END:
            begun += 1
            following = _UNREAD
            if not optim.should_sync():
                reader = state.data.reader
                position = None if reader is None else FixedPosition(reader)
                following = next(iterator, _END)
                if following is _END:
                    optim.close_window(begun)
                    state.data.reader = position
            yield batch
            if following is _UNREAD:
                begun, following = 0, next(iterator, _END)
            batch = following

    def _uneven(self, batches: Iterable[Any], state: LoopState) -> Iterator[Any]:
        """Yield ``batches``; set ``state.together`` to False when a rank has run out."""
        for batch in batches:
            state.together = state.together and all(true_on_all_ranks(self._group, True))
            yield batch
        if state.together:
            state.together = all(true_on_all_ranks(self._group, False))

    def _padded(self, batches: Iterable[Any], state: LoopState) -> Iterator[Any]:
        """Yield batches until every rank has run out; repeated batches have a weight of 0."""
        iterator, optim = iter(batches), state.optim_wrapper
        optim.begin_pass(
            state.iteration - state.batch, self.length if self.has_exact_length else None
        )
        batch = last = next(iterator, _END)
        if self._compares:
            last = get_first_batch(self._group, batch, batch is not _END)
        try:
            while last is not _END:
                has_batch = batch is not _END
                ended = (
                    true_on_all_ranks(None, not has_batch)[0] if self._compares else not has_batch
                )
                if ended:
                    break
                last = batch if has_batch else last
                counts = self._sampler is None or self._sampler.counts(state.batch)
                optim.batch_counts = has_batch and counts
                yield last
                batch = next(iterator, _END)
            if not self.has_exact_length and last is not _END and not optim.should_update():
                # The data ended inside a window: close it with a zero-weight batch.
                optim.begin_pass(state.iteration - state.batch, state.batch + 1)
                optim.batch_counts = False
                yield last
        finally:
            optim.batch_counts = True

    def _compared(self, batches: Iterable[Any], state: LoopState) -> Iterator[Any]:
        """Yield ``batches``; raise ValueError if only some of the ranks have run out."""
        iterator = iter(batches)
        while True:
            batch = next(iterator, _END)
            has_batch = batch is not _END
            all_have, none_has = true_on_all_ranks(None, has_batch, not has_batch)
            if none_has:
                return
            if not all_have:
                have = all_gather_object(has_batch)
                ended, continuing = (
                    [r for r, h in enumerate(have) if h is x] for x in (False, True)
                )
                raise ValueError(
                    "every rank needs the same number of training batches, but "
                    f"{name_ranks(ended)} ran out after {state.batch} batches in epoch "
                    f"{state.epoch + 1}, and {name_ranks(continuing)} did not; allow different "
                    "numbers with StepDistributedDataParallel(uneven_inputs=True) in an "
                    "EpochTrainLoop"
                )
            yield batch

    def _copy_from_longest_rank(self, state: LoopState) -> None:
        mine = {name: getattr(state, name) for name in (*_PROGRESS, "stop_reason")}
        everyone = all_gather_object(mine, self._group)
        state.stop_reason = next((o["stop_reason"] for o in everyone if o["stop_reason"]), "")
        # The rank whose weights torch's `join` broadcasts: the last of the ranks with most batches.
        longest = max(range(len(everyone)), key=lambda at: (everyone[at]["batch"], at))
        ahead = everyone[longest]
        if all(rank_state["batch"] == ahead["batch"] for rank_state in everyone):
            return
        group, optim = self._group or dist.group.WORLD, state.optim_wrapper
        assert group is not None
        source = dist.get_global_rank(group, longest)
        states: dict[str, Any] = {}
        if dist.get_rank() == source:
            states = {name: source.state_dict() for name, source in state.stateful.items()}
            states = {"optim": optim.state_dict(), "stateful": states}
        states = broadcast(states, source, self._group)
        if mine["batch"] == ahead["batch"]:
            return
        optim.load_state_dict(states["optim"])
        for name, stateful in state.stateful.items():
            stateful.load_state_dict(states["stateful"][name])
        for name in _PROGRESS:
            setattr(state, name, ahead[name])


def divide_among_ranks(share: Share, loader: Any, state: LoopState) -> Any:
    """Return the training loader with this rank's batches; every rank must call this."""
    features = model_features(state.model)
    may_differ = features.uneven_inputs is not None or is_weighted(state.optim_wrapper)
    share.resumes_rounds = IN_ROUNDS in state.data.layout
    divided = share.divide(loader, features.data_group, repeats=not may_differ)
    if share.in_rounds is False:
        state.data.layout.pop(IN_ROUNDS, None)
    return divided


def get_first_batch(group: dist.ProcessGroup | None, batch: Any, has_batch: bool) -> Any:
    """Return this rank's first batch, or another rank's if it has none; every rank must call."""
    has = all_gather_object(has_batch, group)
    if all(has) or not any(has):
        return batch
    source = has.index(True)
    source = source if group is None else dist.get_global_rank(group, source)
    other = broadcast(batch if has_batch else None, source, group)
    return batch if has_batch else other


def true_on_all_ranks(group: dist.ProcessGroup | None, *values: bool) -> list[bool]:
    """Return for each value whether it is true on all ranks of the group; all ranks must call."""
    if dist.get_world_size(group) == 1:
        return list(values)
    answers = torch.tensor(values, dtype=torch.uint8, device=comm_device(group))
    dist.all_reduce(answers, dist.ReduceOp.MIN, group=group)
    return [bool(answer) for answer in answers.tolist()]


def _refuse_torchs_norms(model: nn.Module, lengths: Sequence[int | None], sampler: Any) -> None:
    """Raise ValueError if torch's SyncBatchNorm would count a batch of weight zero.

    Every rank must call this.
    """
    norms = (path for path, module in model.named_modules() if isinstance(module, SyncBatchNorm))
    path = next(norms, None)
    if path is None or len(lengths) == 1:
        return
    has_padding = sampler is not None and not all(map(sampler.counts, range(len(sampler))))
    if len(set(lengths)) > 1 or any(all_gather_object(has_padding)):
        raise ValueError(
            f"{path} must be a SynchronizedBatchNorm, got torch.nn.SyncBatchNorm, which cannot "
            "leave out the batches of weight zero that a rank without data runs, here with "
            f"{lengths} batches (by rank): convert the model with sync_batchnorm: true or "
            "convert_sync_batchnorm(model)"
        )


def _check(state: LoopState, by_epoch: bool) -> None:
    if not by_epoch:
        raise ValueError(
            "uneven_inputs needs an EpochTrainLoop, got an IterTrainLoop, which cannot count "
            "updates that only some ranks make"
        )
    window = get_window(state.optim_wrapper)
    if window != 1:
        raise ValueError(
            f"uneven_inputs needs accumulative_counts=1, got {window or 'several values'}: a rank "
            "that runs out of batches inside a window would lose its gradients"
        )
    for member in get_members(state.optim_wrapper):
        optimizer = getattr(member, "optimizer", None)
        if has_collective_update(optimizer):
            raise ValueError(
                f"uneven_inputs cannot be combined with {type(optimizer).__name__}, which "
                "communicates at each update"
            )
