"""A thousand forwards of synchronised copies, many of which fail on purpose."""

import copy
import random
import threading
from typing import Any

import pytest
import torch
from copy_threads import LIMIT_S, run_in_thread
from torch import Tensor, nn

from stepwrap.wrappers import (
    ReplicationCallbackDataParallel,
    ReplicationError,
    convert_sync_batchnorm,
    revert_sync_batchnorm,
)

FORWARDS = 1000
KINDS = ("nothing", "fail", "skip", "extra", "callback", "eval")


class PlannedError(Exception):
    """An error that a copy or a callback raises on purpose."""


class Plan:
    """A fault, its copy and its layer; shared by all copies of a model."""

    def __init__(self) -> None:
        self.kind = "nothing"
        self.copy_id = self.layer = 0

    def __deepcopy__(self, memo: Any) -> "Plan":
        return self


class Block(nn.Module):
    """A linear and a normalisation layer with the planned fault."""

    copy_id = 0

    def __init__(self, index: int, plan: Plan) -> None:
        super().__init__()
        self.index, self.plan = index, plan
        self.linear = nn.Linear(3, 3, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        self.copy_id = copy_id
        if self._planned("callback"):
            raise PlannedError(copy_id)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self._planned("fail"):
            raise PlannedError(self.copy_id)
        if self._planned("skip"):
            return x
        if self._planned("extra"):
            x = self.norm(x)
        return torch.tanh(self.norm(x))

    def _planned(self, kind: str) -> bool:
        plan = self.plan
        return (plan.kind, plan.copy_id, plan.layer) == (kind, self.copy_id, self.index)


def _expected(plan: Plan, num_copies: int) -> type[Exception] | None:
    if plan.kind in ("nothing", "eval"):
        return None
    if plan.kind in ("fail", "callback"):
        return PlannedError
    return ReplicationError if num_copies > 1 else None


def _follow(plan: Plan, wrapped: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the gradient of all weights."""
    wrapped.train(plan.kind != "eval")
    wrapped.zero_grad()
    output = wrapped(batch)
    output.square().mean().backward()
    gradients = [param.grad for param in wrapped.parameters() if param.grad is not None]
    return output.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def _soak() -> dict[tuple[str, int], int]:
    """Return how often each fault occurred with each number of chunks."""
    chance, plan_counts = random.Random(0), {}
    torch.manual_seed(0)
    plan = Plan()
    model = nn.Sequential(*(Block(index, plan) for index in range(3)))
    wrappers = [
        ReplicationCallbackDataParallel(
            convert_sync_batchnorm(model), device_ids=["cpu"] * devices, timeout_s=LIMIT_S
        )
        for devices in (1, 2, 3, 4)
    ]
    for _ in range(FORWARDS):
        wrapper = chance.choice(wrappers)
        batch = torch.randn(chance.randint(2, 7), 3, dtype=torch.float64)
        num_copies = len(batch.chunk(len(wrapper.device_ids)))
        plan.kind, plan.layer = chance.choice(KINDS), chance.randrange(3)
        plan.copy_id = chance.randrange(num_copies)
        # With one copy an extra or missing call is allowed; the reference makes the same calls.
        reference = revert_sync_batchnorm(copy.deepcopy(model))
        expected = _expected(plan, num_copies)
        plan_counts[plan.kind, num_copies] = plan_counts.get((plan.kind, num_copies), 0) + 1
        if expected is None:
            got = _follow(plan, wrapper, batch)
            for mine, other in zip(got, _follow(plan, reference, batch), strict=True):
                assert (mine - other).abs().max() < 1e-9, (plan.kind, num_copies)
        else:
            with pytest.raises(expected) as caught:
                _follow(plan, wrapper, batch)
            if expected is PlannedError:
                assert caught.value.args == (plan.copy_id,)
            else:
                assert f"{plan.layer}.norm" in str(caught.value)
    return plan_counts


@pytest.mark.slow
def test_soak() -> None:
    """Copies fail, skip layers and call them too often; callbacks raise; chunks vary."""
    before = set(threading.enumerate())
    plan_counts = run_in_thread(_soak, limit_s=100)
    assert sum(plan_counts.values()) == FORWARDS
    assert set(plan_counts) == {(kind, copies) for kind in KINDS for copies in (1, 2, 3, 4)}
    assert set(threading.enumerate()) == before
