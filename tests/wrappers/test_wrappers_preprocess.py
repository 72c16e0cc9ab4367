"""Moving batches to the device of the model."""

import collections
import copy
import pickle
from typing import Any

import pytest
import torch
from step_models import PlainModel, batches, classifier, mlp, sgd
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from stepwrap.wrappers import DataPreprocessor, SingleDevice, SupervisedModel

Pair = collections.namedtuple("Pair", ["image", "label"])


def _build_meta(**kwargs: object) -> DataPreprocessor:
    return DataPreprocessor(**kwargs).to("meta")


def test_nested_data_is_moved_and_keeps_its_shape() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(2)])
    other = object()
    moved = _build_meta()(
        {
            "pair": Pair(torch.ones(1), [torch.ones(2), (torch.ones(3), "text")]),
            "ordered": collections.OrderedDict(a=torch.ones(1)),
            "packed": packed,
            "rest": [None, 3, b"x", other, range(2)],
        }
    )
    assert type(moved) is dict
    assert type(moved["pair"]) is Pair
    assert moved["pair"].image.is_meta
    assert moved["pair"].label[0].is_meta
    assert moved["pair"].label[1][0].is_meta
    assert moved["pair"].label[1][1] == "text"
    assert type(moved["ordered"]) is dict
    assert moved["ordered"]["a"].is_meta
    assert type(moved["packed"]) is type(packed)
    assert moved["packed"].data.is_meta
    assert moved["rest"] == [None, 3, b"x", other, range(2)]
    assert moved["rest"][3] is other


class _Movable:
    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def to(self, device: torch.device, **options: Any) -> "_Movable":
        self.asked.append((device.type, options))
        return self


class _Sums(DataPreprocessor):
    """A preprocessor that moves batches itself, like the example in mmengine's documentation."""

    def cast_data(self, data: Any) -> Any:
        return [tensor.sum() for tensor in super().cast_data(data)]


def test_cast_data_moves_and_may_be_overridden() -> None:
    batch = {"inputs": [torch.ones(2)], "data_samples": ("text", None)}
    assert DataPreprocessor().cast_data(batch)["inputs"][0] is batch["inputs"][0]
    moved = _build_meta().cast_data(batch)
    assert moved["inputs"][0].is_meta
    assert moved["data_samples"] == ("text", None)
    assert _Sums()([torch.ones(3)]) == [3.0]


def test_non_blocking_is_passed_to_to() -> None:
    for setting, options in ((None, {}), (False, {}), (True, {"non_blocking": True})):
        movable = _Movable()
        preprocess = _build_meta(non_blocking=setting)
        moved = preprocess({"a": [movable, torch.ones(1)]})
        assert movable.asked == [("meta", options)]
        assert moved["a"][1].is_meta
    with pytest.raises(TypeError, match="mean .*number, got True; .*non_blocking"):
        DataPreprocessor(True)


def test_tensors_on_the_device_are_not_copied() -> None:
    batch = [torch.ones(2), torch.ones(3)]
    moved = DataPreprocessor()(batch)
    assert all(a is b for a, b in zip(moved, batch, strict=True))


def _doubled(module: nn.Module, args: Any, *_: Any) -> Any:
    """Double the first entry of the batch that a hook gets."""
    if not isinstance(module, DataPreprocessor):
        return None
    (batch, *options) = args
    return ([batch[0] * 2, batch[1]], *options)


@pytest.mark.parametrize("kind", ["pre", "forward", "global pre"])
@pytest.mark.parametrize("make", [classifier, PlainModel])
def test_hooks_of_a_preprocessor_run(make: Any, kind: str) -> None:
    """Also for the preprocessor that a wrapper adds to a model without one."""
    [batch] = batches(1)
    plain, hooked = SingleDevice(make()), SingleDevice(make())
    expected = plain.train_step([batch[0] * 2, batch[1]], sgd(plain))["loss"]
    preprocess: Any = next(m for m in hooked.modules() if isinstance(m, DataPreprocessor))
    if kind == "pre":
        preprocess.register_forward_pre_hook(_doubled)
    elif kind == "forward":
        preprocess.register_forward_hook(lambda module, _, output: _doubled(module, [output])[0])
    handle = register_module_forward_pre_hook(_doubled) if kind == "global pre" else None
    try:
        assert hooked.train_step(batch, sgd(hooked))["loss"] == expected
    finally:
        if handle is not None:
            handle.remove()


def test_a_compiled_preprocessor_is_used() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = SupervisedModel(
        mlp(), nn.CrossEntropyLoss(), data_preprocessor=DataPreprocessor(mean=1.0)
    )
    model.data_preprocessor.compile(backend=backend)
    SingleDevice(model).train_step(batches(1)[0], sgd(model))
    assert len(graphs) == 1


def test_device_follows_the_modules_that_hold_it() -> None:
    model = SupervisedModel(nn.Linear(2, 2), nn.MSELoss())
    outer = nn.Sequential(model)
    assert model.data_preprocessor.device == torch.device("cpu")
    outer.to("meta")
    assert model.data_preprocessor.device.type == "meta"
    outer.to_empty(device="cpu")
    assert model.data_preprocessor.device.type == "cpu"


def test_the_device_is_the_nets() -> None:
    model = SupervisedModel(nn.Linear(2, 2, device="meta"), nn.MSELoss())
    assert model.data_preprocessor.device.type == "meta"


def test_normalisation_of_images() -> None:
    images = torch.randint(0, 256, (4, 3, 5, 5), dtype=torch.uint8)
    labels = torch.arange(4)
    mean, std = [1.0, 2.0, 3.0], [10.0, 20.0, 30.0]
    done, same = DataPreprocessor(mean, std)((images, labels))
    expected = (images.float() - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert torch.equal(done, expected)
    assert same is labels


def test_normalisation_picks_its_entry() -> None:
    batch = {"inputs": torch.ones(2, 3), "image": torch.ones(2, 3)}
    by_default = DataPreprocessor(mean=1.0)(batch)
    assert by_default["inputs"].sum() == 0
    assert by_default["image"] is batch["image"]
    by_name = DataPreprocessor(std=2.0, input_key="image")(batch)
    assert by_name["image"].sum() == 3
    pair = DataPreprocessor(mean=1.0, input_key=1)(Pair(torch.ones(2), torch.ones(2)))
    assert type(pair) is Pair
    assert pair.label.sum() == 0
    assert DataPreprocessor(mean=1.0)(torch.ones(2)).sum() == 0


def test_normalisation_survives_moves_and_copies() -> None:
    model = nn.Sequential(DataPreprocessor(mean=[1.0], std=2.0))
    model.to("meta").to_empty(device="cpu")
    model.double()
    for again in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        done = again([torch.full((2, 1), 3.0, dtype=torch.float64)])[0]
        assert done.dtype == torch.float64
        assert done.tolist() == [[1.0], [1.0]]
    assert model.state_dict() == {}


def test_wrong_settings() -> None:
    with pytest.raises(ValueError, match="std must be positive"):
        DataPreprocessor(std=[1.0, 0.0])
    with pytest.raises(TypeError, match="mean must .*list of numbers"):
        DataPreprocessor(mean="1.0")
    with pytest.raises(KeyError, match=r"'inputs' .*not in the batch; .*\['x'\]"):
        DataPreprocessor(mean=1.0)({"x": torch.ones(1)})
    with pytest.raises(TypeError, match="normalise entry 'x' .*type list"):
        DataPreprocessor(mean=1.0, input_key="x")([torch.ones(1)])
