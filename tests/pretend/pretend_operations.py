"""Operations of a pretend device: they run on the host, and behave as on a real device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pretend_runtime as runtime
import torch
from pretend_kinds import KIND
from pretend_library import library
from pretend_tensors import (
    CPU_KEYS,
    below_autograd,
    host_alias,
    is_on_device,
    move_to_device,
    replace_storage,
    resize,
)
from torch import Tensor
from torch.utils._pytree import tree_map

# Operations whose result or shape the host reads.
_WAITING = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
}
# Operations that accept indices on the host; a mask among them makes the host wait.
_INDEXING = {
    "aten::index.Tensor",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index.Tensor",
}
# Operations that refuse even a 0-d tensor of another device.
_STRICT = ("aten::cat", "aten::stack", "aten::_stack")
# Operations with kernels of their own for a device, which come before the fallback for a whole key.
_WITH_KERNELS = (
    "copy_",
    # In fake mode the fallback is not found for it.
    "empty_strided",
    "mse_loss",
    "embedding_dense_backward",
    "native_layer_norm",
    "native_layer_norm_backward",
    "native_group_norm",
    "_scaled_dot_product_flash_attention_for_cpu",
)
# A library unregisters its kernels when it is freed.
_libraries: list[torch.library.Library] = []


class _HostCall:
    """A call whose tensors on one device are replaced by aliases on the host.

    Attributes:
        index: the device.
        values: the positional arguments.
        options: the keyword arguments.
        outputs: each argument that the operation writes, with its alias.
        originals: the argument for the id of each alias.
    """

    def __init__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.op, self.name = op, op.name()
        arguments = op._schema.arguments
        self.written = {
            argument.name
            for argument in arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        self.outputs: list[tuple[Tensor, Tensor]] = []
        self.originals: dict[int, Tensor] = {}
        self.index = _device_index((args, kwargs))
        self.values = [
            self._convert_argument(value, argument.name)
            for value, argument in zip(args, arguments, strict=False)
        ]
        self._wrap_numbers()
        self.options = {name: self._convert_argument(value, name) for name, value in kwargs.items()}
        self.options.pop("pin_memory", None)

    def run(self) -> Any:
        """Run the operation on the host and return its results on the device."""
        results = self.op(*self.values, **self.options)
        for original, alias in self.outputs:
            is_new = not original.numel() and alias.numel()
            if alias.shape != original.shape or is_new:
                replace_storage(original, alias)
        return results, tree_map(self._convert_result, results)

    def _convert_argument(self, value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            if is_on_device(value):
                return self._alias(value, name)
            if value.device.type == "cpu":
                self._check_host_tensor(value, name)
            return value
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == KIND.type else value
        if isinstance(value, (list, tuple)):
            return type(value)(self._convert_argument(element, name) for element in value)
        return value

    def _alias(self, tensor: Tensor, name: str) -> Tensor:
        if tensor.device.index != self.index and self.name not in (
            "aten::copy_",
            "aten::_copy_from",
        ):
            _raise_mixed(self.name, str(tensor.device), f"{KIND.type}:{self.index}")
        # The CPU may resize an empty result, but not memory that it does not own.
        is_empty_result = name in self.written and not tensor.numel()
        alias = (
            torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            if is_empty_result
            else host_alias(tensor)
        )
        self.originals[id(alias)] = tensor
        if name in self.written:
            self.outputs.append((tensor, alias))
        return alias

    def _check_host_tensor(self, tensor: Tensor, name: str) -> None:
        is_number = (
            tensor.dim() == 0 and name not in self.written and not self.name.startswith(_STRICT)
        )
        indexes = self.name in _INDEXING or self.name.partition(".")[0] in _INDEXING
        if not is_number and not indexes and self.name != "aten::copy_":
            _raise_mixed(self.name, "cpu", f"{KIND.type}:{self.index}")

    def _wrap_numbers(self) -> None:
        # Python numbers arrive here where the schema has a tensor.
        tensors = [value for value in self.values if isinstance(value, Tensor)]
        for position, (value, argument) in enumerate(
            zip(self.values, self.op._schema.arguments, strict=False)
        ):
            if isinstance(value, (bool, int, float, complex)) and str(argument.type) == "Tensor":
                scalars_only = bool(tensors) and all(tensor.dim() == 0 for tensor in tensors)
                dtype = torch.float64 if isinstance(value, float) else None
                if scalars_only and tensors[0].is_floating_point():
                    dtype = tensors[0].dtype
                self.values[position] = torch.tensor(value, dtype=dtype)

    def _convert_result(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        original = self.originals.get(id(value))
        return move_to_device(value, self.index) if original is None else original


def run_operation(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation that has a tensor or a device argument of a pretend device."""
    name = op.name()
    if op.is_view or name.startswith(("aten::set_", "aten::view")):
        return op.redispatch(CPU_KEYS, *args, **kwargs)
    with below_autograd():
        if name == "aten::resize_":
            return resize(*args[:2])
        runtime.finish_uploads()
        if name == "aten::copy_":
            return _copy(op, args, kwargs)
        call = _HostCall(op, args, kwargs)
        runtime.note_launch(name)
        if name in _WAITING or (name in _INDEXING and _has_mask(args)):
            runtime.note_wait(name)
        is_random = torch.Tag.nondeterministic_seeded in op.tags
        runtime.keep_before_capture([alias for _, alias in call.outputs])
        with runtime.random_stream(call.index) if is_random else contextlib.nullcontext():
            results, moved = call.run()
        if runtime.WITHOUT_FLOAT64:
            tree_map(_refuse_float64, moved)
        runtime.capture(op, call.values, call.options, results, call.index, is_random, moved)
        return moved


def _refuse_float64(value: Any) -> None:
    if isinstance(value, Tensor) and is_on_device(value) and value.dtype == torch.float64:
        raise TypeError(f"this pretend {KIND.key} device has no float64")


def _copy(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    target, source = args[0], args[1]
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    call = _HostCall(op, args[:2], {})
    runtime.note_launch("aten::copy_")
    if runtime.WITHOUT_FLOAT64:
        _refuse_float64(target)
    host_target, host_source = call.values
    runtime.keep_before_capture([host_target] if is_on_device(target) else [])
    if is_on_device(target) == is_on_device(source) or _is_device_memory(source):
        host_target.copy_(host_source)
    elif is_on_device(source):
        runtime.download(host_target, host_source, is_late=non_blocking and target.is_pinned())
    else:
        # CUDA stages a copy from pageable memory before it returns.
        runtime.upload(
            host_target,
            host_source,
            is_late=non_blocking and source.is_pinned(),
            waits=not non_blocking,
        )
    runtime.capture(op, [host_target, host_source], {}, host_target, call.index, False, args)
    return target


def _is_device_memory(source: Tensor) -> bool:
    """Return whether a tensor of the host is an alias, such as gloo's result that DDP reads."""
    return not is_on_device(source) and bool(
        library.pretend_owns(source.untyped_storage().data_ptr())
    )


def _device_index(arguments: Any) -> int:
    indices: list[int] = []

    def look(value: Any) -> Any:
        if isinstance(value, Tensor) and is_on_device(value):
            indices.append(value.device.index)
        elif isinstance(value, torch.device) and value.type == KIND.type:
            indices.append(runtime.current_device() if value.index is None else value.index)
        return value

    tree_map(look, arguments)
    return indices[0] if indices else runtime.current_device()


def _has_mask(args: tuple[Any, ...]) -> bool:
    return any(
        isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
        for index in (args[1] or ())
    )


def _raise_mixed(name: str, device: str, other: str) -> None:
    raise RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{other} and {device}! (in {name})"
    )


def _bind(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return run_operation(op, *args, **kwargs)

    return run


def _softmax(op: Any) -> Callable[..., Any]:
    """Return a kernel that converts halves to float32, as only CUDA's does."""

    def run(tensor: Tensor, dim: int, half_to_float: bool) -> Any:
        if half_to_float:
            return run_operation(op, tensor.float(), dim, False)
        return run_operation(op, tensor, dim, half_to_float)

    return run


def _softmax_backward(op: Any) -> Callable[..., Any]:
    def run(gradient: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Any:
        is_half = input_dtype in (torch.float16, torch.bfloat16)
        if is_half and gradient.dtype == torch.float32:
            return run_operation(op, gradient, output, dim, torch.float32).to(input_dtype)
        return run_operation(op, gradient, output, dim, input_dtype)

    return run


def _batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(_wide(x), _all_but_channels(x), correction=0)
    inv_std = (var + eps).rsqrt()
    return mean, inv_std


def _batch_norm_elemt(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
    eps: float,
    *,
    out: Tensor,
) -> Tensor:
    scale = inv_std if weight is None else inv_std * weight
    result = (_wide(x) - _as_channels(mean, x)) * _as_channels(scale, x)
    return out.copy_(result if bias is None else result + _as_channels(bias, x))


def _batch_norm_backward_reduce(
    dy: Tensor, x: Tensor, mean: Tensor, inv_std: Tensor, weight: Tensor | None, *_: bool
) -> tuple[Tensor, ...]:
    sum_dy = _wide(dy).sum(_all_but_channels(x))
    sum_dy_xmu = (_wide(dy) * (_wide(x) - _as_channels(mean, x))).sum(_all_but_channels(x))
    return sum_dy, sum_dy_xmu, sum_dy_xmu * inv_std, sum_dy.clone()


def _batch_norm_backward_elemt(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    total = count.sum()
    slope = _as_channels(inv_std.square() * sum_dy_xmu / total, x)
    centred = _wide(x) - _as_channels(mean, x)
    dx = _wide(dy) - _as_channels(sum_dy / total, x) - centred * slope
    scale = inv_std if weight is None else inv_std * weight
    return (dx * _as_channels(scale, x)).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _as_channels(vector: Tensor, x: Tensor) -> Tensor:
    return vector.view(-1, *[1] * (x.dim() - 2))


# Operations that only accelerators have, with their results in the order of CUDA's kernels.
_ONLY_CUDA: dict[str, Callable[..., Any]] = {
    "batch_norm_stats": _batch_norm_stats,
    "batch_norm_elemt.out": _batch_norm_elemt,
    "batch_norm_backward_reduce": _batch_norm_backward_reduce,
    "batch_norm_backward_elemt": _batch_norm_backward_elemt,
}


class _OnHost:
    """An operation that only accelerators have, replaced by a function of tensors on the host."""

    def __init__(self, op: Any, function: Callable[..., Any]) -> None:
        self._op, self._function = op, function
        self._schema = op._schema
        self.is_view, self.tags = False, op.tags

    def name(self) -> str:
        return str(self._op.name())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def install() -> None:
    """Register the kernels of the pretend devices."""
    every_operator = torch.library.Library("_", "IMPL")
    every_operator.fallback(run_operation, KIND.key)
    aten = torch.library.Library("aten", "IMPL")
    for name in _WITH_KERNELS:
        aten.impl(name, _bind(getattr(torch.ops.aten, name).default), KIND.key)
    for name in ("_softmax", "_log_softmax"):
        backward = f"{name}_backward_data"
        aten.impl(name, _softmax(getattr(torch.ops.aten, name).default), KIND.key)
        aten.impl(backward, _softmax_backward(getattr(torch.ops.aten, backward).default), KIND.key)
    for name, function in _ONLY_CUDA.items():
        base, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
        aten.impl(name, _bind(_OnHost(op, function)), KIND.key)
    _libraries.extend([every_operator, aten])
