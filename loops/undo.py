"""Undo what steps changed besides weights: buffers, random streams, state between batches."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from ..wrappers.features import model_features
from ..wrappers.steps.preprocess import get_device
from ..wrappers.unwrap import user_model
from .rng import capture_rng, restore_rng
from .state import LoopState


def buffer_restorer(model: nn.Module) -> Callable[[], None]:
    """Return a function that restores the current values of the buffers of ``model``."""
    saved = [
        (module._buffers, name, buffer, buffer.detach().clone())
        for module in user_model(model).modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]

    def restore() -> None:
        with torch.no_grad():
            for owner, name, buffer, value in saved:
                owner[name] = buffer.copy_(value)

    return restore


def window_restorer(state: LoopState) -> Callable[[], None]:
    """Return a function that undoes what the batches of an accumulation window changed.

    It restores the buffers, the random streams, and the state that a training step carries from
    batch to batch, but neither weights nor counters.
    """
    wrapper: Any = state.model
    restore_buffers, device = buffer_restorer(wrapper), get_device(wrapper)
    streams = capture_rng(device)
    carried = deepcopy(model_features(wrapper).step_state())

    def restore() -> None:
        restore_buffers()
        restore_rng(streams, device)
        if carried:
            wrapper.load_step_state(carried)

    return restore
