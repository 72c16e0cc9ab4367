"""Models that ranks would train apart are refused: other layers, other orders, changed weights."""

from __future__ import annotations

import pytest
import torch
from on_ranks import on_ranks, raises_with
from torch import Tensor, nn

from stepwrap.wrappers import (
    OptimWrapper,
    SeparateDistributedDataParallel,
    StepDistributedDataParallel,
    StepFullyShardedDataParallel,
    SupervisedModel,
)

WRAPPERS = [
    StepDistributedDataParallel,
    SeparateDistributedDataParallel,
    StepFullyShardedDataParallel,
]


class Experts(nn.Module):
    """Two experts, of which the sign of the inputs selects one."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative, self.head = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        expert = self.positive if inputs.sum() > 0 else self.negative
        output: Tensor = self.head(expert(inputs))
        return output


class Unused(Experts):
    """Neither rank uses the second expert."""

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.head(self.positive(inputs))
        return output


def train(net: type[Experts], signs: list[float], shard: list[str] | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = SupervisedModel(net(), nn.MSELoss())
    wrapper = StepFullyShardedDataParallel(model, shard=shard)
    optim = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.1))
    for sign in signs:
        wrapper.train_step([torch.full((2, 3), sign), torch.ones(2, 3)], optim)
    return {name: value.full_tensor() for name, value in wrapper.state_dict().items()}


@pytest.mark.parametrize("shard", [None, ["Linear"]])
@pytest.mark.parametrize("step", [0, 2, 99])
@on_ranks(2)
def test_ranks_that_use_other_parameters_are_named(shard: list[str] | None, step: int) -> None:
    rank = torch.distributed.get_rank()
    signs = [1.0] * step + [1.0 - 2 * rank]
    with raises_with(RuntimeError, "only on rank", "positive", "find_unused_parameters"):
        train(Experts, signs, shard)


@on_ranks(2)
def test_parameters_that_no_rank_uses_stay_as_they_are() -> None:
    torch.manual_seed(0)
    before = Unused().negative.weight.detach()
    after = train(Unused, [1.0, -1.0], None)
    assert torch.equal(after["module.net.negative.weight"], before)


class Ordered(nn.Module):
    def __init__(self, order: str) -> None:
        super().__init__()
        layers = {name: nn.Linear(3, 3) for name in "ab"}
        for name in order:
            setattr(self, name, layers[name])

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.a(inputs) - self.b(inputs)
        return output


@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(3)
def test_layers_in_another_order_are_refused(wrapper: type[nn.Module]) -> None:
    order = "ba" if torch.distributed.get_rank() == 2 else "ab"
    with pytest.raises(ValueError, match="order") as error:
        wrapper(Ordered(order))
    assert "rank 2" in str(error.value) or "on rank" in str(error.value)


class UnitNorm(nn.Linear):
    """A layer that normalises its weight in place in the forward."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        return super().forward(inputs)


@pytest.mark.parametrize("shard", [None, ["UnitNorm"]])
@on_ranks(2)
def test_a_weight_that_a_forward_changes_is_refused_under_fsdp(shard: list[str] | None) -> None:
    model = SupervisedModel(nn.Sequential(UnitNorm(3, 3), nn.Linear(3, 3)), nn.MSELoss())
    wrapper = StepFullyShardedDataParallel(model, shard=shard)
    optim = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.1))
    batch = [torch.ones(2, 3), torch.ones(2, 3)]
    with raises_with(RuntimeError, "net.0.weight", "on_update"):
        for _ in range(2):
            wrapper.train_step(batch, optim)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(2)
def test_embeddings_with_max_norm_are_refused(wrapper: type[nn.Module]) -> None:
    net = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Linear(3, 3))
    with raises_with(ValueError, "net.0", "max_norm"):
        wrapper(SupervisedModel(net, nn.MSELoss()))
