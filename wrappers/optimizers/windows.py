"""The window of micro-batches whose gradients meet in one update, and their weights."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...collectives import comm_device
from ..features import model_features
from ..sharding.layout import local_part, parameters_of
from .gates import Gate
from .loss_weight import LossWeight

_ADVICE = (
    "with loss_weight each micro-batch is weighed before its backward, and its loss scaled: call "
    "optim_wrapper.weigh(batch) with the preprocessed batch in your train_step, then "
    "optim_wrapper.update_params(loss), or backward(scale_loss(loss))"
)


class CountWindow(Gate):
    """A window in which every micro-batch counts the same; its length divides the losses.

    Attributes:
        unit: divides the weights; 0 before the first weight.
        weight: of the micro-batch whose backward comes next.
        total: of the micro-batches on this rank whose gradients are held; None if there are none.
    """

    unit = 0.0
    weight: float | Tensor | None = None
    total: float | Tensor | None = None

    def accumulate(self, counts: int) -> None:
        """Take that many micro-batches from the next window on."""

    def weigh(self, batch: Any) -> float | Tensor | None:
        """Set the weight of the next micro-batch; None stands for a batch that does not count."""
        return None

    def share(self) -> float | Tensor:
        """Return the factor of the next loss; every rank must call this."""
        return 1.0

    def take(self) -> None:
        """Count the micro-batch whose backward begins."""

    def send(self) -> None:
        """Begin to add up the window's weight over the ranks, when its last backward begins."""

    def factor(self) -> float | Tensor:
        """End the window; return the factor of its gradients, 0 if nothing in it weighs."""
        return 1.0


class WeightedWindow(CountWindow):
    """The weights of the micro-batches whose gradients meet in an update.

    A loss is scaled by its weight in some unit, and when the window has ended the gradients are
    divided by the weight of the window on all ranks that average their gradients.

    Attributes:
        unit: a power of two near the first weight, the same on all ranks: it keeps float16 in
            range and changes no digit.
        ranks: how many average their gradients.
    """

    def __init__(
        self, loss_weight: LossWeight, optimizer: Optimizer, accumulative_counts: int
    ) -> None:
        if hasattr(optimizer, "averager"):
            raise ValueError(
                f"{type(optimizer).__name__} steps by the gradients of each rank, and loss_weight "
                "averages over all ranks: use only one of the two"
            )
        self._loss_weight = loss_weight
        self._model: Callable[[], Any] = _nobody
        self.ranks = 1
        # A window is one micro-batch on one rank: its loss is the mean as it is.
        self._is_whole = False
        self._optimizer = optimizer
        self._counts = accumulative_counts
        self._group: Any = None
        self._device = torch.device("cpu")
        self._sent: tuple[Tensor, Any] | None = None

    def accumulate(self, counts: int) -> None:
        """Take that many micro-batches from the next window on."""
        self._counts = counts
        self._is_whole = counts == 1 and self.ranks == 1 and self._model is not _nobody

    def enter(self, model: Any) -> None:
        """Learn from the wrapper of the model which ranks average their gradients."""
        if self._model() is model:
            return
        features = model_features(model)
        features.weigh_by(self._loss_weight)
        # Only now: if that raises, the next call must raise as well.
        self._model = weakref.ref(model)
        is_torchs = features is not model and isinstance(model, DistributedDataParallel)
        self._group = model.process_group if is_torchs else features.data_group
        spread = (is_torchs or features.averages_ranks) and distributed.is_initialized()
        self.ranks = distributed.get_world_size(self._group) if spread else 1
        # By what is the same on all ranks, not by where the weights are.
        near = next(parameters_of(self._optimizer)).device
        self._device = comm_device(self._group, prefer=near) if spread else near
        self.accumulate(self._counts)

    def weigh(self, batch: Any) -> float | Tensor:
        """Set the weight of the next micro-batch; None stands for a batch that does not count."""
        self.weight = 0.0 if batch is None else self._loss_weight.of(batch)
        return self.weight

    def share(self) -> float | Tensor:
        """Return the weight of the next micro-batch in the unit; every rank must call this."""
        if self.weight is None:
            raise RuntimeError(_ADVICE)
        if self._model is _nobody:
            _refuse_ranks()
            self._is_whole = self._counts == 1
        if self._is_whole:
            return 1.0
        if not self.unit:
            self._agree_on_unit()
        return self.weight / (self.unit or 1.0)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times its share; every rank must call this."""
        share = self.share()
        if isinstance(share, Tensor):
            return loss * share.to(loss.dtype)
        return loss if share == 1 else loss * share

    def take(self) -> None:
        """Count the micro-batch whose backward begins."""
        weight = self.weight
        if weight is None:
            raise RuntimeError(_ADVICE)
        self.total = weight if self.total is None else self.total + weight
        self.weight = self._sent = None

    def begin_backward(self, ends_window: bool) -> None:
        """Count the micro-batch; in the last one, begin to add up the weights of the ranks."""
        self.take()
        if ends_window and self.ranks > 1:
            self.send()

    def send(self) -> None:
        """Begin to add up the window's weight over the ranks, when its last backward begins."""
        summed = self._tensor(self.total)
        self._sent = summed, distributed.all_reduce(summed, group=self._group, async_op=True)

    def clear(self) -> None:
        """Forget the weight of the gradients that were cleared."""
        self.total = None

    def allows(self, optim_wrapper: Any) -> bool:
        """Divide the gradients by the window's weight; every rank must call this.

        If nothing in the window weighs anything they become zero.
        """
        factor = self.factor()
        if not isinstance(factor, Tensor) and factor == 1:
            # Common case: equal weights.
            return True
        gradients = [
            local_part(p.grad) for p in parameters_of(self._optimizer) if p.grad is not None
        ]
        with torch.no_grad():
            if isinstance(factor, float) and factor == 0:
                # Not times 0, which would leave a NaN: a mean over nothing may have one.
                torch._foreach_zero_(gradients)
            else:
                _multiply(gradients, factor)
        return True

    def factor(self) -> float | Tensor:
        """End the window; return what makes the mean of its gradients, 0 where nothing weighs.

        Every rank must call this.
        """
        total = self.total
        if total is None:
            raise RuntimeError(_ADVICE)
        if self.ranks > 1:
            total = self._received()
        self.total = None
        if isinstance(total, float) and total == 0:
            return 0.0
        factor = (total if self._is_whole else self.unit * self.ranks) / total
        # On an accelerator the total is not inspected, to avoid waiting: it may be 0.
        return factor.where(factor.isfinite(), 0.0) if isinstance(factor, Tensor) else factor

    def _received(self) -> float | Tensor:
        if self._sent is None:
            # A step by hand, before the window's end.
            self.send()
        assert self._sent is not None
        summed, work = self._sent
        work.wait()
        return summed.item() if summed.device.type == "cpu" else summed

    def _agree_on_unit(self) -> None:
        most = self._tensor(self.weight)
        if self.ranks > 1:
            distributed.all_reduce(most, ReduceOp.MAX, group=self._group)
        weight = most.item()
        if weight:
            self.unit = 2.0 ** (math.frexp(weight)[1] - 1)

    def _tensor(self, value: Any) -> Tensor:
        """``value`` where the ranks communicate."""
        if isinstance(value, Tensor):
            return value.to(self._device, torch.float64, copy=True)
        # On an accelerator a copy from the host would wait.
        return torch.full((), value, dtype=torch.float64, device=self._device)


def _nobody() -> None:
    """Stand in for the reference to a model while none is known."""


def _refuse_ranks() -> None:
    """Raise RuntimeError if several ranks run and the model's wrapper is unknown."""
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        raise RuntimeError(
            "with loss_weight the optimizer wrapper must know whose gradients are averaged: enter "
            "optim_wrapper.optim_context(self) of the model's wrapper for the forward, or call "
            "optim_wrapper.weigh(batch, self)"
        )


def _multiply(gradients: list[Tensor], factor: float | Tensor) -> None:
    kinds: dict[Any, list[Tensor]] = {}
    for one in gradients:
        kinds.setdefault((one.device, one.dtype), []).append(one)
    for (device, dtype), some in kinds.items():
        own = factor.to(device, dtype) if isinstance(factor, Tensor) else factor
        torch._foreach_mul_(some, own)
