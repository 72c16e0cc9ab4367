"""`init_cfg` and `init_weights()`, with the examples of mmengine's documentation."""

import logging
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepwrap.registry import MODELS, build_tree
from stepwrap.wrappers import BaseModel, BaseModule, SingleDevice, SupervisedModel, initialize

LAYERS = ["Conv1d", "Conv2d", "Linear"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.feat = nn.Conv1d(3, 1, 3)
        self.reg = nn.Conv2d(3, 3, 3)
        self.bn = nn.BatchNorm2d(3)
        self.cls = nn.Linear(1, 2)
        self.deep = nn.Sequential(nn.Linear(2, 2))


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1))

    def init_weights(self) -> None:
        nn.init.ones_(self.scale)


class Toy(BaseModel):
    def __init__(self, init_cfg: Any = None, inner_cfg: Any = None) -> None:
        super().__init__(init_cfg=init_cfg)
        self.linear = nn.Linear(1, 1)
        self.blocks = nn.ModuleList([Block(inner_cfg)])
        self.custom = Custom()


class Block(BaseModule):
    def __init__(self, init_cfg: Any = None) -> None:
        super().__init__(init_cfg)
        self.linear = nn.Linear(1, 1)


def constant(value: float, **further: Any) -> dict[str, Any]:
    return {"type": "Constant", "val": value, "layer": "Linear", **further}


def weights(module: nn.Module) -> dict[str, float]:
    """Return the weights and biases whose elements are all equal."""
    values = {name: param.unique() for name, param in module.named_parameters()}
    return {name: value.item() for name, value in values.items() if value.numel() == 1}


@pytest.mark.parametrize(
    ("init_cfg", "expected"),
    [
        ({"val": 1, "bias": 2}, {}),
        ({"val": 1, "layer": "Conv2d", "bias": 2}, {"reg": (1, 2)}),
        ({"val": 1, "layer": ["Conv1d", "Conv2d"]}, {"feat": (1, 0), "reg": (1, 0)}),
        ({"val": 3, "layer": "_BatchNorm", "bias": 4}, {"bn": (3, 4)}),
        ({"val": 1, "bias": 2, "override": {"name": "reg"}}, {"reg": (1, 2)}),
        (
            {
                "val": 1,
                "layer": "Linear",
                "override": [{"name": "deep", "type": "Constant", "val": 5, "bias": 6}],
            },
            {"cls": (1, 0), "deep.0": (5, 6)},
        ),
    ],
)
def test_constants(init_cfg: dict[str, Any], expected: dict[str, tuple[float, float]]) -> None:
    net = Net()
    before = weights(net)
    initialize(net, {"type": "Constant", **init_cfg})
    changed = {f"{name}.weight": pair[0] for name, pair in expected.items()}
    changed |= {f"{name}.bias": pair[1] for name, pair in expected.items()}
    assert weights(net) == {**before, **changed}


def test_several_settings_are_applied_in_order() -> None:
    net = Net()
    initialize(net, [constant(1, layer=LAYERS), {"type": "Constant", "val": 2, "layer": "Linear"}])
    assert [net.feat.weight.mean(), net.cls.weight.mean()] == [1, 2]


@pytest.mark.parametrize(
    ("init_cfg", "mean", "std"),
    [
        ({"type": "Normal", "mean": 1, "std": 0.1}, 1, 0.1),
        ({"type": "Uniform", "a": -1, "b": 3}, 1, 4 / math.sqrt(12)),
        ({"type": "Xavier", "gain": 2}, 0, 2 * math.sqrt(2 / 400)),
        ({"type": "Xavier", "distribution": "uniform"}, 0, math.sqrt(2 / 400)),
        ({"type": "Kaiming"}, 0, math.sqrt(2 / 100)),
        ({"type": "Kaiming", "mode": "fan_in", "distribution": "uniform"}, 0, math.sqrt(2 / 300)),
        ({"type": "Caffe2Xavier"}, 0, math.sqrt(1 / 300)),
        # The standard normal distribution between -2 and 2.
        ({"type": "TruncNormal"}, 0, 0.8796),
        # The mean is outside the interval, which holds 2.3 % of the distribution.
        ({"type": "TruncNormal", "mean": 3, "std": 0.5}, 1.8137, 0.1691),
    ],
)
def test_distributions(init_cfg: dict[str, Any], mean: float, std: float) -> None:
    """Mean and deviation of 30,000 weights are within four standard errors."""
    torch.manual_seed(0)
    layer = nn.Linear(300, 100)
    initialize(layer, {**init_cfg, "layer": "Linear", "bias_prob": 0.01})
    error = 4 * std / math.sqrt(layer.weight.numel())
    assert abs(layer.weight.mean().item() - mean) < error
    assert abs(layer.weight.std().item() - std) < error
    torch.testing.assert_close(torch.sigmoid(layer.bias), torch.full((100,), 0.01))
    if init_cfg["type"] == "TruncNormal":
        assert layer.weight.abs().max() <= 2


def test_random_values_equal_mmengines() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = pytest.importorskip(
            "mmengine.model", reason="mmengine, an extra", exc_type=ImportError
        )
    kinds: list[dict[str, Any]] = [
        {"type": "Normal", "std": 0.1},
        {"type": "Uniform"},
        {"type": "TruncNormal", "mean": 0.5, "std": 2, "a": -1, "b": 1},
        {"type": "Xavier", "override": {"name": "reg", "type": "Kaiming"}},
        {"type": "Kaiming", "a": 0.1, "nonlinearity": "leaky_relu", "distribution": "uniform"},
        {"type": "Caffe2Xavier", "bias_prob": 0.1},
    ]
    for kind in kinds:
        nets = []
        for function in (initialize, theirs.initialize):
            torch.manual_seed(0)
            net = Net()
            function(net, {"layer": LAYERS, **kind})
            nets.append(net.state_dict())
        assert all(torch.equal(value, nets[1][name]) for name, value in nets[0].items()), kind


def test_init_weights_initialises_submodules(caplog: pytest.LogCaptureFixture) -> None:
    model = Toy(constant(1), constant(2))
    assert (model.init_cfg, model.is_init) == (constant(1), False)
    model.init_weights()
    assert model.linear.weight == 1
    assert model.blocks[0].linear.weight == 2
    assert model.custom.scale == 1
    assert model.is_init
    assert model.blocks[0].is_init
    nn.init.zeros_(model.linear.weight)
    model.init_weights()
    assert model.linear.weight == 0
    assert re.search("init_weights .*Toy .*more than once", caplog.text)


class Encoder(BaseModule):
    """Has weights that its constructor loads, and an ``init_weights`` that replaces them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        nn.init.constant_(self.linear.weight, 7.0)

    def init_weights(self) -> None:
        nn.init.zeros_(self.linear.weight)


@pytest.mark.parametrize("inside", [nn.Sequential, SingleDevice, nn.Identity])
def test_submodules_that_are_initialised_keep_their_weights(inside: type[nn.Module]) -> None:
    encoder, model = Encoder(), Toy()
    model.encoder = encoder if inside is nn.Identity else inside(encoder)
    encoder.is_init = True
    model.init_weights()
    assert encoder.linear.weight == 7
    encoder.is_init = model.is_init = False
    model.init_weights()
    assert encoder.linear.weight == 0


def test_pretrained_weights_come_last(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From a file of the whole model, of a part, and of a dict with other entries."""
    filled = {name: torch.full_like(value, 7.0) for name, value in Toy().state_dict().items()}
    torch.save(filled, tmp_path / "whole.pth")
    torch.save({"state_dict": {"blocks.0.linear.weight": torch.tensor([[7.0]])}}, tmp_path / "part")
    pretrained = {"type": "Pretrained", "checkpoint": str(tmp_path / "whole.pth")}
    model = Toy([pretrained, constant(1)], constant(2))
    model.init_weights()
    assert {param.item() for param in model.parameters()} == {7.0}
    block = Block({**pretrained, "prefix": "blocks.0."})
    block.init_weights()
    assert block.linear.weight == 7
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        initialize(model, {"type": "Pretrained", "checkpoint": str(tmp_path / "part")})
    assert "linear.weight" in caplog.text


def test_an_override_loads_pretrained_weights_into_its_submodule_last(tmp_path: Path) -> None:
    state = {"linear.weight": torch.tensor([[7.0]]), "linear.bias": torch.tensor([8.0])}
    torch.save({f"teacher.{name}": value for name, value in state.items()}, tmp_path / "file.pth")
    pretrained = {"type": "Pretrained", "checkpoint": str(tmp_path / "file.pth")}
    override = {"name": "blocks.0", "prefix": "teacher", **pretrained}
    model = Toy(constant(1, override=override), constant(2))
    model.init_weights()
    inner = {"blocks.0.linear.weight": 7, "blocks.0.linear.bias": 8}
    assert weights(model) == {"linear.weight": 1, "linear.bias": 0, "custom.scale": 1, **inner}
    net = Net()
    with pytest.raises(ValueError, match=r"file\.pth .*no weights of Conv2d$"):
        initialize(net, constant(1, override={"name": "reg", **pretrained}))


class _Pickled:
    """An object that must not be unpickled."""


def test_wrong_pretrained_files(tmp_path: Path) -> None:
    path = tmp_path / "file.pth"
    pretrained = {"type": "Pretrained", "checkpoint": str(path)}
    with pytest.raises(FileNotFoundError, match="file.pth"):
        initialize(Net(), pretrained)
    torch.save({"state_dict": nn.Conv3d(1, 1, 1).state_dict(), "message_hub": _Pickled()}, path)
    with pytest.raises(ValueError, match="must contain only weights"):
        initialize(Net(), pretrained)
    torch.save({"other.weight": torch.ones(1)}, path)
    with pytest.raises(ValueError, match="has no weights of Net"):
        initialize(Net(), pretrained)
    with pytest.raises(ValueError, match="no weights .*Net under 'backbone'"):
        initialize(Net(), {**pretrained, "prefix": "backbone"})


@pytest.mark.parametrize(
    ("init_cfg", "error", "message"),
    [
        (5, TypeError, "^init_cfg must be a dict or a list of dict, but got 5"),
        ({"type": "Kaming"}, ValueError, "did you mean Kaiming"),
        ({"layer": "Linear"}, ValueError, "must be one of Constant, Normal"),
        ({"type": "Constant", "layer": "Linear"}, TypeError, "needs 'val'"),
        (constant(1, vall=1), TypeError, "has no argument 'vall'; did you mean val"),
        (constant(1, layer=5), TypeError, "^layer must be a str or a list of str"),
        (constant(1, bias="x"), TypeError, "^bias must be a number, but got 'x'"),
        (constant(1, bias_prob=2), ValueError, "bias_prob must be between 0 and 1"),
        (constant(1, override=5), TypeError, "^override must be a dict or a list of dict, but got"),
        (
            constant(1, override={"type": "Xavier"}),
            ValueError,
            '^`override` must contain the key "n',
        ),
        (constant(1, override={"name": "l", "val": 3}), ValueError, '^`override` need "type" key'),
        (constant(1, override={"name": "l", **constant(2)}), TypeError, "takes no 'layer': remove"),
        (
            constant(1, override={"name": "l", "type": "Caffe2Xavier", "override": {"name": "m"}}),
            TypeError,
            "^the override of 'l' initialises all layers inside 'l' and takes no 'override'",
        ),
    ],
)
def test_wrong_settings(init_cfg: Any, error: type[Exception], message: str) -> None:
    """The model's constructor raises."""
    with pytest.raises(error, match=message):
        Toy(init_cfg)


def test_wrong_settings_found_by_the_modules() -> None:
    with pytest.raises(ValueError, match="^module .*attribute nope.*Net has .*'reg'"):
        initialize(Net(), constant(1, override={"name": "nope", "type": "Xavier"}))
    with pytest.raises(ValueError, match="distribution .*'normal' .*'uniform', got 'gauss'"):
        initialize(Net(), {"type": "Xavier", "layer": "Linear", "distribution": "gauss"})


def test_settings_of_a_config_stay_settings() -> None:
    cfg = {
        "type": "SupervisedModel",
        "net": {"type": "torch.nn.Linear", "in_features": 1, "out_features": 1},
        "loss": {"type": "torch.nn.MSELoss"},
        "init_cfg": constant(0.5),
    }
    model: SupervisedModel = build_tree(cfg, MODELS)
    model.init_weights()
    assert model.net.weight == 0.5


class Doubling(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def forward(self, inputs: Tensor, target: Any = None, mode: str = "tensor") -> Any:
        output = self.net(inputs)
        return {"loss": output.mean()} if mode == "loss" else (mode, output)


def test_run_forward_unpacks_batches() -> None:
    model, inputs = Doubling(), torch.ones(3, 2)
    for data in ([inputs], (inputs, None), {"inputs": inputs}):
        assert model._run_forward(data, mode="loss")["loss"] == model.net(inputs).mean()
        assert model._run_forward(data, "predict")[0] == "predict"
    with pytest.raises(
        TypeError, match="^Output of `data_preprocessor` should be list, tuple or d"
    ):
        model._run_forward(inputs, mode="tensor")
