"""Send tensors as bytes, and reduce every dtype with the operations that gloo and NCCL support."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.distributed as dist

from ...primitives.suggestions import did_you_mean
from ...primitives.tensor_bits import tensor_bytes, widest_float
from ..errors import Group
from ..process.ranks import comm_device, live_world_size, members

_BITWISE: Final = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
_COMBINE: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    **_BITWISE,
    "mean": torch.add,
}
# The sum of booleans is their maximum, because a sum of many True could wrap around to 0.
_BOOL_OPS: Final = {"sum": "max", "product": "min"}
_CARRIERS: Final = {
    torch.bool: torch.uint8,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
# torch has no arithmetic for other dtypes: quantized ones, raw bits, and fewer than 8 bits.
_REDUCED: Final = {
    *_CARRIERS,
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
}
# The upper and lower 32 bits of these are summed separately if a sum must not wrap around.
_SUMMED_IN_HALVES: Final = {torch.int64, torch.uint64}
# Flipping the highest bit maps the order of uint64 to the order of int64.
_HIGHEST_BIT: Final = -(2**63)
_LOW_BITS: Final = 2**32 - 1
_LARGE_BYTES: Final = 2**18

logger = logging.getLogger(__name__)


def checked_op(op: str, *dtypes: torch.dtype) -> str:
    """Return the operation in lower case; raise ValueError if a dtype does not support it."""
    name = str(op).lower()
    if name not in _COMBINE:
        hint = did_you_mean(name, _COMBINE, limit=1, quoted=True)
        raise ValueError(f"op must be one of {', '.join(_COMBINE)}, got {op!r}{hint}")
    for dtype in dtypes:
        check_reduced(dtype)
        if dtype.is_complex and name not in ("sum", "product", "mean"):
            raise ValueError(f"op must be sum, product or mean for {dtype}, got {op!r}")
        if dtype.is_floating_point and name in _BITWISE:
            raise ValueError(f"op must not be bitwise for {dtype}, got {op!r}")
    return name


def check_reduced(dtype: torch.dtype) -> None:
    if dtype not in _REDUCED:
        raise ValueError(f"{dtype} cannot be reduced: torch has no arithmetic for it")


def as_sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor, or a copy of it, detached, contiguous and on the device."""
    return tensor.detach().to(device).resolve_conj().resolve_neg().contiguous()


class Memory:
    """A tensor as bytes on a device: its own memory if possible, otherwise other memory.

    With ``is_read`` the bytes hold the tensor's values. Without it they are to be filled, and
    ``store`` must be called afterwards.
    """

    def __init__(self, tensor: torch.Tensor, device: torch.device, *, is_read: bool) -> None:
        self._tensor = self._carrier = tensor.detach()
        is_plain = not (tensor.is_conj() or tensor.is_neg()) and tensor.is_contiguous()
        if tensor.device != device or not is_plain:
            self._carrier = (
                as_sent(tensor, device)
                if is_read
                else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            )
        self.bytes = tensor_bytes(self._carrier)

    def store(self) -> None:
        """Copy the received values into the tensor, unless they were received in its memory."""
        if self._carrier is not self._tensor:
            self._tensor.copy_(self._carrier)


def travel_device(group: dist.ProcessGroup, tensor: torch.Tensor) -> torch.device:
    """Return the device on which the tensor's bytes are sent in the group."""
    device = comm_device(group, prefer=tensor.device)
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    # gloo's point-to-point messages read device memory as if it were host memory.
    is_gloo = backends[device.type] == "gloo" and "cpu" in backends
    return torch.device("cpu") if is_gloo else device


def start_all_gather(
    received: Sequence[torch.Tensor], sent: torch.Tensor, group: Group
) -> list[dist.Work]:
    """Start to fill ``received``, by group rank, with every rank's bytes; lengths may differ."""
    ranks = members(group)
    are_equal = len({buffer.numel() for buffer in received}) == 1
    if are_equal and (sent.device.type != "cpu" or sent.numel() < _LARGE_BYTES):
        return [dist.all_gather(list(received), sent, group, async_op=True)]
    # Broadcasts are three times as fast for 64 MB: gloo's all_gather copies through a buffer.
    target = received[ranks.index(dist.get_rank())]
    if target.data_ptr() != sent.data_ptr():
        target.copy_(sent)
    return [
        dist.broadcast(buffer, rank, group, async_op=True)
        for rank, buffer in zip(ranks, received, strict=True)
        if buffer.numel()
    ]


class Reduction:
    """Reduce one tensor over the ranks: call ``start``, wait, then read the result once.

    Args:
        tensor: this rank's detached tensor.
        op: an operation that ``checked_op`` returned.
        is_wide: whether sums must neither overflow nor be rounded to the tensor's dtype.
        further: more tensors of this rank, which are first reduced into ``tensor``, in order.
        dst: the global rank that gets the result, None for all.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        op: str,
        group: Group = None,
        *,
        is_wide: bool = False,
        further: Sequence[torch.Tensor] = (),
        dst: int | None = None,
    ) -> None:
        self._tensor, self._op, self._group, self._dst = tensor, op, group, dst
        # A mean first needs the sum, which could overflow a half type.
        is_wide = is_wide or op == "mean"
        device = comm_device(group, prefer=tensor.device)
        # NCCL has no bitwise operations, and no backend multiplies complex numbers.
        has_no_transport = op in _BITWISE and device.type != "cpu"
        self._is_gathered = has_no_transport or (op == "product" and tensor.is_complex())
        is_flag = tensor.dtype == torch.bool and not is_wide
        self._sent_op = _BOOL_OPS.get(op, op) if is_flag else op
        operands = (tensor, *further)
        self._parts = [
            as_sent(_encode(operand, op, is_wide=is_wide), device) for operand in operands
        ]

    def start(self) -> dist.Work:
        """Start to communicate; every rank must call this."""
        total = self._fold()
        if self._is_gathered:
            self._parts = [torch.empty_like(total) for _ in members(self._group)]
            memory = [tensor_bytes(buffer) for buffer in self._parts]
            work: dist.Work = dist.all_gather(
                memory, tensor_bytes(total), self._group, async_op=True
            )
            return work
        is_elsewhere = self._dst is not None and self._dst != dist.get_rank()
        if is_elsewhere and total.data_ptr() == self._tensor.data_ptr():
            # Clone, because gloo writes partial sums into the memory of ranks other than `dst`.
            total = total.clone()
        self._parts = [total]
        sent = torch.view_as_real(total) if total.is_complex() else total
        op = getattr(dist.ReduceOp, "SUM" if self._op == "mean" else self._sent_op.upper())
        if self._dst is None:
            work = dist.all_reduce(sent, op, self._group, async_op=True)
        else:
            work = dist.reduce(sent, self._dst, op, self._group, async_op=True)
        return work

    def result(self, count: int | None = None) -> torch.Tensor:
        """Return the result in the tensor's dtype; it may be the tensor itself, overwritten."""
        dtype, total = self._tensor.dtype, self._fold()
        count = live_world_size(self._group) if count is None else count
        if self._op == "mean" and dtype in _SUMMED_IN_HALVES:
            high, high_rest = _divide(total[0], count)
            low, remainder = _divide((high_rest << 32) + total[1], count)
            total = _round((high << 32) + low, remainder, count).view(dtype)
        elif dtype == torch.uint64:
            total = _decode(total, self._op)
        elif self._op == "mean":
            is_exact = total.is_floating_point() or total.is_complex()
            total = total.div_(count) if is_exact else _round(*_divide(total, count), count)
        return total.to(self._tensor.device, dtype)

    def wide_result(self, to_float: bool) -> torch.Tensor:
        """Return the result, float64 for a mean of integers; ``to_float``: see all_reduce_dict."""
        dtype, total = self._tensor.dtype, self._fold()
        is_integer = not (dtype.is_floating_point or dtype.is_complex)
        is_float = is_integer and (to_float or self._op == "mean")
        if dtype in _SUMMED_IN_HALVES and self._op in ("sum", "mean"):
            high, low = total.to(torch.float64) if is_float else total
            total = high * 2.0**32 + low if is_float else ((high << 32) + low).view(dtype)
        elif dtype == torch.uint64:
            total = _decode(total, self._op)
        if is_float:
            total = total.to(torch.float64)
        if self._op == "mean":
            total = total / live_world_size(self._group)
        device = self._tensor.device
        if not to_float and not is_float:
            return total.to(device, dtype)
        return total.to(device, widest_float(device) if is_float else total.dtype)

    def _fold(self) -> torch.Tensor:
        return functools.reduce(_COMBINE[self._sent_op], self._parts)


def carrier(dtype: torch.dtype, *, is_wide: bool) -> torch.dtype:
    """Return a dtype that every backend can reduce; if wide, sums of small dtypes fit into it."""
    if dtype.is_complex:
        return torch.promote_types(dtype, torch.complex64)
    if dtype.is_floating_point:
        return dtype if dtype.itemsize >= (4 if is_wide else 2) else torch.float32
    return torch.int64 if is_wide else _CARRIERS.get(dtype, dtype)


def _encode(tensor: torch.Tensor, op: str, *, is_wide: bool) -> torch.Tensor:
    """Convert the tensor to its carrier dtype; uint64, which gloo rejects, to bits of int64."""
    if is_wide and op in ("sum", "mean") and tensor.dtype in _SUMMED_IN_HALVES:
        bits = tensor.view(torch.int64)
        high = bits >> 32
        return torch.stack([high if tensor.dtype.is_signed else high & _LOW_BITS, bits & _LOW_BITS])
    if tensor.dtype != torch.uint64:
        return tensor.to(carrier(tensor.dtype, is_wide=is_wide))
    bits = tensor.view(torch.int64)
    return bits ^ _HIGHEST_BIT if op in ("min", "max") else bits


def _decode(total: torch.Tensor, op: str) -> torch.Tensor:
    """Convert a carrier back to uint64; like torch's, sums are modulo 2**64."""
    return (total ^ _HIGHEST_BIT if op in ("min", "max") else total).view(torch.uint64)


def _divide(total: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    quotient = total.div(count, rounding_mode="floor")
    return quotient, total - quotient * count


def _round(quotient: torch.Tensor, remainder: torch.Tensor, count: int) -> torch.Tensor:
    """Round to the nearest integers, halves to even; warn once if a value changes."""
    if remainder.any():
        _warn_of_rounding()
    is_half, is_odd = 2 * remainder == count, quotient % 2 == 1
    return quotient + ((2 * remainder > count) | (is_half & is_odd)).to(quotient.dtype)


@functools.cache
def _warn_of_rounding() -> None:
    logger.warning(
        "the mean of integers over the ranks keeps their dtype and was rounded to the nearest "
        "integer; reduce floating-point tensors to get the exact mean"
    )
