"""Models and optimizers that step, under any parallelism."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._closures import refuse_without_closure
from ._dtensors import is_dtensor
from ._held_gradients import drop_held_gradients
from .activation_checkpointing import checkpoint_activations
from .amp import AmpOptimWrapper
from .anomalies import detect_anomalous_params
from .auto import auto
from .blocks import find_blocks
from .comm_hooks import CommHook
from .compiling import compile_model
from .data_parallel import ReplicationCallbackDataParallel
from .distributed import StepDistributedDataParallel
from .fused import build_optimizer
from .layout import (
    Layout,
    as_global,
    copy_whole_,
    is_sharded,
    layout_of,
    local_part,
    reshard,
    take_part,
    total_norm,
)
from .losses import parse_losses
from .mesh import Mesh, build_mesh, check_axes
from .meta_init import meta_parameters
from .model import BaseModel, SupervisedModel
from .optim import OptimWrapper
from .optim_dict import OptimWrapperDict
from .param_groups import param_groups
from .param_names import NamedParameter, named_parameters
from .param_shares import refuse_single_step, share_parameters
from .patched_parallel import patch_replication_callback
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
from .step_function import check_step_function, with_train_step
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
from .unused import UnusedParametersError
from .weight_init import BaseModule, initialize
from .wrapping import (
    is_model_wrapper,
    is_module_wrapper,
    steps_in_group_only,
    wrap_model,
    wrapper_misfits,
)

if TYPE_CHECKING:
    from .fully_sharded import StepFullyShardedDataParallel
    from .post_local_sgd import PostLocalSGD, ZeroRedundancyOptimizer
    from .tensor_parallel import parallelize

# Imported when they are asked for: what they need of torch takes as long as half of torch.
_LATER = {
    "PostLocalSGD": "post_local_sgd",
    "StepFullyShardedDataParallel": "fully_sharded",
    "ZeroRedundancyOptimizer": "post_local_sgd",
    "parallelize": "tensor_parallel",
}

__all__ = [
    "AmpOptimWrapper",
    "BaseModel",
    "BaseModule",
    "CallbackContext",
    "CommHook",
    "DataPreprocessor",
    "FutureResult",
    "Layout",
    "Mesh",
    "NamedParameter",
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
    "as_global",
    "auto",
    "build_mesh",
    "build_optimizer",
    "check_axes",
    "check_preparation",
    "check_step_function",
    "checkpoint_activations",
    "compile_model",
    "convert_model",
    "convert_sync_batchnorm",
    "copy_whole_",
    "detect_anomalous_params",
    "dict_gather",
    "drop_held_gradients",
    "exec_data_parallel_replication_callback",
    "find_blocks",
    "freeze_parameters",
    "initialize",
    "is_dtensor",
    "is_model_wrapper",
    "is_module_wrapper",
    "is_sharded",
    "layout_of",
    "local_part",
    "meta_parameters",
    "model_checks",
    "named_parameters",
    "parallelize",
    "param_groups",
    "parse_losses",
    "patch_replication_callback",
    "patch_sync_batchnorm",
    "prepare_model",
    "reshard",
    "revert_sync_batchnorm",
    "set_sbn_eps_mode",
    "share_parameters",
    "steps_in_group_only",
    "take_part",
    "total_norm",
    "user_scattered",
    "with_train_step",
    "wrap_model",
    "wrapper_misfits",
    "refuse_single_step",
    "refuse_without_closure",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LATER[name]}", __name__), name)
