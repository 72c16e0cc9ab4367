"""Optimizers that communicate with other ranks: ``ZeroRedundancyOptimizer``, ``PostLocalSGD``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.optim import Optimizer

from ...registry import OPTIMIZERS
from ..torch_functions import check_options, option_names
from .optimizer_fit import check_fit, check_group, get_tensors, listed_params, needs_closure

__all__ = ["PostLocalSGD", "ZeroRedundancyOptimizer"]

with warnings.catch_warnings():
    # The package compiles unrelated functions by torch.jit, which is deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import PostLocalSGDOptimizer
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZeroRedundancyOptimizer


@OPTIMIZERS.register_module()
class ZeroRedundancyOptimizer(TorchZeroRedundancyOptimizer):
    """Keep on each rank the optimizer state of only a part of the parameters.

    This is torch's class with checks, and it accepts names of optimizers. Every rank must construct
    it and call ``step``.

    Args:
        params: parameters or groups.
        optimizer_class: the optimizer of each part: a class, its name or ``{"_ref_": name}``.
        process_group: the ranks that share the work; default: all ranks. If layers are split over
            a tensor group, use the ``data_group`` of the model's wrapper.
        parameters_as_bucket_view: as in torch's class.
        overlap_with_ddp: not supported.
        defaults: options of the optimizer.

    Raises:
        TypeError: an option of the optimizer is unknown.
        ValueError: ``overlap_with_ddp`` is set, the optimizer needs a closure, or the ranks hold
            different parts of a parameter, as they do under fsdp.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Any,
        *,
        process_group: ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        if overlap_with_ddp:
            raise ValueError(
                "overlap_with_ddp must be False, got True: it updates during the backward, without "
                "clipping or accumulation"
            )
        inner = _optimizer_class(optimizer_class, defaults)
        listed = _checked_params(type(self), inner, params, process_group)
        super().__init__(
            listed,
            inner,
            process_group=process_group,
            parameters_as_bucket_view=parameters_as_bucket_view,
            **defaults,
        )


@OPTIMIZERS.register_module()
class PostLocalSGD(PostLocalSGDOptimizer):
    """Update each rank independently and average the weights periodically.

    Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", 2018. The gradients
    must not be averaged after the warm-up: give the wrapper
    ``comm_hook: {type: post_localSGD, start_localSGD_iter: N}`` with N equal to ``warmup_steps``.
    Between two averages the weights differ between ranks: each rank evaluates its own, and a
    checkpoint contains those on the first rank.

    Args:
        period: number of updates from one average to the next.
        warmup_steps: number of updates without an average; the next update is the first with one.
        params: as for ``ZeroRedundancyOptimizer``.
        optimizer_class: as for ``ZeroRedundancyOptimizer``.
        process_group: as for ``ZeroRedundancyOptimizer``.
        defaults: as for ``ZeroRedundancyOptimizer``.

    Raises:
        TypeError, ValueError: as for ``ZeroRedundancyOptimizer``; also if ``period`` is below 2 or
            ``warmup_steps`` is negative.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Any,
        *,
        period: int,
        warmup_steps: int = 0,
        process_group: ProcessGroup | None = None,
        **defaults: Any,
    ) -> None:
        if period < 2:
            raise ValueError(
                f"period must be at least 2, got {period}: to average after every update, use "
                "DistributedDataParallel, which costs less"
            )
        inner = _optimizer_class(optimizer_class, defaults)
        listed = _checked_params(type(self), inner, params, process_group)
        averager = PeriodicModelAverager(period, warmup_steps, process_group)
        super().__init__(inner(listed, **defaults), averager)

    # A property, because `load_state_dict` makes a new list and torch's class keeps the old one.
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the inner optimizer."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    def __getattr__(self, name: str) -> Any:
        # torch's class does not call `Optimizer.__init__`, so it has no `defaults` or step hooks.
        # This class uses the attributes of the inner optimizer.
        if name == "optim":
            raise AttributeError(name)
        return getattr(self.optim, name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update, and average the weights once per period; every rank must call this."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        super().step()  # type: ignore[no-untyped-call]
        return loss


def _optimizer_class(kind: Any, defaults: Mapping[str, Any]) -> type[Optimizer]:
    """Return an optimizer class; raise if it lacks an option or needs a closure."""
    if isinstance(kind, Mapping):
        kind = kind.get("_ref_", kind.get("type"))
    resolved = OPTIMIZERS.resolve(kind) if isinstance(kind, str) else kind
    if not callable(resolved):
        raise TypeError(f"optimizer_class must be an optimizer class or its name, got {kind!r}")
    allowed = [name for name in option_names(resolved) if name != "params"]
    check_options(resolved.__name__, defaults, allowed)
    cls: type[Optimizer] = resolved
    if needs_closure(cls):
        raise ValueError(
            f"optimizer_class cannot be {cls.__name__}, which needs a closure and all parameters "
            "together: use an optimizer that updates from gradients, such as AdamW"
        )
    return cls


def _checked_params(
    cls: type[Optimizer], inner: Any, params: Iterable[Any], group: ProcessGroup | None
) -> list[Any]:
    listed = listed_params(params)
    tensors = get_tensors(listed)
    for optimizer_class in (cls, inner):
        check_fit(optimizer_class, tensors)
    check_group(cls, tensors, group)
    return listed
