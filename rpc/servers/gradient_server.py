"""A parameter server that reduces gradients of many processes in two levels to train a model."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Iterable
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from ..calls import node as _node
from ..calls.group import RpcGroup, call_local_service, find_local
from ..errors import RpcError
from .gradient_client import PushPullGradServer
from .ordered_server import Mark, OrderedServerBase, Update, offer, own_state_server
from .reducers import ManagedModel, Primary, RemotePrimary, Secondary
from .reduction import OnFull, ReduceSettings

logger = logging.getLogger(__name__)

# The time limit of `close` if calls have none; `World.stop` has the same default.
_CLOSE_S = 60.0


class ReduceType(Enum):
    """The levels of the reduction."""

    REDUCE_PRIMARY = 0
    REDUCE_SECONDARY = 1


class PushPullGradServerImpl:
    """A gradient server; the primary and every secondary reducer must create one.

    A client pushes to a random secondary reducer, preferably in another process. The reducer adds
    every ``reduce_batch_size`` pushes to one batch and sends it to the primary reducer, which adds
    every ``reduce_batch_size`` batches and then makes one optimizer step. So a step takes
    ``reduce_batch_size`` squared pushes. Members get a client, a ``PushPullGradServer``, by
    ``group.get_paired(server_name).to_here()``.

    If a secondary reducer dies, its pushes are neither lost nor counted twice: its clients resend
    those that the primary lacks, to other reducers or, if none is left, to the primary's process.
    If the primary dies, pushes and pulls raise ``RpcError``.

    Args:
        server_name: unique in the group.
        group: this process must be a member.
        model_name: the key under which the managed model is published.
        primary_reducer: the name of the primary reducer; default: the first member.
        secondary_reducers: the names of the secondary reducers; default: all members.
        o_server: the ordered server where the model is published; default: a new one.
        reduce_method: "sum", or "mean" for the mean on each level (a mean of means).
        reduce_device: the device on which this process adds gradients.
        reduce_batch_size: how many gradients are reduced at once, on both levels; at least 2.
        max_queue_size: the maximum number of gradients that wait in a reducer's queue; more than
            ``reduce_batch_size``.
        on_full: with a full queue, "block" lets a push wait, "drop_oldest" drops and counts the
            oldest one, and "error" rejects the push.

    Raises:
        AssertionError: ``reduce_method``, ``reduce_batch_size`` or ``max_queue_size`` is invalid.
        ValueError: another argument is invalid, or a reducer is not a member.
        KeyError: this process already has a server of that name in the group.
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
        # The primary is first, so that its queue has room for the secondary's batches.
        self._levels: list[Primary | Secondary] = []
        if self._name == self.primary_reducer:
            self._primary = Primary(self._name, settings, self._changed, self._shut_out)
            self._levels.append(self._primary)
        primary = self._primary or RemotePrimary(server_name, group, self.primary_reducer)
        self._secondary = Secondary(self._name, settings, self._changed, primary, self._newer_state)
        self._levels.append(self._secondary)
        with contextlib.ExitStack() as undo:
            self._offer(undo)
            self._offers = undo.pop_all()

    @property
    def dropped(self) -> int:
        """The number of pushes dropped in this process, on both levels."""
        return sum(tier.level.dropped for tier in self._levels)

    @property
    def pending(self) -> int:
        """The number of pushes in this process that are not part of a step yet."""
        with self._changed:
            return sum(len(tier.level.pushes) for tier in self._levels)

    def manage_model(
        self, model: nn.Module, optimizer: Optimizer, lr_scheduler: Any = None
    ) -> None:
        """Set the model to train; only the primary reducer may call it, before ``start``.

        The attribute ``pp_version`` of the model counts the published steps from 0. The initial
        state is not published. Without a model, gradients are reduced and discarded.

        Args:
            model: the model to train.
            optimizer: steps after each full reduction.
            lr_scheduler: steps once after each step of the optimizer.

        Raises:
            RuntimeError: this is not the primary reducer, or it is running.
        """
        if self._primary is None or self.o_server is None:
            raise RuntimeError(
                f"manage_model() must be called on the primary reducer {self.primary_reducer!r}, "
                f"but {self._name!r} is a secondary reducer"
            )
        if self._thread is not None:
            raise RuntimeError("manage_model() must be called before start() or after stop()")
        self._primary.model = ManagedModel(
            model, optimizer, lr_scheduler, self.o_server, self.model_name
        )

    def start(self) -> None:
        """Start to reduce; after ``stop``, continue with the pushes that this process has."""
        if self._thread is not None:
            return
        self._is_stopping, self._failure = False, None
        for level in self._levels:
            level.run()
        name = f"reducer of {self.server_name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current reduction or step, and keep this process's pushes for ``start``.

        Clients use other secondary reducers meanwhile.
        """
        if self._thread is None:
            return
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self._thread.join()
        self._thread = None
        self._secondary.pause()
        if self.dropped:
            logger.warning("%r has dropped %d pushes", self.server_name, self.dropped)
        if self.pending:
            logger.info("%r stopped with %d pending pushes", self.server_name, self.pending)

    def watch(self) -> None:
        """Raise the error that has ended the reducing thread, if any.

        Raises:
            Exception: the error of a reduction or a step.
            RpcError: the primary reducer is gone or has excluded this one.
        """
        if self._failure is not None:
            raise self._failure
        if self._secondary.lost is not None:
            raise RpcError(self._secondary.lost[1])

    def close(self) -> None:
        """Use the pushes that fill batches, then withdraw this process's services.

        A secondary reducer reduces its full batches and sends them to the primary. The primary
        first waits until all running secondaries have done this, and then makes all full steps, so
        reducers may close in any order. Pushes that fill no batch are discarded; after ``stop``,
        all pushes are discarded. Clients that push while the primary closes get ``RpcError``. May
        be called again.

        Raises:
            RpcError: reducers did not finish within the world's ``rpc_timeout``, or 60 s if that is
                0; the text names them. This process's services are withdrawn nevertheless.
        """
        try:
            self._finish()
        finally:
            self.stop()
            self._offers.close()
            self._secondary.leave()

    def _finish(self) -> None:
        node = _node.current_or_none()
        if self._thread is None or node is None:
            return
        limit_s = node.rpc_timeout or _CLOSE_S
        deadline = time.monotonic() + limit_s
        late = []
        if self._primary is not None:
            self._secondary.pause(f"the server {self.server_name!r} is closing")
            other_reducers = [name for name in self.secondary_reducers if name != self._name]
            late = _finish_others(self.group, self.server_name, other_reducers, limit_s)
        if not self._finish_own(deadline - time.monotonic()):
            late.append(self._name)
        if late:
            text = f"{_node.names_and_verb(late)} not reduced all full batches within {limit_s:g} s"
            raise RpcError(f"close() of {self.server_name!r}: {text}")

    def _finish_own(self, timeout_s: float) -> bool:
        """Wait until no full batch is left here or reduction stops; return False on a timeout.

        Pushes are refused from now on, so that this ends.
        """
        self._secondary.pause()
        with self._changed:
            return self._changed.wait_for(
                lambda: (
                    self._thread is None
                    or self._is_stopping
                    or not any(level.has_batch for level in self._levels)
                ),
                timeout_s,
            )

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
        prefix = f"{self.server_name}/{self._name}"
        services = self._secondary.services(prefix)
        services[f"{prefix}/_finish_service"] = self._finish_own
        if self._primary is not None:
            # Under the server's name, this process takes pushes if no other reducer can.
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

    def _newer_state(self, mark: Mark | None) -> Update | None:
        # The update contains the server's own tensors. A copy is not needed, because they are only
        # sent.
        key = f"{self.server_name}_o_server/_pull_changes"
        service = find_local("service", self.group.get_group_name(), key)
        return None if service is None else service(self.model_name, None, mark, frozenset())

    def _shut_out(self, reducer: str, text: str) -> None:
        """Notify a reducer that it is considered dead, in case it was only suspended."""
        key = f"{self.server_name}/{reducer}/_shut_out_service"
        # Usually it is dead, and the call fails.
        with contextlib.suppress(KeyError, RpcError):
            self.group.registered_async(key, (text,), timeout=0)


def _finish_others(group: RpcGroup, server: str, reducers: list[str], limit_s: float) -> list[str]:
    """Wait until reducers have sent their full batches; return those that have not in time."""
    deadline = time.monotonic() + limit_s
    calls, late = {}, []
    for name in reducers:
        key = f"{server}/{name}/_finish_service"
        call_args: Any = (group.get_group_name(), key, (limit_s,), {})
        with contextlib.suppress(RpcError):
            # The additional second lets a reducer answer that it is late.
            calls[name] = group.rpc_async(name, call_local_service, limit_s + 1, call_args)
    for name, call in calls.items():
        try:
            is_finished = call.wait()
        except (KeyError, RpcError):
            # An error before the deadline means that it has closed or died.
            is_finished = time.monotonic() < deadline
        if not is_finished:
            late.append(name)
    return late


def _check_reducers(members: list[str], primary: str, secondaries: list[str]) -> None:
    unknown = sorted({primary, *secondaries}.difference(members))
    if unknown or not secondaries:
        raise ValueError(
            f"reducers must be members of the group {members}, and at least one must be secondary, "
            f"got primary_reducer={primary!r} and secondary_reducers={secondaries}"
        )
