"""What can be added to a run, from a file for each concern. Imports all of loops but the loops
themselves; a short one to start with is early_stop.py.
"""

from .checkpoint import CheckpointHook
from .early_stop import EarlyStopHook
from .ema import EMAHook
from .figures import GradNormHook, ThroughputHook
from .log import LogHook, TensorBoardHook
from .nan_guard import NanGuardHook, NonFiniteError
from .progress import ProgressHook
from .scheduler import PolyLR, SchedulerHook, ScheduleWindow

__all__ = [
    "CheckpointHook",
    "EMAHook",
    "EarlyStopHook",
    "GradNormHook",
    "LogHook",
    "NanGuardHook",
    "NonFiniteError",
    "PolyLR",
    "ProgressHook",
    "ScheduleWindow",
    "SchedulerHook",
    "TensorBoardHook",
    "ThroughputHook",
]
