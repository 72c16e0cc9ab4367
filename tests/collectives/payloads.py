"""Random nested objects for the object collectives, and their comparison."""

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
SHAPES = ((), (0,), (1,), (7,), (3, 0, 2), (2, 3), (4, 1, 5), (2, 3, 4, 5), (60, 100))
NUMPY_DTYPES = ("f2", "f4", "f8", "c8", "?", "i1", "i8", "u4", "S3", "U2", "M8[s]")


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Return a tensor of any dtype and memory layout, with or without gradients."""
    shape = draw(st.sampled_from(SHAPES))
    seed = draw(st.integers(0, 2**16))
    values = torch.randint(-3, 100, shape, generator=torch.Generator().manual_seed(seed))
    tensor = values.to(draw(st.sampled_from(DTYPES)))
    layout = draw(st.sampled_from(("plain", "transposed", "strided", "expanded", "view")))
    if layout == "transposed" and tensor.dim() > 1:
        tensor = tensor.transpose(0, -1)
    elif layout == "strided" and tensor.dim():
        tensor = tensor[::2]
    elif layout == "expanded":
        tensor = tensor.unsqueeze(0).expand(3, *shape)
    elif layout == "view" and tensor.numel() > 2:
        tensor = tensor.reshape(-1)[1:]
    if tensor.is_complex() and draw(st.booleans()):
        tensor = tensor.conj()
    differentiable = tensor.is_floating_point() and tensor.itemsize > 1 or tensor.is_complex()
    return tensor.detach().requires_grad_(differentiable and draw(st.booleans()))


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Return an array of any dtype and memory order."""
    shape = draw(st.sampled_from(SHAPES))
    array = np.arange(int(np.prod(shape))).reshape(shape) % 90
    array = array.astype(draw(st.sampled_from(NUMPY_DTYPES)))
    return draw(st.sampled_from((array, np.asfortranarray(array), array[::-1] if shape else array)))


def objects() -> st.SearchStrategy[Any]:
    """Return a strategy for nested containers of tensors, arrays and plain values."""
    leaves = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.complex_numbers(allow_nan=False),
        st.text(max_size=8),
        st.binary(max_size=2000),
        st.sampled_from((torch.float32, torch.device("cpu"), np.float64(0.5), torch.Size([2, 3]))),
        tensors(),
        arrays(),
        tensors().map(lambda t: torch.nn.Parameter(t.detach(), requires_grad=t.requires_grad)),
        st.just(torch.eye(3).to_sparse()),
        # Too large for the first message, and large enough for shared memory.
        st.sampled_from((5_000, 300_000)).map(lambda n: torch.arange(n, dtype=torch.float64)),
        st.just(np.arange(40_000.0)),
    )
    keys = st.one_of(st.text(max_size=4), st.integers(), st.tuples(st.integers(), st.booleans()))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.tuples(inner, inner),
            st.dictionaries(keys, inner, max_size=4),
        ),
        max_leaves=8,
    )


def same(got: Any, sent: Any) -> bool:
    """Return whether two objects are equal in type, structure, values and tensor properties."""
    if type(got) is not type(sent):
        return False
    if isinstance(got, torch.Tensor):
        return _same_tensors(got, sent)
    if isinstance(got, np.ndarray):
        return got.dtype == sent.dtype and np.array_equal(got, sent)
    if isinstance(got, dict):
        return list(got) == list(sent) and all(same(got[key], sent[key]) for key in got)
    if isinstance(got, list | tuple) and type(got) is not torch.Size:
        return len(got) == len(sent) and all(map(same, got, sent))
    return bool(got == sent)


def _same_tensors(got: torch.Tensor, sent: torch.Tensor) -> bool:
    if (got.dtype, got.shape, got.layout) != (sent.dtype, sent.shape, sent.layout):
        return False
    if got.requires_grad != sent.requires_grad or got.device != sent.device:
        return False
    if got.layout is not torch.strided:
        return torch.equal(got.to_dense(), sent.to_dense())
    if _is_dense(sent) and got.is_contiguous() != sent.is_contiguous():
        return False
    if got.numel() == 0:
        return True
    return torch.equal(_bytes(got), _bytes(sent))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def _is_dense(tensor: torch.Tensor) -> bool:
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()
