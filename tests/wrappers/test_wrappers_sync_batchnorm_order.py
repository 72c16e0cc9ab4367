"""Ranks that call synchronised layers in other orders, and what goes on around the layers."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from on_ranks import gathered, on_ranks, raises_with
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stepwrap.collectives import CollectiveError
from stepwrap.wrappers import (
    StepDataParallel,
    SupervisedModel,
    SynchronizedBatchNorm1d,
    dict_gather,
)


def _layers() -> tuple[SynchronizedBatchNorm1d, SynchronizedBatchNorm1d, Tensor]:
    torch.manual_seed(dist.get_rank())
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    first, second = (SynchronizedBatchNorm1d(3).double() for _ in range(2))
    first(x)
    second(x)
    return first, second, x


@on_ranks(2)
def test_ranks_in_different_layers_get_an_error() -> None:
    """Not wrong statistics, and not wrong gradients."""
    first, second, x = _layers()
    chosen = (first, second)[dist.get_rank()]
    told = "the ranks [0] and [1] are in different calls of SynchronizedBatchNorm1d"
    with raises_with(CollectiveError, told):
        chosen(x)
    first, second, x = _layers()
    output = (first(x), second(x * 2 + x**2))[dist.get_rank()]
    told = "in the backward of different calls of SynchronizedBatchNorm1d"
    with raises_with(CollectiveError, told):
        output.pow(3).sum().backward()
    # The ranks are in step again.
    first, _, x = _layers()
    first(x).pow(3).sum().backward()
    assert x.grad is not None


@on_ranks(2)
def test_a_copy_that_one_rank_makes_still_synchronises() -> None:
    """The outputs of both ranks have mean 0 together, but not alone."""
    layer, _, x = _layers()
    if dist.get_rank() == 0:
        layer = copy.deepcopy(layer)
    of_rank_0, of_rank_1 = gathered(layer(x).sum().item())
    assert of_rank_0 + of_rank_1 == pytest.approx(0, abs=1e-9)
    assert abs(of_rank_0) > 1e-3


@on_ranks(2)
def test_activation_checkpoints_on_ranks() -> None:
    differences = []
    for reentrant in (None, True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), SynchronizedBatchNorm1d(3), nn.ReLU()).double()
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        out = net(x) if reentrant is None else checkpoint(net, x, use_reentrant=reentrant)
        out.pow(3).sum().backward()
        assert x.grad is not None
        differences.append(x.grad)
    differences = [float((other - differences[0]).abs().max()) for other in differences[1:]]
    assert max(differences) < 1e-13


@on_ranks(2)
def test_a_layer_with_a_group_is_pickled_without_it() -> None:
    layer = SynchronizedBatchNorm1d(3, process_group=dist.group.WORLD)
    again = pickle.loads(pickle.dumps(layer))
    assert again.process_group is None
    assert copy.deepcopy(layer).process_group is dist.group.WORLD


def test_what_cannot_be_joined_and_a_mode_without_its_name() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match=r"different dimensions: shapes \(2,\), \(\)"):
        dict_gather([torch.ones(2), torch.tensor(1.0)], cpu)
    with pytest.raises(ValueError, match="one copy at least"):
        dict_gather([], cpu)
    model = SupervisedModel(nn.Linear(3, 2), nn.CrossEntropyLoss())
    with pytest.raises(TypeError, match="mode must be given by its name"):
        StepDataParallel(model, ["cpu", "cpu"])(torch.ones(4, 3), torch.zeros(4).long(), "loss")
