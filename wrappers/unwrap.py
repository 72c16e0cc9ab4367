"""Find the user's model inside wrappers, its names, and the ranks that share its data."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..collectives import get_world_size
from ..registry import MODEL_WRAPPERS, Registry
from .features import model_features

# The child module in which torch.compile keeps the original module.
_COMPILED = "_orig_mod"


def is_model_wrapper(model: nn.Module, registry: Registry = MODEL_WRAPPERS) -> bool:
    """Return whether the class of ``model`` is in ``registry`` or in one of its child registries.

    The submodules of ``model`` are not checked. With the default registry, torch's DataParallel and
    DistributedDataParallel count as wrappers too.
    """
    if registry is MODEL_WRAPPERS and isinstance(model, (DataParallel, DistributedDataParallel)):
        return True
    entries = [registry.get(name) for name in registry]
    if isinstance(model, tuple(entry for entry in entries if isinstance(entry, type))):
        return True
    return any(is_model_wrapper(model, child) for child in registry.children.values())


def is_module_wrapper(module: nn.Module, extra: Iterable[type[nn.Module]] = ()) -> bool:
    """Return whether ``module`` or a submodule is a DataParallel or DistributedDataParallel.

    Args:
        extra: other classes to count as wrappers, such as FullyShardedDataParallel.
    """
    wrappers = (DataParallel, DistributedDataParallel, *extra)
    return any(isinstance(submodule, wrappers) for submodule in module.modules())


def user_model(wrapper: nn.Module) -> nn.Module:
    """Return the model inside wrappers and ``torch.compile``; a bare model is returned as it is."""
    model = wrapper
    while True:
        inner = model._modules.get(_COMPILED)
        if inner is None and is_model_wrapper(model):
            inner = model._modules.get("module")
        if inner is None:
            return model
        model = inner


def plain_name(name: str) -> str:
    """Return the name of a weight or module without the parts added by ``torch.compile``."""
    return ".".join(component for component in name.split(".") if component != _COMPILED)


def num_data_ranks(model: nn.Module) -> int:
    """Return the number of ranks that see different batches."""
    group = model_features(model).data_group
    return get_world_size() if group is None else group.size()
