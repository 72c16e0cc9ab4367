"""Converted configs give the same weights, rates and metrics as mmengine."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import slow
from ranks import run_ranks
from torch import Tensor
from torch.optim import SGD
from warm import ended
from weights import apart

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # Its import fails if OpenCV does not find libGL.
    reason = "mmengine, the extra of that name, cannot be imported"
    pytest.importorskip("mmengine.runner", reason=reason, exc_type=ImportError)

from mmengine.model import ImgDataPreprocessor
from mmengine_parts import PARAM_SCHEDULERS, OwnBase, Points, note_rates, train_theirs

from stepwrap.registry import load_config
from stepwrap.runner import Runner
from stepwrap.runner.command.cli import main
from stepwrap.runner.convert.convert import convert_config
from stepwrap.wrappers import OptimWrapper, SingleDevice

EPOCHS = """
custom_imports = dict(imports=["mmengine_parts"], allow_failed_imports=False)
randomness = dict(seed=3)
dataset_type = "Points"
model = dict(
    type="Classifier",
    backbone=dict(type="Backbone", width=8),
    classes=2,
    data_preprocessor=dict(type="BaseDataPreprocessor"),
    init_cfg=dict(type="Xavier", layer="Linear", distribution="uniform"),
)
train_dataloader = dict(
    batch_size=BATCH,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=SHUFFLE),
    dataset=dict(type=dataset_type, size=40),
)
val_dataloader = dict(
    batch_size=7,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=False),
    collate_fn=dict(type="default_collate"),
    dataset=dict(type=dataset_type, size=20, seed=1),
)
val_evaluator = dict(type="Accuracy")
train_cfg = dict(by_epoch=True, max_epochs=4, val_interval=2)
val_cfg = dict()
optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=0.01, weight_decay=0.1),
    accumulative_counts=COUNTS,
    clip_grad=dict(max_norm=0.5),
    paramwise_cfg=dict(norm_decay_mult=0.0, custom_keys={"head": dict(lr_mult=2.0)}),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.1, begin=0, end=5, by_epoch=False),
    dict(type="CosineAnnealingLR", T_max=3, begin=1, end=4, by_epoch=True, eta_min=1e-4),
]
default_hooks = dict(
    logger=dict(type="LoggerHook", interval=2),
    checkpoint=dict(type="CheckpointHook", interval=2, max_keep_ckpts=1, save_best="points/top1"),
)
custom_hooks = [dict(type="EMAHook", momentum=0.1)]
"""
UPDATES = """
_base_ = "epochs.py"
# mmengine draws a number for its iterator before random weights here.
model = dict(init_cfg=None)
train_dataloader = dict(sampler=dict(type="InfiniteSampler", shuffle=True))
train_cfg = dict(_delete_=True, type="IterBasedTrainLoop", max_iters=12, val_interval=6)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.1, begin=0, end=4, by_epoch=False),
    dict(type="PolyLR", power=0.9, eta_min=1e-4, begin=4, end=12, by_epoch=False),
]
default_hooks = dict(checkpoint=dict(by_epoch=False, interval=6))
custom_hooks = []
"""


def write(
    folder: Path, *, counts: int = 1, shuffle: bool = False, batch: int = 8, more: str = ""
) -> Path:
    text = EPOCHS.replace("COUNTS", str(counts)).replace("SHUFFLE", str(shuffle))
    (folder / "epochs.py").write_text(text.replace("BATCH", str(batch)) + more)
    (folder / "updates.py").write_text(UPDATES)
    return folder / "epochs.py"


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """Restore the log level that mmengine's runner changes."""
    level = logging.root.level
    yield
    logging.root.setLevel(level)


def train_ours(config: dict[str, Any], folder: Path) -> tuple[Runner, list[list[float]]]:
    silent = {"progress": False, "log": False, "throughput": False}
    hooks = {**silent, **config.get("hooks", {})}
    config = {**config, "device": "cpu", "run_dir": str(folder / "ours"), "hooks": hooks}
    runner = Runner.from_config(config)
    optimizer = getattr(runner.state.optim_wrapper, "optimizer", None)
    rates = [] if optimizer is None else note_rates(optimizer)
    runner.train()
    return runner, rates


def weights(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_rates(ours: list[list[float]], theirs: list[list[float]]) -> None:
    """Compare the rates of each update; mmengine has one group per parameter."""
    for rates, other in zip(ours, theirs, strict=True):
        assert sorted(set(rates)) == pytest.approx(sorted(set(other)), rel=1e-12)


@pytest.mark.parametrize(("counts", "shuffle"), [(1, True), (2, False)])
def test_a_run_by_epochs(tmp_path: Path, counts: int, shuffle: bool) -> None:
    path = write(tmp_path, counts=counts, shuffle=shuffle)
    theirs, their_rates = train_theirs(path)
    conversion = convert_config(path, keep_order=shuffle)
    assert [miss.key for miss in conversion.misses] == ["custom_hooks.0.momentum"] * (counts - 1)
    ours, our_rates = train_ours(conversion.config, tmp_path)
    assert apart(weights(ours.state.model.module), weights(theirs.model)) <= 1e-12
    assert len(our_rates) == len(their_rates) == 20 // counts
    assert_rates(our_rates, their_rates)
    (score,) = theirs.message_hub.get_scalar("val/points/top1").data[0][-1:]
    if counts == 1:
        assert ours.state.metrics["points/top1"] == pytest.approx(float(score))
        average = ours.state.stateful["hooks.ema"].state_dict()["model"]
        (ema,) = [hook for hook in theirs.hooks if type(hook).__name__ == "EMAHook"]
        assert apart(average, weights(ema.ema_model.module)) <= 1e-12


def test_a_run_by_updates_in_their_order(tmp_path: Path) -> None:
    path = write(tmp_path).with_name("updates.py")
    theirs, their_rates = train_theirs(path)
    conversion = convert_config(path, keep_order=True)
    assert not conversion.misses
    assert conversion.config["schedulers"][1]["type"] == "PolyLR"
    ours, our_rates = train_ours(conversion.config, tmp_path)
    assert apart(weights(ours.state.model.module), weights(theirs.model)) <= 1e-12
    assert_rates(our_rates, their_rates)
    saved = sorted(folder.name for folder in (tmp_path / "ours/checkpoints").iterdir())
    assert any("12" in name for name in saved)


DUEL = """
custom_imports = dict(imports=["mmengine_parts"], allow_failed_imports=False)
randomness = dict(seed=3)
model = dict(type="Duel")
model_wrapper_cfg = dict(type="MMSeparateDistributedDataParallel")
train_dataloader = dict(
    batch_size=BATCH,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="Points", size=40),
)
train_cfg = dict(by_epoch=True, max_epochs=3)
optim_wrapper = dict(
    constructor="MultiOptimWrapperConstructor",
    maker=dict(optimizer=dict(type="Adam", lr=0.02), clip_grad=dict(max_norm=0.1)),
    judge=dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9)),
)
param_scheduler = dict(
    maker=[dict(type="LinearLR", start_factor=0.1, begin=0, end=6, by_epoch=False)],
    judge=[dict(type="StepLR", step_size=1, gamma=0.5)],
)
"""


def weights_by_us(config: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    """Return the weights under the user's names, also if children are wrapped."""
    sys.path.insert(0, str(Path(__file__).parent))
    model: Any = train_ours({**config, "hooks": {"checkpoint": False}}, folder)[0].state.model
    return {name.replace(".module.", "."): value for name, value in weights(model.module).items()}


@pytest.mark.slow
def test_several_optimizers_in_one_process_and_on_two_ranks(tmp_path: Path) -> None:
    path = tmp_path / "duel.py"
    path.write_text(DUEL.replace("BATCH", "8"))
    theirs = weights(train_theirs(path)[0].model)
    conversion = convert_config(path)
    assert not conversion.misses
    assert conversion.config["wrapper"] == {"type": "separate"}
    alone = {key: value for key, value in conversion.config.items() if key != "wrapper"}
    assert apart(weights_by_us(alone, tmp_path / "alone"), theirs) <= 1e-12
    path.write_text(DUEL.replace("BATCH", "4"))
    halves = convert_config(path).config
    for ours in run_ranks(weights_by_us, 2, halves, tmp_path / "ranks"):
        assert apart(ours, theirs) <= 1e-12


LAZY_BASE = """
from mmengine.dataset import DefaultSampler
from mmengine_parts import Points

train_dataloader = dict(
    batch_size=4,
    sampler=dict(type=DefaultSampler, shuffle=False),
    dataset=dict(type=Points, size=8),
)
"""
LAZY = """
from mmengine.config import read_base
from mmengine.optim import OptimWrapper
from mmengine_parts import Backbone, Classifier
from torch.optim import SGD

with read_base():
    from .lazy_base import *

model = dict(type=Classifier, backbone=dict(type=Backbone, width=8), classes=2)
optim_wrapper = dict(type=OptimWrapper, optimizer=dict(type=SGD, lr=0.1))
train_dataloader.update(dict(num_workers=0))
auto_scale_lr = dict(enable=True)
"""


def test_configs_with_classes_and_read_base(tmp_path: Path) -> None:
    (tmp_path / "lazy_base.py").write_text(LAZY_BASE)
    (tmp_path / "lazy.py").write_text(LAZY)
    config, misses = convert_config(tmp_path / "lazy.py")
    assert [miss.origin for miss in misses] == [f"{tmp_path / 'lazy.py'}:13"]
    assert config["model"] == {
        "type": "mmengine_parts.Classifier",
        "backbone": {"_raw_": True, "type": "mmengine_parts.Backbone", "width": 8},
        "classes": 2,
    }
    assert config["optimizer"] == {"type": "SGD", "lr": 0.1}
    assert config["data"]["train"] == {
        "dataset": {"type": "mmengine_parts.Points", "size": 8},
        "batch_size": 4,
        "num_workers": 0,
        "shuffle": False,
        "collate": "mmengine.dataset.pseudo_collate",
    }


def train_on_ranks(config: dict[str, Any], folder: Path) -> tuple[dict[str, Tensor], float]:
    sys.path.insert(0, str(Path(__file__).parent))
    runner, _ = train_ours(config, folder)
    return weights(runner.state.model.module), runner.state.metrics["points/top1"]


def test_two_ranks_with_half_of_the_batch_each(tmp_path: Path) -> None:
    theirs, _ = train_theirs(write(tmp_path))
    wrapper = 'model_wrapper_cfg = dict(type="MMDistributedDataParallel", broadcast_buffers=False)'
    conversion = convert_config(write(tmp_path, batch=4, more=wrapper))
    assert conversion.config["wrapper"] == {"type": "ddp", "broadcast_buffers": False}
    (score,) = theirs.message_hub.get_scalar("val/points/top1").data[0][-1:]
    for ours, metric in run_ranks(train_on_ranks, 2, conversion.config, tmp_path):
        assert apart(ours, weights(theirs.model)) <= 1e-12
        assert metric == pytest.approx(float(score))


@pytest.mark.slow
def test_their_optimizer_wrapper_runs_and_resumes_from_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, counts=2)
    theirs, _ = train_theirs(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    assert main(["convert", str(path)]) == 3
    (tmp_path / "ours.yaml").write_text(capsys.readouterr().out)
    wrapper = "optim_wrapper={type: mmengine.optim.OptimWrapper, clip_grad: {max_norm: 0.5}, "
    words = [f"{wrapper}accumulative_counts: 2}}", "device=cpu", "run_dir=ours"]
    assert main(["check", "ours.yaml", *words]) == 0
    # Train two of the four epochs, and the rest from the checkpoint.
    assert main(["train", "ours.yaml", *words, "train.max_epochs=2"]) == 0
    assert main(["train", "ours.yaml", *words, "--resume"]) == 0
    runner = Runner.from_config(load_config("ours.yaml", words))
    runner.validate("latest")
    assert apart(weights(runner.state.model.module), weights(theirs.model)) <= 1e-12


SCHEDULES: list[dict[str, Any]] = [
    {"type": "LinearLR", "start_factor": 0.1, "begin": 2, "end": 7},
    {"type": "ConstantLR", "factor": 0.25, "begin": 3, "end": 6},
    {"type": "StepLR", "step_size": 3, "gamma": 0.5, "begin": 1, "end": 11},
    {"type": "MultiStepLR", "milestones": [2, 5, 9], "gamma": 0.5, "begin": 1, "end": 8},
    {"type": "ExponentialLR", "gamma": 0.8, "begin": 4, "end": 9},
    {"type": "CosineAnnealingLR", "T_max": 5, "eta_min_ratio": 0.1, "begin": 2, "end": 14},
    {"type": "PolyLR", "power": 0.9, "begin": 2, "end": 12},
    {"type": "OneCycleLR", "eta_max": 0.3, "total_steps": 15, "three_phase": True},
    {"type": "CosineRestartLR", "periods": [5, 10], "restart_weights": [1, 0.5], "eta_min": 0.0},
]
VARIANTS: list[dict[str, Any]] = [
    {"type": "CosineAnnealingLR", "begin": 3, "end": 12},
    {"type": "PolyLR", "power": 2.0, "eta_min": 0.01, "begin": 2, "end": 12},
    {"type": "OneCycleLR", "eta_max": 0.3, "total_steps": 15, "pct_start": 0.4},
]
WARM_UP = {"type": "LinearLR", "start_factor": 0.01, "begin": 0, "end": 4}
OWN = {"type": "OwnSteps", "milestones": [3, 6], "gamma": 0.5}
PAIRS = [[WARM_UP, VARIANTS[0]], [WARM_UP, OWN]]


def their_rates(schedules: list[dict[str, Any]], steps: int) -> list[float]:
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.2)
    built = [
        PARAM_SCHEDULERS.build(schedule, default_args={"optimizer": optimizer})
        for schedule in schedules
    ]
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        for scheduler in built:
            scheduler.step()
    return rates


@pytest.mark.parametrize(
    "schedules",
    [
        *([schedule] for schedule in SCHEDULES),
        *PAIRS,
        *slow(*([schedule] for schedule in VARIANTS)),
    ],
    ids=lambda schedules: schedules[-1]["type"],
)
@pytest.mark.parametrize("by_epoch", [True, *slow(False)])
def test_the_rates_of_every_step(
    tmp_path: Path, schedules: list[dict[str, Any]], by_epoch: bool
) -> None:
    steps = 15
    schedules = [{**schedule, "by_epoch": by_epoch} for schedule in schedules]
    path = tmp_path / "mm.py"
    path.write_text(
        f"param_scheduler = {schedules}\n"
        "optim_wrapper = dict(optimizer=dict(type='SGD', lr=0.2))\n"
        "model = dict(type='torch.nn.Linear', in_features=1, out_features=1)\n"
        f"train_cfg = dict(by_epoch=True, max_epochs={steps})\n"
    )
    config = convert_config(path, epoch_length=1).config
    sections = {**config, "model": {"type": "SupervisedModel", "net": config["model"]}}
    sections["model"]["loss"] = {"type": "MSELoss"}
    loader = {"dataset": {"type": "convert_parts.Ones", "size": 1}, "batch_size": 1}
    loop = {"type": "EpochTrainLoop", "max_epochs": steps}
    ours, our_rates = train_ours({**sections, "data": {"train": loader}, "train": loop}, tmp_path)
    assert ours.state.step == steps
    expected = their_rates(schedules, steps)
    assert [rate for (rate,) in our_rates] == pytest.approx(expected, rel=1e-12, abs=1e-15)


CONFIG = """
custom_imports = dict(imports=["mmengine_parts"], allow_failed_imports=False)
model = dict(type="Classifier", backbone=dict(type="Backbone", width=8), classes=2)
train_dataloader = dict(
    batch_size=8,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(type="Points", size=16),
)
train_cfg = dict(by_epoch=True, max_epochs=1)
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.1))
"""


@pytest.mark.slow
def test_a_check_prints_no_line_for_each_parameter(tmp_path: Path) -> None:
    (tmp_path / "mm.py").write_text(CONFIG)
    conversion = convert_config(tmp_path / "mm.py")
    assert not conversion.misses
    (tmp_path / "ours.yaml").write_text(conversion.text())
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    command = ("-m", "stepwrap.runner", "check", "ours.yaml")
    checked = ended(*command, cwd=tmp_path, env=environment)
    assert checked.returncode == 0, checked.stderr
    assert "every part can be built" in checked.stdout
    assert "init_weights" not in checked.stdout + checked.stderr


OWN = """
from mmengine.hooks import EMAHook as TheirEMAHook
from mmengine.optim import LinearLR as TheirLinearLR


class EMAHook(TheirEMAHook):
    pass


class Judged(TheirEMAHook):
    def before_val_epoch(self, runner):
        pass


class LinearLR(TheirLinearLR):
    pass
"""
WITH_OWN = """
from mmengine.hooks import EMAHook as Average
from own_names import EMAHook, Judged, LinearLR

model = dict(type="torch.nn.Linear", in_features=1, out_features=1)
custom_hooks = [dict(type=Average), dict(type=EMAHook), dict(type=Judged)]
param_scheduler = dict(type=LinearLR, end=5)
"""


def test_custom_classes_are_not_confused_with_ours_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_names.py").write_text(OWN)
    (tmp_path / "mm.py").write_text(WITH_OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    config, misses = convert_config(tmp_path / "mm.py")
    # A subclass is converted as its base; what it overrides is named.
    (hook,) = misses
    facts = ("own_names.Judged is converted as EMAHook", "before_val_epoch")
    assert hook.key == "custom_hooks.2.type"
    assert all(fact in hook.what for fact in facts)
    assert config["hooks"] == {"ema": {"decay": 1 - 0.0002, "start_step": 1}}
    (schedule,) = config["schedulers"]
    assert schedule["type"] == "own_names.LinearLR"


def test_weights_of_a_checkpoint_of_mmengine(tmp_path: Path) -> None:
    (tmp_path / "mm.py").write_text(CONFIG)
    theirs, _ = train_theirs(tmp_path / "mm.py")
    # As shown on the page on migration.
    saved = torch.load(tmp_path / "theirs/epoch_1.pth", weights_only=False)
    torch.save(saved["state_dict"], tmp_path / "weights.pth")
    weights = f'dict(type="Pretrained", checkpoint="{tmp_path / "weights.pth"}")'
    pretrained = CONFIG.replace("classes=2", f"classes=2, init_cfg={weights}")
    # The whole checkpoint has objects of mmengine and NumPy, which are not imported.
    loaded = f"{CONFIG}load_from = '{tmp_path / 'theirs/epoch_1.pth'}'\n"
    for text in (pretrained, loaded):
        (tmp_path / "mm.py").write_text(text)
        conversion = convert_config(tmp_path / "mm.py")
        assert not conversion.misses
        settings = {"device": "cpu", "hooks": {"log": False}, "run_dir": str(tmp_path / "run")}
        ours = Runner.from_config({**conversion.config, **settings})
        for name, value in theirs.model.state_dict().items():
            assert torch.equal(ours.state.model.module.get_parameter(name), value)


@pytest.mark.parametrize("as_dict", [True, False])
def test_their_preprocessor_in_a_model_on_our_base(as_dict: bool) -> None:
    settings = {"mean": [1.0, 2.0, 3.0], "std": [2.0, 2.0, 2.0]}
    kind = "mmengine.model.ImgDataPreprocessor"
    preprocessor = {"type": kind, **settings} if as_dict else ImgDataPreprocessor(**settings)
    model = OwnBase(preprocessor)
    image = torch.full((3, 2, 2), 7, dtype=torch.uint8)
    optim_wrapper = OptimWrapper(SGD(model.parameters(), lr=0.1))
    SingleDevice(model).train_step({"inputs": [image, image]}, optim_wrapper)
    (model_input,) = model.seen
    assert model_input[:, :, 0, 0].tolist() == [[3.0, 2.5, 2.0]] * 2


NORMED = """
custom_imports = dict(imports=["mmengine_parts"], allow_failed_imports=False)
randomness = dict(seed=3)
model = dict(type="Classifier", backbone=dict(type="NormedBackbone", width=8), classes=2)
model_wrapper_cfg = dict(type="MMDistributedDataParallel", device_ids=None, broadcast_buffers=False)
train_dataloader = dict(
    batch_size=4,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="Points", size=40),
)
val_dataloader = dict(
    batch_size=7,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=False),
    collate_fn=dict(type="default_collate"),
    dataset=dict(type="Points", size=202, seed=1),
)
val_evaluator = dict(type="Accuracy")
train_cfg = dict(by_epoch=True, max_epochs=1)
val_cfg = dict()
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.3))
"""


def accuracy(model: Any, ranks: range) -> float:
    """Return the share of correct answers on the validation samples of some ranks."""
    points = Points(202, seed=1)
    model.eval()
    chosen = sorted({index for rank in ranks for index in range(rank, 202, 2)})
    answers = model(points.inputs[chosen]).argmax(1)
    return float((answers == points.targets[chosen]).double().mean())


def scores_of_both(path: Path) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).parent))
    theirs, _ = train_theirs(path)
    rank = torch.distributed.get_rank()
    (their_score,) = theirs.message_hub.get_scalar("val/points/top1").data[0]
    (their_share,) = [accuracy(theirs.model.module, range(rank, rank + 1))]
    ours, _ = train_ours(convert_config(path).config, path.parent)
    return {
        "theirs": float(their_score),
        "their share": their_share,
        "ours": ours.state.metrics["points/top1"],
        "checkpoint": accuracy(ours.state.model.module, range(2)),
        "weights": apart(
            dict(ours.state.model.module.named_parameters()),
            dict(theirs.model.module.named_parameters()),
        ),
    }


@pytest.mark.slow
def test_metrics_on_two_ranks_use_the_statistics_of_the_checkpoint(tmp_path: Path) -> None:
    """mmengine uses the running statistics of each rank for its own samples."""
    (tmp_path / "normed.py").write_text(NORMED)
    first, second = run_ranks(scores_of_both, 2, tmp_path / "normed.py")
    assert first["weights"] == second["weights"] == 0
    assert first["theirs"] == pytest.approx((first["their share"] + second["their share"]) / 2)
    assert first["ours"] == second["ours"] == pytest.approx(first["checkpoint"])
    assert first["ours"] != pytest.approx(first["theirs"])
