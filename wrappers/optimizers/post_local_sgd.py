"""Optimizers that work together with the other ranks, built from names and options."""

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
from .optimizer_fit import check_fit, check_group, needs_closure, tensors_of, walkable

__all__ = ["PostLocalSGD", "ZeroRedundancyOptimizer"]

with warnings.catch_warnings():
    # The package compiles functions of no use here by torch.jit, which is deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import PostLocalSGDOptimizer
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZeroRedundancyOptimizer


@OPTIMIZERS.register_module()
class ZeroRedundancyOptimizer(TorchZeroRedundancyOptimizer):
    """torch's class: each rank keeps the optimizer state of a part of the parameters only.

    Every rank must construct and step it.

    Args:
        optimizer_class: what steps the parts: a class, its name or ``{"_ref_": name}``.
        process_group: the ranks that share the work; default: all. Where layers are split over
            a tensor group, the ``data_group`` of the model's wrapper.
        overlap_with_ddp: refused: it needs a hook and a step of its own.
        defaults: options of that optimizer.

    Raises:
        TypeError: the optimizer has no such option.
        ValueError: the ranks hold different parts of a parameter, as under fsdp.
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
                "overlap_with_ddp steps inside the backward, without clipping or accumulation; "
                "leave it out"
            )
        inner = _optimizer_class(optimizer_class, defaults)
        items = _checked(type(self), inner, params, process_group)
        super().__init__(
            items,
            inner,
            process_group=process_group,
            parameters_as_bucket_view=parameters_as_bucket_view,
            **defaults,
        )


@OPTIMIZERS.register_module()
class PostLocalSGD(PostLocalSGDOptimizer):
    """An optimizer whose ranks step on their own and average their weights from time to time.

    Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", 2018. The gradients
    must stay apart after the warm-up: ``comm_hook: {type: post_localSGD, start_localSGD_iter: N}``
    of the wrapper with N equal to ``warmup_steps``. Between two averages each rank evaluates its
    own weights, and those of the first are saved.

    Args:
        period: updates between two averages.
        warmup_steps: updates before the first.
        optimizer_class, process_group, defaults: as for ``ZeroRedundancyOptimizer``.

    Raises:
        TypeError, ValueError: as there; or ``period`` is below 2, or ``warmup_steps`` negative.
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
                f"period must be at least 2, got {period}: weights averaged after every update "
                "are what DistributedDataParallel gives, for less"
            )
        inner = _optimizer_class(optimizer_class, defaults)
        items = _checked(type(self), inner, params, process_group)
        averager = PeriodicModelAverager(period, warmup_steps, process_group)
        super().__init__(inner(items, **defaults), averager)

    # torch's class keeps the list of before a `load_state_dict`, which makes a new one.
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of the optimizer that steps."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    def __getattr__(self, name: str) -> Any:
        # torch's class leaves out what `Optimizer.__init__` sets, such as `defaults` and the
        # hooks of a step: those of the optimizer that steps serve.
        if name == "optim":
            raise AttributeError(name)
        return getattr(self.optim, name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, and average the weights where it is time; every rank must call this."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        super().step()  # type: ignore[no-untyped-call]
        return loss


def _optimizer_class(wanted: Any, defaults: Mapping[str, Any]) -> type[Optimizer]:
    """Find an optimizer class, and check the names of its options."""
    if isinstance(wanted, Mapping):
        wanted = wanted.get("_ref_", wanted.get("type"))
    found = OPTIMIZERS.resolve(wanted) if isinstance(wanted, str) else wanted
    if not callable(found):
        raise TypeError(f"optimizer_class must be an optimizer class or its name, got {wanted!r}")
    allowed = [name for name in option_names(found) if name != "params"]
    check_options(found.__name__, defaults, allowed)
    cls: type[Optimizer] = found
    if needs_closure(cls):
        raise ValueError(
            f"optimizer_class cannot be {cls.__name__}, which needs a closure and all parameters "
            "together: give one that steps from gradients, such as AdamW"
        )
    return cls


def _checked(
    cls: type[Optimizer], inner: Any, params: Iterable[Any], group: ProcessGroup | None
) -> list[Any]:
    items = walkable(params)
    tensors = tensors_of(items)
    for one in (cls, inner):
        check_fit(one, tensors)
    check_group(cls, tensors, group)
    return items
