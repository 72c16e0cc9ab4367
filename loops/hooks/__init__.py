"""What can be added to a run: one hook a file."""

from .checkpoint import CheckpointHook
from .early_stop import EarlyStopHook
from .ema import EMAHook
from .grad_norm import GradNormHook
from .log import LogHook
from .nan_guard import NanGuardHook, NonFiniteError
from .progress import ProgressHook
from .scheduler import SchedulerHook
from .tensorboard import TensorBoardHook
from .throughput import ThroughputHook

__all__ = [
    "CheckpointHook",
    "EMAHook",
    "EarlyStopHook",
    "GradNormHook",
    "LogHook",
    "NanGuardHook",
    "NonFiniteError",
    "ProgressHook",
    "SchedulerHook",
    "TensorBoardHook",
    "ThroughputHook",
]
