"""Dicts of tensors across ranks, in place."""

import re
from typing import Any

import torch
import torch.distributed as dist
from calls import assert_outcomes, outcome
from ranks import on_ranks

from stepwrap.collectives.dist import all_reduce_dict


class Key:
    """A key that cannot be sorted and has the same `repr` on all ranks."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return "Key"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.number == other.number

    def __hash__(self) -> int:
        return hash(self.number)


def _rank_dict() -> dict[Any, Any]:
    rank = dist.get_rank()
    entries: dict[Any, Any] = {
        "int": torch.tensor(3),
        "byte": torch.tensor([1 + rank], dtype=torch.uint8),
        "flag": torch.tensor([rank == 0, True, False]),
        "half": torch.full((2, 1), 1.5 + rank, dtype=torch.float16),
        "a": torch.ones(2) * (rank + 1),
        "b": (torch.arange(6.0).reshape(2, 3) * (rank + 1)).T,
        "tracked": torch.full((), rank + 1.0, requires_grad=True),
        "complex": torch.tensor(complex(1, rank)),
        "short": torch.tensor([300 * rank], dtype=torch.int16),
        "none": torch.empty(0, 2),
        "float": 0.1 + rank,
        "number": 4 + rank,
    }
    keys = list(entries) if rank == 0 else list(reversed(entries))
    return {key: entries[key] for key in keys}


@on_ranks(2)
def test_a_dict_keeps_every_dtype() -> None:
    data = _rank_dict()
    before = dict(data)
    assert all_reduce_dict(data) is None  # type: ignore[func-returns-value]
    assert list(data) == list(before)
    assert data["int"].dtype == torch.int64
    assert data["int"].item() == 6
    assert data["byte"].dtype == torch.uint8
    assert data["byte"].tolist() == [3]
    assert data["flag"].tolist() == [True, True, False]
    assert data["half"].dtype == torch.float16
    assert data["half"].tolist() == [[4.0], [4.0]]
    assert torch.equal(data["b"], torch.arange(6.0).reshape(2, 3).T * 3)
    assert data["complex"].item() == 2 + 1j
    assert data["short"].dtype == torch.int16
    assert data["none"].shape == (0, 2)
    assert data["float"].item() == 0.1 + 1.1
    assert data["number"].item() == 9
    # The dict gets new tensors; the old ones are unchanged.
    assert before["a"].tolist() == [dist.get_rank() + 1] * 2
    assert before["complex"].imag == dist.get_rank()
    assert before["tracked"].item() == dist.get_rank() + 1
    assert not data["tracked"].requires_grad
    means = {key: _rank_dict()[key] for key in ("int", "byte", "half", "complex", "float")}
    all_reduce_dict(means, "mean")
    assert [means[key].dtype for key in ("int", "byte")] == [torch.int64, torch.uint8]
    assert [means[key].item() for key in ("int", "byte")] == [3, 2]
    assert means["half"].tolist() == [[2.0], [2.0]]
    assert means["complex"].item() == 1 + 0.5j
    bits = {"x": torch.tensor([1 + dist.get_rank()]), "flag": torch.tensor(dist.get_rank() == 0)}
    for op, expected in {"bor": [3, True], "band": [0, False], "bxor": [3, True]}.items():
        reduced = dict(bits)
        all_reduce_dict(reduced, op)
        assert [value.item() for value in reduced.values()] == expected
    empty: dict[str, torch.Tensor] = {}
    all_reduce_dict(empty, "max")
    assert not empty


@on_ranks(2)
def test_keys_need_no_order_and_no_clear_text() -> None:
    rank = dist.get_rank()
    keys: list[Any] = ["a", 1, (2, "b"), None, Key(1), Key(2), torch.float32]
    tensors = {key: torch.tensor(float(i)) for i, key in enumerate(keys)}
    if rank == 1:
        tensors = dict(reversed(tensors.items()))
    all_reduce_dict(tensors)
    assert [tensors[key].item() for key in keys] == [0, 2, 4, 6, 8, 10, 12]
    other = {Key(rank): torch.ones(1)}
    name, text = outcome(all_reduce_dict, other)
    assert name == "ValueError"
    assert re.search("missing .*rank 1: Key.*missing .*rank 0: Key", text)


@on_ranks(2)
def test_differing_dicts_are_an_error_on_every_rank() -> None:
    rank = dist.get_rank()
    tensor = torch.ones(1)
    pairs: list[tuple[Any, Any]] = [
        ({"a": tensor}, {"b": tensor}),
        ({"a": tensor, "b": tensor}, {"a": tensor}),
        ({"a": tensor}, {"a": torch.ones(2)}),
        ({"a": tensor}, {"a": tensor.double()}),
        ({"a": tensor}, {"a": "text"}),
        ({"a": tensor}, [tensor]),
        ({"a": tensor}, {"a": 10**400}),
    ]
    outcomes = [outcome(all_reduce_dict, pair[rank]) for pair in pairs]
    outcomes.append(outcome(all_reduce_dict, {"a": tensor}, "sum" if rank == 0 else "max"))
    outcomes.append(outcome(all_reduce_dict, {"a": tensor if rank == 0 else tensor * 1j}, "max"))
    many_tensors = {str(i): tensor for i in range(20)}
    outcomes.append(outcome(all_reduce_dict, many_tensors if rank == 0 else {}))
    after = {"n": torch.tensor(1)}
    all_reduce_dict(after)
    assert after["n"].item() == 2
    spec = "torch.float32 of shape (1,) on cpu"
    expected = [
        ("ValueError", "keys missing on rank 1: a; keys missing on rank 0: b"),
        ("ValueError", "keys missing on rank 1: b"),
        ("ValueError", f"'a' is {spec} on rank 0 and torch.float32 of shape (2,) on cpu on rank 1"),
        ("ValueError", f"'a' is {spec} on rank 0 and torch.float64 of shape (1,) on cpu on rank 1"),
        ("TypeError", "data['a'] must be a tensor or a number, got str"),
        ("AssertionError", "data must be a dict, got list"),
        ("ValueError", "data['a'] must fit a tensor"),
        ("ValueError", "'op' is 'sum' on rank 0 and 'max' on rank 1"),
        ("ValueError", "data['a']: op must be sum, product or mean for torch.complex64"),
        ("ValueError", ", and 15 more"),
    ]
    assert_outcomes(outcomes, expected)
