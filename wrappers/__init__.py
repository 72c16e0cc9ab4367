"""Models and optimizers that step, under any parallelism."""

from .anomalies import detect_anomalous_params
from .distributed import StepDistributedDataParallel
from .losses import parse_losses
from .model import BaseModel, SupervisedModel
from .optim import OptimWrapper
from .preprocess import DataPreprocessor
from .single import SingleDevice

__all__ = [
    "BaseModel",
    "DataPreprocessor",
    "OptimWrapper",
    "SingleDevice",
    "StepDistributedDataParallel",
    "SupervisedModel",
    "detect_anomalous_params",
    "parse_losses",
]
