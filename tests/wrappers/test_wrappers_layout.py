"""The layout of sharded tensors: FSDP2, tensor-parallel and plain parameters."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import slow
from on_ranks import gathered, on_ranks
from sharded_models import CASES, Readable, data, net, spread, whole, whole_gradient
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stepwrap.wrappers.layout import (
    as_global,
    copy_whole_,
    get_layout,
    has_placed_parameters,
    is_sharded,
    local_part,
    take_part,
    total_norm,
)


@pytest.mark.parametrize("width", [6, *slow(8, 2)])
@pytest.mark.parametrize(("size", "kind"), CASES)
@on_ranks("size")
def test_every_part_has_the_reported_place(size: int, kind: str, width: int) -> None:
    """Also for uneven and empty parts, and for FSDP2 on a dimension that is already split."""
    plain, model = net(width=width), spread(net(width=width), kind)
    for (name, reference), parameter in zip(
        plain.named_parameters(), model.parameters(), strict=True
    ):
        layout = get_layout(parameter)
        local = local_part(parameter)
        assert layout.shape == tuple(reference.shape)
        assert layout.sizes == tuple(local.shape)
        assert torch.equal(reference[layout.slices], local), name
        assert is_sharded(parameter) == bool(layout.sharded_over)
        again = as_global(local, parameter)
        assert isinstance(again, DTensor) == (layout.mesh is not None)
        assert torch.equal(whole(again), reference)
        readable = Readable(reference.detach())
        for source in (reference, readable, parameter):
            restored = take_part(source, parameter)
            assert type(restored) is (DTensor if isinstance(parameter, DTensor) else Tensor)
            assert torch.equal(local_part(restored), local)
            copy_whole_(parameter, source)
        assert readable.read == 2 * local.numel()
        copy_whole_(parameter, Readable(reference.detach() + 1))
        assert torch.equal(local_part(parameter), reference[layout.slices] + 1)
        areas = set(gathered((layout.offsets, layout.sizes)))
        assert sum(math.prod(sizes) for _, sizes in areas) == reference.numel()


def test_plain_tensors() -> None:
    tensor = nn.Parameter(torch.arange(6.0).view(2, 3))
    layout = get_layout(tensor)
    assert (layout.shape, layout.offsets, layout.sizes) == ((2, 3), (0, 0), (2, 3))
    assert layout.sharded_over == ()
    assert local_part(tensor) is tensor
    assert as_global(tensor, tensor) is tensor
    assert not is_sharded(tensor)
    restored = take_part(Readable(torch.ones(2, 3)), tensor)
    assert torch.equal(restored, torch.ones(2, 3))
    scalar = torch.tensor(3.0)
    assert take_part(Readable(torch.tensor(2.0, dtype=torch.float64)), scalar).equal(
        torch.tensor(2.0)
    )
    with pytest.raises(ValueError, match=r"must have shape \(2, 3\), got shape \(3, 2\)"):
        take_part(torch.ones(3, 2), tensor)


def test_a_part_does_not_keep_the_storage_of_the_whole() -> None:
    local = nn.Parameter(torch.zeros(2, 3))
    whole_one = torch.ones(4, 3)
    layout = get_layout(local)
    local.tensor_layout = type(layout)((4, 3), (2, 0), (2, 3))
    restored = take_part(whole_one, local)
    assert restored.untyped_storage().nbytes() == 2 * 3 * 4
    whole_one.fill_(5)
    assert torch.equal(restored, torch.ones(2, 3))


@on_ranks(2)
def test_sources_of_another_layout() -> None:
    reference = torch.arange(12.0).view(4, 3)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    rows = dist.tensor.distribute_tensor(reference, mesh, [dist.tensor.Shard(0)])
    columns = dist.tensor.distribute_tensor(reference.zero_(), mesh, [dist.tensor.Shard(1)])
    expected = torch.arange(12.0).view(4, 3)
    copy_whole_(columns, rows)
    assert torch.equal(columns.full_tensor(), expected)
    with pytest.raises(ValueError, match=r"the part .* must have shape \(4, [12]\)"):
        as_global(torch.ones(3, 3), columns)


@pytest.mark.parametrize(("size", "kind"), CASES)
@on_ranks("size")
def test_the_norm_equals_the_norm_of_whole_tensors(size: int, kind: str) -> None:
    """It takes one all_reduce per group with parts, and has the same bits on all ranks."""
    # torch's tensor-parallel layers need equal parts.
    width = 8 if kind == "tensor" else 6
    plain, model = net(width=width), spread(net(width=width), kind)
    for network in (plain, model):
        network(data()).pow(2).sum().backward()
    reduced = []
    real = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        reduced.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    import stepwrap.wrappers.layout as module

    module.all_reduce = counted
    results = []
    try:
        for order in (2.0, 1.0, 3.5, math.inf):
            parameters = list(model.parameters())
            norm = total_norm([p.grad for p in parameters], order, like=parameters)
            assert type(norm) is Tensor
            assert norm.shape == ()
            weights = total_norm(parameters, order)
            results.append([norm.item(), weights.item()])
    finally:
        module.all_reduce = real
    distinct = {g for p in model.parameters() for g in get_layout(p).sharded_over}
    assert len(reduced) == 2 * 4 * len(distinct)
    for order, (norm, weights) in zip((2.0, 1.0, 3.5, math.inf), results, strict=True):
        gradients = [p.grad for p in plain.parameters()]
        expected = torch.nn.utils.get_total_norm(gradients, order).item()
        assert norm == pytest.approx(expected, rel=1e-13)
        values = torch.nn.utils.get_total_norm(list(plain.parameters()), order).item()
        assert weights == pytest.approx(values, rel=1e-13)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole_gradient(mine), other.grad, rtol=1e-12, atol=1e-14)
    assert gathered(results) == [results] * size


def test_the_norm_of_plain_tensors_is_torchs() -> None:
    tensors = [torch.randn(3, 2), torch.randn(4)]
    for order in (2.0, math.inf, 0.5):
        assert total_norm(tensors, order).equal(torch.nn.utils.get_total_norm(tensors, order))


@on_ranks(2)
def test_norms_that_do_not_add_up() -> None:
    parameters = list(spread(net(), "fsdp").parameters())
    for order in (-math.inf, 0.0):
        with pytest.raises(ValueError, match="norm_type must be above 0"):
            total_norm(parameters, order)


def test_parameters_added_later_are_seen() -> None:
    param, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    assert not has_placed_parameters(optimizer)
    second.tensor_layout = get_layout(second)
    optimizer.add_param_group({"params": [second]})
    assert has_placed_parameters(optimizer)
