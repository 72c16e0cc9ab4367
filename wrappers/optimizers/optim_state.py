"""Save and load optimizer state, which can be loaded under any other kind of parallelism.

The state has the format of torch's ``Optimizer.state_dict()``. It contains whole tensors, and
``DTensor``s if each rank holds only a part. For ``ZeroRedundancyOptimizer`` and
``PostLocalSGDOptimizer`` it is the state of their inner optimizer. These two are recognised by
their attributes, because importing their classes takes half a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..sharding.layout import (
    as_global,
    has_placed_parameters,
    is_dtensor,
    is_dtensor_or_localised,
    layout_of,
    parameters_of,
    take_part,
)
from .optimizer_fit import IMPLEMENTATIONS, align_fused_state


def kind_of(optimizer: Optimizer) -> str:
    """Return the class name of the optimizer, or of its inner optimizer if it has one."""
    return type(_inner(optimizer)).__name__


def has_sharded_state(optimizer: Optimizer) -> bool:
    """Return whether the state of ``optimizer`` is sharded over ranks."""
    if _is_zero_redundancy(optimizer):
        return True
    return any(
        layout_of(p).sharded_over for p in parameters_of(optimizer) if is_dtensor_or_localised(p)
    )


def state_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state, with parts of tensors as ``DTensor``s.

    With ``ZeroRedundancyOptimizer`` every rank must call this. Only the first rank of its process
    group gets the state of the parameters; the others get only the settings of parameter groups.
    """
    state = dict(
        _consolidated(optimizer) if _is_zero_redundancy(optimizer) else optimizer.state_dict()
    )
    if has_placed_parameters(optimizer):
        owners = dict(enumerate(parameters_of(optimizer)))
        state["state"] = {
            key: _as_dtensors(values, owners[key]) if key in owners else values
            for key, values in state["state"].items()
        }
    return state


def load_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state that ``state_of`` returned under any kind of parallelism.

    Each tensor in the state is a ``DTensor``, a whole tensor, or an object with the ``shape`` of
    the whole tensor that can be sliced like it.

    Raises:
        ValueError: the state belongs to another model.
    """
    state = dict(state)
    groups = state["param_groups"]
    pairs = zip(groups, optimizer.param_groups, strict=False)
    state["param_groups"] = [
        # Keeps this optimizer's implementation ("fused", "foreach"): the saved one may not support
        # this device or sharding.
        {**saved, **{name: own[name] for name in IMPLEMENTATIONS if name in saved and name in own}}
        for saved, own in pairs
    ] + list(groups[len(optimizer.param_groups) :])
    keys = chain.from_iterable(group["params"] for group in groups)
    owners = dict(zip(keys, parameters_of(optimizer), strict=False))
    local = {id(p) for p in parameters_of(_inner(optimizer))}
    state["state"] = {
        key: _local_part_of(values, owners[key]) if key in owners else values
        for key, values in state["state"].items()
        if key not in owners or id(owners[key]) in local
    }
    if hasattr(optimizer, "averager"):
        # PostLocalSGDOptimizer warns if the state has no step.
        state.setdefault("step", optimizer.averager.step)
    optimizer.load_state_dict(state)
    align_fused_state(_inner(optimizer))


def _is_zero_redundancy(optimizer: Optimizer) -> bool:
    return hasattr(optimizer, "consolidate_state_dict")


def _inner(optimizer: Any) -> Any:
    wraps = _is_zero_redundancy(optimizer) or hasattr(optimizer, "averager")
    return optimizer.optim if wraps else optimizer


def _consolidated(optimizer: Any) -> dict[str, Any]:
    optimizer.consolidate_state_dict(to=0)
    if optimizer.rank != 0:
        return {"state": {}, "param_groups": Optimizer.state_dict(optimizer)["param_groups"]}
    state: dict[str, Any] = optimizer.state_dict()
    # Frees the copy of all ranks' state, which the optimizer would keep until the next call.
    optimizer._all_state_dicts = []
    return state


def _as_dtensors(values: Any, owner: Tensor) -> Any:
    if not isinstance(values, Mapping):
        return values
    sizes = layout_of(owner).sizes
    return {
        name: as_global(value, owner)
        if isinstance(value, Tensor) and value.ndim and tuple(value.shape) == sizes
        else value
        for name, value in values.items()
    }


def _local_part_of(value: Any, owner: Tensor) -> Any:
    """Return this rank's part of the state of a parameter."""
    if isinstance(value, Mapping):
        return {name: _local_part_of(one, owner) for name, one in value.items()}
    if isinstance(value, list):
        # LBFGS keeps lists of vectors of all parameters.
        return [_local_part_of(one, owner) for one in value]
    if not hasattr(value, "shape") or (
        isinstance(value, Tensor) and not is_dtensor_or_localised(owner)
    ):
        return value.full_tensor() if is_dtensor(value) else value
    if len(value.shape) and tuple(value.shape) == layout_of(owner).shape:
        return take_part(value, owner)
    value = value if isinstance(value, Tensor) else value[...]
    if is_dtensor(owner) and value.ndim and not is_dtensor(value):
        # State with another shape than the parameter, such as Adafactor's rows, is not sharded.
        from torch.distributed.tensor import DTensor, Replicate

        everywhere = [Replicate()] * owner.device_mesh.ndim
        return DTensor.from_local(value, owner.device_mesh, everywhere, run_check=False)
    return value
