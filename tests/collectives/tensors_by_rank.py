"""The dtypes and operations of the tensor collectives, and tensors that differ by rank."""

from collections.abc import Callable

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

COMPLEX = (torch.complex64, torch.complex128)

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

DTYPES = (*FLOATS, *COMPLEX, torch.bool, *INTEGERS)

BITWISE: dict[str, Callable[..., torch.Tensor]] = {
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}

OPS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    **BITWISE,
}


def get_values(rank: int, dtype: torch.dtype, repeats: int = 1) -> torch.Tensor:
    """Return two rows, not contiguous, of small numbers that differ by rank."""
    numbers = torch.tensor([[0, 1], [2, 3], [4, 5]]).repeat(repeats, 1) + rank
    if dtype == torch.bool:
        return (numbers % 2 == 0).T
    return (numbers * (1 - 2j) if dtype.is_complex else numbers).to(dtype).T
