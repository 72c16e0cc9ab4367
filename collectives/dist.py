"""The distributed functions under mmengine's names.

``from mmengine.dist import X`` becomes ``from stepwrap.collectives.dist import X``.
"""

import os
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

import torch
from torch import distributed

from .errors import Group
from .objects import objects
from .objects.agree import results_of_all
from .objects.objects import sync_random_seed
from .objects.results import collect_results, collect_results_cpu, collect_results_gpu
from .process import ranks
from .process.init import infer_launcher, inherit_timeout, init_dist
from .process.ranks import comm_device as get_comm_device
from .process.ranks import distributed_available as is_distributed
from .process.ranks import get_rank, get_world_size, live_world_size, members, place_in_group
from .process.ranks import rank_zero_only as master_only
from .process.slurm import slurm_tasks, tasks_here
from .tensors.dicts import all_reduce_dict_in_place as all_reduce_dict
from .tensors.dicts import all_reduce_params
from .tensors.tensors import all_gather, all_reduce, broadcast, gather, synchronize
from .trace.calling import calling

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

_T = TypeVar("_T")
# The local group of each default group. The references are weak: an object that remains after
# `destroy_process_group` would keep threads running, and these abort the process at exit.
_local: weakref.WeakKeyDictionary[
    distributed.ProcessGroup, weakref.ref[distributed.ProcessGroup]
] = weakref.WeakKeyDictionary()


def all_gather_object(data: _T, group: Group = None) -> list[_T]:
    """Return the objects of all ranks, in rank order; every rank must call this."""
    return objects.all_gather_object(data, group)


def gather_object(data: _T, dst: int = 0, group: Group = None) -> list[_T] | None:
    """Return the objects of all ranks on global rank ``dst``, None on the others.

    Every rank must call this.
    """
    return objects.gather_object(data, dst, group)


def broadcast_object_list(data: list[Any], src: int = 0, group: Group = None) -> None:
    """Overwrite a list with the objects of global rank ``src``; every rank must call this.

    Raises:
        AssertionError: on every rank, if ``data`` is not a list on some rank.
        ValueError: on every rank, if ``src`` is not a rank of the group, or if ``src`` or the
            lengths of the lists differ between ranks.
        CollectiveError: on every rank, if an object cannot be pickled or unpickled; or if a rank
            does not take part.
    """

    def check() -> str:
        if not isinstance(data, list):
            raise AssertionError(f"data must be a list, got {type(data).__name__}")
        place_in_group(src, group)
        return f"{len(data)} objects from rank {src}"

    if live_world_size(group) == 1:
        check()
        return
    with calling("broadcast_object_list", group, has_headers=True):
        requests = results_of_all(check, group, "broadcast_object_list() ")
        if len(set(requests)) > 1:
            by_rank = dict(zip(members(group), requests, strict=True))
            raise ValueError(f"all ranks must pass one src and equally many objects, got {by_rank}")
        data[:] = objects.broadcast(data, src, group)


def get_default_group() -> distributed.ProcessGroup | None:
    """Return the default process group, None without one."""
    return distributed.group.WORLD if is_distributed() else None


def get_backend(group: Group = None) -> str | None:
    """Return the name of the group's backend in lower case, None without a process group.

    Several backends are returned in torch's form, such as "cpu:gloo,cuda:nccl".

    Raises:
        ValueError: this process is not a member of the group.
    """
    if not is_distributed():
        return None
    live_world_size(group)
    config = distributed.get_backend_config(group).lower()
    names = {pair.split(":")[1] for pair in config.split(",")}
    return names.pop() if len(names) == 1 else config


def get_dist_info(group: Group = None) -> tuple[int, int]:
    """Return rank and world size, (-1, -1) if this process is not a member of the group."""
    return get_rank(group), get_world_size(group)


def is_main_process(group: Group = None) -> bool:
    """Return whether ``get_rank(group)`` is 0; without a group, the launcher decides."""
    return get_rank(group) == 0


def barrier(group: Group = None, timeout_s: float | None = None) -> None:
    """Wait for every rank of the group; see ``stepwrap.collectives.synchronize``."""
    synchronize(timeout_s, group)


def init_local_group(node_rank: int, num_gpus_per_node: int) -> None:
    """Create the group of this host's ranks; every rank must call this.

    Args:
        node_rank: the number of this host; its first rank is ``node_rank * num_gpus_per_node``.
        num_gpus_per_node: the number of ranks per host; the last host may have fewer.

    Raises:
        ValueError: on every rank, if ``num_gpus_per_node`` is not the same positive number on all
            ranks, or if ``node_rank`` is not the rank divided by it, rounded down.
    """
    if not is_distributed():
        return
    _check_places(all_gather_object((node_rank, num_gpus_per_node)))
    everyone, world = members(), get_default_group()
    assert world is not None
    # Every rank must create the groups of all hosts, because torch names groups by counting calls.
    with calling("init_local_group"):
        for start in range(0, len(everyone), num_gpus_per_node):
            local_ranks = everyone[start : start + num_gpus_per_node]
            group = distributed.new_group(local_ranks)
            inherit_timeout(group)
            if distributed.get_rank() in local_ranks:
                _local[world] = weakref.ref(group)


def get_local_group() -> distributed.ProcessGroup | None:
    """Return the group created by ``init_local_group``, None without a process group.

    Raises:
        RuntimeError: ``init_local_group`` has not been called.
    """
    if not is_distributed():
        return None
    group = _live_local_group()
    if group is None:
        raise RuntimeError("the local group must exist: call init_local_group() on all ranks first")
    return group


def get_local_size() -> int:
    """Return the number of ranks on this host, 1 without a process group.

    The first of these that exists is used: the local group, LOCAL_WORLD_SIZE, Open MPI's variable,
    Slurm's variable.

    Raises:
        RuntimeError: none of them exists.
    """
    if not is_distributed():
        return 1
    group = _live_local_group()
    if group is not None:
        return distributed.get_world_size(group)
    text = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    size = int(text) if text else tasks_here(os.environ) if slurm_tasks(os.environ) else None
    if size is None:
        raise RuntimeError(
            "the number of ranks on this host is unknown: call init_local_group() on all ranks "
            "or set LOCAL_WORLD_SIZE"
        )
    return size


def get_local_rank() -> int:
    """Return this process's rank on its host.

    This is the rank in the local group. Without a local group, it is the result of
    ``stepwrap.collectives.get_local_rank``; then every rank must call this unless a launcher has
    set the local rank.
    """
    group = _live_local_group()
    return ranks.get_local_rank() if group is None else distributed.get_rank(group)


def _live_local_group() -> distributed.ProcessGroup | None:
    world = get_default_group()
    local = None if world is None else _local.get(world)
    return None if local is None else local()


def _check_places(positions: list[tuple[int, int]]) -> None:
    size = positions[0][1]
    if size < 1:
        raise ValueError(f"num_gpus_per_node must be positive, got {size} on rank 0")
    for rank, (node, own_size) in enumerate(positions):
        if own_size != size:
            raise ValueError(
                "num_gpus_per_node must be the same number on all ranks, "
                f"got {size} on rank 0 and {own_size} on rank {rank}"
            )
        if node != rank // size:
            raise ValueError(
                f"node_rank must be {rank // size} on rank {rank} with {size} ranks per node, "
                f"got {node}"
            )


def get_data_device(data: object) -> torch.device:
    """Return the common device of all tensors in nested lists, tuples, sets and dicts.

    Raises:
        ValueError: the tensors are on different devices, or a container is empty.
        TypeError: an element is neither a tensor nor a container.
    """
    devices = list(dict.fromkeys(tensor.device for tensor in _tensors(data)))
    if len(devices) > 1:
        got = ", ".join(map(str, devices))
        raise ValueError(f"device type in data should be consistent, but got {got}")
    return devices[0]


def cast_data_device(data: _T, device: torch.device | str, out: _T | None = None) -> _T:
    """Return nested tensors on a device; tensors that are there already are not copied.

    Lists, tuples, namedtuples, sets and dicts of any class are rebuilt in their own class.

    Args:
        data: tensors in nested containers.
        device: the target device.
        out: tensors nested in the same way, which are filled in place as well.

    Raises:
        ValueError: a container is empty, or ``out`` has other lengths, keys or shapes.
        TypeError: an element is neither a tensor nor a container, or ``out`` has another class, or
            is a set, which has no order. After an error ``out`` is unchanged.
    """
    # Check all pairs before the first copy, so that an error leaves `out` unchanged.
    pairs = [] if out is None else list(_paired(data, out))
    moved = _move(data, torch.device(device))
    for source, target in pairs:
        target.copy_(source)
    return moved  # type: ignore[no-any-return]


def _children(data: object, listed: str = "list") -> list[Any]:
    """Return the elements of a container, or the values of a mapping."""
    if isinstance(data, Mapping):
        children = list(data.values())
    elif isinstance(data, list | tuple | AbstractSet):
        children = list(data)
    else:
        raise TypeError(
            f"data should be a Tensor, {listed} of tensor or dict, but got {type(data).__name__}"
        )
    if not children:
        raise ValueError(f"data should not be empty, but got {data!r}")
    return children


def _tensors(data: object) -> Iterator[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        yield data
    else:
        for child in _children(data, "sequence"):
            yield from _tensors(child)


def _move(data: Any, device: torch.device) -> Any:
    if isinstance(data, torch.Tensor):
        return data.to(device)
    children = [_move(child, device) for child in _children(data)]
    if isinstance(data, Mapping):
        entries = dict(zip(data, children, strict=True))
        if isinstance(data, defaultdict):
            return type(data)(data.default_factory, entries)
        return type(data)(entries)  # type: ignore[call-arg]
    # The constructor of a namedtuple takes its fields as separate arguments.
    return type(data)(*children) if hasattr(data, "_fields") else type(data)(children)


def _paired(data: Any, out: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each tensor of data with its counterpart in out."""
    if isinstance(data, torch.Tensor) and isinstance(out, torch.Tensor):
        if data.shape != out.shape:
            got = f"{tuple(out.shape)} for {tuple(data.shape)}"
            raise ValueError(f"out should have the shape of data, but got {got}")
        yield data, out
        return
    if type(data) is not type(out):
        got = f"{type(out).__name__} for {type(data).__name__}"
        raise TypeError(f"out should be the same type with data, but got {got}")
    if isinstance(out, AbstractSet):
        raise TypeError("out should not be a set")
    children = _children(data)
    targets = list(out)
    if isinstance(data, Mapping):
        missing = [key for key in data if key not in out]
        extra = [key for key in out if key not in data]
        if missing or extra:
            raise ValueError(
                f"out should have the keys of data, but lacks {missing} and has {extra} as well"
            )
        targets = [out[key] for key in data]
    if len(children) != len(targets):
        got = f"{len(targets)} for {len(children)}"
        raise ValueError(f"out should have the length of data, but got {got}")
    for child, target in zip(children, targets, strict=True):
        yield from _paired(child, target)
