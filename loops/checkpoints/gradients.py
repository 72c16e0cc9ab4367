"""Gradients of an unfinished accumulation window, into the files of the ranks and back."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...wrappers import Layout, is_dtensor, is_sharded, layout_of
from ..state import LoopState
from .together import own_rank
from .weights import plain_name

logger = logging.getLogger(__name__)

# As in `weights.gradient_places`: offsets and sizes.
_Place = tuple[Sequence[int], Sequence[int]]


def mean_gradients(model: nn.Module, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return this rank's parts of the mean of all saved ranks' gradients, by name.

    The update that they go into sees the same as it would have on those ranks.

    Args:
        model: What the gradients are for, sharded in any way.
        ranks: The contents of all the ranks' files.
    """
    layouts = {plain_name(name): layout_of(p) for name, p in model.named_parameters()}
    names = dict.fromkeys(name for own in ranks for name in own["gradients"])
    return {name: _mean(name, layouts[name], ranks) for name in names}


def savable(state: LoopState) -> LoopState:
    """Return the state as it can be saved: at the window's start where its gradients are lost."""
    if not _loses_gradients(state):
        return state
    start = state.updated_at
    if start is None or start[0] != state.epoch:
        _warn(state, "a run resumed from it lacks those of the batches since the last update")
        return state
    count = state.iteration - start[2]
    _warn(state, f"a run resumed from it repeats the {count} batch(es) since the last update")
    return replace(state, epoch=start[0], batch=start[1], iteration=start[2])


def _warn(state: LoopState, effect: str) -> None:
    if own_rank() == 0:
        logger.warning(
            "the checkpoint of step %d is in the middle of an accumulation window, whose "
            "gradients fsdp does not give out: %s",
            state.step,
            effect,
        )


def _loses_gradients(state: LoopState) -> bool:
    """Say whether gradients were gathered that FSDP2 has, and does not give out."""
    if state.updated_at is None:
        optim = state.optim_wrapper
        between = optim is not None and not optim.should_update()
    else:
        between = state.updated_at[2] != state.iteration
    if not between:
        return False
    trained = [p for p in state.model.parameters() if p.requires_grad and is_dtensor(p)]
    return any(map(is_sharded, trained)) and all(p.grad is None for p in trained)


def _mean(name: str, layout: Layout, ranks: Sequence[Mapping[str, Any]]) -> Tensor:
    total: Tensor | None = None
    places = [own.get("places", {}).get(name) for own in ranks]
    for own, place in zip(ranks, places, strict=True):
        gradient = own["gradients"].get(name)
        if gradient is not None:
            if total is None:
                total = torch.zeros(layout.sizes, dtype=gradient.dtype)
            _add(total, gradient, layout, place)
    assert total is not None
    # Each part was on as many ranks as there were different batches.
    parts = len({(tuple(place[0]), tuple(place[1])) for place in places if place is not None}) or 1
    return total * parts / len(ranks)


def _add(total: Tensor, gradient: Tensor, layout: Layout, place: _Place | None) -> None:
    """Add what `gradient`, which lies at `place`, has of the part in `total`."""
    offsets, sizes = place or ([0] * gradient.ndim, gradient.shape)
    lows = [max(a, b) for a, b in zip(layout.offsets, offsets, strict=True)]
    ends = zip(layout.offsets, layout.sizes, offsets, sizes, strict=True)
    highs = [min(a + n, b + m) for a, n, b, m in ends]
    if all(low < high for low, high in zip(lows, highs, strict=True)):
        here, there = (
            tuple(slice(low - o, high - o) for low, high, o in zip(lows, highs, at, strict=True))
            for at in (layout.offsets, offsets)
        )
        total[here] += gradient[there]
