"""Who am I among the ranks, and what do all of them know together?"""

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
from .errors import CollectiveError
from .groups.group import CollectiveGroup
from .groups.handle import CollectiveHandle
from .objects.files import all_gather_object_cpu, all_gather_object_gpu, create_tmpdir
from .objects.objects import all_gather_object, broadcast, gather_object, pad_to_largest_tensor
from .objects.picklable import PicklableWrapper
from .objects.results import collect_results
from .objects.seed import sync_random_seed
from .process.ranks import (
    comm_device,
    distributed_available,
    get_local_rank,
    get_rank,
    get_world_size,
    rank_zero_only,
)
from .tensors.barrier import synchronize
from .tensors.reduce import all_reduce_dict, reduce_mean
from .tensors.scalars import mean_scalars
from .tensors.tensors import all_gather, all_reduce, gather
from .trace.tracing import CollectiveRecord, recent_collectives, trace_collectives
from .transport.serialize import obj2tensor, serialize_to_tensor, tensor2obj

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
    "TensorBaseDistBackend",
    "TorchCPUDist",
    "TorchCUDADist",
    "TorchDist",
    "all_gather",
    "all_gather_object",
    "all_gather_object_cpu",
    "all_gather_object_gpu",
    "all_reduce",
    "all_reduce_dict",
    "broadcast",
    "collect_results",
    "comm_device",
    "create_tmpdir",
    "distributed_available",
    "gather",
    "gather_object",
    "get_dist_backend",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "list_all_backends",
    "mean_scalars",
    "metric_sync",
    "obj2tensor",
    "pad_to_largest_tensor",
    "rank_zero_only",
    "recent_collectives",
    "reduce_mean",
    "register_dist_backend",
    "serialize_to_tensor",
    "set_default_dist_backend",
    "sync_random_seed",
    "synchronize",
    "tensor2obj",
    "trace_collectives",
    "unregister_dist_backend",
]
