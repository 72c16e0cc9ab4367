"""Windows: the micro-batches whose gradients are added up for one update, and their weights."""

from __future__ import annotations

import logging
import math
import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...collectives import comm_device
from ...primitives.tensor_bits import widest_float
from ..features import model_features
from ..layout import get_parameters, local_part
from ..unwrap import user_model
from .gates import NO_GATE, Gate
from .loss_weight import LossWeight

logger = logging.getLogger(__name__)

_ADVICE = (
    "with loss_weight each micro-batch needs a weight before its backward: call "
    "optim_wrapper.weigh(batch) with the preprocessed batch in your train_step, then "
    "optim_wrapper.update_params(loss), or backward(scale_loss(loss))"
)


def check_counts(counts: int) -> int:
    """Return ``counts``, the number of micro-batches per window, as an int if it is valid."""
    # Accepts numpy's integers, which have __index__, but not bools, which have it too.
    if isinstance(counts, bool) or not hasattr(counts, "__index__"):
        raise TypeError(f"accumulative_counts must be an int, got {counts!r}")
    if counts < 1:
        # mmengine raises the same error.
        raise AssertionError(
            f"_accumulative_counts at least greater than or equal to 1, got {counts!r}"
        )
    return operator.index(counts)


@dataclass(frozen=True)
class WindowChange:
    """A change of the length of windows during the training.

    Attributes:
        counts: micro-batches per window.
        since: the micro-batch that begins the first window of this length.
    """

    counts: int
    since: int

    def continues_at(self, init_counts: int, count: int) -> bool:
        """Return whether a training that begins at ``init_counts`` continues the one at ``count``.

        It does if it begins at ``count``, or at the beginning of the window of ``count``. Otherwise
        a warning is logged, unless it is a new training.
        """
        continues = init_counts in (count, count - (count - self.since) % self.counts)
        if init_counts and not continues:
            logger.warning(
                "accumulate(%d) is not continued: the training had %d micro-batches and continues "
                "at %d, for example because the number of ranks has changed",
                *(self.counts, count, init_counts),
            )
        return continues


class CountWindow(Gate):
    """A window whose micro-batches count the same; the optimizer wrapper divides their losses.

    Attributes:
        counts: micro-batches per window.
        unit: the number by which weights are divided; 0 until the first weight is known.
        weight: weight of the next micro-batch.
        total: total weight of the micro-batches whose gradients this rank holds; None if it holds
            none.
    """

    counts = 1
    unit = 0.0
    weight: float | Tensor | None = None
    total: float | Tensor | None = None

    def accumulate(self, counts: int) -> None:
        """Set the number of micro-batches per window, from the next window on."""
        self.counts = counts

    def weigh(self, batch: Any) -> float | Tensor | None:
        """Set and return the next batch's weight: 0 without a batch, None if unweighted."""
        return None

    def loss_factor(self) -> float | Tensor:
        """Return the factor by which to multiply the next loss; every rank must call this."""
        return 1.0

    def add_weight(self) -> None:
        """Add the weight of the current micro-batch to ``total``, when its backward begins."""

    def start_reduction(self) -> None:
        """Start adding up the window's weight over the ranks, when its last backward begins."""

    def gradient_factor(self) -> float | Tensor:
        """End the window and return the factor by which to multiply its gradients.

        The factor is 0 if the window's weight is 0. Every rank must call this.
        """
        return 1.0


class ShortWindow(Gate):
    """Correct the gradients of a window that has fewer micro-batches than its losses assume.

    It acts on one update.

    Args:
        factor: the length by which the losses were divided, divided by the actual one.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor

    @torch.no_grad()
    def allows(self, optim_wrapper: Any) -> bool:
        """Multiply the gradients by the factor."""
        optim_wrapper.gates.short_window = NO_GATE
        for parameter in get_parameters(optim_wrapper.optimizer):
            if parameter.grad is not None:
                local_part(parameter.grad).mul_(self.factor)
        return True


class WeightedWindow(CountWindow):
    """A window in which each micro-batch has a weight.

    Each loss is multiplied by its weight, divided by ``unit``. At the end of the window the
    gradients are divided by the total weight of all ranks that average their gradients.

    Attributes:
        unit: a power of two near the first weight, the same on all ranks. Dividing the weights by
            it keeps scaled losses in the range of float16. It adds no rounding error, because it is
            a power of two.
        ranks: number of ranks that average their gradients.
    """

    def __init__(
        self, loss_weight: LossWeight, optimizer: Optimizer, accumulative_counts: int
    ) -> None:
        if hasattr(optimizer, "averager"):
            raise ValueError(
                f"{type(optimizer).__name__} updates each rank by the rank's own gradients, but "
                "loss_weight averages over all ranks: use only one of the two"
            )
        self._loss_weight = loss_weight
        self._model: Callable[[], Any] | None = None
        self._user_model: Callable[[], Any] | None = None
        self.ranks = 1
        self._optimizer = optimizer
        self.counts = accumulative_counts
        self._group: Any = None
        self._device = torch.device("cpu")
        self._sent: tuple[Tensor, Any] | None = None

    @property
    def _is_single(self) -> bool:
        """Whether a window is one micro-batch on one rank, which needs no weight."""
        return self.counts == 1 and self.ranks == 1

    def enter(self, model: Any) -> None:
        """Ask the wrapper ``model`` which ranks average their gradients."""
        if self._model is not None and self._model() is model:
            return
        features = model_features(model)
        features.set_loss_weight(self._loss_weight)
        # Set only now, so that if set_loss_weight raises, the next call raises again.
        self._model = weakref.ref(model)
        # Looked up once, because it asks the registry whether each layer of wrapping is a wrapper.
        self._user_model = weakref.ref(user_model(model))
        is_torchs = features is not model and isinstance(model, DistributedDataParallel)
        self._group = model.process_group if is_torchs else features.data_group
        averages = (is_torchs or features.averages_ranks) and distributed.is_initialized()
        self.ranks = distributed.get_world_size(self._group) if averages else 1
        # The group may not support the device of the parameters; then comm_device chooses another.
        near = next(get_parameters(self._optimizer)).device
        self._device = comm_device(self._group, prefer=near) if averages else near

    def weigh(self, batch: Any) -> float | Tensor:
        model = None if self._user_model is None else self._user_model()
        self.weight = 0.0 if batch is None else self._loss_weight.of(batch, model)
        return self.weight

    def loss_factor(self) -> float | Tensor:
        if self.weight is None:
            raise RuntimeError(_ADVICE)
        if (
            self._model is None
            and distributed.is_initialized()
            and distributed.get_world_size() > 1
        ):
            raise RuntimeError(
                "with loss_weight the optimizer wrapper must know which ranks average their "
                "gradients: run the forward in optim_wrapper.optim_context(self), where self is "
                "the model's wrapper, or call optim_wrapper.weigh(batch, self)"
            )
        if self._is_single:
            return 1.0
        if not self.unit:
            self._agree_on_unit()
        return self.weight / (self.unit or 1.0)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times its factor; every rank must call this."""
        factor = self.loss_factor()
        if isinstance(factor, Tensor):
            return loss * factor.to(loss.dtype)
        return loss if factor == 1 else loss * factor

    def add_weight(self) -> None:
        if self.weight is None:
            raise RuntimeError(_ADVICE)
        self.total = self.weight if self.total is None else self.total + self.weight
        self.weight = self._sent = None

    def begin_backward(self, ends_window: bool) -> None:
        """Add the micro-batch's weight; in the last one, start summing the totals of the ranks."""
        self.add_weight()
        if ends_window and self.ranks > 1:
            self.start_reduction()

    def start_reduction(self) -> None:
        summed = self._tensor(self.total)
        self._sent = summed, distributed.all_reduce(summed, group=self._group, async_op=True)

    def clear(self) -> None:
        """Reset the total, because the gradients were cleared."""
        self.total = None

    @torch.no_grad()
    def allows(self, optim_wrapper: Any) -> bool:
        """Divide the gradients by the window's weight; every rank must call this.

        If the weight is 0 the gradients become zero.
        """
        factor = self.gradient_factor()
        if not isinstance(factor, Tensor) and factor == 1:
            # For example one micro-batch on one rank.
            return True
        gradients: dict[Any, list[Tensor]] = {}
        for parameter in get_parameters(self._optimizer):
            if parameter.grad is not None:
                local = local_part(parameter.grad)
                gradients.setdefault((local.device, local.dtype), []).append(local)
        for (device, dtype), grads in gradients.items():
            if isinstance(factor, Tensor):
                torch._foreach_mul_(grads, factor.to(device, dtype))
                # A mean over nothing has NaN gradients, and NaN * 0 is NaN. Filled by a mask,
                # because comparing the factor in Python would wait for the device.
                is_zero = (factor == 0).to(device)
                for grad in grads:
                    grad.masked_fill_(is_zero, 0)
            elif factor == 0:
                torch._foreach_zero_(grads)
            else:
                torch._foreach_mul_(grads, factor)
        return True

    def gradient_factor(self) -> float | Tensor:
        total = self.total
        if total is None:
            raise RuntimeError(_ADVICE)
        if self.ranks > 1:
            total = self._received()
        self.total = None
        if isinstance(total, float) and total == 0:
            return 0.0
        factor = (total if self._is_single else self.unit * self.ranks) / total
        # A total on an accelerator may be 0 here: comparing it in Python would wait for the device.
        return factor.where(factor.isfinite(), 0.0) if isinstance(factor, Tensor) else factor

    def _received(self) -> float | Tensor:
        if self._sent is None:
            # The user called step() before the window's end.
            self.start_reduction()
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
        """Return ``value`` on the device for communication."""
        if isinstance(value, Tensor):
            return value.to(self._device, widest_float(self._device), copy=True)
        # torch.tensor() would copy from the host, and wait for an accelerator.
        return torch.full((), value, dtype=widest_float(self._device), device=self._device)
