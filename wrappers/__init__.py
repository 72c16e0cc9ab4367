"""Models and optimizers that step, under any parallelism. Imports registry and collectives. Start
with wrapping.py, then steps/step.py.
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
from .blocks import checkpoint_activations, compile_model, find_blocks
from .ddp.comm_hooks import CommHook
from .ddp.distributed import StepDistributedDataParallel, UnusedParametersError
from .ddp.separate import SeparateDistributedDataParallel
from .optimizers.amp import AmpOptimWrapper
from .optimizers.gates import refuse_without_closure
from .optimizers.loss_weight import LossWeight
from .optimizers.optim import OptimWrapper
from .optimizers.optim_dict import OptimWrapperDict
from .optimizers.optimizer_fit import build_optimizer
from .optimizers.param_groups import (
    NamedParameter,
    named_parameters,
    param_groups,
    refuse_single_step,
    share_parameters,
)
from .prepare import Preparation, check_preparation, freeze_parameters, model_checks, prepare_model
from .replicas.data_parallel import ReplicationCallbackDataParallel, patch_replication_callback
from .replicas.replicate import CallbackContext, exec_data_parallel_replication_callback
from .replicas.scatter_gather import dict_gather, user_scattered
from .replicas.session import ReplicationError, ReplicationSession
from .replicas.sync_master import FutureResult, SlavePipe, SyncMaster
from .sharding.layout import (
    Layout,
    as_global,
    copy_whole_,
    drop_held_gradients,
    is_dtensor,
    is_sharded,
    layout_of,
    local_part,
    reshard,
    take_part,
    total_norm,
)
from .sharding.mesh import Mesh, build_mesh, check_axes
from .sharding.meta_init import meta_parameters
from .step_data_parallel import StepDataParallel
from .steps.model import BaseModel, SupervisedModel
from .steps.preprocess import DataPreprocessor
from .steps.step import (
    SingleDevice,
    StepFunction,
    check_step_function,
    parse_losses,
    with_train_step,
)
from .steps.step_checks import detect_anomalous_params
from .steps.weight_init import BaseModule, initialize
from .wrapping import (
    auto,
    compile_step,
    is_model_wrapper,
    is_module_wrapper,
    steps_in_group_only,
    wrap_model,
    wrapper_misfits,
)

if TYPE_CHECKING:
    from .fsdp.fully_sharded import StepFullyShardedDataParallel
    from .optimizers.post_local_sgd import PostLocalSGD, ZeroRedundancyOptimizer
    from .sharding.tensor_parallel import parallelize

# Imported when they are asked for: what they need of torch takes as long as half of torch.
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
    "Layout",
    "LossWeight",
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
    "StepFunction",
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
    "compile_step",
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
    "refuse_single_step",
    "refuse_without_closure",
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
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LATER[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
