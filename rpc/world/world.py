"""World: named processes with RPC and collectives."""

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
from ...primitives.suggestions import did_you_mean
from ..calls.group import RpcGroup
from ..calls.node import Node
from .agent import Agent, check_rank, listen_on_loopback
from .members import Member, agree_on_members, joint_step, leave_together
from .store import MeetingPlace, find_place, resolve_rank, warn_of_open_store, whole_number

# The time limit of a stop that does not wait for the other members.
_AT_ONCE_S = 1.0
# The longest time limit of torch's RPC: 23 days.
_NO_LIMIT_S = 2e6


class World:
    """The named processes of a program; a process can be in one world at a time.

    Members call each other in groups (``create_rpc_group``), and run collectives in groups of ranks
    (``create_collective_group``). They meet at ``dist_init_method`` if it is given. If that is a
    tcp:// address, the store of rank 0 listens at that address only. By default they meet through
    the store of the default process group if there is one (inside ``stepwrap.runner.launch``),
    otherwise at MASTER_ADDR if that is set (torchrun), otherwise at localhost:9100. Members execute
    the functions that they receive: use a trusted network only.

        with World("trainer") as world:
            group = world.create_rpc_group("all", world.get_members())

    Every member must create the world and stop it, for example by leaving the ``with`` block. When
    the constructor returns, all members can answer calls.

    Args:
        name: unique in the world: up to 127 letters, digits, underscores, colons and dashes.
        rank: -1 is the rank in the default process group, or RANK without one.
        world_size: -1 is the size of the default process group, or WORLD_SIZE without one.
        init_dist: whether the world has collectives. An existing default process group is used,
            and not destroyed at the end.
        init_rpc: whether the world has RPC.
        dist_backend: the backend of the default process group that the world creates.
        dist_init_method: where the members meet: tcp://host:port, env:// or file:///path.
        rpc_init_method: their meeting place if ``dist_init_method`` is not given.
        dist_timeout: how long to wait for the other members at the start, and the timeout of the
            default process group that the world creates; in seconds, more than 0.
        rpc_timeout: the timeout of calls in seconds; 0 means no limit.
        device_maps: for each member's name, a map from our CUDA devices to its devices.
        rpc_threads: how many calls this process serves at once; at least 1.

    Raises:
        RuntimeError: this process is already in a world, or another thread or a signal handler has
            stopped the world while it was created.
        ValueError: a setting is invalid or differs between members, or two have the same name.
        RpcError: members did not join in time or have died; the text names them.
    """

    _current: ClassVar[World | None] = None
    # The world that this process is in or creates. Claimed by the atomic `setdefault`, because a
    # signal handler that stops the world would deadlock on a lock.
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
        _check_limits(dist_timeout, rpc_timeout, rpc_threads)
        self.name = name
        self.rank, self.world_size = resolve_rank(rank, world_size)
        self.rpc_timeout = rpc_timeout
        self.dist_timeout = dist_timeout
        self.started = False
        # Stored, because atexit.unregister needs the same object as atexit.register.
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
            with listen_on_loopback(meeting.is_local):
                if init_dist and not dist.is_initialized():
                    _start_collectives(self, meeting, dist_backend, undo)
                if init_rpc:
                    _start_rpc(self, meeting, rpc_threads, device_maps or {}, undo)
            self._ending.raise_if_cancelled(name)
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
        """The living groups that this process has created, by name."""
        return {} if self._node is None else dict(self._node.groups)

    @property
    def lut_manager(self) -> str:
        """The name of the member that keeps the tables of all groups: rank 0."""
        return self.rank_name_map[0]

    def create_collective_group(
        self, ranks: Iterable[int], timeout: float = 60, backend: str | None = None
    ) -> CollectiveGroup:
        """Create a group for collectives.

        Every member of the world must call this, in the same order.

        Args:
            ranks: the ranks of the group.
            timeout: the timeout of its collectives in seconds.
            backend: of the collectives; default: the backend of the default process group.

        Raises:
            RuntimeError: the world has no collectives or was stopped.
            TypeError, ValueError: see ``CollectiveGroup.create``.
        """
        _check_started(self)
        if not dist.is_initialized():
            raise RuntimeError(
                "collectives need the default process group, which was destroyed"
                if self._has_collectives
                else "collectives need a world with init_dist=True, got init_dist=False"
            )
        assert self._meeting is not None
        with listen_on_loopback(self._meeting.is_local):
            group = CollectiveGroup.create(ranks, timeout_s=timeout, backend=backend)
        living = [
            living_group for living_group in self._collective_groups if not living_group.destroyed
        ]
        self._collective_groups = [*living, group]
        return group

    def create_rpc_group(
        self, group_name: str, members: Iterable[str], timeout: float = -1
    ) -> RpcGroup:
        """Create a group of named processes; its members, and only these, must call this.

        Args:
            group_name: unique among the living groups of each member.
            members: the names of the group's members.
            timeout: how long to wait for the others in seconds; -1 is the world's ``rpc_timeout``.

        Raises:
            RuntimeError: this process is not a member or has a group of that name, or the world
                has no RPC or was stopped.
            ValueError: a name is unknown, or processes disagree on the members.
            RpcError: members have died or did not call this in time; the text names them.
        """
        _check_started(self)
        node = self._node
        if node is None:
            raise RuntimeError("calls need a world with init_rpc=True, got init_rpc=False")
        names = tuple(sorted(set(members)))
        for name in names:
            if name not in node.members:
                member_names = ", ".join(map(repr, node.members))
                hint = did_you_mean(name, node.members, limit=1, quoted=True)
                raise ValueError(f"{name!r} is not a member of the world: {member_names}{hint}")
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
            description = f"group {group_name!r}"
            group.generation = node.meet(("group", group_name), names, description, limit).number
        except BaseException:
            group.destroy()
            raise
        return group

    def stop(self, timeout: float | None = None, graceful: bool = True) -> None:
        """Leave the world and free its resources; may be called again.

        This process keeps answering calls until all living members have called ``stop`` too. If
        another thread is ending the world, this waits for it. If the world is still being created,
        its constructor raises.

        Args:
            timeout: the time limit in seconds; default: the world's ``rpc_timeout``, or 60 if that
                is 0; 1 if not ``graceful``. Calls that are then still running here continue in the
                background. With 0, a graceful stop waits for the other members without limit. Then
                it waits for these calls for the default time.
            graceful: False leaves without waiting, so the calls of other members to this process
                fail.

        Raises:
            RpcError: members did not stop in time; the text names them. The world is stopped in
                this process nevertheless.
        """
        default_s = self.rpc_timeout or 60.0
        limit = default_s if timeout is None else timeout or _NO_LIMIT_S
        if self._ends is None:
            # Called by a signal handler or another thread while the world is created.
            self._ending.is_cancelled = True
            return
        if not self._ending.claim(limit):
            return
        self.started = False
        at_once_s = _AT_ONCE_S if timeout is None else timeout
        self._ending.begin(limit if graceful else at_once_s)
        try:
            if graceful and self._agent is not None:
                self._agent.leave(limit)
            elif graceful and self._meeting is not None:
                leave_together(self._meeting, self.rank, self.rank_name_map, limit)
        finally:
            if graceful and timeout == 0:
                self._ending.begin(default_s)
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
        # After an error, leave immediately, so that the others get errors instead of waiting.
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
                f"World could only be initialized once! Stop {holder.name!r} before creating "
                "another one"
            )

    def _meet(self, address: str | None, settings: dict[str, Any]) -> MeetingPlace:
        self._has_collectives: bool = settings["init_dist"]
        self._meeting = find_place(address, self.world_size, self.dist_timeout)
        member = Member(self.name, self.rank, {"world_size": self.world_size, **settings})
        self.rank_name_map = agree_on_members(
            self._meeting, member, self.world_size, self.dist_timeout
        )
        if self.rank == 0:
            warn_of_open_store(self._meeting)
        World._current = self
        return self._meeting

    def _forget(self) -> None:
        for group in self._collective_groups:
            group.destroy()
        # Dropping the last reference to the store frees its port.
        self._meeting = self._node = self._agent = None
        if World._current is self:
            World._current = None
        if World._claims.get("world") is self:
            del World._claims["world"]


class _Ending:
    """The progress of stopping a world, the thread that stops it, and the deadline."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self.is_over = threading.Event()
        self._claims: dict[str, tuple[int, object]] = {}
        self.begin(_AT_ONCE_S)

    def raise_if_cancelled(self, name: str) -> None:
        if self.is_cancelled:
            raise RuntimeError(f"the world of {name!r} was stopped while it was created")

    def claim(self, timeout_s: float) -> bool:
        """Return whether the caller must end the world; otherwise wait until it has ended.

        A lock is not used, because a signal handler would deadlock on a lock of the thread that it
        interrupts. If that thread is ending the world, the handler must not wait for it either.
        """
        ticket = threading.get_ident(), object()
        winner = self._claims.setdefault("first", ticket)
        if winner is not ticket and winner[0] != ticket[0]:
            self.is_over.wait(timeout_s)
        return winner is ticket

    def begin(self, timeout_s: float) -> None:
        self._deadline = time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())


def _start_collectives(
    world: World, meeting: MeetingPlace, backend: str, undo: contextlib.ExitStack
) -> None:
    with joint_step(meeting, "collectives", world.rank, world.rank_name_map):
        dist.init_process_group(
            backend,
            store=PrefixStore("dist", meeting.store),
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=world.dist_timeout),
        )
    undo.callback(_end_collectives, dist.group.WORLD)


def _end_collectives(group: dist.ProcessGroup | None) -> None:
    """Destroy the default group, unless the user has destroyed or replaced it."""
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
    undo.callback(lambda: agent.stop(world._ending.remaining_s()))
    with joint_step(meeting, "calls", world.rank, world.rank_name_map):
        agent.start(meeting.store, threads, device_maps)
    world._agent = agent


def _check_limits(dist_timeout: float, rpc_timeout: float, rpc_threads: int) -> None:
    for setting, value in (("dist_timeout", dist_timeout), ("rpc_timeout", rpc_timeout)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{setting} must be a number of seconds, got {value!r}")
    if not 0 < dist_timeout < float("inf"):
        raise ValueError(f"dist_timeout must be more than 0 seconds, got {dist_timeout}")
    if not 0 <= rpc_timeout < float("inf"):
        raise ValueError(f"rpc_timeout must be at least 0 seconds, got {rpc_timeout}")
    if whole_number("rpc_threads", rpc_threads) < 1:
        raise ValueError(f"rpc_threads must be at least 1, got {rpc_threads}")


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
