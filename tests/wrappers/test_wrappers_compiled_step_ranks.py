"""The compiled training step on several ranks: the numbers of DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_ranks import assert_near, on_ranks, same_on_ranks
from torch import Tensor, distributed, nn

from stepwrap.wrappers import OptimWrapper, Preparation, SupervisedModel, wrap_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]


class Net(nn.Module):
    """With running statistics, which DistributedDataParallel gives to all ranks.

    The gradient of a layer is so large that it is averaged by itself.
    """

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8)
        self.wide, self.head = nn.Linear(8, 2**16, bias=False), nn.Linear(8, 3)
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        if self.fails and hidden.sum() < 0:
            hidden = hidden * 2
        return self.head(hidden + self.wide(hidden).mean(1, keepdim=True))


def _train(compiled: bool, counts: int, weight: str | None, fails_on: int) -> Any:
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = SupervisedModel(Net(fails=rank == fails_on).double(), nn.CrossEntropyLoss())
    prepare = Preparation(compile={"step": True, "min_steps": 0} if compiled else False)
    wrapper: Any = wrap_model(None, model, prepare=prepare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optim = OptimWrapper(optimizer, counts, clip_grad={"max_norm": 0.5}, loss_weight=weight)
    optim.initialize_count_status(model, 0, 24)
    wrapper.train()
    generator = torch.Generator().manual_seed(rank)
    for index in range(24):
        # One rank has a shape that no program is for, while the other goes on with its own.
        size = 4 if index == 20 and rank == 1 else 5
        inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        targets = torch.arange(size) % 3
        if weight is not None:
            targets[: index % 3 + rank] = -100
            # Nothing on one rank, or on both.
            targets[:] = -100 if index == 15 or (index == 13 and rank) else targets
        wrapper.train_step((inputs, targets), optim)
    return wrapper


@pytest.mark.parametrize(
    ("ranks", "counts", "weight", "fails_on"),
    [
        (2, 1, None, -1),
        (2, 3, None, -1),
        (2, 1, "tokens", -1),
        (2, 3, "tokens", -1),
        (3, 1, None, -1),
        (3, 3, "tokens", -1),
        # A rank that cannot compile steps with one that can.
        (2, 1, None, 1),
    ],
)
@on_ranks("ranks", timeout_s=280.0)
def test_ranks_train_as_under_ddp(
    ranks: int, counts: int, weight: str | None, fails_on: int
) -> None:
    expected = _train(False, counts, weight, fails_on).module.state_dict()
    wrapper = _train(True, counts, weight, fails_on)
    state = wrapper.module.state_dict()
    assert_near(dict(state), dict(expected), 1e-12)
    if fails_on < 0:
        assert all(same_on_ranks(one) for name, one in state.items() if "norm" not in name)
    assert bool(wrapper.train_step.programs) == (distributed.get_rank() != fails_on)
    assert fails_on < 0 or len(wrapper.train_step.programs) <= 1
