"""Ranks, process groups, and collectives on Python objects, tensors and dicts of tensors."""

from .backends.base import BaseDistBackend, TensorBaseDistBackend
from .backends.metric import BaseMetric, metric_sync
from .backends.mpi import MPI4PyDist
from .backends.registry import (
    get_dist_backend,
    list_all_backends,
    register_dist_backend,
    set_default_dist_backend,
    unregister_dist_backend,
)
from .backends.torch_backends import NonDist, TorchCPUDist, TorchCUDADist, TorchDist
from .errors import CollectiveError, name_ranks
from .groups.group import CollectiveGroup
from .groups.operations import CollectiveHandle
from .objects.agree import failure_of, run_together
from .objects.objects import (
    all_gather_object,
    broadcast,
    gather_object,
    pad_to_largest_tensor,
    sync_random_seed,
)
from .objects.results import (
    all_gather_object_cpu,
    all_gather_object_gpu,
    collect_results,
    create_tmpdir,
)
from .objects.serialize import PicklableWrapper, obj2tensor, serialize_to_tensor, tensor2obj
from .process.init import (
    agent_store,
    all_on_one_host,
    end_group,
    forget_meshes,
    is_loopback,
    meet_at_master,
    open_store,
)
from .process.ranks import (
    comm_device,
    distributed_available,
    get_local_rank,
    get_rank,
    get_world_size,
    rank_zero_only,
)
from .process.slurm import adopt_slurm
from .tensors.dicts import all_reduce_dict
from .tensors.scalars import mean_scalars
from .tensors.tensors import all_gather, all_reduce, gather, reduce_mean, synchronize
from .trace.calling import Progress, calling, explain_transport, in_progress
from .trace.tracing import CollectiveRecord, is_tracing, recent_collectives, trace_collectives

__all__ = [
    "BaseDistBackend",
    "BaseMetric",
    "CollectiveError",
    "CollectiveGroup",
    "CollectiveHandle",
    "CollectiveRecord",
    "MPI4PyDist",
    "NonDist",
    "PicklableWrapper",
    "Progress",
    "TensorBaseDistBackend",
    "TorchCPUDist",
    "TorchCUDADist",
    "TorchDist",
    "adopt_slurm",
    "agent_store",
    "all_gather",
    "all_gather_object",
    "all_gather_object_cpu",
    "all_gather_object_gpu",
    "all_on_one_host",
    "all_reduce",
    "all_reduce_dict",
    "broadcast",
    "calling",
    "collect_results",
    "comm_device",
    "create_tmpdir",
    "distributed_available",
    "end_group",
    "explain_transport",
    "failure_of",
    "forget_meshes",
    "gather",
    "gather_object",
    "get_dist_backend",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "in_progress",
    "is_loopback",
    "is_tracing",
    "list_all_backends",
    "mean_scalars",
    "meet_at_master",
    "metric_sync",
    "name_ranks",
    "obj2tensor",
    "open_store",
    "pad_to_largest_tensor",
    "rank_zero_only",
    "recent_collectives",
    "reduce_mean",
    "register_dist_backend",
    "run_together",
    "serialize_to_tensor",
    "set_default_dist_backend",
    "sync_random_seed",
    "synchronize",
    "tensor2obj",
    "trace_collectives",
    "unregister_dist_backend",
]
