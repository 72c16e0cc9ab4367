"""A world: named processes with RPC and collectives over one meeting place."""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, ClassVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ..collectives import CollectiveGroup
from ._agent import Agent, check_rank, on_loopback
from ._members import agree_on_members, check_members, leave_together, own_place
from ._node import Node
from ._store import MeetingPlace, open_place
from .group import RpcGroup


class World:
    """The processes that a program consists of, by name; one at a time in a process.

    With RPC its members call each other in groups (`create_rpc_group`); with collectives its
    ranks reduce and gather (`create_collective_group`). All meet at one place: where the default
    process group has its store, if there is one (inside `stepwrap.runner.launch`); at MASTER_ADDR,
    if that is set (torchrun); else at `dist_init_method`, where rank 0 listens on that address
    alone. What members send is executed: a world belongs on a trusted network.

        with World("trainer") as world:
            group = world.create_rpc_group("all", world.get_members())

    Every member must make it, and stop it: leaving the `with` block does. It is ready for calls
    before any other member can make one.

    Args:
        name: this process's name, unique in the world.
        rank: its number; -1 takes that of the default process group, else RANK.
        world_size: how many members there are; -1 as for `rank`, with WORLD_SIZE.
        init_dist: whether there are collectives. A default process group that exists already is
            used, and left alone in the end.
        init_rpc: whether there are calls.
        dist_backend: of the default process group, where the world makes it.
        dist_init_method: where the members meet: tcp://host:port, env:// or file:///path.
        rpc_init_method: kept for callers that give it; calls use the meeting place above.
        dist_timeout: of collectives and of the meeting, in seconds.
        rpc_timeout: of calls, in seconds; 0 waits as long as it takes.
        device_maps: by the name of a member, which of its devices each of ours becomes, for
            tensors that travel from GPU to GPU.
        rpc_threads: how many calls are served at once.

    Raises:
        RuntimeError: there is a world in this process.
        ValueError: no rank or world size, or ones that do not fit; two members with one name.
        RpcError: members have not come in time.
    """

    _current: ClassVar[World | None] = None
    _making: ClassVar[threading.Lock] = threading.Lock()

    def __init__(  # noqa: PLR0913 - the documented signature
        self,
        name: str,
        rank: int = -1,
        world_size: int = -1,
        init_dist: bool = True,
        init_rpc: bool = True,
        dist_backend: str = "gloo",
        dist_init_method: str | None = None,
        rpc_init_method: str | None = None,
        dist_timeout: float = 60,
        rpc_timeout: float = 60,
        *,
        device_maps: Mapping[str, Mapping[int, int]] | None = None,
        rpc_threads: int = 16,
    ) -> None:
        self.name = name
        self.rank, self.world_size = own_place(rank, world_size)
        self.rpc_timeout = rpc_timeout
        self.dist_timeout = dist_timeout
        self.started = False
        # Bound once: what is unregistered must be what was registered.
        self._leave = partial(self.stop, graceful=False)
        self._meeting: MeetingPlace | None = None
        self._node: Node | None = None
        self._agent: Agent | None = None
        self._collective_groups: list[CollectiveGroup] = []
        with World._making, contextlib.ExitStack() as undo:
            if init_rpc:
                check_rank(self.rank)
            meeting = self._meet(dist_init_method or rpc_init_method, undo)
            with on_loopback(meeting.is_local):
                if init_dist and not dist.is_initialized():
                    _start_collectives(self, meeting.store, dist_backend)
                    undo.callback(dist.destroy_process_group)
                if init_rpc:
                    self._start_rpc(meeting.store, rpc_threads, device_maps or {}, undo)
            self._ends = undo.pop_all()
        self.started = True
        atexit.register(self._leave)

    def get_ranks(self) -> list[int]:
        """Return the ranks of all members, sorted."""
        return sorted(self.rank_name_map)

    def get_members(self) -> list[str]:
        """Return the names of all members, sorted."""
        return sorted(self.rank_name_map.values())

    @property
    def groups(self) -> dict[str, RpcGroup]:
        """The living groups that this process has made, by name."""
        return {} if self._node is None else dict(self._node.groups)

    @property
    def lut_manager(self) -> str:
        """The name of the member that keeps the tables of all groups: rank 0."""
        return self.rank_name_map[0]

    def create_collective_group(
        self, ranks: Iterable[int], timeout: float = 60, backend: str | None = None
    ) -> CollectiveGroup:
        """Make a group for collectives; every process of the world must call it, in one order.

        Args:
            ranks: of its members.
            timeout: of its collectives, in seconds.
            backend: default: that of the world.

        Raises:
            RuntimeError: the world has no collectives, or has been stopped.
            ValueError: a rank that there is not.
        """
        _check_started(self)
        if not dist.is_initialized():
            raise RuntimeError("this world has no collectives: it was made with init_dist=False")
        assert self._meeting is not None
        with on_loopback(self._meeting.is_local):
            group = CollectiveGroup.create(ranks, timeout_s=timeout, backend=backend)
        living = [one for one in self._collective_groups if not one.destroyed]
        self._collective_groups = [*living, group]
        return group

    def create_rpc_group(
        self, group_name: str, members: Iterable[str], timeout: float = -1
    ) -> RpcGroup:
        """Make a group of named processes; all of them must call it, and nobody else.

        Args:
            group_name: unique among the living groups of each member.
            members: their names.
            timeout: how long to wait for the others, in seconds; -1 is the world's.

        Raises:
            RuntimeError: this process is no member, has a group of that name, or the world has
                no calls.
            ValueError: a name that nobody has, or other members in another process.
            RpcError: members are gone or have not come in time; they are named.
        """
        _check_started(self)
        node = self._node
        if node is None:
            raise RuntimeError("this world has no calls: it was made with init_rpc=False")
        names = tuple(sorted(set(members)))
        check_members(names, node.members)
        if self.name not in names:
            raise RuntimeError(f"Creator Process [{self.name}] not in Group [{group_name}]")
        group = RpcGroup(group_name, names)
        with node.lock:
            if node.groups.setdefault(group_name, group) is not group:
                raise RuntimeError(f"Group {group_name} already exists!")
        try:
            node.wait_for_withdrawal(group_name)
            limit = self.rpc_timeout if timeout == -1 else timeout
            what = f"group {group_name!r}"
            group.generation = node.meet_all(("group", group_name), names, what, limit)
        except BaseException:
            group.destroy()
            raise
        return group

    def stop(self, timeout: float | None = None, graceful: bool = True) -> None:
        """Leave the world; nothing of it stays in this process. May be called again.

        Until all members have come to their own stop, this process goes on answering calls.
        Members that have died are not waited for.

        Args:
            timeout: how long to wait for the others, in seconds (default: the world's
                `rpc_timeout`, else 60).
            graceful: False leaves at once, which breaks the calls of others to this process.

        Raises:
            RpcError: members have not come in time; they are named. The world is stopped here.
        """
        with World._making:
            if not self.started:
                return
            self.started = False
        try:
            if graceful:
                _part(self, timeout or self.rpc_timeout or 60.0)
        finally:
            atexit.unregister(self._leave)
            self._ends.close()

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error the others should not wait for this process, but be told.
        self.stop(graceful=error is None)

    def __reduce__(self) -> Any:
        raise RuntimeError("a World belongs to its process and cannot be pickled")

    def __repr__(self) -> str:
        state = "started" if self.started else "stopped"
        return f"World({self.name!r}, rank {self.rank} of {self.world_size}, {state})"

    def _meet(self, place: str | None, undo: contextlib.ExitStack) -> MeetingPlace:
        """Find the other members, and become this process's world."""
        if World._current is not None:
            raise RuntimeError(
                f"World could only be initialized once! Stop {World._current.name!r} before "
                "making another one"
            )
        self._meeting = open_place(place, self.rank, self.world_size, self.dist_timeout)
        undo.callback(self._forget)
        self.rank_name_map = agree_on_members(
            self._meeting.store,
            name=self.name,
            rank=self.rank,
            world_size=self.world_size,
            timeout_s=self.dist_timeout,
        )
        World._current = self
        return self._meeting

    def _start_rpc(
        self,
        store: Store,
        threads: int,
        device_maps: Mapping[str, Mapping[int, int]],
        undo: contextlib.ExitStack,
    ) -> None:
        self._node = Node(self.name, self.rank_name_map, self.rpc_timeout)
        self._agent = Agent(self._node, self.rank, self.world_size)
        undo.callback(self._agent.stop)
        self._agent.start(store, threads, device_maps)

    def _forget(self) -> None:
        for group in self._collective_groups:
            group.destroy()
        # The port is free when the last reference to the store is gone.
        self._meeting = self._node = self._agent = None
        if World._current is self:
            World._current = None


def _start_collectives(world: World, store: Store, backend: str) -> None:
    dist.init_process_group(
        backend,
        store=PrefixStore("dist", store),
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=world.dist_timeout),
    )


def _part(world: World, timeout_s: float) -> None:
    assert world._meeting is not None
    world._meeting.close()
    if world._agent is not None:
        world._agent.part(timeout_s)
    else:
        leave_together(world._meeting.store, world.rank, world.rank_name_map, timeout_s)


def _check_started(world: World) -> None:
    if not world.started:
        raise RuntimeError(f"the world of {world.name!r} has been stopped")


def get_world() -> World | None:
    """Return the world of this process, None without one."""
    return World._current


def is_world_initialized() -> bool:
    """Return whether this process is in a world."""
    return World._current is not None


def get_cur_rank() -> int:
    """Return this process's rank in its world.

    Raises:
        RuntimeError: there is no world.
    """
    return _living_world().rank


def get_cur_name() -> str:
    """Return this process's name in its world.

    Raises:
        RuntimeError: there is no world.
    """
    return _living_world().name


def _living_world() -> World:
    if World._current is None:
        raise RuntimeError("Distributed environment not initialized!")
    return World._current
