"""Frozen modules in evaluation mode, against plain PyTorch; the log about frozen norms."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import slow
from ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset
from weights import apart, whole_weights

from stepwrap.loops import FreezeHook, SWAHook
from stepwrap.runner import Runner
from stepwrap.runner.command.cli import main
from stepwrap.wrappers import SingleDevice, SupervisedModel

BATCH, STEPS = 12, 4


class Samples(Dataset[Any]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(BATCH * STEPS, 5, generator=generator, dtype=torch.float64) * 3 + 1
        self.y = torch.randint(3, (len(self.x),), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Net(nn.Module):
    """A network whose backbone has running statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)]
        self.backbone, self.head = nn.Sequential(*layers), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def config(data_size: int = 1, **sections: Any) -> dict[str, Any]:
    dataset = {"dataset": {"type": Samples}, "batch_size": BATCH // data_size}
    return {
        "model": {
            "type": "SupervisedModel",
            "net": {"type": Net},
            "loss": {"type": "CrossEntropyLoss"},
        },
        "device": "cpu",
        "optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9},
        # The validation ends with `model.train()`.
        "data": {"train": {**dataset, "shuffle": False}, "val": dataset},
        "train": {"type": "EpochTrainLoop", "max_epochs": 2},
        "hooks": dict.fromkeys(("progress", "log", "throughput"), False),
        "freeze": {"net.backbone": {"eval": True}},
        **sections,
    }


def train_plainly() -> dict[str, Tensor]:
    torch.manual_seed(0)
    net, samples = Net(), Samples()
    net.backbone.requires_grad_(False).eval()
    optimizer = torch.optim.SGD(net.head.parameters(), lr=0.1, momentum=0.9)
    for x, y in list(zip(samples.x.split(BATCH), samples.y.split(BATCH), strict=True)) * 2:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return dict(sorted((f"net.{name}", value) for name, value in net.state_dict().items()))


def trained(settings: dict[str, Any], resume: str = "") -> dict[str, Tensor]:
    runner = Runner.from_config(settings)
    runner.train(resume=resume or False)
    model = runner.state.model.module
    return dict(sorted({**whole_weights(model), **dict(model.named_buffers())}.items()))


@pytest.mark.parametrize(
    ("ranks", "wrapper"),
    [
        (1, {"type": "single"}),
        (3, {"type": "ddp", "sync_batchnorm": True}),
        (3, {"type": "fsdp"}),
        *slow((1, {"type": "dp", "device_ids": ["cpu", "cpu"]}), (3, {"type": "separate"})),
    ],
)
def test_statistics_of_a_frozen_module_stay(ranks: int, wrapper: dict[str, Any]) -> None:
    settings, expected = config(ranks, wrapper=wrapper), train_plainly()
    for weights in run_ranks(trained, ranks, settings):
        assert apart(weights, expected) < 1e-14


def test_until_a_step_and_after_a_resume(caplog: pytest.LogCaptureFixture) -> None:
    freeze = {"net.backbone": {"eval": True, "until_step": 2}}
    save = {"checkpoint": {"every_steps": 1, "keep_last": None}}
    settings = config(freeze=freeze, run_dir="runs/a")
    settings["hooks"] |= save
    weights = trained(settings)
    saved = [load_file(f"runs/a/checkpoints/step_{step:08d}/model.safetensors") for step in (2, 3)]
    assert [int(content["net.backbone.1.num_batches_tracked"]) for content in saved] == [0, 1]
    assert "still update" not in caplog.text
    for step in (1, 3):
        again = trained(
            {**settings, "run_dir": f"runs/{step}"}, f"runs/a/checkpoints/step_{step:08d}"
        )
        assert apart(again, weights) == 0


@pytest.mark.parametrize(
    ("freeze", "logged"),
    [
        (["net.backbone"], 1),
        ({"net.backbone": {"until_step": 3}}, 1),
        ({"net.backbone": {"eval": True}}, 0),
        (["net.backbone.0"], 0),
    ],
)
def test_frozen_norms_are_logged(
    freeze: Any, logged: int, caplog: pytest.LogCaptureFixture
) -> None:
    trained(config(freeze=freeze))
    lines = [line for line in caplog.messages if "still update their running statistics" in line]
    assert len(lines) == logged
    assert all("net.backbone.1" in line and "eval: true" in line for line in lines)


def test_a_name_must_be_the_path_of_a_module(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "points.yaml", "freeze={net.0.weight: {eval: true}}"]) == 2
    message = capsys.readouterr().err
    assert "freeze" in message
    assert re.search(r"no module .*path 'net\.0\.weight'", message)


def test_in_a_loop_of_your_own_and_in_python() -> None:
    wrapper = SingleDevice(SupervisedModel(Net(), nn.CrossEntropyLoss()))
    backbone = wrapper.module.net.backbone
    wrapper.keep_in_eval([backbone])
    wrapper.eval()
    assert wrapper.train() is wrapper
    assert [module.training for module in (wrapper, backbone, backbone[2])] == [True, False, False]
    wrapper.keep_in_eval([backbone[2]])
    assert [module.training for module in (backbone, backbone[1], backbone[2])] == [
        True,
        True,
        False,
    ]
    with pytest.raises(ValueError, match="did you mean net.backbone"):
        FreezeHook(in_eval=["net.backbon"]).on_train_start(
            Runner.from_config(config()).state  # type: ignore[arg-type]
        )


def test_swa_keeps_the_statistics_of_modules_in_evaluation_mode(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    settings = config()
    settings["hooks"]["swa"] = {"type": SWAHook, "from_epoch": 1}
    assert torch.equal(trained(settings)["net.backbone.1.running_mean"], torch.zeros(6).double())
