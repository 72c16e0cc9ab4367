"""Meshes of ranks with named axes, and checks over them."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...collectives import (
    all_gather_object,
    distributed_available,
    forget_meshes,
    get_rank,
    get_world_size,
    obj2tensor,
    run_together,
)
from ...collectives.process.init import inherit_timeout
from ...registry import did_you_mean
from ..layout import routes

logger = logging.getLogger(__name__)

# From the outermost to the innermost; so the ranks of a tensor group are consecutive.
AXES = ("data", "replicate", "shard", "tensor")


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run, arranged in a grid with named axes.

    Ranks that differ only in their position on the tensor axis form a *tensor group*: they see the
    same batches and share the work of split layers. Ranks of different tensor groups see different
    batches.

    Attributes:
        axes: the size of every axis, from the outermost to the innermost.
        device_mesh: torch's mesh with these axes; None without a process group.
        data_group: the group that contains this rank and the ranks at the same position in the
            other tensor groups; they all see different batches. None for all ranks, if the tensor
            axis is missing or has size 1.
    """

    axes: dict[str, int]
    device_mesh: DeviceMesh | None = None
    data_group: ProcessGroup | None = None

    @property
    def data_size(self) -> int:
        """The number of different batches per step: one for each tensor group."""
        return math.prod(self.axes.values()) // self.tensor_size

    @property
    def data_rank(self) -> int:
        """The index of this rank's batch, from 0 to ``data_size - 1``."""
        return 0 if self.device_mesh is None else self.device_mesh.get_rank() // self.tensor_size

    @property
    def tensor_size(self) -> int:
        """The number of ranks in a tensor group; 1 without a tensor axis."""
        return self.axes.get("tensor", 1)

    @property
    def tensor(self) -> DeviceMesh | None:
        """The mesh over which layers are split; None without a tensor axis."""
        return self._part("tensor") if "tensor" in self.axes else None

    @property
    def fsdp(self) -> DeviceMesh | None:
        """The mesh for ``fully_shard``: all axes except tensor; None without a process group."""
        return self._part(*(name for name in self.axes if name != "tensor"))

    def _part(self, *names: str) -> DeviceMesh | None:
        mesh = self.device_mesh
        return None if mesh is None else mesh[names[0] if len(names) == 1 else names]


def check_axes(axes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Check axes; return the size of every axis, from the outermost to the innermost.

    Args:
        axes: sizes of the axes: either ``data`` (default: 1), or ``shard`` and optionally
            ``replicate``; and optionally ``tensor``. One size may be -1, for the remaining ranks.

    Raises:
        ValueError: the axes cannot be combined, or their product is not ``world_size``.
    """
    _check_names(axes)
    sizes = {name: axes[name] for name in AXES if name in axes}
    if not {"data", "shard"} & sizes.keys():
        sizes = {"data": 1, **sizes}
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ValueError(f"only one axis can be -1 (the remaining ranks), got {_axes_text(sizes)}")
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise ValueError(f"the size of axis {name} must be at least 1, or -1, got {size!r}")
    product = math.prod(size for size in sizes.values() if size != -1)
    if free:
        if world_size % product:
            raise ValueError(f"{world_size} ranks cannot be divided into {_axes_text(sizes)}")
        sizes[free[0]] = world_size // product
    elif product != world_size:
        raise ValueError(f"{_axes_text(sizes)} = {product} ranks, but there are {world_size}")
    return sizes


def build_mesh(axes: Mapping[str, int], device_type: str = "cpu") -> Mesh:
    """Build a mesh of all ranks; every rank must call this with the same ``axes``.

    Args:
        axes: sizes of the axes: either ``data`` (default: 1), or ``shard`` and optionally
            ``replicate``; and optionally ``tensor``. One size may be -1, for the remaining ranks.
        device_type: the type of the device that holds the model, "cpu" or "cuda".

    Raises:
        ValueError: the axes do not fit the number of ranks, or differ between ranks.
    """
    agree(lambda: {"mesh": _axes_text(check_axes(axes, get_world_size()))})
    sizes = check_axes(axes, get_world_size())
    if not distributed_available():
        return Mesh(sizes)
    # torch would reuse an equal mesh of an earlier process group, whose groups no longer exist.
    forget_meshes()
    mesh = create_device_mesh(device_type, sizes)
    return Mesh(sizes, mesh, _data_group(mesh, sizes))


def create_device_mesh(device_type: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """Create a mesh of all ranks with these axes, whose groups have the timeout of all ranks."""
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for group in mesh.get_all_groups():
        inherit_timeout(group)
    return mesh


def _check_names(axes: Mapping[str, int]) -> None:
    for name in axes:
        if name not in AXES:
            hint = did_you_mean(str(name), AXES)
            raise ValueError(f"a mesh has no axis {name!r}; its axes are {', '.join(AXES)}{hint}")
    if "data" in axes and {"replicate", "shard"} & axes.keys():
        raise ValueError(
            "a mesh must have either a data axis, or shard with or without replicate, "
            f"got {', '.join(axes)}"
        )
    if "replicate" in axes and "shard" not in axes:
        raise ValueError(
            "axis replicate needs shard as well; for copies without shards use the data axis"
        )


def _axes_text(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items())


def _data_group(mesh: DeviceMesh, sizes: Mapping[str, int]) -> ProcessGroup | None:
    if sizes.get("tensor", 1) == 1:
        return None
    if "replicate" not in sizes:
        return mesh.get_group("data" if "data" in sizes else "shard")
    data_group: ProcessGroup | None = None
    # Every rank must create all groups, because torch names groups by counting these calls.
    for ranks in mesh.mesh.flatten(0, 1).T.tolist():
        group = distributed.new_group(ranks)
        inherit_timeout(group)
        if distributed.get_rank() in ranks:
            data_group = group
    return data_group


def agree(describe: Callable[[], Mapping[str, Any]], mesh: DeviceMesh | None = None) -> None:
    """Raise on every rank if ``describe`` raises on one rank, or if its results differ.

    Every rank of the mesh (default: of the run) must call this. The ranks exchange hashes of the
    results.

    Args:
        describe: returns the values to compare, with a name for each that is used in the message.
            The values must be picklable.

    Raises:
        ValueError: the results differ between ranks.
        Exception: the error of ``describe``, on all ranks.
    """
    described: dict[str, Any] = {}

    def digest() -> bytes:
        described.update(describe())
        # Hashed, because exchanging large descriptions between many ranks would take long.
        return hashlib.sha256(obj2tensor(described, "cpu").numpy().data).digest()

    digests, failures, error = run_together(digest, lambda report: _gather(report, mesh))
    if error is not None and len({failure and failure.full_text for failure in failures}) == 1:
        raise error
    for failure in filter(None, failures):
        raise failure.kind(f"on rank {failure.rank}: {failure.text}") from error
    if len(set(digests)) == 1:
        return
    (first_rank, reference), *other_descriptions = _gather((get_rank(), described), mesh)
    for rank, other in other_descriptions:
        for name in [*reference, *other]:
            expected, actual = reference.get(name, "absent"), other.get(name, "absent")
            if expected != actual:
                raise ValueError(
                    "the model and all options must be the same on all ranks, but "
                    f"{name!r} is {expected} on rank {first_rank} and {actual} on rank {rank}"
                )


def _gather(value: Any, mesh: DeviceMesh | None) -> list[Any]:
    if mesh is None or not distributed_available():
        return all_gather_object(value)
    by_rank = {get_rank(): value}
    for group, _ in routes(mesh):
        by_rank = dict(ChainMap(*all_gather_object(by_rank, group)))
    return [by_rank[rank] for rank in sorted(by_rank)]


def warn_of_gloo(kind: str, device: torch.device, group: ProcessGroup | None = None) -> None:
    """Warn on the first rank if a model on a CUDA device communicates through host memory."""
    if device.type != "cuda" or get_rank() or get_world_size() == 1:
        return
    backend = distributed.get_backend_config(group)
    if "nccl" not in backend:
        logger.warning(
            "%s communicates through %s, which copies from and to %s: start at most one process "
            "for each CUDA device (visible here: %d, processes: %d) with the backend auto or nccl",
            *(kind, backend, device, torch.cuda.device_count(), get_world_size()),
        )


def require_process_group(kind: str, remedy: str) -> None:
    """Raise ValueError without a process group; ``remedy`` is another solution."""
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ValueError(
            f"{kind} needs a process group, even for one process: call "
            "torch.distributed.init_process_group() first, or start the processes by "
            f"stepwrap.runner.launch(main, nproc=...), or {remedy}"
        )
