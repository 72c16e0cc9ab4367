"""A world for the length of a test, and what is raised in it."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from ranks import run_ranks

from stepwrap.parallel import RemoteTraceback
from stepwrap.rpc import RpcGroup, World

Body = Callable[..., Any]


def remote_traceback(error: BaseException) -> str:
    """Return the traceback with which an error came from another process."""
    assert isinstance(error.__cause__, RemoteTraceback)
    return str(error.__cause__)


def told(fn: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """Return type and text of what is raised."""
    try:
        fn(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def rank_without_group() -> int:
    """Return this process's rank and end its group, so that the world has to find its members.

    A process keeps its rank from world to world: torch's RPC allows no other.
    """
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    return rank


def in_group(body: Body, size: int = 3, *args: Any) -> list[Any]:
    """Run `body(world, group, *args)` on every rank, in a group of all, and meet at the end."""
    return run_ranks(_in_group, size, body, *args)


def _in_group(body: Body, *args: Any) -> Any:
    with World(f"w{dist.get_rank()}", rpc_timeout=20) as world:
        group: RpcGroup = world.create_rpc_group("all", world.get_members())
        result = body(world, group, *args)
        group.barrier()
    return result
