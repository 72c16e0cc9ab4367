"""Copies of models with layers split over a tensor axis."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from stepwrap.wrappers import (
    OptimWrapper,
    Preparation,
    SeparateDistributedDataParallel,
    SupervisedModel,
    build_mesh,
    wrap_model,
)
from stepwrap.wrappers.sharding.layout import as_global, is_sharded

PLAN = {"net.0": "colwise", "net.2": "rowwise"}
CLIP = {"max_norm": 0.05}


def _model() -> SupervisedModel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.LayerNorm(4))
    return SupervisedModel(net.double(), nn.MSELoss())


def _batch(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, size, generator=generator, dtype=torch.float64) for size in (6, 4)]


def _whole(model: nn.Module) -> Tensor:
    """All weights as one vector; every rank must call this."""
    placed: list[Any] = [as_global(one.detach(), one) for one in model.parameters()]
    wholes = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in placed]
    return torch.cat([one.flatten() for one in wholes])


def _expected(steps: int) -> Tensor:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for seed in range(steps):
        inputs, target = _batch(seed)
        optimizer.zero_grad()
        nn.functional.mse_loss(model.net(inputs), target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), **CLIP)
        optimizer.step()
    return _whole(model)


def _train(wrapper: Any, steps: int, rank: int, size: int) -> None:
    optim = OptimWrapper(torch.optim.AdamW(wrapper.parameters(), lr=0.01), clip_grad=CLIP)
    for seed in range(steps):
        wrapper.train_step([one.chunk(size)[rank] for one in _batch(seed)], optim)


def _copied(data: int, wrapper: Any) -> dict[str, Any]:
    mesh = build_mesh({"data": data, "tensor": 2})
    prepare = Preparation(tensor_parallel=PLAN)
    first = wrap_model(wrapper, _model(), mesh=mesh, prepare=prepare)
    parts = sum(map(is_sharded, first.parameters()))
    second = copy.deepcopy(copy.deepcopy(first))
    averaged = AveragedModel(first.module)
    _train(second, 4, mesh.data_rank, data)
    seen: dict[str, Any] = {
        "parts": [parts, *(sum(map(is_sharded, one.parameters())) for one in (second, averaged))],
        "trained": (_whole(second.module) - _expected(4)).abs().max().item(),
        "unmoved": (_whole(first.module) - _expected(0)).abs().max().item(),
        "groups": second.data_group is first.data_group is mesh.data_group,
    }
    _train(first, 2, mesh.data_rank, data)
    averaged.update_parameters(first.module)
    averaged.eval()
    (inputs, _), plain = _batch(9), _model()
    torch.nn.utils.vector_to_parameters(_expected(2), plain.parameters())
    with torch.no_grad():
        expected = plain.net(inputs)
        seen["averaged"] = (averaged.module.net(inputs) - expected).abs().max().item()
    return seen


@pytest.mark.parametrize(
    ("data", "wrapper"), [(1, None), (2, None), (2, SeparateDistributedDataParallel)]
)
def test_copies_train_by_themselves(data: int, wrapper: Any) -> None:
    for seen in run_ranks(_copied, 2 * data, data, wrapper):
        assert seen.pop("parts") == [3, 3, 3]
        assert seen.pop("groups")
        assert max(seen.values()) <= 1e-12, seen


def _refused() -> list[str]:
    mesh = build_mesh({"tensor": 2})
    wrapped = wrap_model(None, _model(), mesh=mesh, prepare=Preparation(tensor_parallel=PLAN))
    told = []
    for one in (wrapped, wrapped.module):
        with pytest.raises(TypeError) as caught:
            pickle.dumps(one)
        told.append(str(caught.value))
    return told


def test_pickles_are_refused() -> None:
    for wrapped, bare in run_ranks(_refused, 2):
        assert "SingleDevice of a group of ranks cannot be pickled" in wrapped
        for told in (wrapped, bare):
            assert "save state_dict() and load it into a new one" in told
