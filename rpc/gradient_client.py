"""The accessor of a gradient server: pushes gradients, pulls the model that they have trained."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from ._model_state import copied, load_snapshot, state_of, unwrap
from ._reduction import Gradients
from ._sender import Sender, sender_to
from .errors import RpcError
from .group import RpcGroup
from .ordered_server import OrderedServerBase


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


def _gradients_of(model: nn.Module) -> Gradients:
    gradients = {}
    for name, parameter in unwrap(model).named_parameters():
        if not parameter.requires_grad:
            continue
        if not isinstance(parameter.grad, Tensor):
            raise RuntimeError(f"Parameter {name} doesn't have gradient to push!")
        gradients[name] = copied(parameter.grad).to_dense()
    return gradients
