"""Dtypes that transports do not support: uint64, narrow numbers, complex halves."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, run_ranks

from stepwrap.collectives import all_gather, all_reduce, all_reduce_dict, gather, reduce_mean
from stepwrap.collectives import dist as in_place

FLOAT8 = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)
LARGE = [[2**63 + 5, 7, 2**64 - 1, 2], [2**63 + 8, 2**63, 2**64 - 1, 1]]


def _mean(low: int, second: int) -> int:
    half, remainder = divmod(low + second, 2)
    return half + (remainder and half % 2)


@on_ranks(2)
def test_unsigned_integers_of_64_bits() -> None:
    """Also above 2**63."""
    rank = dist.get_rank()
    pairs = list(zip(*LARGE, strict=True))
    expected = {
        "sum": [(a + b) % 2**64 for a, b in pairs],
        "product": [a * b % 2**64 for a, b in pairs],
        "min": [min(a, b) for a, b in pairs],
        "max": [max(a, b) for a, b in pairs],
        "band": [a & b for a, b in pairs],
        "bor": [a | b for a, b in pairs],
        "bxor": [a ^ b for a, b in pairs],
        "mean": [_mean(a, b) for a, b in pairs],
    }
    for op, values in expected.items():
        tensor = torch.tensor(LARGE[rank], dtype=torch.uint64)
        all_reduce(tensor, op)
        assert tensor.dtype == torch.uint64
        assert tensor.tolist() == values, op
        square = torch.tensor(LARGE[rank], dtype=torch.uint64).reshape(2, 2).T
        data = {"a": torch.tensor(LARGE[rank][0], dtype=torch.uint64), "b": square}
        in_place.all_reduce_dict(data, op)
        assert data["a"].item() == values[0], op
        assert data["b"].T.flatten().tolist() == values, op
    for op in ("sum", "min", "max", "mean"):
        tensor = torch.tensor(LARGE[rank], dtype=torch.uint64)
        for to_float in (True, False):
            reduced: Any = all_reduce_dict({"a": tensor}, op, to_float)["a"]
            is_float = to_float or op == "mean"
            assert reduced.dtype == (torch.float64 if is_float else torch.uint64)
            wide = [a + b for a, b in pairs] if op == "sum" else expected[op]
            if op == "mean":
                wide = [(a + b) / 2 for a, b in pairs]
            assert reduced.tolist() == ([float(v) for v in wide] if is_float else expected[op])
        assert tensor.tolist() == LARGE[rank]
    mean = reduce_mean(torch.tensor([2**63, 2 + 2 * rank], dtype=torch.uint64))
    assert mean.dtype == torch.float32
    assert mean.tolist() == [2.0**63, 3.0]


@on_ranks(3)
def test_the_mean_of_three_large_integers() -> None:
    tensor = torch.tensor([2**64 - 1 - dist.get_rank() * 2, 2**64 - 1, 5], dtype=torch.uint64)
    all_reduce(tensor, "mean")
    values: list[int] = tensor.tolist()
    assert values == [2**64 - 3, 2**64 - 1, 5]


@pytest.mark.parametrize("dtype", [*FLOAT8, torch.complex32])
@on_ranks(2)
def test_narrow_numbers(dtype: torch.dtype) -> None:
    rank = dist.get_rank()
    with warnings.catch_warnings():
        # torch warns once that complex halves are experimental.
        warnings.simplefilter("ignore")
        tensor = torch.tensor([[1, 2], [4, 3]])[rank].to(dtype)
        is_complex = dtype.is_complex
        expected = {"sum": [5, 5], "product": [4, 6], "mean": [2.5, 2.5]}
        if not is_complex:
            expected |= {"min": [1, 2], "max": [4, 3]}
        for op, values in expected.items():
            reduced = tensor.clone()
            all_reduce(reduced, op)
            data: dict[str, Any] = {"a": tensor}
            in_place.all_reduce_dict(data, op)
            results = [reduced, data["a"]]
            if op != "product":
                results.append(all_reduce_dict({"a": tensor}, op, to_float=False)["a"])
                wide: Any = all_reduce_dict({"a": tensor}, op)["a"]
                assert wide.dtype == (torch.complex64 if is_complex else torch.float32)
                assert wide.tolist() == values
            if op == "mean":
                results.append(reduce_mean(tensor))
            for result in results:
                assert result.dtype == dtype
                assert result.to(wide.dtype).tolist() == values, op
        for gathered in (all_gather(tensor), gather(tensor, 1)):
            assert [received.dtype for received in gathered] == [dtype] * len(gathered)
            assert [received.to(wide.dtype).tolist() for received in gathered] in (
                [],
                [[1, 2], [4, 3]],
            )


def _refuse(dtype: torch.dtype) -> list[str]:
    tensor = torch.zeros(2, dtype=torch.uint8).view(dtype)
    texts = []
    for call in (all_reduce, reduce_mean, all_reduce_dict, in_place.all_reduce_dict):
        try:
            call({"a": tensor} if "dict" in call.__name__ else tensor)
        except ValueError as error:
            texts.append(str(error))
    assert all_gather(tensor)[1].dtype == dtype
    return texts


def test_dtypes_without_arithmetic_are_refused() -> None:
    for texts in run_ranks(_refuse, 2, torch.float4_e2m1fn_x2):
        assert len(texts) == 4
        assert all("torch.float4_e2m1fn_x2 cannot be reduced" in text for text in texts)
