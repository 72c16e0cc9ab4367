"""Gradients that must be equal on all ranks of a tensor group are compared once."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor, nn

from stepwrap.wrappers import AmpOptimWrapper, OptimWrapper, PostLocalSGD, build_mesh, parallelize

PLAN = {"first": "colwise", "second": "rowwise"}


class Net(nn.Module):
    """A net with `enter` before the split layers, `scale` between them and `last` after them."""

    def __init__(self, scales: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(4, 4)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(()))
        self.last = nn.Linear(4, 2)
        self.scales = scales

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(self.enter(inputs)))
        hidden = self.second(hidden * self.scale if self.scales else hidden)
        return self.last(hidden)


def _inputs(seed: int = 0) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


def _split(scales: bool = False) -> Net:
    return parallelize(Net(scales), build_mesh({"data": -1, "tensor": 2}), PLAN)


def _step(net: Net, optim: OptimWrapper, inputs: Tensor) -> str:
    try:
        optim.update_params(net(inputs).square().mean())
    except RuntimeError as error:
        return str(error)
    return ""


def _make_layers(net: Net, kind: str) -> OptimWrapper:
    if kind == "local":
        group = build_mesh({"data": -1, "tensor": 2}).data_group
        options: dict[str, Any] = {"period": 2, "process_group": group, "lr": 0.1}
        return OptimWrapper(PostLocalSGD(net.parameters(), "SGD", **options))
    return OptimWrapper(torch.optim.SGD(net.parameters(), lr=0.1))


@pytest.mark.parametrize("kind", ["sgd", "local"])
@on_ranks(2)
def test_gradients_that_differ_are_named(kind: str) -> None:
    scaled, other, exact = _split(scales=True), _split(), _split()
    scale = _step(scaled, _make_layers(scaled, kind), _inputs())
    assert re.search("gradient of 'scale' must .*same", scale)
    batch = _step(other, _make_layers(other, kind), _inputs(dist.get_rank()))
    assert re.search(r"gradient of 'enter\.weight' must .*same", batch)
    assert "tensor group (here 0, 1), because" in batch
    assert "these ranks get different batches" in batch
    assert not _step(exact, _make_layers(exact, kind), _inputs())


@on_ranks(4)
def test_all_tensor_groups_raise() -> None:
    net = _split()
    optim = OptimWrapper(torch.optim.SGD(net.parameters(), lr=0.1))
    # Only the ranks of the second tensor group see different batches.
    text = _step(net, optim, _inputs(max(dist.get_rank(), 1)))
    assert "must be the same" in text


@on_ranks(2)
def test_each_optimizer_checks_its_parameters() -> None:
    net = _split(scales=True)
    inner = OptimWrapper(torch.optim.SGD([*net.first.parameters(), net.scale], lr=0.1))
    outer = OptimWrapper(torch.optim.SGD(net.last.parameters(), lr=0.1))
    assert not _step(net, outer, _inputs())
    assert "'scale'" in _step(net, inner, _inputs())


@on_ranks(2)
def test_gradients_are_compared_once() -> None:
    counts: list[int] = []
    real: Any = dist.all_gather
    net = _split()
    optim = OptimWrapper(torch.optim.SGD(net.parameters(), lr=0.1))
    try:
        for _ in range(3):
            counts.append(0)

            def counting(*args: Any, **kwargs: Any) -> Any:
                counts[-1] += 1
                return real(*args, **kwargs)

            dist.all_gather = counting
            _step(net, optim, _inputs())
    finally:
        dist.all_gather = real
    assert counts == [1, 0, 0]


@on_ranks(2)
def test_an_update_that_overflows_is_not_the_one_compared() -> None:
    net = _split(scales=True)
    net.last.weight.data.mul_(1e4)
    optim = AmpOptimWrapper(
        torch.optim.SGD(net.parameters(), lr=0.1),
        dtype="float16",
        loss_scale={"init_scale": 1e38, "backoff_factor": 1e-36},
    )
    assert not _step(net, optim, _inputs())
    assert "'scale'" in _step(net, optim, _inputs())


@on_ranks(2)
def test_an_optimizer_made_before_layers_are_split() -> None:
    model = Net()
    optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    parallelize(model, build_mesh({"tensor": 2}), PLAN)
    text = "^SGD has parameters that do not belong to the model any more, because splitting"
    with pytest.raises(RuntimeError, match=text):
        optim.update_params(model(_inputs()).sum())
    # The layers that are not split, and their optimizer, still work.
    enter = OptimWrapper(torch.optim.SGD(model.enter.parameters(), lr=0.1))
    enter.update_params(model(_inputs()).sum())
