"""The client of a gradient server: pushes gradients and pulls the trained model.

A client keeps each push until a secondary reducer reports that the primary has it. When a reducer
dies, the client asks the primary which pushes have arrived, and resends the others. The primary
then accepts nothing more from that reducer, so no push can arrive twice.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import threading
import uuid
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..calls import node as _node
from ..calls.group import RpcGroup
from ..calls.node import Node
from ..errors import RpcError
from .model_state import check_model, copied, get_state, load_snapshot, unwrap
from .ordered_server import KnownState, Mark, OrderedServerBase, Update, pull_update
from .reduction import Gradients, Push, Receipt, on_reducer_gone

logger = logging.getLogger(__name__)

# The secondary reducer in the primary's process, which takes pushes if no other one can.
_FALLBACK = ""


class PushPullGradServer:
    """A client of a gradient server, for any member; it can be sent to other members.

    It keeps the state that it pulled last, so that the server only sends tensors that are newer.

    Args:
        server_name: the name given to ``PushPullGradServerImpl``.
        group: the group of the server.
        model_name: the key of the managed model on ``o_server``.
        secondary_reducers: the names of the processes that take pushes.
        o_server: the ordered server where the managed model is published.
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
        # Identifies one server of that name: push numbers start again for each.
        self._token = token
        self._known = KnownState()

    @property
    def dropped(self) -> int:
        """The number of pushes that reducers have dropped, from their latest answers.

        Pushes of this process that could not be sent again after a reducer's death are included.
        """
        return self._sender().dropped

    def push(self, model: nn.Module) -> bool:
        """Send a model's gradients to a reducer, then ``pull``.

        After this returns, the gradients will be applied exactly once or counted as dropped, unless
        both the reducer and this process die, or the server is closed before they fill a batch.
        This process keeps a copy of them until the primary reducer has them. Parameters that do not
        require gradients are left out.

        Returns:
            The result of ``pull``.

        Raises:
            RuntimeError: a parameter has no gradient.
            ValueError: names or shapes differ from the managed model or, if there is none, from
                the pushes to which these gradients would be added.
            queue.Full: the reducer's queue stayed full for the world's ``rpc_timeout``, or it is
                full and ``on_full`` is "error".
            RpcError: the primary reducer has died or failed.
        """
        check_model(model)
        base = self._known
        return self._load(model, base, self._sender().push(_get_gradients(model), base.mark))

    def pull(self, model: nn.Module) -> bool:
        """Set a model's gradients to zero and its parameters to the newest published ones.

        Buffers are not changed, because the managed model never runs forward.

        Returns:
            False if nothing has been published yet, because there was no step.
        """
        check_model(model)
        return self._load(model, self._known, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_known": KnownState()}

    def _load(self, model: nn.Module, base: KnownState, update: Update | None) -> bool:
        """Load the newest state: ``base`` plus ``update``, which is pulled if it is None.

        The caller has read ``self._known`` once. It is only ever replaced, never changed, because
        other threads may pull.
        """
        model.zero_grad(set_to_none=False)
        if update is None:
            try:
                update = pull_update(self.o_server, self.model_name, None, base)
            except KeyError as error:
                raise RpcError(f"the ordered server of {self.server_name!r} is gone") from error
        if update is None:
            return False
        if update.state is not None:
            base = base.updated(update)
            if base.mark is not None:
                self._known = base
        model_state = get_state(model)
        buffers = dict(unwrap(model).named_buffers(remove_duplicate=False))
        load_snapshot(
            model, base.state | {name: model_state[name] for name in buffers if name in model_state}
        )
        return True

    def _sender(self) -> _Sender:
        """Return the sender that all clients of the server share in this process."""
        key = self.group.get_group_name(), self.server_name, self._token
        with _senders_lock:
            senders = _senders.setdefault(_node.current(), {})
            if key not in senders:
                senders[key] = _Sender(self.server_name, self.group, self.secondary_reducers)
            return senders[key]


def _get_gradients(model: nn.Module) -> Gradients:
    gradients = {}
    for name, parameter in unwrap(model).named_parameters():
        if not parameter.requires_grad:
            continue
        if not isinstance(parameter.grad, Tensor):
            raise RuntimeError(f"Parameter {name} doesn't have gradient to push!")
        gradients[name] = copied(parameter.grad).to_dense()
    return gradients


@dataclass
class _Pending:
    """A push that the primary may not have yet."""

    number: int
    gradients: Gradients
    # The reducer to which it was sent last.
    reducer: str = ""
    is_acknowledged: bool = False
    # The caller's state, and the update to the newest one if the reducer has sent it.
    mark: Mark | None = None
    update: Update | None = None


class _Sender:
    """Sends the pushes of this process to one server; any thread may push."""

    def __init__(self, server_name: str, group: RpcGroup, reducers: Iterable[str]) -> None:
        self._server_name = server_name
        self._group = group
        own_name = group.get_cur_name()
        self._client = f"{own_name}/{uuid.uuid4().hex[:12]}"
        self._own = [name for name in reducers if name == own_name]
        self._others = [name for name in reducers if name != own_name]
        # Guards the attributes below; nothing is sent while it is held.
        self._lock = threading.Lock()
        self._next_number = 0
        self._pushes: dict[int, _Pending] = {}
        # By reducer, and by our own name for pushes that could not be sent again.
        self._dropped: dict[str, int] = {}
        self._watched: set[str] = set()
        # Dead reducers, from which the primary accepts nothing.
        self._excluded: set[str] = set()
        # Held while the pushes of a dead reducer are sent again. Reentrant, because that may find
        # another reducer dead.
        self._recovering = threading.RLock()
        self._idle: set[str] = set()

    @property
    def dropped(self) -> int:
        return sum(self._dropped.values())

    def push(self, gradients: Gradients, mark: Mark | None) -> Update | None:
        """Deliver gradients to a living reducer; return the update since ``mark`` if it has one."""
        with self._lock:
            pending = _Pending(self._next_number, gradients, mark=mark)
            self._next_number += 1
            self._pushes[pending.number] = pending
        try:
            self._deliver(pending)
        except BaseException:
            with self._lock:
                self._pushes.pop(pending.number, None)
            raise
        # The push is kept until the primary has it, but the update in it is not needed any more.
        update, pending.update = pending.update, None
        return update

    def _deliver(self, pending: _Pending, is_retry: bool = False) -> None:
        """Try one reducer after another until one accepts the push."""
        while True:
            # Other processes first, so that a single death loses nothing.
            other_reducers = random.sample(self._others, len(self._others))
            for reducer in [*other_reducers, *self._own, _FALLBACK]:
                if self._try(reducer, pending, is_retry):
                    return

    def _try(self, reducer: str, pending: _Pending, is_retry: bool) -> bool:
        with self._lock:
            if reducer in self._excluded:
                return False
            at_reducer = (stored for stored in self._pushes.values() if stored.reducer == reducer)
            acknowledged = tuple(stored.number for stored in at_reducer if stored.is_acknowledged)
            pending.reducer = reducer
            low, content = min(self._pushes), pending.gradients
            push = Push(self._client, pending.number, low, content, acknowledged, is_retry)
        try:
            receipt = self._ask(reducer, push, pending)
        except (KeyError, RpcError) as error:
            self._recover(reducer, error)
            return self._has_arrived(pending)
        self._note_receipt(reducer, push, receipt)
        if receipt.state == "taken":
            with self._lock:
                # If the reducer dies from now on, its recovery resends this push.
                is_kept = pending.reducer not in self._excluded
                pending.is_acknowledged = is_kept
            return is_kept or self._has_arrived(pending)
        if receipt.state == "idle":
            self._idle.add(reducer)
            return False
        if receipt.state == "fenced":
            self._recover(reducer)
            return self._has_arrived(pending)
        raise (queue.Full if receipt.state == "full" else RpcError)(receipt.text)

    def _ask(self, reducer: str, push: Push, pending: _Pending) -> Receipt:
        """Return the reducer's answer; raise KeyError or RpcError if it is dead."""
        try:
            if reducer in self._idle and not self._call(reducer, "_is_running_service"):
                return Receipt("idle", pending=push.asked)
            self._idle.discard(reducer)
            call_args = push, reducer != _FALLBACK, pending.mark
            receipt: Receipt
            receipt, update = self._call(reducer, "_push_service", *call_args)
            pending.update = None if push.is_retry else update
            self._watch(reducer)
            return receipt
        except KeyError:
            if reducer == _FALLBACK or reducer in self._watched:
                raise
            # The reducer has not been created yet.
            return Receipt("idle", pending=push.asked)
        except RpcError as error:
            # Ask what became of the push; if this fails too, the reducer is dead.
            try:
                is_back = self._call(reducer, "_withdraw_service", push.client, push.number)
            except (KeyError, RpcError):
                raise error from None
            where = repr(reducer or "the primary")
            text = f"the queue of {where} has been full for too long: {error}"
            return Receipt("full" if is_back else "taken", text, pending=push.asked)

    def _note_receipt(self, reducer: str, push: Push, receipt: Receipt) -> None:
        """Delete the pushes that a reducer has handed over; log dropped ones."""
        with self._lock:
            before = self.dropped
            for name, count in receipt.dropped.items():
                self._dropped[name] = max(count, self._dropped.get(name, 0))
            for number in set(push.asked).difference(receipt.pending):
                if number in self._pushes and self._pushes[number].reducer == reducer:
                    del self._pushes[number]
        if self.dropped > before:
            logger.warning("%r has dropped %d pushes by now", self._server_name, self.dropped)

    def _has_arrived(self, pending: _Pending) -> bool:
        # Wait for a recovery that may be running.
        with self._recovering, self._lock:
            return pending.number not in self._pushes

    def _recover(self, reducer: str, reason: Exception | None = None) -> None:
        """Send the undelivered pushes of a dead reducer again through other reducers."""
        if reducer == _FALLBACK:
            raise self._primary_is_gone(reason) from reason
        with self._recovering:
            with self._lock:
                if reducer in self._excluded:
                    return
                # No push is sent to this reducer from now on, so the list below is complete.
                self._excluded.add(reducer)
                at_reducer = [push for push in self._pushes.values() if push.reducer == reducer]
            numbers = [push.number for push in at_reducer]
            try:
                arrived = self._call(_FALLBACK, "_fence_service", reducer, self._client, numbers)
            except (KeyError, RpcError) as error:
                with self._lock:
                    self._excluded.discard(reducer)
                raise self._primary_is_gone(error) from error
            with self._lock:
                for number in arrived:
                    self._pushes.pop(number, None)
                # Unacknowledged pushes are sent by the threads that wait for them.
                lacking = (push for push in at_reducer if push.number not in arrived)
                again = [push for push in lacking if push.is_acknowledged]
                for push in again:
                    push.is_acknowledged = False
            sent = sum([self._send_again(push) for push in again])
        logger.warning("reducer %r is gone: %d pushes were sent again", reducer, sent)

    def _send_again(self, pending: _Pending) -> bool:
        """Deliver a dead reducer's push; if that fails, count it as dropped and return False.

        The error is not raised, because the caller may be another push.
        """
        try:
            self._deliver(pending, is_retry=True)
        except Exception as error:
            with self._lock:
                self._pushes.pop(pending.number, None)
                self._dropped[self._client] = self._dropped.get(self._client, 0) + 1
            logger.warning("%r has dropped a push: %s", self._server_name, error)
            return False
        return True

    def _primary_is_gone(self, reason: Exception | None) -> RpcError:
        return RpcError(f"the primary reducer of {self._server_name!r} is gone: {reason}")

    def _watch(self, reducer: str) -> None:
        """Recover a reducer's pushes as soon as it dies, not only at the next push."""
        with self._lock:
            if reducer in self._watched or reducer == _FALLBACK:
                return
            self._watched.add(reducer)
        prefix = f"{self._server_name}/{reducer}"
        on_reducer_gone(self._group, prefix, partial(_recover_later, weakref.ref(self), reducer))

    def recover_quietly(self, reducer: str) -> None:
        """Recover the pushes at a reducer; the next push reports a dead primary."""
        with self._lock:
            is_used = any(push.reducer == reducer for push in self._pushes.values())
        if is_used:
            with contextlib.suppress(RuntimeError):
                self._recover(reducer)

    def _call(self, reducer: str, service: str, *args: Any) -> Any:
        prefix = f"{self._server_name}/{reducer}" if reducer else self._server_name
        return self._group.registered_sync(f"{prefix}/{service}", args)


def _recover_later(sender_ref: weakref.ref[_Sender], reducer: str) -> None:
    sender = sender_ref()
    if sender is not None:
        # Sending again may take a while.
        threading.Thread(target=sender.recover_quietly, args=(reducer,), daemon=True).start()


# By world and server; the senders of a world are freed with it.
_senders: weakref.WeakKeyDictionary[Node, dict[tuple[str, ...], _Sender]] = (
    weakref.WeakKeyDictionary()
)
_senders_lock = threading.Lock()
