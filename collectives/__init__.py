"""Who am I among the ranks, and what do all of them know together?"""

from .errors import CollectiveError
from .objects import all_gather_object, broadcast
from .picklable import PicklableWrapper
from .process import (
    comm_device,
    distributed_available,
    get_local_rank,
    get_rank,
    get_world_size,
    rank_zero_only,
    synchronize,
)
from .reduce import all_reduce_dict, reduce_mean
from .scalars import mean_scalars

__all__ = [
    "CollectiveError",
    "PicklableWrapper",
    "all_gather_object",
    "all_reduce_dict",
    "broadcast",
    "comm_device",
    "distributed_available",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "mean_scalars",
    "rank_zero_only",
    "reduce_mean",
    "synchronize",
]
