"""The reduce operations by name, for every dtype, also where the transport cannot do them."""

import difflib
import functools
import logging
from typing import Final

import torch
import torch.distributed as dist

from .process import comm_device, live_world_size

BITWISE: Final = {
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_TORCH_OPS: Final = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
    "mean": dist.ReduceOp.SUM,
}
# A sum of many True must not wrap round to 0, so it is their maximum.
_BOOL_OPS: Final = {"sum": "max", "product": "min"}
_CARRIERS: Final = {
    torch.bool: torch.uint8,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}

logger = logging.getLogger(__name__)


def checked_op(op: str, *dtypes: torch.dtype) -> str:
    """Return the operation in lower case.

    Raises:
        ValueError: it is unknown, or not defined for one of the dtypes.
    """
    name = str(op).lower()
    if name not in _TORCH_OPS:
        near = difflib.get_close_matches(name, _TORCH_OPS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"op must be one of {', '.join(_TORCH_OPS)}, got {op!r}{hint}")
    for dtype in dtypes:
        if dtype.is_complex and name not in ("sum", "product", "mean"):
            raise ValueError(f"op must be sum, product or mean for {dtype}, got {op!r}")
        if dtype.is_floating_point and name in BITWISE:
            raise ValueError(f"op must not be bitwise for {dtype}, got {op!r}")
    return name


def as_sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor, or a copy of it, as plain contiguous memory on the device."""
    return tensor.detach().to(device).resolve_conj().resolve_neg().contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as flat uint8, which every transport carries."""
    # Not view(-1), which keeps any stride that a single element may have.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def reduce_over(
    tensor: torch.Tensor, op: str, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the tensor reduced over the ranks, which may be the same memory, changed.

    Args:
        tensor: detached.
        op: as `checked_op` returned it.
    """
    device = comm_device(group, prefer=tensor.device)
    # NCCL has no bitwise operations, and no transport multiplies complex numbers.
    is_gathered = op in BITWISE and device.type != "cpu" or op == "product" and tensor.is_complex()
    if is_gathered:
        return _reduce_gathered(as_sent(tensor, device), op, group).to(tensor.device)
    if tensor.dtype == torch.bool:
        op = _BOOL_OPS.get(op, op)
    sent = as_sent(tensor.to(_carrier(tensor.dtype, op)), device)
    dist.all_reduce(sent, _TORCH_OPS[op], group)
    if op == "mean":
        sent = mean_of_sum(sent, live_world_size(group))
    return sent.to(tensor.device, tensor.dtype)


def mean_of_sum(total: torch.Tensor, world_size: int) -> torch.Tensor:
    """Return the sum divided by the number of ranks, in the same memory where possible.

    Integers are rounded to the nearest, halves to the even one; the first time that this loses
    something there is a warning.
    """
    if total.is_floating_point() or total.is_complex():
        return total.div_(world_size)
    quotient = total.div(world_size, rounding_mode="floor")
    rest = total - quotient * world_size
    if rest.any():
        _warn_of_rounding()
    is_half, is_odd = 2 * rest == world_size, quotient % 2 == 1
    return quotient + ((2 * rest > world_size) | (is_half & is_odd)).to(total.dtype)


@functools.cache
def _warn_of_rounding() -> None:
    logger.warning(
        "the mean of integers over the ranks keeps their dtype, and was rounded to the nearest "
        "integer; reduce floating-point tensors to have it exactly"
    )


def _carrier(dtype: torch.dtype, op: str) -> torch.dtype:
    """Return the dtype in which the operation travels."""
    if dtype.is_complex:
        return dtype
    if dtype.is_floating_point:
        # In halves the sum before the division could overflow; 8 bits nobody reduces.
        is_widened = dtype.itemsize == 1 or (op == "mean" and dtype.itemsize == 2)
        return torch.float32 if is_widened else dtype
    return torch.int64 if op == "mean" else _CARRIERS.get(dtype, dtype)


def _reduce_gathered(sent: torch.Tensor, op: str, group: dist.ProcessGroup | None) -> torch.Tensor:
    parts = [torch.empty_like(sent) for _ in range(live_world_size(group))]
    dist.all_gather([as_bytes(part) for part in parts], as_bytes(sent), group)
    return functools.reduce(BITWISE.get(op, torch.mul), parts)
