"""The MPI backend."""

from types import ModuleType

import torch

from .base import PicklesInTensors, TensorBaseDistBackend

# Configs can only name classes in `__all__`.
__all__ = ["MPI4PyDist"]


class MPI4PyDist(PicklesInTensors, TensorBaseDistBackend):
    """The ranks of MPI's COMM_WORLD, as started by ``mpirun -n 4 python script.py``.

    Creating the backend initialises MPI. MPI has no timeouts: run a script whose ranks may fail
    with ``python -m mpi4py script.py``, which ends all ranks when one fails.

    Raises:
        ImportError: at construction, if mpi4py or the MPI library is missing.
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
        return int(_load_mpi().COMM_WORLD.Get_rank()) if self.is_initialized else 0

    @property
    def world_size(self) -> int:
        return int(_load_mpi().COMM_WORLD.Get_size()) if self.is_initialized else 1

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        mpi, rows = _load_mpi(), tensor.new_empty(self.world_size, tensor.numel())
        mpi.COMM_WORLD.Allgather([tensor.numpy(), mpi.BYTE], [rows.numpy(), mpi.BYTE])
        return list(rows)

    def _broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        mpi = _load_mpi()
        mpi.COMM_WORLD.Bcast([tensor.numpy(), mpi.BYTE], src)
        return tensor


def _load_mpi() -> ModuleType:
    try:
        from mpi4py import MPI
    # The wheels of mpi4py raise RuntimeError if they find no MPI library.
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"the backend mpi4py needs mpi4py (pip install 'stepwrap[mpi]') and an MPI library "
            f"such as Open MPI: {error}"
        ) from error
    module: ModuleType = MPI
    return module
