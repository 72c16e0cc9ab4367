"""Copies of models with layers split over a tensor axis."""

import copy
import pickle
from typing import Any

import pytest
import torch
from on_ranks import assert_near, on_ranks, raises_with
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from stepwrap.wrappers import (
    Mesh,
    OptimWrapper,
    Preparation,
    SeparateDistributedDataParallel,
    SupervisedModel,
    build_mesh,
    wrap_model,
)
from stepwrap.wrappers.layout import as_global, is_sharded

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
    """Return all weights as one vector; every rank must call this."""
    placed: list[Any] = [as_global(param.detach(), param) for param in model.parameters()]
    wholes = [
        tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in placed
    ]
    return torch.cat([tensor.flatten() for tensor in wholes])


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


def _train(wrapper: Any, steps: int, mesh: Mesh) -> None:
    optim = OptimWrapper(torch.optim.AdamW(wrapper.parameters(), lr=0.01), clip_grad=CLIP)
    for seed in range(steps):
        chunks = [tensor.chunk(mesh.data_size) for tensor in _batch(seed)]
        wrapper.train_step([chunk[mesh.data_rank] for chunk in chunks], optim)


@pytest.mark.parametrize(
    ("ranks", "wrapper"), [(2, None), (4, None), (4, SeparateDistributedDataParallel)]
)
@on_ranks("ranks")
def test_copies_train_by_themselves(ranks: int, wrapper: Any) -> None:
    mesh = build_mesh({"data": ranks // 2, "tensor": 2})
    prepare = Preparation(tensor_parallel=PLAN)
    wrapped = wrap_model(wrapper, _model(), mesh=mesh, prepare=prepare)
    second = copy.deepcopy(copy.deepcopy(wrapped))
    averaged = AveragedModel(wrapped.module)
    for net in (wrapped, second, averaged):
        assert sum(map(is_sharded, net.parameters())) == 3
    assert second.data_group is wrapped.data_group is mesh.data_group
    _train(second, 4, mesh)
    assert_near(_whole(second.module), _expected(4), 1e-12)
    assert_near(_whole(wrapped.module), _expected(0), 1e-12)
    _train(wrapped, 2, mesh)
    averaged.update_parameters(wrapped.module)
    averaged.eval()
    (inputs, _), plain = _batch(9), _model()
    torch.nn.utils.vector_to_parameters(_expected(2), plain.parameters())
    with torch.no_grad():
        assert_near(averaged.module.net(inputs), plain.net(inputs), 1e-12)


@on_ranks(2)
def test_pickles_are_refused() -> None:
    mesh = build_mesh({"tensor": 2})
    wrapped = wrap_model(None, _model(), mesh=mesh, prepare=Preparation(tensor_parallel=PLAN))
    advice = "save state_dict() and load it into a new one"
    with raises_with(TypeError, "SingleDevice of a group of ranks cannot be pickled", advice):
        pickle.dumps(wrapped)
    with raises_with(TypeError, advice):
        pickle.dumps(wrapped.module)
