"""A polynomial learning-rate schedule that ends above zero."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..registry import PARAM_SCHEDULERS


@PARAM_SCHEDULERS.register_module()
class PolyLR(LRScheduler):
    """Decays the rates to `eta_min` as `(1 - step / total_iters) ** power`.

    torch's `PolynomialLR`, of what lies above `eta_min`. As there each step changes the rates
    as they are, so that other schedules may act besides.

    Args:
        optimizer: Whose rates it changes.
        total_iters: Steps after which the rates stay.
        power: Of the polynomial; 1 is a straight line.
        eta_min: The rate at the end.
        last_epoch: Steps so far.

    Raises:
        ValueError: `total_iters` is not positive.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_iters: int,
        *,
        power: float = 1.0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        if total_iters < 1:
            raise ValueError(f"total_iters must be at least 1, got {total_iters}")
        self.total_iters = total_iters
        self.power = power
        self.eta_min = eta_min
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of the next step, one for each group."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        left = self.total_iters - self.last_epoch
        if self.last_epoch == 0 or left < 0:
            return rates
        share = (left / (left + 1)) ** self.power
        return [(rate - self.eta_min) * share + self.eta_min for rate in rates]
