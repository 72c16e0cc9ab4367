"""The compiled training step on several ranks: the numbers of DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, distributed, nn

from stepwrap.wrappers import OptimWrapper, Preparation, SupervisedModel, wrap_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]


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


def _train(
    compiled: bool, counts: int, weight: str | None = None, fails_on: int = -1
) -> tuple[dict[str, Tensor], int]:
    rank = distributed.get_rank()
    torch.manual_seed(0)
    net = Net(fails=rank == fails_on).double()
    model = SupervisedModel(net, nn.CrossEntropyLoss())
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
    step = wrapper.train_step
    return dict(model.state_dict()), len(getattr(step, "programs", ()))


@pytest.mark.parametrize(
    ("ranks", "counts", "weight"),
    [
        (2, 1, None),
        (2, 3, None),
        (2, 1, "tokens"),
        (2, 3, "tokens"),
        (3, 1, None),
        (3, 3, "tokens"),
    ],
)
def test_ranks_train_as_under_ddp(ranks: int, counts: int, weight: str | None) -> None:
    usual, compiled = (
        run_ranks(_train, ranks, flag, counts, weight, timeout_s=280.0) for flag in (False, True)
    )
    for rank, ((expected, _), (state, programs)) in enumerate(zip(usual, compiled, strict=True)):
        assert programs
        for name, one in expected.items():
            torch.testing.assert_close(state[name], one, rtol=1e-12, atol=1e-12, msg=name)
        assert rank == 0 or all(
            torch.equal(state[name], compiled[0][0][name]) for name in state if "norm" not in name
        )


def test_a_rank_that_cannot_compile_steps_with_those_that_can() -> None:
    usual = run_ranks(_train, 2, False, 1, None, 1, timeout_s=280.0)
    compiled = run_ranks(_train, 2, True, 1, None, 1, timeout_s=280.0)
    assert [programs for _, programs in compiled] == [1, 0]
    for (expected, _), (state, _) in zip(usual, compiled, strict=True):
        for name, one in expected.items():
            torch.testing.assert_close(state[name], one, rtol=1e-12, atol=1e-12, msg=name)
