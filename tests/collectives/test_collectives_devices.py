"""Nested tensors and their devices, under mmengine's names."""

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from calls import group_of_one
from ranks import run_ranks

from stepwrap.collectives.dist import cast_data_device, get_comm_device, get_data_device

CPU, META = torch.device("cpu"), torch.device("meta")


class Pair(NamedTuple):
    value: Any
    second: Any


def _nested(device: torch.device = CPU) -> dict[str, Any]:
    tensor = torch.ones(2, device=device)
    named = defaultdict(list, {"x": [tensor + 1]})
    return {
        "tensor": tensor,
        "list": [tensor, (tensor, {"deep": tensor})],
        "pair": Pair(tensor, [tensor]),
        "ordered": OrderedDict(b=tensor, a=tensor),
        "default": named,
        "set": {torch.zeros(1, device=device)},
    }


def test_the_device_of_nested_tensors() -> None:
    assert get_data_device(torch.ones(1)) == CPU
    assert get_data_device(_nested()) == CPU
    assert get_data_device(_nested(META)) == META


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (
            [torch.ones(1), torch.ones(1, device=META)],
            ValueError,
            "^device type in data should be consistent, but got cpu, meta",
        ),
        ({"a": [torch.ones(1)], "b": torch.ones(1, device=META)}, ValueError, "consistent"),
        ([], ValueError, "data should not be empty"),
        ({"a": ()}, ValueError, "data should not be empty"),
        ("text", TypeError, "^data should be a Tensor, sequence of tensor or dict, but got str"),
        ([torch.ones(1), 1.0], TypeError, "data should be a Tensor, .* but got float"),
        ((x for x in [torch.ones(1)]), TypeError, "data should be a Tensor, .* but got generator"),
    ],
)
def test_data_without_one_device(data: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        get_data_device(data)


def test_containers_keep_their_classes_when_moved() -> None:
    data = _nested()
    moved = cast_data_device(data, "meta")
    assert get_data_device(moved) == META
    assert get_data_device(data) == CPU
    assert list(moved) == list(data)
    assert [type(value) for value in moved.values()] == [type(value) for value in data.values()]
    assert moved["default"]["new"] == []
    assert list(moved["ordered"]) == ["b", "a"]
    assert isinstance(moved["list"][1], tuple)
    assert moved["pair"].second[0].shape == (2,)


def test_tensors_already_on_the_device_are_not_copied() -> None:
    tensor = torch.ones(2)
    assert cast_data_device(tensor, CPU) is tensor
    assert cast_data_device([tensor], CPU)[0] is tensor


def test_out_is_filled_in_place() -> None:
    data = {"a": torch.ones(2), "b": [torch.ones(3), (torch.full((), 2.0),)]}
    # The keys are in another order.
    out = {"b": [torch.zeros(3), (torch.zeros(()),)], "a": torch.zeros(2)}
    targets = out["a"], out["b"][0], out["b"][1][0]
    assert cast_data_device(data, CPU, out)["a"] is data["a"]
    assert [target.tolist() for target in targets] == [[1.0, 1.0], [1.0, 1.0, 1.0], 2.0]
    assert out["a"] is targets[0]
    single = torch.zeros(2)
    cast_data_device(torch.ones(2), CPU, single)
    assert single.tolist() == [1.0, 1.0]
    pair = Pair(torch.zeros(1), torch.zeros(1))
    cast_data_device(Pair(torch.ones(1), torch.ones(1)), CPU, pair)
    assert pair.second.item() == 1.0


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("data", "make_out", "error", "text"),
    [
        ([ONE, ONE], lambda t: [t], ValueError, "out should have the length of data, but got 1"),
        ([ONE], lambda t: [t, t], ValueError, "out should have the length of data, but got 2"),
        ([ONE, [ONE]], lambda t: [t, []], ValueError, "out should have the length of data"),
        ({"a": ONE}, lambda t: {"b": t}, ValueError, r"lacks \['a'\] and has \['b'\] as well"),
        ({"a": ONE}, lambda t: {"a": t, "b": t}, ValueError, r"has \['b'\] as well"),
        (
            ONE,
            lambda t: torch.zeros(2),
            ValueError,
            r"the shape of data, but got \(2,\) for \(1,\)",
        ),
        (ONE, lambda t: [t], TypeError, "out should be the same type with data, .*list for Tensor"),
        ([ONE], lambda t: (t,), TypeError, "same type with data, but got tuple for list"),
        ([ONE, (ONE,)], lambda t: [t, [t]], TypeError, "same type with data"),
        ({ONE}, lambda t: {t}, TypeError, "out should not be a set"),
        ([ONE, {ONE}], lambda t: [t, {t}], TypeError, "out should not be a set"),
        ([], lambda t: [], ValueError, "data should not be empty"),
        (
            "text",
            lambda t: "text",
            TypeError,
            "^data should be a Tensor, list of tensor or dict, but",
        ),
    ],
)
def test_an_out_that_does_not_fit(
    data: Any, make_out: Any, error: type[Exception], text: str
) -> None:
    target = torch.zeros(1)
    with pytest.raises(error, match=text):
        cast_data_device(data, CPU, make_out(target))
    assert target.item() == 0.0


@pytest.mark.parametrize("data", [[], {}, "text", 1.0, [ONE, []], iter([ONE])])
def test_data_that_cannot_move(data: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="data should"):
        cast_data_device(data, CPU)


def _comm_device() -> str:
    group = dist.new_group(backend="cpu:gloo")
    return f"{get_comm_device()} {get_comm_device(group)}"


def test_the_device_to_travel_on() -> None:
    assert get_comm_device() == CPU
    assert run_ranks(_comm_device, 2) == ["cpu cpu"] * 2


@pytest.mark.gpu
def test_nests_move_to_a_gpu_and_back() -> None:
    data = _nested()
    on_gpu = cast_data_device(data, "cuda")
    assert get_data_device(on_gpu).type == "cuda"
    out = [torch.zeros(2, device="cuda")]
    cast_data_device([torch.ones(2)], CPU, out)
    assert out[0].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="should be consistent"):
        get_data_device([data, on_gpu])


def _get_comm_device(backend: str) -> str:
    with group_of_one(backend):
        return get_comm_device().type


@pytest.mark.gpu
def test_nccl_alone_travels_on_the_gpu() -> None:
    assert run_ranks(_get_comm_device, 1, "nccl", init=False) == ["cuda"]
    assert run_ranks(_get_comm_device, 1, "cpu:gloo,cuda:nccl", init=False) == ["cpu"]
