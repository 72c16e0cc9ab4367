"""Ranks laid out along named axes: who has which data, who has which part of a tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...collectives import all_gather_object, get_world_size
from ...registry import did_you_mean
from .dtensors import forget_former_groups

# From the outermost to the innermost: the ranks of one tensor group are neighbours.
AXES = ("data", "replicate", "shard", "tensor")


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run, laid out along axes.

    Ranks that differ only on the tensor axis see the same batches; all others see their own.

    Attributes:
        axes: size of every axis, from the outermost to the innermost.
        device_mesh: torch's mesh with these axes; None without a process group.
        data_group: the ranks that see different batches, this one among them; None for all.
    """

    axes: dict[str, int]
    device_mesh: DeviceMesh | None = None
    data_group: ProcessGroup | None = None

    @property
    def data_size(self) -> int:
        """Among how many ranks the batches are shared out."""
        return math.prod(size for name, size in self.axes.items() if name != "tensor")

    @property
    def data_rank(self) -> int:
        """Which of them this one is."""
        return 0 if self.device_mesh is None else self.device_mesh.get_rank() // self.tensor_size

    @property
    def tensor_size(self) -> int:
        """How many ranks share one copy of a layer."""
        return self.axes.get("tensor", 1)

    @property
    def tensor(self) -> DeviceMesh | None:
        """The axis over which layers are split; None without one."""
        return self._part("tensor") if "tensor" in self.axes else None

    @property
    def fsdp(self) -> DeviceMesh | None:
        """What ``fully_shard`` takes: the data axis, or (replicate, shard)."""
        return self._part(*(name for name in self.axes if name != "tensor"))

    def _part(self, *names: str) -> DeviceMesh | None:
        if self.device_mesh is None:
            return None
        return self.device_mesh[names[0] if len(names) == 1 else names]


def check_axes(axes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Return the size of every axis, from the outermost to the innermost.

    A size of -1 is filled with the ranks that the others leave. Without a data axis the ranks
    beside ``tensor`` are none.

    Args:
        axes: sizes of ``data``, or of ``shard`` with or without ``replicate``; and ``tensor``.

    Raises:
        ValueError: the axes do not go together, or do not make up ``world_size``.
    """
    _check_names(axes)
    sizes = {name: axes[name] for name in AXES if name in axes}
    if not {"data", "shard"} & sizes.keys():
        sizes = {"data": 1, **sizes}
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ValueError(f"only one axis can be -1 (the rest of the ranks), got {_product(sizes)}")
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise ValueError(f"the size of axis {name} must be at least 1, or -1, got {size!r}")
    taken = math.prod(size for size in sizes.values() if size != -1)
    if free:
        if world_size % taken:
            raise ValueError(f"{world_size} ranks cannot be divided into {_product(sizes)}")
        sizes[free[0]] = world_size // taken
    elif taken != world_size:
        raise ValueError(f"{_product(sizes)} = {taken} ranks, but there are {world_size}")
    return sizes


def build_mesh(axes: Mapping[str, int], device_type: str = "cpu") -> Mesh:
    """Lay out all ranks along ``axes``; every rank must call this with the same ones.

    Args:
        axes: as for ``check_axes``.
        device_type: where the tensors of a rank live.

    Raises:
        ValueError: the axes do not fit the ranks, or differ between ranks.
    """
    sizes = check_axes(axes, get_world_size())
    if not (distributed.is_available() and distributed.is_initialized()):
        return Mesh(sizes)
    everywhere = all_gather_object(sizes)
    for rank, other in enumerate(everywhere):
        if other != everywhere[0]:
            told = f"{_product(everywhere[0])} on rank 0, {_product(other)} on rank {rank}"
            raise ValueError(f"the mesh must be the same on all ranks, got {told}")
    forget_former_groups()
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return Mesh(sizes, mesh, _data_group(mesh, sizes))


def _check_names(axes: Mapping[str, int]) -> None:
    for name in axes:
        if name not in AXES:
            hint = did_you_mean(str(name), AXES)
            raise ValueError(f"a mesh has no axis {name!r}; its axes are {', '.join(AXES)}{hint}")
    if "data" in axes and {"replicate", "shard"} & axes.keys():
        raise ValueError(
            "a mesh has either a data axis, or shard with or without replicate, "
            f"got {', '.join(axes)}"
        )
    if "replicate" in axes and "shard" not in axes:
        raise ValueError("axis replicate needs shard beside it; copies alone are the data axis")


def _product(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items())


def _data_group(mesh: DeviceMesh, sizes: Mapping[str, int]) -> ProcessGroup | None:
    if sizes.get("tensor", 1) == 1:
        return None
    if "replicate" not in sizes:
        return mesh.get_group("data" if "data" in sizes else "shard")
    own: ProcessGroup | None = None
    # Every rank makes all of the groups: torch names a group by counting the calls.
    for ranks in mesh.mesh.flatten(0, 1).T.tolist():
        group = distributed.new_group(ranks)
        if distributed.get_rank() in ranks:
            own = group
    return own
