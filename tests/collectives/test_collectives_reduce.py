"""Tensors and dicts across ranks."""

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from calls import outcome
from ranks import on_ranks, run_ranks

from stepwrap.collectives import all_reduce_dict, reduce_mean


def _compute_mean(values: list[float], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.tensor(values, dtype=dtype) * (dist.get_rank() + 1)
    tensor.requires_grad_(dtype.is_floating_point)
    before = tensor.detach().clone()
    mean = reduce_mean(tensor)
    assert torch.equal(tensor, before)
    assert not mean.requires_grad
    return mean


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.bfloat16),
        (torch.int64, torch.float32),
        (torch.complex64, torch.complex64),
    ],
)
def test_reduce_mean(dtype: torch.dtype, expected: torch.dtype) -> None:
    for mean in run_ranks(_compute_mean, 2, [1, 2], dtype):
        assert torch.equal(mean, torch.tensor([1.5, 3.0], dtype=expected))


def _mean_of_transposed() -> torch.Tensor:
    return reduce_mean((torch.arange(6.0).reshape(2, 3) * dist.get_rank()).T)


def test_reduce_mean_of_a_tensor_that_is_not_contiguous() -> None:
    expected = torch.arange(6.0).reshape(2, 3).T / 2
    assert all(torch.equal(mean, expected) for mean in run_ranks(_mean_of_transposed, 2))


def test_one_process_changes_nothing() -> None:
    tensor, py_dict = torch.ones(2), {"a": torch.ones(2), "n": 1}
    assert reduce_mean(tensor) is tensor
    assert all_reduce_dict(py_dict, "mean") is py_dict


def _reduce_rank_dict(reduce_op: str, to_float: bool) -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    a = torch.ones(2) * (rank + 1)
    tracked = torch.tensor(2**24 + 1 + rank)
    half = torch.full((1, 2), 40000.0 + 64 * rank, dtype=torch.float16)
    entries: dict[str, Any] = {"a": a, "n": 4, "tracked": tracked, "half": half}
    entries |= {"x": 0.1 + rank, "flag": torch.tensor(rank == 0), "none": torch.empty(0, 3)}
    # The keys are inserted in different orders.
    keys = list(entries) if rank == 0 else list(reversed(entries))
    tensors = {key: entries[key] for key in keys}
    reduced = all_reduce_dict(tensors, reduce_op, to_float)
    assert list(reduced) == keys
    assert a.tolist() == [rank + 1] * 2
    assert tracked.item() == 2**24 + 1 + rank
    return dict(reduced)


def test_sums_are_exact_and_floating_point() -> None:
    for reduced in run_ranks(_reduce_rank_dict, 2, "sum", True):
        assert reduced["a"].tolist() == [3.0, 3.0]
        assert reduced["n"].item() == 8.0
        assert reduced["tracked"].item() == 2.0**25 + 3
        assert reduced["half"].tolist() == [[80064.0, 80064.0]]
        assert reduced["x"].item() == 0.1 + 1.1
        assert reduced["flag"].item() == 1.0
        assert reduced["none"].shape == (0, 3)
        assert all(value.is_floating_point() for value in reduced.values())


def test_dtypes_are_kept_without_to_float() -> None:
    for reduced in run_ranks(_reduce_rank_dict, 2, "max", False):
        dtypes = [reduced[key].dtype for key in ("a", "n", "tracked", "half", "flag")]
        assert dtypes == [torch.float32, torch.int64, torch.int64, torch.float16, torch.bool]
        assert reduced["a"].tolist() == [2.0, 2.0]
        assert reduced["tracked"].item() == 2**24 + 2
        assert reduced["flag"].item() is True


def test_the_mean_of_integers_is_a_float_in_any_case() -> None:
    for reduced in run_ranks(_reduce_rank_dict, 2, "mean", False):
        assert reduced["tracked"].item() == 2**24 + 1.5
        assert reduced["n"].dtype == torch.float64
        assert reduced["half"].dtype == torch.float16
        assert reduced["half"][0, 0].item() == torch.tensor(40032.0, dtype=torch.float16).item()
        assert reduced["a"].tolist() == [1.5, 1.5]


@on_ranks(2)
def test_numbers_of_numpy() -> None:
    flags = {"a": np.bool_(dist.get_rank() == 0), "b": np.bool_(True), "c": np.int16(300)}
    assert [float(value) for value in all_reduce_dict(flags).values()] == [1.0, 2.0, 600.0]


def test_the_smallest_of_all_ranks() -> None:
    for reduced in run_ranks(_reduce_rank_dict, 2, "min", True):
        assert reduced["a"].tolist() == [1.0, 1.0]
        assert reduced["flag"].item() == 0.0


def _reduce_ordered() -> tuple[str, list[tuple[str, int]]]:
    tensors = OrderedDict([("a", torch.tensor(1)), ("b", torch.tensor(10))])
    if dist.get_rank() == 1:
        tensors.move_to_end("a")
    reduced = all_reduce_dict(tensors, to_float=False)
    return type(reduced).__name__, [(key, int(value.item())) for key, value in reduced.items()]


def test_an_ordered_dict_of_another_order_is_not_mixed_up() -> None:
    kind, entries = run_ranks(_reduce_ordered, 2)[1]
    assert (kind, entries) == ("OrderedDict", [("b", 20), ("a", 2)])


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        (
            "missing",
            "ValueError",
            "keys missing on rank 1: b",
        ),
        ("shape", "ValueError", "'b' is torch.float32 of shape (2,) on cpu on rank 0 and torch."),
        ("dtype", "ValueError", "and torch.float64 of shape (2,) on cpu on rank 1"),
        ("value", "TypeError", ": py_dict['b'] must be a tensor or a number, got str"),
        ("huge", "ValueError", ": py_dict['b'] must fit a tensor, got 11805916207174"),
        ("op", "ValueError", "'op' is sum, to_float=True on rank 0 and mean, to_float=True on"),
    ],
)
@on_ranks(2)
def test_a_difference_raises_the_same_on_every_rank(kind: str, error: str, text: str) -> None:
    tensors: dict[str, Any] = {"a": torch.ones(2), "b": torch.ones(2)}
    op = "sum"
    if dist.get_rank() == 1:
        if kind == "missing":
            del tensors["b"]
        elif kind == "value":
            tensors["b"] = "text"
        elif kind == "huge":
            tensors["b"] = 2**70
        elif kind == "op":
            op = "mean"
        else:
            tensors["b"] = {"shape": torch.ones(3), "dtype": torch.ones(2).double()}[kind]
    (name, message), after = (
        outcome(all_reduce_dict, tensors, op),
        dict(all_reduce_dict({"n": 1}, to_float=False)),
    )
    assert name == error
    assert text in message
    assert int(after["n"]) == 2


@pytest.mark.parametrize(
    ("args", "error", "text"),
    [
        (({}, "avg"), ValueError, "reduce_op must be one of sum, mean, min, max, got 'avg'"),
        (([1],), TypeError, "py_dict must be a mapping, got list"),
        (({"a": "text"},), TypeError, "py_dict['a'] must be a tensor or a number, got str"),
        (({"a": 1j}, "max"), ValueError, "py_dict['a'] is complex, which has no max"),
    ],
)
def test_arguments_are_checked_in_one_process_too(
    args: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    assert outcome(all_reduce_dict, *args) == (error.__name__, text)


def test_reduce_mean_wants_a_tensor() -> None:
    with pytest.raises(TypeError, match=r"tensor must .*torch\.Tensor, got float"):
        reduce_mean(1.0)  # type: ignore[arg-type]
