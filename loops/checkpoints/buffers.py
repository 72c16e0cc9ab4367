"""Buffers that differ between ranks, and buffers that are not in state dicts.

The weights of a checkpoint contain the first rank's buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ...wrappers.features import model_features
from ...wrappers.layout import is_dtensor_or_localised
from ...wrappers.steps.buffers import digest, transient_buffers
from ...wrappers.steps.preprocess import get_device
from ...wrappers.unwrap import plain_name, user_model
from ..state import LoopState
from .files import own_rank

# The hash of each buffer, by name.
Digests: TypeAlias = dict[str, str]
# The entry in a rank's file. It has only the buffers that differ from the first rank's; the files
# of all ranks have the entry, or none has.
ENTRY = "buffers"
# The entry of changed buffers with ``persistent=False``, which each rank saves.
TRANSIENT = "transient_buffers"


def buffer_digests(model: nn.Module) -> Digests:
    """Return a hash of each buffer, if the ranks of the wrapper ``model`` have their own ones."""
    if not model_features(model).own_buffers:
        return {}
    return {name: digest(buffer) for name, buffer in _saved_buffers(model).items()}


def differing_buffers(model: nn.Module, digests: Sequence[Digests]) -> dict[str, Any]:
    """Return the entry of this rank's file, if there is one.

    Args:
        model: the wrapper.
        digests: the hashes of all ranks.
    """
    of_first_rank = digests[0]
    if all(of_rank == of_first_rank for of_rank in digests):
        return {}
    of_this_rank, buffers = digests[own_rank()], _saved_buffers(model)
    differing = {
        name: buffer
        for name, buffer in buffers.items()
        if of_this_rank[name] != of_first_rank[name]
    }
    return {ENTRY: differing}


@torch.no_grad()
def load_differing_buffers(model: nn.Module, rank_content: Mapping[str, Any]) -> None:
    """Load the entry of this rank's file, after the weights of the first rank."""
    features = model_features(model)
    in_window = bool(rank_content["gradients"])
    if ENTRY not in rank_content or not (features.own_buffers or in_window):
        return
    buffers = _saved_buffers(model)
    for name, value in rank_content[ENTRY].items():
        if buffers[name].shape != value.shape:
            raise ValueError(f"{name} has shape {value.shape}, not {buffers[name].shape}")
        buffers[name].copy_(value)
    if in_window:
        features.keep_own_buffers()


def changed_transient_buffers(state: LoopState) -> dict[str, Any]:
    """Return the entry of this rank's file: buffers that no state dict has and that have changed.

    Constants, such as masks and tables of positions, are left out.
    """
    first_buffers = state.first_buffers or {}
    changed = {
        name: buffer
        for name, buffer in transient_buffers(state.model).items()
        if digest(buffer) != first_buffers.get(name)
    }
    return {TRANSIENT: changed} if changed else {}


@torch.no_grad()
def load_transient_buffers(model: nn.Module, rank_content: Mapping[str, Any]) -> None:
    """Load the buffers that ``changed_transient_buffers`` returned."""
    saved = rank_content.get(TRANSIENT, {})
    for path, module in user_model(model).named_modules():
        for attribute in module._non_persistent_buffers_set & module._buffers.keys():
            value = saved.get(plain_name(f"{path}.{attribute}".lstrip(".")))
            buffer = module._buffers[attribute]
            if value is None:
                continue
            if buffer is None or buffer.is_inference() or buffer.shape != value.shape:
                module._buffers[attribute] = value.to(get_device(model), copy=True)
            else:
                buffer.copy_(value)


def _saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole buffers in the state dict of the user's model, by its names."""
    target = user_model(model)
    identities = {id(b) for b in target.buffers() if not is_dtensor_or_localised(b)}
    state = target.state_dict(keep_vars=True)
    return {plain_name(name): value for name, value in state.items() if id(value) in identities}
