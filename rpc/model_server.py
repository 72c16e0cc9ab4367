"""One model for many processes: whoever trains it pushes, whoever uses it pulls."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ._model_state import copied, load_snapshot, on_cpu, state_of, unwrap
from ._state_server import Mark, NothingKeptError, State, StateServer, StateServerImpl, Update
from .group import RpcGroup
from .ordered_server import OrderedServerBase, hold

# An integer of the same size, by which tensors are compared: NaN is itself, and -0 is not 0.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PushPullModelServer:
    """Pushes and pulls models to and from the server of that name; can be sent to other members.

    A model's version is its attribute `pp_version`, the only one that is added to it. Names are
    those of the model inside of wrappers for parallelism, so that any wrapper may push and any
    other, or none, may pull. A sharded model is pushed and pulled by all ranks that share it, and
    these must be the only ones to push; on one of them `push` returns True.

    Of a model that this object has pushed or pulled before, only the tensors that changed since
    travel, if the server is that of `PushPullModelServerImpl`; for that a copy of the state is kept
    as long as the model lives.

    Args:
        model_name: the key under which the server keeps the model.
        o_server: where it is kept; of other ordered servers than the default one, whole states
            are pushed and pulled.
    """

    def __init__(self, model_name: str, o_server: OrderedServerBase | None = None) -> None:
        self.model_name = model_name
        self.o_server = o_server
        self._known: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()

    def push(self, model: nn.Module, pull_on_fail: bool = True) -> bool:
        """Offer the model's state as the successor of its version.

        Args:
            model: the model, whose version goes up by one if it is accepted.
            pull_on_fail: load the newest state where this one was refused. Gradients stay.

        Returns:
            Whether it was accepted: nobody else has pushed since the model was pulled.

        Raises:
            RuntimeError: it was refused, and there is nothing to pull.
            KeyError: another model is kept there: names differ. Nothing was loaded.
            ValueError: likewise: shapes differ.
            RpcError: the server is gone or has not answered in time; it may have accepted.
        """
        version = _version_of(model)
        if version is None:
            version = 0
            _set_version(model, version)
        known, own = self._known_of(model, version), state_of(model)
        if known is not None and known.state.keys() != own.keys():
            known = None
        state = _changes(own, known)
        accepted, mark = self._send(state, version, known)
        if accepted:
            self._note(model, version + 1, mark, state if known is None else known.state | state)
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

        Raises:
            KeyError: another model is kept there: names differ. Nothing was loaded.
            ValueError: likewise: shapes differ.
            RpcError: the server is gone or has not answered in time.
        """
        return self._load(model, _version_of(model))

    def __reduce__(self) -> Any:
        return type(self), (self.model_name, self.o_server)

    def _send(self, state: State, version: int, known: _Known | None) -> tuple[bool, Mark | None]:
        server = self._server()
        if not isinstance(server, StateServer):
            return server.push(self.model_name, state, version + 1, version), None
        versions = {"version": version + 1, "prev_version": version}
        mark = None if known is None else known.mark
        try:
            pushed = server.push_changes(self.model_name, state, mark=mark, **versions)
        except NothingKeptError:
            # The server was started anew since.
            assert known is not None
            whole = known.state | dict(state)
            pushed = server.push_changes(self.model_name, whole, mark=None, **versions)
        return pushed is not None, pushed

    def _load(self, model: nn.Module, version: int | None) -> bool:
        """Load what is newer than `version`, None for anything; False where there is nothing."""
        known = self._known_of(model, _version_of(model))
        update = self._update(version, known)
        if update is None:
            return False
        if update.state is not None:
            state = dict(update.state)
            if not update.is_whole:
                assert known is not None
                # What the model itself has changed since must be undone, too.
                state = known.state | state
            load_snapshot(model, state)
            self._note(model, update.version, update.mark, state)
        return True

    def _update(self, version: int | None, known: _Known | None) -> Update | None:
        server = self._server()
        if isinstance(server, StateServer):
            return server.pull_changes(self.model_name, version, known and known.mark)
        found = server.pull(self.model_name)
        if found is None:
            return None
        state, newest = found
        is_newer = version is None or newest > version
        return Update(newest, None, is_whole=True, state=state if is_newer else None)

    def _server(self) -> OrderedServerBase:
        if self.o_server is None:
            raise RuntimeError(
                f"PushPullModelServer({self.model_name!r}) was made without o_server"
            )
        return self.o_server

    def _known_of(self, model: nn.Module, version: int | None) -> _Known | None:
        known = self._known.get(unwrap(model))
        return known if known is not None and known.version == version else None

    def _note(self, model: nn.Module, version: int, mark: Mark | None, state: State) -> None:
        if mark is not None:
            self._known[unwrap(model)] = _Known(version, mark, dict(state))
        _set_version(model, version)


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
                name = f"{server_name}_o_server"
                undo.callback(StateServerImpl(name, group).close)
                o_server = StateServer(name, group)
            self.o_server = o_server
            hold(undo, group, "value", server_name, PushPullModelServer(model_name, o_server))
            self._held = undo.pop_all()

    def close(self) -> None:
        """Withdraw the server, and forget the model where it was kept here; may be called again."""
        self._held.close()


class _Known(NamedTuple):
    """What the server is known to have: the state of a model when it was last pushed or pulled."""

    version: int
    mark: Mark
    state: dict[str, Any]


def _version_of(model: nn.Module) -> int | None:
    inner: int | None = getattr(unwrap(model), "pp_version", None)
    return getattr(model, "pp_version", None) if inner is None else inner


def _set_version(model: nn.Module, version: int) -> None:
    for module in {unwrap(model), model}:
        module.pp_version = version  # type: ignore[assignment]


def _changes(own: State, known: _Known | None) -> dict[str, Any]:
    """Return copies of what differs from what the server has; of everything, if that is unknown."""
    if known is None:
        return {name: copied(value) for name, value in own.items()}
    changes = {}
    for name, value in own.items():
        here = on_cpu(value)
        if not _is_same(known.state[name], here):
            changes[name] = copied(value) if here is value else here
    return changes


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = _BITS.get(one.element_size())
    return (
        torch.equal(one, other) if bits is None else torch.equal(one.view(bits), other.view(bits))
    )
