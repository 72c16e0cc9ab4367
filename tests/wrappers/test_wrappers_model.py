"""BaseModel and SupervisedModel."""

from typing import Any

import pytest
import torch
from step_models import PlainModel, batches, classifier, mlp, sgd
from torch import Tensor, nn

from stepwrap.registry import MODELS
from stepwrap.wrappers import BaseModel, DataPreprocessor, SupervisedModel


class Doubler(BaseModel):
    def forward(self, inputs: Tensor, target: Tensor | None = None, mode: str = "tensor") -> Any:
        return mode, inputs


def test_preprocessor_argument() -> None:
    assert type(Doubler().data_preprocessor) is DataPreprocessor
    module = nn.Identity()
    assert Doubler(module).data_preprocessor is module
    built = Doubler({"type": "BaseDataPreprocessor", "mean": 1.0}).data_preprocessor
    assert type(built) is DataPreprocessor
    assert built([torch.ones(1)])[0].item() == 0
    with pytest.raises(
        TypeError,
        match="^data_preprocessor .*`dict` or `nn.Module` .*int",
    ):
        Doubler(3)


@pytest.mark.parametrize("step", ["val_step", "test_step"])
def test_evaluation_steps_predict(step: str) -> None:
    model = Doubler()
    for data in ([torch.ones(2)], (torch.ones(2),), {"inputs": torch.ones(2)}):
        mode, inputs = getattr(model, step)(data)
        assert mode == "predict"
        assert inputs.sum() == 2
    assert model.training


@pytest.mark.parametrize("data", [torch.ones(2), "text", None])
def test_other_batches_are_refused(data: Any) -> None:
    name = type(data).__name__
    message = f"Output of `data_preprocessor` should be list, tuple or dict, but got {name}"
    with pytest.raises(TypeError, match=message):
        Doubler().val_step(data)


def test_supervised_modes() -> None:
    model = classifier()
    [inputs, target] = batches(1)[0]
    scores = model.net(inputs)
    assert torch.equal(model(inputs, target), scores)
    assert torch.equal(model(inputs, mode="tensor"), scores)
    predictions = model(inputs, mode="predict")
    assert len(predictions) == 4
    assert torch.equal(torch.stack(predictions), scores)
    loss = model(inputs, target, mode="loss")
    assert torch.equal(loss["loss"], nn.functional.cross_entropy(scores, target))
    with pytest.raises(ValueError, match="mode .*'loss', 'predict' .*'tensor', got 'x'"):
        model(inputs, mode="x")


def test_supervised_evaluation() -> None:
    model = classifier()
    [inputs, target] = batches(1)[0]
    result = model.val_step([inputs, target])
    assert torch.equal(result["preds"], model.net(inputs))
    assert result["target"] is target
    assert result["loss"].item() == nn.functional.cross_entropy(model.net(inputs), target).item()
    assert result["num_samples"] == 4
    assert set(model.test_step([inputs])) == {"preds", "num_samples"}


def test_supervised_with_named_entries() -> None:
    model = SupervisedModel(mlp(), nn.CrossEntropyLoss(), input_key="image", target_key="label")
    [inputs, target] = batches(1)[0]
    batch = {"image": inputs, "label": target, "path": ["a"] * 4}
    model.train_step(batch, sgd(model))
    assert set(model.val_step(batch)) == {"preds", "target", "loss", "num_samples"}
    assert set(model.val_step({"image": inputs})) == {"preds", "num_samples"}
    with pytest.raises(KeyError, match=r"input_key='image' .*not in the batch.*\['img'\]"):
        model.val_step({"img": inputs})
    with pytest.raises(KeyError, match="target_key='label' .*not in the batch"):
        model(image=inputs, mode="loss")


def test_supervised_loss_functions() -> None:
    [inputs, target] = batches(1)[0]
    per_sample = SupervisedModel(mlp(), nn.CrossEntropyLoss(reduction="none"))
    assert per_sample.val_step([inputs, target])["loss"].ndim == 0

    def two(scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss_ce": nn.functional.cross_entropy(scores, labels), "loss_l2": scores.square()}

    model = SupervisedModel(mlp(), two)
    logs = model.train_step([inputs, target], sgd(model))
    assert torch.equal(logs["loss"], logs["loss_ce"] + logs["loss_l2"])
    with pytest.raises(TypeError, match="loss must .*callable, got str"):
        SupervisedModel(mlp(), "CrossEntropyLoss")


def test_a_module_as_loss_is_part_of_the_model() -> None:
    weighted = nn.CrossEntropyLoss(weight=torch.ones(3))
    assert "loss.weight" in SupervisedModel(mlp(), weighted).state_dict()


def test_prediction_needs_samples() -> None:
    class Pair(nn.Module):
        def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
            return inputs, inputs

    model = SupervisedModel(Pair(), nn.MSELoss())
    with pytest.raises(TypeError, match="mode='predict' .*net .*returns a tensor"):
        model(torch.ones(2, 1), mode="predict")
    assert model.val_step([torch.ones(2, 1)])["num_samples"] == 2


class Stages(nn.Module):
    """A net with several outputs, whose lengths differ from the number of samples."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, inputs: torch.Tensor) -> Any:
        if self.kind == "list":
            return [inputs, inputs]
        return {"anchors": torch.zeros(7), "scores": inputs}


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_samples_are_counted_in_the_target(kind: str) -> None:
    def loss(outputs: Any, target: torch.Tensor) -> torch.Tensor:
        scores = outputs[0] if kind == "list" else outputs["scores"]
        return nn.functional.cross_entropy(scores, target)

    model = SupervisedModel(Stages(kind), loss)
    batch = [torch.zeros(5, 3), torch.zeros(5, dtype=torch.long)]
    assert model.val_step(batch)["num_samples"] == 5


def test_registered_names() -> None:
    for name in ("BaseModel", "SupervisedModel", "DataPreprocessor", "BaseDataPreprocessor"):
        assert name in MODELS
    assert not isinstance(PlainModel(), BaseModel)
