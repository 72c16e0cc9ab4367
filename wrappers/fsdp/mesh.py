"""Over which ranks the parameters of a model are spread."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...collectives import all_gather_object, comm_device, get_world_size
from ..sharding.dtensors import forget_former_groups
from ..sharding.mesh import Mesh
from .options import FsdpOptions

_HYBRID_AXES = ("replicate", "shard")


@dataclass(frozen=True)
class ShardingMesh:
    """The ranks of a wrapper.

    Attributes:
        shards: what ``fully_shard`` takes: one axis, or copies and shards.
        everywhere: the same with the axes over which layers are split.
        data_group: the ranks of ``shards``; None for all ranks.
        device: where parameters are gathered.
    """

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
    forget_former_groups()
    given = options.mesh
    if isinstance(given, Mesh):
        shards = given.fsdp
        if shards is None or given.device_mesh is None:
            raise ValueError("the mesh was built without a process group: build it inside")
        everywhere, group = given.device_mesh, given.data_group
    else:
        shards = given if given is not None else _make(options, _device_type(options, model))
        everywhere, group = shards, _data_group(shards)
    _check(shards, options)
    device = torch.device(shards.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return ShardingMesh(shards, everywhere, group, device)


def _check(mesh: DeviceMesh, options: FsdpOptions) -> None:
    if mesh.ndim > 2 or (mesh.ndim == 2 and mesh.mesh_dim_names is None):
        raise ValueError(
            f"the mesh must have one axis, or two named ones (copies and shards), got {mesh}"
        )
    if options.hybrid and mesh.ndim != 2:
        raise ValueError(
            "sharding_strategy HYBRID_SHARD needs a mesh of two axes, copies and shards, such as "
            f"build_mesh({{'replicate': 2, 'shard': -1}}), got {mesh}"
        )


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
    if isinstance(groups, tuple):
        return _of_two_groups(*groups, device_type=device_type)
    if options.hybrid:
        if groups is not None:
            raise ValueError(
                "sharding_strategy HYBRID_SHARD needs two process groups, that of the shards and "
                "that of the copies, or a mesh of two axes"
            )
        return _by_host(device_type)
    if groups is not None:
        return DeviceMesh.from_group(groups, device_type)
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
    sizes = {hosts.count(host) for host in hosts}
    size = hosts.count(hosts[0])
    if len(sizes) > 1 or any(
        len(set(hosts[at : at + size])) > 1 for at in range(0, len(hosts), size)
    ):
        raise ValueError(
            "HYBRID_SHARD needs equally many neighbouring ranks on every host; give the mesh, "
            f"such as {{replicate: 2, shard: -1}}. Ranks per host: {sorted(sizes)}"
        )
    shape = (len(hosts) // size, size)
    return init_device_mesh(device_type, shape, mesh_dim_names=_HYBRID_AXES)


def _device_type(options: FsdpOptions, model: nn.Module) -> str:
    if options.device is not None:
        return options.device.type
    for parameter in model.parameters():
        if not parameter.is_meta:
            return parameter.device.type
    # A model without memory yet goes where there is an accelerator that the ranks can use.
    accelerator = torch.accelerator.current_accelerator()
    return comm_device(prefer=accelerator).type
