"""Updates by a closure are correct or refused before any training."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import assert_near, on_ranks, same_on_ranks
from torch import Tensor, nn

from stepwrap.wrappers import (
    AmpOptimWrapper,
    OptimWrapper,
    SingleDevice,
    StepDistributedDataParallel,
    SupervisedModel,
)


def model() -> SupervisedModel:
    torch.manual_seed(0)
    return SupervisedModel(nn.Linear(3, 2).double(), nn.MSELoss())


def batch() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, n, generator=generator, dtype=torch.float64) for n in (3, 2)]


class ByClosure(SingleDevice):
    """A wrapper whose step passes a closure to the optimizer."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        loss = optim_wrapper.update_by_closure(lambda: self(*data, mode="loss")["loss"], self)
        return {"loss": loss}


class ByClosureDDP(StepDistributedDataParallel):
    train_step = ByClosure.train_step


class Averaging(nn.Module):
    """A wrapper as of another library."""

    def average(self, value: Tensor) -> Tensor:
        return value


def test_a_closure_takes_anything_that_averages() -> None:
    net = model().net
    optim = OptimWrapper(torch.optim.LBFGS(net.parameters()))
    inputs, targets = batch()
    losses = [
        optim.update_by_closure(lambda: nn.functional.mse_loss(net(inputs), targets), Averaging())
        for _ in range(2)
    ]
    assert losses[1] < losses[0]


def test_an_optimizer_without_a_search_does_the_usual() -> None:
    usual, closed = SingleDevice(model()), ByClosure(model())
    for wrapper in (usual, closed):
        optim = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.1, momentum=0.9))
        losses = [wrapper.train_step(batch(), optim)["loss"] for _ in range(3)]
        assert optim.inner_count == 3
        assert optim.should_update()
    assert not losses[-1].requires_grad
    assert torch.equal(usual.module.net.weight, closed.module.net.weight)
    assert closed.module.net.weight.grad is None


def test_in_bfloat16() -> None:
    wrapper = ByClosure(model().float())
    data = [tensor.float() for tensor in batch()]
    optim = AmpOptimWrapper(torch.optim.LBFGS(wrapper.parameters(), max_iter=5), dtype="bfloat16")
    dtypes = []
    wrapper.module.net.register_forward_hook(lambda *call: dtypes.append(call[-1].dtype))
    losses = [wrapper.train_step(data, optim)["loss"].item() for _ in range(3)]
    assert losses[-1] < losses[0]
    assert set(dtypes) == {torch.bfloat16}


def test_parameters_of_another_model() -> None:
    wrapper = ByClosure(model())
    optim = OptimWrapper(torch.optim.LBFGS(model().parameters()))
    with pytest.raises(RuntimeError, match="no parameter of LBFGS .*gradient"):
        wrapper.train_step(batch(), optim)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"accumulative_counts": 2}, "accumulative_counts=1, got 2"),
        ({"clip_grad": {"max_norm": 1.0}}, "clip_grad=None"),
    ],
)
@pytest.mark.parametrize("search", [True, False])
def test_closures_exclude_accumulation_and_clipping(
    options: dict[str, Any], text: str, search: bool
) -> None:
    wrapper = ByClosure(model())
    cls: Any = torch.optim.LBFGS if search else torch.optim.SGD
    with pytest.raises(ValueError, match=text):
        wrapper.train_step(batch(), OptimWrapper(cls(wrapper.parameters(), lr=0.1), **options))


def test_no_scaled_loss() -> None:
    wrapper = ByClosure(model().float())
    optim = AmpOptimWrapper(torch.optim.LBFGS(wrapper.parameters()), dtype="float16")
    with pytest.raises(ValueError, match="losses without a loss scale"):
        wrapper.train_step(batch(), optim)


@pytest.mark.parametrize("kind", [OptimWrapper, AmpOptimWrapper])
def test_the_usual_step_has_no_closure(kind: Any) -> None:
    wrapper = SingleDevice(model())
    before = wrapper.module.net.weight.detach().clone()
    with pytest.raises(ValueError, match=r"LBFGS needs a closure.*update_by_closure"):
        wrapper.train_step(batch(), kind(torch.optim.LBFGS(wrapper.parameters())))
    assert torch.equal(wrapper.module.net.weight, before)


def test_the_bare_model_is_refused() -> None:
    """Each rank would search by its own loss and get other weights."""
    wrapper = ByClosure(model())
    optim = OptimWrapper(torch.optim.LBFGS(wrapper.parameters()))
    with pytest.raises(TypeError, match=r"got SupervisedModel: .*self, not self\.module"):
        optim.update_by_closure(lambda: wrapper(*batch(), mode="loss")["loss"], wrapper.module)
    assert optim.inner_count == 0


def search(wrapper: Any, rows: slice) -> list[float]:
    """Return the losses of two updates with rows whose losses differ."""
    options: dict[str, Any] = {"max_iter": 8, "line_search_fn": "strong_wolfe"}
    optim = OptimWrapper(torch.optim.LBFGS(wrapper.parameters(), **options))
    data = batch()
    data[1] = data[1] * torch.arange(1, 9)[:, None]
    rank_batch = [tensor[rows] for tensor in data]
    return [wrapper.train_step(rank_batch, optim)["loss"].item() for _ in range(2)]


@on_ranks(2)
def test_ranks_search_the_same_line() -> None:
    wrapper, alone = ByClosureDDP(model()), ByClosure(model())
    losses = search(wrapper, slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4))
    weight = wrapper.module.net.weight.detach()
    assert same_on_ranks(torch.tensor(losses, dtype=torch.float64))
    assert same_on_ranks(weight)
    assert losses == pytest.approx(search(alone, slice(None)), rel=0, abs=1e-9)
    assert_near(weight, alone.module.net.weight.detach(), 1e-9)


@on_ranks(2)
def test_the_mean_of_integers_has_all_bits() -> None:
    mean = ByClosureDDP(model()).average(torch.tensor(2**24 + 1))
    assert (mean.dtype, mean.item()) == (torch.float64, 2**24 + 1)


@on_ranks(2)
def test_ranks_of_different_lengths_are_refused() -> None:
    wrapper = ByClosureDDP(model(), uneven_inputs=True)
    with pytest.raises(ValueError, match="remove uneven_inputs"):
        search(wrapper, slice(None))
