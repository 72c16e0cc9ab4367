"""One model for many processes: whoever trains it pushes, whoever uses it pulls."""

from __future__ import annotations

import contextlib
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..calls.group import RpcGroup
from .model_state import check_model, load_snapshot, snapshot, state_of, unwrap
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
    """Pushes and pulls models to and from the server of that name; can be sent to other members.

    A model's version is its attribute `pp_version`, the only one that is added to it. Names are
    those of the model inside of wrappers for parallelism, so that any wrapper may push and any
    other, or none, may pull. A sharded model is pushed and pulled by all ranks that share it, and
    these must be the only ones to push; on one of them `push` returns True.

    Of a model that this object has pushed or pulled before, only the tensors that changed since
    travel, if the server is that of `PushPullModelServerImpl`; for that a copy of the state is kept
    as long as the model lives. Tensors that change at every push travel without being copied or
    compared, but for one push in 16, so that those that have stopped changing are found.

    Another model than the one that is kept is a KeyError (names) or a ValueError (shapes), and
    nothing is loaded. A server that is gone or does not answer in time is an RpcError.

    Args:
        model_name: the key under which the server keeps the model.
        o_server: where it is kept; of other ordered servers than the default one, whole states
            are pushed and pulled.
    """

    def __init__(self, model_name: str, o_server: OrderedServerBase | None = None) -> None:
        self.model_name = model_name
        self.o_server = o_server
        self._known: WeakKeyDictionary[nn.Module, KnownState] = WeakKeyDictionary()

    def push(self, model: nn.Module, pull_on_fail: bool = True) -> bool:
        """Offer the model's state as the successor of its version.

        Args:
            model: the model, whose version goes up by one if it is accepted. Nothing else may
                change it meanwhile.
            pull_on_fail: load the newest state where this one was refused. Gradients stay.

        Returns:
            Whether it was accepted: nobody else has pushed since the model was pulled.

        Raises:
            RuntimeError: it was refused, and there is nothing to pull.
            RpcError: the server is gone or has not answered in time; it may have accepted.
        """
        check_model(model)
        version = _version_of(model) or 0
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
        """Load the newest state, if the model's version is older or it has none.

        Returns:
            False where nothing was pushed yet; True otherwise, also when nothing is newer.
        """
        check_model(model)
        return self._load(model, _version_of(model))

    def __reduce__(self) -> Any:
        return type(self), (self.model_name, self.o_server)

    def _send(self, model: nn.Module, version: int) -> bool:
        server = self._server()
        if not isinstance(server, StateServer):
            return server.push(self.model_name, snapshot(model), version + 1, version)
        own = state_of(model)
        known = self._known.pop(unwrap(model), None)
        if known is None or known.version != version or not known.belongs_to(own):
            known = KnownState(version)
        try:
            is_accepted = self._send_changes(server, known, own)
        except NothingKeptError:
            # The server was started anew since.
            known = KnownState(version)
            is_accepted = self._send_changes(server, known, own)
        self._known[unwrap(model)] = known
        return is_accepted

    def _send_changes(self, server: StateServer, known: KnownState, own: dict[str, Any]) -> bool:
        changes = known.changes(own)
        sent = server.push_changes(self.model_name, changes, known.version, known.mark)
        # While they travel.
        known.keep(changes, own)
        mark = sent.wait()
        if mark is None:
            known.forget(changes)
            return False
        known.version, known.mark = known.version + 1, mark
        known.lacking = changes.keys() - known.state.keys()
        return True

    def _load(self, model: nn.Module, version: int | None) -> bool:
        """Load what is newer than `version`, None for anything; False where there is nothing."""
        inner = unwrap(model)
        known = self._known.get(inner)
        if known is None or known.version != _version_of(model):
            known = KnownState()
        update = pull_update(self._server(), self.model_name, version, known)
        if update is None:
            return False
        if update.state is not None:
            # Also of what the server has not changed: the model may have.
            known = known.updated(update)
            load_snapshot(model, known.state)
            _set_version(model, known.version)
            if known.mark is not None:
                self._known[inner] = known
        return True

    def _server(self) -> OrderedServerBase:
        if self.o_server is None:
            raise RuntimeError(
                f"PushPullModelServer({self.model_name!r}) was made without o_server"
            )
        return self.o_server


class PushPullModelServerImpl:
    """Keeps the newest states of one model.

    Lives in the process that makes it until `close`. A `PushPullModelServer` that calls it is
    paired under its name: `group.get_paired(server_name).to_here()`.

    Args:
        server_name: unique in the group.
        group: this process must be a member.
        model_name: the key under which the model is kept.
        o_server: where it is kept, default: an ordered server of its own, `<server_name>_o_server`,
            to and from which only changes travel.

    Raises:
        AssertionError: this process is no member.
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
        """Withdraw the server, and forget the model where it was kept here; may be called again."""
        self._offers.close()


def _version_of(model: nn.Module) -> int | None:
    inner: int | None = getattr(unwrap(model), "pp_version", None)
    return getattr(model, "pp_version", None) if inner is None else inner


def _set_version(model: nn.Module, version: int) -> None:
    for module in {unwrap(model), model}:
        module.pp_version = version  # type: ignore[assignment]
