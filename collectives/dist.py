"""The distributed functions under mmengine's names.

`from mmengine.dist import X` becomes `from stepwrap.collectives.dist import X`.
"""

import os
from collections.abc import Sequence
from typing import TypeVar

from torch import distributed

from .groups.local_group import (
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
from .objects import objects, results
from .objects.results import collect_results
from .objects.seed import sync_random_seed
from .process.devices import cast_data_device, get_comm_device, get_data_device
from .process.init import infer_launcher, init_dist
from .process.ranks import get_rank, get_world_size
from .process.ranks import rank_zero_only as master_only
from .tensors.params import all_reduce_dict, all_reduce_params, broadcast_object_list
from .tensors.tensors import all_gather, all_reduce, broadcast, gather

_T = TypeVar("_T")

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


def all_gather_object(data: _T, group: distributed.ProcessGroup | None = None) -> list[_T]:
    """Return the objects of all ranks, in rank order; every rank must call this."""
    return objects.all_gather_object(data, group)


def gather_object(
    data: _T, dst: int = 0, group: distributed.ProcessGroup | None = None
) -> list[_T] | None:
    """Return the objects of all ranks on global rank `dst`; every rank must call this."""
    return objects.gather_object(data, dst, group)


def collect_results_cpu(
    result_part: Sequence[_T],
    size: int,
    tmpdir: str | os.PathLike[str] | None = None,
    group: distributed.ProcessGroup | None = None,
    *,
    remove_tmpdir: bool = False,
) -> list[_T] | None:
    """Like `collect_results` with device "cpu"; every rank must call this."""
    return results.collect_results_cpu(
        result_part, size, tmpdir, group, remove_tmpdir=remove_tmpdir
    )


def collect_results_gpu(
    result_part: Sequence[_T], size: int, group: distributed.ProcessGroup | None = None
) -> list[_T] | None:
    """Like `collect_results` with device "gpu"; every rank must call this."""
    return results.collect_results_gpu(result_part, size, group)
