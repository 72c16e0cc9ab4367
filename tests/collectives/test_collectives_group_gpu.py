"""Groups with CUDA tensors: two gloo ranks on one device, and NCCL alone."""

import pytest
import torch
import torch.distributed as dist
from calls import group_of_one
from group_calls import assert_same, now_and_later
from ranks import on_ranks

from stepwrap.collectives import CollectiveGroup

pytestmark = pytest.mark.gpu


def _mixed(*values: float) -> list[torch.Tensor]:
    """Return tensors on CUDA and the CPU in turn."""
    devices = ("cuda", "cpu")
    return [
        torch.full((3,), value, device=devices[i % 2], dtype=torch.complex64)
        for i, value in enumerate(values)
    ]


def _use_lists(group: CollectiveGroup) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = _mixed(1, 2, 3)
    for op, total in (("sum", 6.0 * size), ("product", 6.0**size), ("mean", 2.0)):
        tensors = _mixed(1, 2, 3)
        group.all_reduce_multigpu(tensors, op)
        for tensor, like in zip(tensors, _mixed(total, total, total), strict=True):
            assert tensor.device == like.device
            assert_same(tensor, like)
    group.reduce_multigpu(tensors, 0, dst_tensor=1)
    assert tensors[1][0].item() == (6 * size if rank == 0 else 2)
    group.broadcast_multigpu(tensors, 0, src_tensor=1)
    assert [tensor[0].item() for tensor in tensors] == [6 * size] * 3
    inputs = _mixed(rank, 10 + rank)
    outputs = [[torch.zeros_like(like) for _ in range(2 * size)] for like in inputs]
    group.all_gather_multigpu(outputs, inputs)
    for output in outputs:
        values = [value for r in range(size) for value in (r, 10 + r)]
        assert [tensor[0].item() for tensor in output] == values


def _use_tensors(group: CollectiveGroup) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((2, 3), float(rank), device="cuda").T
    outputs = [torch.zeros(3, 2, device="cuda") for _ in range(size)]
    for _ in now_and_later(lambda later: group.all_gather(outputs, tensor, later)):
        assert [rank_tensor[0, 0].item() for rank_tensor in outputs] == list(range(size))
    for _ in now_and_later(lambda later: group.reduce_scatter(tensor, outputs, "sum", later)):
        assert_same(tensor, torch.full((2, 3), float(size * rank), device="cuda").T)
    for _ in now_and_later(lambda later: group.all_to_all(outputs, [tensor] * size, later)):
        assert [rank_tensor[0, 0].item() for rank_tensor in outputs] == [
            size * r for r in range(size)
        ]
    for _ in now_and_later(lambda later: group.broadcast(tensor, size - 1, later)):
        assert (tensor == size * (size - 1)).all()
    for _ in now_and_later(lambda later: group.reduce(tensor, 0, "max", later)):
        assert (tensor == size * (size - 1)).all()
    group.barrier()
    if size > 1:
        handle = group.isend(tensor, 1 - rank)
        received = torch.empty(3, 2, device="cuda")
        assert group.recv(received, 1 - rank) == 1 - rank
        handle.wait()
        assert received.is_cuda


def _use_new_group() -> None:
    group = CollectiveGroup.create()
    _use_lists(group)
    _use_tensors(group)
    group.destroy()


@on_ranks(2)
def test_two_gloo_ranks_share_the_device() -> None:
    _use_new_group()


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
@on_ranks(1, init=False)
def test_nccl_alone(backend: str) -> None:
    with group_of_one(backend):
        _use_new_group()
