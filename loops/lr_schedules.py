"""Learning-rate schedules: PolyLR, and a window of the run in which any schedule acts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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


class ScheduleWindow:
    """Lets another scheduler act on the rates as they are from one count of steps to another.

    Before `after` and from `until` on the rates are left to other schedulers. That scheduler is
    made when its time has come, since a scheduler changes the rates as soon as it exists.

    Args:
        optimizer: Whose rates it changes.
        make: Returns a scheduler over it. Called once at the start as well, for its errors.
        after: Steps in which nothing is done.
        until: The count of steps from which on nothing is done any more; None for never.

    Raises:
        ValueError: `until` is not behind `after`, or one of them is below 0.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        make: Callable[[Optimizer], LRScheduler],
        *,
        after: int = 0,
        until: int | None = None,
    ) -> None:
        if after < 0:
            raise ValueError(f"after must be at least 0, got {after}")
        if until is not None and until <= after:
            raise ValueError(f"until must be greater than after ({after}), got {until}")
        self.optimizer = optimizer
        self._make = make
        self._after = after
        self._until = until
        self._count = 0
        self._inner: LRScheduler | None = None
        with _same_groups(optimizer):
            make(optimizer)
        if after == 0:
            self._inner = make(optimizer)

    def step(self) -> None:
        """Count one step, and let the scheduler act if it is within its part."""
        self._count += 1
        if self._until is not None and self._count >= self._until:
            return
        if self._inner is not None:
            self._inner.step()
        elif self._count >= self._after:
            self._inner = self._make(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the count, and the state of the scheduler where it has begun."""
        inner = None if self._inner is None else self._inner.state_dict()
        return {"count": self._count, "scheduler": inner}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; the rates themselves are the optimizer's."""
        self._count = state["count"]
        self._inner = None
        if state["scheduler"] is not None:
            with _same_groups(self.optimizer):
                self._inner = self._make(self.optimizer)
            self._inner.load_state_dict(dict(state["scheduler"]))


@contextmanager
def _same_groups(optimizer: Optimizer) -> Iterator[None]:
    """Put the groups' settings back afterwards."""
    before = [dict(group) for group in optimizer.param_groups]
    try:
        yield
    finally:
        for group, settings in zip(optimizer.param_groups, before, strict=True):
            group.clear()
            group.update(settings)
