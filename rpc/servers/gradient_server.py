"""A parameter server: gradients of many processes are reduced in two levels and train one model."""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Iterable
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from ..calls.group import RpcGroup, held_or_none
from ..errors import RpcError
from .gradient_client import PushPullGradServer
from .ordered_server import Mark, OrderedServerBase, Update, offer, own_state_server
from .reducers import ManagedModel, Primary, RemotePrimary, Secondary
from .reduction import OnFull, ReduceSettings

logger = logging.getLogger(__name__)


class ReduceType(Enum):
    """The levels of the reduction."""

    REDUCE_PRIMARY = 0
    REDUCE_SECONDARY = 1


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
        device = torch.device(reduce_device)
        settings = ReduceSettings(reduce_method, device, reduce_batch_size, max_queue_size, on_full)
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
        self._primary: Primary | None = None
        # The upper one first, so that what it waits for on the other has room to go to.
        self._levels: list[Primary | Secondary] = []
        if self._name == self.primary_reducer:
            self._primary = Primary(self._name, settings, self._changed, self._shut_out)
            self._levels.append(self._primary)
        primary = self._primary or RemotePrimary(server_name, group, self.primary_reducer)
        self._secondary = Secondary(self._name, settings, self._changed, primary, self._news)
        self._levels.append(self._secondary)
        with contextlib.ExitStack() as undo:
            self._offer(undo)
            self._offers = undo.pop_all()

    @property
    def dropped(self) -> int:
        """How many pushes were dropped in this process, on both levels."""
        return sum(one.level.dropped for one in self._levels)

    @property
    def pending(self) -> int:
        """How many pushes are in this process and in no step yet."""
        with self._changed:
            return sum(len(one.level.pushes) for one in self._levels)

    def manage_model(
        self, model: nn.Module, optimizer: Optimizer, lr_scheduler: Any = None
    ) -> None:
        """Train a model by what is reduced; only on the primary reducer, and before `start`.

        The model gets `pp_version`, 0, which counts the steps that were published. Its first state
        is not published. `lr_scheduler` is stepped once after each step of the optimizer. Without
        a model, gradients are reduced and forgotten.

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
            model, optimizer, lr_scheduler, self.o_server, self.model_name
        )

    def start(self) -> None:
        """Begin to reduce, or go on after `stop` with what is here."""
        if self._thread is not None:
            return
        self._is_stopping, self._failure = False, None
        for level in self._levels:
            level.run()
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

        That is whatever reducing or stepping raised, or an RpcError: the primary reducer is gone,
        or has shut out this one.
        """
        if self._failure is not None:
            raise self._failure
        if self._secondary.lost is not None:
            raise RpcError(self._secondary.lost[1])

    def close(self) -> None:
        """Stop and withdraw this part of the server; may be called again."""
        self.stop()
        self._offers.close()
        self._secondary.leave()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                any(level.step() for level in self._levels)
        except BaseException as error:
            self._failure = error
            logger.exception("the reducer %r of %r has failed", self._name, self.server_name)
            text = f"the reducer {self._name!r} has failed: {type(error).__name__}: {error}"
            for level in self._levels:
                level.fail(text)

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_stopping or any(level.has_work for level in self._levels)
            )
            return not self._is_stopping

    def _offer(self, undo: contextlib.ExitStack) -> None:
        services = self._secondary.services(f"{self.server_name}/{self._name}")
        if self._primary is not None:
            # When no other reducer can, this process takes pushes under the server's own name.
            services |= self._secondary.services(self.server_name)
            services |= self._primary.services(self.server_name)
        for key, service in services.items():
            offer(undo, self.group, "service", key, service)
        if self._primary is None:
            return
        if self.o_server is None:
            self.o_server = own_state_server(undo, self.server_name, self.group)
        accessor = PushPullGradServer(
            self.server_name,
            self.group,
            self.model_name,
            self.secondary_reducers,
            self.o_server,
            token=uuid.uuid4().hex,
        )
        offer(undo, self.group, "value", self.server_name, accessor)

    def _news(self, mark: Mark | None) -> Update | None:
        # The tensors are the server's own: they are for sending.
        key = f"{self.server_name}_o_server/_pull_changes"
        service = held_or_none("service", self.group.get_group_name(), key)
        return None if service is None else service(self.model_name, None, mark, frozenset())

    def _shut_out(self, reducer: str, text: str) -> None:
        """Tell a reducer that it is held dead; one that sleeps finds it when it wakes."""
        key = f"{self.server_name}/{reducer}/_shut_out_service"
        # It mostly is dead.
        with contextlib.suppress(KeyError, RpcError):
            self.group.registered_async(key, (text,), timeout=0)


def _check_reducers(members: list[str], primary: str, secondaries: list[str]) -> None:
    unknown = sorted({primary, *secondaries}.difference(members))
    if unknown or not secondaries:
        raise ValueError(
            f"reducers must be members of the group, and at least one secondary: got primary "
            f"{primary!r} and secondaries {secondaries}, members are {members}"
        )
