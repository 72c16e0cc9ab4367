"""Undo what steps changed besides weights: buffers, random streams, state between batches."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ..wrappers.features import model_features
from ..wrappers.steps.buffers import restore_buffers, save_buffers
from ..wrappers.steps.preprocess import get_device
from ..wrappers.unwrap import user_model
from .rng import capture_rng, restore_rng
from .state import LoopState

# Attributes that every module has: weights, buffers, submodules, hooks and `training`.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def attribute_restorer(model: nn.Module) -> Callable[[], None]:
    """Return a function that restores the current plain attributes of the modules of ``model``.

    These are all attributes apart from weights, buffers, submodules, hooks and ``training``. The
    entries of lists, dicts and sets and the values of tensors are restored as well.
    """
    saved = [
        (vars(module), {name: (value, _contents(value)) for name, value in _attributes(module)})
        for module in user_model(model).modules()
    ]

    def restore() -> None:
        for attributes, values in saved:
            for name in attributes.keys() - values.keys() - _OF_EVERY_MODULE:
                del attributes[name]
            for name, (value, contents) in values.items():
                _restore_contents(value, contents)
                attributes[name] = value

    return restore


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    return [(name, v) for name, v in vars(module).items() if name not in _OF_EVERY_MODULE]


def _contents(value: Any) -> Any:
    """Return a copy of what may change in ``value`` in place; None for other values."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy(value) if type(value) in (list, dict, set) else None


def _restore_contents(value: Any, contents: Any) -> None:
    if isinstance(value, Tensor):
        # A graph may need the tensor, so do not count up its version without a change.
        if not torch.equal(value, contents):
            with torch.no_grad():
                value.copy_(contents)
    elif contents is not None and type(value) is list:
        value[:] = contents
    elif contents is not None:
        value.clear()
        value.update(contents)


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
