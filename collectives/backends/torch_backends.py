"""The backends for torch process groups, and the one for a single process."""

from typing import TypeVar

import torch
import torch.distributed as dist

from ..errors import Group
from ..objects.objects import all_gather_object, broadcast
from ..process.ranks import comm_device, distributed_available, live_world_size, members
from ..trace.calling import calling
from .base import BaseDistBackend, PicklesInTensors, TensorBaseDistBackend

# Configs can only name classes in `__all__`.
__all__ = ["NonDist", "TorchCPUDist", "TorchCUDADist", "TorchDist"]

T = TypeVar("T")


class NonDist(BaseDistBackend):
    """The backend of a single process: it never communicates and returns the object itself."""

    is_initialized = False
    rank = 0
    world_size = 1

    def all_gather_object(self, obj: T) -> list[T]:
        return [obj]

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        return obj


class _TorchRanks(BaseDistBackend):
    group: Group = None

    @property
    def is_initialized(self) -> bool:
        return distributed_available()

    @property
    def rank(self) -> int:
        """The rank within the group; 0 without one. Raises ValueError on non-members."""
        live_world_size(self.group)
        return dist.get_rank(self.group) if distributed_available() else 0

    @property
    def world_size(self) -> int:
        return live_world_size(self.group)


class TorchDist(_TorchRanks):
    """The ranks of a torch process group; a single process if there is none.

    This is the fastest backend: it calls ``stepwrap.collectives.all_gather_object`` and
    ``broadcast``, which choose how objects are sent. In a sub-group, ranks are group ranks, not
    global ranks: ``rank`` is this process's index in the result of ``all_gather_object``.

    Args:
        group: default: the default group, which may be created later.
    """

    def __init__(self, group: Group = None) -> None:
        self.group = group

    def all_gather_object(self, obj: T) -> list[T]:
        return all_gather_object(obj, self.group)

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        ranks = members(self.group)
        if src not in range(len(ranks)):
            raise ValueError(f"src must be a rank below {len(ranks)}, got {src!r}")
        return broadcast(obj, ranks[src], self.group)


class TorchCPUDist(_TorchRanks, PicklesInTensors, TensorBaseDistBackend):
    """The ranks of the default group; objects are pickled into tensors on the CPU.

    If the group has no backend for the CPU, its own device is used. This backend only needs
    torch's ``all_gather`` and ``broadcast``.
    """

    def _device(self) -> torch.device:
        return comm_device(prefer=torch.device("cpu"))

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        received = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with calling("all_gather"):
            dist.all_gather(received, tensor)
        return received

    def _broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        with calling("broadcast"):
            dist.broadcast(tensor, src)
        return tensor


class TorchCUDADist(TorchCPUDist):
    """The ranks of the default group; objects are pickled into tensors on the current CUDA device.

    If the group has no backend for CUDA, its own device is used.

    Raises:
        RuntimeError: at construction, if this torch has no NCCL.
    """

    def __init__(self) -> None:
        if not dist.is_nccl_available():
            raise RuntimeError(
                f"TorchCUDADist needs torch built with NCCL, got {torch.__version__} without it; "
                f"use 'torch' or 'torch_cpu'"
            )

    def _device(self) -> torch.device:
        return comm_device(prefer=torch.device("cuda"))
