"""Undo what steps changed besides weights: buffers, random streams, state between batches."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ..wrappers.features import model_features
from ..wrappers.steps.buffers import count_changes, restore_buffers, save_buffers
from ..wrappers.steps.preprocess import get_device
from ..wrappers.steps.step_checks import EMBEDDINGS
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


class WeightWatch:
    """Notices weights that a forward changes in place, and restores the weights of embeddings.

    An embedding with ``max_norm`` shortens the rows that a batch uses. Only its weights are copied,
    because copies of all weights would need too much memory.
    """

    def __init__(self, model: nn.Module) -> None:
        named = user_model(model).named_parameters()
        self._versions = {name: (p, count_changes(p)) for name, p in named}
        self._copies = {
            layer.weight: layer.weight.detach().clone()
            for layer in user_model(model).modules()
            if isinstance(layer, EMBEDDINGS) and layer.max_norm is not None
        }

    @torch.no_grad()
    def restore(self) -> str:
        """Restore the embeddings; return the name of another weight that has changed, or ""."""
        changed = ""
        for name, (parameter, version) in self._versions.items():
            if count_changes(parameter) == version:
                continue
            copy_of_weight = self._copies.get(parameter)
            if copy_of_weight is None:
                changed = changed or name
            else:
                parameter.copy_(copy_of_weight)
        return changed


def window_restorer(state: LoopState) -> Callable[[], None]:
    """Return a function that undoes what the batches of an accumulation window changed.

    It restores the buffers, the random streams, and the state that a training step carries from
    batch to batch, but no counters. It restores the weights of embeddings with
    ``max_norm``, and raises ValueError if the forward of another layer has changed its weights.
    """
    wrapper: Any = state.model
    buffers, device = save_buffers(wrapper), get_device(wrapper)
    streams = capture_rng(device)
    carried = deepcopy(model_features(wrapper).step_state())
    weights = WeightWatch(wrapper)

    def restore() -> None:
        changed = weights.restore()
        if changed:
            raise ValueError(
                f"this step cannot be left out, because its forward changed the weight {changed}"
            )
        restore_buffers(buffers)
        restore_rng(streams, device)
        if carried:
            wrapper.load_step_state(carried)

    return restore
