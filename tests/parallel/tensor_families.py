"""Strategies for tensors that share a few storages, and functions to compare them."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def numbers(tensor: Tensor) -> Tensor:
    """Return the tensor's numbers as bytes, so that NaN equals itself."""
    plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return torch.empty(len(plain), dtype=plain.dtype).copy_(plain).view(torch.uint8)


@st.composite
def bases(draw: Any) -> Tensor:
    """Draw a contiguous tensor of any dtype."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    count = int(torch.tensor(shape).prod()) if shape else 1
    ordinals = torch.arange(draw(st.integers(0, 40)), 300)[:count].remainder(97)
    return ordinals.repeat(count // 200 + 2)[:count].to(dtype).reshape(shape)


@st.composite
def views(draw: Any, tensor: Tensor) -> Tensor:
    """Draw a view of the tensor: slices with steps, transposes, expansions, lazy conjugates."""
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["slice", "transpose", "expand", "lazy", "imag"]))
        if kind == "slice" and tensor.dim():
            dim = draw(st.integers(0, tensor.dim() - 1))
            start = draw(st.integers(0, tensor.shape[dim]))
            stop = draw(st.integers(start, tensor.shape[dim]))
            index = [slice(None)] * dim + [slice(start, stop, draw(st.integers(1, 3)))]
            tensor = tensor[tuple(index)]
        elif kind == "transpose" and tensor.dim() > 1:
            tensor = tensor.transpose(0, draw(st.integers(1, tensor.dim() - 1)))
        elif kind == "expand" and tensor.numel():
            tensor = tensor[:1].expand(3, *tensor.shape[1:]) if tensor.dim() else tensor.expand(2)
        elif kind == "lazy" and tensor.is_complex():
            tensor = tensor.conj()
        elif kind == "imag" and tensor.dtype is torch.complex64:
            tensor = tensor.imag
    return tensor


@st.composite
def families(draw: Any) -> list[Tensor]:
    """Draw tensors that share one to three storages, in any order."""
    drawn = draw(st.lists(bases(), min_size=1, max_size=3))
    chosen = draw(st.lists(st.integers(0, len(drawn) - 1), min_size=1, max_size=5))
    return [draw(views(drawn[number])) for number in chosen]


def touch(tensor: Tensor, value: int) -> None:
    if tensor.numel():
        tensor[(0,) * tensor.dim()] = value
