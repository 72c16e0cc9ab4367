"""The state of an optimizer in a form that loads under any other kind of parallelism: that of
torch's own optimizer over whole tensors, whose parts are ``DTensor``s when saved.

``ZeroRedundancyOptimizer`` and ``PostLocalSGDOptimizer`` count as the optimizer inside them, and
are told by what they have, since importing them costs half a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..sharding.layout import (
    as_global,
    has_placed,
    is_dtensor,
    is_placed,
    layout_of,
    parameters_of,
    take_part,
)
from .optimizer_fit import IMPLEMENTATIONS


def kind_of(optimizer: Optimizer) -> str:
    """Return the name of the optimizer's class, or of that inside it."""
    return type(_inner(optimizer)).__name__


def is_spread(optimizer: Optimizer) -> bool:
    """Whether no rank alone can tell the whole state of ``optimizer``."""
    if _is_zero(optimizer):
        return True
    return any(layout_of(p).sharded_over for p in parameters_of(optimizer) if is_placed(p))


def state_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state, parts of tensors as ``DTensor``s.

    Every rank must call this for ``ZeroRedundancyOptimizer``; the first of its group gets the
    state, the others the settings alone.
    """
    state = dict(_consolidated(optimizer) if _is_zero(optimizer) else optimizer.state_dict())
    if has_placed(optimizer):
        by_key = dict(enumerate(parameters_of(optimizer)))
        state["state"] = {
            key: _spread(values, by_key[key]) if key in by_key else values
            for key, values in state["state"].items()
        }
    return state


def load_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load what `state_of` returned under any kind of parallelism; ValueError for another model's.

    Whole tensors, and what can be cut like them, may stand where this optimizer has parts.
    """
    state = dict(state)
    groups = state["param_groups"]
    pairs = zip(groups, optimizer.param_groups, strict=False)
    state["param_groups"] = [
        # Another device or sharding may not have the implementation that was saved.
        {**saved, **{name: own[name] for name in IMPLEMENTATIONS if name in saved and name in own}}
        for saved, own in pairs
    ] + list(groups[len(optimizer.param_groups) :])
    keys = chain.from_iterable(group["params"] for group in groups)
    owners = dict(zip(keys, parameters_of(optimizer), strict=False))
    mine = {id(p) for p in parameters_of(_inner(optimizer))}
    state["state"] = {
        key: _fitted(values, owners[key]) if key in owners else values
        for key, values in state["state"].items()
        if key not in owners or id(owners[key]) in mine
    }
    if hasattr(optimizer, "averager"):
        # It warns of states that were saved without it.
        state.setdefault("step", optimizer.averager.step)
    optimizer.load_state_dict(state)


def _is_zero(optimizer: Optimizer) -> bool:
    return hasattr(optimizer, "consolidate_state_dict")


def _inner(optimizer: Any) -> Any:
    wraps = _is_zero(optimizer) or hasattr(optimizer, "averager")
    return optimizer.optim if wraps else optimizer


def _consolidated(optimizer: Any) -> dict[str, Any]:
    optimizer.consolidate_state_dict(to=0)
    if optimizer.rank != 0:
        return {"state": {}, "param_groups": Optimizer.state_dict(optimizer)["param_groups"]}
    state: dict[str, Any] = optimizer.state_dict()
    # It would keep this copy of the state of all ranks until the next time.
    optimizer._all_state_dicts = []
    return state


def _spread(values: Any, owner: Tensor) -> Any:
    if not isinstance(values, Mapping):
        return values
    sizes = layout_of(owner).sizes
    return {
        name: as_global(value, owner)
        if isinstance(value, Tensor) and value.ndim and tuple(value.shape) == sizes
        else value
        for name, value in values.items()
    }


def _fitted(value: Any, owner: Tensor) -> Any:
    """The state of one parameter, cut to this rank's part of it."""
    if isinstance(value, Mapping):
        return {name: _fitted(one, owner) for name, one in value.items()}
    if isinstance(value, list):
        # Vectors of all parameters, as LBFGS has them.
        return [_fitted(one, owner) for one in value]
    if not hasattr(value, "shape") or (isinstance(value, Tensor) and not is_placed(owner)):
        return value.full_tensor() if is_dtensor(value) else value
    if len(value.shape) and tuple(value.shape) == layout_of(owner).shape:
        return take_part(value, owner)
    value = value if isinstance(value, Tensor) else value[...]
    if is_dtensor(owner) and value.ndim and not is_dtensor(value):
        # Of another shape than the parameter, as Adafactor's rows: every rank has all of it.
        from torch.distributed.tensor import DTensor, Replicate

        everywhere = [Replicate()] * owner.device_mesh.ndim
        return DTensor.from_local(value, owner.device_mesh, everywhere, run_check=False)
    return value
