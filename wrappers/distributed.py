"""The wrapper for one replica per process, gradients averaged."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ..registry import MODEL_WRAPPERS
from .options import check_options
from .step import Steps, refuse_own_train_step
from .sync_conversion import convert_sync_batchnorm

_NAMES = [
    "StepDistributedDataParallel",
    "MMDistributedDataParallel",
    "DistributedDataParallel",
    "ddp",
]
_TORCH_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters


@MODEL_WRAPPERS.register_module(name=_NAMES)
class StepDistributedDataParallel(Steps, DistributedDataParallel):
    """torch's ``DistributedDataParallel`` with the three steps.

    Needs a process group, and every rank must construct it. For another optimization step
    override ``train_step(data, optim_wrapper)`` in a subclass; it must compute its losses by
    ``self(...)``, because ``self.module(...)`` leaves the gradients of the ranks apart::

        @MODEL_WRAPPERS.register_module()
        class PenalisedDDP(StepDistributedDataParallel):
            def train_step(self, data, optim_wrapper):
                with optim_wrapper.optim_context(self):
                    losses = self(*self.module.data_preprocessor(data, True), mode="loss")
                loss = losses["loss"] + penalty(self.module)
                optim_wrapper.update_params(loss)
                return {"loss": loss.detach()}

    Args:
        module: the model, on the device where it is to be trained.
        detect_anomalous_params: log the parameters that the loss does not reach, on every step.
        sync_batchnorm: make the model's BatchNorm layers train with the statistics of all ranks,
            by ``convert_sync_batchnorm``; without a process group it has no effect.
        ddp_kwargs: every option of torch's class. ``device_ids`` is by default the CUDA
            device of the parameters, and none on the CPU.

    Raises:
        TypeError: torch's class has no such option, or the model has a ``train_step`` of its
            own.
        ValueError: no process group.
        RuntimeError: no parameter requires a gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        detect_anomalous_params: bool = False,
        *,
        sync_batchnorm: bool = False,
        **ddp_kwargs: Any,
    ) -> None:
        self.check_options(ddp_kwargs)
        refuse_own_train_step(type(self), module, "skips the averaging of the gradients")
        if sync_batchnorm:
            module = convert_sync_batchnorm(module, ddp_kwargs.get("process_group"))
        ddp_kwargs.setdefault("device_ids", _device_ids(module))
        super().__init__(module=module, **_renamed(ddp_kwargs))
        self._prepare_steps(detect_anomalous_params)
        self._graph_recorded = False

    def sync_buffers(self) -> None:
        """Give every rank the buffers of the first, before evaluation.

        Every rank must call this: torch does it at the start of a forward only, and training
        ends with one after which the running statistics differ.
        """
        source = distributed.get_global_rank(self.process_group, 0)
        works = [
            distributed.broadcast(buffer, source, group=self.process_group, async_op=True)
            for buffer in self.module.buffers()
        ]
        for work in works:
            work.wait()

    def no_sync(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Leave the gradients of the forwards inside on their ranks."""
        # A static graph is recorded by a first backward that must synchronise, else torch fails
        # an internal assertion; averaging that one early changes no sum of gradients.
        if self.static_graph and not self._graph_recorded:
            self._graph_recorded = True
            return nullcontext()
        context: AbstractContextManager[Any] = super().no_sync()
        return context

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._graph_recorded = False

    @classmethod
    def check_options(cls, options: dict[str, Any]) -> None:
        """Raise TypeError for an option that this class does not take."""
        names = [name for name in cls.config_signature().parameters if name != "module"]
        check_options(cls.__name__, options, names)

    @classmethod
    def config_signature(cls) -> inspect.Signature:
        """The arguments with torch's options in place of ``**ddp_kwargs``."""
        own = inspect.signature(cls.__init__).parameters.values()
        kept = [one for one in own if one.name != "self" and one.kind is not one.VAR_KEYWORD]
        if not any(one.kind is one.VAR_KEYWORD for one in own):
            return inspect.Signature(kept)
        mine = {"self", *(one.name for one in kept)}
        kept += [
            one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, one in _TORCH_OPTIONS.items()
            if name not in mine
        ]
        return inspect.Signature(kept)


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    """``broadcast_buffers`` under its name in newer versions of torch, which warn of the old."""
    new = "forward_sync_buffers"
    old = options.get("broadcast_buffers")
    if old is None or options.get(new) is not None or new not in _TORCH_OPTIONS:
        return options
    return {**{k: v for k, v in options.items() if k != "broadcast_buffers"}, new: old}


def _device_ids(module: nn.Module) -> list[Any] | None:
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) == 1:
        (device,) = devices
        if device.type == "cuda":
            return [device]
    return None
