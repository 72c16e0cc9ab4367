"""The fused implementation is taken where there is one."""

from typing import Any

import pytest
import torch
from step_models import batches, classifier, flat
from torch import nn

from stepwrap.wrappers import OptimWrapper
from stepwrap.wrappers.optimizers.optimizer_fit import build_optimizer


def _fused(cls: Any, *parameters: Any, **kwargs: Any) -> Any:
    optimizer = build_optimizer(cls, iter(parameters), lr=0.1, **kwargs)
    return optimizer.param_groups[0].get("fused")


def _zeros(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(2, 2, dtype=dtype))


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_fused_by_default(cls: Any) -> None:
    assert _fused(cls, _zeros()) is True
    assert _fused(cls, {"params": iter([_zeros()])}) is True
    assert _fused(cls, ("weight", _zeros())) is True


@pytest.mark.parametrize("choice", ["fused", "foreach", "differentiable", "capturable"])
def test_the_caller_may_choose(choice: str) -> None:
    assert _fused(torch.optim.Adam, _zeros(), **{choice: False}) in (None, False)


@pytest.mark.parametrize("cls", [torch.optim.RMSprop, torch.optim.LBFGS])
def test_classes_without_one(cls: Any) -> None:
    assert not _fused(cls, _zeros())


def test_dtypes_without_one() -> None:
    weight = _zeros(torch.complex64)
    optimizer = build_optimizer(torch.optim.SGD, [_zeros(), weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight[0, 0].item() == pytest.approx(-0.1)


def test_groups_are_left_as_they_are() -> None:
    groups = [{"params": [_zeros()]}, {"params": _zeros(), "lr": 0.5}]
    optimizer = build_optimizer(torch.optim.SGD, groups, lr=0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert [set(group) for group in groups] == [{"params"}, {"params", "lr"}]


def test_fused_steps_equal_plain_ones() -> None:
    fused, plain = classifier(), classifier()
    first = OptimWrapper(build_optimizer(torch.optim.AdamW, fused.parameters(), lr=0.01))
    second = OptimWrapper(torch.optim.AdamW(plain.parameters(), lr=0.01))
    for batch in batches(5):
        fused.train_step(batch, first)
        plain.train_step(batch, second)
    assert torch.allclose(flat(fused), flat(plain), rtol=0, atol=1e-6)
