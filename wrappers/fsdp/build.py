"""How a model becomes a fully sharded one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ..sharding.agreement import agree
from ..sharding.first_rank import broadcast_first
from ..sharding.meta_init import check_no_meta_buffers
from ..steps.preprocess import DataPreprocessor
from ..steps.step import has_own_train_step
from .options import FsdpOptions
from .units import (
    check_shapes,
    find_ignored,
    find_roots,
    find_units,
    full_precision_units,
    in_backward_order,
)


def check_model(module: nn.Module, detect: bool) -> None:
    """Raise ValueError for a model that cannot be sharded, whatever the options."""
    check_no_meta_buffers(module)
    if any(isinstance(one, FSDPModule) for one in module.modules()):
        raise ValueError(
            f"{type(module).__name__} is sharded already: give the model as it was before "
            "fully_shard; shard names its blocks"
        )
    if detect and has_own_train_step(module):
        raise ValueError(
            f"detect_anomalous_params needs the wrapper's own train_step, but "
            f"{type(module).__name__}.train_step is used"
        )


class _Plan(NamedTuple):
    """What becomes of which module, by path, and what stays whole."""

    roots: dict[str, nn.Module]
    units: dict[str, nn.Module]
    exact: dict[str, MixedPrecisionPolicy]
    ignored: set[nn.Parameter]


def shard_model(module: nn.Module, options: FsdpOptions, mesh: DeviceMesh) -> list[nn.Module]:
    """Spread the parameters over the mesh; returns the modules from which gathering starts.

    Every rank must call this.
    """
    plans: list[_Plan] = []

    def describe() -> dict[str, Any]:
        plans.append(_plan(module, options))
        return _description(module, options, plans[0])

    agree(describe, mesh)
    roots, units, exact, ignored = plans[0]
    if options.device is not None and not any(one.is_meta for one in module.parameters()):
        module.to(options.device)
    if options.same_weights:
        tensors = [*module.parameters(), *module.buffers()]
        broadcast_first([one for one in tensors if not one.is_meta], mesh)
    common: dict[str, Any] = {"mesh": mesh, "offload_policy": options.offload}
    if ignored:
        common["ignored_params"] = ignored
    # Between blocks nothing would cast back what is not in the dtype of the next one.
    inner = replace(options.precision, output_dtype=None)
    # The innermost first: a unit takes what those inside it have left.
    for path, one in reversed(list(module.named_modules())):
        if path not in roots and (path in exact or path in units):
            policy = exact.get(path, inner)
            free = options.free_after_forward
            fully_shard(one, mp_policy=policy, reshard_after_forward=free, **common)
    # None: torch keeps the outermost block, of which the backward begins.
    free_root = False if options.free_after_forward is False else None
    for path, root in roots.items():
        policy = exact.get(path, options.precision)
        fully_shard(root, mp_policy=policy, reshard_after_forward=free_root, **common)
        own = {name: one for name, one in units.items() if _is_inside(name, path)}
        _set_prefetch(root, own, options.prefetch)
    return list(roots.values())


def _plan(module: nn.Module, options: FsdpOptions) -> _Plan:
    ignored = find_ignored(module, options.ignored)
    check_shapes(module, ignored)
    return _Plan(
        find_roots(module, ignored),
        find_units(module, options, ignored),
        full_precision_units(module, options.precision),
        ignored,
    )


def _description(module: nn.Module, options: FsdpOptions, plan: _Plan) -> dict[str, Any]:
    """What must be the same on all ranks, so that they gather and reduce the same."""
    parameters = dict(module.named_parameters())
    named = {**parameters, **dict(module.named_buffers())}
    told: dict[str, Any] = {name: (tuple(one.shape), str(one.dtype)) for name, one in named.items()}
    told.update((f"{name}.requires_grad", one.requires_grad) for name, one in parameters.items())
    told["shard"] = list(plan.units)
    told["ignored_parameters"] = [n for n, one in parameters.items() if one in plan.ignored]
    told["mixed_precision"] = str(options.precision)
    told["cpu_offload"] = str(options.offload)
    told["reshard_after_forward"] = options.free_after_forward
    told["prefetch"] = options.prefetch
    told["sync_module_states"] = options.same_weights
    return told


def place_preprocessors(wrapper: nn.Module, device: torch.device) -> None:
    """Let batches go where the blocks are gathered, which need not be where the shards are."""
    for one in wrapper.modules():
        if isinstance(one, DataPreprocessor):
            one.to(device)


def _is_inside(path: str, root: str) -> bool:
    return path != root and (not root or path.startswith(f"{root}."))


def _set_prefetch(module: Any, units: dict[str, nn.Module], depth: tuple[int, int]) -> None:
    forward: list[Any] = [module, *units.values()]
    backward: list[Any] = [module, *(units[path] for path in in_backward_order(units))]
    for at, one in enumerate(forward):
        following = forward[at + 1 : at + 1 + depth[0]]
        if following:
            one.set_modules_to_forward_prefetch(following)
    for at, one in enumerate(backward):
        following = backward[at + 1 : at + 1 + depth[1]]
        if following:
            one.set_modules_to_backward_prefetch(following)
