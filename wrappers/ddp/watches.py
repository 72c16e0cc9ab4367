"""That each backward of a step of one's own comes from a forward that averages its gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed, nn

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


class ThawWatch:
    """Raises where a parameter requires a gradient that no rank would share.

    torch averages what required a gradient at construction, and says nothing of what is thawed
    later: its gradient would stay that of each rank.

    Args:
        kind: the wrapper's name.
        module: the module whose frozen parameters are watched.
        ignored: names of parameters that are not to be averaged.
        group: the ranks that average.
    """

    def __init__(self, kind: str, module: nn.Module, ignored: Iterable[str], group: Any) -> None:
        self._kind = kind
        self._frozen: dict[str, nn.Parameter] = {}
        if distributed.get_world_size(group) > 1:
            left_out = set(ignored)
            self._frozen = {
                name: one
                for name, one in module.named_parameters()
                if not one.requires_grad and name not in left_out
            }

    def check(self) -> None:
        """Look at all of them, before a forward."""
        for name, one in self._frozen.items():
            if one.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    f"{name!r} was frozen when {self._kind} wrapped the model and requires a "
                    "gradient now, which would not be averaged over the ranks. Wrap the model "
                    "while all that will ever train requires gradients and freeze it after that "
                    "(with find_unused_parameters=True), or use fsdp"
                )
