"""Synchronised batch normalisation on one CUDA device."""

from typing import Any

import pytest
import torch
from batchnorm_cases import (
    CHANNELS,
    SHAPES,
    SYNCHRONISED,
    Case,
    case,
    largest_error,
    reference,
    train,
    with_parameters,
)
from torch import Tensor, nn

from stepwrap.wrappers import ReplicationCallbackDataParallel

pytestmark = pytest.mark.gpu


def _parallel(layer: nn.Module) -> nn.Module:
    return ReplicationCallbackDataParallel(layer, [0, 0])


def _on_gpu(given: Case) -> Case:
    inputs, cotangents = ([one.cuda() for one in x] for x in (given.inputs, given.cotangents))
    return Case(given.kind, inputs, cotangents)


def _results(layer: Any, given: Case) -> dict[str, Tensor]:
    got = train(layer, _parallel(layer), _on_gpu(given))
    return {name: one.cpu() for name, one in got.items()}


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("kind", SHAPES)
def test_two_replicas_on_one_device(kind: str, dtype: torch.dtype, bound: float) -> None:
    given = case(kind, dtype)
    layer = with_parameters(SYNCHRONISED[kind](CHANNELS)).to("cuda", dtype)
    assert largest_error(_results(layer, given), reference(given)) <= bound
    assert layer.num_batches_tracked == len(given.inputs)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_halves(dtype: torch.dtype, bound: float) -> None:
    given = case("2d", dtype)
    layer = with_parameters(SYNCHRONISED["2d"](CHANNELS)).cuda()
    assert largest_error(_results(layer, given), reference(given)) <= bound


def test_channels_last_and_autocast() -> None:
    given = case("2d", torch.float32)
    x = given.inputs[0].cuda().to(memory_format=torch.channels_last).requires_grad_()
    layer = SYNCHRONISED["2d"](CHANNELS).cuda()
    with torch.autocast("cuda", torch.float16):
        y = _parallel(layer)(x.half())
    assert y.dtype is torch.float16
    assert y.is_contiguous(memory_format=torch.channels_last)
    y.sum().backward()
    assert layer.weight.grad.dtype is torch.float32


def test_alone_is_torchs_own() -> None:
    given = _on_gpu(case("2d", torch.float32))
    layer = with_parameters(SYNCHRONISED["2d"](CHANNELS)).cuda()
    plain = with_parameters(nn.BatchNorm2d(CHANNELS)).cuda()
    got, expected = train(layer, layer, given), train(plain, plain, given)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_refuses_graphs() -> None:
    layer = SYNCHRONISED["2d"](CHANNELS).cuda()
    x = torch.randn(4, CHANNELS, 2, 2, device="cuda")
    parallel = _parallel(layer)
    parallel(x)

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            # Not an empty graph, of which torch would warn.
            torch.add(x, 1)
            parallel(x)

    with pytest.raises(RuntimeError, match="CUDA graph"):
        capture()
    torch.cuda.synchronize()
    assert parallel(x).shape == x.shape
