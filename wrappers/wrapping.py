"""Put a wrapper around a model, and tell whether there is one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..registry import MODEL_WRAPPERS, Registry
from .distributed import StepDistributedDataParallel
from .options import option_names
from .single import SingleDevice
from .step import Steps


def is_model_wrapper(model: nn.Module, registry: Registry = MODEL_WRAPPERS) -> bool:
    """Whether ``model`` itself is a wrapper that ``registry`` or a child of it knows.

    Modules inside ``model`` do not count. torch's own DataParallel and
    DistributedDataParallel count for the registry MODEL_WRAPPERS.
    """
    if registry is MODEL_WRAPPERS and isinstance(model, (DataParallel, DistributedDataParallel)):
        return True
    known = [registry.get(name) for name in registry]
    if isinstance(model, tuple(one for one in known if isinstance(one, type))):
        return True
    return any(is_model_wrapper(model, child) for child in registry.children.values())


def is_module_wrapper(module: nn.Module, extra: Iterable[type[nn.Module]] = ()) -> bool:
    """Whether ``module`` or any module inside it is a DataParallel or DistributedDataParallel.

    Subclasses count; FullyShardedDataParallel and other wrappers count only when they are given.
    ``is_model_wrapper`` looks at the module itself alone.

    Args:
        extra: further classes that count as wrappers.
    """
    wrappers = (DataParallel, DistributedDataParallel, *extra)
    return any(isinstance(one, wrappers) for one in module.modules())


def wrap_model(
    wrapper: type[nn.Module] | None,
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    **options: Any,
) -> nn.Module:
    """Wrap ``model`` for this process, or for the group of processes when there is one.

    Every rank must call this. The options are checked in both cases.

    Args:
        wrapper: a wrapper class; default: StepDistributedDataParallel in a process group,
            SingleDevice without one. Without a group, SingleDevice stands in for
            StepDistributedDataParallel.
        model: the model, or a wrapped model, which comes back as it is.
        device: where to move the model first; default: it stays.
        options: arguments of the wrapper.

    Raises:
        TypeError: the model is wrapped already and a wrapper or options are given, or the
            wrapper has no such argument.
        RuntimeError: a wrapper with a step of its own needs a process group, and there is none.
    """
    if is_model_wrapper(model):
        if wrapper is not None or options:
            raise TypeError(
                f"the model is already wrapped in {type(model).__name__}: give the bare model, "
                "or no wrapper and no wrapper options"
            )
        if not isinstance(model, Steps) and not hasattr(model, "train_step"):
            raise TypeError(
                f"{type(model).__name__} has no train_step: give the bare model, it is wrapped here"
            )
        return model
    if device is not None:
        model = model.to(device)
    grouped = distributed.is_available() and distributed.is_initialized()
    if wrapper is None:
        wrapper = StepDistributedDataParallel if grouped else SingleDevice
    if not grouped and issubclass(wrapper, StepDistributedDataParallel):
        return _without_group(wrapper, model, options)
    return wrapper(model, **options)


def _without_group(
    wrapper: type[StepDistributedDataParallel], model: nn.Module, options: dict[str, Any]
) -> SingleDevice:
    wrapper.check_options(options)
    if wrapper.train_step is not Steps.train_step:
        raise RuntimeError(
            f"{wrapper.__name__} has a train_step of its own and needs a process group; start "
            "several processes, or write the step as a subclass of SingleDevice"
        )
    known = option_names(SingleDevice)
    return SingleDevice(model, **{name: options[name] for name in options if name in known})
