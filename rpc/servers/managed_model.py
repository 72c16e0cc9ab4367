"""The model that a gradient server trains: what a step is, and how its state is published."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..calls import node as _node
from .model_state import snapshot, unwrap
from .ordered_server import OrderedServerBase, OrderedServerSimple
from .reduction import Gradients, Layout, layout_of

logger = logging.getLogger(__name__)


class Unmanaged:
    """No model: gradients are reduced and forgotten."""

    layout: Layout | None = None

    def step(self, gradients: Gradients) -> None:
        """Forget them."""

    def publish(self) -> None:
        """Publish nothing."""


class ManagedModel:
    """A model with its optimizer.

    Args:
        model: its parameters that require a gradient are trained; gets `pp_version`, 0.
        optimizer: of its parameters.
        lr_scheduler: stepped once after each step of the optimizer; None for none.
        o_server: where the state is published.
        model_name: under which key.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        lr_scheduler: Any,
        *,
        o_server: OrderedServerBase,
        model_name: str,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._lr_scheduler = lr_scheduler
        self._o_server = o_server
        self._model_name = model_name
        self._trained = {
            name: parameter
            for name, parameter in unwrap(model).named_parameters()
            if parameter.requires_grad
        }
        self.layout: Layout | None = layout_of(self._trained)
        _set_version(model, 0)

    def step(self, gradients: Gradients) -> None:
        """Train one step."""
        for name, parameter in self._trained.items():
            parameter.grad = gradients[name].to(parameter.device, parameter.dtype)
        self._optimizer.step()
        if self._lr_scheduler is not None:
            self._lr_scheduler.step()

    def publish(self) -> None:
        """Make the state the newest version on the ordered server."""
        state, version = snapshot(self._model), _version(self._model)
        if self._push(state, version):
            return
        found = self._o_server.pull(self._model_name)
        newest = None if found is None else found[1]
        logger.warning(
            "version %r of model %r was refused by its ordered server, which has %r: somebody "
            "else publishes under that name, or has done so before",
            *(version + 1, self._model_name, newest),
        )
        if isinstance(newest, int):
            self._push(state, newest)

    def _push(self, state: Gradients, version: int) -> bool:
        push = _service_here(self._o_server) or self._o_server.push
        is_accepted = push(self._model_name, state, version + 1, version)
        if is_accepted:
            _set_version(self._model, version + 1)
        return is_accepted


def _service_here(o_server: OrderedServerBase) -> Callable[..., bool] | None:
    """Return what a push calls in the end, where that is in this process.

    A call between processes copies the state, which is a copy already that nobody changes.
    """
    if type(o_server).push is not OrderedServerSimple.push:
        return None
    assert isinstance(o_server, OrderedServerSimple)
    place = o_server.group.get_group_name(), f"{o_server.server_name}/_push_service"
    service: Callable[..., bool] | None = _node.current().tables["service"].get(place)
    return service


def _version(model: nn.Module) -> int:
    version: Any = model.pp_version
    return int(version)


def _set_version(model: nn.Module, version: int) -> None:
    # The documented attribute; nn.Module's own types know tensors and modules only.
    model.pp_version = version  # type: ignore[assignment]
