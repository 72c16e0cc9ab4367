"""The options of fully sharded training in all their spellings, read into one form, and the mesh
that they ask for.
"""

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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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
from ..sharding.mesh import Mesh
from ..torch_functions import check_options

WrapPolicy: TypeAlias = Callable[..., bool]


class _Spelling(NamedTuple):
    """An option of torch's older class.

    Attributes:
        default: its default here.
        ours: options with the same meaning; only one of them may be given.
        enum: torch's enum of its values.
        remedies: advice for values without a counterpart; None stands for all values except the
            default.
    """

    default: Any = None
    ours: tuple[str, ...] = ()
    enum: Any = None
    remedies: Mapping[str | None, str] = {}


# All spellings of torch's older class; those with a dot are members of an option.
_SPELLINGS = {
    "process_group": _Spelling(ours=("mesh", "device_mesh")),
    "device_mesh": _Spelling(ours=("mesh",)),
    "sharding_strategy": _Spelling(
        ours=("reshard_after_forward",),
        enum=ShardingStrategy,
        remedies={
            "NO_SHARD": "without shards every rank has the whole model, which is "
            "StepDistributedDataParallel (wrapper: ddp)"
        },
    ),
    "auto_wrap_policy": _Spelling(ours=("shard",)),
    "backward_prefetch": _Spelling(
        ours=("prefetch",),
        enum=BackwardPrefetch,
        remedies={
            "BACKWARD_POST": "FSDP2 always gathers the next block before it computes the gradients "
            "of this one (BACKWARD_PRE); leave the option out"
        },
    ),
    "forward_prefetch": _Spelling(ours=("prefetch",)),
    "param_init_fn": _Spelling(),
    "use_orig_params": _Spelling(
        default=True,
        remedies={
            None: "every parameter is sharded by itself and keeps its name; leave the option out"
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
            None: "memory is freed in order without a limiter; leave the option out, prefetch sets "
            "how far ahead parameters are gathered"
        },
    ),
    "mixed_precision.buffer_dtype": _Spelling(
        remedies={None: "buffers keep their dtype; convert them in the model"}
    ),
    "mixed_precision.keep_low_precision_grads": _Spelling(
        default=False,
        remedies={
            None: "gradients have the dtype of their parameters; convert the model itself to the "
            "low precision"
        },
    ),
    "mixed_precision.cast_root_forward_inputs": _Spelling(
        default=True,
        remedies={None: "cast_forward_inputs=False leaves the inputs of all blocks as they are"},
    ),
}
# Options besides the arguments that the wrapper names itself, with their defaults.
FURTHER: dict[str, Any] = {
    "prefetch": None,
    **{name: one.default for name, one in _SPELLINGS.items() if "." not in name},
}
_OF_PRECISION = tuple(name.partition(".")[2] for name in _SPELLINGS if "." in name)
# Strategy -> (parameters are freed after forward, copies on several hosts).
_STRATEGIES = {
    "FULL_SHARD": (True, False),
    "SHARD_GRAD_OP": (False, False),
    "HYBRID_SHARD": (True, True),
    "_HYBRID_SHARD_ZERO2": (False, True),
}
_HYBRID_AXES = ("replicate", "shard")
_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype")
# Names of torch's policies, each with the option that it has.
_POLICIES = {
    "size_based_auto_wrap_policy": "min_num_params",
    "transformer_auto_wrap_policy": "transformer_layer_cls",
    "ModuleWrapPolicy": "module_classes",
    "always_wrap_policy": None,
}


@dataclass(frozen=True)
class FsdpOptions:
    """What the options come down to, whatever they were called."""

    blocks: BlockSpec | None
    policy: WrapPolicy | None
    mesh: Mesh | DeviceMesh | None
    # None, one, or that of the shards and that of the copies.
    groups: tuple[ProcessGroup, ...]
    # Shards within a host, copies on every host.
    hybrid: bool
    precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    free_after_forward: bool | int
    # How many blocks ahead, in forward and in backward; 0 is torch's own way.
    prefetch: tuple[int, int]
    ignored: tuple[Any, ...]
    param_init_fn: Callable[[nn.Module], Any] | None
    same_weights: bool
    device: torch.device | None


def read_options(given: Mapping[str, Any]) -> FsdpOptions:
    """Read checked names with any spelling of their values; ``given`` stays as it is.

    Raises:
        ValueError: settings against each other, or something that FSDP2 has no counterpart for;
            the text says what to use.
        TypeError: a value of another kind.
    """
    options = _checked({**FURTHER, **given})
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
        ignored=tuple(one for name in names for one in _listed(name, options[name])),
        param_init_fn=_read_function("param_init_fn", options["param_init_fn"]),
        same_weights=_flag("sync_module_states", options["sync_module_states"]),
        device=None if device is None else torch.device(device),
    )


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """Check the spellings in ``options``; members of enums are replaced by their names."""
    for name, spelling in _SPELLINGS.items():
        value = options.get(name)
        instead = spelling.remedies.get(None)
        if instead is not None and value not in (spelling.default, None):
            raise ValueError(f"{name}={value!r} has no counterpart: {instead}")
        if spelling.enum is not None:
            options[name] = _member(name, value, spelling)
        said = [one for one in (*spelling.ours, name) if options.get(one) is not None]
        if spelling.ours and value is not None and len(said) > 1:
            raise ValueError(f"{' and '.join(said)} say the same thing: give one of them")
    return options


def _read_free(value: Any, default: bool) -> bool | int:
    if value is None:
        return default
    if not isinstance(value, int) or (value is not False and value < 1):
        raise TypeError(
            "reshard_after_forward must be true, false or a number of ranks that the parameters "
            f"stay shared out over, got {value!r}"
        )
    return value


def _read_groups(value: Any) -> tuple[ProcessGroup, ...]:
    groups = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if value is None:
        return ()
    if len(groups) not in (1, 2) or not all(isinstance(one, ProcessGroup) for one in groups):
        raise TypeError(
            "process_group must be a process group, or two of them (that of the shards and that of "
            f"the copies), got {value!r}"
        )
    return groups


def _read_prefetch(options: Mapping[str, Any]) -> tuple[int, int]:
    depth = options["prefetch"]
    if depth is None:
        return int(_flag("forward_prefetch", options["forward_prefetch"] or False)), 0
    found = (depth, depth)
    if isinstance(depth, Mapping):
        check_options("prefetch", depth, ["forward", "backward"])
        found = (depth.get("forward", 0), depth.get("backward", 0))
    for one in found:
        if isinstance(one, bool) or not isinstance(one, int) or one < 0:
            raise TypeError(f"prefetch must count blocks to gather ahead, from 0, got {depth!r}")
    return found


def _read_policy(value: Any) -> tuple[BlockSpec | None, WrapPolicy | None]:
    """Blocks, or a function of torch's wrapping policies."""
    kind, settings = _typed(value)
    if isinstance(kind, CustomPolicy):
        raise TypeError(
            "auto_wrap_policy of torch's CustomPolicy has no counterpart: give the blocks by shard"
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
        raise ValueError(f"auto_wrap_policy {kind} needs {key}: the classes of the blocks")
    return settings[key], None


def _listed(name: str, value: Any) -> list[Any]:
    kinds = (str, nn.Module, nn.Parameter)
    if value is None or isinstance(value, kinds):
        return [] if value is None else [value]
    if not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of names, modules or parameters, got {value!r}")
    items = list(value)
    for one in items:
        if not isinstance(one, kinds):
            raise TypeError(f"{name} must hold names, modules or parameters, got {one!r}")
    return items


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be true or false, got {value!r}")
    return value


def _member(name: str, value: Any, spelling: _Spelling) -> str | None:
    """Return the name of an enum's member, given by name or as the member itself."""
    enum = spelling.enum
    value = value.name if isinstance(value, enum) else value
    allowed = [one.name for one in enum]
    if value is not None and not isinstance(value, str):
        raise TypeError(
            f"{name} must be one of {', '.join(allowed)}, or a {enum.__name__}, got {value!r}"
        )
    if value in spelling.remedies:
        raise ValueError(f"{name} {value} has no counterpart: {spelling.remedies[value]}")
    if value is not None and value not in allowed:
        hint = did_you_mean(value, allowed)
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}{hint}")
    return value


def _read_function(name: str, value: Any) -> Callable[..., Any] | None:
    """A function, its import path, or a mapping of ``type`` and further arguments."""
    if value is None:
        return None
    function, settings = _typed(value)
    if isinstance(function, str):
        try:
            function = pkgutil.resolve_name(function)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"{name} must be the import path of a function: {error}") from error
    if not callable(function):
        raise TypeError(f"{name} must be a function or its import path, got {function!r}")
    return functools.partial(function, **settings) if settings else function


def _typed(value: Any) -> tuple[Any, dict[str, Any]]:
    """What is named, and its arguments."""
    if not isinstance(value, Mapping):
        return value, {}
    return value.get("type"), {name: one for name, one in value.items() if name != "type"}


def _read_precision(value: Any) -> MixedPrecisionPolicy:
    """torch's policy from a mapping of dtype names, or from its older class."""
    if value is None:
        return MixedPrecisionPolicy()
    if isinstance(value, MixedPrecisionPolicy):
        return value
    if isinstance(value, MixedPrecision):
        names = (*_DTYPES[:2], "cast_forward_inputs", *_OF_PRECISION)
        value = {name: getattr(value, name) for name in names}
        # Here every block casts what comes in, and the root is one of them.
        value["cast_forward_inputs"] |= value["cast_root_forward_inputs"]
        value["cast_root_forward_inputs"] = True
    if not isinstance(value, Mapping):
        raise TypeError(
            "mixed_precision must be a mapping of dtype names or torch's policy, got "
            f"{type(value).__name__}"
        )
    check_options("mixed_precision", value, [*_DTYPES, "cast_forward_inputs", *_OF_PRECISION])
    _checked({f"mixed_precision.{name}": one for name, one in value.items()})
    dtypes = {name: _read_dtype(name, value.get(name)) for name in _DTYPES}
    cast = _flag("cast_forward_inputs", value.get("cast_forward_inputs", True))
    return MixedPrecisionPolicy(**dtypes, cast_forward_inputs=cast)


def _read_dtype(name: str, value: Any) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    if not isinstance(value, str):
        raise TypeError(f"mixed_precision.{name} must be the name of a dtype, got {value!r}")
    found = getattr(torch, value.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        names = ["bfloat16", "float16", "float32", "float64"]
        hint = did_you_mean(value, names)
        raise ValueError(
            f"mixed_precision.{name} must be a dtype such as {', '.join(names)}, "
            f"got {value!r}{hint}"
        )
    return found


def _read_offload(value: Any) -> OffloadPolicy:
    """torch's policy from a bool, a mapping, or its older class."""
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
    # Pinning needs the driver of an accelerator; without one there is nothing to copy to.
    has_device = torch.accelerator.is_available()
    wanted = has_device if pin is None else _flag("cpu_offload.pin_memory", pin)
    return CPUOffloadPolicy(pin_memory=wanted and has_device)


class ShardingMesh(NamedTuple):
    """What ``fully_shard`` takes; that with the tensor axis; its ranks; where to gather."""

    shards: DeviceMesh
    everywhere: DeviceMesh
    data_group: ProcessGroup | None
    device: torch.device


def sharding_mesh(options: FsdpOptions, model: nn.Module) -> ShardingMesh:
    """Read or make the mesh; every rank must call this.

    Raises:
        ValueError: there is no process group, or the mesh does not fit the options.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ValueError(
            "fully sharded training needs a process group, also for one process: call "
            "torch.distributed.init_process_group() before, or start the processes by "
            "stepwrap.runner.launch(main, nproc=...), or use SingleDevice"
        )
    forget_meshes()
    given = options.mesh
    if isinstance(given, Mesh):
        shards = given.fsdp
        if shards is None or given.device_mesh is None:
            raise ValueError("the mesh was built without a process group: build it inside")
        everywhere, group = given.device_mesh, given.data_group
    else:
        shards = given if given is not None else _make(options, _device_type(options, model))
        everywhere, group = shards, _data_group(shards)
    if shards.ndim > 2 or (shards.ndim == 2 and shards.mesh_dim_names is None):
        raise ValueError(
            f"the mesh must have one axis, or two named ones (copies and shards), got {shards}"
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
        f"a mesh of two axes must hold all {get_world_size()} ranks, or be made by "
        f"stepwrap.wrappers.build_mesh, got {mesh}"
    )


def _make(options: FsdpOptions, device_type: str) -> DeviceMesh:
    groups = options.groups
    if len(groups) == 2:
        return _of_two_groups(*groups, device_type=device_type)
    if options.hybrid and groups:
        raise ValueError(
            "sharding_strategy HYBRID_SHARD needs two process groups, that of the shards and "
            "that of the copies, or a mesh of two axes"
        )
    if options.hybrid:
        return _by_host(device_type)
    if groups:
        return DeviceMesh.from_group(groups[0], device_type)
    return init_device_mesh(device_type, (get_world_size(),), mesh_dim_names=("data",))


def _of_two_groups(shards: ProcessGroup, copies: ProcessGroup, *, device_type: str) -> DeviceMesh:
    own = distributed.get_process_group_ranks(shards)
    rows = sorted({tuple(ranks) for ranks in all_gather_object(own)})
    if len({len(row) for row in rows}) > 1 or sum(map(len, rows)) != get_world_size():
        raise ValueError(
            f"the groups of the shards must be alike in size and hold every rank once, got {rows}"
        )
    return DeviceMesh.from_group(
        [copies, shards], device_type, mesh=torch.tensor(rows), mesh_dim_names=_HYBRID_AXES
    )


def _by_host(device_type: str) -> DeviceMesh:
    hosts = all_gather_object(socket.gethostname())
    sizes = [len(list(ranks)) for _, ranks in itertools.groupby(hosts)]
    if len(set(sizes)) > 1 or len(sizes) > len(set(hosts)):
        raise ValueError(
            "HYBRID_SHARD needs equally many neighbouring ranks on every host; give the mesh, "
            f"such as {{replicate: 2, shard: -1}}. Neighbouring ranks on one host: {sizes}"
        )
    return init_device_mesh(device_type, (len(sizes), sizes[0]), mesh_dim_names=_HYBRID_AXES)


def _device_type(options: FsdpOptions, model: nn.Module) -> str:
    if options.device is not None:
        return options.device.type
    for parameter in model.parameters():
        if not parameter.is_meta:
            return parameter.device.type
    # A model without memory yet goes where there is an accelerator that the ranks can use.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return comm_device(prefer=accelerator).type
