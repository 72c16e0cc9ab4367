"""Synchronise a torchmetrics metric over any back-end, including a custom one.

python examples/metric_backends.py [torch | torch_cpu | counting ...]
mpirun -n 2 python examples/metric_backends.py mpi4py
"""

import sys
from typing import Any

import torch
from torchmetrics.classification import MulticlassAccuracy

from stepwrap.collectives import TorchDist, get_dist_backend, metric_sync, register_dist_backend
from stepwrap.configs.digits import Digits
from stepwrap.runner import launch


class CountingDist(TorchDist):
    """Counts gathered objects. Back-ends over other libraries derive from BaseDistBackend."""

    carried = 0

    def all_gather_object(self, obj: Any) -> list[Any]:
        self.carried += 1
        return super().all_gather_object(obj)


def accuracy_of_nearest_mean(name: str) -> float:
    backend = get_dist_backend(name)
    train, test = Digits("train"), Digits("test")
    means = torch.stack([train.images[train.labels == digit].mean(0) for digit in range(10)])
    mine = slice(backend.rank, None, backend.world_size)
    distances = torch.cdist(test.images[mine].flatten(1), means.flatten(1))

    accuracy = MulticlassAccuracy(num_classes=10, average="micro", **metric_sync(name))
    accuracy.update(distances.argmin(1), test.labels[mine])
    result = float(accuracy.compute())
    if backend.rank == 0:
        line = f"{name}: {result:.4f} on {backend.world_size} ranks"
        if isinstance(backend, CountingDist):
            line += f", {backend.carried} states carried"
        print(line)
    return result


def main(*names: str) -> None:
    register_dist_backend("counting", CountingDist)
    for name in names:
        accuracy_of_nearest_mean(name)


if __name__ == "__main__":
    names = tuple(sys.argv[1:]) or ("torch", "torch_cpu", "counting")
    # mpirun has started the MPI ranks already; for torch, start two processes here.
    launch(main, names, nproc=1 if names == ("mpi4py",) else 2)
