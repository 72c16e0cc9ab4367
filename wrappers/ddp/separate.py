"""The wrapper whose direct children are averaged one by one, for several optimizers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ...registry import MODEL_WRAPPERS
from ..batchnorm.conversion import apply_sync_batchnorm
from ..steps.preprocess import device_of
from ..steps.step import Steps, has_own_train_step
from ..steps.step_checks import ThawWatch
from .distributed import StepDistributedDataParallel

# What concerns the whole model, and what a child has no use for.
_NOT_FOR_CHILDREN = ("detect_anomalous_params", "sync_batchnorm", "uneven_inputs")


@MODEL_WRAPPERS.register_module(
    name=["SeparateDistributedDataParallel", "MMSeparateDistributedDataParallel", "separate"]
)
class SeparateDistributedDataParallel(Steps, nn.Module):
    """Averages the gradients of each direct child of a model by itself, as a GAN needs it.

    Needs a process group, and every rank must construct it. Each child that has parameters to
    train is replaced by a ``StepDistributedDataParallel`` around it; the others are only moved to
    the model's device. The names of parameters and in state dicts remain those of the model.
    A model with a ``train_step(data, optim_wrapper)`` of its own is trained by it, and calls its
    children as ever (docs/wrappers.md has an example); any other model gets the usual step.

    All calls of a child since its last backward belong to its next one: with calls A and B, then
    backward of A, then of B, the gradients of B would stay apart; sum the losses, or run backward
    after each call. For accumulation enter ``optim_wrapper[name].optim_context(child)``, which
    skips what need not be sent. Where a backward passes through a child that is not to be trained
    by it, freeze that child meanwhile (``requires_grad_(False)``); its gradients are averaged
    otherwise, and must be cleared.

    Args:
        module: the model.
        broadcast_buffers: give all ranks the buffers of the first at each forward of a child.
        find_unused_parameters: for children of which a forward uses some parameters only.
        sync_batchnorm: as in ``StepDistributedDataParallel``.
        ddp_kwargs: further options of ``StepDistributedDataParallel``, for each child.

    Raises:
        ValueError: no process group, parameters of the model that belong to no child, or no child
            with parameters to train. The model is then as it was.
    """

    averages_ranks = True
    passed_on = [
        one.replace(kind=one.KEYWORD_ONLY)
        for one in StepDistributedDataParallel.config_signature().parameters.values()
        if one.name not in _NOT_FOR_CHILDREN
    ]

    def __init__(
        self,
        module: nn.Module,
        broadcast_buffers: bool = False,
        find_unused_parameters: bool = False,
        *,
        sync_batchnorm: bool | Mapping[str, Any] = False,
        **ddp_kwargs: Any,
    ) -> None:
        super().__init__()
        self.check_options(ddp_kwargs)
        check_children(module)
        group = ddp_kwargs.get("process_group")
        module = apply_sync_batchnorm(module, sync_batchnorm, group)
        ddp_kwargs["broadcast_buffers"] = broadcast_buffers
        ddp_kwargs["find_unused_parameters"] = find_unused_parameters
        device = device_of(module)
        # Also of the children that get no wrapper, since they are wholly frozen.
        thawed = ThawWatch(type(self).__name__, module, (), group)
        # A child may have several names.
        wrapped = {
            child: _Child(child, name, thawed, **ddp_kwargs)
            for name, child in module.named_children()
            if _is_trained(child)
        }
        # All or none: what fails above leaves the model alone.
        for name, child in list(module._modules.items()):
            if child in wrapped:
                setattr(module, name, wrapped[child])
            elif child is not None:
                child.to(device)
        self.module = module
        self.data_group = next(iter(wrapped.values())).data_group
        untyped: Any = module
        untyped.register_load_state_dict_pre_hook(_rename_versions)
        untyped.register_load_state_dict_post_hook(_rename_misfits)
        self._prepare_steps(False)
        self._model_steps = has_own_train_step(module)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model, whose children average their gradients."""
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of all children's forwards inside on their ranks."""
        with ExitStack() as stack:
            for child in self._wrapped():
                stack.enter_context(child.no_sync())
            yield

    def weigh_by(self, loss_weight: Any) -> None:
        """Learn what losses are means over; raises ValueError as the wrapper of a child does."""
        for child in self._wrapped():
            child.weigh_by(loss_weight)

    def _explain(self, error: BaseException, stage: str = "update") -> None:
        if stage == "forward":
            super()._explain(error, stage)
        for child in self._wrapped() if stage == "update" else ():
            child._explain(error)

    def _wrapped(self) -> list[_Child]:
        return [child for child in self.module.children() if isinstance(child, _Child)]

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Raise TypeError or ValueError for an option that this class does not take."""
        super().check_options(options)
        StepDistributedDataParallel.check_options(
            {k: v for k, v in options.items() if k not in _NOT_FOR_CHILDREN}
        )


class _Child(StepDistributedDataParallel):
    """One child; it adds nothing to the names of its parameters and buffers."""

    def __init__(self, module: nn.Module, name: str, thawed: ThawWatch, **options: Any) -> None:
        super().__init__(module, **options)
        self._thawed = thawed
        self._trainable = {at: f"{name}.{one}" for at, one in self._trainable.items()}
        untyped: Any = self
        untyped.register_load_state_dict_pre_hook(_rename_weights)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return super().forward(*inputs, **kwargs)
        # Nothing to average, and evaluation must not wait for other ranks' buffers.
        return self.module(*inputs, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)


def check_children(module: nn.Module) -> None:
    """Raise ValueError where a part of the training would belong to no child."""
    kind = type(module).__name__
    direct = [name for name, one in module.named_parameters(recurse=False) if one.requires_grad]
    if direct:
        raise ValueError(
            f"SeparateDistributedDataParallel averages the gradients of {kind}'s children, but "
            f"{', '.join(direct)} belongs to {kind} itself and would differ between the ranks: "
            "put it into a child module, freeze it, or use StepDistributedDataParallel"
        )
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)) and _is_trained(child):
            raise ValueError(
                f"{kind}.{name} is a {type(child).__name__}, which is never called itself, so its "
                "gradients could not be averaged: make it a module with a forward, or use "
                "StepDistributedDataParallel"
            )
    if not any(_is_trained(child) for child in module.children()):
        raise ValueError(
            f"{kind} has no child with parameters that require a gradient: there is nothing to "
            "average; use StepDistributedDataParallel"
        )


def _is_trained(child: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in child.parameters())


def _rename_weights(child: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Put the weights of a child where torch looks for those of a wrapped one."""
    inner = f"{prefix}module."
    for name in [name for name in state if name.startswith(prefix)]:
        state[inner + name[len(prefix) :]] = state.pop(name)


def _rename_misfits(module: nn.Module, misfits: Any) -> None:
    """Tell of missing and unexpected weights by the user's names."""
    wrapped = [name for name, child in module.named_children() if isinstance(child, _Child)]
    added = re.compile(rf"((?:^|\.)(?:{'|'.join(map(re.escape, wrapped))}))\.module\.")
    for names in (misfits.missing_keys, misfits.unexpected_keys):
        names[:] = [added.sub(r"\1.", name, count=1) for name in names]


def _rename_versions(module: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
    """Likewise the modules' version numbers, which torch keeps beside the weights."""
    versions = getattr(state, "_metadata", None)
    if versions is None:
        return
    for name, child in module.named_children():
        if isinstance(child, _Child):
            place = prefix + name
            for one in [one for one in versions if f"{one}.".startswith(f"{place}.")]:
                versions[f"{place}.module{one[len(place) :]}"] = versions[one]
