"""Check tensors, lists and numbers before they are sent, and describe them in errors."""

import contextlib
import numbers
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from ..errors import Group, get_text
from ..process.ranks import members
from ..trace.calling import calling
from ..trace.tracing import is_tracing
from .operations import check_reduced


def describe_tensor(data: object) -> str:
    """Describe a tensor by dtype, shape, device type and layout; anything else by its type."""
    if not isinstance(data, torch.Tensor):
        return type(data).__name__
    layout = "" if data.layout == torch.strided else f" ({data.layout})"
    return f"{data.dtype} of shape {tuple(data.shape)} on {data.device.type}{layout}"


def describe_dtype(data: object, *, with_shape: bool = False) -> str:
    """Describe a tensor, or the first of a list, by its dtype; anything else by its type."""
    tensor = data[0] if isinstance(data, list | tuple) and data else data
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    shape = f" and shape {tuple(tensor.shape)}"
    return f"tensors of {tensor.dtype}{shape}" if with_shape else str(tensor.dtype)


def checked_tensor(name: str, data: object, *, is_target: bool = False) -> torch.Tensor:
    """Return the data if it is a dense tensor; raise if it is not.

    Args:
        name: the argument, for the message.
        is_target: whether the tensor will be written to, so that its elements must not overlap.

    Raises:
        TypeError: the data is not a tensor.
        ValueError: it is a sparse, nested, quantized or meta tensor, or an expanded target.
    """
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(data).__name__}")
    if data.is_meta:
        raise ValueError(f"{name} must have values, got a tensor on the meta device")
    if data.layout != torch.strided or data.is_nested:
        kind = "a nested tensor" if data.is_nested else data.layout
        raise ValueError(f"{name} must be a dense (torch.strided) tensor, got {kind}")
    if data.is_quantized:
        raise ValueError(f"{name} must not be quantized, got {data.dtype}")
    if is_target and data.numel():
        pairs = zip(data.shape, data.stride(), strict=True)
        if any(size > 1 and stride == 0 for size, stride in pairs):
            raise ValueError(f"{name} must not be expanded: its elements share memory; clone() it")
    return data


def checked_tensors(
    name: str, data: object, *, is_target: bool = False, are_alike: bool = False
) -> list[torch.Tensor]:
    """Return the data if it is a non-empty list of tensors of one dtype; raise if it is not.

    With ``are_alike`` the tensors must also have one shape.
    """
    if not isinstance(data, list | tuple):
        raise TypeError(f"{name} must be a list of tensors, got {type(data).__name__}")
    if not data:
        raise ValueError(f"{name} must not be empty")
    for index, tensor in enumerate(data):
        checked_tensor(f"{name}[{index}]", tensor, is_target=is_target)
        check_like(f"{name}[{index}]", tensor, f"{name}[0]", data[0], shape=are_alike)
    return list(data)


def one_per_rank(
    name: str, data: object, group: dist.ProcessGroup, *, is_target: bool = False
) -> list[torch.Tensor]:
    """Return the data if it is a list with one tensor for each rank of the group; raise if not."""
    tensors, ranks = checked_tensors(name, data, is_target=is_target), members(group)
    if len(tensors) != len(ranks):
        raise ValueError(
            f"{name} must have {len(ranks)} tensors, one for each of the ranks {ranks}, "
            f"got {len(tensors)}"
        )
    return tensors


def check_like(
    name: str, tensor: torch.Tensor, like_name: str, like: torch.Tensor, *, shape: bool = True
) -> None:
    """Raise ValueError unless both tensors have the same dtype and, by default, shape."""
    if tensor.dtype != like.dtype:
        raise ValueError(f"{name} must be {like.dtype} like {like_name}, got {tensor.dtype}")
    if shape and tensor.shape != like.shape:
        raise ValueError(
            f"{name} must have the shape {tuple(like.shape)} like {like_name}, "
            f"got {tuple(tensor.shape)}"
        )


def is_number(value: object) -> bool:
    """Return whether the value is a number; NumPy's bool counts as one."""
    kind = type(value)
    is_numpy_flag = kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")
    return isinstance(value, numbers.Number) or is_numpy_flag


def make_tensor(name: str, value: object) -> torch.Tensor:
    """Return a detached tensor that can be reduced; a Python float becomes float64."""
    if not isinstance(value, torch.Tensor) and not is_number(value):
        kind = type(value).__name__
        raise TypeError(f"{name} must be a tensor or a number, got {kind}")
    dtype = torch.float64 if isinstance(value, float) else None
    try:
        tensor = torch.as_tensor(value, dtype=dtype).detach()
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{name} must fit a tensor, got {value}: {error}") from error
    check_reduced(checked_tensor(name, tensor).dtype)
    return tensor


@contextlib.contextmanager
def checking(name: str, group: Group, describe: Callable[[], str]) -> Iterator[None]:
    """Surround the argument checks of a collective that exchanges headers only while tracing.

    While tracing, an error in this context is raised on all ranks: this rank reports it in the
    header exchange that precedes the collective.
    """
    try:
        yield
    except Exception as error:
        if is_tracing() and len(members(group)) > 1:
            text = f"{describe()}, which raised {get_text(error)}"
            with calling(name, group, lambda: text):
                # If all ranks report the same text, each raises its own error.
                pass
        raise
