"""Parameters that were frozen when torch's DistributedDataParallel was made, and are no more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed, nn


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
