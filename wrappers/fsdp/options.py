"""The options of fully sharded training in all their spellings, read into one form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import CustomPolicy

from ...registry import did_you_mean
from ..blocks import BlockSpec
from ..sharding.mesh import Mesh
from ..torch_functions import check_options
from .values import arguments_in, flag, member, read_function, read_offload, read_precision

WrapPolicy: TypeAlias = Callable[..., bool]
Groups: TypeAlias = ProcessGroup | tuple[ProcessGroup, ProcessGroup]

# Further options beside the arguments that the wrapper names itself, with their defaults.
FURTHER: dict[str, Any] = {
    "prefetch": None,
    "process_group": None,
    "device_mesh": None,
    "sharding_strategy": None,
    "auto_wrap_policy": None,
    "backward_prefetch": None,
    "forward_prefetch": None,
    "param_init_fn": None,
    "use_orig_params": True,
    "ignored_parameters": None,
    "ignored_modules": None,
    "ignored_states": None,
    "sync_module_states": True,
    "device_id": None,
    "limit_all_gathers": True,
}
# Strategy -> (parameters are freed after forward, copies on several hosts).
_STRATEGIES = {
    "FULL_SHARD": (True, False),
    "SHARD_GRAD_OP": (False, False),
    "HYBRID_SHARD": (True, True),
    "_HYBRID_SHARD_ZERO2": (False, True),
}
_POLICIES = (
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
)


@dataclass(frozen=True)
class FsdpOptions:
    """What the options come down to, whatever they were called.

    Attributes:
        blocks: which modules are gathered and freed on their own.
        policy: the same as a function of torch's wrapping policies.
        mesh: over which ranks; None for all, or those of ``groups``.
        groups: one process group, or that of the shards and that of the copies.
        hybrid: shards within a host, copies on every host.
        free_after_forward: as torch's ``reshard_after_forward``.
        prefetch: how many blocks are gathered ahead, in forward and in backward; 0 is torch's
            own way.
        ignored: parameters and modules, or their names, that stay whole.
    """

    blocks: BlockSpec | None
    policy: WrapPolicy | None
    mesh: Mesh | DeviceMesh | None
    groups: Groups | None
    hybrid: bool
    precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    free_after_forward: bool | int
    prefetch: tuple[int, int]
    ignored: tuple[Any, ...]
    param_init_fn: Callable[[nn.Module], Any] | None
    same_weights: bool
    device: torch.device | None


def read_options(given: Mapping[str, Any]) -> FsdpOptions:
    """Read checked names with any spelling of their values; ``given`` stays as it is.

    Raises:
        ValueError: unknown names, settings against each other, or something that FSDP2 has no
            counterpart for; the text says what to use.
        TypeError: a value of another kind.
    """
    options = {**FURTHER, **given}
    _refuse_without_counterpart(options)
    blocks, policy = _read_policy(options["auto_wrap_policy"])
    _only_one(options, "shard", "auto_wrap_policy")
    _only_one(options, "mesh", "device_mesh", "process_group")
    _only_one(options, "reshard_after_forward", "sharding_strategy")
    free, hybrid = _read_strategy(options["sharding_strategy"])
    if options.get("reshard_after_forward") is not None:
        free = _read_free(options["reshard_after_forward"])
    device = options["device_id"]
    ignored = [
        one
        for name in ("ignored_parameters", "ignored_modules", "ignored_states")
        for one in _listed(name, options[name])
    ]
    mesh = options.get("mesh")
    return FsdpOptions(
        blocks=options.get("shard") if policy is None and blocks is None else blocks,
        policy=policy,
        mesh=options["device_mesh"] if mesh is None else mesh,
        groups=_read_groups(options["process_group"]),
        hybrid=hybrid,
        precision=read_precision(options.get("mixed_precision")),
        offload=read_offload(options.get("cpu_offload")),
        free_after_forward=free,
        prefetch=_read_prefetch(options),
        ignored=tuple(ignored),
        param_init_fn=read_function("param_init_fn", options["param_init_fn"]),
        same_weights=flag("sync_module_states", options["sync_module_states"]),
        device=None if device is None else torch.device(device),
    )


def _only_one(options: Mapping[str, Any], *names: str) -> None:
    said = [name for name in names if options.get(name) is not None]
    if len(said) > 1:
        raise ValueError(f"{' and '.join(said)} say the same thing: give one of them")


def _refuse_without_counterpart(options: Mapping[str, Any]) -> None:
    if options["use_orig_params"] not in (True, None):
        raise ValueError(
            f"use_orig_params={options['use_orig_params']!r} has no counterpart: every parameter "
            "is sharded by itself and keeps its name; leave the option out"
        )
    if options["limit_all_gathers"] not in (True, None):
        raise ValueError(
            f"limit_all_gathers={options['limit_all_gathers']!r} has no counterpart: memory is "
            "freed in order without a limiter; leave the option out, prefetch sets how far ahead "
            "parameters are gathered"
        )


def _read_strategy(value: Any) -> tuple[bool | int, bool]:
    if value is None:
        return True, False
    name = member("sharding_strategy", value, ShardingStrategy, [*_STRATEGIES, "NO_SHARD"])
    if name == "NO_SHARD":
        raise ValueError(
            "sharding_strategy NO_SHARD has no counterpart: without shards every rank has the "
            "whole model, which is StepDistributedDataParallel (wrapper: ddp)"
        )
    return _STRATEGIES[name]


def _read_free(value: Any) -> bool | int:
    if not isinstance(value, int) or (not isinstance(value, bool) and value < 1):
        raise TypeError(
            "reshard_after_forward must be true, false or a number of ranks that the parameters "
            f"stay shared out over, got {value!r}"
        )
    return value


def _read_groups(value: Any) -> Groups | None:
    if value is None or isinstance(value, ProcessGroup):
        return value
    if (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and all(isinstance(one, ProcessGroup) for one in value)
    ):
        return value[0], value[1]
    raise TypeError(
        "process_group must be a process group, or two of them (that of the shards and that of "
        f"the copies), got {value!r}"
    )


def _read_prefetch(options: Mapping[str, Any]) -> tuple[int, int]:
    depth = options["prefetch"]
    _only_one(options, "prefetch", "backward_prefetch")
    _only_one(options, "prefetch", "forward_prefetch")
    if options["backward_prefetch"] is not None:
        names = [one.name for one in BackwardPrefetch]
        name = member("backward_prefetch", options["backward_prefetch"], BackwardPrefetch, names)
        if name == "BACKWARD_POST":
            raise ValueError(
                "backward_prefetch BACKWARD_POST has no counterpart: the next block is gathered "
                "before the gradients of this one, as by BACKWARD_PRE; leave the option out"
            )
    if depth is None:
        return int(flag("forward_prefetch", options["forward_prefetch"] or False)), 0
    if isinstance(depth, Mapping):
        check_options("prefetch", depth, ["forward", "backward"])
        found = (depth.get("forward", 0), depth.get("backward", 0))
    else:
        found = (depth, depth)
    for one in found:
        if isinstance(one, bool) or not isinstance(one, int) or one < 0:
            raise TypeError(f"prefetch must count blocks to gather ahead, from 0, got {depth!r}")
    return found


def _read_policy(value: Any) -> tuple[BlockSpec | None, WrapPolicy | None]:
    """Blocks, or a function of torch's wrapping policies."""
    if isinstance(value, str):
        value = {"type": value}
    if isinstance(value, Mapping):
        return _named_policy(value.get("type"), arguments_in(value))
    if isinstance(value, CustomPolicy):
        raise TypeError(
            "auto_wrap_policy of torch's CustomPolicy has no counterpart: give the blocks by shard"
        )
    if value is not None and not callable(value):
        raise TypeError(f"auto_wrap_policy must be a name, a mapping or a function, got {value!r}")
    return None, value


def _named_policy(
    kind: Any, settings: Mapping[str, Any]
) -> tuple[BlockSpec | None, WrapPolicy | None]:
    if kind == "size_based_auto_wrap_policy":
        check_options(kind, settings, ["min_num_params"])
        return {"min_params": settings.get("min_num_params", 100_000_000)}, None
    if kind in ("transformer_auto_wrap_policy", "ModuleWrapPolicy"):
        key = "module_classes" if kind == "ModuleWrapPolicy" else "transformer_layer_cls"
        check_options(kind, settings, [key])
        if key not in settings:
            raise ValueError(f"auto_wrap_policy {kind} needs {key}: the classes of the blocks")
        return settings[key], None
    if kind == "always_wrap_policy":
        check_options(kind, settings, [])
        return None, lambda module, recurse, nonwrapped_numel: True
    if isinstance(kind, str) and "." not in kind:
        hint = did_you_mean(kind, _POLICIES)
        raise ValueError(
            f"auto_wrap_policy must be one of {', '.join(_POLICIES)}, or the import path of a "
            f"function, got {kind!r}{hint}"
        )
    return None, read_function("auto_wrap_policy", {**settings, "type": kind})


def _listed(name: str, value: Any) -> list[Any]:
    if value is None:
        return []
    items = [value] if isinstance(value, (str, nn.Module, nn.Parameter)) else _iterable(name, value)
    for one in items:
        if not isinstance(one, (str, nn.Module, nn.Parameter)):
            raise TypeError(f"{name} must hold names, modules or parameters, got {one!r}")
    return items


def _iterable(name: str, value: Any) -> list[Any]:
    if not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of names, modules or parameters, got {value!r}")
    return list(value)
