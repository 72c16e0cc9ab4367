"""Weights and optimizer states that are spread over the ranks, whole for Lightning's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..wrappers import AmpOptimWrapper, OptimWrapper, is_dtensor, reshard, take_part


def holds_shards(module: nn.Module) -> bool:
    """Whether ``module`` or a part of it is spread by FSDP2, be it over one rank alone."""
    # Not by the parameters: where a forward has raised, they are whole. The name of the method is
    # enough, as importing FSDP2 takes as long as half of torch.
    return any(hasattr(one, "set_reshard_after_forward") for one in module.modules())


def whole(state: Any) -> Any:
    """``state`` with whole tensors on the CPU in place of DTensors; every rank must call this."""
    if is_dtensor(state):
        return state.full_tensor().cpu()
    if isinstance(state, Mapping):
        return {name: whole(value) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(whole(value) for value in state)
    return state


def whole_weights(module: nn.Module) -> dict[str, Any]:
    """The state dict of ``module`` in whole tensors; every rank must call this."""
    reshard(module)
    return {name: whole(value) for name, value in module.state_dict().items()}


def load_weights(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load whole tensors into a sharded ``module``, each rank its parts."""
    reshard(module)
    own = module.state_dict()
    parts = {
        name: take_part(value, own[name]) if is_dtensor(own.get(name)) else value
        for name, value in state.items()
    }
    module.load_state_dict(parts, strict=strict)


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load the state over whole tensors into the optimizer of a sharded model."""
    OptimWrapper(optimizer).load_state_dict(state)


def keep_whole(module: nn.Module) -> None:
    """Let ``module.state_dict()`` be whole from now on; every rank must call that then."""

    def make_whole(owner: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in [name for name in state if name.startswith(prefix)]:
            state[name] = whole(state[name])

    module.register_state_dict_post_hook(make_whole)  # type: ignore[no-untyped-call]


def agree_on_scale(plugin: Any, optimizers: Sequence[Optimizer]) -> None:
    """Let a precision plugin skip an update on all ranks as soon as one sees an infinity.

    Each rank sees its parts of the gradients only, and torch's ordinary scaler asks no other.
    """
    scaler = getattr(plugin, "scaler", None)
    if type(scaler) is not torch.amp.GradScaler or not optimizers:
        return
    amp = AmpOptimWrapper(optimizers[0], dtype="float16", use_fsdp=True, device=plugin.device)
    amp.loss_scaler.load_state_dict(scaler.state_dict())
    plugin.scaler = amp.loss_scaler
    for optimizer in optimizers:
        # Fused ones unscale by themselves, and would ask no other rank either.
        vars(optimizer)["_step_supports_amp_scaling"] = False
