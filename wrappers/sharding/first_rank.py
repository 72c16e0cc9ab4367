"""What the first rank has, on all ranks of a mesh."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ...collectives import comm_device
from .layout import local_part

_BUCKET_BYTES = 64 * 2**20


@torch.no_grad()
def broadcast_first(tensors: Iterable[Tensor], mesh: DeviceMesh) -> None:
    """Overwrite ``tensors`` with those of the mesh's first rank; every rank must call this.

    Of sharded tensors the local parts travel. Those of one dtype travel together.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        part = local_part(tensor)
        if part.numel():
            by_kind.setdefault((part.dtype, part.device), []).append(part)
    for group, source in routes(mesh):
        for (_, device), parts in by_kind.items():
            for bucket in _buckets(parts):
                _send(bucket, group, source, comm_device(group, prefer=device))


def routes(mesh: DeviceMesh) -> Iterator[tuple[ProcessGroup, int]]:
    """One group for each axis, and its rank that has what the first rank of the mesh has."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"rank {distributed.get_rank()} is not in the mesh {mesh}")
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            place = list(coordinate)
            place[axis] = 0
            yield mesh.get_group(axis), int(mesh.mesh[tuple(place)])


def _buckets(parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for part in parts:
        bucket.append(part)
        size += part.nbytes
        if size >= _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _send(bucket: Sequence[Tensor], group: ProcessGroup, source: int, device: torch.device) -> None:
    flat = torch.cat([part.reshape(-1) for part in bucket]).to(device)
    distributed.broadcast(flat, source, group=group)
    if distributed.get_rank() == source:
        return
    sizes = [part.numel() for part in bucket]
    for part, values in zip(bucket, torch.split(flat, sizes), strict=True):
        part.copy_(values.view(part.shape))
