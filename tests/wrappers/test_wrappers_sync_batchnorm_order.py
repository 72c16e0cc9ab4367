"""Ranks that call synchronised layers in other orders, and what goes on around the layers."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
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


def _text(call: Callable[[], object]) -> str:
    with pytest.raises(CollectiveError) as error:
        call()
    return str(error.value)


def _mix_up() -> tuple[str, str, bool]:
    first, second, x = _layers()
    chosen = (first, second)[dist.get_rank()]
    forward = _text(lambda: chosen(x))
    first, second, x = _layers()
    outputs = (first(x), second(x * 2 + x**2))
    backward = _text(lambda: outputs[dist.get_rank()].pow(3).sum().backward())
    # And on: the ranks are in step again.
    first, _, x = _layers()
    first(x).pow(3).sum().backward()
    return forward, backward, x.grad is not None


def test_ranks_in_different_layers_are_told_so() -> None:
    """Not wrong statistics, and not wrong gradients."""
    for forward, backward, goes_on in run_ranks(_mix_up, 2):
        assert "the ranks [0] and [1] are in different calls of SynchronizedBatchNorm1d" in forward
        assert "in the backward of different calls of SynchronizedBatchNorm1d" in backward
        assert goes_on


def _copy_on_one_rank() -> float:
    layer, _, x = _layers()
    if dist.get_rank() == 0:
        layer = copy.deepcopy(layer)
    return layer(x).sum().item()


def test_a_copy_that_one_rank_makes_goes_on() -> None:
    """D-12: still normalised over both ranks, whose outputs have mean 0 together, not alone."""
    of_rank_0, of_rank_1 = run_ranks(_copy_on_one_rank, 2)
    assert of_rank_0 + of_rank_1 == pytest.approx(0, abs=1e-9)
    assert abs(of_rank_0) > 1e-3


def _gradients_with_checkpoints() -> list[float]:
    """Return how far checkpointed gradients are from plain ones."""
    differences = []
    for reentrant in (None, True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), SynchronizedBatchNorm1d(3), nn.ReLU()).double()
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        out = net(x) if reentrant is None else checkpoint(net, x, use_reentrant=reentrant)
        out.pow(3).sum().backward()
        assert x.grad is not None
        differences.append(x.grad)
    return [float((other - differences[0]).abs().max()) for other in differences[1:]]


def test_activation_checkpoints_on_ranks() -> None:
    for differences in run_ranks(_gradients_with_checkpoints, 2):
        assert max(differences) < 1e-13


def _pickle_with_a_group() -> bool:
    layer = SynchronizedBatchNorm1d(3, process_group=dist.group.WORLD)
    again = pickle.loads(pickle.dumps(layer))
    return again.process_group is None and copy.deepcopy(layer).process_group is dist.group.WORLD


def test_a_layer_with_a_group_is_pickled_without_it() -> None:
    assert run_ranks(_pickle_with_a_group, 2) == [True, True]


def test_what_cannot_be_joined_and_a_mode_without_its_name() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match=r"different dimensions: shapes \(2,\), \(\)"):
        dict_gather([torch.ones(2), torch.tensor(1.0)], cpu)
    with pytest.raises(ValueError, match="at least one copy"):
        dict_gather([], cpu)
    model = SupervisedModel(nn.Linear(3, 2), nn.CrossEntropyLoss())
    with pytest.raises(TypeError, match="mode must be given by its name"):
        StepDataParallel(model, ["cpu", "cpu"])(torch.ones(4, 3), torch.zeros(4).long(), "loss")
