"""Inputs, layers and references for tests of synchronised batch normalisation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stepwrap.wrappers import (
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
)

CHANNELS = 6
STEPS = 3
SHAPES = {
    "1d": (16, CHANNELS),
    "1d-length": (12, CHANNELS, 5),
    "2d": (8, CHANNELS, 4, 4),
    "3d": (8, CHANNELS, 2, 3, 2),
}
PLAIN = {
    "1d": nn.BatchNorm1d,
    "1d-length": nn.BatchNorm1d,
    "2d": nn.BatchNorm2d,
    "3d": nn.BatchNorm3d,
}
SYNCHRONISED = {
    "1d": SynchronizedBatchNorm1d,
    "1d-length": SynchronizedBatchNorm1d,
    "2d": SynchronizedBatchNorm2d,
    "3d": SynchronizedBatchNorm3d,
}
BOUNDS = {torch.float32: 1e-6, torch.float64: 1e-12}


@dataclass(frozen=True)
class Case:
    """Inputs and cotangents of the whole batch for every step."""

    kind: str
    inputs: list[Tensor]
    cotangents: list[Tensor]

    def to(self, dtype: torch.dtype) -> "Case":
        inputs, cotangents = (
            [tensor.to(dtype) for tensor in x] for x in (self.inputs, self.cotangents)
        )
        return Case(self.kind, inputs, cotangents)


def case(kind: str, dtype: torch.dtype, mean: float = 0.0) -> Case:
    """Return random values of `dtype` with standard deviation 1."""
    generator = torch.Generator().manual_seed(7)

    def values() -> list[Tensor]:
        shape = SHAPES[kind]
        return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(STEPS)]

    inputs = [(tensor + mean).to(dtype) for tensor in values()]
    return Case(kind, inputs, [tensor.to(dtype) for tensor in values()])


def set_parameters(layer: Any) -> Any:
    """Set the layer's weights and biases to random values that are exact in fp32."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(CHANNELS, generator=generator))
    return layer


def results(layer: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the quantities compared after the last step, in fp64."""
    of_layer = dict(layer.named_buffers())
    of_layer |= {f"d{name}": param.grad for name, param in layer.named_parameters()}
    by_name = {"y": torch.stack(list(outputs)), "dx": torch.stack(list(inputs)), **of_layer}
    return {name: tensor.detach().double() for name, tensor in by_name.items()}


def train(layer: Any, call: Any, bn_case: Case) -> dict[str, Tensor]:
    """Run all steps with `call(x)`; the parameters' gradients are summed over the steps."""
    outputs, gradients = [], []
    for x, cotangent in zip(bn_case.inputs, bn_case.cotangents, strict=True):
        x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        y = call(x)
        assert y.dtype is x.dtype
        y.backward(cotangent.to(y.dtype))
        outputs.append(y)
        gradients.append(x.grad)
    return results(layer, outputs, gradients)


def reference(bn_case: Case, **options: Any) -> dict[str, Tensor]:
    """Return the results of torch's layer on the whole batch in fp64."""
    layer = set_parameters(PLAIN[bn_case.kind](CHANNELS, **options).double())
    return train(layer, layer, bn_case.to(torch.float64))


def largest_error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest |got - expected| / max(1, max|expected|) over all quantities."""
    assert list(got) == list(expected)
    errors = {
        name: ((got[name] - expected[name]).abs().max() / expected[name].abs().max().clamp(1))
        for name in expected
    }
    # max() can ignore a NaN.
    return max(torch.nan_to_num(error, nan=float("inf")).item() for error in errors.values())


def splits(size: int, num_copies: int) -> dict[str, list[int]]:
    """Return sizes of even, uneven and partly empty chunks."""
    if num_copies == 1:
        return {"even": [size]}
    uneven = [1] * (num_copies - 1)
    remainder = [0, *[2] * (num_copies - 2)]
    return {
        "even": [size // num_copies] * num_copies,
        "uneven": [size - sum(uneven), *uneven],
        "empty": [*remainder, size - sum(remainder)],
    }
