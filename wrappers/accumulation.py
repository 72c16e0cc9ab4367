"""Counting of micro-batches: which of them end in an update."""

from __future__ import annotations

import logging

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

logger = logging.getLogger(__name__)


class Accumulation:
    """Counts micro-batches; base of the optimizer wrappers.

    Args:
        accumulative_counts: micro-batches per update.

    Raises:
        AssertionError: ``accumulative_counts`` is below 1.
    """

    def __init__(self, accumulative_counts: int) -> None:
        if accumulative_counts < 1:
            raise AssertionError(
                f"accumulative_counts must be at least 1, got {accumulative_counts!r}"
            )
        self._accumulative_counts = accumulative_counts
        self._inner_count = 0
        self._max_counts = -1
        self._remainder_counts = -1
        self._resumed_at = 0

    @property
    def inner_count(self) -> int:
        """Micro-batches so far."""
        return self._inner_count

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Tell where training starts and ends, in micro-batches.

        With ``max_counts`` known, a last window that is shorter than the others still ends
        in an update and its losses are averaged over its own length.
        """
        every = self._accumulative_counts
        self._inner_count = self._resumed_at = init_counts
        self._max_counts = max_counts
        self._remainder_counts = max_counts % every if max_counts > 0 else -1
        if init_counts % every:
            logger.warning(
                "Resumed iteration number is not divisible by accumulative_counts "
                "(%d and %d): the first update sees %d micro-batches only.",
                init_counts,
                every,
                self._window_length(init_counts),
            )
        if every > 1 and any(isinstance(part, _BatchNorm) for part in model.modules()):
            logger.warning(
                "Gradient accumulative may slightly decrease the performance of models with "
                "BatchNorm: its statistics come from single micro-batches."
            )

    def should_update(self) -> bool:
        """Whether the micro-batch just counted ends its window."""
        count = self._inner_count
        return count % self._accumulative_counts == 0 or count == self._max_counts

    def should_sync(self) -> bool:
        """Whether the coming micro-batch ends its window (asked before its backward)."""
        count = self._inner_count + 1
        return count % self._accumulative_counts == 0 or count == self._max_counts

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Divide ``loss`` by the number of micro-batches in its window."""
        if self._accumulative_counts == 1:
            return loss
        length = self._window_length(self._inner_count)
        return loss if length == 1 else loss / length

    def _window_length(self, index: int) -> int:
        """Micro-batches whose gradients meet in the update that micro-batch ``index`` feeds."""
        every = self._accumulative_counts
        start = index - index % every
        end = start + every
        if self._max_counts > 0:
            if index >= self._max_counts:
                return every
            end = min(end, self._max_counts)
        # Gradients gathered before a restart are lost, so they must not be averaged over.
        return end - max(start, self._resumed_at)
