"""The mean loss, as a metric of torchmetrics.

Imported only where it is wanted: with torchmetrics come matplotlib and much of scipy, a second.
"""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class MeanLoss(Metric):
    """Mean loss per sample, from the batches' mean losses and sample counts.

    Where the training has a `loss_weight` batches weigh by that, as in every metric whose update
    takes `loss` and `num_samples`.
    """

    full_state_update = False
    higher_is_better = False
    total: Tensor
    samples: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("samples", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, loss: Tensor, num_samples: float | Tensor) -> None:
        """Add one batch: its mean loss (0-d) and how many samples it had, or its weight."""
        if not num_samples:
            # The mean over nothing may be NaN.
            return
        self.total += loss.detach().double() * num_samples
        self.samples += num_samples

    def compute(self) -> Tensor:
        """Return the mean over all samples; nan without any."""
        return self.total / self.samples
