"""The wrapper for one device."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...registry import MODEL_WRAPPERS
from .step import Steps, has_own_train_step


@MODEL_WRAPPERS.register_module(name=["SingleDevice", "single"])
class SingleDevice(Steps, nn.Module):
    """Steps a model on the device it is on.

    A model with a ``train_step`` of its own is stepped by it. For another optimization step
    override ``train_step(data, optim_wrapper)`` (also ``val_step`` and ``test_step``) in a
    subclass::

        @MODEL_WRAPPERS.register_module()
        class Twice(SingleDevice):
            def train_step(self, data, optim_wrapper):
                super().train_step(data, optim_wrapper)
                return super().train_step(data, optim_wrapper)

    Args:
        module: the model.
        detect_anomalous_params: log the parameters that the loss does not reach, on every step;
            costs some microseconds per parameter and step, so for the search of a mistake only.
    """

    def __init__(self, module: nn.Module, *, detect_anomalous_params: bool = False) -> None:
        super().__init__()
        self.module = module
        self._prepare_steps(detect_anomalous_params)
        self._direct = type(self).forward is SingleDevice.forward
        self._model_steps = has_own_train_step(module)
        if detect_anomalous_params and self._model_steps:
            raise ValueError(
                f"detect_anomalous_params needs the wrapper's own train_step, but "
                f"{type(module).__name__}.train_step is used"
            )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.module(*inputs, **kwargs)
