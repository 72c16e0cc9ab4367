"""The back-ends of torch, and the one of a single process."""

from typing import TypeVar

import torch
import torch.distributed as dist

from ..errors import Group
from ..objects.objects import all_gather_object, broadcast
from ..process.ranks import comm_device, distributed_available, live_world_size, members
from ..trace.calling import calling
from .base import BaseDistBackend, PicklesInTensors, TensorBaseDistBackend

# What a config can name.
__all__ = ["NonDist", "TorchCPUDist", "TorchCUDADist", "TorchDist"]

T = TypeVar("T")


class NonDist(BaseDistBackend):
    """One process, whatever else is running: objects are returned themselves, for any `src`."""

    is_initialized = False
    rank = 0
    world_size = 1

    def all_gather_object(self, obj: T) -> list[T]:
        return [obj]

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        return obj


class _TorchRanks(BaseDistBackend):
    """The ranks of a torch process group; without one, a process of its own."""

    group: Group = None

    @property
    def is_initialized(self) -> bool:
        return distributed_available()

    @property
    def rank(self) -> int:
        """The place in the group, a ValueError where this is no member; 0 without a group."""
        live_world_size(self.group)
        return dist.get_rank(self.group) if distributed_available() else 0

    @property
    def world_size(self) -> int:
        return live_world_size(self.group)


class TorchDist(_TorchRanks):
    """The ranks of a torch process group; without one, a process of its own.

    The fast one: it is `stepwrap.collectives.all_gather_object` and `broadcast`, which choose the
    device and the way. In a sub-group its numbers are those of the members in group order, not
    global ranks: `rank` is the own place in what `all_gather_object` returns.

    Args:
        group: default: the default group, also one that is made later.
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
    """The ranks of the default group, with pickles in plain tensors on the CPU.

    A group that has no back-end for the CPU carries them on its own device. Nothing but torch's
    `all_gather` and `broadcast` is used.
    """

    def _device(self) -> torch.device:
        return comm_device(prefer=torch.device("cpu"))

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with calling("all_gather"):
            dist.all_gather(parts, tensor)
        return parts

    def _broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        with calling("broadcast"):
            dist.broadcast(tensor, src)
        return tensor


class TorchCUDADist(TorchCPUDist):
    """The ranks of the default group, with pickles in tensors on the current CUDA device.

    Without a back-end for CUDA in the group, on the device of the group.

    Raises:
        RuntimeError: at construction, when this torch has no NCCL.
    """

    def __init__(self) -> None:
        if not dist.is_nccl_available():
            raise RuntimeError(
                f"TorchCUDADist needs a torch that is built with NCCL, and {torch.__version__} is "
                f"not; 'torch' and 'torch_cpu' work without"
            )

    def _device(self) -> torch.device:
        return comm_device(prefer=torch.device("cuda", torch.cuda.current_device()))
