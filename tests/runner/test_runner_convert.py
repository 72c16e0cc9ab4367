"""Converting mmengine's configs: translated settings, and settings without a counterpart."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from stepwrap.registry import config_from_dict
from stepwrap.runner import Runner
from stepwrap.runner.command.cli import main
from stepwrap.runner.convert.convert import convert_config
from stepwrap.runner.parts import rehearse
from stepwrap.runner.pretrained.build import build_user_model
from stepwrap.runner.sections import read_sections

WHOLE = """
work_dir = "work/line"
experiment_name = "line"
samples = 16
loader = dict(
    batch_size=4,
    num_workers=0,
    persistent_workers=False,
    drop_last=True,
    sampler=dict(type="DefaultSampler", shuffle=True),
    collate_fn=dict(type="torch.utils.data.default_collate"),
    dataset=dict(type="convert_parts.Ones", size=samples),
)
model = dict(
    type="convert_parts.Line", head=dict(type="Linear"), init_cfg=dict(type="Constant", val=0.5)
)
train_dataloader = loader
val_dataloader = dict(loader, drop_last=False, sampler=dict(type="DefaultSampler", shuffle=False))
test_dataloader = val_dataloader
val_evaluator = [dict(type="convert_parts.Close", within=2.0)]
test_evaluator = val_evaluator
train_cfg = dict(type="EpochBasedTrainLoop", max_epochs=6, val_begin=2, val_interval=2)
val_cfg = dict(type="ValLoop")
test_cfg = dict()
optim_wrapper = dict(
    type="AmpOptimWrapper",
    dtype="bfloat16",
    optimizer=dict(type="SGD", lr=0.1, momentum=0.9),
    accumulative_counts=2,
    clip_grad=dict(type="value", clip_value=0.5),
    paramwise_cfg=dict(bias_lr_mult=2.0),
)
param_scheduler = dict(type="MultiStepLR", milestones=[2, 4], gamma=0.5)
default_hooks = dict(
    timer=dict(type="IterTimerHook"),
    logger=dict(type="LoggerHook", interval=4),
    param_scheduler=dict(type="ParamSchedulerHook"),
    checkpoint=dict(type="CheckpointHook", interval=3, save_best="share", rule="greater"),
    sampler_seed=dict(type="DistSamplerSeedHook"),
)
custom_hooks = [dict(type="EarlyStoppingHook", monitor="share", rule="greater", min_delta=0.0)]
randomness = dict(seed=7, deterministic=True, diff_rank_seed=True)
env_cfg = dict(
    cudnn_benchmark=False,
    mp_cfg=dict(mp_start_method="fork", opencv_num_threads=0),
    dist_cfg=dict(backend="gloo", timeout=600),
)
custom_imports = dict(imports=["convert_parts"], allow_failed_imports=False)
visualizer = dict(type="Visualizer", vis_backends=[dict(type="LocalVisBackend")])
log_level = "INFO"
launcher = "none"
load_from = None
resume = True
"""
LOADER = {
    "dataset": {"type": "convert_parts.Ones", "size": 16},
    "batch_size": 4,
    "num_workers": 0,
    "drop_last": False,
    "shuffle": False,
    "collate": "torch.utils.data.default_collate",
}
TRANSLATED: dict[str, Any] = {
    "name": "line",
    "imports": ["convert_parts"],
    "seed": 7,
    "deterministic": True,
    "run_dir": "work/line",
    "model": {
        "type": "convert_parts.Line",
        "head": {"_raw_": True, "type": "Linear"},
        "init_cfg": {"_raw_": True, "type": "Constant", "val": 0.5},
    },
    "optimizer": {
        "type": "SGD",
        "lr": 0.1,
        "momentum": 0.9,
        "paramwise": {"bias_lr_mult": 2.0, "as_mmengine": True},
    },
    "optim_wrapper": {
        "type": "AmpOptimWrapper",
        "accumulative_counts": 2,
        "clip_grad": {"type": "value", "clip_value": 0.5},
        "dtype": "bfloat16",
    },
    "schedulers": [{"type": "MultiStepLR", "milestones": [2, 4], "gamma": 0.5, "by": "epoch"}],
    "data": {
        "train": {**LOADER, "drop_last": True, "shuffle": True},
        "val": LOADER,
        "test": LOADER,
    },
    "train": {
        "type": "EpochTrainLoop",
        "max_epochs": 6,
        "val_begin": 2,
        "val_interval": 2,
        "log_every_steps": 2,
    },
    "metrics": {
        "close": {"type": "ProcessMetric", "metric": {"type": "convert_parts.Close", "within": 2.0}}
    },
    "hooks": {
        "checkpoint": {
            "every_epochs": 3,
            "every_secs": None,
            "keep_last": None,
            "keep_best": "close/share",
            "mode": "max",
        },
        "early_stop": {"metric": "close/share", "patience": 5, "mode": "max", "min_delta": 0.0},
    },
    "launch": {"backend": "gloo", "timeout_s": 600},
    "resume": True,
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    return tmp_path


def convert(text: str, **options: Any) -> tuple[dict[str, Any], list[str]]:
    Path("mm.py").write_text(text)
    conversion = convert_config("mm.py", **options)
    assert yaml.safe_load(conversion.text()) == conversion.config
    return conversion.config, list(map(str, conversion.misses))


def test_a_whole_config_by_the_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mm.py").write_text(WHOLE)
    assert main(["convert", "mm.py"]) == 3
    out, err = capsys.readouterr()
    assert re.findall(r"^ +mm.py:\d+: (\S+): ", err, re.M) == [
        "custom_hooks.0.min_delta",
        "custom_hooks.0.check_finite",
    ]
    assert yaml.safe_load(out) == TRANSLATED
    (here / "ours.yaml").write_text(out)
    assert main(["check", "ours.yaml", "device=cpu"]) == 0


@pytest.mark.parametrize(
    ("options", "ties", "not_finite"),
    [
        ("min_delta=0.0", "equals the best one as an improvement", "ends training when the metric"),
        ("min_delta=0.5", "is better by exactly 0.5 as an improvement", "is NaN or infinite"),
        ("check_finite=True", "is better by exactly 0.1 as", "is NaN or infinite"),
        ("check_finite=False", "lower min_delta slightly", "accepts NaN as an improvement"),
    ],
)
def test_other_ties_and_nan_of_early_stopping_are_listed(
    options: str, ties: str, not_finite: str
) -> None:
    hook = f'dict(type="EarlyStoppingHook", monitor="a/b", rule="greater", {options})'
    metric = 'val_evaluator = dict(type="convert_parts.Close", prefix="a")'
    _, misses = convert(f"{MODEL}{metric}\ncustom_hooks = [{hook}]\n")
    assert len(misses) == 2
    assert "custom_hooks.0.min_delta: mmengine also accepts a value that" in misses[0]
    assert ties in misses[0]
    assert "custom_hooks.0.check_finite: mmengine " in misses[1]
    assert not_finite in misses[1]
    assert misses[1].endswith("calls state.request_stop (docs/extending.md)")


def test_translated_configs_run(here: Path) -> None:
    config, _ = convert(WHOLE)
    config = {**config, "device": "cpu", "deterministic": False, "run_dir": str(here / "run")}
    runner = Runner.from_config(config)
    line: Any = runner.state.model.module
    # Set by the model's own init_weights.
    assert line.head.weight.item() == 0.5
    assert runner.train().step == 6 * 4 // 2
    assert runner.state.metrics == {"close/share": 1.0, "close/of": 16.0}


@pytest.mark.parametrize(
    ("init_cfg", "weight"),
    [(None, 7.0), ({"type": "Constant", "val": 0.5, "layer": "Linear"}, 0.0)],
)
def test_models_of_ours_initialise_themselves_if_they_have_init_cfg(
    here: Path, init_cfg: Any, weight: float
) -> None:
    """By mmengine's rules, modules with `init_weights` call it after the model's settings."""
    model = {
        "type": "SupervisedModel",
        "net": {"type": "convert_parts.Loaded"},
        "loss": {"type": "torch.nn.MSELoss"},
    }
    config = {
        "model": model if init_cfg is None else {**model, "init_cfg": init_cfg},
        "optimizer": {"type": "SGD", "lr": 0.1},
        "data": {"train": {"dataset": {"type": "convert_parts.Ones", "size": 4}, "batch_size": 2}},
        "train": {"type": "EpochTrainLoop", "max_epochs": 1},
        "device": "cpu",
        "run_dir": str(here / "run"),
    }
    net: Any = Runner.from_config(config).state.model.module.net
    assert net.weight.item() == weight


@pytest.mark.parametrize(("is_init", "weight"), [(True, 7.0), (False, 0.0)])
def test_a_net_that_is_initialised_keeps_its_weights(is_init: bool, weight: float) -> None:
    net = {"type": "convert_parts.Loaded", "is_init": is_init}
    model = {"type": "SupervisedModel", "net": net, "loss": {"type": "torch.nn.MSELoss"}}
    assert build_user_model(model).net.weight.item() == 7.0
    assert build_user_model(net).weight.item() == 7.0
    net["init_cfg"] = {"_raw_": True}
    assert build_user_model(model).net.weight.item() == weight
    assert build_user_model(net).weight.item() == weight


FOREIGN = """model = dict(type="convert_parts.Line", head=dict(type="Linear"))
model_wrapper_cfg = dict(type="MyWrapper")
optim_wrapper = dict(
    optimizer=dict(type="SGD", lr=0.1),
    paramwise_cfg=dict(
        dcn_offset_lr_mult=0.1,
        norm_decay_mult=0.0),
    constructor="LayerDecayConstructor",
    accumulative_counts=4)
train_cfg = dict(by_epoch=False, max_iters=10, val_interval=4)
param_scheduler = [
    dict(type="LinearLR", end=2, convert_to_iter_based=True),
]
default_hooks = dict(
    visualization=dict(type="DetVisualizationHook", draw=True),
    sampler_seed=None,
    checkpoint=dict(
        type="CheckpointHook",
        interval=8,
        by_epoch=False,
        out_dir="elsewhere"))
custom_hooks = [dict(type="MeanTeacherHook")]
visualizer = dict(type="Visualizer", vis_backends=[dict(type="WandbVisBackend")])
auto_scale_lr = dict(enable=True, base_batch_size=256)
load_from = "https://example.org/weights.pth"
env_cfg = dict(cudnn_benchmark=True)
speed = 3
env_cfg["mp_cfg"] = dict(mp_start_method="spawn")
log_processor = dict(by_epoch=False, custom_cfg=[dict(data_src="loss", window_size="epoch")])
launcher = "pytorch"
runner_type = "FlexibleRunner"
strategy = dict(type="DeepSpeedStrategy")
tta_model = dict(type="ClsTTAModel")
custom_hooks += [dict(type="NaiveVisualizationHook")]
"""
CHANGES = """\
2: model_wrapper_cfg.type: MyWrapper is an mmengine wrapper
6: optim_wrapper.paramwise_cfg.dcn_offset_lr_mult: has no counterpart here
8: optim_wrapper.constructor: is not converted, only its paramwise options are
10: train_cfg.max_iters: 10 batches are not a multiple of the 4 batches of an update: rounded up
12: param_scheduler.0.convert_to_iter_based: needs the number of batches in an epoch of each
16: default_hooks.sampler_seed: cannot be switched off
21: default_hooks.checkpoint.out_dir: has no counterpart here
22: custom_hooks.0: MeanTeacherHook has no counterpart
24: auto_scale_lr.enable: learning rates are not scaled
25: load_from: must be a local file here
31: runner_type: has no counterpart here
32: strategy: has no counterpart: set wrapper, mesh and optim_wrapper instead"""
HARMLESS = """\
15: default_hooks.visualization: DetVisualizationHook is dropped
23: visualizer.vis_backends.0: WandbVisBackend is dropped: it only writes records
27: speed: is dropped: mmengine's Runner ignores it
28: env_cfg.mp_cfg.mp_start_method: is dropped
29: log_processor.custom_cfg: is dropped
30: launcher: ranks are started by launch.nproc, --nproc or torchrun
33: tta_model: is dropped: mmengine uses it with --tta only
34: custom_hooks.1: NaiveVisualizationHook is dropped"""


def test_settings_without_a_counterpart_are_listed_by_name_and_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "mm.py").write_text(FOREIGN)
    assert main(["convert", "mm.py"]) == 3
    out, err = capsys.readouterr()
    changes, harmless = err.split("Without effect here:\n")
    for text, listed in ((changes.partition(":\n")[2], CHANGES), (harmless, HARMLESS)):
        lines = sorted(text.splitlines(), key=lambda line: int(line.split(":")[1]))
        for line, expected in zip(lines, listed.splitlines(), strict=True):
            assert line.startswith(f"  mm.py:{expected}")
            assert f"\n# {line}" in out
    assert yaml.safe_load(out)["train"]["max_steps"] == 3
    assert yaml.safe_load(out)["hooks"]["checkpoint"]["every_steps"] == 2


REAL = """
default_scope = None
dataset_type = "convert_parts.Ones"
x = 3
bgr_std = [1.0]
tta_pipeline = [dict(type="TestTimeAug")]
tta_model = dict(type="ClassificationTTA")
log_level = "WARNING"
vis_backends = [dict(type="LocalVisBackend")]
visualizer = dict(type="UniversalVisualizer", vis_backends=vis_backends)
default_hooks = dict(
    visualization=dict(type="VisualizationHook", enable=False),
    checkpoint=dict(type="CheckpointHook", interval=1),
)
custom_hooks = [dict(type="ProfilerHook", on_trace_ready=dict(type="tb_trace"))]
"""


def test_settings_without_effect_end_with_0(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mm.py").write_text(f"{WHOLE}{REAL}")
    assert main(["convert", "mm.py"]) == 0
    out, err = capsys.readouterr()
    title, *lines = err.splitlines()
    assert title == "Without effect here:"
    for key in (
        "x", "bgr_std", "tta_pipeline", "tta_model", "log_level", "visualizer",
        "default_hooks.visualization", "custom_hooks.0", "dataset_type",
    ):  # fmt: skip
        assert any(f": {key}: " in line for line in lines), key
    assert f"# Without effect here:\n#   {lines[0].strip()}\n" in out


def test_a_missing_library_is_one_line(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "mm.py").write_text(
        'default_scope = "nolibrary"\n'
        'model = dict(type="ImageClassifier")\n'
        "val_dataloader = dict(\n"
        'dataset=dict(type="ImageNet"), sampler=dict(type="DefaultSampler"))\n'
        'val_evaluator = [dict(type="ForeignAccuracy"), dict(type="absent_library.Score")]\n'
        'optim_wrapper = dict(optimizer=dict(type="AdamW", lr=0.1))\n'
    )
    assert main(["convert", "mm.py"]) == 3
    _, err = capfd.readouterr()
    title, *lines = err.splitlines()
    assert title.startswith("Changes the result")
    missing_config, missing_metric = (line.strip() for line in lines)
    assert missing_config.startswith("mm.py:1: default_scope: install nolibrary ")
    assert missing_config.endswith(" ImageClassifier, ImageNet, ForeignAccuracy")
    assert re.fullmatch(r"install absent_library .* absent_library\.Score", missing_metric)


def test_base_files(here: Path) -> None:
    (here / "base.py").write_text(
        'optim_wrapper = dict(\n    optimizer=dict(type="SGD", lr=0.1, momentum=0.9),\n'
        '    constructor="Odd")\ntrain_cfg = dict(max_epochs=3, val_interval=1)\n'
    )
    config, misses = convert(
        '_base_ = "base.py"\nmodel = dict(type="convert_parts.Line", head=dict(type="Linear"))\n'
        "optim_wrapper = dict(optimizer=dict(lr=0.2))\n"
        "train_cfg = dict(_delete_=True, by_epoch=False, max_iters=9)\n"
    )
    assert config["optimizer"] == {"type": "SGD", "lr": 0.2, "momentum": 0.9}
    loop = {"type": "IterTrainLoop", "max_steps": 9, "val_interval": 1000, "log_every_steps": 10}
    assert config["train"] == loop
    assert [miss.partition(": ")[0] for miss in misses] == ["base.py:3"]


MODEL = 'model = dict(type="convert_parts.Line", head=dict(type="Linear"))\n'
TWO_METRICS = (
    'val_evaluator = [dict(type="convert_parts.Close"),'
    ' dict(type="convert_parts.Close", prefix="a")]\n'
    'default_hooks = dict(checkpoint=dict(type="CheckpointHook", save_best="{}"))'
)
AVERAGES = (
    'optim_wrapper = dict(optimizer=dict(type="SGD"), accumulative_counts={})\n'
    'custom_hooks = [dict(type="EMAHook", momentum=0.1, interval={})]'
)
BATCHES = "train_cfg = dict(by_epoch=False, max_iters=9)\n"
SIZE_POLICY = "torch.distributed.fsdp.wrap.size_based_auto_wrap_policy"


def saving(settings: str) -> str:
    return f'default_hooks = dict(checkpoint=dict(type="CheckpointHook", {settings}))'


def watched(name: str | None) -> dict[str, Any]:
    return {"hooks.checkpoint.keep_best": name}


def saved(**settings: Any) -> dict[str, Any]:
    return {"hooks.checkpoint": {**settings, "every_secs": None}}


# Lines of mmengine's config, our settings by key, and the reported misses.
ROWS: list[tuple[str, dict[str, Any], str | None]] = [
    # Model wrappers.
    ('model_wrapper_cfg = dict(type="MMDistributedDataParallel", detect_anomalous_params=True)',
     {"wrapper": {"type": "ddp", "detect_anomalous_params": True}}, None),
    ('model_wrapper_cfg = dict(find_unused_parameters=True)\nsync_bn = "torch"',
     {"wrapper": {"type": "ddp", "find_unused_parameters": True, "sync_batchnorm": True}}, None),
    ("find_unused_parameters = True",
     {"wrapper": {"type": "ddp", "find_unused_parameters": True}}, None),
    ('model_wrapper_cfg = dict(type="MMSeparateDistributedDataParallel")',
     {"wrapper": {"type": "separate"}}, None),
    ('model_wrapper_cfg = dict(type="MMFullyShardedDataParallel", cpu_offload=True,'
     ' sharding_strategy="FULL_SHARD", mixed_precision=dict(param_dtype="bfloat16"))',
     {"wrapper": {"type": "fsdp", "cpu_offload": True, "sharding_strategy": "FULL_SHARD",
                  "mixed_precision": {"param_dtype": "bfloat16"}}}, None),
    ('model_wrapper_cfg = dict(type="MMFullyShardedDataParallel", auto_wrap_policy=dict('
     f'type="{SIZE_POLICY}", min_num_params=1000))',
     {"wrapper": {"type": "fsdp",
                  "auto_wrap_policy": {"type": SIZE_POLICY, "min_num_params": 1000}}}, None),
    ("model_wrapper_cfg = dict(unused=True)", {"wrapper": {"type": "ddp"}},
     "2: model_wrapper_cfg.unused: is not an option of ddp"),
    # Loops; mmengine's defaults are written explicitly.
    ("train_cfg = dict(max_iters=30)",
     {"train.type": "IterTrainLoop", "train.max_steps": 30}, None),
    ("train_cfg = dict(max_epochs=3)",
     {"train": {"type": "EpochTrainLoop", "max_epochs": 3, "log_every_steps": 10},
      "hooks": {"checkpoint": {"every_epochs": 1, "every_secs": None, "keep_last": None}}}, None),
    ("train_cfg = dict(by_epoch=False)", {}, "2: train_cfg.max_iters: must be a number of batches"),
    # Checkpoint intervals; for mmengine a loop of batches is one epoch.
    (f"train_cfg = dict(max_epochs=3)\n{saving('interval=2, max_keep_ckpts=4')}",
     saved(every_epochs=2, keep_last=4), None),
    (f"train_cfg = dict(max_epochs=3)\n{saving('interval=-1')}",
     saved(every_epochs=None, keep_last=1), None),
    (f"{BATCHES}{saving('interval=2')}", saved(every_epochs=None, keep_last=None), None),
    (f"{BATCHES}{saving('interval=2, by_epoch=False')}",
     saved(every_epochs=None, every_steps=2, keep_last=None), None),
    (saving("interval=None"), {},
     "2: default_hooks.checkpoint.interval: cannot be converted ('>' not supported"),
    # The metric of the best checkpoint.
    (TWO_METRICS.format("share"), watched("close/share"), None),
    (TWO_METRICS.format("a/share"), watched("a/share"), None),
    (TWO_METRICS.format("share/x"), watched(None), "3: default_hooks.checkpoint.save_best: "),
    (TWO_METRICS.format("auto"), watched(None), "3: default_hooks.checkpoint.save_best: "),
    ('val_evaluator = dict(type="CocoMetric")', {},
     "2: val_evaluator.type: CocoMetric is not registered here"),
    ('val_evaluator = dict(type="convert_parts.Close")\n'
     'custom_hooks = [dict(type="EarlyStoppingHook", monitor="share", rule="up")]', {},
     "3: custom_hooks.0.rule: must be greater or less, got 'up'"),
    # Averages of the weights, updated per batch.
    (AVERAGES.format(1, 3),
     {"hooks.ema.decay": pytest.approx(0.9), "hooks.ema.every_steps": 3}, None),
    (AVERAGES.format(4, 2),
     {"hooks.ema.decay": pytest.approx(0.9**2), "hooks.ema.every_steps": None},
     "3: custom_hooks.0.momentum: "),
    (AVERAGES.format(2, 6), {"hooks.ema.decay": pytest.approx(0.9), "hooks.ema.every_steps": 3},
     "3: custom_hooks.0.momentum: "),
    ('custom_hooks = [dict(type="EMAHook", momentum="x")]', {},
     "2: custom_hooks.0.momentum: cannot be converted (unsupported operand"),
    # Several optimizers.
    ('optim_wrapper = dict(constructor="MultiOptimWrapperConstructor",\n'
     'maker=dict(optimizer=dict(type="Adam", lr=0.1), clip_grad=dict(max_norm=1.0)),\n'
     'judge=dict(optimizer=dict(type="SGD", lr=0.2)))\n'
     'param_scheduler = dict(judge=[dict(type="StepLR", step_size=2)])',
     {"optimizer": {"maker": {"type": "Adam", "lr": 0.1}, "judge": {"type": "SGD", "lr": 0.2}},
      "optim_wrapper": {"maker": {"clip_grad": {"max_norm": 1.0}}},
      "schedulers": [{"type": "StepLR", "step_size": 2, "gamma": 0.1, "by": "epoch",
                      "optimizer": "judge"}]}, None),
    ('optim_wrapper = dict(constructor="Odd", a=dict(optimizer=dict(type="SGD", lr=0.1)))', {},
     "2: optim_wrapper.constructor: here each optimizer gets the parameters of the child"),
    # Schedules: epochs of ten batches are converted to batches.
    ('param_scheduler = [dict(type="LinearLR", begin=0, end=2, convert_to_iter_based=True),'
     ' dict(type="CosineAnnealingLR", T_max=4, begin=2, end=6, convert_to_iter_based=True)]',
     {"schedulers.0.total_iters": 19, "schedulers.0.by": "step",
      "schedulers.1": {"type": "CosineAnnealingLR", "T_max": 40, "after": 20, "until": 59,
                       "by": "step"}}, None),
    (f'{BATCHES}param_scheduler = dict(type="StepLR", step_size=2)', {"schedulers": None},
     "3: param_scheduler.by_epoch: mmengine never steps it in an iteration-based loop"),
    (f'{BATCHES}param_scheduler = dict(type="ConstantLR", factor=0.5)',
     {"schedulers": [{"type": "ConstantLR", "factor": 0.5, "total_iters": 0, "by": "step"}]},
     "3: param_scheduler.by_epoch: mmengine never steps it in an iteration-based loop"),
    ('train_cfg = dict(max_epochs=6)\nparam_scheduler = dict(type="LinearLR", by_epoch=False)',
     {"schedulers.0.total_iters": 59}, None),
    ('param_scheduler = dict(type="LinearLR")', {"schedulers": None},
     "2: param_scheduler.end: is needed, because the config has no train_cfg"),
    ('train_cfg = dict(max_epochs=9)\n'
     'param_scheduler = dict(type="ReduceOnPlateauLR", begin=2)', {"schedulers": None},
     "3: param_scheduler: begin and end have no counterpart"),
    # Weights.
    ('load_from = "w.pth"', {"load_from": {"path": "w.pth", "strict": False}}, None),
    ('load_from = "w.pth"\nresume = True', {"load_from.path": "w.pth", "resume": None},
     "2: load_from: is loaded for its weights only"),
    ('optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.1),\n'
     'paramwise_cfg=dict(num_layers=12, layer_decay_rate=0.75))', {"optimizer.paramwise": None},
     "3: optim_wrapper.paramwise_cfg.layer_decay_rate: is not converted: set"
     " optimizer.paramwise.layer_decay"),
    # mmengine validates after multiples of the interval only.
    ("train_cfg = dict(max_epochs=9, val_begin=1, val_interval=4)", {"train.val_begin": 4}, None),
    ("train_cfg = dict(max_epochs=9, val_begin=5, val_interval=4, dynamic_intervals=[(6, 3)])",
     {"train.val_begin": 6}, None),
    ("train_cfg = dict(max_epochs=9, val_begin=9, val_interval=4)", {"train.val_begin": 9}, None),
    ("train_cfg = dict(max_epochs=9, val_begin=0, val_interval=4)", {"train.val_begin": 4}, None),
    # Loaders that only mmengine can build.
    ('randomness = dict(seed=5)\ntrain_dataloader = dict(batch_size=2,'
     ' dataset=dict(type="convert_parts.Ones", size=4), sampler=dict(type="ClassBalanced"))',
     {"data.train.type": "mmengine.runner.Runner.build_dataloader", "data.train.seed": 5,
      "data.train.dataloader._raw_": True,
      "data.train.dataloader.sampler": {"type": "ClassBalanced"}}, None),
    ('train_dataloader = dict(batch_size=3, sampler=dict(type="InfiniteSampler"))', {},
     "2: train_dataloader.sampler.type: the last batch of each pass"),
    # A scope also applies to nested parts.
    ('default_scope = "mmpretrain"',
     {"model.head": {"_raw_": True, "_scope_": "mmpretrain", "type": "Linear"}}, None),
    # Sections of the wrong type.
    ("custom_hooks = [3]", {}, "2: custom_hooks.0: must be a dict"),
    ("custom_hooks = 3", {}, "2: custom_hooks: must be a dict"),
    ("default_hooks = dict(logger=3)", {}, "2: default_hooks.logger: must be a dict"),
    ("param_scheduler = [3]", {}, "2: param_scheduler.0: must be a dict"),
    ("val_evaluator = [3]", {}, "2: val_evaluator.0: must be a dict"),
    ("visualizer = dict(vis_backends=[3])", {}, "2: visualizer.vis_backends.0: must be a dict"),
    ("custom_hooks = [dict(interval=3)]", {}, "2: custom_hooks.0.type: is missing"),
    ("param_scheduler = [dict(begin=3)]", {}, "2: param_scheduler.0.type: is missing"),
    ("optim_wrapper = dict(optimizer=dict(lr=1))", {},
     "2: optim_wrapper.optimizer.type: is missing: it names the class to build"),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "expected", "listed"), ROWS)
def test_translated_settings(lines: str, expected: dict[str, Any], listed: str | None) -> None:
    config, misses = convert(f"{MODEL}{lines}\n", epoch_length=10)
    translated = config_from_dict(config)
    assert {key: translated.select(key) for key in expected} == expected
    if listed is None:
        assert not misses
    else:
        assert any(miss.startswith(f"mm.py:{listed}") for miss in misses), misses
    if "wrapper" in expected:
        # Built for the number of ranks.
        run = {"data": {"val": LOADER}, "launch": {"nproc": 2}}
        assert rehearse(read_sections({**config, **run})).model.module is not None


def test_only_the_config_goes_to_stdout(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mm.py").write_text(
        f"{MODEL}import torch\nprint('loading')\nwork_dir = {{1, 2}}\n"
        "model['head'] = {None: 1, 2: 3}\n"
        "train_dataloader = dict(dataset=dict(type='convert_parts.Ones',\nsize=1j), sampler=dict("
        "type='DefaultSampler'))\n"
    )
    assert main(["convert", "mm.py"]) == 3
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["run_dir"] == "{1, 2}"
    assert re.search(r"mm\.py:4: work_dir: .* a set: .*text", err)
    assert yaml.safe_load(out)["model"]["head"] == {"None": 1, 2: 3}
    assert re.search(r"mm\.py:5: model\.head\.None: .*str or int", err)
    assert re.search(r"mm\.py:7: train_dataloader\.dataset\.size: YAML .* a complex", err)
    assert "loading" in err
