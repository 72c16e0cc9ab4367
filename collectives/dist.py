"""The distributed functions under mmengine's names.

`from mmengine.dist import X` becomes `from stepwrap.collectives.dist import X`.
"""

from .devices import cast_data_device, get_comm_device, get_data_device
from .groups import (
    barrier,
    get_backend,
    get_default_group,
    get_dist_info,
    get_local_group,
    get_local_rank,
    get_local_size,
    init_local_group,
    is_distributed,
    is_main_process,
)
from .init import infer_launcher, init_dist
from .objects import all_gather_object, gather_object
from .params import all_reduce_dict, all_reduce_params, broadcast_object_list
from .process import get_rank, get_world_size
from .process import rank_zero_only as master_only
from .results import collect_results, collect_results_cpu, collect_results_gpu
from .seed import sync_random_seed
from .tensors import all_gather, all_reduce, broadcast, gather

__all__ = [
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_dict",
    "all_reduce_params",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "cast_data_device",
    "collect_results",
    "collect_results_cpu",
    "collect_results_gpu",
    "gather",
    "gather_object",
    "get_backend",
    "get_comm_device",
    "get_data_device",
    "get_default_group",
    "get_dist_info",
    "get_local_group",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "infer_launcher",
    "init_dist",
    "init_local_group",
    "is_distributed",
    "is_main_process",
    "master_only",
    "sync_random_seed",
]
