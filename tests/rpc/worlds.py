"""A world for the duration of a test, and the errors raised in it."""

import functools
import multiprocessing
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from ranks import run_ranks

from stepwrap.parallel import RemoteTraceback
from stepwrap.rpc import (
    OrderedServerBase,
    OrderedServerSimpleImpl,
    PushPullModelServer,
    PushPullModelServerImpl,
    RpcGroup,
    World,
)

Body = Callable[..., Any]
_messages = threading.Semaphore(0)


def let_go() -> None:
    """Called in another member by rpc: let its `wait_for_members` continue."""
    _messages.release()


def wait_for_members(count: int) -> None:
    """Wait until `count` other members have called `let_go` here."""
    for _ in range(count):
        assert _messages.acquire(timeout=60)


def remote_traceback(error: BaseException) -> str:
    """Return the traceback that an error brought from another process."""
    assert isinstance(error.__cause__, RemoteTraceback)
    return str(error.__cause__)


def raised_by(fn: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """Return the type and text of the error that a call raises."""
    try:
        fn(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def catch_error(fn: Any, *args: Any, **kwargs: Any) -> str:
    """Return the error that a call raises as "Type: text"."""
    return ": ".join(raised_by(fn, *args, **kwargs))


def rank_without_group() -> int:
    """Return this process's rank and destroy its group, so that the world must find its members.

    torch's RPC requires that a process keeps its rank in all worlds.
    """
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    return rank


def run_group(body: Body, size: int = 3, *args: Any, **options: Any) -> list[Any]:
    """Run `body(world, group, *args)` on every rank in a group of all; end with a barrier."""
    return run_ranks(_run_group, size, body, options, *args)


def _run_group(body: Body, options: dict[str, Any], *args: Any) -> Any:
    with World(f"w{dist.get_rank()}", **{"rpc_timeout": 30} | options) as world:
        group: RpcGroup = world.create_rpc_group("all", world.get_members())
        result = body(world, group, *args)
        group.barrier()
    return result


def model_client(group: RpcGroup, **options: Any) -> PushPullModelServer:
    """Start a model server on w0 and return its client; all members must call this."""
    if group.get_cur_name() == "w0":
        PushPullModelServerImpl("server", group, **options)
    group.barrier()
    server: PushPullModelServer = group.get_paired("server").to_here()
    return server


class Local(OrderedServerBase):
    """An ordered server that keeps one value in this process."""

    kept: tuple[Any, Any] | None = None

    def push(self, key: Any, value: Any, version: Any, prev_version: Any) -> bool:
        self.kept = value, version
        return True

    def pull(self, key: Any, version: Any = None) -> tuple[Any, Any] | None:
        return self.kept


def ordered_server(depth: Any = 1, *, is_member: bool = True, **options: Any) -> Any:
    """Return a server in a group that has only the documented methods."""
    group: Any = SimpleNamespace(
        pair=lambda key, value, /: None,
        register=lambda key, service, /: None,
        is_member=lambda: is_member,
    )
    return OrderedServerSimpleImpl("server", group, depth, **options)


def run_world(size: int) -> Callable[[Body], Callable[[], None]]:
    """Run the body of a test on every rank by `run_group`."""

    def decorate(test: Body) -> Callable[[], None]:
        @functools.wraps(test)
        def run(*test_args: Any) -> None:
            if test_args:
                test(*test_args)
            else:
                run_group(run, size)

        # Otherwise pytest takes the world and the group for fixtures.
        del run.__wrapped__  # type: ignore[attr-defined]
        return run

    return decorate


def run_and_expect(codes: list[int], fn: Any, *args: Any) -> None:
    """Run `fn(rank, *args)` in one process per expected exit code."""
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=fn, args=(rank, *args)) for rank in range(len(codes))]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(90)
        assert [process.exitcode for process in processes] == codes
    finally:
        for process in processes:
            process.kill()
            process.join()
