"""The wrappers for one process: on one device, or with a copy of the model on each device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ..collectives import distributed_available
from ..primitives.tensor_bits import widest_float
from ..registry import MODEL_WRAPPERS
from .batchnorm.conversion import apply_sync_batchnorm
from .replicas.data_parallel import ReplicationCallbackDataParallel
from .replicas.scatter_gather import dict_gather, join, scatter_samples, share_of_each
from .steps.plain_models import drops_mode, prepare_steps
from .steps.preprocess import move
from .steps.step import ModelWrapper, reject_model_train_step
from .torch_functions import uncompiled


@MODEL_WRAPPERS.register_module(name=["SingleDevice", "single"])
class SingleDevice(ModelWrapper, nn.Module):
    """Run the steps of a model on the device of the model.

    If the model defines ``train_step``, that method is used. To change a step, override
    ``train_step``, ``val_step`` or ``test_step`` in a subclass; see docs/custom_steps.md.

    Args:
        detect_anomalous_params: after every step, search for parameters without a gradient, and
            log each set of them once. It takes some microseconds per parameter and step, so use it
            for debugging only.

    Raises:
        ValueError: ``detect_anomalous_params`` is set, and the model defines ``train_step``.
    """

    def __init__(self, module: nn.Module, *, detect_anomalous_params: bool = False) -> None:
        super().__init__()
        self.module = module
        prepare_steps(self, detect_anomalous_params)
        self._calls_model_directly = type(self).forward is SingleDevice.forward
        self._adopt_model_step()
        if detect_anomalous_params and self.runs_model_step:
            raise ValueError(
                "detect_anomalous_params needs the default train_step of the wrapper, but "
                f"{type(module).__name__} defines train_step; remove one of the two"
            )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.module(*inputs, **kwargs)


@MODEL_WRAPPERS.register_module(name=["StepDataParallel", "MMDataParallel", "DataParallel", "dp"])
class StepDataParallel(ModelWrapper, ReplicationCallbackDataParallel):
    """A ``ReplicationCallbackDataParallel`` with training, validation and test steps.

    For one process with several devices, over which each batch is split. A training step calls the
    copies with ``mode="loss"`` and averages each 0-d loss over them. The weight of a copy is its
    share of the samples, counted in the first tensor of its inputs. So a loss that is a mean over
    samples becomes the mean over the whole batch. Sums over samples and weighted means (ignored
    labels, class weights) would come out wrong: return one loss per sample instead, or set a
    ``loss_weight`` in the optimizer wrapper. Losses with dimensions are concatenated, and so are
    the lists that ``mode="predict"`` returns.

    ``val_step`` and ``test_step`` evaluate on the first device, without copies. For a custom
    training step, override ``train_step(data, optim_wrapper)`` in a subclass. In it,
    ``self(..., mode="loss")`` uses all devices.

    Args:
        module: the model, on the first of the devices.
        device_ids: as in ``ReplicationCallbackDataParallel``.
        dim: as in ``ReplicationCallbackDataParallel``.
        output_device: the device of the outputs and losses; default: the first device.
        detect_anomalous_params: after every step, search for parameters without a gradient, and
            log each set of them once.
        sync_batchnorm: convert the model's BatchNorm layers by ``convert_sync_batchnorm``, so that
            they normalise with the statistics of the whole batch; or a mapping with its
            ``precision``.
        options: ``scatter`` (every copy also gets ``mode``), ``gather`` (not used for losses and
            lists of predictions) and ``timeout_s``; see ``ReplicationCallbackDataParallel``.

    Raises:
        TypeError: the model has its own ``train_step``, a part of it is compiled, or an option is
            unknown.
        ValueError: a device does not exist, or a name given as an option is unknown.
        RuntimeError: there are several ranks, whose gradients this wrapper would not average.
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
        reject_model_train_step(type(self), module, "uses one device only")
        if distributed_available() and (ranks := distributed.get_world_size()) > 1:
            raise RuntimeError(
                f"{type(self).__name__} needs a single rank, because it does not average gradients "
                f"over ranks, but there are {ranks}; use ddp, or one rank (launch.nproc=1)"
            )
        module = apply_sync_batchnorm(module, sync_batchnorm)
        super().__init__(module, device_ids, output_device, dim, **options)
        prepare_steps(self, detect_anomalous_params)
        if self.scatter_strategy is None and drops_mode(module):
            # A detector gets lists of images of different sizes, so the lists must be split.
            self.scatter_strategy = scatter_samples
        self._loss_weight: Any = None

    def set_loss_weight(self, loss_weight: Any) -> None:
        """Set the ``LossWeight`` that computes the weight of each part of a batch."""
        self._loss_weight = loss_weight

    @uncompiled("its copies are new modules in other threads")
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the copies; return the losses or predictions of the whole batch."""
        mode = kwargs.get("mode")
        if mode is None and any(
            value in ("loss", "predict") for value in inputs if type(value) is str
        ):
            raise TypeError("mode must be given by its name: mode='loss'")
        if mode not in ("loss", "predict"):
            return super().forward(*inputs, **kwargs)
        outputs, arguments = self._outputs(inputs, kwargs)
        device = self._output_device()
        if mode == "loss":
            shares = self._shares(*arguments, device=device)
            return join(outputs, lambda tensors: _averaged(tensors, shares, device))
        if all(isinstance(output, list) for output in outputs):
            return list(chain.from_iterable(move(outputs, device)))
        return self.gather(outputs, device)

    def _shares(
        self, inputs: Any, kwargs: Any, *, device: torch.device
    ) -> Sequence[float | Tensor]:
        """Return the weight of each copy's part of the batch; tensors if only devices know them."""
        named = [
            {key: value for key, value in named_batch.items() if key != "mode"}
            for named_batch in kwargs
        ]
        if self._loss_weight is None:
            return share_of_each(inputs, named, self.dim, self.scatter_strategy is scatter_samples)
        batches = [named_batch or args for named_batch, args in zip(named, inputs, strict=True)]
        weights = [self._loss_weight.of(batch, self.module) for batch in batches]
        if any(isinstance(weight, Tensor) for weight in weights):
            dtype = widest_float(device)
            stacked = torch.stack(
                [
                    weight.to(device, dtype)
                    if isinstance(weight, Tensor)
                    else torch.full((), weight, dtype=dtype, device=device)
                    for weight in weights
                ]
            )
            return torch.where(stacked.sum() > 0, stacked / stacked.sum(), 0.0).unbind()
        total = sum(weights)
        return [weight / total if total else 0.0 for weight in weights]

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]) -> Any:
        """Split the arguments over the devices; pass ``mode`` to every copy."""
        if "mode" not in kwargs:
            return super().scatter(inputs, kwargs, device_ids)
        options = dict(kwargs)
        mode = {"mode": options.pop("mode")}
        chunks, named = super().scatter(inputs, options, device_ids)
        if not chunks and not named:
            return [()], [mode]
        return chunks, [{**named_chunk, **mode} for named_chunk in named]


def _averaged(
    tensors: list[Tensor], shares: Sequence[float | Tensor], device: torch.device
) -> Tensor:
    """Average a loss over the copies, weighted by their shares of the batch."""
    if tensors[0].ndim:
        return dict_gather(tensors, device)  # type: ignore[no-any-return]
    return reduce(torch.add, map(_weighted, [loss.to(device) for loss in tensors], shares))


def _weighted(loss: Tensor, share: float | Tensor) -> Tensor:
    # The mean of an empty part may be NaN, and NaN times 0 is still NaN.
    if isinstance(share, Tensor):
        return torch.where(share > 0, loss, 0.0) * share.to(loss.dtype)
    return (loss if share else loss.nan_to_num()) * share
