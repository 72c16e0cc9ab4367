"""Splitting batches over copies and joining their outputs."""

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepwrap.wrappers import ReplicationCallbackDataParallel, dict_gather, user_scattered

Pair = namedtuple("Pair", ["left", "right"])
CPU = torch.device("cpu")


class Echo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, Any]] = []

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.seen.append((inputs, kwargs))
        return {"inputs": inputs, "kwargs": kwargs}


def echo(copies: int, **options: Any) -> ReplicationCallbackDataParallel:
    return ReplicationCallbackDataParallel(Echo(), ["cpu"] * copies, timeout_s=5, **options)


@pytest.mark.parametrize("size", range(9))
@pytest.mark.parametrize("copies", [1, 2, 3, 4])
def test_chunks_equal_torchs(size: int, copies: int) -> None:
    model = echo(copies)
    batch = torch.arange(size * 2).view(size, 2)
    joined = model(batch)["inputs"][0]
    assert torch.equal(joined, batch)
    chunks = sorted((inputs[0] for inputs, _ in model.module.seen), key=lambda chunk: chunk.sum())
    expected = sorted(batch.chunk(copies), key=lambda chunk: chunk.sum())
    assert [chunk.tolist() for chunk in chunks] == [chunk.tolist() for chunk in expected]


def test_nested_inputs() -> None:
    model = echo(2)
    marker = object()
    counts: defaultdict[str, Any] = defaultdict(list, {"x": torch.arange(4)})
    nested = [torch.arange(4), Pair(torch.arange(8).view(4, 2), (torch.arange(4), "text"))]
    ordered = OrderedDict(b=torch.arange(4), a=None)
    joined = model(nested, marker, counts, ordered=ordered, scale=torch.tensor(3.0), flag=[])
    (nested_inputs, second, third), kwargs = joined["inputs"], joined["kwargs"]
    assert torch.equal(nested_inputs[0], torch.arange(4))
    assert isinstance(nested_inputs[1], Pair)
    assert torch.equal(nested_inputs[1].left, nested[1].left)
    assert nested_inputs[1].right[1] == ["text", "text"]
    assert second == [marker, marker]
    assert isinstance(third, defaultdict)
    assert third.default_factory is list
    assert list(kwargs["ordered"].items())[0][0] == "b"
    assert kwargs["ordered"]["a"] is None
    assert kwargs["scale"].tolist() == [3.0, 3.0]
    assert kwargs["flag"] == []
    assert all(inputs[1] is marker for inputs, _ in model.module.seen)


def test_keywords_follow_the_chunks() -> None:
    """Two chunks for three devices give two copies, independent of the keywords."""
    model = echo(3)
    assert model(torch.arange(4), mode="predict")["kwargs"]["mode"] == ["predict", "predict"]
    assert torch.equal(model(x=torch.arange(4))["kwargs"]["x"], torch.arange(4))


def test_without_arguments_and_without_tensors() -> None:
    model = echo(2)
    assert model() == {"inputs": (), "kwargs": {}}
    assert len(model.module.seen) == 1
    assert model("text")["inputs"] == (["text", "text"],)


def test_along_another_dimension() -> None:
    model = echo(2, dim=1)
    batch = torch.arange(6).view(2, 3)
    assert torch.equal(model(batch)["inputs"][0], batch)
    assert {inputs[0].shape for inputs, _ in model.module.seen} == {(2, 2), (2, 1)}
    with pytest.raises(ValueError, match=r"argument \[0\]\[0\] .*shape \(3,\) cannot .*dim=1"):
        model(torch.arange(3))


def test_tensors_that_do_not_belong_together() -> None:
    with pytest.raises(ValueError, match=r"size 5 into 3 .*\['y'\] .*size 2 into 2"):
        echo(3)(torch.zeros(5), y=torch.zeros(2))


def test_gradients_reach_the_inputs() -> None:
    model = ReplicationCallbackDataParallel(nn.Tanh(), ["cpu"] * 3, timeout_s=5)
    inputs = torch.randn(5, 4, requires_grad=True)
    cotangent = torch.randn(5, 4)
    (grad,) = torch.autograd.grad(model(inputs), inputs, cotangent)
    (expected,) = torch.autograd.grad(inputs.tanh(), inputs, cotangent)
    assert torch.equal(grad, expected)


def test_user_scattered_with_unequal_chunks() -> None:
    model = echo(2, scatter=user_scattered)
    chunks = [{"x": torch.zeros(3, 2)}, {"x": torch.ones(1, 2)}]
    joined = model(chunks)["inputs"][0]["x"]
    assert joined.tolist() == [[0, 0]] * 3 + [[1, 1]]
    assert {len(inputs[0]["x"]) for inputs, _ in model.module.seen} == {1, 3}


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        (([torch.zeros(1)],), {}, "2 devices, got 1 entries"),
        (([torch.zeros(1)] * 3,), {}, "2 devices, got 3 entries"),
        (([1, 2], [3, 4]), {}, "got list, list"),
        ((torch.zeros(2),), {}, "got Tensor"),
        ((), {}, "got nothing"),
        (([1, 2],), {"flag": True}, "no keyword arguments, got flag"),
    ],
)
def test_user_scattered_refuses(arguments: Any, keywords: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        echo(2, scatter=user_scattered)(*arguments, **keywords)


def _output(size: int, value: float) -> dict[str, Any]:
    return {
        "loss": torch.tensor(value),
        "y": torch.full((size, 3), value),
        "meta": f"copy {value}",
        "none": None,
        "list": [torch.full((size,), value)],
        "pair": Pair(torch.full((size,), value), value),
    }


def test_dict_gather() -> None:
    joined = dict_gather([_output(2, 0.5), _output(1, 1.5)], CPU)
    assert joined["loss"].tolist() == [0.5, 1.5]
    assert joined["y"].shape == (3, 3)
    assert joined["meta"] == ["copy 0.5", "copy 1.5"]
    assert joined["none"] is None
    assert isinstance(joined["list"], list)
    assert joined["list"][0].tolist() == [0.5, 0.5, 1.5]
    assert isinstance(joined["pair"], Pair)
    assert joined["pair"].right == [0.5, 1.5]


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([{"a": 1}, {"b": 1}], r"different keys: copy 0 \['a'\], copy 1 \['b'\]"),
        ([{"a": 1}, {"a": 1, "b": 1}], "different keys"),
        ([[1], [1, 2]], "different lengths: copy 0 1, copy 1 2"),
        ([None, "text"], "different types: copy 0 NoneType, copy 1 str"),
        ([torch.zeros(1), None], "different types: copy 0 Tensor"),
    ],
)
def test_dict_gather_refuses(outputs: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dict_gather(outputs, CPU)


def test_a_custom_gather() -> None:
    def last(outputs: Any, device: torch.device, dim: int) -> Tensor:
        return outputs[-1]["inputs"][0]

    assert echo(2, gather=last)(torch.arange(4)).tolist() == [2, 3]
    assert echo(2, gather="dict_gather")(torch.arange(4))["inputs"][0].tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="gather must .*function, .*user_scattered or .*dict"):
        echo(2, gather="last")
    with pytest.raises(TypeError, match="gather must .*function, got int"):
        echo(2, gather=1)
