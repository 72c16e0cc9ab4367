"""Models and optimizers that step, under any parallelism."""

from .amp import AmpOptimWrapper
from .anomalies import detect_anomalous_params
from .distributed import StepDistributedDataParallel
from .fused import build_optimizer
from .losses import parse_losses
from .model import BaseModel, SupervisedModel
from .optim import OptimWrapper
from .optim_dict import OptimWrapperDict
from .preprocess import DataPreprocessor
from .single import SingleDevice
from .wrapping import is_model_wrapper, is_module_wrapper, wrap_model

__all__ = [
    "AmpOptimWrapper",
    "BaseModel",
    "DataPreprocessor",
    "OptimWrapper",
    "OptimWrapperDict",
    "SingleDevice",
    "StepDistributedDataParallel",
    "SupervisedModel",
    "build_optimizer",
    "detect_anomalous_params",
    "is_model_wrapper",
    "is_module_wrapper",
    "parse_losses",
    "wrap_model",
]
