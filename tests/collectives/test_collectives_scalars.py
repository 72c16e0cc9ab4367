"""The packed reduction of the logs."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from calls import outcome
from ranks import on_ranks, run_ranks

from stepwrap.collectives import mean_scalars


def _count_collectives(scalars: dict[str, Any]) -> tuple[dict[str, int], dict[str, float]]:
    """Count the transport's profiling events, one for each collective."""
    with torch.profiler.profile() as profiler:
        means = mean_scalars(scalars)
    counts: dict[str, int] = {}
    for event in profiler.events():
        if event.name.startswith(("gloo:", "nccl:")):
            counts[event.name] = counts.get(event.name, 0) + 1
    return counts, means


def _numbered(num_keys: int) -> tuple[dict[str, int], dict[str, float]]:
    rank = dist.get_rank()
    return _count_collectives({f"key_{i}": torch.tensor(i + rank) for i in range(num_keys)})


@pytest.mark.parametrize(("num_keys", "num_collectives"), [(0, 1), (10, 1), (124, 1), (125, 2)])
def test_equal_keys_take_one_collective(num_keys: int, num_collectives: int) -> None:
    for counts, means in run_ranks(_numbered, 2, num_keys):
        assert counts == {"gloo:all_gather": num_collectives}
        assert means == {f"key_{i}": i + 0.5 for i in range(num_keys)}


@on_ranks(2)
def test_kinds_and_orders_may_be_mixed() -> None:
    rank = dist.get_rank()
    scalars = {
        "float": 0.1 + rank,
        "int": 2 + rank,
        "bool": rank == 0,
        "half": torch.tensor(1.5 + rank, dtype=torch.bfloat16),
        "gradient": torch.tensor([1.0 + rank], requires_grad=True),
        "count": torch.tensor(2**40 + rank),
        "flag": np.bool_(rank == 1),
        "numpy": np.float32(1.5 + rank),
        "large": np.uint64(2**63),
    }
    keys = list(scalars) if rank == 0 else list(reversed(scalars))
    means = mean_scalars({key: scalars[key] for key in keys})
    assert list(means) == keys
    assert means["float"] == pytest.approx(0.6, abs=1e-15)
    assert means["bool"] == 0.5
    assert (means["int"], means["half"], means["gradient"]) == (2.5, 2.0, 1.5)
    assert means["count"] == 2**40 + 0.5
    assert (means["flag"], means["numpy"], means["large"]) == (0.5, 2.0, 2.0**63)


def _sum_in_order() -> list[str]:
    scalars = {f"{i}": 0.1 * (dist.get_rank() + 1) + 1e9 * i for i in range(200)}
    return [value.hex() for value in mean_scalars(scalars).values()]


def test_all_ranks_get_the_same_bits() -> None:
    rank_0, *other_ranks = run_ranks(_sum_in_order, 3)
    assert other_ranks == [rank_0, rank_0]


@on_ranks(3)
def test_a_value_that_is_not_finite_reaches_its_own_key_only() -> None:
    bad = [math.nan, math.inf, -math.inf][dist.get_rank()]
    means = mean_scalars({"a": 1.0, "inf": abs(bad), "m": bad, "one": bad if bad > 0 else 2.0})
    assert means["a"] == 1.0
    assert math.isnan(means["m"])
    assert math.isnan(means["inf"])
    assert means["one"] == math.inf


def _reduce_own_keys(keys: list[list[str]]) -> tuple[list[dict[str, float]], dict[str, float]]:
    rank = dist.get_rank()
    different = [mean_scalars(dict.fromkeys(keys[rank], rank + 1.0)) for _ in range(2)]
    return different, mean_scalars({"same": rank})


_MANY = [f"m{i}" for i in range(200)]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([["a", "b"], ["b", "c"]], {"a": 1.0, "b": 1.5, "c": 2.0}),
        ([["a"], []], {"a": 1.0}),
        ([[], ["a"]], {"a": 2.0}),
        ([["a", "b"], ["b", "A"]], {"a": 1.0, "b": 1.5, "A": 2.0}),
        ([["a"], ["b"], ["a"]], {"a": 2.0, "b": 2.0}),
        ([["a"], _MANY], {"a": 1.0} | dict.fromkeys(_MANY, 2.0)),
        ([_MANY[:64], _MANY], dict.fromkeys(_MANY[:64], 1.5) | dict.fromkeys(_MANY[64:], 2.0)),
        ([_MANY, _MANY[1:]], {"m0": 1.0} | dict.fromkeys(_MANY[1:], 1.5)),
    ],
)
def test_different_keys_give_the_union(keys: list[list[str]], expected: dict[str, float]) -> None:
    """Also if the numbers of keys differ widely; the ranks stay in step."""
    results = run_ranks(_reduce_own_keys, len(keys), keys)
    for union, after in results:
        assert union == [expected, expected]
        assert list(union[0]) == list(results[0][0][0])
        assert after == {"same": (len(keys) - 1) / 2}


def _reduce_bad_value(bad: dict[Any, Any]) -> tuple[str, str, dict[str, float]]:
    rank = dist.get_rank()
    return *outcome(mean_scalars, bad if rank == 1 else {"a": 1.0}), mean_scalars({"after": rank})


@pytest.mark.parametrize(
    ("bad", "name", "text"),
    [
        ({"a": "1"}, "TypeError", "scalars['a'] must be a number or a tensor, got str"),
        ({"a": None}, "TypeError", "scalars['a'] must be a number or a tensor, got NoneType"),
        ({1: 1.0}, "TypeError", "the keys of scalars must be strings, got 1"),
        ({"a": 10**400}, "ValueError", "scalars['a'] must fit a float"),
        (
            {"a": torch.ones(2)},
            "ValueError",
            "scalars['a'] must be one real number, got a torch.float32 tensor of shape (2,)",
        ),
    ],
)
def test_a_rank_with_no_scalar_raises_on_every_rank(
    bad: dict[Any, Any], name: str, text: str
) -> None:
    """One process makes the same check."""
    for kind, message, after in run_ranks(_reduce_bad_value, 2, bad):
        assert (kind, after) == (name, {"after": 0.5})
        assert message.startswith("mean_scalars() on rank 1 (tests")
        assert message.endswith(f"): {text}")
    assert outcome(mean_scalars, bad) == (name, text)


def test_one_process_gets_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    means = mean_scalars({"b": torch.tensor([2], dtype=torch.int32), "a": 1, "nan": math.inf})
    assert list(means.items()) == [("b", 2.0), ("a", 1.0), ("nan", math.inf)]
    assert all(type(value) is float for value in means.values())
