"""Summarize a model: its layers with output shapes and parameters, and the FLOPs of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, is_dataclass
from functools import partial, reduce
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...loops.evaluate import evaluation_mode
from ...parallel.placement.estimators import counting_flops
from ...wrappers import SingleDevice, parse_losses
from ...wrappers.steps.plain_models import explaining
from ...wrappers.steps.preprocess import as_call, path_to_samples

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Layer:
    """A module of a model.

    Attributes:
        name: its path, such as "net.0".
        kind: the name of its class.
        parameters: number of parameters, including those of its children.
        shape: shape of its first output tensor at its last call; None if it was not called.
    """

    name: str
    kind: str
    parameters: int
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class Summary:
    """A model's layers and size.

    Attributes:
        layers: all modules except the model itself, parents before their children.
        parameters: number of parameters; shared ones count once.
        trainable: number of parameters that require a gradient.
        size_bytes: size of the parameters and buffers.
        samples: number of samples in the batch; 0 if unknown.
        flops: floating-point operations of one forward of the batch; 0 if it failed.
        error: the error that the forward raised, if it failed.
    """

    layers: list[Layer]
    parameters: int
    trainable: int
    size_bytes: int
    samples: int = 0
    flops: int = 0
    error: Exception | None = field(default=None, compare=False)


def summarize(model: nn.Module, batch: Any, *, has_targets: bool = False) -> Summary:
    """Summarize a model by running one forward in evaluation mode.

    If the forward fails, the summary contains the error, and shapes and FLOPs are missing.

    Args:
        model: a model on the CPU; it is called with ``mode="tensor"``.
        batch: a batch as the loader yields it.
        has_targets: whether the batch is for training; then an output of transformers without a
            loss is an error.
    """
    shapes: dict[nn.Module, tuple[int, ...]] = {}
    samples, flops, error = 0, 0, None
    try:
        with evaluation_mode(model), torch.no_grad(), _recording(model, shapes):
            prepared = SingleDevice(model).preprocess(batch, training=False)
            path = path_to_samples(prepared)
            samples = 0 if path is None else len(reduce(getitem, path, prepared))
            args, kwargs = as_call(prepared)
            with counting_flops(model) as counter, explaining(model, prepared):
                output = model(*args, **kwargs, mode="tensor")
                if has_targets and is_dataclass(output) and isinstance(output, Mapping):
                    parse_losses(output)
            flops = counter.get_total_flops()
    except Exception as caught:
        error = caught
    parameters = list(model.parameters())
    stored = [*parameters, *model.buffers()]
    return Summary(
        layers=[
            Layer(name, type(module).__name__, _count(module.parameters()), shapes.get(module))
            for name, module in model.named_modules()
            if name
        ],
        parameters=_count(parameters),
        trainable=_count(param for param in parameters if param.requires_grad),
        size_bytes=sum(tensor.numel() * tensor.element_size() for tensor in stored),
        samples=samples,
        flops=flops,
        error=error,
    )


def format_quantity(number: float, unit: str) -> str:
    """Format a number with an SI prefix: ``format_quantity(1234567, "FLOPs")`` is "1.23 MFLOPs"."""
    for factor, prefix in _UNITS:
        if number >= factor:
            return f"{number / factor:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}"


def _count(parameters: Any) -> int:
    return sum(param.numel() for param in parameters)


@contextmanager
def _recording(model: nn.Module, shapes: dict[nn.Module, tuple[int, ...]]) -> Iterator[None]:
    """Record the shape of each module's first output tensor."""
    with ExitStack() as handles:
        for module in model.modules():
            handle = module.register_forward_hook(partial(_record, shapes))
            handles.callback(handle.remove)
        yield


def _record(
    shapes: dict[nn.Module, tuple[int, ...]], module: nn.Module, args: Any, output: Any
) -> None:
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    if tensors:
        shapes[module] = tuple(tensors[0].shape)
