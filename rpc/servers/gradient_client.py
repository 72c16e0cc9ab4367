"""The accessor of a gradient server: pushes gradients, pulls the model that they have trained."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ..calls.group import RpcGroup
from ..errors import RpcError
from .model_state import check_model, copied, load_snapshot, state_of, unwrap
from .ordered_server import OrderedServerBase
from .reduction import Gradients
from .sender import Sender, sender_to
from .state_server import KnownState, StateServer, Update, Wanted


class PushPullGradServer:
    """Calls the gradient server of that name, from any member; can be sent to other members.

    Keeps the state that it has pulled last: where nothing is newer, nothing travels.

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
        self._known = KnownState()

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
        check_model(model)
        known, wanted = self._known, None
        if isinstance(self.o_server, StateServer):
            group = self.o_server.group.get_group_name()
            wanted = Wanted(group, self.o_server.server_name, self.model_name, known.mark)
        update = self._sender().push(_gradients_of(model), wanted)
        if update is None:
            return self.pull(model)
        model.zero_grad(set_to_none=False)
        _load(model, self._updated(known, update))
        return True

    def pull(self, model: nn.Module) -> bool:
        """Set a model's gradients to zero and its parameters to the newest published ones.

        Buffers stay as they are: the managed model sees no data.

        Returns:
            False where nothing has been published.

        Raises:
            RpcError: the server is gone, or has not answered in time.
        """
        check_model(model)
        model.zero_grad(set_to_none=False)
        try:
            state = self._newest()
        except KeyError as error:
            raise RpcError(f"the ordered server of {self.server_name!r} is gone") from error
        if state is None:
            return False
        _load(model, state)
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_known": KnownState()}

    def _newest(self) -> dict[str, Any] | None:
        if not isinstance(self.o_server, StateServer):
            found = self.o_server.pull(self.model_name)
            return None if found is None else dict(found[0])
        # Once, and replaced as a whole: other threads may pull.
        known = self._known
        update = self.o_server.pull_changes(self.model_name, None, known.mark)
        if update is None:
            return None
        return self._updated(known, update)

    def _updated(self, known: KnownState, update: Update) -> dict[str, Any]:
        if update.state is not None:
            known = self._known = known.updated(update)
        return known.state

    def _sender(self) -> Sender:
        return sender_to(self.server_name, self.group, self.secondary_reducers, self._token)


def _load(model: nn.Module, state: dict[str, Any]) -> None:
    """Load a state, but for the buffers."""
    own = state_of(model)
    buffers = dict(unwrap(model).named_buffers(remove_duplicate=False))
    load_snapshot(model, state | {name: own[name] for name in buffers if name in own})


def _gradients_of(model: nn.Module) -> Gradients:
    gradients = {}
    for name, parameter in unwrap(model).named_parameters():
        if not parameter.requires_grad:
            continue
        if not isinstance(parameter.grad, Tensor):
            raise RuntimeError(f"Parameter {name} doesn't have gradient to push!")
        gradients[name] = copied(parameter.grad).to_dense()
    return gradients
