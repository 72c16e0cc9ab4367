"""Undo what steps changed besides weights: buffers, random streams, state between batches."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from ..wrappers.features import model_features
from ..wrappers.steps.buffers import restore_buffers, save_buffers
from ..wrappers.steps.preprocess import get_device
from .rng import capture_rng, restore_rng
from .state import LoopState


def window_restorer(state: LoopState) -> Callable[[], None]:
    """Return a function that undoes what the batches of an accumulation window changed.

    It restores the buffers, the random streams, and the state that a training step carries from
    batch to batch, but neither weights nor counters.
    """
    wrapper: Any = state.model
    buffers, device = save_buffers(wrapper), get_device(wrapper)
    streams = capture_rng(device)
    carried = deepcopy(model_features(wrapper).step_state())

    def restore() -> None:
        restore_buffers(buffers)
        restore_rng(streams, device)
        if carried:
            wrapper.load_step_state(carried)

    return restore
