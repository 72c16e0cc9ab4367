"""Callbacks for a DataParallel made by somebody else."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from stepwrap.wrappers import (
    CallbackContext,
    ReplicationCallbackDataParallel,
    patch_replication_callback,
)


class Mine(DataParallel[nn.Module]):
    """Somebody's own DataParallel."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return super().forward(*inputs, **kwargs) + 1

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        return super().scatter(tuple(one * 2 for one in inputs), kwargs, device_ids)


class Own(Mine):
    """Copies without torch's or our help."""

    def replicate(self, module: nn.Module, device_ids: Any) -> list[nn.Module]:
        return [copy.copy(module) for _ in device_ids]


class Noted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[int] = []

    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        self.log.append(copy_id)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


@pytest.mark.parametrize(("kind", "expected"), [(DataParallel, 3), (Mine, 7), (Own, 7)])
def test_patching(kind: Any, expected: float) -> None:
    """Once per copy, also after deepcopy and pickle, also for one copy."""
    model = kind(Noted())
    model.device_ids = []
    for _ in range(2):
        patch_replication_callback(model)
    assert isinstance(model, kind)
    assert isinstance(model, ReplicationCallbackDataParallel)
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        patch_replication_callback(one)
        one.module.log.clear()
        assert one(torch.full((3,), 3.0)).tolist() == [expected] * 3
        assert one.module.log == [0]
        one.device_ids = ["cpu"] * 2
        assert one(torch.full((3,), 3.0)).tolist() == [expected] * 3
        assert one.module.log == [0, 0, 1]
        assert type(one) is type(model)


def test_patching_something_else() -> None:
    with pytest.raises(AssertionError, match="expected a DataParallel, got Tanh"):
        patch_replication_callback(nn.Tanh())  # type: ignore[arg-type]
