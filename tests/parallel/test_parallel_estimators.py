"""Sizes are real bytes; complexities are operations."""

import math
import re

import pytest
import torch
from torch import nn

from stepwrap.parallel import ModelComplexityEstimator, ModelSizeEstimator

MIB = 1024**2


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.int8, 1),
        (torch.float8_e4m3fn, 1),
        (torch.uint16, 2),
        (torch.bfloat16, 2),
        (torch.complex32, 4),
        (torch.float64, 8),
        (torch.complex128, 16),
    ],
)
def test_every_dtype_has_its_bytes(dtype: torch.dtype, size: int) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(10, dtype=dtype), requires_grad=False)
    model.register_buffer("table", torch.empty(3, 5, dtype=dtype))
    estimator = ModelSizeEstimator(model, size_multiplier=1)
    assert estimator.get_parameter_sizes() == 10 * size / MIB
    assert estimator.get_buffer_sizes() == 15 * size / MIB
    assert estimator.estimate_size() == 25 * size / MIB
    assert ModelSizeEstimator(model).estimate_size() == 50 * size / MIB


def test_shared_tensors_count_once_and_views_by_their_own_size() -> None:
    layer = nn.Linear(64, 64, bias=False)
    layer.register_buffer("row", torch.zeros(100, 4)[0])
    assert ModelSizeEstimator(nn.Sequential(layer, layer), 1).estimate_size() == 4100 * 4 / MIB
    assert ModelSizeEstimator(nn.Linear(64, 64, bias=False, device="meta"), 1).estimate_size() == (
        4096 * 4 / MIB
    )
    assert ModelSizeEstimator(nn.ReLU()).estimate_size() == 0.0


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_tensors_count_indices_and_values() -> None:
    model = nn.Module()
    model.register_buffer("near", torch.eye(100).to_sparse())
    model.register_buffer("far", torch.eye(100).to_sparse_csr())
    size = ModelSizeEstimator(model, 1).get_buffer_sizes() * MIB
    assert size == 100 * (2 * 8 + 4) + (101 * 8 + 100 * 8 + 100 * 4)


@pytest.mark.parametrize("kind", ["class", "function", "stepped"])
def test_optimizer_state(kind: str) -> None:
    model = nn.Linear(256, 256, bias=False)
    model.register_parameter("fixed", nn.Parameter(torch.zeros(256), requires_grad=False))
    stepped = torch.optim.Adam([model.weight])
    model(torch.ones(1, 256)).sum().backward()
    stepped.step()
    optimizer, expected = {
        "class": (torch.optim.Adam, 2 * 256 * 256 * 4 + 4),
        "function": (lambda params: torch.optim.SGD(params, lr=1, momentum=0.9), 256 * 256 * 4),
        "stepped": (stepped, 2 * 256 * 256 * 4 + 4),
    }[kind]
    estimator = ModelSizeEstimator(model, 1, optimizer=optimizer)
    assert estimator.get_optimizer_sizes() * MIB == expected
    assert estimator.estimate_size() * MIB == expected + 256 * 257 * 4
    assert ModelSizeEstimator(nn.ReLU(), optimizer=torch.optim.Adam).estimate_size() == 0


def test_optimizers_with_unknown_state() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    fresh, foreign = torch.optim.Adam(model.parameters()), torch.optim.SGD(other.parameters())
    with pytest.raises(ValueError, match="Adam has not stepped.*torch.optim.Adam"):
        ModelSizeEstimator(model, optimizer=fresh).estimate_size()
    with pytest.raises(ValueError, match="SGD .*no parameter"):
        ModelSizeEstimator(model, optimizer=foreign).estimate_size()
    with pytest.raises(ValueError, match="optimizer=LBFGS .*determined.*step it once"):
        ModelSizeEstimator(model, optimizer=torch.optim.LBFGS).estimate_size()


def test_models_that_have_no_size() -> None:
    with pytest.raises(ValueError, match="LazyLinear: weight .*no shape"):
        ModelSizeEstimator(nn.LazyLinear(3))
    with pytest.raises(TypeError, match=r"must .*torch\.nn\.Module, got dict"):
        ModelSizeEstimator({})
    for wrong in (-1, math.inf):
        with pytest.raises(ValueError, match=f"must .* 0 .*finite, got {wrong}"):
            ModelSizeEstimator(nn.ReLU(), wrong)


STEPS = torch.zeros(5, 3, 8)
ATTENTION = 5 * (2 * 3 * 8 * (3 * 8 + 8 + 2 * 16) + 2 * 2 * 2 * 3 * 3 * 4)


@pytest.mark.parametrize(
    ("model", "inputs", "operations"),
    [
        (nn.Linear(8, 4), torch.zeros(3, 8), 2 * 3 * 8 * 4),
        (nn.Linear(8, 4), {"input": torch.zeros(3, 8)}, 2 * 3 * 8 * 4),
        (nn.Conv2d(2, 4, 3), (torch.zeros(1, 2, 6, 6),), 2 * 4 * 4 * 4 * 2 * 9),
        (nn.ReLU(), torch.zeros(3), 0),
        # torch's own counter returns 0 for these two on the CPU.
        (nn.LSTM(8, 16, 2), STEPS, 2 * 15 * (8 + 16 + 16 + 16) * 4 * 16),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), STEPS, ATTENTION),
        (nn.GRU(8, 16), STEPS, 2 * 15 * (8 + 16) * 3 * 16),
    ],
)
def test_operations(model: nn.Module, inputs: object, operations: int) -> None:
    assert ModelComplexityEstimator(model, inputs).estimate_complexity() == operations


def test_packed_sequences_are_one_input() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(STEPS, [5, 4, 2])
    flops = ModelComplexityEstimator(nn.LSTM(8, 16), packed).estimate_complexity()
    assert flops == 2 * 11 * (8 + 16) * 4 * 16


def test_counting_leaves_no_trace() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
            self.inner[2].eval()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.inner(x) + torch.rand(4)

    model = Counts()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    ModelComplexityEstimator(model, torch.ones(2, 4)).estimate_complexity()
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert model.calls == 0
    assert model.inner[1].num_batches_tracked == 0
    assert torch.backends.mha.get_fastpath_enabled()
    assert model.inner[0].weight.grad is None


def test_a_failing_forward_names_its_inputs() -> None:
    inputs = (torch.zeros(3, 8), 4)
    with pytest.raises(RuntimeError) as caught:
        ModelComplexityEstimator(nn.Bilinear(8, 8, 2), inputs).estimate_complexity()
    inputs_text = r"forward.*Bilinear .*\(float32\(3, 8\) on cpu, int\)"
    assert re.search(inputs_text, str(caught.value))
    assert caught.value.__cause__ is not None
