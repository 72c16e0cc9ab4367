"""Estimates of a model's memory and floating-point operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

_MIB = 1024**2

OptimizerOf: TypeAlias = "Optimizer | Callable[[list[nn.Parameter]], Optimizer]"


class ModelSizeEstimator:
    """Estimates the memory of a model from its parameters and buffers; all sizes are in MiB.

    Each tensor counts once, with the bytes of its elements, even on the meta device. Activations
    are not counted.
    """

    def __init__(
        self, model: nn.Module, size_multiplier: float = 2, *, optimizer: OptimizerOf | None = None
    ) -> None:
        """Create an estimator.

        Args:
            size_multiplier: factor for the sum of parameters and buffers; 2 covers weights and
                gradients.
            optimizer: also count its state: an optimizer that has stepped, or a function or class
                that creates one from a list of parameters (``torch.optim.Adam``).

        Raises:
            TypeError: ``model`` is not a module.
            ValueError: a parameter has no shape yet (a lazy module), or the multiplier is negative
                or infinite.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not 0 <= size_multiplier < math.inf:
            raise ValueError(
                f"size_multiplier must be 0 or more, and finite, got {size_multiplier}"
            )
        tensors = (*model.named_parameters(), *model.named_buffers())
        lazy = [name for name, tensor in tensors if is_lazy(tensor)]
        if lazy:
            raise ValueError(
                f"{type(model).__name__}: {lazy[0]} has no shape yet; run the model once first"
            )
        self.model = model
        self.size_multiplier = size_multiplier
        self.optimizer = optimizer

    def get_parameter_sizes(self) -> float:
        """Return the MiB of all parameters."""
        return sum(map(_bytes, self.model.parameters())) / _MIB

    def get_buffer_sizes(self) -> float:
        """Return the MiB of all buffers."""
        return sum(map(_bytes, self.model.buffers())) / _MIB

    def get_optimizer_sizes(self) -> float:
        """Return the MiB of the optimizer's state for this model; 0 without an optimizer.

        Raises:
            ValueError: the optimizer has not stepped or has no parameter of this model, or the
                created one cannot step on the meta device (then pass one that has stepped).
        """
        trained = [param for param in self.model.parameters() if param.requires_grad]
        if self.optimizer is None or not trained:
            return 0.0
        if isinstance(self.optimizer, Optimizer):
            _check_stepped(self.optimizer, trained)
            return _state_bytes(self.optimizer, trained) / _MIB
        shapes = [nn.Parameter(torch.empty_like(param, device="meta")) for param in trained]
        return _state_bytes(_step_on_meta(self.optimizer, shapes), shapes) / _MIB

    def estimate_size(self) -> float:
        """Return the MiB of parameters and buffers times the multiplier, plus optimizer state."""
        tensors = self.get_parameter_sizes() + self.get_buffer_sizes()
        return tensors * self.size_multiplier + self.get_optimizer_sizes()


class ModelComplexityEstimator:
    """Estimates the floating-point operations of one forward pass of a model.

    They are counted by ``torch.utils.flop_counter``: matrix products, convolutions, attention and
    recurrent layers count, element-wise operations do not.
    """

    def __init__(self, model: nn.Module, example_inputs: Any) -> None:
        """Create an estimator.

        Args:
            example_inputs: inputs of the forward on the model's device: a single input, a list or
                tuple of positional arguments, or a dict of keyword arguments.

        Raises:
            TypeError: ``model`` is not a module.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        self.model = model
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        if isinstance(example_inputs, Mapping):
            self.kwargs = dict(example_inputs)
        elif type(example_inputs) in (list, tuple):
            # Not subclasses: a packed sequence is a named tuple, but a single input.
            self.args = tuple(example_inputs)
        else:
            self.args = (example_inputs,)

    def estimate_complexity(self) -> int:
        """Run the model once and return the number of floating-point operations.

        The run has no gradients and is in evaluation mode. Buffers, modes and the random state are
        restored afterwards.

        Raises:
            RuntimeError: the forward failed; the text describes the inputs.
        """
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        tensors = (*self.model.parameters(), *buffers.values())
        gpus = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
        try:
            with (
                torch.random.fork_rng(gpus),
                torch.no_grad(),
                counting_flops(self.model) as counter,
            ):
                torch.func.functional_call(self.model, buffers, self.args, self.kwargs)
        except Exception as error:
            inputs = [_described(value) for value in self.args]
            inputs += [f"{name}={_described(value)}" for name, value in self.kwargs.items()]
            raise RuntimeError(
                f"the forward of {type(self.model).__name__} failed with the example inputs "
                f"({', '.join(inputs)}): {type(error).__name__}: {error}"
            ) from error
        return int(counter.get_total_flops())


def _bytes(tensor: Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):
        # A wrapper such as a quantized weight: count the tensors inside.
        return sum(_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    if tensor.layout is torch.sparse_coo:
        return _bytes(tensor._indices()) + _bytes(tensor._values())
    if tensor.layout is torch.sparse_csr:
        return sum(map(_bytes, (tensor.crow_indices(), tensor.col_indices(), tensor.values())))
    return tensor.numel() * tensor.element_size()


def _state_bytes(optimizer: Optimizer, parameters: list[nn.Parameter]) -> int:
    values = [value for param in parameters for value in optimizer.state.get(param, {}).values()]
    return sum(_bytes(value) for value in values if isinstance(value, Tensor))


def _check_stepped(optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    optimized = {param for group in optimizer.param_groups for param in group["params"]}
    if optimized.isdisjoint(parameters):
        raise ValueError(f"{type(optimizer).__name__} holds no parameter of this model")
    if not optimizer.state:
        raise ValueError(
            f"{type(optimizer).__name__} has not stepped, so its state is not known: pass a class "
            "or function that creates it from a list of parameters, such as torch.optim.Adam"
        )


def _step_on_meta(
    build: Callable[[list[nn.Parameter]], Optimizer], parameters: list[nn.Parameter]
) -> Optimizer:
    """Return an optimizer that has stepped on ``parameters``, which are on the meta device."""
    for param in parameters:
        param.grad = torch.empty_like(param)
    name = getattr(build, "__name__", repr(build))
    try:
        optimizer = build(parameters)
        optimizer.step()
    except Exception as error:
        raise ValueError(
            f"the state of optimizer={name} could not be determined by a step on the meta device "
            f"({type(error).__name__}: {error}); step it once and pass the optimizer itself"
        ) from error
    return optimizer


def _recurrent_flops(inputs: Any, *weight_shapes: Any, **_: Any) -> int:
    """Count a product with each weight matrix per step and sample."""
    steps = math.prod(inputs[:-1])
    shapes = (
        weight_shapes[0]
        if weight_shapes and isinstance(weight_shapes[0], list)
        else weight_shapes[:4]
    )
    return sum(2 * steps * math.prod(shape) for shape in shapes if len(shape) == 2)


@contextmanager
def counting_flops(model: nn.Module) -> Iterator[FlopCounterMode]:
    """Count the floating-point operations of forwards, in evaluation mode.

    Attention is computed with operations that the counter knows.
    """
    # LSTMs run as a single operation, which torch's counter does not know.
    recurrent = {
        torch.ops.aten.mkldnn_rnn_layer: _recurrent_flops,
        torch.ops.aten._cudnn_rnn: _recurrent_flops,
    }
    counter = FlopCounterMode(display=False, custom_mapping=recurrent)
    training = [module for module in model.modules() if module.training]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    model.eval()
    try:
        with sdpa_kernel(SDPBackend.MATH), counter:
            yield counter
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module in training:
            module.training = True


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    kind = str(value.dtype).removeprefix("torch.")
    return f"{kind}{tuple(value.shape)} on {value.device}"
