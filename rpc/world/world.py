"""A world: named processes with RPC and collectives over one meeting place."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed import PrefixStore

from ...collectives import CollectiveGroup, forget_meshes
from ..calls.directory import did_you_mean
from ..calls.group import RpcGroup
from ..calls.node import Node
from .agent import Agent, check_rank, on_loopback
from .members import Member, agree_on_members, leave_together, together
from .store import MeetingPlace, find_place, own_place

# How long the end may take of a process that does not wait for the others.
_AT_ONCE_S = 1.0


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
    before any other member can make one. docs/rpc.md describes each argument.

    Args:
        name: unique in the world: up to 127 of letters, digits, underscores, colons and dashes.
        rank: -1 takes that of the default process group, else RANK; `world_size` likewise.
        init_dist: whether there are collectives. A default process group that exists already is
            used, and left alone in the end.
        dist_init_method: where the members meet: tcp://host:port, env:// or file:///path.
        rpc_init_method: where they meet if `dist_init_method` is not given.
        dist_timeout: how long to wait for the others while the world begins, and the time-out of
            collectives of a default process group that the world makes; in seconds, more than 0.
        rpc_timeout: of calls, in seconds; 0 waits as long as it takes.
        device_maps: by the name of a member, which of its devices each of ours becomes.

    Raises:
        RuntimeError: there is a world in this process, or this one was stopped while it was made.
        ValueError: a setting that cannot be, or differs among the members; two with one name.
        RpcError: members have not come in time, or have died; they are named.
    """

    _current: ClassVar[World | None] = None
    # The world that this process has or is making: claimed without a lock, which a signal's
    # handler that stops the world would find held.
    _claims: ClassVar[dict[str, World]] = {}

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
        _check_times(dist_timeout, rpc_timeout)
        self.name = name
        self.rank, self.world_size = own_place(rank, world_size)
        self.rpc_timeout = rpc_timeout
        self.dist_timeout = dist_timeout
        self.started = False
        # Bound once: what is unregistered must be what was registered.
        self._leave = partial(self.stop, graceful=False)
        self._ending = _Ending()
        self._ends: contextlib.ExitStack | None = None
        self._meeting: MeetingPlace | None = None
        self._node: Node | None = None
        self._agent: Agent | None = None
        self._collective_groups: list[CollectiveGroup] = []
        with contextlib.ExitStack() as undo:
            self._claim(undo)
            if init_rpc:
                check_rank(self.rank)
            settings = {"init_dist": init_dist, "init_rpc": init_rpc, "dist_backend": dist_backend}
            meeting = self._meet(dist_init_method or rpc_init_method, settings)
            with on_loopback(meeting.is_local):
                if init_dist and not dist.is_initialized():
                    _start_collectives(self, meeting, dist_backend, undo)
                if init_rpc:
                    _start_rpc(self, meeting, rpc_threads, device_maps or {}, undo)
            self._ending.check_wanted(name)
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
            timeout: of its collectives, in seconds.
            backend: default: that of the world.
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
        for name in names:
            if name not in node.members:
                known = ", ".join(map(repr, node.members))
                hint = did_you_mean(name, node.members)
                raise ValueError(f"{name!r} is no member of the world: {known}{hint}")
        if self.name not in names:
            raise RuntimeError(f"Creator Process [{self.name}] not in Group [{group_name}]")
        group = RpcGroup(group_name, names)
        with node.lock:
            is_new = node.groups.setdefault(group_name, group) is group
        if not is_new:
            raise RuntimeError(f"Group {group_name} already exists!")
        try:
            node.wait_for_withdrawal(group_name)
            limit = self.rpc_timeout if timeout == -1 else timeout
            what = f"group {group_name!r}"
            group.generation = node.meet(("group", group_name), names, what, limit).number
        except BaseException:
            group.destroy()
            raise
        return group

    def stop(self, timeout: float | None = None, graceful: bool = True) -> None:
        """Leave the world; nothing of it stays in this process. May be called again.

        Until all members have come to their own stop, this process goes on answering calls.
        Members that have died are not waited for.

        A call that comes while another thread ends the world waits for that; one that comes while
        the world is made has the constructor raise.

        Args:
            timeout: how long all of this may take, in seconds (default: the world's `rpc_timeout`,
                else 60). Functions that still serve others then are left to themselves.
            graceful: False leaves at once, which breaks the calls of others to this process.

        Raises:
            RpcError: members have not come in time; they are named. The world is stopped here.
        """
        limit = timeout or self.rpc_timeout or 60.0
        if self._ends is None:
            # A signal's handler or another thread, while the world is made.
            self._ending.is_cancelled = True
            return
        if not self._ending.claim(limit):
            return
        self.started = False
        at_once_s = _AT_ONCE_S if timeout is None else timeout
        self._ending.begin(limit if graceful else at_once_s)
        try:
            if graceful and self._agent is not None:
                self._agent.part(limit)
            elif graceful and self._meeting is not None:
                leave_together(self._meeting, self.rank, self.rank_name_map, limit)
        finally:
            atexit.unregister(self._leave)
            try:
                self._ends.close()
            finally:
                self._ending.is_over.set()

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

    def _claim(self, undo: contextlib.ExitStack) -> None:
        undo.callback(self._forget)
        holder = World._claims.setdefault("world", self)
        if holder is not self:
            raise RuntimeError(
                f"World could only be initialized once! Stop {holder.name!r} before making "
                "another one"
            )

    def _meet(self, place: str | None, settings: dict[str, Any]) -> MeetingPlace:
        self._meeting = find_place(place, self.world_size, self.dist_timeout)
        own = Member(self.name, self.rank, {"world_size": self.world_size, **settings})
        self.rank_name_map = agree_on_members(
            self._meeting, own, self.world_size, self.dist_timeout
        )
        World._current = self
        return self._meeting

    def _forget(self) -> None:
        for group in self._collective_groups:
            group.destroy()
        # The port is free when the last reference to the store is gone.
        self._meeting = self._node = self._agent = None
        if World._current is self:
            World._current = None
        if World._claims.get("world") is self:
            del World._claims["world"]


class _Ending:
    """Who ends a world, and by when."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self.is_over = threading.Event()
        self._claims: dict[str, tuple[int, object]] = {}
        self.begin(_AT_ONCE_S)

    def check_wanted(self, name: str) -> None:
        if self.is_cancelled:
            raise RuntimeError(f"the world of {name!r} was stopped while it was made")

    def claim(self, timeout_s: float) -> bool:
        """Return whether the caller is the one to end the world; else wait until it has ended.

        There is no lock that a signal's handler could find held by the thread that it has
        interrupted; what this thread itself has begun, it does not wait for.
        """
        own = threading.get_ident(), object()
        first = self._claims.setdefault("first", own)
        if first is not own and first[0] != own[0]:
            self.is_over.wait(timeout_s)
        return first is own

    def begin(self, timeout_s: float) -> None:
        self._deadline = time.monotonic() + timeout_s

    def left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())


def _start_collectives(
    world: World, meeting: MeetingPlace, backend: str, undo: contextlib.ExitStack
) -> None:
    with together(meeting, "collectives", world.rank, world.rank_name_map):
        dist.init_process_group(
            backend,
            store=PrefixStore("dist", meeting.store),
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=world.dist_timeout),
        )
    undo.callback(_end_collectives, dist.group.WORLD)


def _end_collectives(group: dist.ProcessGroup | None) -> None:
    """End the default group, unless its user has ended it already or made another one since."""
    if dist.is_initialized() and dist.group.WORLD is group:
        forget_meshes()
        dist.destroy_process_group(group)


def _start_rpc(
    world: World,
    meeting: MeetingPlace,
    threads: int,
    device_maps: Mapping[str, Mapping[int, int]],
    undo: contextlib.ExitStack,
) -> None:
    world._node = Node(world.name, world.rank_name_map, world.rpc_timeout)
    agent = Agent(world._node, world.rank, world.dist_timeout)
    undo.callback(lambda: agent.stop(world._ending.left()))
    with together(meeting, "calls", world.rank, world.rank_name_map):
        agent.start(meeting.store, threads, device_maps)
    world._agent = agent


def _check_times(dist_timeout: float, rpc_timeout: float) -> None:
    for setting, value in (("dist_timeout", dist_timeout), ("rpc_timeout", rpc_timeout)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{setting} must be a number of seconds, got {value!r}")
    if not 0 < dist_timeout < float("inf"):
        raise ValueError(f"dist_timeout must be more than 0 seconds, got {dist_timeout}")
    if not 0 <= rpc_timeout < float("inf"):
        raise ValueError(f"rpc_timeout must be at least 0 seconds, got {rpc_timeout}")


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
    """Return this process's rank in its world; raise RuntimeError without one."""
    return _living_world().rank


def get_cur_name() -> str:
    """Return this process's name in its world; raise RuntimeError without one."""
    return _living_world().name


def _living_world() -> World:
    if World._current is None:
        raise RuntimeError("Distributed environment not initialized!")
    return World._current
