"""A parameter server: gradients of many processes are reduced in two levels and train one model."""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import Optimizer

from . import _node
from ._calls import answered_later
from ._managed_model import ManagedModel
from ._model_state import copied, load_snapshot, state_of, unwrap
from ._pending_pushes import Sender, sender_to
from ._primary import Primary
from ._reduction import Batch, Gradients, Layout, OnFull, Push, Receipt, ReduceSettings
from ._secondary import Secondary
from .errors import RpcError
from .group import RpcGroup
from .ordered_server import (
    OrderedServerBase,
    OrderedServerSimple,
    OrderedServerSimpleImpl,
    hold,
)

logger = logging.getLogger(__name__)

_POLICIES = ("block", "drop_oldest", "error")


class ReduceType(Enum):
    """The levels of the reduction."""

    REDUCE_PRIMARY = 0
    REDUCE_SECONDARY = 1


class PushPullGradServer:
    """Calls the gradient server of that name, from any member; can be sent to other members.

    Args:
        server_name: as given to `PushPullGradServerImpl`.
        group: where that is.
        model_name: the key of the managed model on `o_server`.
        secondary_reducers: the names of the processes that take pushes.
        o_server: where the managed model is published.
    """

    def __init__(
        self,
        server_name: str,
        group: RpcGroup,
        model_name: str,
        secondary_reducers: Iterable[str],
        o_server: OrderedServerBase,
        *,
        token: str = "",
    ) -> None:
        self.server_name = server_name
        self.group = group
        self.model_name = model_name
        self.secondary_reducers = list(secondary_reducers)
        self.o_server = o_server
        # Which server of that name: a client numbers its pushes anew for each.
        self._token = token

    @property
    def dropped(self) -> int:
        """How many pushes reducers have dropped, as far as this process has been told."""
        return self._sender().dropped

    def push(self, model: nn.Module) -> bool:
        """Send a model's gradients to a reducer, then `pull`.

        A push that has returned is applied once, or told as dropped, unless both its reducer and
        this process die. Until then this process keeps a copy of the gradients.

        Args:
            model: like the managed one; parameters that require no gradient are left out.

        Returns:
            What `pull` does: False says that there has been no step yet, not that it was refused.

        Raises:
            RuntimeError: a parameter has no gradient.
            ValueError: names or shapes are not those of the managed model.
            queue.Full: there has been no room within the world's `rpc_timeout`, or `on_full` is
                "error".
            RpcError: the primary reducer is gone or has failed.
        """
        self._sender().push(_gradients_of(model))
        return self.pull(model)

    def pull(self, model: nn.Module) -> bool:
        """Set a model's gradients to zero and its parameters to the newest published ones.

        Buffers stay as they are: the managed model sees no data.

        Returns:
            False where nothing has been published.

        Raises:
            RpcError: the server is gone, or has not answered in time.
        """
        model.zero_grad(set_to_none=False)
        try:
            found = self.o_server.pull(self.model_name)
        except KeyError as error:
            raise RpcError(f"the ordered server of {self.server_name!r} is gone") from error
        if found is None:
            return False
        own = state_of(model)
        buffers = dict(unwrap(model).named_buffers(remove_duplicate=False))
        load_snapshot(model, found[0] | {name: own[name] for name in buffers if name in own})
        return True

    def _sender(self) -> Sender:
        return sender_to(self.server_name, self.group, self.secondary_reducers, self._token)


class PushPullGradServerImpl:
    """One process's part of a gradient server, made on the primary and all secondary reducers.

    A client pushes to a random secondary reducer. That reduces each `reduce_batch_size` pushes to
    one and hands it to the primary reducer, which does the same and has the managed model step. So
    a step takes `reduce_batch_size` squared pushes. The primary pairs an accessor under the
    server's name: `group.get_paired(server_name).to_here()`.

    Nothing is lost or counted twice when a secondary reducer dies: its clients send again what the
    primary lacks, through the others, or the primary's process where there are none. A client
    prefers reducers in other processes. When the primary dies, pushes and pulls raise `RpcError`.

    Args:
        server_name: unique in the group.
        group: this process must be a member.
        model_name: the key under which the managed model is published.
        primary_reducer: its name; default the first member.
        secondary_reducers: their names; default all members.
        o_server: where the model is published; default a server of this one's own.
        reduce_method: "sum", or "mean", a mean of means.
        reduce_device: where this process adds gradients.
        reduce_batch_size: how many are reduced at once, on both levels.
        max_queue_size: how many a reducer keeps that it has not begun with.
        on_full: what becomes of a push to a full queue: it waits ("block"), the oldest one is
            dropped and counted ("drop_oldest"), or it is refused ("error").

    Raises:
        AssertionError: `reduce_method`, `reduce_batch_size` or `max_queue_size` is out of range.
        ValueError: another argument is; or a reducer is no member.
        KeyError: the group has a server of that name here.
    """

    REDUCE_MASTER: ClassVar[int] = 0
    REDUCE_SLAVE: ClassVar[int] = 1

    def __init__(  # noqa: PLR0913 - the documented signature
        self,
        server_name: str,
        group: RpcGroup,
        model_name: str = "model",
        primary_reducer: str | None = None,
        secondary_reducers: Iterable[str] | None = None,
        o_server: OrderedServerBase | None = None,
        reduce_method: str = "sum",
        reduce_device: str | torch.device = "cpu",
        reduce_batch_size: int = 4,
        max_queue_size: int = 64,
        *,
        on_full: OnFull = "block",
    ) -> None:
        assert reduce_method in ("mean", "sum"), "reduce_method must be 'mean' or 'sum'"
        assert max_queue_size > 1, "max_queue_size must be greater than 1"
        assert reduce_batch_size > 1, "reduce_batch_size must be greater than 1"
        assert max_queue_size > reduce_batch_size, "max_queue_size must exceed reduce_batch_size"
        if on_full not in _POLICIES:
            raise ValueError(f"on_full must be one of {', '.join(_POLICIES)}, got {on_full!r}")
        settings = ReduceSettings(
            reduce_method, torch.device(reduce_device), reduce_batch_size, max_queue_size, on_full
        )
        members = group.get_group_members()
        self.server_name = server_name
        self.group = group
        self.model_name = model_name
        self.primary_reducer = primary_reducer or members[0]
        self.secondary_reducers = list(
            members if secondary_reducers is None else secondary_reducers
        )
        _check_reducers(members, self.primary_reducer, self.secondary_reducers)
        self.o_server = o_server
        self._name = group.get_cur_name()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._failure: BaseException | None = None
        is_primary = self._name == self.primary_reducer
        self._primary = Primary(self._name, settings, self._changed) if is_primary else None
        link = self._primary or _RemotePrimary(server_name, group)
        self._secondary = Secondary(self._name, settings, self._changed, link)
        with contextlib.ExitStack() as undo:
            self._offer(undo)
            self._held = undo.pop_all()
        _on_end_of_world(self._secondary)

    @property
    def dropped(self) -> int:
        """How many pushes were dropped in this process, on both levels."""
        return self._secondary.dropped + (self._primary.dropped if self._primary else 0)

    @property
    def pending(self) -> int:
        """How many pushes are in this process and in no step yet."""
        return self._secondary.pending + (self._primary.pending if self._primary else 0)

    def manage_model(
        self, model: nn.Module, optimizer: Optimizer, lr_scheduler: Any = None
    ) -> None:
        """Train a model by what is reduced; only on the primary reducer, and before `start`.

        The model gets `pp_version`, 0, which counts the steps that were published. Its first state
        is not published. Without a model, gradients are reduced and forgotten.

        Args:
            model: its parameters that require a gradient are trained.
            optimizer: of its parameters.
            lr_scheduler: stepped once after each step of the optimizer.

        Raises:
            RuntimeError: this is not the primary reducer, or it is running.
        """
        if self._primary is None or self.o_server is None:
            raise RuntimeError(
                f"{self._name!r} is a secondary reducer: the model is managed on the primary one, "
                f"{self.primary_reducer!r}"
            )
        if self._thread is not None:
            raise RuntimeError("manage_model must be called before start, or after stop")
        self._primary.model = ManagedModel(
            model, optimizer, lr_scheduler, o_server=self.o_server, model_name=self.model_name
        )

    def start(self) -> None:
        """Begin to reduce, or go on after `stop` with what is here."""
        if self._thread is not None:
            return
        self._is_stopping, self._failure = False, None
        if self._primary is not None:
            self._primary.run()
        self._secondary.run()
        name = f"reducer of {self.server_name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End reducing after the reduction or step at hand; what is here stays for `start`.

        Clients go on with other secondary reducers meanwhile.
        """
        if self._thread is None:
            return
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self._thread.join()
        self._thread = None
        self._secondary.halt()
        if self.dropped:
            logger.warning("%r has dropped %d pushes", self.server_name, self.dropped)
        if self.pending:
            logger.info("%r stopped with %d pushes in no step", self.server_name, self.pending)

    def watch(self) -> None:
        """Raise what has ended the reducing thread, if something has.

        Raises:
            RpcError: the primary reducer is gone, or has shut out this one.
            Exception: whatever reducing or stepping raised.
        """
        if self._failure is not None:
            raise self._failure
        if self._secondary.lost:
            raise RpcError(self._secondary.lost)

    def close(self) -> None:
        """Stop and withdraw this part of the server; may be called again."""
        self.stop()
        self._held.close()
        self._secondary.leave()

    def _run(self) -> None:
        levels: list[Primary | Secondary] = [self._secondary]
        if self._primary is not None:
            # First, so that what it waits for on the other level has room to go to.
            levels.insert(0, self._primary)
        try:
            while self._wait_for_work(levels):
                any(level.step() for level in levels)
        except BaseException as error:
            self._failure = error
            logger.exception("the reducer %r of %r has failed", self._name, self.server_name)
            text = f"the reducer {self._name!r} has failed: {type(error).__name__}: {error}"
            for level in levels:
                level.fail(text)

    def _wait_for_work(self, levels: list[Primary | Secondary]) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_stopping or any(level.has_work for level in levels)
            )
            return not self._is_stopping

    def _offer(self, undo: contextlib.ExitStack) -> None:
        own = f"{self.server_name}/{self._name}"
        services = self._services_of_secondary(own)
        if self._primary is not None:
            services |= self._services_of_secondary(self.server_name)
            services |= self._services_of_primary(self._primary)
        for key, service in services.items():
            hold(undo, self.group, "service", key, service)
        if self._primary is None:
            return
        if self.o_server is None:
            name = f"{self.server_name}_o_server"
            undo.callback(OrderedServerSimpleImpl(name, self.group).close)
            self.o_server = OrderedServerSimple(name, self.group)
        accessor = PushPullGradServer(
            self.server_name,
            self.group,
            self.model_name,
            self.secondary_reducers,
            self.o_server,
            token=uuid.uuid4().hex,
        )
        hold(undo, self.group, "value", self.server_name, accessor)

    def _services_of_secondary(self, prefix: str) -> dict[str, Callable[..., Any]]:
        secondary = self._secondary

        @answered_later
        def push(push: Push, must_run: bool) -> Future[Receipt]:
            return secondary.push(push, must_run)

        @answered_later
        def alive() -> Future[bool]:
            return secondary.alive()

        return {
            f"{prefix}/_push_service": push,
            f"{prefix}/_alive_service": alive,
            f"{prefix}/_withdraw_service": secondary.withdraw,
            f"{prefix}/_is_running_service": lambda: secondary.is_running,
        }

    def _services_of_primary(self, primary: Primary) -> dict[str, Callable[..., Any]]:
        @answered_later
        def take(batch: Batch) -> Future[Receipt]:
            return primary.take(batch)

        return {
            f"{self.server_name}/_reduce_service": take,
            f"{self.server_name}/_fence_service": primary.fence,
            f"{self.server_name}/_layout_service": primary.layout,
        }


class _RemotePrimary:
    """The primary reducer, from the process of a secondary one."""

    def __init__(self, server_name: str, group: RpcGroup) -> None:
        self._server_name = server_name
        self._group = group

    def take(self, batch: Batch) -> Future[Receipt]:
        """Hand over a batch. Has no time limit: a primary that dies breaks the call."""
        key = f"{self._server_name}/_reduce_service"
        return self._group.registered_async(key, (batch,), timeout=0)

    def layout(self) -> Layout | None:
        """Return what gradients must look like, None while the primary does not know."""
        layout: Layout | None = self._group.registered_sync(f"{self._server_name}/_layout_service")
        return layout

    def watch(self, on_end: Callable[[], None]) -> None:
        """Have `on_end` called when the primary dies."""

        def note(done: Future[bool]) -> None:
            try:
                done.wait()
            except RuntimeError:
                on_end()

        key = f"{self._server_name}/_alive_service"
        self._group.registered_async(key, timeout=0).add_done_callback(note)


def _gradients_of(model: nn.Module) -> Gradients:
    gradients = {}
    for name, parameter in unwrap(model).named_parameters():
        if not parameter.requires_grad:
            continue
        if not isinstance(parameter.grad, Tensor):
            raise RuntimeError(f"Parameter {name} doesn't have gradient to push!")
        gradients[name] = copied(parameter.grad).to_dense()
    return gradients


def _check_reducers(members: list[str], primary: str, secondaries: list[str]) -> None:
    unknown = sorted({primary, *secondaries}.difference(members))
    if unknown or not secondaries:
        raise ValueError(
            f"reducers must be members of the group, and at least one secondary: got primary "
            f"{primary!r} and secondaries {secondaries}, members are {members}"
        )


def _on_end_of_world(secondary: Secondary) -> None:
    """Let the world end: it waits for all answers that are owed."""
    own = weakref.ref(secondary)

    def leave(_: Future[None]) -> None:
        living = own()
        if living is not None:
            living.leave()

    _node.current().left.add_done_callback(leave)
