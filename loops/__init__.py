"""Training, validation and test loops; hooks; checkpoints; the order of the data."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .checkpoints.checkpoint import list_checkpoints, prune_checkpoints
from .checkpoints.files import CheckpointError
from .checkpoints.restore import Checkpoint, find_checkpoint, load_checkpoint
from .checkpoints.save import save_alone, save_checkpoint
from .data.collate import MixCollator, TextCollator, keep_lists
from .data.loaders import build_loader
from .data.prefetch import prefetch_to_device
from .data.sampler import ShardedBatchSampler
from .eval_sets import EvalSets
from .evaluate import TestLoop, ValLoop
from .hook import Hook, HookList
from .hooks.checkpoint import CheckpointHook
from .hooks.early_stop import EarlyStopHook, TimeLimitHook
from .hooks.ema import EMAHook, SWAHook
from .hooks.freeze import FreezeHook
from .hooks.monitors import GradNormHook, ThroughputHook
from .hooks.named_schedules import (
    ConstantRate,
    CosineDecay,
    InverseSqrtDecay,
    LinearDecay,
    PolyLR,
    RunSchedule,
    Warmup,
    WarmupStableDecay,
)
from .hooks.nan_guard import NanGuardHook, NonFiniteError
from .hooks.profile import ProfileHook, SystemHook
from .hooks.progress import NoteStepHook, ProgressHook
from .hooks.scheduler import SchedulerHook, ScheduleWindow
from .hooks.step_blocks import StepBlocksHook
from .loggers.files import LogHook
from .loggers.logger import LoggerHook
from .loggers.mlflow import MLflowHook
from .loggers.run_info import RunInfoHook
from .loggers.tensorboard import TensorBoardHook
from .loggers.trackio import TrackioHook
from .loggers.wandb import WandbHook
from .metrics.evaluation import ProcessMetric
from .metrics.inputs import MetricInputs
from .predictions.hook import PredictionHook
from .rng import mix_seed, seed_rng
from .schedule import Cadence
from .skipping.spike_guard import SpikeError, SpikeGuardHook
from .state import LoopState, Phase, Stateful
from .train import EpochTrainLoop, IterTrainLoop

if TYPE_CHECKING:
    from .data.samplers import SubsetSampler, WeightedSampler
    from .hooks.grad_guard import GradGuardHook
    from .metrics.mean_loss import MeanLoss

# Imported on first use: most runs need none of them.
_LATER = {
    "GradGuardHook": ".hooks.grad_guard",
    "MeanLoss": ".metrics.mean_loss",
    "SubsetSampler": ".data.samplers",
    "WeightedSampler": ".data.samplers",
}

__all__ = [
    "Cadence",
    "Checkpoint",
    "CheckpointError",
    "CheckpointHook",
    "ConstantRate",
    "CosineDecay",
    "EMAHook",
    "EarlyStopHook",
    "EpochTrainLoop",
    "EvalSets",
    "FreezeHook",
    "GradGuardHook",
    "GradNormHook",
    "Hook",
    "HookList",
    "InverseSqrtDecay",
    "IterTrainLoop",
    "LinearDecay",
    "LogHook",
    "LoggerHook",
    "LoopState",
    "MLflowHook",
    "MeanLoss",
    "MetricInputs",
    "MixCollator",
    "NanGuardHook",
    "NoteStepHook",
    "NonFiniteError",
    "Phase",
    "PolyLR",
    "PredictionHook",
    "ProcessMetric",
    "ProfileHook",
    "ProgressHook",
    "RunInfoHook",
    "RunSchedule",
    "SWAHook",
    "ScheduleWindow",
    "SchedulerHook",
    "ShardedBatchSampler",
    "SpikeError",
    "SpikeGuardHook",
    "Stateful",
    "StepBlocksHook",
    "SubsetSampler",
    "SystemHook",
    "TensorBoardHook",
    "TestLoop",
    "TextCollator",
    "ThroughputHook",
    "TimeLimitHook",
    "TrackioHook",
    "ValLoop",
    "WandbHook",
    "Warmup",
    "WarmupStableDecay",
    "WeightedSampler",
    "build_loader",
    "find_checkpoint",
    "keep_lists",
    "list_checkpoints",
    "load_checkpoint",
    "mix_seed",
    "prefetch_to_device",
    "prune_checkpoints",
    "save_alone",
    "save_checkpoint",
    "seed_rng",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
