"""One world of processes after another in the same process, as in a notebook."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fsdp_runs import largest_difference, network, own_batches, train_plainly, whole
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from stepwrap.wrappers import (
    Mesh,
    OptimWrapper,
    StepFullyShardedDataParallel,
    SupervisedModel,
    build_mesh,
)


def _train(mesh: Mesh | DeviceMesh) -> dict[str, Tensor]:
    net = network("Net", torch.float64)
    model = StepFullyShardedDataParallel(
        SupervisedModel(net, nn.CrossEntropyLoss()), shard=["Block"], mesh=mesh
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optim = OptimWrapper(optimizer)
    for batch in own_batches(dist.get_rank(), torch.float64):
        # What comes out of an operation is on the mesh that torch remembers of it.
        norm = sum(one.square().sum().full_tensor() for one in model.parameters())
        assert norm.item() > 0
        model.train_step(batch, optim)
    return whole(net)


def _torchs_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def _sum_split_layer(mesh: DeviceMesh) -> None:
    layer = distribute_tensor(torch.ones(4, 3), mesh, [Replicate(), Shard(0)])
    assert layer.sum().full_tensor() == 12


def _in_two_worlds(folder: Path, by_torch: bool) -> list[dict[str, Tensor]]:
    # Groups are numbered, and the second world has fewer of them.
    for _ in range(3):
        dist.new_group()
    rank, trained = dist.get_rank(), []
    for store in ("first", "second"):
        if by_torch:
            trained.append(_train(_torchs_mesh()))
        else:
            mesh = build_mesh({"replicate": 2, "shard": 2})
            assert mesh.device_mesh is not None
            # Split layers alone, before and after what the other wrapper remembers.
            _sum_split_layer(mesh.device_mesh)
            trained.append(_train(mesh))
            _sum_split_layer(mesh.device_mesh)
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / store), 4),
            rank=rank,
            world_size=4,
            timeout=timedelta(seconds=60),
        )
    return trained


@pytest.mark.slow
def test_a_new_world_in_the_same_processes(tmp_path: Path) -> None:
    expected = train_plainly(ranks=4)
    for by_torch in (False, True):
        folder = tmp_path / str(by_torch)
        folder.mkdir()
        for trained in run_ranks(_in_two_worlds, 4, folder, by_torch):
            for weights in trained:
                assert largest_difference(weights, expected) <= 1e-12
