"""One world of processes after another in the same process, as in a notebook."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fsdp_runs import own_batches, supervised, train_plainly, whole
from on_ranks import assert_near, on_ranks
from step_models import sgd
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from stepwrap.wrappers import Mesh, StepFullyShardedDataParallel, build_mesh


def _train(mesh: Mesh | DeviceMesh) -> dict[str, Tensor]:
    model = StepFullyShardedDataParallel(supervised(), shard=["Block"], mesh=mesh)
    optim = sgd(model, momentum=0.9)
    for batch in own_batches(dist.get_rank(), torch.float64):
        # What comes out of an operation is on the mesh that torch remembers of it.
        norm = sum(one.square().sum().full_tensor() for one in model.parameters())
        assert norm.item() > 0
        model.train_step(batch, optim)
    return whole(model.module.net)


def _sum_split_layer(mesh: DeviceMesh) -> None:
    layer = distribute_tensor(torch.ones(4, 3), mesh, [Replicate(), Shard(0)])
    assert layer.sum().full_tensor() == 12


@pytest.mark.slow
@pytest.mark.parametrize("by_torch", [False, True])
@on_ranks(4)
def test_a_new_world_in_the_same_processes(by_torch: bool, tmp_path: Path) -> None:
    expected = train_plainly(ranks=4)
    # Groups are numbered, and the second world has fewer of them.
    for _ in range(3):
        dist.new_group()
    rank = dist.get_rank()
    for store in ("first", "second"):
        if by_torch:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            assert_near(_train(mesh), expected, 1e-12)
        else:
            ours = build_mesh({"replicate": 2, "shard": 2})
            assert ours.device_mesh is not None
            # Split layers alone, before and after what the other wrapper remembers.
            _sum_split_layer(ours.device_mesh)
            assert_near(_train(ours), expected, 1e-12)
            _sum_split_layer(ours.device_mesh)
        dist.destroy_process_group()
        file = dist.FileStore(str(tmp_path / store), 4)
        timeout = timedelta(seconds=60)
        dist.init_process_group("gloo", store=file, rank=rank, world_size=4, timeout=timeout)
