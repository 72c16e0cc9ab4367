"""The wrapper that averages the gradients of each direct child separately."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ...registry import MODEL_WRAPPERS
from ..batchnorm.conversion import apply_sync_batchnorm
from ..sharding.mesh import require_process_group, warn_of_gloo
from ..steps.plain_models import prepare_steps
from ..steps.preprocess import get_device
from ..steps.step import ModelWrapper
from .distributed import REPLACED, StepDistributedDataParallel
from .replica_checks import LayoutWatch, ThawWatch, check_same_model

# Options of the whole model, which children do not have.
_NOT_FOR_CHILDREN = ("detect_anomalous_params", "sync_batchnorm", "uneven_inputs")


@MODEL_WRAPPERS.register_module(
    name=["SeparateDistributedDataParallel", "MMSeparateDistributedDataParallel", "separate"]
)
class SeparateDistributedDataParallel(ModelWrapper, nn.Module):
    """A wrapper that averages the gradients of each direct child separately, for example of a GAN.

    Needs a process group, and every rank must construct it. Each child with trained parameters is
    wrapped in a ``StepDistributedDataParallel``; other children are only moved to the model's
    device. The names of parameters and of entries in state dicts do not change. If the model has
    its own ``train_step(data, optim_wrapper)``, the wrapper calls it, and the step calls the
    children as usual (docs/wrappers.md has an example). Other models get the default step.

    After several calls of a child, only the first backward averages its gradients: sum the losses
    for one backward, or run a backward after each call. For gradient accumulation, enter
    ``optim_wrapper[name].optim_context(child)``, which skips unnecessary communication. Gradients
    of a child that the last batch of a window does not use are averaged before the update; all
    ranks must use the same children. If a backward passes through a child that it should not train,
    freeze the child during this backward (``requires_grad_(False)``). Otherwise its gradients are
    averaged too, and you must clear them.

    Args:
        module: the model.
        broadcast_buffers: whether each forward with gradients first copies the first rank's
            buffers to all ranks.
        find_unused_parameters: set it if the forward of a child uses only some of its parameters.
        sync_batchnorm: as in ``StepDistributedDataParallel``.
        ddp_kwargs: other options of ``StepDistributedDataParallel``, for each child.

    Raises:
        TypeError: an option is unknown.
        ValueError: the process group is missing; a trained parameter belongs to the model itself;
            a child with trained parameters is a ``ModuleList`` or ``ModuleDict``; or no child has
            trained parameters. No child is wrapped then.
    """

    averages_ranks = True
    own_buffers = True
    passed_on = [
        parameter.replace(kind=parameter.KEYWORD_ONLY)
        for parameter in StepDistributedDataParallel.config_signature().parameters.values()
        if parameter.name not in _NOT_FOR_CHILDREN
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
        # Calls the check of this class, because a subclass may have other arguments.
        SeparateDistributedDataParallel.check_options(ddp_kwargs)
        require_process_group(type(self).__name__, REPLACED)
        check_children(module)
        group = ddp_kwargs.get("process_group")
        module = apply_sync_batchnorm(module, sync_batchnorm, group)
        check_same_model(module, type(self).__name__, group)
        ddp_kwargs["broadcast_buffers"] = broadcast_buffers
        ddp_kwargs["find_unused_parameters"] = find_unused_parameters
        device = get_device(module)
        warn_of_gloo(type(self).__name__, device, group)
        # Also watches frozen children, which get no wrapper.
        thawed = ThawWatch(type(self).__name__, module, (), group)
        # Keyed by child, because a child may have several names.
        wrapped = {
            child: _Child(child, name, thawed, **ddp_kwargs)
            for name, child in module.named_children()
            if _is_trained(child)
        }
        # The model is changed only after all wrappers have been created.
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
        prepare_steps(self)
        self._adopt_model_step()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model, whose children average their gradients."""
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Skip the averaging, in all children, in the backward of each forward in this context."""
        with ExitStack() as stack:
            for child in self._wrapped():
                stack.enter_context(child.no_sync())
            yield

    def keep_own_buffers(self) -> None:
        """Make the next forwards continue with the buffers of each rank, inside a window."""
        for child in self._wrapped():
            child.keep_own_buffers()

    def set_loss_weight(self, loss_weight: Any) -> None:
        """Accept gradients that are weighted by a ``LossWeight``.

        Raises:
            ValueError: as in ``StepDistributedDataParallel``.
        """
        for child in self._wrapped():
            child.set_loss_weight(loss_weight)

    def _explain_update(self, error: BaseException) -> None:
        for child in self._wrapped():
            child._explain_update(error)

    def _wrapped(self) -> list[_Child]:
        return [child for child in self.module.children() if isinstance(child, _Child)]

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Raise TypeError or ValueError for an option that this class does not accept."""
        super().check_options(options)
        shared = [parameter.name for parameter in SeparateDistributedDataParallel.passed_on]
        StepDistributedDataParallel.check_options(
            {name: value for name, value in options.items() if name in shared}
        )


class _Child(StepDistributedDataParallel):
    """The wrapper of one child; parameters and buffers keep the names that they have without it."""

    # The wrapper of the whole model logs what is logged at the start of training.
    _is_trained = True

    def __init__(self, module: nn.Module, name: str, thawed: ThawWatch, **options: Any) -> None:
        super().__init__(module, **options)
        self._thawed = thawed
        ignored, kind = self.parameters_to_ignore, SeparateDistributedDataParallel.__name__
        self._layout = LayoutWatch(kind, module, ignored, f"{name}.")
        self._trainable = {
            at: f"{name}.{trainable_name}" for at, trainable_name in self._trainable.items()
        }
        untyped: Any = self
        untyped.register_load_state_dict_pre_hook(_rename_weights)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return super().forward(*inputs, **kwargs)
        # DDP's forward may broadcast buffers, so it waits for all ranks. Evaluation must not wait.
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
    """Raise ValueError unless every trained parameter is in a child that can be wrapped."""
    kind = type(module).__name__
    direct = [name for name, param in module.named_parameters(recurse=False) if param.requires_grad]
    if direct:
        raise ValueError(
            f"SeparateDistributedDataParallel averages the gradients of {kind}'s children only, "
            f"but {', '.join(direct)} belongs to {kind} itself and would become different on each "
            "rank: put it into a child module, freeze it, or use StepDistributedDataParallel"
        )
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)) and _is_trained(child):
            raise ValueError(
                f"{kind}.{name} is a {type(child).__name__}, which has no forward, so its "
                "gradients could not be averaged: make it a module with a forward, or use "
                "StepDistributedDataParallel"
            )
    if not any(_is_trained(child) for child in module.children()):
        raise ValueError(
            f"{kind} has no child with parameters that require a gradient, so there is nothing to "
            "average: unfreeze a child before wrapping, or use SingleDevice"
        )


def _is_trained(child: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in child.parameters())


def _rename_weights(child: nn.Module, state: dict[str, Any], prefix: str, *load_args: Any) -> None:
    """Rename the weights of a child for loading into its wrapper."""
    inner = f"{prefix}module."
    for name in [name for name in state if name.startswith(prefix)]:
        state[inner + name[len(prefix) :]] = state.pop(name)


def _rename_misfits(module: nn.Module, misfits: Any) -> None:
    """Remove the wrappers from the names of missing and unexpected weights."""
    wrapped = [name for name, child in module.named_children() if isinstance(child, _Child)]
    added = re.compile(rf"((?:^|\.)(?:{'|'.join(map(re.escape, wrapped))}))\.module\.")
    for names in (misfits.missing_keys, misfits.unexpected_keys):
        names[:] = [added.sub(r"\1.", name, count=1) for name in names]


def _rename_versions(module: nn.Module, state: Any, prefix: str, *load_args: Any) -> None:
    """Copy each child's version numbers in a state dict to the names inside its wrapper."""
    versions = getattr(state, "_metadata", None)
    if versions is None:
        return
    for name, child in module.named_children():
        if isinstance(child, _Child):
            path = prefix + name
            for version_name in [
                version_name
                for version_name in versions
                if f"{version_name}.".startswith(f"{path}.")
            ]:
                versions[f"{path}.module{version_name[len(path) :]}"] = versions[version_name]
