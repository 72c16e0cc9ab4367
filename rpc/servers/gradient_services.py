"""The services of a gradient server, and what calls them from one reducer to the other."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

from torch.futures import Future

from ..calls import node as _node
from ..calls.group import RpcGroup, call_held
from ..errors import RpcError
from .primary import Primary
from .reduction import Batch, Layout, Push, Receipt
from .secondary import Secondary
from .state_server import Update, Wanted, pull_here

Services = dict[str, Callable[..., Any]]


def services_of_secondary(prefix: str, secondary: Secondary) -> Services:
    """Return what clients call, by key."""

    def push(
        push: Push, must_run: bool, wanted: Wanted | None = None
    ) -> Future[tuple[Receipt, Update | None]]:
        def answer(done: Future[Receipt]) -> tuple[Receipt, Update | None]:
            receipt = done.wait()
            if wanted is None or receipt.state != "taken":
                return receipt, None
            # Spares the client a second call, where the states are in this process.
            return receipt, pull_here(wanted)

        return secondary.push(push, must_run).then(answer)

    return {
        f"{prefix}/_push_service": push,
        f"{prefix}/_alive_service": secondary.watchers.alive,
        f"{prefix}/_withdraw_service": secondary.withdraw,
        f"{prefix}/_shut_out_service": lambda text: secondary.lose("fenced", text),
        f"{prefix}/_is_running_service": lambda: secondary.is_running,
    }


def services_of_primary(prefix: str, primary: Primary) -> Services:
    """Return what secondary reducers call, and clients when one of those has died."""

    return {
        f"{prefix}/_reduce_service": primary.take,
        f"{prefix}/_fence_service": primary.fence,
        f"{prefix}/_layout_service": primary.layout,
    }


class RemotePrimary:
    """The primary reducer, from the process of a secondary one.

    Args:
        prefix: of the primary's services.
        group: where they are.
        name: of the primary's process.
    """

    def __init__(self, prefix: str, group: RpcGroup, name: str) -> None:
        self._prefix = prefix
        self._group = group
        self._name = name

    def take(self, batch: Batch) -> Future[Receipt]:
        """Hand over a batch. Has no time limit: a primary that dies breaks the call."""
        # `registered_async` would ask the manager where it is, before every batch.
        key = f"{self._prefix}/_reduce_service"
        given = self._group.get_group_name(), key, (batch,), None
        return self._group.rpc_async(self._name, call_held, timeout=0, args=given)

    def layout(self) -> Layout | None:
        """Return what gradients must look like, None while the primary does not know."""
        layout: Layout | None = self._group.registered_sync(f"{self._prefix}/_layout_service")
        return layout

    def watch(self, on_end: Callable[[], None]) -> None:
        """Have `on_end` called when the primary dies."""

        def note(done: Future[bool]) -> None:
            try:
                done.wait()
            except RuntimeError:
                on_end()

        alive = self._group.registered_async(f"{self._prefix}/_alive_service", timeout=0)
        alive.add_done_callback(note)


def shut_out(server_name: str, group: RpcGroup, reducer: str, text: str) -> None:
    """Tell a reducer that it is held dead; one that sleeps finds it when it wakes."""
    # It mostly is dead.
    with contextlib.suppress(KeyError, RpcError):
        group.registered_async(f"{server_name}/{reducer}/_shut_out_service", (text,), timeout=0)


def leave_with_world(secondary: Secondary) -> None:
    """Answer those who watch when the world ends: it waits for all answers that are owed."""
    own = weakref.ref(secondary)

    def leave(_: Future[None]) -> None:
        living = own()
        if living is not None:
            living.watchers.leave()

    _node.current().left.add_done_callback(leave)
