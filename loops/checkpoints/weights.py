"""Save and load a model's weights and gradients under the user's names, in any wrapper."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ...wrappers.features import optim_features
from ...wrappers.layout import (
    Layout,
    as_global,
    drop_unreduced_gradients,
    get_layout,
    is_dtensor,
    is_sharded,
    local_part,
    take_part,
)
from ...wrappers.unwrap import plain_name
from ..schedule import get_members
from ..state import LoopState
from .files import own_rank
from .saved_tensors import overlap

logger = logging.getLogger(__name__)

# The entry that describes an adapter, in a state dict with only the adapter's weights.
ADAPTER = "adapter_config"


def get_state(model: nn.Module) -> OrderedDict[str, Any]:
    """Return the state dict of ``model`` with its own names; sharded tensors become DTensors."""
    state: Any = model.state_dict()
    for name, tensor in _local_parts(model):
        if name in state:
            state[name] = as_global(state[name], tensor)
    named: OrderedDict[str, Any] = state
    return named


def saved_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters in the state dict of ``model``, by the user's names.

    A shared parameter is listed under each of its names. Hooks of a model can leave parameters out
    or rename them.
    """
    state = model.state_dict(keep_vars=True)
    params = {n: p for n, p in model.named_parameters(remove_duplicate=False) if n in state}
    extra_params = {n: p for n, p in state.items() if isinstance(p, nn.Parameter)}
    return {plain_name(name): param for name, param in {**params, **extra_params}.items()}


def get_weights(model: nn.Module) -> OrderedDict[str, Any]:
    """Return the state dict of ``model`` with the user's names."""
    state = get_state(model)
    weights = OrderedDict((plain_name(name), value) for name, value in state.items())
    versions: Mapping[str, Any] = getattr(state, "_metadata", {})
    vars(weights)["_metadata"] = OrderedDict((plain_name(k), v) for k, v in versions.items())
    return weights


def load_weights(model: nn.Module, weights: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load weights into ``model``; read only this rank's parts of sharded tensors.

    Args:
        model: the model.
        weights: tensors or ``SavedTensor`` objects by the user's names.
        strict: whether every weight must be given.
    """
    _give_own_memory(model)
    present = model.state_dict()
    for name, tensor in _local_parts(model):
        if not is_dtensor(present[name]):
            # Load a plain local tensor: the model has no hook that would convert a DTensor to it.
            present[name] = tensor
    full_names = {plain_name(name): name for name in present}
    state = OrderedDict(
        (full_names[name], _placed_like(value, present[full_names[name]]))
        for name, value in weights.items()
    )
    versions: Mapping[str, Any] = getattr(weights, "_metadata", {})
    names = [(name, plain_name(name)) for name, _ in model.named_modules()]
    vars(state)["_metadata"] = OrderedDict((n, versions[p]) for n, p in names if p in versions)
    model.load_state_dict(state, strict=strict)


def _give_own_memory(model: nn.Module) -> None:
    """Copy tensors of which several elements share memory, since torch cannot write into them."""
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.layout is not torch.strided or is_dtensor(tensor) or tensor.is_meta:
            continue
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        if 1 + sum((size - 1) * stride for size, stride in strides) < tensor.numel():
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)


def tied_differently(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, str]:
    """Return names with other values in ``weights`` than a name that shares their memory.

    Args:
        model: the model in which the tensors share memory.
        weights: tensors or ``SavedTensor`` objects of the same shapes by the user's names.

    Returns:
        By name, the first name of the same memory.
    """
    differences: dict[str, str] = {}
    names: dict[Any, str] = {}
    for full_name, tensor in model.state_dict(keep_vars=True).items():
        name = plain_name(full_name)
        if not isinstance(tensor, Tensor) or getattr(weights.get(name), "shape", None) is None:
            continue
        # By identity if sharded: a rank may hold an empty part, and all ranks must decide alike.
        region: Any = id(tensor)
        is_plain = tensor.layout is torch.strided and not (is_dtensor(tensor) or is_sharded(tensor))
        if is_plain and not tensor.is_meta and tensor.numel():
            region = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        other = names.setdefault(region, name)
        if other != name and not _equal_parts(weights[name], weights[other], like=tensor):
            differences[name] = other
    return differences


def _equal_parts(value: Any, other: Any, *, like: Tensor) -> bool:
    """Return whether two saved tensors are equal; of those in files, this rank's parts.

    Whole tensors are compared as a whole, so that all ranks get the same answer. NaN equals NaN.
    """
    a, b = value, other
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        a, b = (local_part(take_part(saved, like)) for saved in (value, other))
    return torch.equal(a, b) or bool(a.isclose(b, rtol=0, atol=0, equal_nan=True).all())


def has_sharded_state(state: LoopState) -> bool:
    """Return whether the weights or the optimizer's state are sharded over the ranks."""
    is_collective = optim_features(state.optim_wrapper).collective_state
    return is_collective or any(map(is_sharded, state.model.parameters()))


def get_gradients(model: nn.Module, optim_wrapper: Any = None) -> dict[str, Tensor]:
    """Return this rank's parts of the gradients, by the user's names.

    Gradients that ``optim_wrapper`` drops when its next window begins are left out.
    """
    members = map(optim_features, get_members(optim_wrapper))
    foreign = {parameter for member in members for parameter in member.foreign_parameters}
    named = [(plain_name(name), p) for name, p in model.named_parameters() if p not in foreign]
    return {name: local_part(p.grad) for name, p in named if p.grad is not None}


def gradient_places(model: nn.Module) -> dict[str, tuple[list[int], list[int]]]:
    """Return, by name, offsets and sizes of this rank's parts of sharded parameters."""
    named = [(name, get_layout(p)) for name, p in model.named_parameters() if is_sharded(p)]
    return {plain_name(name): (list(at.offsets), list(at.sizes)) for name, at in named}


def set_gradients(model: nn.Module, gradients: Mapping[str, Tensor]) -> None:
    """Set this rank's parts of the gradients; None for parameters without one."""
    drop_unreduced_gradients(model.parameters())
    for name, parameter in model.named_parameters():
        saved = gradients.get(plain_name(name))
        if saved is None:
            parameter.grad = None
            continue
        gradient, local = saved.to(parameter.device), local_part(parameter)
        if gradient.layout == torch.strided and gradient.stride() != local.stride():
            # Backward keeps the layout of a gradient, but fused optimizers need the parameter's.
            gradient = torch.empty_like(local, dtype=gradient.dtype).copy_(gradient)
        parameter.grad = as_global(gradient, parameter) if is_dtensor(parameter) else gradient


def mean_gradients(model: nn.Module, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the mean of the gradients in all ranks' files, or this rank's part if sharded."""
    layouts = {plain_name(name): get_layout(p) for name, p in model.named_parameters()}
    names = dict.fromkeys(name for content in ranks for name in content["gradients"])
    return {name: _mean(name, layouts[name], ranks) for name in names}


def _mean(name: str, layout: Layout, ranks: Sequence[Mapping[str, Any]]) -> Tensor:
    saved = [c["gradients"][name] for c in ranks if name in c["gradients"]]
    total = torch.zeros(layout.sizes, dtype=saved[0].dtype)
    layouts = [content.get("places", {}).get(name) for content in ranks]
    for content, rank_layout in zip(ranks, layouts, strict=True):
        gradient = content["gradients"].get(name)
        if gradient is None:
            continue
        offsets, sizes = rank_layout or ([0] * gradient.ndim, gradient.shape)
        common = overlap((layout.offsets, layout.sizes), (offsets, sizes))
        if common is not None:
            total[common[0]] += gradient[common[1]]
    # `total` is a sum over all ranks. Each distinct part was held by `len(ranks) / parts` ranks:
    # divide by this number.
    num_parts = (
        len({(tuple(layout[0]), tuple(layout[1])) for layout in layouts if layout is not None}) or 1
    )
    return total * num_parts / len(ranks)


def window_weights(state: LoopState) -> list[float]:
    """Return, for each optimizer wrapper, the total weight of the losses in its gradients."""
    return [optim_features(m).window_weight for m in get_members(state.optim_wrapper)]


def restore_window_weights(
    state: LoopState, ranks: Sequence[Mapping[str, Any]], rank_ratio: float
) -> None:
    """Restore the total weights of the losses in the gradients that ``set_gradients`` has set.

    Args:
        state: the state whose optimizer wrappers get the weights.
        ranks: the contents of this rank's file, or of all files, whose mean is used.
        rank_ratio: the number of data ranks when saving, divided by the current number; these
            weights and the gradients are multiplied by it.
    """
    saved = [content.get("window_weights", []) for content in ranks]
    members, names = get_members(state.optim_wrapper), ranks[0].get("window_members")
    if names and isinstance(state.optim_wrapper, Mapping):
        members = [state.optim_wrapper.get(name) for name in names]
    for member, values in zip(members, zip(*saved, strict=True), strict=False):
        if any(values) and member is not None:
            member.window_weight = sum(values) / len(values) * rank_ratio
            for group in member.optimizer.param_groups:
                for parameter in group["params"] if rank_ratio != 1 else ():
                    if parameter.grad is not None:
                        local_part(parameter.grad).mul_(rank_ratio)


def state_to_save(state: LoopState) -> LoopState:
    """Return the state to save.

    This is ``state``, unless it is inside an accumulation window whose gradients cannot be saved.
    Then it is a copy with the counters of the window's start, or ``state`` without these gradients
    if the window did not begin in this epoch or its start is unknown.
    """
    if not _loses_gradients(state):
        return state
    start = state.updated_at
    if start is None or start[0] != state.epoch:
        effect, saved = "lacks the gradients of the batches since the last update", state
    else:
        effect = f"repeats the batches since the last update ({state.iteration - start[2]})"
        saved = replace(state, epoch=start[0], batch=start[1], iteration=start[2])
    if own_rank() == 0:
        logger.warning(
            "the checkpoint of step %d is in the middle of an accumulation window, and FSDP2 does "
            "not expose its gradients: a run resumed from it %s",
            state.step,
            effect,
        )
    return saved


def _loses_gradients(state: LoopState) -> bool:
    """Return whether FSDP2 holds accumulated gradients, which it does not expose."""
    optim = state.optim_wrapper
    if state.updated_at is not None:
        between = state.updated_at[2] != state.iteration
    else:
        between = optim is not None and not optim.should_update()
    if not between:
        return False
    trained = [p for p in state.model.parameters() if p.requires_grad and is_dtensor(p)]
    return any(map(is_sharded, trained)) and all(p.grad is None for p in trained)


def _local_parts(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the plain tensors that are parts of sharded ones; tied ones under all their names."""
    named = chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    return [(n, t) for n, t in named if hasattr(t, "tensor_layout")]


def _placed_like(value: Any, like: Any) -> Any:
    if not isinstance(like, Tensor) or not hasattr(value, "shape"):
        return value
    # On a mesh of one rank nothing is sharded, but only a DTensor can be loaded into a DTensor.
    placed = is_dtensor(value) or is_dtensor(like) or is_sharded(like)
    return take_part(value, like) if placed or not isinstance(value, Tensor) else value
