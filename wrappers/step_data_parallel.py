"""The steps of a model of which several copies run in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ..collectives import distributed_available
from ..registry import MODEL_WRAPPERS
from .batchnorm.conversion import apply_sync_batchnorm
from .replicas.data_parallel import ReplicationCallbackDataParallel
from .replicas.scatter_gather import dict_gather, join, share_of_each
from .steps.preprocess import move
from .steps.step import Steps, refuse_own_train_step
from .torch_functions import uncompiled


@MODEL_WRAPPERS.register_module(name=["StepDataParallel", "MMDataParallel", "DataParallel", "dp"])
class StepDataParallel(Steps, ReplicationCallbackDataParallel):
    """``ReplicationCallbackDataParallel`` with the three steps.

    For one process and a batch that is split over several devices. In a training step
    (``mode="loss"``) losses without dimensions are averaged, each copy weighted by its part of
    the batch (the size of the first tensor among its inputs). So a mean over samples is that of
    the whole batch, but a sum over samples comes out smaller, and a mean that counts samples
    unequally (ignored labels, class weights) differs: return the samples' losses instead, or give
    the optimizer wrapper a ``loss_weight``. Losses with dimensions are concatenated, as are lists
    in ``mode="predict"``.

    ``val_step`` and ``test_step`` evaluate on the first device, without copies. Another step is a
    subclass's ``train_step(data, optim_wrapper)``; ``self(..., mode="loss")`` uses all devices.

    Args:
        module: the model, on the first of the devices.
        device_ids, dim: as in ``ReplicationCallbackDataParallel``.
        output_device: as there; also where the losses are added.
        detect_anomalous_params: log the parameters that the loss does not reach, on every step.
        sync_batchnorm: make the model's BatchNorm layers train with the statistics of the whole
            batch, by ``convert_sync_batchnorm``; or a mapping with its ``precision``.
        options: ``scatter`` (``mode`` is given to every copy besides), ``gather`` (not used for
            losses and for lists of predictions) and ``timeout_s``, as there.

    Raises:
        TypeError: the model has a ``train_step`` of its own, a part of it is compiled, or there
            is no such option.
        RuntimeError: there are several ranks, whose gradients nobody would average.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        *,
        detect_anomalous_params: bool = False,
        sync_batchnorm: bool | Mapping[str, Any] = False,
        **options: Any,
    ) -> None:
        StepDataParallel.check_options(options)
        refuse_own_train_step(type(self), module, "uses one device only")
        if distributed_available() and (ranks := distributed.get_world_size()) > 1:
            raise RuntimeError(
                f"{type(self).__name__} steps in one process and would leave the gradients of "
                f"{ranks} ranks apart; use ddp, or one rank (launch.nproc=1)"
            )
        module = apply_sync_batchnorm(module, sync_batchnorm)
        super().__init__(module, device_ids, output_device, dim, **options)
        self._prepare_steps(detect_anomalous_params)
        self._loss_weight: Any = None

    def weigh_by(self, loss_weight: Any) -> None:
        """Weigh the parts of a batch by a ``LossWeight``, as the whole one is weighed."""
        self._loss_weight = loss_weight

    @uncompiled("its copies are new modules in other threads")
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As in the base class, with losses and predictions joined as those of one batch."""
        mode = kwargs.get("mode")
        if mode is None and any(one in ("loss", "predict") for one in inputs if type(one) is str):
            raise TypeError("mode must be given by its name, as in mode='loss'")
        if mode not in ("loss", "predict"):
            return super().forward(*inputs, **kwargs)
        outputs, arguments = self._outputs(inputs, kwargs)
        device = self._output_device()
        if mode == "loss":
            shares = self._shares(*arguments)
            return join(outputs, lambda parts: _averaged(parts, shares, device))
        if all(isinstance(one, list) for one in outputs):
            return list(chain.from_iterable(move(outputs, device)))
        return self.gather(outputs, device)

    def _shares(self, inputs: Any, kwargs: Any) -> list[float]:
        """The part of the batch that each copy has."""
        if self._loss_weight is None:
            return share_of_each(inputs, kwargs, self.dim)
        named = [{key: one for key, one in each.items() if key != "mode"} for each in kwargs]
        batches = [own or args for own, args in zip(named, inputs, strict=True)]
        weights = [float(self._loss_weight.of(batch)) for batch in batches]
        total = sum(weights)
        return [weight / total if total else 0.0 for weight in weights]

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]) -> Any:
        """Split the arguments over the devices, but give every copy the ``mode``."""
        if "mode" not in kwargs:
            return super().scatter(inputs, kwargs, device_ids)
        others = dict(kwargs)
        mode = {"mode": others.pop("mode")}
        chunks, named = super().scatter(inputs, others, device_ids)
        if not chunks and not named:
            return [()], [mode]
        return chunks, [{**one, **mode} for one in named]


def _averaged(parts: list[Tensor], shares: list[float], device: torch.device) -> Tensor:
    """One loss out of those of the copies, which had these shares of the batch."""
    if parts[0].ndim:
        return dict_gather(parts, device)  # type: ignore[no-any-return]
    pairs = zip(parts, shares, strict=True)
    # A mean over nothing may be a NaN, which it would remain times 0.
    weighted = ((part if share else part.nan_to_num()).to(device) * share for part, share in pairs)
    return reduce(torch.add, weighted)
