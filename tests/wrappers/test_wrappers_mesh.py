"""Meshes of ranks along named axes."""

import time
from typing import Any, ClassVar

import pytest
import torch
from on_ranks import on_ranks
from ranks import run_ranks
from torch import distributed

from stepwrap.wrappers import build_mesh
from stepwrap.wrappers.sharding.mesh import agree, check_axes


@pytest.mark.parametrize(
    ("axes", "ranks", "expected"),
    [
        ({"data": 4}, 4, {"data": 4}),
        ({"tensor": 2, "data": 2}, 4, {"data": 2, "tensor": 2}),
        ({"tensor": 2}, 2, {"data": 1, "tensor": 2}),
        ({"data": -1, "tensor": 2}, 8, {"data": 4, "tensor": 2}),
        ({"shard": -1}, 3, {"shard": 3}),
        ({"tensor": 2, "shard": 2, "replicate": -1}, 8, {"replicate": 2, "shard": 2, "tensor": 2}),
    ],
)
def test_axes(axes: dict[str, int], ranks: int, expected: dict[str, int]) -> None:
    sizes = check_axes(axes, ranks)
    assert sizes == expected
    assert list(sizes) == list(expected)


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({"data": 2, "tensor": 2}, "data 2 x tensor 2 = 4 ranks, but there are 6"),
        ({"data": -1, "tensor": 4}, "6 ranks cannot be divided into data -1 x tensor 4"),
        ({"dta": 6}, "no axis 'dta'.*did you mean data"),
        ({"data": 2, "shard": 3}, "either a data axis, or shard"),
        ({"replicate": 6}, "replicate needs shard"),
        ({"data": -1, "tensor": -1}, "only one axis can be -1"),
        ({"data": 0}, "axis data must be at least 1, or -1, got 0"),
        ({"data": True}, "axis data must be at least 1, or -1, got True"),
        ({"data": "6"}, "axis data must be at least 1, or -1, got '6'"),
    ],
)
def test_wrong_axes(axes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_axes(axes, 6)


def test_one_process_without_a_group() -> None:
    mesh = build_mesh({"data": 1, "tensor": -1})
    assert (mesh.data_rank, mesh.data_size, mesh.tensor_size) == (0, 1, 1)
    assert mesh.device_mesh is mesh.tensor is mesh.fsdp is mesh.data_group is None
    with pytest.raises(ValueError, match="data 2 = 2 ranks, but there are 1"):
        build_mesh({"data": 2})


PLACES = [(0, 2, 0, 2), (0, 2, 1, 4), (1, 2, 0, 2), (1, 2, 1, 4)]


@pytest.mark.parametrize(
    ("axes", "ranks", "expected_places", "names"),
    [
        ({"data": 2, "tensor": 2}, 4, PLACES, "data"),
        ({"replicate": 2, "shard": 1, "tensor": 2}, 4, PLACES, "replicate shard"),
        ({"data": 2, "tensor": 1}, 2, [(0, 2, 0, 1), (1, 2, 0, 1)], "data"),
    ],
)
@on_ranks("ranks")
def test_places_of_ranks(
    axes: dict[str, int], ranks: int, expected_places: list[tuple[int, ...]], names: str
) -> None:
    """Checks rank and size on the data axis, rank on the tensor axis, and the data group's sum."""
    mesh = build_mesh(axes)
    total = torch.tensor(float(distributed.get_rank()))
    distributed.all_reduce(total, group=mesh.data_group)
    assert mesh.tensor is not None
    assert mesh.fsdp is not None
    facts = (mesh.data_rank, mesh.data_size, mesh.tensor.get_local_rank(), total.item())
    assert facts == expected_places[distributed.get_rank()]
    assert mesh.fsdp.mesh_dim_names == tuple(names.split())


def _leave_alone(axis: str) -> float:
    """Let the other ranks leave; return after how many seconds rank 0's collective failed."""
    mesh = build_mesh({"replicate": 2, "shard": 1, "tensor": 2})
    group = mesh.data_group if axis == "data" else mesh.device_mesh.get_group(axis)
    if distributed.get_rank():
        return 0.0
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        distributed.all_reduce(torch.ones(1), group=group)
    return time.monotonic() - start


@pytest.mark.parametrize("axis", ["replicate", "tensor", "data"])
def test_groups_of_a_mesh_have_the_timeout_of_the_run(axis: str) -> None:
    assert 1.0 < run_ranks(_leave_alone, 4, axis, group_timeout_s=3)[0] < 60.0


@on_ranks(2)
def test_ranks_that_disagree() -> None:
    for other_axes, text in (
        ({"tensor": 2}, "'mesh' is data 2 on rank 0 and data 1 x tensor 2 on rank 1"),
        ({"data": 3}, "on rank 1: data 3 = 3 ranks, but there are 2"),
    ):
        with pytest.raises(ValueError, match=text):
            build_mesh({"data": 2} if distributed.get_rank() == 0 else other_axes)


class Described:
    """A value that counts how often it is unpickled from another rank."""

    received: ClassVar[list[int]] = []

    def __init__(self, value: int) -> None:
        self.value = value

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__dict__ |= state
        self.received.append(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Described) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return str(self.value)


@on_ranks(2)
def test_descriptions_are_exchanged_only_if_they_differ() -> None:
    agree(lambda: {"size": Described(1), "names": [f"layer{index}" for index in range(100)]})
    assert not Described.received
    with pytest.raises(ValueError, match="the same.*'size' is 0 .*rank 0 .*1 .*rank 1"):
        agree(lambda: {"size": Described(distributed.get_rank())})
    assert len(Described.received) == 2
    Described.received.clear()
