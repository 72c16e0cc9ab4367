"""The back-end over MPI."""

from types import ModuleType
from typing import TypeVar

import torch

from ..objects.serialize import obj2tensor, tensor2obj
from .base import BaseDistBackend, raise_not_sent

# What a config can name.
__all__ = ["MPI4PyDist"]

T = TypeVar("T")


class MPI4PyDist(BaseDistBackend):
    """The ranks of MPI's COMM_WORLD, as `mpirun -n 4 python script.py` starts them.

    MPI is initialised when the back-end is made. MPI knows no timeout: a script whose ranks may
    fail is best run by `python -m mpi4py script.py`, which ends all ranks with the first.

    Raises:
        ImportError: at construction, when mpi4py or the MPI library is missing.
    """

    def __init__(self) -> None:
        _load_mpi()

    @property
    def is_initialized(self) -> bool:
        """Whether MPI is initialised and not finalised."""
        mpi = _load_mpi()
        return bool(mpi.Is_initialized() and not mpi.Is_finalized())

    @property
    def rank(self) -> int:
        """The rank in COMM_WORLD; 0 when MPI is not initialised."""
        return int(_load_mpi().COMM_WORLD.Get_rank()) if self.is_initialized else 0

    @property
    def world_size(self) -> int:
        """The size of COMM_WORLD; 1 when MPI is not initialised."""
        return int(_load_mpi().COMM_WORLD.Get_size()) if self.is_initialized else 1

    def all_gather_object(self, obj: T) -> list[T]:
        """Return the objects of all ranks, in rank order; every rank must call this.

        All are copies, the own one too; with one rank the list holds the object itself.

        Raises:
            CollectiveError: on every rank, when one of them cannot pickle or unpickle.
        """
        if self.world_size == 1:
            return [obj]
        mpi = _load_mpi()
        data, problem = _pack(obj)
        sizes = mpi.COMM_WORLD.allgather(data.numel())
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        into = [received.numpy(), sizes, None, mpi.BYTE]
        mpi.COMM_WORLD.Allgatherv([data.numpy(), mpi.BYTE], into)
        gathered: list[T] = []
        try:
            gathered += [
                tensor2obj(part) for part in received.split_with_sizes(sizes) if part.numel()
            ]
        # Whatever unpickling raises, the other ranks wait in the exchange below.
        except Exception as error:
            problem = problem or error
        _raise_together(problem)
        return gathered

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        """Return the object of rank `src` on every rank; every rank must call this.

        The source gets its own object back, the others a copy; what they pass is not looked at.

        Raises:
            ValueError: `src` is no rank.
            CollectiveError: on every rank, when the object cannot be pickled or unpickled.
        """
        if src not in range(self.world_size):
            raise ValueError(f"src must be a rank below {self.world_size}, got {src!r}")
        if self.world_size == 1:
            return obj
        mpi = _load_mpi()
        is_source = self.rank == src
        data, problem = _pack(obj if is_source else None)
        size = mpi.COMM_WORLD.bcast(data.numel(), src)
        if not is_source:
            data = torch.empty(size, dtype=torch.uint8)
        mpi.COMM_WORLD.Bcast([data.numpy(), mpi.BYTE], src)
        received = obj
        if not is_source and size:
            try:
                received = tensor2obj(data)
            # As above: the others wait.
            except Exception as error:
                problem = error
        _raise_together(problem)
        return received


def _load_mpi() -> ModuleType:
    try:
        from mpi4py import MPI
    # Its wheels raise RuntimeError when they find no MPI library.
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"the back-end mpi4py needs mpi4py (pip install 'stepwrap[mpi]') and an MPI library "
            f"such as Open MPI: {error}"
        ) from error
    module: ModuleType = MPI
    return module


def _pack(obj: object) -> tuple[torch.Tensor, Exception | None]:
    """Return the object's pickle, or nothing and what went wrong."""
    try:
        return obj2tensor(obj, "cpu"), None
    # Whatever __reduce__ raises, the other ranks are waiting.
    except Exception as error:
        return torch.empty(0, dtype=torch.uint8), error


def _raise_together(problem: Exception | None) -> None:
    text = None if problem is None else f"{type(problem).__name__}: {problem}"
    raise_not_sent(_load_mpi().COMM_WORLD.allgather(text), problem)
