"""A server for one model: trainers push its state, and users pull it."""

from __future__ import annotations

import contextlib
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..calls.group import RpcGroup
from .model_state import check_model, get_state, load_snapshot, snapshot, unwrap
from .ordered_server import (
    KnownState,
    NothingKeptError,
    OrderedServerBase,
    StateServer,
    offer,
    own_state_server,
    pull_update,
)


class PushPullModelServer:
    """A client of a model server that pushes and pulls models; it can be sent to other members.

    A model's version is stored in its attribute ``pp_version``. Parameters have the names that they
    have inside parallel wrappers, so differently wrapped models can be pushed and pulled. All ranks
    of a sharded model must push and pull together, and other processes must not push. ``push`` then
    returns True on one of the ranks.

    With the default ordered server, only tensors that have changed since the last push or pull of a
    model are sent. For that, a copy of the state is kept as long as the model lives. CPU tensors
    that change at every push are only copied and compared at one push in 16, to find tensors that
    no longer change.

    Args:
        model_name: the key under which the server keeps the model.
        o_server: the ordered server that keeps it. With servers other than the default one, whole
            states are pushed and pulled.

    Raises:
        KeyError: from ``push`` and ``pull``: the names differ from the stored model; nothing is
            stored or loaded. Servers other than the default one compare in ``pull`` only.
        ValueError: from ``push`` and ``pull``: likewise for the shapes.
        RpcError: from ``push`` and ``pull``: the server has died or does not answer in time.
        RuntimeError: from ``push`` and ``pull``: ``o_server`` is None.
        TypeError: from ``push`` and ``pull``: the model is not a module, or entries of the stored
            state are not tensors, but are tensors in the model.
    """

    def __init__(self, model_name: str, o_server: OrderedServerBase | None = None) -> None:
        self.model_name = model_name
        self.o_server = o_server
        self._known: WeakKeyDictionary[nn.Module, KnownState] = WeakKeyDictionary()

    def push(self, model: nn.Module, pull_on_fail: bool = True) -> bool:
        """Push the model's state as the successor of its version.

        Args:
            model: the model; its version increases by one if the push is accepted. It must not be
                changed during the call.
            pull_on_fail: whether to load the newest state if the push is refused. Gradients are
                kept.

        Returns:
            Whether the push was accepted: True unless another process has pushed since the model
            was pulled.

        Raises:
            RuntimeError: the push was refused, and there is nothing to pull.
            RpcError: the server has died or does not answer in time. It may have accepted the push
                nevertheless.
        """
        check_model(model)
        version = _get_version(model) or 0
        _set_version(model, version)
        if self._send(model, version):
            _set_version(model, version + 1)
            return True
        if pull_on_fail and not self._load(model, None):
            raise RuntimeError(
                f"version {version + 1} of {self.model_name!r} was refused, and there is nothing "
                "to pull instead"
            )
        return False

    def pull(self, model: nn.Module) -> bool:
        """Load the newest state if the model's version is older or missing.

        Returns:
            False if nothing was pushed yet; True otherwise, even if nothing is newer.
        """
        check_model(model)
        return self._load(model, _get_version(model))

    def __reduce__(self) -> Any:
        return type(self), (self.model_name, self.o_server)

    def _send(self, model: nn.Module, version: int) -> bool:
        server = self._server()
        if not isinstance(server, StateServer):
            return server.push(self.model_name, snapshot(model), version + 1, version)
        model_state = get_state(model)
        base = self._known.pop(unwrap(model), None)
        if base is None or base.version != version or not base.belongs_to(model_state):
            base = KnownState(version)
        try:
            is_accepted = self._send_changes(server, base, model_state)
        except NothingKeptError:
            # The server was restarted.
            base = KnownState(version)
            is_accepted = self._send_changes(server, base, model_state)
        self._known[unwrap(model)] = base
        return is_accepted

    def _send_changes(
        self, server: StateServer, base: KnownState, model_state: dict[str, Any]
    ) -> bool:
        changes = base.changes(model_state)
        sent = server.push_changes(self.model_name, changes, base.version, base.mark)
        # Copy while the changes are being sent.
        base.keep(changes, model_state)
        mark = sent.wait()
        if mark is None:
            base.forget(changes)
            return False
        base.version, base.mark = base.version + 1, mark
        base.lacking = changes.keys() - base.state.keys()
        return True

    def _load(self, model: nn.Module, version: int | None) -> bool:
        """Load the newest state if it is newer than ``version``; None loads it in any case.

        Return False if the server has none.
        """
        inner = unwrap(model)
        base = self._known.get(inner)
        if base is None or base.version != _get_version(model):
            base = KnownState()
        update = pull_update(self._server(), self.model_name, version, base)
        if update is None:
            return False
        if update.state is not None:
            # Load unchanged tensors too, because the model may have changed them.
            base = base.updated(update)
            load_snapshot(model, base.state)
            _set_version(model, base.version)
            if base.mark is not None:
                self._known[inner] = base
        return True

    def _server(self) -> OrderedServerBase:
        if self.o_server is None:
            raise RuntimeError(
                f"PushPullModelServer({self.model_name!r}) must be created with o_server, got None"
            )
        return self.o_server


class PushPullModelServerImpl:
    """A server for the newest states of one model.

    It lives in the process that creates it until ``close``. Members get a client, a
    ``PushPullModelServer``, by ``group.get_paired(server_name).to_here()``.

    Args:
        server_name: unique in the group.
        group: this process must be a member.
        model_name: the key under which the model is kept.
        o_server: the ordered server that keeps it; default: a new one with the name
            ``<server_name>_o_server``, with which clients only exchange changes.

    Raises:
        AssertionError: this process is not a member.
        KeyError: the group has a server of that name.
    """

    def __init__(
        self,
        server_name: str,
        group: RpcGroup,
        model_name: str = "model",
        o_server: OrderedServerBase | None = None,
    ) -> None:
        self.server_name = server_name
        self.group = group
        self.model_name = model_name
        with contextlib.ExitStack() as undo:
            if o_server is None:
                o_server = own_state_server(undo, server_name, group)
            self.o_server = o_server
            offer(undo, group, "value", server_name, PushPullModelServer(model_name, o_server))
            self._offers = undo.pop_all()

    def close(self) -> None:
        """Withdraw the server, and delete a model that is kept here; may be called again."""
        self._offers.close()


def _get_version(model: nn.Module) -> int | None:
    inner: int | None = getattr(unwrap(model), "pp_version", None)
    return getattr(model, "pp_version", None) if inner is None else inner


def _set_version(model: nn.Module, version: int) -> None:
    for module in {unwrap(model), model}:
        module.pp_version = version  # type: ignore[assignment]
