"""That each backward of a step of one's own comes from a forward that averages its gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# How many are watched: a step does the same again and again, and each hook costs 1 us.
_BACKWARDS = 64


class AveragingWatch:
    """Raises where a backward of ``DistributedDataParallel`` leaves the ranks' gradients apart.

    torch averages in the first backward after a forward of the wrapper, and says nothing of any
    other: of a forward by ``wrapper.module(...)``, or of a second backward.
    """

    def __init__(self, wrapper: Any) -> None:
        self._kind = type(wrapper).__name__
        self._left = _BACKWARDS
        self._is_expected = False
        self._backward = -1
        self._handles = [
            one.register_post_accumulate_grad_hook(self._check)
            for one in wrapper.module.parameters()
            if one.requires_grad
        ]

    def note_forward(self) -> None:
        """The wrapper has been called with gradients: the next backward averages."""
        self._is_expected = True
        if not self._left and self._handles:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def _check(self, parameter: Tensor) -> None:
        current = torch._C._current_graph_task_id()
        if current == self._backward or not self._left:
            return
        if not self._is_expected:
            raise RuntimeError(
                f"a backward in {self._kind}.train_step leaves the gradients of the ranks apart: "
                "it does not follow a call of self(...). Only the first backward after one "
                "averages; run the forward through self(...), not self.module(...) or its "
                "children, and add up losses that share a forward. A model whose children are "
                "stepped apart, as a GAN's, needs SeparateDistributedDataParallel"
            )
        self._backward, self._is_expected = current, False
        self._left -= 1
