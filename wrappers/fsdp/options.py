"""Read the options of fully sharded training, including those from FSDP1, and create its mesh."""

from __future__ import annotations

import functools
import itertools
import pkgutil
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import CustomPolicy, always_wrap_policy

from ...collectives import all_gather_object, comm_device, forget_meshes, get_world_size
from ...registry import did_you_mean
from ..blocks import BlockSpec
from ..sharding.mesh import Mesh, create_device_mesh, require_process_group
from ..torch_functions import check_options

WrapPolicy: TypeAlias = Callable[..., bool]


class _Spelling(NamedTuple):
    """An option of torch's ``FullyShardedDataParallel``, which is FSDP1.

    Attributes:
        default: its default in this wrapper.
        ours: other options with the same meaning; only one of them may be given.
        enum: torch's enum of its values.
        remedies: advice for values that FSDP2 does not support, by value; the key None stands for
            all values except the default.
    """

    default: Any = None
    ours: tuple[str, ...] = ()
    enum: Any = None
    remedies: Mapping[str | None, str] = {}


# All options of FSDP1; "mixed_precision.x" is the field x of the option mixed_precision.
_SPELLINGS = {
    "process_group": _Spelling(ours=("mesh", "device_mesh")),
    "device_mesh": _Spelling(ours=("mesh",)),
    "sharding_strategy": _Spelling(
        ours=("reshard_after_forward",),
        enum=ShardingStrategy,
        remedies={
            "NO_SHARD": "every rank would hold the whole model; use "
            "StepDistributedDataParallel (wrapper: ddp)"
        },
    ),
    "auto_wrap_policy": _Spelling(ours=("shard",)),
    "backward_prefetch": _Spelling(
        ours=("prefetch",),
        enum=BackwardPrefetch,
        remedies={
            "BACKWARD_POST": "FSDP2 always gathers the next block before it computes the gradients "
            "of the current one (BACKWARD_PRE); remove the option"
        },
    ),
    "forward_prefetch": _Spelling(ours=("prefetch",)),
    "param_init_fn": _Spelling(),
    "use_orig_params": _Spelling(
        default=True,
        remedies={
            None: "FSDP2 shards each parameter separately and keeps its name; remove the option"
        },
    ),
    "ignored_parameters": _Spelling(),
    "ignored_modules": _Spelling(),
    "ignored_states": _Spelling(),
    "sync_module_states": _Spelling(default=True),
    "device_id": _Spelling(),
    "limit_all_gathers": _Spelling(
        default=True,
        remedies={
            None: "FSDP2 needs no limiter; remove the option. The option prefetch sets how many "
            "blocks are gathered ahead"
        },
    ),
    "mixed_precision.buffer_dtype": _Spelling(
        remedies={None: "FSDP2 keeps the dtype of buffers; convert them in the model"}
    ),
    "mixed_precision.keep_low_precision_grads": _Spelling(
        default=False,
        remedies={
            None: "gradients always have the dtype of their parameters; convert the model itself "
            "to the low precision"
        },
    ),
    "mixed_precision.cast_root_forward_inputs": _Spelling(
        default=True,
        remedies={None: "use cast_forward_inputs=False, which leaves all blocks' inputs unchanged"},
    ),
}
# The options in **fsdp_kwargs of the wrapper, with their defaults.
EXTRA_OPTIONS: dict[str, Any] = {
    "prefetch": None,
    **{name: spelling.default for name, spelling in _SPELLINGS.items() if "." not in name},
}
_OF_PRECISION = tuple(name.partition(".")[2] for name in _SPELLINGS if "." in name)
# Strategy -> (whether parameters are freed after the forward, whether every host has a copy).
_STRATEGIES = {
    "FULL_SHARD": (True, False),
    "SHARD_GRAD_OP": (False, False),
    "HYBRID_SHARD": (True, True),
    "_HYBRID_SHARD_ZERO2": (False, True),
}
_HYBRID_AXES = ("replicate", "shard")
_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype")
# Names of torch's wrapping policies -> the option of the policy.
_POLICIES = {
    "size_based_auto_wrap_policy": "min_num_params",
    "transformer_auto_wrap_policy": "transformer_layer_cls",
    "ModuleWrapPolicy": "module_classes",
    "always_wrap_policy": None,
}


@dataclass(frozen=True)
class FsdpOptions:
    """The checked options; options of FSDP1 are translated.

    Attributes:
        groups: no group, one group, or the group of the shards and the group of the copies.
        hybrid: whether to shard within a host and keep a copy of the model on every host.
        prefetch: number of blocks to gather ahead in forward and backward; 0: torch's default.
    """

    blocks: BlockSpec | None
    policy: WrapPolicy | None
    mesh: Mesh | DeviceMesh | None
    groups: tuple[ProcessGroup, ...]
    hybrid: bool
    precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    free_after_forward: bool | int
    prefetch: tuple[int, int]
    ignored: tuple[Any, ...]
    param_init_fn: Callable[[nn.Module], Any] | None
    same_weights: bool
    device: torch.device | None


def read_options(options_given: Mapping[str, Any]) -> FsdpOptions:
    """Read options whose names have been checked; do not change ``options_given``.

    Raises:
        ValueError: options contradict each other, or FSDP2 does not support a value.
        TypeError: a value has the wrong type.
    """
    options = _read_spellings({**EXTRA_OPTIONS, **options_given})
    blocks, policy = _read_policy(options["auto_wrap_policy"])
    free, hybrid = _STRATEGIES[options["sharding_strategy"] or "FULL_SHARD"]
    device, mesh = options["device_id"], options.get("mesh")
    names = ("ignored_parameters", "ignored_modules", "ignored_states")
    return FsdpOptions(
        blocks=options.get("shard") if policy is None and blocks is None else blocks,
        policy=policy,
        mesh=options["device_mesh"] if mesh is None else mesh,
        groups=_read_groups(options["process_group"]),
        hybrid=hybrid,
        precision=_read_precision(options.get("mixed_precision")),
        offload=_read_offload(options.get("cpu_offload")),
        free_after_forward=_read_free(options.get("reshard_after_forward"), free),
        prefetch=_read_prefetch(options),
        ignored=tuple(entry for name in names for entry in _listed(name, options[name])),
        param_init_fn=_read_function("param_init_fn", options["param_init_fn"]),
        same_weights=_flag("sync_module_states", options["sync_module_states"]),
        device=None if device is None else torch.device(device),
    )


def _read_spellings(options: dict[str, Any]) -> dict[str, Any]:
    """Check the options of FSDP1 in ``options``, and replace enum members by their names."""
    for name, spelling in _SPELLINGS.items():
        value = options.get(name)
        instead = spelling.remedies.get(None)
        if instead is not None and value not in (spelling.default, None):
            raise ValueError(f"{name}={value!r} has no counterpart in FSDP2: {instead}")
        if spelling.enum is not None:
            options[name] = _member(name, value, spelling)
        same = [key for key in (*spelling.ours, name) if options.get(key) is not None]
        if value is not None and len(same) > 1:
            raise ValueError(f"{' and '.join(same)} have the same meaning: give only one of them")
    return options


def _read_free(value: Any, default: bool) -> bool | int:
    if value is None:
        return default
    if not isinstance(value, int) or (value is not False and value < 1):
        raise TypeError(
            "reshard_after_forward must be true, false or a number of ranks over which the "
            f"parameters stay sharded, got {value!r}"
        )
    return value


def _read_groups(value: Any) -> tuple[ProcessGroup, ...]:
    if value is None:
        return ()
    groups = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if len(groups) not in (1, 2) or not all(isinstance(group, ProcessGroup) for group in groups):
        raise TypeError(
            "process_group must be a process group, or two of them (for the shards and for the "
            f"copies), got {value!r}"
        )
    return groups


def _read_prefetch(options: Mapping[str, Any]) -> tuple[int, int]:
    depth = options["prefetch"]
    if depth is None:
        return int(_flag("forward_prefetch", options["forward_prefetch"] or False)), 0
    depths = (depth, depth)
    if isinstance(depth, Mapping):
        check_options("prefetch", depth, ["forward", "backward"])
        depths = (depth.get("forward", 0), depth.get("backward", 0))
    for value in depths:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise TypeError(f"prefetch must be a number of blocks to gather ahead, got {depth!r}")
    return depths


def _read_policy(value: Any) -> tuple[BlockSpec | None, WrapPolicy | None]:
    """Return the blocks and the function of a wrapping policy of FSDP1; at least one is None."""
    kind, settings = _split_type(value)
    if isinstance(kind, CustomPolicy):
        raise TypeError(
            "auto_wrap_policy must not be a CustomPolicy, which FSDP2 does not support; name the "
            "blocks in shard"
        )
    if not isinstance(kind, str) or "." in kind:
        return None, _read_function("auto_wrap_policy", value)
    if kind not in _POLICIES:
        hint = did_you_mean(kind, _POLICIES)
        raise ValueError(
            f"auto_wrap_policy must be one of {', '.join(_POLICIES)}, or the import path of a "
            f"function, got {kind!r}{hint}"
        )
    key = _POLICIES[kind]
    check_options(kind, settings, [key] if key else [])
    if key is None:
        return None, always_wrap_policy
    if key == "min_num_params":
        return {"min_params": settings.get(key, 100_000_000)}, None
    if key not in settings:
        raise ValueError(f"auto_wrap_policy {kind} needs {key}, the classes of the blocks")
    return settings[key], None


def _listed(name: str, value: Any) -> list[Any]:
    kinds = (str, nn.Module, nn.Parameter)
    if value is None:
        return []
    if isinstance(value, kinds):
        return [value]
    if not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of names, modules or parameters, got {value!r}")
    entries = list(value)
    for entry in entries:
        if not isinstance(entry, kinds):
            raise TypeError(f"{name} must contain names, modules or parameters, got {entry!r}")
    return entries


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be true or false, got {value!r}")
    return value


def _member(name: str, value: Any, spelling: _Spelling) -> str | None:
    """Return the name of an enum member that was given by name or as the member itself."""
    enum = spelling.enum
    value = value.name if isinstance(value, enum) else value
    allowed = [member.name for member in enum]
    if value is not None and not isinstance(value, str):
        raise TypeError(
            f"{name} must be one of {', '.join(allowed)}, or a {enum.__name__}, got {value!r}"
        )
    if value in spelling.remedies:
        raise ValueError(f"{name} {value} has no counterpart in FSDP2: {spelling.remedies[value]}")
    if value is not None and value not in allowed:
        hint = did_you_mean(value, allowed)
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}{hint}")
    return value


def _read_function(name: str, value: Any) -> Callable[..., Any] | None:
    """Read a function, its import path, or a mapping of ``type`` and further arguments."""
    if value is None:
        return None
    function, settings = _split_type(value)
    if isinstance(function, str):
        try:
            function = pkgutil.resolve_name(function)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"{name} must be the import path of a function: {error}") from error
    if not callable(function):
        raise TypeError(f"{name} must be a function or its import path, got {function!r}")
    return functools.partial(function, **settings) if settings else function


def _split_type(value: Any) -> tuple[Any, dict[str, Any]]:
    """Return the ``type`` of a mapping and its other items; for other values, the value and {}."""
    if not isinstance(value, Mapping):
        return value, {}
    return value.get("type"), {name: option for name, option in value.items() if name != "type"}


def _read_precision(value: Any) -> MixedPrecisionPolicy:
    """Read torch's policy, a mapping of dtype names, or FSDP1's ``MixedPrecision``."""
    if value is None:
        return MixedPrecisionPolicy()
    if isinstance(value, MixedPrecisionPolicy):
        return value
    if isinstance(value, MixedPrecision):
        names = (*_DTYPES[:2], "cast_forward_inputs", *_OF_PRECISION)
        value = {name: getattr(value, name) for name in names}
        # In FSDP2 every block casts its inputs, and the root is a block too.
        value["cast_forward_inputs"] |= value["cast_root_forward_inputs"]
        value["cast_root_forward_inputs"] = True
    if not isinstance(value, Mapping):
        raise TypeError(
            "mixed_precision must be a mapping of dtype names or torch's policy, got "
            f"{type(value).__name__}"
        )
    check_options("mixed_precision", value, [*_DTYPES, "cast_forward_inputs", *_OF_PRECISION])
    _read_spellings({f"mixed_precision.{name}": dtype for name, dtype in value.items()})
    dtypes = {name: _read_dtype(name, value.get(name)) for name in _DTYPES}
    cast = _flag("cast_forward_inputs", value.get("cast_forward_inputs", True))
    return MixedPrecisionPolicy(**dtypes, cast_forward_inputs=cast)


def _read_dtype(name: str, value: Any) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    if not isinstance(value, str):
        raise TypeError(f"mixed_precision.{name} must be the name of a dtype, got {value!r}")
    dtype = getattr(torch, value.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        names = ["bfloat16", "float16", "float32", "float64"]
        hint = did_you_mean(value, names)
        raise ValueError(
            f"mixed_precision.{name} must be a dtype such as {', '.join(names)}, "
            f"got {value!r}{hint}"
        )
    return dtype


def _read_offload(value: Any) -> OffloadPolicy:
    """Read torch's policy, a bool, a mapping, or FSDP1's ``CPUOffload``."""
    if isinstance(value, OffloadPolicy):
        return value
    pin: Any = None
    if isinstance(value, CPUOffload):
        value = value.offload_params
    elif isinstance(value, Mapping):
        check_options("cpu_offload", value, ["offload_params", "pin_memory"])
        pin = value.get("pin_memory")
        value = value.get("offload_params", True)
    if not _flag("cpu_offload", value or False):
        return OffloadPolicy()
    # Pinned memory needs the driver of an accelerator.
    has_device = torch.accelerator.is_available()
    wants_pinned = has_device if pin is None else _flag("cpu_offload.pin_memory", pin)
    return CPUOffloadPolicy(pin_memory=wants_pinned and has_device)


class ShardingMesh(NamedTuple):
    """The meshes of a sharded model.

    Attributes:
        shards: the mesh for ``fully_shard``.
        everywhere: the same mesh, including the tensor axis if there is one.
        data_group: the ranks that see different batches; None for all ranks.
        device: the device on which blocks are gathered.
    """

    shards: DeviceMesh
    everywhere: DeviceMesh
    data_group: ProcessGroup | None
    device: torch.device


def sharding_mesh(options: FsdpOptions, model: nn.Module) -> ShardingMesh:
    """Return the mesh that the options name, or create one; every rank must call this.

    Raises:
        ValueError: the process group is missing, or the mesh does not fit the options.
    """
    require_process_group("fully sharded training", "use SingleDevice")
    forget_meshes()
    mesh = options.mesh
    if isinstance(mesh, Mesh):
        shards = mesh.fsdp
        if shards is None or mesh.device_mesh is None:
            raise ValueError(
                "mesh must be built after the process group is initialised, but was built before"
            )
        everywhere, group = mesh.device_mesh, mesh.data_group
    else:
        shards = mesh if mesh is not None else _create_mesh(options, _device_type(options, model))
        everywhere, group = shards, _data_group(shards)
    if shards.ndim > 2 or (shards.ndim == 2 and shards.mesh_dim_names is None):
        raise ValueError(
            f"the mesh must have one axis, or two named axes (copies and shards), got {shards}"
        )
    if options.hybrid and shards.ndim != 2:
        raise ValueError(
            "sharding_strategy HYBRID_SHARD needs a mesh of two axes, copies and shards, such as "
            f"build_mesh({{'replicate': 2, 'shard': -1}}), got {shards}"
        )
    device = torch.device(shards.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return ShardingMesh(shards, everywhere, group, device)


def _data_group(mesh: DeviceMesh) -> ProcessGroup | None:
    if mesh.size() == get_world_size():
        return None
    if mesh.ndim == 1:
        return mesh.get_group()
    raise ValueError(
        f"a mesh of two axes must contain all {get_world_size()} ranks, or be built by "
        f"stepwrap.wrappers.build_mesh, got {mesh}"
    )


def _create_mesh(options: FsdpOptions, device_type: str) -> DeviceMesh:
    groups = options.groups
    if len(groups) == 2:
        return _mesh_of_groups(*groups, device_type=device_type)
    if options.hybrid and groups:
        raise ValueError(
            "sharding_strategy HYBRID_SHARD needs two process groups (for the shards and for the "
            "copies), or a mesh of two axes, got one process group"
        )
    if options.hybrid:
        return _mesh_of_hosts(device_type)
    if groups:
        return DeviceMesh.from_group(groups[0], device_type)
    return create_device_mesh(device_type, {"data": get_world_size()})


def _mesh_of_groups(shards: ProcessGroup, copies: ProcessGroup, *, device_type: str) -> DeviceMesh:
    shard_ranks = distributed.get_process_group_ranks(shards)
    rows = sorted({tuple(ranks) for ranks in all_gather_object(shard_ranks)})
    if len({len(row) for row in rows}) > 1 or sum(map(len, rows)) != get_world_size():
        raise ValueError(
            "the groups of the shards must have equal sizes and contain every rank once, got "
            f"{rows}"
        )
    return DeviceMesh.from_group(
        [copies, shards], device_type, mesh=torch.tensor(rows), mesh_dim_names=_HYBRID_AXES
    )


def _mesh_of_hosts(device_type: str) -> DeviceMesh:
    hosts = all_gather_object(socket.gethostname())
    sizes = [len(list(ranks)) for _, ranks in itertools.groupby(hosts)]
    if len(set(sizes)) > 1 or len(sizes) > len(set(hosts)):
        raise ValueError(
            "HYBRID_SHARD needs the same number of consecutive ranks on every host, got "
            f"{sizes}; give the mesh, such as {{replicate: 2, shard: -1}}"
        )
    return create_device_mesh(device_type, {"replicate": len(sizes), "shard": sizes[0]})


def _device_type(options: FsdpOptions, model: nn.Module) -> str:
    if options.device is not None:
        return options.device.type
    for parameter in model.parameters():
        if not parameter.is_meta:
            return parameter.device.type
    # A model on the meta device is materialised on the accelerator if the backend supports it.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return comm_device(prefer=accelerator).type
