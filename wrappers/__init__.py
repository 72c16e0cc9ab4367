"""Models and optimizers that step, under any parallelism."""

from .activation_checkpointing import checkpoint_activations
from .amp import AmpOptimWrapper
from .anomalies import detect_anomalous_params
from .auto import auto
from .comm_hooks import CommHook
from .compiling import compile_model
from .data_parallel import ReplicationCallbackDataParallel
from .distributed import StepDistributedDataParallel
from .fully_sharded import StepFullyShardedDataParallel
from .fused import build_optimizer
from .losses import parse_losses
from .mesh import Mesh, build_mesh, check_axes
from .meta_init import meta_parameters
from .model import BaseModel, SupervisedModel
from .optim import OptimWrapper
from .optim_dict import OptimWrapperDict
from .param_groups import param_groups
from .param_names import NamedParameter, named_parameters
from .param_shares import share_parameters
from .patched_parallel import patch_replication_callback
from .post_local_sgd import PostLocalSGD, ZeroRedundancyOptimizer
from .prepare import (
    Preparation,
    check_preparation,
    freeze_parameters,
    model_checks,
    prepare_model,
)
from .preprocess import DataPreprocessor
from .replicate import CallbackContext, exec_data_parallel_replication_callback
from .scatter_gather import dict_gather, user_scattered
from .separate import SeparateDistributedDataParallel
from .session import ReplicationError, ReplicationSession
from .single import SingleDevice
from .step_data_parallel import StepDataParallel
from .sync_batchnorm import (
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    set_sbn_eps_mode,
)
from .sync_conversion import (
    convert_model,
    convert_sync_batchnorm,
    patch_sync_batchnorm,
    revert_sync_batchnorm,
)
from .sync_master import FutureResult, SlavePipe, SyncMaster
from .tensor_parallel import parallelize
from .unused import UnusedParametersError
from .wrapping import is_model_wrapper, is_module_wrapper, needs_group, wrap_model, wrapper_misfits

__all__ = [
    "AmpOptimWrapper",
    "BaseModel",
    "CallbackContext",
    "CommHook",
    "DataPreprocessor",
    "FutureResult",
    "Mesh",
    "NamedParameter",
    "OptimWrapper",
    "OptimWrapperDict",
    "PostLocalSGD",
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
    "build_mesh",
    "build_optimizer",
    "check_axes",
    "convert_model",
    "convert_sync_batchnorm",
    "detect_anomalous_params",
    "dict_gather",
    "exec_data_parallel_replication_callback",
    "is_model_wrapper",
    "is_module_wrapper",
    "meta_parameters",
    "model_checks",
    "named_parameters",
    "param_groups",
    "parse_losses",
    "patch_replication_callback",
    "patch_sync_batchnorm",
    "revert_sync_batchnorm",
    "set_sbn_eps_mode",
    "share_parameters",
    "user_scattered",
    "wrap_model",
    "checkpoint_activations",
    "auto",
    "compile_model",
    "Preparation",
    "check_preparation",
    "freeze_parameters",
    "prepare_model",
    "parallelize",
    "needs_group",
    "wrapper_misfits",
]
