"""The mean loss, as a metric of torchmetrics.

Imported lazily: torchmetrics imports matplotlib and much of scipy, which takes a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from ...primitives.tensor_bits import widest_float


class MeanLoss(Metric):
    """The mean loss per sample, computed from each batch's mean loss and number of samples.

    If the training has a ``loss_weight``, it replaces the number of samples, as in every metric
    whose ``update`` takes ``loss`` and ``num_samples``.
    """

    full_state_update = False
    higher_is_better = False
    total: Tensor
    samples: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("samples", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        # Before `fn` moves the states to a device that may have no float64.
        widest = widest_float(fn(torch.zeros(())).device)
        if self.total.dtype == torch.float64 and widest != torch.float64:
            defaults: dict[str, Any] = self._defaults
            self._defaults = {name: default.to(widest) for name, default in defaults.items()}
            self.total, self.samples = self.total.to(widest), self.samples.to(widest)
        return super()._apply(fn, *args, **kwargs)

    def update(self, loss: Tensor, num_samples: float | Tensor) -> None:
        """Add a batch.

        Args:
            loss: mean loss of the batch, 0-d.
            num_samples: number of its samples, or its weight.
        """
        if not num_samples:
            # The mean loss of no samples may be NaN.
            return
        self.total += loss.detach().to(self.total.dtype) * num_samples
        self.samples += num_samples

    def compute(self) -> Tensor:
        """Return the mean over all samples; NaN if there are none."""
        return self.total / self.samples
