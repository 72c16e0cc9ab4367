"""The two levels of a gradient server: pushes to batches, and batches to steps."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.futures import Future
from torch.optim import Optimizer

from ..calls import node as _node
from ..calls.group import RpcGroup, call_local_service, find_local
from ..errors import RpcError
from .model_state import snapshot, unwrap
from .ordered_server import Mark, OrderedServerSimple, Update
from .reduction import (
    Batch,
    Gradients,
    Layout,
    Level,
    Push,
    PushId,
    Receipt,
    ReduceSettings,
    State,
    check_gradients,
    get_layout,
    on_reducer_gone,
)

logger = logging.getLogger(__name__)


@dataclass
class ManagedModel:
    """The model that a gradient server trains; creating it sets the model's ``pp_version`` to 0."""

    model: Any
    optimizer: Optimizer
    lr_scheduler: Any
    o_server: Any
    model_name: str

    def __post_init__(self) -> None:
        named = unwrap(self.model).named_parameters()
        self._trained = {name: param for name, param in named if param.requires_grad}
        self.layout = get_layout(self._trained)
        self.model.pp_version = 0

    def step(self, gradients: Gradients) -> None:
        for name, parameter in self._trained.items():
            parameter.grad = gradients[name].to(parameter.device, parameter.dtype)
        self.optimizer.step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def publish(self) -> None:
        state, version = snapshot(self.model), self.model.pp_version
        if self._push(state, version):
            return
        answer = self.o_server.pull(self.model_name)
        newest = None if answer is None else answer[1]
        logger.warning(
            "version %r of model %r was refused by its ordered server, which has version %r: "
            "another server publishes under that name, or has done so before",
            *(version + 1, self.model_name, newest),
        )
        if isinstance(newest, int):
            self._push(state, newest)

    def _push(self, state: Gradients, version: int) -> bool:
        server = self.o_server
        push = server.push
        if type(server).push is OrderedServerSimple.push:
            # Push directly, because a call would copy the state again.
            service = f"{server.server_name}/_push_service"
            push = find_local("service", server.group.get_group_name(), service) or push
        is_accepted: bool = push(self.model_name, state, version + 1, version)
        if is_accepted:
            self.model.pp_version = version + 1
        return is_accepted


class Primary:
    """The upper level: adds batches and steps the model at each full sum.

    It records which pushes have arrived. A client whose secondary reducer has died asks for them by
    ``fence`` and resends its other pushes. All methods may be called from any thread, but ``step``
    from only one at a time.

    Args:
        name: the name of this process.
        settings: the settings of the reduction.
        changed: guards the state, and is notified if there may be work.
        shut_out: called with the name of an excluded reducer and the reason; must not block.
    """

    def __init__(
        self,
        name: str,
        settings: ReduceSettings,
        changed: threading.Condition,
        shut_out: Callable[[str, str], None],
    ) -> None:
        self.model: ManagedModel | None = None
        self._shut_out = shut_out
        if settings.on_full == "error":
            # Between reducers a full queue cannot be an error: the push has been acknowledged.
            settings = replace(settings, on_full="block")
        self.level = Level[Batch](f"{name} (primary)", settings, changed)
        self._failure = ""
        self._fenced: set[str] = set()
        # By client, the numbers of the arrived pushes that it may still ask for.
        self._arrived: dict[str, set[int]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.level.items) and not self._failure

    @property
    def has_batch(self) -> bool:
        """Whether a step will follow without further batches."""
        return self.level.has_batch and not self._failure

    def services(self, prefix: str) -> dict[str, Callable[..., Any]]:
        """Return the services for secondary reducers, and for clients after a reducer's death."""
        return {
            f"{prefix}/_reduce_service": self.take,
            f"{prefix}/_fence_service": self.fence,
            f"{prefix}/_layout_service": self.layout,
        }

    def take(self, batch: Batch) -> Future[Receipt]:
        answer: Future[Receipt] = Future()
        with self.level.locked():
            refusal = self._refusal(batch)
            if refusal is not None:
                self.level.reply(batch, answer, *refusal)
                return answer
            for client, number, low in batch.ids:
                arrived = self._arrived.get(client, set())
                self._arrived[client] = {
                    number,
                    *(earlier for earlier in arrived if earlier >= low),
                }
            # A batch that waits for room has arrived too, even if its reducer dies.
            self.level.offer(batch, answer)
        return answer

    def layout(self) -> Layout | None:
        """Return the required names and shapes of gradients, None without a model."""
        return None if self.model is None else self.model.layout

    def watch(self, on_end: Callable[[], None]) -> None:
        """Do nothing: a reducer in the primary's process ends with it."""

    def fence(self, reducer: str, client: str, numbers: Iterable[int]) -> list[int]:
        """Exclude a reducer; return which of a client's pushes have arrived."""
        with self.level.locked():
            is_new = reducer not in self._fenced
            self._fenced.add(reducer)
            arrived = sorted(self._arrived.get(client, set()).intersection(numbers))
        if is_new:
            logger.warning("the reducer %r was excluded: %r reports it dead", reducer, client)
            # It may be alive and hold pushes of other clients, which must send them again.
            self._shut_out(reducer, _why_fenced(reducer))
        return arrived

    def run(self) -> None:
        with self.level.locked():
            self._failure = ""

    def fail(self, text: str) -> None:
        """Refuse batches until ``run``; a sum that the error has interrupted is lost."""
        with self.level.locked():
            self._failure = text
            for batch, _ in self.level.waiting:
                for client, number, _ in batch.ids:
                    self._arrived[client].discard(number)
            self.level.fail(text)

    def step(self) -> bool:
        """Reduce one batch; return False if there is none."""
        with self.level.locked():
            if not self.has_work:
                return False
            batch = self.level.take()
        # Without the lock, because a step may take long.
        total = self.level.add(batch)
        if total is not None:
            if self.model is not None:
                self.model.step(total)
            with self.level.locked():
                self.level.finish()
            if self.model is not None:
                self.model.publish()
        return True

    def _refusal(self, batch: Batch) -> tuple[State, str] | None:
        if batch.reducer in self._fenced:
            return "fenced", _why_fenced(batch.reducer)
        if self._failure:
            return "failed", self._failure
        layout = self.level.layout if self.model is None else self.model.layout
        if layout is not None:
            try:
                check_gradients(batch.gradients, layout)
            except ValueError as error:
                return "refused", str(error)
        return None


def _why_fenced(reducer: str) -> str:
    return f"the primary reducer has excluded {reducer!r}, which a client reported dead"


@dataclass
class RemotePrimary:
    """A stub for the primary reducer in the process of a secondary one."""

    prefix: str
    group: RpcGroup
    name: str

    def take(self, batch: Batch) -> Future[Receipt]:
        """Send a batch, without a time limit: if the primary dies, the call fails."""
        # Not `registered_async`, which would look up the holder before every batch.
        key = f"{self.prefix}/_reduce_service"
        call_args: Any = (self.group.get_group_name(), key, (batch,), {})
        return self.group.rpc_async(self.name, call_local_service, timeout=0, args=call_args)

    def layout(self) -> Layout | None:
        """Return the required names and shapes of gradients, None if the primary has no model."""
        layout: Layout | None = self.group.registered_sync(f"{self.prefix}/_layout_service")
        return layout

    def watch(self, on_end: Callable[[], None]) -> None:
        on_reducer_gone(self.group, self.prefix, on_end)


class Intake(Level[Push]):
    """The lower level's queue and sum, plus the full batch that the primary does not have yet."""

    unsent: Batch | None = None
    is_sending = False

    def __init__(self, name: str, settings: ReduceSettings, changed: threading.Condition) -> None:
        super().__init__(name, settings, changed)
        # By reducer, so that clients see the primary's dropped pushes too.
        self.dropped_by: dict[str, int] = {}
        self._batch_size = settings.batch_size

    @property
    def pushes(self) -> list[PushId]:
        return [*super().pushes, *(self.unsent.ids if self.unsent is not None else ())]

    @property
    def has_batch(self) -> bool:
        return self.unsent is not None or super().has_batch

    @property
    def can_send(self) -> bool:
        return self.unsent is not None and not self.is_sending

    @property
    def can_take(self) -> bool:
        """Whether a push from the queue can be added to the sum."""
        # While a batch is being sent, the next one may grow but must not become full.
        has_room = self.unsent is None or self.num_taken + 1 < self._batch_size
        return bool(self.items) and has_room

    def gather(self, push: Push) -> None:
        """Add a taken push; a full sum becomes the batch to send. Call it without ``locked``."""
        total = self.add(push)
        if total is not None:
            with self.locked():
                self.unsent = Batch(self.name, total, self.finish())

    def withdraw(self, client: str, number: int) -> bool:
        """Reject a push that waits for room; return False if it is not waiting any more."""
        with self.locked():
            return self.reject("full", "", lambda push: push[:2] == (client, number))

    def receipt(self, push: Push, state: State, text: str) -> Receipt:
        pending = {number for client, number, _ in self.pushes if client == push.client}
        dropped = {**self.dropped_by, self.name: self.dropped}
        return Receipt(state, text, tuple(pending.intersection(push.asked)), dropped)


class Secondary:
    """The lower level: adds pushes and sends each full batch to the primary.

    All methods may be called from any thread, but ``step`` from only one at a time.

    Args:
        name: the name of this process.
        settings: the settings of the reduction.
        changed: guards the state, and is notified if there may be work.
        primary: the upper level.
        newer_state: returns the update from a client's state to the newest one, if that is kept in
            this process; it saves the client a second call.
    """

    def __init__(
        self,
        name: str,
        settings: ReduceSettings,
        changed: threading.Condition,
        primary: Primary | RemotePrimary,
        newer_state: Callable[[Mark | None], Update | None],
    ) -> None:
        self.level = Intake(name, settings, changed)
        self.is_running = False
        # Set once, if the primary is gone ("failed") or has excluded this reducer ("fenced").
        self.lost: tuple[State, str] | None = None
        self._name = name
        self._primary = primary
        self._newer_state = newer_state
        # Why this process's thread has failed, and why the primary refuses batches; "" if neither.
        self._failure = ""
        self._primary_error = ""
        # Why all pushes are refused while the server closes; "" before.
        self._end_text = ""
        self._layout: Layout | None = None
        self._is_watching = False
        # Completes when this reducer ends: True if it leaves by itself, False if it is excluded.
        self._end: Future[bool] = Future()
        # Complete it when the world ends too, because `World.stop` waits for all answers.
        _node.current().has_left.add_done_callback(partial(_leave, self._end))

    @property
    def has_work(self) -> bool:
        if self.lost or self._failure or self._primary_error:
            return False
        return self.level.can_send or self.level.can_take

    @property
    def has_batch(self) -> bool:
        """Whether the primary will get a batch without further pushes."""
        if self.lost or self._failure or self._primary_error:
            return False
        return self.level.has_batch

    def services(self, prefix: str) -> dict[str, Callable[..., Any]]:
        """Return the services that clients call, and the one that excludes this reducer."""

        def push(
            push: Push, must_run: bool, mark: Mark | None
        ) -> Future[tuple[Receipt, Update | None]]:
            def answer(done: Future[Receipt]) -> tuple[Receipt, Update | None]:
                receipt = done.wait()
                return receipt, self._newer_state(mark) if receipt.state == "taken" else None

            return self.push(push, must_run).then(answer)

        return {
            f"{prefix}/_push_service": push,
            f"{prefix}/_alive_service": lambda: self._end,
            f"{prefix}/_withdraw_service": self.level.withdraw,
            f"{prefix}/_shut_out_service": partial(self.disconnect, "fenced"),
            f"{prefix}/_is_running_service": lambda: self.is_running,
        }

    def push(self, push: Push, must_run: bool) -> Future[Receipt]:
        """Queue a push; if ``must_run``, refuse it while this reducer is not running.

        Raises:
            ValueError: names or shapes of the gradients do not fit; the push is not queued.
        """
        answer: Future[Receipt] = Future()
        try:
            self._connect()
        except (RpcError, KeyError) as error:
            answer.set_result(Receipt("failed", f"the primary reducer cannot be asked: {error}"))
            return answer
        with self.level.locked():
            # Without a model, require the names and shapes of the pushes to which it is added.
            layout = self.level.layout if self._layout is None else self._layout
            if layout is not None:
                check_gradients(push.gradients, layout)
            refusal = self._refusal(must_run)
            if refusal is not None:
                self.level.reply(push, answer, *refusal)
            elif self._primary_error:
                # The primary may work again. Let the push wait until it answers the unsent batch.
                self._primary_error = ""
                self.level.waiting.append((push, answer))
            else:
                self.level.offer(push, answer, is_forced=push.is_retry)
        return answer

    def run(self) -> None:
        with self.level.locked():
            self.is_running, self._failure, self._primary_error = True, "", ""

    def pause(self, end_text: str = "") -> None:
        """Keep the queued pushes, and reject waiting ones so that clients try other reducers.

        With ``end_text``, reject all pushes from now on, with this error for their clients.
        """
        with self.level.locked():
            self.is_running = False
            self._end_text = self._end_text or end_text
            if self._end_text:
                self.level.reject("failed", self._end_text)
            else:
                self.level.reject("idle", f"the reducer {self._name!r} was stopped")

    def fail(self, text: str) -> None:
        """Reject every push until ``run``; a sum that the error has interrupted is lost."""
        with self.level.locked():
            self._failure = text
            self.level.fail(text)

    def step(self) -> bool:
        """Send a batch or add a push; return False if there is nothing to do."""
        work: Callable[[], None]
        with self.level.locked():
            if not self.has_work:
                return False
            if self.level.unsent is not None and not self.level.is_sending:
                self.level.is_sending = True
                work = partial(self._send, self.level.unsent)
            else:
                work = partial(self.level.gather, self.level.take())
        work()
        return True

    def disconnect(self, state: State, text: str) -> None:
        """Reject pushes from now on: the primary is gone ("failed") or excludes this ("fenced")."""
        with self.level.locked():
            self.lost = self.lost or (state, text)
            self.level.reject(*self.lost)
        if state == "fenced":
            # Clients that watch this reducer then send their pushes to others.
            _leave(self._end, is_in_order=False)

    def leave(self) -> None:
        """Notify watching clients that this reducer leaves and has not died."""
        _leave(self._end)

    def _send(self, batch: Batch) -> None:
        try:
            self._primary.take(batch).add_done_callback(partial(self._handle_answer, batch))
        except (RpcError, KeyError) as error:
            self.disconnect("failed", f"the primary reducer is gone: {error}")

    def _handle_answer(self, batch: Batch, done: Future[Receipt]) -> None:
        try:
            receipt = done.wait()
        except Exception as error:
            self.disconnect("failed", f"the primary reducer is gone: {error}")
            return
        if receipt.state == "fenced":
            self.disconnect("fenced", receipt.text)
            return
        level = self.level
        with level.locked():
            level.is_sending = False
            level.dropped_by.update(receipt.dropped)
            if receipt.state == "failed":
                self._primary_error = receipt.text
                level.reject("failed", receipt.text)
                return
            if receipt.state == "refused":
                self._layout = None
                level.dropped += len(batch.ids)
                text = "%d pushes at the reducer %r were refused: %s"
                logger.warning(text, len(batch.ids), self._name, receipt.text)
            level.unsent = None
            level.admit_waiting()

    def _connect(self) -> None:
        """Watch the primary, and ask it for the layout until it has a model."""
        if self.lost is not None:
            return
        if self._layout is None:
            self._layout = self._primary.layout()
        if not self._is_watching:
            # Another thread may watch too: only the first `disconnect` counts.
            self._primary.watch(lambda: self.disconnect("failed", "the primary reducer is gone"))
            self._is_watching = True

    def _refusal(self, must_run: bool) -> tuple[State, str] | None:
        if self.lost is not None:
            return self.lost
        if self._failure or self._end_text:
            return "failed", self._failure or self._end_text
        if must_run and not self.is_running:
            return "idle", f"the reducer {self._name!r} is not running"
        if self._primary_error and not self.level.can_send:
            return "failed", self._primary_error
        return None


def _leave(end: Future[bool], _: object = None, *, is_in_order: bool = True) -> None:
    # Only the first result counts; torch raises for a second one.
    with contextlib.suppress(RuntimeError):
        end.set_result(is_in_order)
