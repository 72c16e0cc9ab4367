"""Model wrappers and optimizer wrappers for any kind of parallelism. Imports registry, collectives
and parallel. Start with wrapping.py, then steps/step.py.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .batchnorm.conversion import (
    convert_model,
    convert_sync_batchnorm,
    patch_sync_batchnorm,
    revert_sync_batchnorm,
)
from .batchnorm.sync_batchnorm import (
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    set_sbn_eps_mode,
)
from .ddp.comm_hooks import CommHook
from .ddp.distributed import StepDistributedDataParallel, UnusedParametersError
from .ddp.separate import SeparateDistributedDataParallel
from .layout import total_norm
from .one_process import SingleDevice, StepDataParallel
from .optimizers.amp import AmpOptimWrapper
from .optimizers.loss_weight import LossWeight
from .optimizers.optim import OptimWrapper
from .optimizers.optim_dict import OptimWrapperDict
from .optimizers.param_groups import param_groups
from .prepare import Preparation
from .replicas.data_parallel import ReplicationCallbackDataParallel, patch_replication_callback
from .replicas.replicate import CallbackContext, exec_data_parallel_replication_callback
from .replicas.scatter_gather import dict_gather, user_scattered
from .replicas.session import ReplicationError, ReplicationSession
from .replicas.sync_master import FutureResult, SlavePipe, SyncMaster
from .sharding.mesh import Mesh, build_mesh
from .sharding.meta_init import meta_parameters
from .steps.buffers import uncounted_batch
from .steps.model import BaseModel, SupervisedModel
from .steps.preprocess import DataPreprocessor
from .steps.step import parse_losses, with_train_step
from .steps.step_checks import detect_anomalous_params
from .steps.weight_init import BaseModule, initialize
from .unwrap import is_model_wrapper, is_module_wrapper
from .wrapping import auto, compile_step, wrap_model

if TYPE_CHECKING:
    from .fsdp.fully_sharded import StepFullyShardedDataParallel
    from .optimizers.post_local_sgd import PostLocalSGD, ZeroRedundancyOptimizer
    from .sharding.tensor_parallel import parallelize

# Imported on first use: they load large parts of torch.
_LATER = {
    "PostLocalSGD": "optimizers.post_local_sgd",
    "StepFullyShardedDataParallel": "fsdp.fully_sharded",
    "ZeroRedundancyOptimizer": "optimizers.post_local_sgd",
    "parallelize": "sharding.tensor_parallel",
}

__all__ = [
    "AmpOptimWrapper",
    "BaseModel",
    "BaseModule",
    "CallbackContext",
    "CommHook",
    "DataPreprocessor",
    "FutureResult",
    "LossWeight",
    "Mesh",
    "OptimWrapper",
    "OptimWrapperDict",
    "PostLocalSGD",
    "Preparation",
    "ReplicationCallbackDataParallel",
    "ReplicationError",
    "ReplicationSession",
    "SeparateDistributedDataParallel",
    "SingleDevice",
    "SlavePipe",
    "StepDataParallel",
    "StepDistributedDataParallel",
    "StepFullyShardedDataParallel",
    "SupervisedModel",
    "SyncMaster",
    "SynchronizedBatchNorm1d",
    "SynchronizedBatchNorm2d",
    "SynchronizedBatchNorm3d",
    "UnusedParametersError",
    "ZeroRedundancyOptimizer",
    "auto",
    "build_mesh",
    "compile_step",
    "convert_model",
    "convert_sync_batchnorm",
    "detect_anomalous_params",
    "dict_gather",
    "exec_data_parallel_replication_callback",
    "initialize",
    "is_model_wrapper",
    "is_module_wrapper",
    "meta_parameters",
    "parallelize",
    "param_groups",
    "parse_losses",
    "patch_replication_callback",
    "patch_sync_batchnorm",
    "revert_sync_batchnorm",
    "set_sbn_eps_mode",
    "total_norm",
    "uncounted_batch",
    "user_scattered",
    "with_train_step",
    "wrap_model",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LATER[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
