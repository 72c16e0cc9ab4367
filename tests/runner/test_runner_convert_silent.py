"""No setting of mmengine is dropped silently: each change has an effect or is reported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from pprint import pformat
from typing import Any

import pytest

from stepwrap.runner.convert.convert import convert_config

SCHEDULES: list[dict[str, Any]] = [
    {"type": "LinearLR", "start_factor": 0.1, "end_factor": 0.9, "begin": 0, "end": 10,
     "by_epoch": False, "verbose": False, "last_step": -1, "param_name": "lr"},
    {"type": "CosineAnnealingLR", "T_max": 5, "eta_min": 0.1, "begin": 10, "end": 20},
    {"type": "ReduceOnPlateauLR", "monitor": "p/top1", "rule": "greater", "factor": 0.1,
     "patience": 3, "threshold": 0.1, "threshold_rule": "rel", "cooldown": 1, "min_value": 0.1,
     "eps": 0.1},
    {"type": "OneCycleLR", "eta_max": 0.1, "total_steps": 5, "pct_start": 0.1,
     "anneal_strategy": "cos", "div_factor": 3.0, "final_div_factor": 4.0, "three_phase": False},
    {"type": "StepLR", "step_size": 3, "gamma": 0.1},
    {"type": "ExponentialLR", "gamma": 0.1},
    {"type": "ConstantLR", "factor": 0.1, "end": 4},
    {"type": "PolyLR", "power": 0.9, "eta_min": 0.1, "end": 20},
    {"type": "MultiStepLR", "milestones": [1, 2], "gamma": 0.2,
     "convert_to_iter_based": True},
]  # fmt: skip
LOADER: dict[str, Any] = {
    "batch_size": 4, "num_workers": 1, "persistent_workers": True, "pin_memory": True,
    "drop_last": True, "prefetch_factor": 3, "timeout": 0, "worker_init_fn": None,
    "batch_sampler": None, "num_batch_per_epoch": None, "multiprocessing_context": None,
    "dataset": {"type": "convert_parts.Ones", "size": 8},
    "sampler": {"type": "DefaultSampler", "shuffle": True, "seed": None, "round_up": True},
    "collate_fn": {"type": "default_collate"},
}  # fmt: skip
HOOKS: dict[str, Any] = {
    "timer": {"type": "IterTimerHook"},
    "logger": {"type": "LoggerHook", "interval": 5, "ignore_last": True, "out_dir": None,
               "interval_exp_name": 1000, "keep_local": True, "backend_args": None,
               "log_metric_by_epoch": True, "priority": "LOW"},
    "checkpoint": {"type": "CheckpointHook", "interval": 1, "by_epoch": True, "out_dir": None,
                   "save_optimizer": True, "save_param_scheduler": True, "max_keep_ckpts": 3,
                   "save_last": True, "save_best": "p/top1", "rule": "greater", "save_begin": 0,
                   "greater_keys": None, "less_keys": None, "filename_tmpl": None,
                   "published_keys": None, "backend_args": None},
    "sampler_seed": {"type": "DistSamplerSeedHook"},
    "param_scheduler": {"type": "ParamSchedulerHook"},
}  # fmt: skip
WHOLE: dict[str, Any] = {
    "default_scope": "mmengine", "experiment_name": "name", "work_dir": "work",
    "log_level": "INFO", "launcher": "none", "runner_type": "Runner",
    "resume": False, "load_from": None, "strategy": None, "tta_model": None,
    "log_processor": {"type": "LogProcessor", "window_size": 5, "by_epoch": True,
                      "num_digits": 4, "custom_cfg": None},
    "model": {"type": "convert_parts.Line", "head": {"type": "Linear"}},
    "data_preprocessor": {"type": "P", "mean": [1, 2]},
    "model_wrapper_cfg": {"type": "MMDistributedDataParallel", "broadcast_buffers": False,
                          "find_unused_parameters": True, "detect_anomalous_params": True,
                          "device_ids": [0], "output_device": 0},
    "optim_wrapper": {
        "type": "AmpOptimWrapper", "dtype": "bfloat16", "loss_scale": {"init_scale": 512.0},
        "accumulative_counts": 2, "clip_grad": {"max_norm": 1, "norm_type": 2},
        "constructor": "DefaultOptimWrapperConstructor",
        "optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9},
        "paramwise_cfg": {"norm_decay_mult": 0.0, "bypass_duplicate": True,
                          "custom_keys": {"head": {"lr_mult": 2}}},
    },
    "auto_scale_lr": {"enable": False},
    "param_scheduler": SCHEDULES,
    "train_dataloader": LOADER,
    "val_evaluator": {"type": "Evaluator",
                      "metrics": [{"type": "convert_parts.Close", "within": 1, "prefix": "p"}]},
    "train_cfg": {"type": "EpochBasedTrainLoop", "max_epochs": 5, "val_begin": 1,
                  "val_interval": 1, "dynamic_intervals": [[3, 1]]},
    "val_cfg": {"type": "ValLoop", "fp16": False}, "test_cfg": {"type": "TestLoop"},
    "default_hooks": HOOKS,
    "custom_hooks": [
        {"type": "EMAHook", "ema_type": "ExponentialMovingAverage", "momentum": 0.1,
         "strict_load": False, "begin_iter": 0, "begin_epoch": 0, "interval": 1,
         "update_buffers": False, "device": None, "priority": 49},
        {"type": "EarlyStoppingHook", "monitor": "p/top1", "rule": "greater", "min_delta": 0.1,
         "strict": False, "check_finite": True, "patience": 5, "stopping_threshold": None},
    ],
    "visualizer": {"type": "Visualizer", "name": "v", "save_dir": None,
                   "vis_backends": [{"type": "LocalVisBackend"},
                                    {"type": "TensorboardVisBackend"}]},
    "randomness": {"seed": 1, "deterministic": False, "diff_rank_seed": False},
    "env_cfg": {"cudnn_benchmark": False, "dist_cfg": {"backend": "gloo", "timeout": 30},
                "mp_cfg": {"mp_start_method": "fork", "opencv_num_threads": 0}},
    "custom_imports": {"imports": ["convert_parts"], "allow_failed_imports": False},
    "compile": {"enable": True, "target": "forward", "backend": "inductor"},
}  # fmt: skip
# Settings that the launcher decides, or that change no result and no file of a run.
WITHOUT_EFFECT = {
    "custom_hooks.0.priority",
    "custom_hooks.1.strict",
    "default_hooks.logger.log_metric_by_epoch",
    "default_hooks.logger.priority",
    "log_processor.by_epoch",
    "model_wrapper_cfg.device_ids",
    "model_wrapper_cfg.device_ids.0",
    "model_wrapper_cfg.output_device",
    "randomness.diff_rank_seed",
    "train_dataloader.persistent_workers",
    "visualizer.name",
}


def paths(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if above:
        yield above
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, entry in entries:
        if isinstance(entry, (dict, list)):
            yield from paths(entry, (*above, key))
        else:
            yield (*above, key)


def others(value: Any) -> list[Any]:
    """Return other values of the same type; at least one must have an effect."""
    if value is None:
        return ["other", 3, {"type": "Other"}]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value + 1, value * 3 + 7]
    if isinstance(value, str):
        return [f"{value}Other"]
    # An unknown key or item must not be ignored.
    return [{**value, "unknown": 5}] if isinstance(value, dict) else [[*value, 5]]


def converted(settings: dict[str, Any]) -> str:
    Path("mm.py").write_text(
        "".join(f"{key} = {pformat(value)}\n" for key, value in settings.items())
    )
    config, misses = convert_config("mm.py", epoch_length=13)
    return f"{config} {[(miss.key, miss.what) for miss in misses]}"


@pytest.mark.slow
def test_every_setting_has_an_effect_or_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Without mmengine, because its parser takes longer for each file.
    monkeypatch.setitem(sys.modules, "mmengine", None)
    before = converted(WHOLE)
    silent = set()
    for path in paths(WHOLE):
        changed = deepcopy(WHOLE)
        section: Any = changed
        for key in path[:-1]:
            section = section[key]
        for other in others(section[path[-1]]):
            section[path[-1]] = other
            if converted(changed) != before:
                break
        else:
            silent.add(".".join(map(str, path)))
    assert silent == WITHOUT_EFFECT
