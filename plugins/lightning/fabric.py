"""Our wrappers inside Fabric."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...wrappers import wrap_model
from .options import aside, has_own_step, read_options
from .tree import FABRIC_REGISTRY, FabricDDPStrategy


class StepFabricStrategy(FabricDDPStrategy):
    """Fabric's DDP strategy with our ``ddp`` wrapper, or a subclass of it, around modules.

    Args:
        wrapper: a registered name, an import path or a class; default: "ddp".
        wrapper_options: options of the wrapper, and those of Fabric's ``DDPStrategy``.

    Raises:
        KeyError: no such wrapper.
        TypeError: no such option, or a wrapper that is not built on DistributedDataParallel:
            ``fabric.no_backward_sync`` would not know it. Or one with a ``train_step`` of its own.
    """

    def __init__(
        self, wrapper: str | Callable[..., nn.Module] | None = None, **wrapper_options: Any
    ) -> None:
        choice = read_options(StepFabricStrategy, wrapper, wrapper_options)
        kind = choice.wrapper
        if not (isinstance(kind, type) and issubclass(kind, DistributedDataParallel)):
            raise TypeError(
                f"Fabric takes wrappers built on DistributedDataParallel, not "
                f"{getattr(kind, '__name__', kind)}: fabric.no_backward_sync knows no other. Use "
                "the Trainer, or call the wrapper's train_step in a loop without Fabric"
            )
        if has_own_step(kind):
            raise TypeError(
                f"{kind.__name__} has a train_step of its own, which Fabric does not call: use "
                "StepStrategy with a StepLightningModule, or call it in a loop without Fabric"
            )
        super().__init__(**choice.own)
        self.wrapper = choice.wrapper
        self.wrapper_options = choice.options
        self._detecting: Any = None

    def setup_module(self, module: nn.Module) -> Any:
        """Wrap ``module``; every rank must call this."""
        with aside(self.root_device):
            wrapped: Any = wrap_model(self.wrapper, module, **self.wrapper_options)
        # Who names no model in fabric.backward has one, or means the last.
        self._detecting = wrapped
        return wrapped

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run backward; log the parameters that the loss does not reach, where that is wanted."""
        plain = super().backward
        wrapped: Any = self._detecting if module is None else module
        if not getattr(wrapped, "detect_anomalous_params", False):
            plain(tensor, module, *args, **kwargs)
            return
        update = SimpleNamespace(update_params=lambda loss: plain(loss, module, *args, **kwargs))
        wrapped.update_and_detect(tensor, update)


for _name, _method in (("stepwrap", "popen"), ("stepwrap_spawn", "spawn")):
    FABRIC_REGISTRY.register(
        _name,
        StepFabricStrategy,
        description=f"stepwrap's ddp wrapper, processes by {_method}",
        override=True,
        start_method=_method,
    )
