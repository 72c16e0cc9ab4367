"""The two levels of a gradient server: pushes become batches, and batches become steps."""

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
from ..calls.group import RpcGroup, call_held, held_or_none
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
    layout_of,
    when_gone,
)

logger = logging.getLogger(__name__)


@dataclass
class ManagedModel:
    """The model that a gradient server trains, with its optimizer; gets `pp_version`, 0."""

    model: Any
    optimizer: Optimizer
    lr_scheduler: Any
    o_server: Any
    model_name: str

    def __post_init__(self) -> None:
        named = unwrap(self.model).named_parameters()
        self._trained = {name: one for name, one in named if one.requires_grad}
        self.layout = layout_of(self._trained)
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
        found = self.o_server.pull(self.model_name)
        newest = None if found is None else found[1]
        logger.warning(
            "version %r of model %r was refused by its ordered server, which has %r: somebody "
            "else publishes under that name, or has done so before",
            *(version + 1, self.model_name, newest),
        )
        if isinstance(newest, int):
            self._push(state, newest)

    def _push(self, state: Gradients, version: int) -> bool:
        server = self.o_server
        push = server.push
        if type(server).push is OrderedServerSimple.push:
            # A call would copy the state, which is a copy already that nobody changes.
            service = f"{server.server_name}/_push_service"
            push = held_or_none("service", server.group.get_group_name(), service) or push
        is_accepted: bool = push(self.model_name, state, version + 1, version)
        if is_accepted:
            self.model.pp_version = version + 1
        return is_accepted


class Primary:
    """Takes batches, adds them up and has the model step at each full sum.

    It knows which pushes have arrived: a client whose secondary reducer has died asks `fence`, and
    sends the others again. All methods may be called from any thread, `step` from one at a time.
    `changed` guards it, and is notified when there may be something to do; `shut_out` tells a
    reducer, by its name and without waiting, why it is shut out.
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
            # Between reducers a full queue cannot be an error: who pushed has gone on.
            settings = replace(settings, on_full="block")
        self.level = Level[Batch](f"{name} (primary)", settings, changed)
        self._failure = ""
        self._fenced: set[str] = set()
        # By client, the numbers of its pushes that it may ask for.
        self._arrived: dict[str, set[int]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.level.items) and not self._failure

    def services(self, prefix: str) -> dict[str, Callable[..., Any]]:
        """Return what secondary reducers call, and clients when one of those has died."""
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
                known = self._arrived.get(client, set())
                self._arrived[client] = {number, *(one for one in known if one >= low)}
            # May have to wait; it is here all the same, whatever becomes of its reducer.
            self.level.offer(batch, answer)
        return answer

    def layout(self) -> Layout | None:
        """Return what gradients must look like, None without a model."""
        return None if self.model is None else self.model.layout

    def watch(self, on_end: Callable[[], None]) -> None:
        """Watch nothing: a reducer in the primary's process ends with it."""

    def fence(self, reducer: str, client: str, numbers: Iterable[int]) -> list[int]:
        """Take no more batches of a reducer; return which pushes of a client have arrived."""
        with self.level.locked():
            is_new = reducer not in self._fenced
            self._fenced.add(reducer)
            arrived = sorted(self._arrived.get(client, set()).intersection(numbers))
        if is_new:
            logger.warning("the reducer %r is held dead, and shut out, for %r", reducer, client)
            # It may live, with pushes that are no full batch: their clients must learn of it.
            self._shut_out(reducer, _why_fenced(reducer))
        return arrived

    def run(self) -> None:
        with self.level.locked():
            self._failure = ""

    def fail(self, text: str) -> None:
        """Refuse batches until `run`; what was being reduced is lost."""
        with self.level.locked():
            self._failure = text
            for batch, _ in self.level.waiting:
                for client, number, _ in batch.ids:
                    self._arrived[client].discard(number)
            self.level.fail(text)

    def step(self) -> bool:
        """Do one piece of work; False where there is none."""
        with self.level.locked():
            if not self.has_work:
                return False
            batch = self.level.take()
        # Not under the lock: a step may be long.
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
        if self.model is not None:
            try:
                check_gradients(batch.gradients, self.model.layout)
            except ValueError as error:
                return "refused", str(error)
        return None


def _why_fenced(reducer: str) -> str:
    return f"the primary reducer has shut out {reducer!r}, which a client held to be dead"


@dataclass
class RemotePrimary:
    """The primary reducer, from the process of a secondary one."""

    prefix: str
    group: RpcGroup
    name: str

    def take(self, batch: Batch) -> Future[Receipt]:
        """Hand over a batch. Has no time limit: a primary that dies breaks the call."""
        # `registered_async` would ask the manager where it is, before every batch.
        key = f"{self.prefix}/_reduce_service"
        given: Any = (self.group.get_group_name(), key, (batch,), {})
        return self.group.rpc_async(self.name, call_held, timeout=0, args=given)

    def layout(self) -> Layout | None:
        """Return what gradients must look like, None while the primary does not know."""
        layout: Layout | None = self.group.registered_sync(f"{self.prefix}/_layout_service")
        return layout

    def watch(self, on_end: Callable[[], None]) -> None:
        when_gone(self.group, self.prefix, on_end)


class Intake(Level[Push]):
    """The pushes that a secondary reducer holds until the primary has them."""

    unsent: Batch | None = None
    is_sending = False

    def __init__(self, name: str, settings: ReduceSettings, changed: threading.Condition) -> None:
        super().__init__(name, settings, changed)
        # By reducer: clients learn what the primary has dropped too.
        self.dropped_by: dict[str, int] = {}
        self._batch_size = settings.batch_size

    @property
    def pushes(self) -> list[PushId]:
        return [*super().pushes, *(self.unsent.ids if self.unsent is not None else ())]

    @property
    def can_send(self) -> bool:
        return self.unsent is not None and not self.is_sending

    @property
    def can_take(self) -> bool:
        """Whether the sum can go on with a push from the queue."""
        # While a batch is on its way the next one may grow, but not become full.
        has_room = self.unsent is None or self.num_taken + 1 < self._batch_size
        return bool(self.items) and has_room

    def gather(self, push: Push) -> None:
        """Add a push that was taken; a full sum is the next batch. Not within `locked`."""
        total = self.add(push)
        if total is not None:
            with self.locked():
                self.unsent = Batch(self.name, total, self.finish())

    def receipt(self, item: Push, state: State, text: str) -> Receipt:
        held = {number for client, number, _ in self.pushes if client == item.client}
        dropped = {**self.dropped_by, self.name: self.dropped}
        return Receipt(state, text, tuple(held.intersection(item.asked)), dropped)


class Secondary:
    """Takes pushes, adds them up and hands over each full batch.

    All methods may be called from any thread, `step` from one at a time. `changed` guards it, and
    is notified when there may be something to do. `news` returns what leads from a client's state
    to the newest one, if that is kept in this process: it spares the client a second call.
    """

    def __init__(
        self,
        name: str,
        settings: ReduceSettings,
        changed: threading.Condition,
        primary: Primary | RemotePrimary,
        news: Callable[[Mark | None], Update | None],
    ) -> None:
        self.level = Intake(name, settings, changed)
        self.is_running = False
        # Set once and for all: the primary is gone ("failed") or has shut this reducer out.
        self.lost: tuple[State, str] | None = None
        self._name = name
        self._primary = primary
        self._news = news
        # Why the thread of this process has ended, and why the primary takes nothing.
        self._failure = ""
        self._trouble = ""
        self._layout: Layout | None = None
        self._is_watching = False
        # What those who watch this reducer wait for: whether it leaves in good order.
        self._end: Future[bool] = Future()
        # The end of the world waits for all answers that are owed.
        _node.current().left.add_done_callback(partial(_leave, self._end))

    @property
    def has_work(self) -> bool:
        if self.lost or self._failure or self._trouble:
            return False
        return self.level.can_send or self.level.can_take

    def services(self, prefix: str) -> dict[str, Callable[..., Any]]:
        """Return what clients call; the primary too, to shut this reducer out."""

        def push(
            push: Push, must_run: bool, mark: Mark | None
        ) -> Future[tuple[Receipt, Update | None]]:
            def answer(done: Future[Receipt]) -> tuple[Receipt, Update | None]:
                receipt = done.wait()
                return receipt, self._news(mark) if receipt.state == "taken" else None

            return self.push(push, must_run).then(answer)

        return {
            f"{prefix}/_push_service": push,
            f"{prefix}/_alive_service": lambda: self._end,
            f"{prefix}/_withdraw_service": self.withdraw,
            f"{prefix}/_shut_out_service": partial(self.lose, "fenced"),
            f"{prefix}/_is_running_service": lambda: self.is_running,
        }

    def push(self, push: Push, must_run: bool) -> Future[Receipt]:
        """Take a push, where it `must_run` not while nobody reduces here.

        Raises:
            ValueError: its content does not fit; nothing was taken.
        """
        answer: Future[Receipt] = Future()
        try:
            self._connect()
        except (RpcError, KeyError) as error:
            answer.set_result(Receipt("failed", f"the primary reducer cannot be asked: {error}"))
            return answer
        with self.level.locked():
            layout = self._layout
            if layout is None:
                # Without a model all must at least be like the one before.
                before = self.level.items[-1] if self.level.items else push
                layout = layout_of(before.gradients)
            check_gradients(push.gradients, layout)
            refusal = self._refusal(must_run)
            if refusal is not None:
                self.level.reply(push, answer, *refusal)
            elif self._trouble:
                # The primary may work again: the answer to the batch decides.
                self._trouble = ""
                self.level.waiting.append((push, answer))
            else:
                self.level.offer(push, answer, is_forced=push.is_again)
        return answer

    def withdraw(self, client: str, number: int) -> bool:
        """Send away a push that waits; False where it does not wait any more."""
        with self.level.locked():
            return self.level.dismiss("full", "", lambda push: push[:2] == (client, number))

    def run(self) -> None:
        with self.level.locked():
            self.is_running, self._failure, self._trouble = True, "", ""

    def halt(self) -> None:
        """Keep what is here and send those that wait elsewhere."""
        with self.level.locked():
            self.is_running = False
            self.level.dismiss("idle", f"the reducer {self._name!r} was stopped")

    def fail(self, text: str) -> None:
        """Answer every push by an error until `run`; what was being added is lost."""
        with self.level.locked():
            self._failure = text
            self.level.fail(text)

    def step(self) -> bool:
        """Do one piece of work; False where there is none."""
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

    def lose(self, state: State, text: str) -> None:
        """Take nothing any more: the primary is gone ("failed") or takes nothing ("fenced")."""
        with self.level.locked():
            self.lost = self.lost or (state, text)
            self.level.dismiss(*self.lost)
        if state == "fenced":
            # Those who watch send their pushes again, through others.
            _leave(self._end, is_in_order=False)

    def leave(self) -> None:
        """Tell those who watch that this reducer leaves in good order."""
        _leave(self._end)

    def _send(self, batch: Batch) -> None:
        try:
            self._primary.take(batch).add_done_callback(partial(self._on_answer, batch))
        except (RpcError, KeyError) as error:
            self.lose("failed", f"the primary reducer is gone: {error}")

    def _on_answer(self, batch: Batch, done: Future[Receipt]) -> None:
        try:
            receipt = done.wait()
        except Exception as error:
            self.lose("failed", f"the primary reducer is gone: {error}")
            return
        if receipt.state == "fenced":
            self.lose("fenced", receipt.text)
            return
        level = self.level
        with level.locked():
            level.is_sending = False
            level.dropped_by.update(receipt.dropped)
            if receipt.state == "failed":
                self._trouble = receipt.text
                level.dismiss("failed", receipt.text)
                return
            if receipt.state == "refused":
                self._layout = None
                level.dropped += len(batch.ids)
                text = "%d pushes at the reducer %r were refused: %s"
                logger.warning(text, len(batch.ids), self._name, receipt.text)
            level.unsent = None
            level.admit()

    def _connect(self) -> None:
        """Learn what gradients must look like; the primary may know it later than we live."""
        if self._layout is None and self.lost is None:
            self._layout = self._primary.layout()
        with self.level.locked():
            has_watched, self._is_watching = self._is_watching, True
        if not has_watched:
            self._primary.watch(lambda: self.lose("failed", "the primary reducer is gone"))

    def _refusal(self, must_run: bool) -> tuple[State, str] | None:
        if self.lost is not None:
            return self.lost
        if self._failure:
            return "failed", self._failure
        if must_run and not self.is_running:
            return "idle", f"the reducer {self._name!r} is not running"
        if self._trouble and not self.level.can_send:
            return "failed", self._trouble
        return None


def _leave(end: Future[bool], _: object = None, *, is_in_order: bool = True) -> None:
    # The first answer counts: torch refuses a second one.
    with contextlib.suppress(RuntimeError):
        end.set_result(is_in_order)
