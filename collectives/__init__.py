"""Who am I among the ranks, and what do all of them know together?"""

from .barrier import synchronize
from .errors import CollectiveError
from .files import all_gather_object_cpu, all_gather_object_gpu, create_tmpdir
from .objects import all_gather_object, broadcast, gather_object, pad_to_largest_tensor
from .picklable import PicklableWrapper
from .process import (
    comm_device,
    distributed_available,
    get_local_rank,
    get_rank,
    get_world_size,
    rank_zero_only,
)
from .reduce import all_reduce_dict, reduce_mean
from .results import collect_results
from .scalars import mean_scalars
from .seed import sync_random_seed
from .serialize import obj2tensor, serialize_to_tensor, tensor2obj
from .trace import CollectiveRecord, recent_collectives, trace_collectives

__all__ = [
    "CollectiveError",
    "CollectiveRecord",
    "PicklableWrapper",
    "all_gather_object",
    "all_gather_object_cpu",
    "all_gather_object_gpu",
    "all_reduce_dict",
    "broadcast",
    "collect_results",
    "comm_device",
    "create_tmpdir",
    "distributed_available",
    "gather_object",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "mean_scalars",
    "obj2tensor",
    "pad_to_largest_tensor",
    "rank_zero_only",
    "recent_collectives",
    "reduce_mean",
    "serialize_to_tensor",
    "sync_random_seed",
    "synchronize",
    "tensor2obj",
    "trace_collectives",
]
